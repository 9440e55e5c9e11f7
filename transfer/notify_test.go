package transfer

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// notifyWays are another process's engine, and this one's own.
func notifyWays(t *testing.T, run func(t *testing.T, there *Engine, seg *Segment)) {
	t.Helper()
	t.Run("another", func(t *testing.T) {
		there := engine(t, Config{Listen: []string{anyPort}})
		run(t, there, open(t, engine(t, Config{}), there.Addresses()...))
	})
	t.Run("itself", func(t *testing.T) {
		there := engine(t, Config{Listen: []string{anyPort}})
		run(t, there, open(t, there, there.Addresses()...))
	})
}

// TestNotificationsComeInOrder for each sender, each once.
func TestNotificationsComeInOrder(t *testing.T) {
	notifyWays(t, func(t *testing.T, there *Engine, seg *Segment) {
		t.Helper()
		const senders, each = 4, 50
		var wg sync.WaitGroup
		for s := range senders {
			wg.Go(func() {
				for i := range each {
					if err := seg.Notify(t.Context(), fmt.Sprint(s), []byte{byte(i)}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		next := map[string]byte{}
		for range senders * each {
			n := <-there.Notifications()
			require.Equal(t, seg.e.ID(), n.Engine)
			require.Equal(t, []byte{next[n.Name]}, n.Body)
			next[n.Name]++
		}
		wg.Wait()
		require.Empty(t, there.Notifications())
		big := bytes.Repeat([]byte("x"), MaxNotification)
		require.NoError(t, seg.Notify(t.Context(), string(big[:maxName]), big))
		n := <-there.Notifications()
		require.Equal(t, big, n.Body)
		require.Len(t, n.Name, maxName)
		require.NoError(t, seg.Notify(t.Context(), "", nil))
		require.Empty(t, (<-there.Notifications()).Body)
		require.ErrorContains(t, seg.Notify(t.Context(), "", append(big, 1)), "at most 65536 fit")
		require.ErrorContains(t, seg.Notify(t.Context(), string(big[:maxName+1]), nil), "at most 128 fit")
	})
}

// TestAQueueThatIsFull refuses notifications, and takes them again when there is room.
func TestAQueueThatIsFull(t *testing.T) {
	notifyWays(t, func(t *testing.T, there *Engine, seg *Segment) {
		t.Helper()
		for range notificationQueue {
			require.NoError(t, seg.Notify(t.Context(), "a", nil))
		}
		for range 3 {
			require.ErrorIs(t, seg.Notify(t.Context(), "lost", nil), ErrFull)
		}
		require.NoError(t, seg.Refresh(t.Context()), "the engine goes on")
		<-there.Notifications()
		require.NoError(t, seg.Notify(t.Context(), "b", nil))
		for range notificationQueue - 1 {
			require.Equal(t, "a", (<-there.Notifications()).Name)
		}
		require.Equal(t, "b", (<-there.Notifications()).Name)
		require.Empty(t, there.Notifications())
	})
}

// TestANotificationComesAfterTheBytes that were written before it.
func TestANotificationComesAfterTheBytes(t *testing.T) {
	ways(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		_, b := buffer(t, there, 1<<20, BufferOptions{})
		for range 20 {
			out := noise(t, 1<<20)
			require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: b.Info().Handle, Local: out}))
			require.NoError(t, seg.Notify(t.Context(), "written", nil))
			<-there.Notifications()
			require.True(t, holds(b, 0, out))
		}
	})
}

// TestAHandlerTakesWhatIsItsOwn and leaves the rest in the queue, which may be full.
func TestAHandlerTakesWhatIsItsOwn(t *testing.T) {
	notifyWays(t, func(t *testing.T, there *Engine, seg *Segment) {
		t.Helper()
		got := make(chan Notification, 10)
		take := func(n Notification) { got <- n }
		stop := there.Handle("a/", take)
		stopOther := there.Handle("b/", take)
		defer stopOther()
		for range notificationQueue {
			require.NoError(t, seg.Notify(t.Context(), "c", nil))
		}
		require.ErrorIs(t, seg.Notify(t.Context(), "c", nil), ErrFull)
		for _, name := range []string{"a/1", "b/2", "a/"} {
			require.NoError(t, seg.Notify(t.Context(), name, []byte(name)))
			n := <-got
			require.Equal(t, Notification{Engine: seg.e.ID(), Name: name, Body: []byte(name)}, n)
		}
		stop()
		require.ErrorIs(t, seg.Notify(t.Context(), "a/3", nil), ErrFull)
		require.NoError(t, seg.Notify(t.Context(), "b/4", nil))
		require.Equal(t, "b/4", (<-got).Name)
		for range notificationQueue {
			require.Equal(t, "c", (<-there.Notifications()).Name)
		}
		require.NoError(t, seg.Notify(t.Context(), "a/5", nil))
		require.Equal(t, "a/5", (<-there.Notifications()).Name)
		stop = there.Handle(ReservedNames+"x", take)
		require.NoError(t, seg.Notify(t.Context(), ReservedNames+"x", nil))
		require.Equal(t, ReservedNames+"x", (<-got).Name)
		stop()
		require.ErrorIs(t, seg.Notify(t.Context(), ReservedNames+"x", nil), ErrRefused)
		require.Empty(t, there.Notifications())
	})
}

// TestNobodyIsNotified tells what happens if the peer does not answer, is gone, or the segment is closed.
func TestNobodyIsNotified(t *testing.T) {
	here := engine(t, Config{StallTimeout: 200 * time.Millisecond})
	there, ps := through(t, 1, Config{})
	seg := open(t, here, there.Addresses()...)
	require.NoError(t, seg.Notify(t.Context(), "a", nil))
	ps[0].stop()
	require.ErrorIs(t, seg.Notify(t.Context(), "b", nil), ErrUncertain)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.Error(t, seg.Notify(ended, "c", nil))
	ps[0].flow()
	require.Eventually(t, func() bool { return seg.Notify(t.Context(), "d", nil) == nil }, 20*time.Second, time.Millisecond)
	last, seen := "", map[string]int{}
	for last != "d" {
		last = (<-there.Notifications()).Name
		seen[last]++
		require.Equal(t, 1, seen[last], last)
	}
	require.NoError(t, there.Close())
	_, more := <-there.Notifications()
	require.False(t, more)
	require.Error(t, seg.Notify(t.Context(), "e", nil))
	require.NoError(t, seg.Close())
	require.ErrorIs(t, seg.Notify(t.Context(), "f", nil), ErrClosed)
}

// TestAnIdleNotifierIsClosed before the peer closes its connection.
func TestAnIdleNotifierIsClosed(t *testing.T) {
	here, there := engine(t, Config{IdleTimeout: time.Millisecond}), engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	for range 3 {
		require.NoError(t, seg.Notify(t.Context(), "a", nil))
		require.Eventually(t, func() bool {
			<-seg.notifier.turn
			defer func() { seg.notifier.turn <- struct{}{} }()
			return seg.notifier.c == nil
		}, 20*time.Second, time.Millisecond)
	}
}
