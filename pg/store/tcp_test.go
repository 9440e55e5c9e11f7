package store_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/pg/store"
)

func serve(tb testing.TB, addr string) *store.Server {
	tb.Helper()
	s, err := store.Serve(addr)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s
}

func TestAServerThatIsGone(t *testing.T) {
	t.Parallel()
	v := serve(t, "127.0.0.1:0")
	b := &backend{lease: 400 * time.Millisecond}
	s := b.open(t, "tcp://"+v.Addr())
	_, err := s.Put(t.Context(), "old", nil)
	require.NoError(t, err)
	first, err := s.Put(t.Context(), "both", nil)
	require.NoError(t, err)
	w := watch(t, s, "")
	w.sees(t, s, "", time.Second)
	lost := s.Lost()
	require.NoError(t, v.Close())
	<-lost

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Get(ctx, "both")
	var gone *store.UnavailableError
	require.ErrorAs(t, err, &gone)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, "tcp://"+v.Addr(), gone.Where)
	require.ErrorContains(t, err, v.Addr())
	require.Eventually(t, func() bool { return s.Confirmed() > b.lease }, 5*time.Second, time.Millisecond)
	_, err = store.Dial(ctx, v.Addr(), 0)
	require.ErrorAs(t, err, &gone)

	serve(t, v.Addr()) // empty
	again, err := s.Put(t.Context(), "both", nil, store.IfAbsent(), store.Leased())
	require.NoError(t, err)
	require.Greater(t, again.Modified, first.Modified, "revisions go on")
	w.sees(t, s, "", 5*time.Second)
	require.Equal(t, 1, w.count())
	require.Less(t, s.Confirmed(), b.lease)
}

// A process that starts before the server waits for it.
func TestDialWaitsForTheServer(t *testing.T) {
	t.Parallel()
	v := serve(t, "127.0.0.1:0")
	addr := v.Addr()
	require.NoError(t, v.Close())
	dialed := make(chan error)
	go func() {
		s, err := store.Dial(t.Context(), addr, 0)
		if err == nil {
			err = s.Close()
		}
		dialed <- err
	}()
	time.Sleep(50 * time.Millisecond)
	serve(t, addr)
	require.NoError(t, <-dialed)
}

// What is no client costs the server a connection, and nobody else anything.
func TestServersAndStrangers(t *testing.T) {
	t.Parallel()
	v := serve(t, "127.0.0.1:0")
	s := (&backend{}).open(t, "tcp://"+v.Addr())
	frame := func(fields map[string]any) string {
		body, err := msgpack.Marshal(fields)
		require.NoError(t, err)
		return string(binary.LittleEndian.AppendUint32(nil, uint32(len(body)))) + string(body)
	}
	type m = map[string]any
	hello := frame(m{"id": 1, "op": "hello", "version": 1, "lease_ms": 300, "unknown": m{"of a later release": []int{1}}})
	for _, tc := range []struct{ name, sends, want string }{
		{"no frame", "GET / HTTP/1.1\r\n\r\n", ""},
		{"a frame too long", "\xff\xff\xff\xff", ""},
		{"no msgpack", "\x01\x00\x00\x00\xc1", ""},
		{"half a frame", hello + frame(m{"id": 2})[:6], "id"},
		{"no hello", frame(m{"id": 1, "op": "get", "key": "k"}), "no hello before"},
		{"another version", frame(m{"id": 1, "op": "hello", "version": 9, "lease_ms": 300}), "use one release"},
		{"a lease too short", frame(m{"id": 1, "op": "hello", "version": 1, "lease_ms": 1}), "a lease of 1ms"},
		{"a second hello", hello + hello, "a second hello"},
		{"an unknown request", hello + frame(m{"id": 2, "op": "velcro"}), "no such request"},
		{"a bad key", hello + frame(m{"id": 2, "op": "put", "key": ""}), "is empty"},
		{"nothing for a lease", hello, "id"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, err := net.Dial("tcp", v.Addr())
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close()) }()
			require.NoError(t, c.SetDeadline(time.Now().Add(4*time.Second)))
			_, err = io.WriteString(c, tc.sends)
			require.NoError(t, err)
			got, err := io.ReadAll(c)
			if err != nil {
				require.ErrorIs(t, err, io.EOF, "the server hangs up")
			}
			require.Contains(t, string(got), tc.want)
		})
	}
	_, err := s.Put(t.Context(), "k", nil)
	require.NoError(t, err)
}

func TestServersBoundWatches(t *testing.T) {
	t.Parallel()
	v := serve(t, "127.0.0.1:0")
	s := (&backend{}).open(t, "tcp://"+v.Addr())
	for range 64 {
		watch(t, s, "k").sees(t, s, "k", time.Second)
	}
	err := s.Watch(t.Context(), "k", func([]store.Change) error { return nil })
	require.ErrorIs(t, err, store.ErrLimit)
}

// Stores that are full say so, and take what makes them smaller.
func TestStoresAreBounded(t *testing.T) {
	t.Parallel()
	for _, b := range backends(t)[1:] {
		t.Run(b.name, func(t *testing.T) {
			s := b.open(t, b.fresh(t))
			var err error
			n := 0
			for ; err == nil; n++ {
				_, err = s.Put(t.Context(), fmt.Sprintf("%04d", n), make([]byte, store.MaxValueBytes))
			}
			require.ErrorIs(t, err, store.ErrLimit)
			require.Equal(t, store.MaxBytes/(store.MaxValueBytes+4)+1, n)
			list, _, err := s.List(t.Context(), "")
			require.NoError(t, err)
			require.Len(t, list, n-1, "a list of many pages")
			watch(t, s, "").sees(t, s, "", 5*time.Second)
			_, err = s.Put(t.Context(), "0000", nil)
			require.NoError(t, err)
			require.NoError(t, s.Delete(t.Context(), "0001"))
			_, err = s.Put(t.Context(), "new", make([]byte, store.MaxValueBytes))
			require.NoError(t, err)
		})
	}
}
