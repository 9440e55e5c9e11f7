package client

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/protocol"
)

// TestSpin: calls look for answers as long as they come in time.
func TestSpin(t *testing.T) {
	var now int64
	s := NewSpin(100)
	done := make(chan struct{}, 1)
	looks, answer := 0, 0 // by which look it is there
	clock := func() int64 {
		now += 10
		if looks++; looks == answer {
			done <- struct{}{}
		}
		return now
	}
	ask := func(comes int) int {
		looks, answer = 0, comes
		spin(WithSpin(t.Context(), s), done, func() {}, clock)
		select {
		case <-done:
		default:
		}
		return looks
	}
	spin(t.Context(), done, func() {}, clock)
	require.Zero(t, looks, "nobody has asked for it")
	if oneProc {
		t.Skip("there is one processor")
	}
	require.Equal(t, 5, ask(5))
	require.Equal(t, 7, ask(7))
	for _, rest := range []int{0, 1, 3, 7, 15, 31, 63, 63} {
		require.Equal(t, 12, ask(0), "for so long and no longer")
		for range rest {
			require.Zero(t, ask(0))
		}
	}
	require.Equal(t, 3, ask(3))
	require.Equal(t, 12, ask(0))
	require.Equal(t, 4, ask(4), "one that was late says little")
	s.busy.Store(true)
	require.Zero(t, ask(4), "another one is looking")
}

// TestWithSpin: calls that look for their answers have them, whether these come in that time or later.
func TestWithSpin(t *testing.T) {
	c, theirs := startPair(t, cxl.Boottime, func(*conn, protocol.Type, []byte) {})
	go func() {
		r := protocol.NewReader(theirs)
		for i := 0; ; i++ {
			h, _, err := r.Next()
			if err != nil {
				return
			}
			if i%4 == 3 {
				time.Sleep(3 * time.Millisecond)
			}
			b, mark := protocol.BeginReply(nil, h)
			_, _ = theirs.Write(protocol.EndFrame((&protocol.SuccessReply{Success: true}).Append(b), mark))
		}
	}()
	ctx := WithSpin(t.Context(), NewSpin(time.Millisecond))
	for range 4 * spinRest {
		cl := newCall(protocol.TypeHeartbeat, new(emptyMsg), time.Minute.Nanoseconds())
		sent, err := c.do(ctx, cl)
		require.True(t, sent)
		require.NoError(t, err)
		require.NotEmpty(t, cl.buf)
		require.Empty(t, cl.done)
		freeCall(cl)
	}
}

// TestACallerReadsForOthers: what a caller finds that looks for its answer goes to whom it concerns, and an end of the connection
// that it comes upon ends everybody's calls.
func TestACallerReadsForOthers(t *testing.T) {
	if oneProc {
		t.Skip("there is one processor, on which nobody looks")
	}
	pushes := make(chan protocol.Type, 100)
	c, theirs := startPair(t, cxl.Boottime, func(_ *conn, typ protocol.Type, _ []byte) { pushes <- typ })
	const rounds = 100
	frame := func(h protocol.Header) []byte {
		b, mark := protocol.BeginReply(nil, h)
		return protocol.EndFrame((&protocol.SuccessReply{Success: true}).Append(b), mark)
	}
	go func() {
		r := protocol.NewReader(theirs)
		for range rounds {
			first, _, err := r.Next()
			if err != nil {
				return
			}
			second, _, err := r.Next()
			if err != nil {
				return
			}
			push, mark := protocol.BeginFrame(nil, protocol.TypeRevoke, 0)
			_, _ = theirs.Write(slices.Concat(frame(second), protocol.EndFrame(push, mark), frame(first)))
		}
		_, _, _ = r.Next()
		_ = theirs.Close()
	}()
	ask := func(ctx context.Context) error {
		cl := newCall(protocol.TypeHeartbeat, new(emptyMsg), time.Minute.Nanoseconds())
		_, err := c.do(ctx, cl)
		return err
	}
	looking := WithSpin(t.Context(), NewSpin(time.Second))
	for range rounds {
		other := make(chan error, 1)
		go func() { other <- ask(t.Context()) }()
		require.NoError(t, ask(looking))
		require.NoError(t, <-other)
		require.Equal(t, protocol.TypeRevoke, <-pushes)
	}
	require.ErrorIs(t, ask(looking), errConnLost)
	<-c.done
	require.ErrorIs(t, ask(looking), errConnLost)
}
