package chaos

import (
	"context"
	"strconv"
	"syscall"
	"testing"
	"time"

	"larder/client"
	"larder/integration/cluster"
)

// leaderKilled kills the leader again and again.
func leaderKilled(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	var stood []time.Duration
	late := 0
	r.until(caseTime, func(int) {
		r.sleep(0, 400*time.Millisecond)
		leader := r.c.Leader()
		at := time.Now()
		leader.Kill()
		r.fault("kill -9 of the leader")
		d := r.writing(at, 4)
		if d > 2*cluster.ElectionTimeout {
			late++
		}
		stood = append(stood, d)
		leader.Restart()
	})
	within := 1 - float64(late)/float64(len(stood))
	r.figure("kills after which writes resumed within two election timeouts", within, "of all", ">= 0.95", within >= .95)
	r.spread("from kill to the next acknowledged store", stood, "<= 4 election timeouts", true) // or writing has failed
	r.finish()
}

// followerKilled kills followers: nobody should notice.
func followerKilled(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	var stood []time.Duration
	r.until(caseTime, func(int) {
		n := r.follower()
		at := time.Now()
		n.Kill()
		r.fault("kill -9 of a follower")
		stood = append(stood, r.writing(at, 2))
		r.sleep(0, time.Second)
		n.Restart()
	})
	r.spread("from kill to the next acknowledged store", stood, "", true)
	r.finish()
}

// allKilled kills all members at once and starts them again.
func allKilled(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	var stood []time.Duration
	r.until(caseTime, func(int) {
		r.sleep(500*time.Millisecond, 1500*time.Millisecond)
		r.killAll()
		at := time.Now()
		for _, n := range r.c.Nodes {
			n.Start()
		}
		stood = append(stood, r.writing(at, 0))
	})
	r.spread("from the start of all members to the next acknowledged store", stood, "", true)
	r.finish()
}

// killAll kills all members before any of them is waited for.
func (r *run) killAll() {
	for _, n := range r.c.Nodes {
		n.Signal(syscall.SIGKILL)
	}
	for _, n := range r.c.Nodes {
		n.Wait() //nolint:errcheck // killed
	}
	r.fault("kill -9 of all members at once")
}

// leaderPausedLong stops the leader for ten seconds while it is asked over connections of its own: nothing that it says
// when it goes on may be stale.
func leaderPausedLong(t *testing.T, name string) {
	t.Helper()
	// Little more room than the keys need, so that pages are used again as soon as that is allowed.
	r := begin(t, name, settings{noLoad: true, pool: "16MiB"})
	r.load = cluster.NewLoad(t, r.c)
	watch := cluster.WatchStale(r.load, r.c.Open(client.Config{Checksums: true}))
	r.probe = r.load.Prober(r.c.Open(client.Config{}))
	r.shared = cluster.NewRecorder(t)
	r.endRace = func() {}
	for i, d := range []time.Duration{10 * time.Second, 1500 * time.Millisecond, 300 * time.Millisecond} {
		leader := r.c.Leader()
		ctx, cancel := context.WithCancel(t.Context())
		asking := watch.Watch(ctx, leader, strconv.Itoa(i), 3)
		r.sleep(200*time.Millisecond, 400*time.Millisecond)
		at := time.Now()
		leader.Signal(syscall.SIGSTOP)
		r.fault("SIGSTOP of the leader")
		time.Sleep(d)
		leader.Signal(syscall.SIGCONT)
		r.writing(at, 0)
		time.Sleep(500 * time.Millisecond)
		cancel()
		asking.Wait()
		if i == 0 {
			r.figure("stores stood still in a pause of 10 s", ms(r.probe.After(at)), "ms", "", true)
		}
	}
	answers := watch.Check()
	r.figure("answers of paused leaders that were checked", float64(answers), "answers", "", true)
	r.figure("stale answers", 0, "answers", "0", true) // or Check has failed
	r.finish()
}

// pauses stops the leader and others for 0.1 to 15 s.
func pauses(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	for i, d := range []time.Duration{100 * time.Millisecond, 900 * time.Millisecond, 2500 * time.Millisecond, 15 * time.Second} {
		n, kind := r.c.Leader(), "SIGSTOP of the leader"
		if i == 2 {
			n, kind = r.follower(), "SIGSTOP of a follower"
		}
		at := time.Now()
		n.Signal(syscall.SIGSTOP)
		r.fault(kind)
		r.writing(at, 0)
		time.Sleep(d - time.Since(at))
		n.Signal(syscall.SIGCONT)
		r.writing(time.Now(), 4)
		r.sleep(0, 700*time.Millisecond)
	}
	r.finish()
}
