package integration

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// leaderKills is how often a leader is killed in the default run.
const leaderKills = 20

// TestChaosLeaderKills kills the leader again and again under load. Nothing acknowledged may be lost, no byte wrong, no
// call of a user fail, and writes go on each time.
func TestChaosLeaderKills(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3})
	l := newLoad(t, c)
	for i := range 3 {
		l.writer(c.open(client.Config{Checksums: i == 0}), fmt.Sprintf("w%d", i), 300)
	}
	for range 2 {
		l.reader(c.open(client.Config{}))
	}
	probe := l.prober(c.open(client.Config{}))
	paused := startChild(t, c, l.ledger, "write", childConfig{Name: "paused", Live: 100})
	killed := startChild(t, c, l.ledger, "write", childConfig{Name: "killed0", Live: 100})

	var stood []time.Duration
	begun := time.Now()
	for i := 0; i < leaderKills || time.Since(begun) < chaosTime(t); i++ {
		time.Sleep(time.Duration(rand.Int64N(int64(400 * time.Millisecond))))
		leader := c.leader()
		at := time.Now()
		leader.kill()
		stood = append(stood, probe.await(t, at))
		leader.restart()
		switch i % 5 {
		case 1: // a client dies with stores under way; another takes its place
			killed.alive()
			killed.kill()
			killed = startChild(t, c, l.ledger, "write", childConfig{Name: fmt.Sprintf("killed%d", i), Live: 100})
		case 2: // a client sleeps through the end of its session, and goes on
			paused.signal(syscall.SIGSTOP)
			time.AfterFunc(sessionTTL+2*time.Second, func() { paused.signal(syscall.SIGCONT) })
		}
	}
	t.Logf("time from a leader's death to the next acknowledged store: %s", percentiles(stood))
	time.Sleep(time.Until(begun.Add(sessionTTL))) // whoever was paused goes on
	paused.alive()
	killed.kill()
	paused.kill()
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	status := c.settled()
	require.Equal(t, []uint64{0, 0, 0}, status.Stats.Evictions[1:4], "this pool has room for everything")
	c.check()
}

// TestChaosPowerLoss kills all masters at once, under load, and starts them again.
func TestChaosPowerLoss(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3})
	l := newLoad(t, c)
	for i := range 3 {
		l.writer(c.open(client.Config{}), fmt.Sprintf("w%d", i), 300)
	}
	l.reader(c.open(client.Config{}))
	probe := l.prober(c.open(client.Config{}))
	stood := make([]time.Duration, 0, 3)
	for range 3 {
		time.Sleep(time.Second + time.Duration(rand.Int64N(int64(time.Second))))
		for _, n := range c.nodes {
			n.signal(syscall.SIGKILL)
		}
		for _, n := range c.nodes {
			n.wait() //nolint:errcheck // killed
		}
		for _, n := range c.nodes {
			n.start()
		}
		at := time.Now()
		stood = append(stood, probe.await(t, at))
	}
	t.Logf("time from the start of all members to the next acknowledged store: %s", percentiles(stood))
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	c.settled()
	c.check()
}

// TestChaosPauses stops members for a while, the leader and others, at random.
func TestChaosPauses(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3})
	l := newLoad(t, c)
	for i := range 2 {
		l.writer(c.open(client.Config{}), fmt.Sprintf("w%d", i), 200)
	}
	for range 2 {
		l.reader(c.open(client.Config{}))
	}
	begun := time.Now()
	for i := 0; i < 6 || time.Since(begun) < chaosTime(t); i++ {
		victim := c.leader()
		if i%3 == 2 {
			victim = c.nodes[rand.IntN(len(c.nodes))]
		}
		victim.signal(syscall.SIGSTOP)
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(2500*time.Millisecond))))
		victim.signal(syscall.SIGCONT)
		time.Sleep(time.Duration(rand.Int64N(int64(700 * time.Millisecond))))
	}
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	c.settled()
	c.check()
}
