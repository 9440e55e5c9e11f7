package chaos

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/integration/cluster"
)

// failpoints is the build tag of a program whose disk can be made to fail.
const failpoints = "failpoints"

// diskFails makes an operation of a follower's disk fail, and then of the leader's: the member stops itself at once and
// the rest goes on; a failed sync is never tried again.
func diskFails(line string) func(t *testing.T, name string) {
	return func(t *testing.T, name string) {
		t.Helper()
		r := begin(t, name, settings{tags: []string{failpoints}})
		for _, who := range []string{"a follower", "the leader"} {
			n := r.follower()
			if who == "the leader" {
				n = r.c.Leader()
			}
			at := time.Now()
			n.Fail(line)
			r.fault("disk error of " + who + ": " + line)
			require.Error(t, n.Wait(), "it ends by itself")
			require.Contains(t, n.Failed(), line)
			r.figure("from the first error to the end of "+who, ms(time.Since(at)), "ms", "", true)
			r.writing(at, 6)
			n.Fail()
			n.Restart()
		}
		r.finish()
	}
}

// slowSync is a disk that takes long for each sync.
const slowSync = "sync slow=100ms"

// p99 of what was measured.
func p99(list []time.Duration) time.Duration {
	if len(list) == 0 {
		return 0
	}
	list = slices.Sorted(slices.Values(list))
	return list[len(list)*99/100]
}

// slowDiskFollower makes one follower's disk slow: stores take no longer than with a sound one. Sound and slow times take
// turns, so that what else the machine does falls on both.
func slowDiskFollower(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{tags: []string{failpoints}})
	n := r.follower()
	var sound, slow []time.Duration
	for range 4 {
		for _, lines := range [][]string{nil, {slowSync}} {
			n.Fail(lines...)
			time.Sleep(300 * time.Millisecond) // what was under way
			from := time.Now()
			time.Sleep(1700 * time.Millisecond)
			took := r.probe.Between(from, time.Now())
			if lines == nil {
				sound = append(sound, took...)
			} else {
				slow = append(slow, took...)
				r.fault("slow disk of a follower")
			}
		}
	}
	n.Fail()
	require.Contains(t, n.Failed(), slowSync)
	r.figure("p99 of stores, all disks sound", ms(p99(sound)), "ms", "", true)
	r.figure("p99 of stores, one follower's disk slow", ms(p99(slow)), "ms", "", true)
	ratio := float64(p99(slow)) / float64(p99(sound))
	r.figure("p99 with a slow follower, of that with none", ratio, "times", "<= 1.2", ratio <= 1.2)
	require.Less(t, p99(slow)-p99(sound), 50*time.Millisecond, "stores wait for the slow disk")
	r.finish()
}

// slowDiskLeader makes the leader's disk slow: leadership moves to a member whose disk is not.
func slowDiskLeader(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{tags: []string{failpoints}})
	slow := r.c.Leader()
	at := time.Now()
	slow.Fail(slowSync)
	r.fault("slow disk of the leader")
	cluster.Within(t, "another leader", func() error {
		if r.c.Leader() == slow {
			return errStays
		}
		return nil
	})
	took := time.Since(at)
	r.figure("from a slow disk to another leader", ms(took), "ms", "<= 10000", took <= 10*time.Second)
	r.writing(at, 0)
	time.Sleep(500 * time.Millisecond)
	from := time.Now()
	time.Sleep(4 * time.Second)
	r.figure("p99 of stores under the next leader", ms(p99(r.probe.Between(from, time.Now()))), "ms", "", true)
	require.NotEqual(t, slow, r.c.Leader(), "leadership does not swing back")
	require.Contains(t, slow.Failed(), slowSync)
	slow.Fail()
	r.finish()
}

// diskStalled makes a member's disk hang, first a follower's and then the leader's: the member stops itself, and the rest
// goes on meanwhile.
func diskStalled(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{tags: []string{failpoints}})
	for _, who := range []string{"a follower", "the leader"} {
		n := r.follower()
		if who == "the leader" {
			n = r.c.Leader()
		}
		from := time.Now()
		time.Sleep(4 * time.Second)
		before := float64(len(r.probe.Between(from, time.Now()))) / time.Since(from).Seconds()
		at := time.Now()
		n.Fail("write stall *.log", "sync stall *.log")
		r.fault("stalled disk of " + who)
		require.Error(t, n.Wait(), "it ends by itself")
		took := time.Since(at)
		r.figure("from the stall to the end of "+who, took.Seconds(), "s", "<= 20", took <= 20*time.Second)
		require.LessOrEqual(t, took, 20*time.Second+cluster.Stalled(at))
		settled := at.Add(6 * cluster.ElectionTimeout)
		rate := float64(len(r.probe.Between(settled, time.Now()))) / time.Since(settled).Seconds()
		r.figure("rate of stores while the disk of "+who+" is stalled", rate/before, "of before", ">= 0.5", rate >= before/2)
		n.Fail()
		n.Restart()
	}
	r.finish()
}
