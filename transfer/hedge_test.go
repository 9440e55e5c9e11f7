package transfer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAReadOnAQuietRail is asked for once more over another rail, and ends while the first is still quiet. What that brings
// later does not land.
func TestAReadOnAQuietRail(t *testing.T) {
	here := engine(t, Config{StallTimeout: time.Hour, Timeout: time.Hour})
	there, ps := through(t, 2, Config{})
	seg := open(t, here, there.Addresses()...)
	const size = 8 << 20
	b := register(t, there, noise(t, size), BufferOptions{})
	r := Request{Op: Read, Segment: seg, Buffer: b.Info().Handle, Local: make([]byte, size)}
	l := seg.lanes[0]
	require.Eventually(t, func() bool { // until both rails are known to carry
		require.NoError(t, carry(t, here, r))
		return l.rails[0].carries.Load() && l.rails[1].carries.Load()
	}, 20*time.Second, time.Millisecond)
	for here.counters.hedged.Load() == 0 {
		ps[0].stop()
		clear(r.Local)
		batch, err := here.Submit([]Request{r}, 0)
		require.NoError(t, err)
		require.NoError(t, batch.Wait(t.Context()))
		<-batch.Settled()
		require.True(t, holds(b, 0, r.Local))
		clear(r.Local)
		ps[0].flow()
		time.Sleep(20 * time.Millisecond)
		require.Equal(t, make([]byte, size), r.Local, "a byte landed")
	}
	require.NoError(t, carry(t, here, r), "the rail goes on")
	require.True(t, holds(b, 0, r.Local))
	for _, p := range seg.Paths() {
		require.Zero(t, p.Errors)
	}
}
