package client

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

func TestClearsAreHeardOf(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	heard, next := make(chan Cleared), make(chan struct{})
	c := f.open(t, func(cfg *Config) {
		cfg.OnClear = func(x Cleared) {
			heard <- x
			<-next
		}
	})
	context := &PrefixContext{Model: "m", BlockSize: 16}
	tell := func(p protocol.ClearedPush) {
		f.do(func() { f.sessions[c.sess.Load().id].push(protocol.TypeCleared, p.Append(nil)) })
	}
	for name, tc := range map[string]struct {
		push protocol.ClearedPush
		want Cleared
	}{
		"all":         {protocol.ClearedPush{Index: 1, All: true}, Cleared{Index: 1, All: true}},
		"prefix":      {protocol.ClearedPush{Index: 2, Prefix: []byte("p/")}, Cleared{Index: 2, Prefix: []byte("p/")}},
		"context":     {protocol.ClearedPush{Index: 3, Context: context}, Cleared{Index: 3, Context: context}},
		"any context": {protocol.ClearedPush{Index: 4, Context: new(PrefixContext)}, Cleared{Index: 4, Context: new(PrefixContext)}},
		"unknown":     {protocol.ClearedPush{Index: 5}, Cleared{Index: 5, All: true}},
	} {
		t.Run(name, func(t *testing.T) {
			tell(tc.push)
			got := <-heard
			put(t, c, name, 4096) // its replies come over the memory that the push lay in, while the callback has not returned
			requireValue(t, c, name, 4096)
			require.Equal(t, tc.want, got)
			next <- struct{}{}
		})
	}
}

// TestClearedThatDoesNotDecodeIsPassedOver: it is news and no more, and every client of the tenant gets the same one.
func TestClearedThatDoesNotDecodeIsPassedOver(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	heard := make(chan Cleared, 8)
	c := f.open(t, func(cfg *Config) { cfg.OnClear = func(x Cleared) { heard <- x } })
	long := protocol.ClearedPush{Index: 1, Context: &PrefixContext{Model: strings.Repeat("m", protocol.MaxNameBytes+1)}}
	next := protocol.ClearedPush{Index: 2, All: true}
	f.do(func() {
		s := f.sessions[c.sess.Load().id]
		for _, b := range [][]byte{{0x80}, long.Append(nil), next.Append(nil)} {
			s.push(protocol.TypeCleared, b)
		}
	})
	require.Equal(t, Cleared{Index: 2, All: true}, <-heard)
	put(t, c, "a", 4096)
	require.Equal(t, 1, f.count(protocol.TypeHandshake), "the connection goes on")
	require.Empty(t, heard)
}

// TestClearedIsPassedOverWithoutACallback: nothing else of a client depends on it.
func TestClearedIsPassedOverWithoutACallback(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	f.do(func() {
		f.sessions[c.sess.Load().id].push(protocol.TypeCleared, (&protocol.ClearedPush{Index: 1, All: true}).Append(nil))
	})
	put(t, c, "a", 4096)
	requireValue(t, c, "a", 4096)
}
