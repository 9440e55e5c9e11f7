package rm

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReplyMemory(t *testing.T) {
	var now time.Duration
	calls := 0
	r := newReplies(func() time.Duration { return now })
	ask := func(client string, id uint64, payload string, keep bool) byte {
		return r.answer(t.Context(), replyKey{client, id}, []byte(payload), func() ([]byte, bool) {
			calls++
			return []byte{byte(calls)}, keep
		})[0]
	}

	require.EqualValues(t, 1, ask("a:1", 7, "x", true))
	require.EqualValues(t, 1, ask("a:1", 7, "x", true), "a repeat is answered as before")
	require.EqualValues(t, 2, ask("b:1", 7, "x", true), "another client's number is its own")
	require.EqualValues(t, 3, ask("a:1", 0, "x", true))
	require.EqualValues(t, 4, ask("a:1", 0, "x", true), "number 0 is never a repeat")
	require.EqualValues(t, 5, ask("a:1", 8, "x", false))
	require.EqualValues(t, 6, ask("a:1", 8, "x", true), "what is not kept is asked for again")
	require.EqualValues(t, 7, ask("a:1", 7, "y", true), "other bytes are another process with the same name")
	require.EqualValues(t, 7, ask("a:1", 7, "y", true))

	now += replyTime - 1
	require.EqualValues(t, 7, ask("a:1", 7, "y", true))
	now++
	require.EqualValues(t, 8, ask("a:1", 7, "y", true), "its time is over")
}

func TestReplyBound(t *testing.T) {
	r := newReplies(func() time.Duration { return 0 })
	ask := func(id uint64) (asked bool) {
		r.answer(t.Context(), replyKey{"a:1", id}, nil, func() ([]byte, bool) {
			asked = true
			return []byte{1}, true
		})
		return asked
	}
	for id := range uint64(3 * maxReplies) {
		require.True(t, ask(id+1))
	}
	require.Len(t, r.order, maxReplies)
	require.Len(t, r.known, maxReplies)
	require.False(t, ask(2*maxReplies+1), "the oldest that is remembered")
	require.True(t, ask(2*maxReplies), "the newest that is not")
}

// A client whose connection breaks asks again while the first request may still be carried out.
func TestRepeatWaitsForTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReplies(sinceStart())
		slow := func() ([]byte, bool) {
			time.Sleep(5 * time.Second)
			return []byte("done"), true
		}
		go r.answer(t.Context(), replyKey{"a:1", 1}, nil, slow)
		synctest.Wait()
		never := func() ([]byte, bool) { panic("a repeat is not carried out") }

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Equal(t, errorFrame(errUnavailable), r.answer(ctx, replyKey{"a:1", 1}, nil, never), "it waits within its own time")
		require.Equal(t, []byte("done"), r.answer(t.Context(), replyKey{"a:1", 1}, nil, never))
	})
}
