package node

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeClock moves when somebody sleeps.
type fakeClock struct {
	mu sync.Mutex
	at int64
}

func (c *fakeClock) now() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *fakeClock) timer(d time.Duration) (<-chan time.Time, func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at += int64(d)
	ready := make(chan time.Time, 1)
	ready <- time.Time{}
	return ready, func() bool { return false }
}

func TestBucketBoundsTheRate(t *testing.T) {
	c := &fakeClock{}
	b := newBucket(c, 1000)
	for range 25 {
		require.NoError(t, b.take(t.Context(), 100))
	}
	require.EqualValues(t, 2*time.Second, c.now(), "2500 bytes, of which 500 were saved up")
	require.NoError(t, sleep(t.Context(), c, time.Hour))
	begun := c.now()
	for range 15 {
		require.NoError(t, b.take(t.Context(), 100))
	}
	require.EqualValues(t, time.Second, c.now()-begun, "an hour saves no more than half a second does")
	require.NoError(t, b.take(t.Context(), 10_000), "one piece may be longer than that")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, b.take(ctx, 10_000), context.Canceled)
	begun = c.now()
	require.NoError(t, b.take(t.Context(), 100))
	require.Less(t, c.now()-begun, int64(time.Second), "who gives up pays nothing")
	require.NoError(t, newBucket(c, 0).take(t.Context(), 1<<60), "without a bound")
}
