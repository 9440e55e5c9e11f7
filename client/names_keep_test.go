package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// namesOf has a fake take names. What is put comes over the channel.
func namesOf(f *fake) (put, dropped chan string, revision *uint64) {
	put, dropped, revision = make(chan string, 10), make(chan string, 10), new(uint64)
	f.answers = map[protocol.Type]func(p []byte) []byte{
		protocol.TypePutName: func(p []byte) []byte {
			var req protocol.PutNameRequest
			if err := req.Decode(p); err != nil || !req.Lease {
				panic("not a leased name")
			}
			put <- string(req.Key) + "=" + string(req.Value)
			*revision++
			return (&protocol.NameReply{Success: true, Created: 1, Modified: *revision}).Append(nil)
		},
		protocol.TypeDeleteName: func(p []byte) []byte {
			var req protocol.DeleteNameRequest
			if err := req.Decode(p); err != nil || !req.Check || req.Revision != *revision {
				return (&protocol.NameReply{Error: protocol.Error{Code: protocol.CodeConflict}}).Append(nil)
			}
			dropped <- string(req.Key)
			return (&protocol.NameReply{Success: true}).Append(nil)
		},
	}
	return put, dropped, revision
}

// A kept name is there again when the session is another one, until it is dropped.
func TestKeptNamesOutliveSessions(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	put, dropped, revision := namesOf(f)
	c := f.open(t, nil)
	k, err := c.KeepName(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	require.Equal(t, "k=v", <-put)
	require.NoError(t, k.Set(t.Context(), []byte("w")))
	require.Equal(t, "k=w", <-put)
	lose := func() {
		old := c.sess.Load()
		f.do(func() { f.sessions[old.id].ended = true })
		_, _ = c.Exists(t.Context(), []byte("x")) // notices
		require.Eventually(t, func() bool { return c.sess.Load() != old }, 30*time.Second, time.Millisecond)
	}
	lose()
	require.Equal(t, "k=w", <-put)
	require.NoError(t, k.Drop(t.Context()))
	require.Equal(t, "k", <-dropped)
	require.NoError(t, k.Drop(t.Context()))
	require.ErrorIs(t, k.Set(t.Context(), nil), ErrNotFound)
	lose()
	time.Sleep(50 * time.Millisecond)
	require.Empty(t, put)

	k, err = c.KeepName(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	<-put
	f.do(func() { *revision++ }) // somebody else has it
	require.NoError(t, k.Drop(t.Context()))
	require.Empty(t, dropped)
}
