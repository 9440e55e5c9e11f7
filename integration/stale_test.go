package integration

import (
	"context"
	"math/rand/v2"
	"strconv"
	"syscall"
	"testing"
	"time"

	"larder/client"
	"larder/integration/cluster"
)

// TestPausedLeaderServesNothingStale pauses leaders while clients keep asking them, by connections that follow no
// redirection. Whatever a leader answers before, while and after it finds out that it was replaced must not be older
// than what was acknowledged when the question was sent, and the bytes of a lease must stay as they are for as long as
// it lasts, counted from the sending.
func TestPausedLeaderServesNothingStale(t *testing.T) {
	cluster.SkipShort(t)
	// A pool with little more room than the keys need, so that pages are used again as soon as that is allowed.
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "16MiB"})
	l := cluster.NewLoad(t, c)
	w := cluster.WatchStale(l, c.Open(client.Config{Checksums: true}))

	begun := time.Now()
	for i := 0; i < 8 || time.Since(begun) < cluster.ChaosTime(t); i++ {
		leader := c.Leader()
		ctx, cancel := context.WithCancel(t.Context())
		asking := w.Watch(ctx, leader, strconv.Itoa(i), 3)
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(200*time.Millisecond))))
		leader.Signal(syscall.SIGSTOP)
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(2900*time.Millisecond))))
		leader.Signal(syscall.SIGCONT)
		time.Sleep(500 * time.Millisecond)
		cancel()
		asking.Wait()
	}
	l.Stop()
	w.Check()
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
}
