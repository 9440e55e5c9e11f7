package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// Sizes of what cases run on: small enough that a machine can hold five, large enough that nothing but a test fills one.
const (
	diskSize = "700m"
	poolSize = "128MiB"
	minFree  = 64 << 20 // what servers here keep free, see cluster.New
)

// Load of each case, beside a probe that stores one value after the other.
const (
	writers    = 2
	readers    = 2
	rivals     = 3  // clients on shared keys
	sharedKeys = 16 // few, so that they meet
	liveKeys   = 200
)

// settings describe the cluster of a case.
type settings struct {
	members int
	flags   []string
	pool    string
	tags    []string
	noLoad  bool
	wire    bool                                   // network namespaces instead of proxies
	binary  func(t *testing.T, c *cluster.Cluster) // changes the members before they start
}

// run is one case while it runs.
type run struct {
	t       *testing.T
	name    string
	c       *cluster.Cluster
	load    *cluster.Load
	probe   *cluster.Prober
	shared  *cluster.Recorder
	rand    *rand.Rand
	endRace context.CancelFunc
	racing  sync.WaitGroup
	strange bool // devices are missing on purpose, which a check of the pool would report
}

// begin starts the cluster of a case and its load.
func begin(t *testing.T, name string, s settings) *run {
	t.Helper()
	if s.members == 0 {
		s.members = 3
	}
	if s.pool == "" {
		s.pool = poolSize
	}
	r := &run{t: t, name: name, rand: rand.New(rand.NewPCG(rand.Uint64(), 5))}
	r.c = cluster.New(t, cluster.Options{
		Members: s.members, Pool: s.pool, Flags: s.flags, Links: !s.wire, Wire: s.wire, Disk: diskSize, Tags: s.tags,
	})
	if s.binary != nil {
		s.binary(t, r.c)
	}
	for _, n := range r.c.Nodes {
		n.Start()
	}
	r.c.Leader()
	if !s.noLoad {
		r.startLoad()
	}
	return r
}

// startLoad starts clients that run until finish.
func (r *run) startLoad() {
	r.t.Helper()
	r.load = cluster.NewLoad(r.t, r.c)
	for i := range writers {
		r.load.Writer(r.c.Open(client.Config{Checksums: i == 0}), fmt.Sprintf("w%d", i), liveKeys)
	}
	for range readers {
		r.load.Reader(r.c.Open(client.Config{}))
	}
	r.probe = r.load.Prober(r.c.Open(client.Config{}))
	r.shared = cluster.NewRecorder(r.t)
	ctx, cancel := context.WithCancel(r.t.Context())
	r.endRace = func() { cancel(); r.racing.Wait() }
	r.t.Cleanup(r.endRace)
	for id := range rivals {
		x := r.c.Open(client.Config{})
		r.racing.Go(func() { r.shared.Work(ctx, id, x, sharedKeys) })
	}
	r.probe.Await(r.t, time.Now())
}

// finish ends the faults, wants everything to work again, and checks all that was done.
func (r *run) finish() {
	r.t.Helper()
	if r.c.Links != nil {
		r.c.Links.Heal()
	}
	for _, n := range r.c.Nodes {
		switch n.State() {
		case cluster.Stopped:
			n.Signal(syscall.SIGCONT)
		case cluster.Down:
			n.Restart()
		case cluster.Running:
		}
	}
	healed := time.Now()
	if r.load != nil {
		r.figure("after the faults, next acknowledged store", ms(r.probe.Await(r.t, healed)), "ms", "", true)
		r.endRace()
		r.load.Stop()
		ops, unknown := r.shared.Check()
		count(total.Operations, map[string]uint64{
			"put": r.load.Puts.Load(), "get": r.load.Gets.Load(), "delete": r.load.Deletes.Load(),
			"on shared keys": uint64(ops), "with an unknown outcome": uint64(unknown),
		})
		r.load.VerifyAll(r.c.Open(client.Config{}))
	}
	r.c.Settled()
	if !r.strange {
		r.c.Check()
	}
}

// fault counts a fault that was injected.
func (r *run) fault(kind string) { count(total.Faults, map[string]uint64{kind: 1}) }

func count(to, n map[string]uint64) {
	total.mu.Lock()
	defer total.mu.Unlock()
	for kind, n := range n {
		to[kind] += n
	}
}

// figure notes what was measured.
func (r *run) figure(name string, value float64, unit, goal string, met bool) {
	r.t.Logf("%s: %.4g %s %s", name, value, unit, goal)
	total.mu.Lock()
	defer total.mu.Unlock()
	total.Figures = append(total.Figures, figure{r.name, name, value, unit, goal, met})
}

// spread notes the middle and the upper end of what was measured several times.
func (r *run) spread(name string, list []time.Duration, goal string, met bool) {
	if len(list) == 0 {
		return
	}
	list = slices.Sorted(slices.Values(list))
	r.figure(name+", median of "+strconv.Itoa(len(list)), ms(list[len(list)/2]), "ms", "", true)
	r.figure(name+", longest", ms(list[len(list)-1]), "ms", goal, met)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// ids lists the members' ids, without some.
func (r *run) ids(without ...*cluster.Node) (ids []uint64) {
	for _, n := range r.c.Nodes {
		if !slices.Contains(without, n) {
			ids = append(ids, n.ID)
		}
	}
	return ids
}

// others lists the members but one.
func (r *run) others(than *cluster.Node) []*cluster.Node {
	return slices.DeleteFunc(slices.Clone(r.c.Nodes), func(n *cluster.Node) bool { return n == than })
}

// follower returns a member that does not lead.
func (r *run) follower() *cluster.Node {
	r.t.Helper()
	leader := r.c.Leader()
	others := r.others(leader)
	return others[r.rand.IntN(len(others))]
}

// sleep waits for a random time.
func (r *run) sleep(least, most time.Duration) {
	time.Sleep(least + time.Duration(r.rand.Int64N(int64(most-least)+1)))
}

// until calls step until the case has lasted long enough, at least once.
func (r *run) until(d time.Duration, step func(i int)) {
	for i, end := 0, time.Now().Add(d); i == 0 || time.Now().Before(end); i++ {
		step(i)
	}
}

// writing fails the test unless writes go on within some election timeouts of now, and returns after how long they did.
func (r *run) writing(at time.Time, timeouts int) time.Duration {
	r.t.Helper()
	d := r.probe.Await(r.t, at)
	if limit := time.Duration(timeouts) * cluster.ElectionTimeout; timeouts > 0 {
		require.LessOrEqual(r.t, d, limit+cluster.Stalled(at), "no store was acknowledged for too long")
	}
	return d
}
