package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestARenewalThatFailedProlongsNothing: a master, perhaps one that has just been elected, says that it does not know a
// view's lease. The view ends when it would have ended without asking.
func TestARenewalThatFailedProlongsNothing(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	put(t, c, "k", 4096)
	f.do(func() { f.leaseMS = 400 })
	v, err := c.View(t.Context(), []byte("k"))
	require.NoError(t, err)
	end := v.set.deadline.Load()
	f.do(func() { clear(f.leases) })
	require.Eventually(t, func() bool { return f.count(protocol.TypeRenew) > 0 && !v.set.renewing.Load() },
		10*time.Second, time.Millisecond)
	require.Equal(t, end, v.set.deadline.Load())
	require.Eventually(t, func() bool { return c.cfg.Clock() >= end }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, v.Close(), ErrLease)
}
