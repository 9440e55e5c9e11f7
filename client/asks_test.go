package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// asks are the HANDSHAKEs that asked a fake for devices alone.
func asks(t *testing.T, f *fake) (n int) {
	t.Helper()
	f.do(func() {
		for _, s := range f.seen {
			var r protocol.HandshakeRequest
			if s.typ == protocol.TypeHandshake {
				require.NoError(t, r.Decode(s.payload))
				if r.DevicesOnly {
					n++
				}
			}
		}
	})
	return n
}

// Who has nothing new to learn asks more and more seldom, also for a generation that nobody knows.
func TestTheLeaderIsNotAskedForDevicesAgainAndAgain(t *testing.T) {
	now := int64(1e12)
	d := newDevices(&Config{Clock: func() int64 { return now }})
	asked := func(certain bool, gen uint64) (n int) {
		for range 10_000 { // of milliseconds
			now += 1e6
			if d.due(certain, 7, gen) {
				d.heard(false)
				d.asked()
				n++
			}
		}
		return n
	}
	n := asked(false, 1)
	require.GreaterOrEqual(t, n, 10)
	require.LessOrEqual(t, n, 25, "10 s of at least half of askMost each, and the first few")
	require.LessOrEqual(t, asked(true, 2), 22)
	now++
	require.True(t, d.due(true, 7, 3), "another generation is asked for at once")
	require.True(t, d.due(true, 7, 3), "by all who come while somebody does")
	require.False(t, d.due(false, 7, 3))
	d.heard(true)
	d.asked()
	d.asked()
	require.False(t, d.due(true, 7, 3))
	now += askEvery.Nanoseconds()
	require.True(t, d.due(false, 7, 3), "after news there may be more soon")
}

func TestADeviceThatStaysAwayIsNotAskedForByEachReader(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	x := n.lay("k", value("k", 4096), 0)
	c := f.open(t, nil)
	f.do(func() { x.loc.Generation = 99 })
	began := time.Now()
	for range 200 {
		_, err := c.Get(t.Context(), []byte("k"), nil)
		require.ErrorIs(t, err, ErrNotFound)
	}
	require.Less(t, asks(t, f), 10+int(time.Since(began)/(askEvery/2)))
}
