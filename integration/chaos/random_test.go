package chaos

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"larder/integration/cluster"
)

// restart is after how long a cluster that random faults worked on is replaced by a new one: its history is checked then.
const restart = 2 * time.Minute

// TestRandom draws faults at random for as long as -minutes says. The seed gives the faults and their order; what the
// processes do meanwhile is theirs.
func TestRandom(t *testing.T) {
	if *minutesFlag == 0 {
		t.Skip("only with -minutes")
	}
	end := time.Now().Add(time.Duration(*minutesFlag * float64(time.Minute)))
	for seed := *seedFlag; time.Now().Before(end); {
		if seed == 0 {
			seed = rand.Uint64()
		}
		total.Seeds = append(total.Seeds, seed)
		ok := t.Run("seed", func(t *testing.T) {
			t.Logf("go test ./integration/chaos -run TestRandom -minutes=2 -seed=%d", seed)
			runCase(t, "random", func(t *testing.T, name string) {
				t.Helper()
				random(t, name, seed, min(restart, time.Until(end)))
			})
		})
		if !ok {
			return
		}
		seed = rand.Uint64()
	}
}

// disturbance is one kind of fault. It begins one and returns what ends it.
type disturbance struct {
	kind   string
	weight int
	begin  func(r *run, n *cluster.Node) (end func())
}

// silence is never longer than a session lives: of one that expired, its users hear.
const silence = "blackhole between clients and a member"

// disturbances are what random faults are drawn from. The member is the leader in half of the draws.
var disturbances = []disturbance{
	{"kill -9 of a member", 4, func(_ *run, n *cluster.Node) func() {
		n.Kill()
		return n.Restart
	}},
	{"kill -9 of all members at once", 1, func(r *run, _ *cluster.Node) func() {
		r.killAll()
		return func() {
			for _, n := range r.c.Nodes {
				n.Start()
			}
		}
	}},
	{"SIGSTOP of a member", 4, func(_ *run, n *cluster.Node) func() {
		n.Signal(syscall.SIGSTOP)
		return func() { n.Signal(syscall.SIGCONT) }
	}},
	{"partition of a member", 2, linked(cut, true)},
	{"partition of a member, nothing lost", 2, linked(cluster.Rules{Hold: true}, true)},
	{"one-way partition of a member", 2, linked(cut, false)},
	{"delay of 75 ms between a member and others", 2, linked(cluster.Rules{
		Delay: 75 * time.Millisecond, Jitter: 50 * time.Millisecond,
	}, true)},
	{"drop of half of a member's messages", 2, linked(cluster.Rules{Drop: 0.5}, true)},
	{silence, 2, func(r *run, n *cluster.Node) func() {
		r.c.Links.Both(cut, []uint64{cluster.Clients}, []uint64{n.ID})
		return r.c.Links.Heal
	}},
	{"reset of a member's connections", 2, func(r *run, n *cluster.Node) func() {
		for _, id := range append(r.ids(n), cluster.Clients) {
			r.c.Links.Of(id, n.ID).Reset()
		}
		return func() {}
	}},
	{"disk full of a member", 2, func(r *run, n *cluster.Node) func() {
		if n.Disk == "" {
			return func() {}
		}
		return cluster.FillDisk(r.t, n.Disk, leftFull)
	}},
	{"slow disk of a member", 2, func(_ *run, n *cluster.Node) func() {
		n.Fail(slowSync)
		return func() { n.Fail() }
	}},
	{"disk error of a member", 2, func(_ *run, n *cluster.Node) func() {
		n.Fail("sync eio")
		return func() {
			n.Wait() //nolint:errcheck // its disk failed
			n.Fail()
			n.Restart()
		}
	}},
}

// linked changes the links from a member to the others, and perhaps those back.
func linked(rules cluster.Rules, both bool) func(*run, *cluster.Node) func() {
	return func(r *run, n *cluster.Node) func() {
		r.c.Links.Set(rules, []uint64{n.ID}, r.ids(n))
		if both {
			r.c.Links.Set(rules, r.ids(n), []uint64{n.ID})
		}
		return r.c.Links.Heal
	}
}

// random runs one cluster under faults that a seed draws: each lasts for 0.1 to 4 s, one in ten up to 15 s.
func random(t *testing.T, name string, seed uint64, lasts time.Duration) {
	t.Helper()
	r := begin(t, name, settings{tags: []string{failpoints}})
	r.rand = rand.New(rand.NewPCG(seed, 6))
	draw := make([]int, 0, 64)
	for i, d := range disturbances {
		draw = append(draw, slices.Repeat([]int{i}, d.weight)...)
	}
	r.until(lasts, func(int) {
		d := disturbances[draw[r.rand.IntN(len(draw))]]
		leads, which, most := r.rand.IntN(2) == 0, r.rand.IntN(len(r.c.Nodes)), 4*time.Second
		if r.rand.IntN(10) == 0 && d.kind != silence {
			most = 15 * time.Second
		}
		n := r.c.Nodes[which]
		if leads {
			n = r.c.Leader()
		}
		t.Logf("%s: %s: member %d", time.Now().Format(time.TimeOnly), d.kind, n.ID)
		end := d.begin(r, n)
		r.fault(d.kind)
		r.sleep(100*time.Millisecond, most)
		end()
		r.writing(time.Now(), 0)
		r.sleep(0, 500*time.Millisecond)
	})
	r.finish()
}
