//go:build cgo

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
)

// packKeys packs keys as callers do.
func packKeys(keys ...string) []byte {
	var lengths, all []byte
	for _, k := range keys {
		lengths = binary.LittleEndian.AppendUint32(lengths, uint32(len(k)))
		all = append(all, k...)
	}
	return append(lengths, all...)
}

func TestUnpackKeys(t *testing.T) {
	for _, want := range [][]string{{}, {"a"}, {"", "b"}, {"one", "two", "three"}} {
		keys, err := unpackKeys(packKeys(want...), len(want))
		require.NoError(t, err)
		require.Len(t, keys, len(want))
		for i, k := range keys {
			require.Equal(t, want[i], string(k))
			require.Equal(t, len(k), cap(k), "appending to one key leaves the next alone")
		}
	}
	for name, c := range map[string]struct {
		packed []byte
		n      int
	}{
		"too few lengths":      {packKeys("a"), 9},
		"a key that is cut":    {packKeys("abc")[:6], 1},
		"a length beyond":      {[]byte{255, 255, 255, 255}, 1},
		"bytes that are left":  {append(packKeys("a"), 'x'), 1},
		"more keys than bytes": {nil, 1 << 30},
	} {
		_, err := unpackKeys(c.packed, c.n)
		require.Equal(t, codeInvalid, codeOf(err), name)
	}
}

func TestUnpackNumbers(t *testing.T) {
	got, err := unpackNumbers(binary.LittleEndian.AppendUint64(nil, 7), 1)
	require.NoError(t, err)
	require.Equal(t, []uint64{7}, got)
	_, err = unpackNumbers(make([]byte, 9), 1)
	require.Equal(t, codeInvalid, codeOf(err))
}

func FuzzUnpackKeys(f *testing.F) {
	f.Add(packKeys("a", "", "long"), 3)
	f.Add([]byte{255, 255, 255, 255, 0}, 1)
	f.Add([]byte{}, 0)
	f.Fuzz(func(t *testing.T, packed []byte, n int) {
		if n < 0 || n > maxCallItems {
			return // newCall refuses them
		}
		keys, err := unpackKeys(packed, n)
		if err != nil {
			return
		}
		texts := make([]string, len(keys))
		for i := range keys {
			texts[i] = string(keys[i])
		}
		require.Equal(t, string(packed), string(packKeys(texts...)))
	})
}

func TestCodesOfClients(t *testing.T) {
	for _, c := range []struct {
		err  error
		want code
	}{
		{client.ErrClosed, codeClosed},
		{&client.Error{Code: protocol.CodeNoSpace}, codeWire + code(protocol.CodeNoSpace)},
		{fmt.Errorf("wrapped: %w", &client.Error{Code: protocol.CodeTimeout}), codeWire + code(protocol.CodeTimeout)},
		{&client.Error{Code: protocol.CodeTimeout, Err: client.ErrLease}, codeLease},
		{&client.Error{Code: protocol.CodeTimeout, Err: context.Canceled}, codeCanceled},
		{&client.Error{Code: protocol.CodeBadRequest, Err: invalid("a buffer")}, codeInvalid},
		{errors.New("else"), codeFailed},
	} {
		require.Equal(t, c.want, codeOf(c.err), "%v", c.err)
	}
}

func TestEventsAreBounded(t *testing.T) {
	v := &events{ready: make(chan struct{}, 1), over: make(chan struct{})}
	for i := range uint64(maxEvents + 5) {
		v.add(client.Revoked{Region: i, Bytes: 1, Reason: client.ErrSessionExpired})
	}
	list, err := v.next(t.Context())
	require.NoError(t, err)
	require.Len(t, list, maxEvents)
	require.Equal(t, revoked{Region: 5, Bytes: 1, Reason: "session expired"}, list[0])

	close(v.over)
	_, err = v.next(t.Context())
	require.ErrorIs(t, err, client.ErrClosed)
}
