package integration

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// TestHistoriesAreLinearizable has clients fight over a few keys while leaders are killed and paused, and asks whether
// there is an order of what they did that explains what they saw.
func TestHistoriesAreLinearizable(t *testing.T) {
	cluster.SkipShort(t)
	const clients, keys = 6, 24
	c := cluster.Start(t, cluster.Options{Members: 3})
	r := cluster.NewRecorder(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for id := range clients {
		x := c.Open(client.Config{})
		wg.Go(func() { r.Work(ctx, id, x, keys) })
	}
	for i := range 4 {
		time.Sleep(time.Second)
		leader := c.Leader()
		if i%2 == 0 {
			leader.Kill()
			c.Leader()
			leader.Restart()
		} else {
			cluster.Pause(leader, 1500*time.Millisecond)
		}
	}
	time.Sleep(time.Second)
	cancel()
	wg.Wait()
	ops, _ := r.Check()
	require.Greater(t, ops, 1000)
	require.Equal(t, []uint64{0, 0, 0}, c.Settled().Stats.Evictions[1:4], "this pool has room for everything")
}
