package chaos

import (
	"testing"
	"time"

	"larder/integration/cluster"
)

// cut is a network that loses everything and says nothing.
var cut = cluster.Rules{Swallow: true}

// partitions cuts the network of a cluster again and again, in the ways that split has, each until stores go on.
func partitions(t *testing.T, name string, s settings, fault string, split func(r *run, i int, leader *cluster.Node)) {
	t.Helper()
	r := begin(t, name, s)
	var stood []time.Duration
	r.until(caseTime, func(i int) {
		leader := r.c.Leader()
		at := time.Now()
		split(r, i, leader)
		r.fault(fault)
		stood = append(stood, r.writing(at, 6))
		r.sleep(0, time.Second)
		r.c.Links.Heal()
		r.sleep(200*time.Millisecond, time.Second)
	})
	r.spread("from partition to the next acknowledged store", stood, "<= 6 election timeouts", true)
	r.finish()
}

// partitionLeader cuts the leader off from the others, in both directions. Clients still reach all.
func partitionLeader(t *testing.T, name string) {
	t.Helper()
	partitions(t, name, settings{}, "partition of the leader", func(r *run, i int, leader *cluster.Node) {
		rules := cut
		if i%2 == 1 {
			rules = cluster.Rules{Hold: true} // the network delivers everything when it is back
		}
		r.c.Links.Both(rules, []uint64{leader.ID}, r.ids(leader))
	})
}

// partitionOneWay lets nothing through from the leader to the others, then nothing back.
func partitionOneWay(t *testing.T, name string) {
	t.Helper()
	partitions(t, name, settings{}, "one-way partition of the leader", func(r *run, i int, leader *cluster.Node) {
		if i%2 == 0 {
			r.c.Links.Set(cut, []uint64{leader.ID}, r.ids(leader))
		} else {
			r.c.Links.Set(cut, r.ids(leader), []uint64{leader.ID})
		}
	})
}

// partitionFive splits five members into three and two; the leader is in either part.
func partitionFive(t *testing.T, name string) {
	t.Helper()
	five := settings{members: 5, pool: "64MiB"}
	partitions(t, name, five, "partition of two of five", func(r *run, i int, leader *cluster.Node) {
		minority := []uint64{leader.ID, r.ids(leader)[0]}
		if i%2 == 1 {
			minority = r.ids(leader)[:2]
		}
		var majority []uint64
		for _, n := range r.c.Nodes {
			if n.ID != minority[0] && n.ID != minority[1] {
				majority = append(majority, n.ID)
			}
		}
		r.c.Links.Both(cut, minority, majority)
	})
}

// bridge cuts the link between the leader and one follower, both of which the third member still sees: leadership must
// not swing between the two.
func bridge(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	leader := r.c.Leader()
	before, err := leader.Status()
	if err != nil {
		t.Fatal(err)
	}
	other := r.ids(leader)[0]
	at := time.Now()
	r.c.Links.Both(cut, []uint64{leader.ID}, []uint64{other})
	r.fault("bridge")
	r.until(caseTime, func(int) {
		r.writing(time.Now(), 4)
		r.sleep(100*time.Millisecond, 300*time.Millisecond)
	})
	t.Logf("stores during the bridge: %s", r.probe.Summary(at))
	after, err := r.c.Leader().Status()
	if err != nil {
		t.Fatal(err)
	}
	r.figure("terms begun by a bridge", float64(after.Term-before.Term), "terms", "<= 2", after.Term-before.Term <= 2)
	r.finish()
}

// blackholeClients lets nothing through from clients to the leader and back, while connections stay open and the members
// see each other.
func blackholeClients(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	var stood []time.Duration
	r.until(caseTime, func(i int) {
		leader := r.c.Leader()
		rules := cut
		if i%2 == 1 {
			rules = cluster.Rules{Hold: true}
		}
		r.c.Links.Both(rules, []uint64{cluster.Clients}, []uint64{leader.ID})
		r.fault("blackhole between clients and the leader")
		r.sleep(time.Second, 4*time.Second)
		r.c.Links.Heal()
		stood = append(stood, r.writing(time.Now(), 6))
		r.sleep(200*time.Millisecond, time.Second)
	})
	r.spread("from the end of the blackhole to the next acknowledged store", stood, "<= 6 election timeouts", true)
	r.finish()
}

// delay slows every link between members: 75 ms, give or take 50.
func delay(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	before, err := r.c.Leader().Status()
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	r.c.Links.Both(cluster.Rules{Delay: 75 * time.Millisecond, Jitter: 50 * time.Millisecond}, r.ids(), r.ids())
	r.fault("delay of 75 ms between members")
	r.until(caseTime, func(int) {
		r.writing(time.Now(), 4)
		r.sleep(100*time.Millisecond, 300*time.Millisecond)
	})
	t.Logf("stores: %s", r.probe.Summary(at))
	after, err := r.c.Leader().Status()
	if err != nil {
		t.Fatal(err)
	}
	r.figure("terms begun by a delay", float64(after.Term-before.Term), "terms", "0", after.Term == before.Term)
	r.finish()
}

// clog fills the connections from the leader to a follower, and then those from clients to it.
func clog(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	r.until(caseTime, func(int) {
		leader, n := r.c.Leader(), r.follower()
		r.c.Links.Set(cluster.Rules{Hold: true}, []uint64{leader.ID}, []uint64{n.ID})
		r.fault("clog between the leader and a follower")
		r.writing(time.Now(), 4)
		r.sleep(time.Second, 4*time.Second)
		r.writing(time.Now(), 4)
		r.c.Links.Heal()
		r.sleep(200*time.Millisecond, time.Second)
	})
	r.finish()
}

// resetsAndDrops cuts connections off and loses messages at random.
func resetsAndDrops(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	r.c.Links.Both(cluster.Rules{Drop: 0.1}, r.ids(), r.ids())
	r.fault("drop of 10% of the messages between members")
	ends := append(r.ids(), cluster.Clients)
	r.until(caseTime, func(int) {
		from, to := ends[r.rand.IntN(len(ends))], r.ids()[r.rand.IntN(3)]
		if from == to {
			return
		}
		r.c.Links.Of(from, to).Reset()
		r.fault("reset of connections")
		r.sleep(50*time.Millisecond, 500*time.Millisecond)
		r.writing(time.Now(), 6)
	})
	r.finish()
}

// networkNamespaces pulls the cable of the leader, then of a follower, then lets the leader hear nothing of what it is
// sent: below TCP, where no proxy stands.
func networkNamespaces(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{wire: true})
	var stood []time.Duration
	kinds := []struct {
		what string
		cut  func(leader *cluster.Node) (undo func())
	}{
		{"cable of the leader pulled", func(leader *cluster.Node) func() { leader.Unplug(); return leader.Plug }},
		{"cable of a follower pulled", func(*cluster.Node) func() { n := r.follower(); n.Unplug(); return n.Plug }},
		{"leader hears nothing", func(leader *cluster.Node) func() { return leader.Deaf(r.others(leader)) }},
	}
	r.until(2*caseTime, func(i int) {
		k := kinds[i%len(kinds)]
		leader := r.c.Leader()
		at := time.Now()
		undo := k.cut(leader)
		r.fault(k.what)
		stood = append(stood, r.writing(at, 6))
		r.sleep(0, 2*time.Second)
		undo()
		r.sleep(200*time.Millisecond, time.Second)
	})
	r.spread("from the cut to the next acknowledged store", stood, "<= 6 election timeouts", true)
	r.finish()
}
