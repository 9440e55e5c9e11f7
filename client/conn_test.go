package client

import (
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"larder/protocol"
	"larder/sock"
)

// startPair starts a connection and returns its other end. Both are closed with the test.
func startPair(t *testing.T, clock func() int64, onPush func(*conn, protocol.Type, []byte) error) (c *conn, theirs net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	return startOn(t, fds, clock, onPush)
}

// startOn starts a connection on the first of a pair of sockets.
func startOn(t *testing.T, fds [2]int, clock func() int64, onPush func(*conn, protocol.Type, []byte) error) (c *conn, theirs net.Conn) {
	t.Helper()
	var ends [2]net.Conn
	var err error
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "a socket")
		ends[i], err = net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	var readers sync.WaitGroup
	ours, err := sock.New(ends[0])
	require.NoError(t, err)
	c = startConn(ours, "m", clock, onPush, func(*conn, error) {}, &readers)
	t.Cleanup(func() {
		c.close(ErrClosed)
		readers.Wait()
		_ = ends[1].Close() // the test may have done so
	})
	return c, ends[1]
}

// TestASilentMasterIsLeftAfterOneTimeout: the keeper learns that something came only when it next looks, which may be after
// the next call was sent. That call must not be taken for answered by it.
func TestASilentMasterIsLeftAfterOneTimeout(t *testing.T) {
	const timeout = 2 * time.Second
	var now atomic.Int64
	now.Store(1e9)
	pass := func(d time.Duration) { now.Add(int64(d)) }
	c, theirs := startPair(t, now.Load, nil)
	asked := make(chan uint32, 4)
	go func() {
		r := protocol.NewReader(theirs)
		for {
			h, _, err := r.Next()
			if err != nil {
				return
			}
			asked <- h.Sequence
		}
	}()
	do := func() chan error {
		ended := make(chan error, 1)
		go func() {
			cl := newCall(protocol.TypeHeartbeat, new(emptyMsg), timeout.Nanoseconds())
			_, err := c.do(t.Context(), cl)
			ended <- err
		}()
		return ended
	}
	first := do()
	reply, mark := protocol.BeginFrame(nil, protocol.TypeHeartbeat.Reply(), <-asked)
	reply = protocol.EndFrame((&protocol.HeartbeatReply{}).Append(reply), mark)
	c.expire(now.Load(), timeout.Nanoseconds())
	pass(10 * time.Millisecond)
	_, err := theirs.Write(reply)
	require.NoError(t, err)
	require.NoError(t, <-first)
	pass(10 * time.Millisecond)
	second := do() // nobody answers any more
	<-asked
	wrote := func() bool { return c.writes.Load()%2 == 0 }
	require.Eventually(t, wrote, 10*time.Second, time.Millisecond)
	pass(20 * time.Millisecond)
	c.expire(now.Load(), timeout.Nanoseconds())
	require.NoError(t, c.reason(), "not yet")
	pass(timeout)
	c.expire(now.Load(), timeout.Nanoseconds())
	require.ErrorIs(t, <-second, errConnLost, "nothing came since the call was sent")
	require.ErrorIs(t, c.reason(), errCallTimeout)
}

// TestALateAnswerCostsOnlyItsCall: a master that answers others is not left.
func TestALateAnswerCostsOnlyItsCall(t *testing.T) {
	const timeout = 2 * time.Second
	var now atomic.Int64
	now.Store(1e9)
	c, theirs := startPair(t, now.Load, func(*conn, protocol.Type, []byte) error { return nil })
	asked := make(chan struct{}, 1)
	go func() {
		_, _, err := protocol.NewReader(theirs).Next()
		if err == nil {
			asked <- struct{}{}
		}
	}()
	ended := make(chan error, 1)
	go func() {
		_, err := c.do(t.Context(), newCall(protocol.TypeHeartbeat, new(emptyMsg), timeout.Nanoseconds()))
		ended <- err
	}()
	<-asked
	wrote := func() bool { n := c.writes.Load(); return n > 0 && n%2 == 0 }
	require.Eventually(t, wrote, 10*time.Second, time.Millisecond, "what has arrived was written, once the writer knows")
	c.expire(now.Load(), timeout.Nanoseconds())
	now.Add(time.Second.Nanoseconds())
	push, mark := protocol.BeginFrame(nil, protocol.TypeFreed, 0)
	_, err := theirs.Write(protocol.EndFrame((&protocol.FreedPush{}).Append(push), mark))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.heard.Load() > 0 }, 10*time.Second, time.Millisecond)
	c.expire(now.Load(), timeout.Nanoseconds())
	now.Add(1200 * time.Millisecond.Nanoseconds())
	c.expire(now.Load(), timeout.Nanoseconds())
	require.ErrorIs(t, <-ended, errCallTimeout)
	require.NoError(t, c.reason())
}
