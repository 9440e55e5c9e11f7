package client

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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
	c, theirs := startPair(t, cxl.Boottime, func(*conn, protocol.Type, []byte) error { return nil })
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
	c, theirs := startPair(t, cxl.Boottime, func(_ *conn, typ protocol.Type, _ []byte) error {
		pushes <- typ
		return nil
	})
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

// TestLookersAndTheEndOfAConnection: what ends a connection may be found by a caller that looks, while its goroutine has woken up for the
// same. Everybody's calls end then, at once.
func TestLookersAndTheEndOfAConnection(t *testing.T) {
	if oneProc {
		t.Skip("there is one processor, on which nobody looks")
	}
	push, mark := protocol.BeginFrame(nil, protocol.TypeFreed, 0)
	push = protocol.EndFrame(push, mark)
	ack := func(c *conn, _ protocol.Type, _ []byte) error {
		c.post(protocol.TypeFreedAck, &freedAckMsg{ID: 1})
		return nil
	}
	for name, x := range map[string]struct {
		onPush func(*conn, protocol.Type, []byte) error
		comes  []byte
		dies   bool
	}{
		"a push that cannot be acknowledged": {ack, push, true},
		"a push that does not decode":        {func(*conn, protocol.Type, []byte) error { return ErrClosed }, push, false},
		"bytes that are no frame":            {ack, bytes.Repeat([]byte{0xff}, 64), false},
	} {
		t.Run(name, func(t *testing.T) {
			for range 100 {
				c, theirs := startPair(t, cxl.Boottime, x.onPush)
				go func() {
					_, _, _ = protocol.NewReader(theirs).Next()
					_, _ = theirs.Write(x.comes)
					if x.dies {
						_ = theirs.Close()
					}
				}()
				ctx, cancel := context.WithTimeout(WithSpin(t.Context(), NewSpin(time.Second)), time.Minute)
				_, err := c.do(ctx, newCall(protocol.TypeHeartbeat, new(emptyMsg), time.Minute.Nanoseconds()))
				cancel()
				require.ErrorIs(t, err, errConnLost)
				<-c.done
			}
		})
	}
}

// TestALookerDoesNotWaitToAcknowledge: a master that reads nothing keeps no caller beyond its time, even if a push comes that is to
// be acknowledged.
func TestALookerDoesNotWaitToAcknowledge(t *testing.T) {
	if oneProc {
		t.Skip("there is one processor, on which nobody looks")
	}
	full, pushed := make(chan struct{}), make(chan struct{})
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	filler, err := unix.Dup(fds[0])
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(filler)) }()
	c, theirs := startOn(t, fds, cxl.Boottime, func(c *conn, _ protocol.Type, _ []byte) error {
		<-full
		c.post(protocol.TypeFreedAck, &freedAckMsg{ID: 1})
		close(pushed)
		return nil
	})
	go func() {
		_, _, _ = protocol.NewReader(theirs).Next()
		for err := error(nil); err == nil; { // until nothing more goes into the socket
			_, err = unix.SendmsgN(filler, make([]byte, 64), nil, nil, unix.MSG_DONTWAIT)
		}
		push, mark := protocol.BeginFrame(nil, protocol.TypeFreed, 0)
		_, _ = theirs.Write(protocol.EndFrame(push, mark))
		close(full)
	}()
	ctx, cancel := context.WithTimeout(WithSpin(t.Context(), NewSpin(time.Second)), 200*time.Millisecond)
	defer cancel()
	_, err = c.do(ctx, newCall(protocol.TypeHeartbeat, new(emptyMsg), time.Minute.Nanoseconds()))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	<-pushed
}
