package integration

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// leaderKills is how often a leader is killed in the default run.
const leaderKills = 20

// TestChaosLeaderKills kills the leader again and again under load. Nothing acknowledged may be lost, no byte wrong, no
// call of a user fail, and writes go on each time.
func TestChaosLeaderKills(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	l := cluster.NewLoad(t, c)
	for i := range 3 {
		l.Writer(c.Open(client.Config{Checksums: i == 0}), fmt.Sprintf("w%d", i), 300)
	}
	for range 2 {
		l.Reader(c.Open(client.Config{}))
	}
	probe := l.Prober(c.Open(client.Config{}))
	paused := cluster.StartChild(t, c, l.Ledger, "write", cluster.ChildConfig{Name: "paused", Live: 100})
	killed := cluster.StartChild(t, c, l.Ledger, "write", cluster.ChildConfig{Name: "killed0", Live: 100})

	var stood []time.Duration
	begun := time.Now()
	for i := 0; i < leaderKills || time.Since(begun) < cluster.ChaosTime(t); i++ {
		time.Sleep(time.Duration(rand.Int64N(int64(400 * time.Millisecond))))
		leader := c.Leader()
		at := time.Now()
		leader.Kill()
		stood = append(stood, probe.Await(t, at))
		leader.Restart()
		switch i % 5 {
		case 1: // a client dies with stores under way; another takes its place
			killed.Alive()
			killed.Kill()
			killed = cluster.StartChild(t, c, l.Ledger, "write", cluster.ChildConfig{Name: fmt.Sprintf("killed%d", i), Live: 100})
		case 2: // a client sleeps through the end of its session, and goes on
			paused.Signal(syscall.SIGSTOP)
			time.AfterFunc(cluster.SessionTTL+2*time.Second, func() { paused.Signal(syscall.SIGCONT) })
		}
	}
	t.Logf("time from a leader's death to the next acknowledged store: %s", cluster.Percentiles(stood))
	time.Sleep(time.Until(begun.Add(cluster.SessionTTL))) // whoever was paused goes on
	paused.Alive()
	killed.Kill()
	paused.Kill()
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	status := c.Settled()
	require.Equal(t, []uint64{0, 0, 0}, status.Stats.Evictions[1:4], "this pool has room for everything")
	c.Check()
}

// TestHundredThousandKeysOutliveTheirLeader stores as many values in as many pages, kills the leader while more are being
// stored, and finds every one of them, whole. Other systems lose the index with the leader, or the last changes to it.
func TestHundredThousandKeysOutliveTheirLeader(t *testing.T) {
	cluster.SkipShort(t)
	const keys, size = 100_000, 4 << 10
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "448MiB"})
	x := c.Open(client.Config{PageSize: size})
	cluster.Fill(t, x, "before", keys-1000, size)
	leader := c.Leader()
	leader.Kill()
	at := time.Now()
	cluster.Fill(t, x, "after", 1000, size)
	t.Logf("1000 more were stored %v after the leader's death", time.Since(at).Round(time.Millisecond))
	leader.Restart()
	fresh := c.Open(client.Config{PageSize: size})
	require.Equal(t, keys-1000, cluster.Held(t, fresh, "before", keys-1000))
	require.Equal(t, 1000, cluster.Held(t, fresh, "after", 1000))
}

// TestChaosPowerLoss kills all masters at once, under load, and starts them again.
func TestChaosPowerLoss(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	l := cluster.NewLoad(t, c)
	for i := range 3 {
		l.Writer(c.Open(client.Config{}), fmt.Sprintf("w%d", i), 300)
	}
	l.Reader(c.Open(client.Config{}))
	probe := l.Prober(c.Open(client.Config{}))
	stood := make([]time.Duration, 0, 3)
	for range 3 {
		time.Sleep(time.Second + time.Duration(rand.Int64N(int64(time.Second))))
		for _, n := range c.Nodes {
			n.Signal(syscall.SIGKILL)
		}
		for _, n := range c.Nodes {
			n.Wait() //nolint:errcheck // killed
		}
		for _, n := range c.Nodes {
			n.Start()
		}
		at := time.Now()
		stood = append(stood, probe.Await(t, at))
	}
	t.Logf("time from the start of all members to the next acknowledged store: %s", cluster.Percentiles(stood))
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
	c.Check()
}

// TestChaosPauses stops members for a while, the leader and others, at random.
func TestChaosPauses(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	l := cluster.NewLoad(t, c)
	for i := range 2 {
		l.Writer(c.Open(client.Config{}), fmt.Sprintf("w%d", i), 200)
	}
	for range 2 {
		l.Reader(c.Open(client.Config{}))
	}
	begun := time.Now()
	for i := 0; i < 6 || time.Since(begun) < cluster.ChaosTime(t); i++ {
		victim := c.Leader()
		if i%3 == 2 {
			victim = c.Nodes[rand.IntN(len(c.Nodes))]
		}
		victim.Signal(syscall.SIGSTOP)
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(2500*time.Millisecond))))
		victim.Signal(syscall.SIGCONT)
		time.Sleep(time.Duration(rand.Int64N(int64(700 * time.Millisecond))))
	}
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
	c.Check()
}
