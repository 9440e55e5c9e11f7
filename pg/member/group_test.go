package member_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"larder/pg/member"
	"larder/pg/store"
)

// job is processes of one job in this one, all connected to each other.
type job struct {
	t    *testing.T
	open func() store.Store

	mu    sync.Mutex
	nodes []*node
}

// node is one process: its registry, its group and a data plane that only counts.
type node struct {
	job   *job
	self  member.Process
	store store.Store
	reg   *member.Registry
	group *member.Group

	mu    sync.Mutex
	dead  bool
	views []member.View
	held  uint64
	seq   uint64
	lost  []error
}

// stores are the implementations that groups are tried on.
var stores = map[string]func(t *testing.T) func() store.Store{
	"tcp": func(t *testing.T) func() store.Store {
		t.Helper()
		srv, err := store.Serve("127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = srv.Close() })
		return func() store.Store {
			s, err := store.Dial(t.Context(), srv.Addr(), time.Second)
			require.NoError(t, err)
			return s
		}
	},
	"directory": func(t *testing.T) func() store.Store {
		t.Helper()
		dir := t.TempDir()
		return func() store.Store {
			s, err := store.Directory(t.Context(), dir, time.Second)
			require.NoError(t, err)
			return s
		}
	},
}

func eachStore(t *testing.T, test func(j *job)) {
	t.Helper()
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&job{t: t, open: open(t)})
		})
	}
}

// start announces a process.
func (j *job) start(rank int) *node {
	n := &node{job: j, store: j.open(), self: member.Process{Rank: rank, Address: fmt.Append(nil, "at ", rank), Host: "h"}}
	j.mu.Lock()
	n.self.Incarnation = uint64(100*rank + len(j.nodes) + 1)
	j.nodes = append(j.nodes, n)
	j.mu.Unlock()
	ctx, cancel := context.WithTimeout(j.t.Context(), 10*time.Second)
	defer cancel()
	var err error
	ready := make(chan struct{})
	n.reg, err = member.NewRegistry(ctx, member.RegistryConfig{
		Store: n.store, Prefix: "pg/job", Self: n.self,
		Appeared: func(p member.Process) {
			go func() {
				<-ready
				n.reg.Linked(p.Rank, p.Incarnation)
			}()
		},
	})
	require.NoError(j.t, err)
	close(ready)
	j.t.Cleanup(n.close)
	return n
}

func (n *node) close() {
	if n.group != nil {
		_ = n.group.Close()
	}
	_ = n.reg.Close()
	_ = n.store.Close()
}

// attach has the process take part in a group.
func (n *node) attach(ctx context.Context, cfg member.Config) error {
	cfg.Hooks = n
	cfg.Isolated = func(err error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.lost = append(n.lost, err)
	}
	g, err := n.reg.NewGroup(ctx, cfg)
	n.group = g
	return err
}

// die ends a process as a crash does: nobody hears from it again, and others see the end of their connections.
func (n *node) die() {
	n.mu.Lock()
	n.dead = true
	n.mu.Unlock()
	n.job.mu.Lock()
	defer n.job.mu.Unlock()
	for _, o := range n.job.nodes {
		if o != n {
			o.reg.Suspect(n.self.Rank, n.self.Incarnation, errors.New("connection reset"))
		}
	}
	n.group.Freeze()
}

func (n *node) Connect(context.Context, member.View) ([]byte, error) { return []byte("fast"), nil }

func (n *node) Hold(v member.View) (done, entered uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.held = v.Epoch
	return n.seq, n.seq
}

func (n *node) Commit(v member.View) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.views = append(n.views, v)
	n.held = 0
}

func (n *node) Abandon(epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.held == epoch {
		n.held = 0
	}
}

// within waits for the group's ranks to be in view.
func (n *node) within(ranks ...int) {
	n.job.t.Helper()
	require.Eventually(n.job.t, func() bool {
		v := n.group.View()
		if len(v.Members) != len(ranks) {
			return false
		}
		for _, r := range ranks {
			if v.Index(r) < 0 {
				return false
			}
		}
		return true
	}, 15*time.Second, time.Millisecond, "rank %d: not in view: %v", n.self.Rank, ranks)
}

// found starts a group of the global ranks 10, 11, ... with some slots more.
func (j *job) found(n, more int, change func(cfg *member.Config)) []*node {
	cfg := config(n, more)
	if change != nil {
		change(&cfg)
	}
	nodes := make([]*node, n)
	var wg sync.WaitGroup
	for i := range nodes {
		nodes[i] = j.start(10 + i)
	}
	ctx, cancel := context.WithTimeout(j.t.Context(), 20*time.Second)
	defer cancel()
	for _, x := range nodes {
		wg.Go(func() {
			if assert.NoError(j.t, x.attach(ctx, cfg)) {
				assert.NoError(j.t, x.group.Start(ctx))
			}
		})
	}
	wg.Wait()
	return nodes
}

func config(n, more int) member.Config {
	cfg := member.Config{ID: "world", AutoDeactivate: true, AutoSync: true}
	for i := range n {
		cfg.Ranks = append(cfg.Ranks, 10+i)
	}
	cfg.Cap = n + more
	return cfg
}

// TestGroupLife: founders start, one dies, another takes its place, one leaves, and the same name serves again.
func TestGroupLife(t *testing.T) {
	t.Parallel()
	eachStore(t, func(j *job) {
		t := j.t
		nodes := j.found(3, 1, nil)
		require.False(t, t.Failed())
		for _, n := range nodes {
			n.within(0, 1, 2)
		}
		nodes[0].seq, nodes[1].seq = 41, 40
		began := time.Now()
		nodes[2].die()
		nodes[0].within(0, 1)
		t.Logf("a death was dealt with in %v", time.Since(began))
		assert.Less(t, time.Since(began), 500*time.Millisecond)
		nodes[1].within(0, 1)
		v := nodes[1].group.View()
		assert.Equal(t, uint64(41), v.StartSeq)
		assert.Equal(t, []int{0, 1}, v.Active.Ranks())
		assert.Equal(t, nodes[2].self.Incarnation, v.Left[0].Incarnation)

		require.NoError(t, nodes[2].store.Close()) // its lease ends
		next := j.start(12)
		cfg := config(3, 1)
		cfg.Extension = true
		require.NoError(t, next.attach(t.Context(), cfg))
		require.NoError(t, next.group.Start(t.Context()))
		joined := make(chan error)
		go func() { joined <- next.group.Join(t.Context()) }()
		require.Eventually(t, func() bool {
			up, err := nodes[0].group.PeerState(2, 3)
			return err == nil && up[0] && !up[1]
		}, 5*time.Second, time.Millisecond)
		var wg sync.WaitGroup
		answers, errs := make([]member.Response, 2), make([]error, 2)
		for i, n := range nodes[:2] {
			wg.Go(func() { answers[i], errs[i] = n.group.Activate(t.Context(), 2) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		for _, r := range answers {
			assert.Equal(t, member.Applied, r.Status, r.Reason)
		}
		require.NoError(t, <-joined)
		next.within(0, 1, 2)
		require.ErrorIs(t, next.group.Join(t.Context()), member.ErrActive)

		r, err := nodes[0].group.Deactivate(t.Context(), 1)
		require.NoError(t, err)
		assert.Equal(t, member.Applied, r.Status)
		next.within(0, 2)
		require.NoError(t, nodes[0].group.Close())
		next.within(2)
		require.NoError(t, nodes[1].group.Close())
		require.NoError(t, next.group.Close())
		left, _, err := next.store.List(t.Context(), "pg/job/grp/")
		require.NoError(t, err)
		assert.Empty(t, left, "the last one tidies up")
	})
}

// TestRegistry: processes hear of each other's coming, going and being replaced, and find each other.
func TestRegistry(t *testing.T) {
	t.Parallel()
	eachStore(t, func(j *job) {
		t := j.t
		heard := make(chan string, 10)
		s := j.open()
		defer func() { _ = s.Close() }()
		first, err := member.NewRegistry(t.Context(), member.RegistryConfig{
			Store: s, Prefix: "pg/job", Self: member.Process{Rank: 0, Incarnation: 1},
			Appeared: func(p member.Process) { heard <- fmt.Sprintf("+%d %s", p.Rank, p.Address) },
			Gone:     func(p member.Process) { heard <- fmt.Sprintf("-%d", p.Rank) },
		})
		require.NoError(t, err)
		defer func() { _ = first.Close() }()
		n := j.start(5)
		assert.Equal(t, "+5 at 5", <-heard)
		p, err := first.Find(t.Context(), 5, n.self.Incarnation)
		require.NoError(t, err)
		assert.Equal(t, n.self, p)
		assert.Len(t, first.Processes(), 2)

		found := make(chan error)
		go func() { // it waits for the next life of rank 5
			_, err := first.Find(t.Context(), 5, n.self.Incarnation+1)
			found <- err
		}()
		require.NoError(t, n.reg.Close())
		assert.Equal(t, "-5", <-heard)
		next := j.start(5)
		require.Equal(t, n.self.Incarnation+1, next.self.Incarnation)
		assert.Equal(t, "+5 at 5", <-heard)
		require.NoError(t, <-found)

		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err = first.Find(ctx, 6, 1)
		require.ErrorContains(t, err, "process 6, incarnation 1, is not announced")
		for name, cfg := range map[string]member.RegistryConfig{
			"Store":            {Prefix: "p", Self: n.self},
			"Prefix":           {Store: n.store, Prefix: "p/", Self: n.self},
			"Self.Rank":        {Store: n.store, Prefix: "p", Self: member.Process{Rank: -1, Incarnation: 1}},
			"Self.Incarnation": {Store: n.store, Prefix: "p"},
		} {
			var ce *member.ConfigError
			_, err := member.NewRegistry(t.Context(), cfg)
			require.ErrorAs(t, err, &ce)
			assert.Equal(t, name, ce.Field)
		}
	})
}

// TestReinit: a group is destroyed and made again under the same name, while some are still in the old one.
func TestReinit(t *testing.T) {
	t.Parallel()
	eachStore(t, func(j *job) {
		nodes := j.found(2, 0, nil)
		var wg sync.WaitGroup
		for i, n := range nodes {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 100 * time.Millisecond)
				assert.NoError(t, n.group.Close())
				assert.NoError(t, n.attach(t.Context(), config(2, 0)))
				assert.NoError(t, n.group.Start(t.Context()))
			})
		}
		wg.Wait()
		for _, n := range nodes {
			n.within(0, 1)
		}
	})
}

// TestWaiting: who waits in vain learns what for.
func TestWaiting(t *testing.T) {
	t.Parallel()
	j := &job{t: t, open: stores["tcp"](t)}
	n := j.start(10)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.NoError(t, n.attach(ctx, config(3, 0)))
	var se *member.StartError
	require.ErrorAs(t, n.group.Start(ctx), &se)
	assert.Equal(t, []int{1, 2}, se.Missing)
	require.ErrorContains(t, se, "not there: ranks 1,2")

	s := j.open()
	defer func() { _ = s.Close() }()
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := member.NewRegistry(ctx, member.RegistryConfig{
		Store: s, Prefix: "pg/job", Self: member.Process{Rank: 10, Incarnation: 7},
	})
	var te *member.TakenError
	require.ErrorAs(t, err, &te)
	require.ErrorContains(t, err, "rank 10 of the job is taken by incarnation")

	e := j.start(12)
	cfg := config(3, 0)
	cfg.ID, cfg.Extension = "other", true
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.ErrorContains(t, e.attach(ctx, cfg), "no process has made the group")
}

// TestDifferences: processes that describe a group otherwise are told in what.
func TestDifferences(t *testing.T) {
	t.Parallel()
	j := &job{t: t, open: stores["tcp"](t)}
	require.NoError(t, j.start(10).attach(t.Context(), config(2, 2)))
	n := j.start(11)
	for want, change := range map[string]func(c *member.Config){
		"cap: 5 here, 4 in the group":                   func(c *member.Config) { c.Cap = 5 },
		"ranks: [11 10] here, [10 11] in the group":     func(c *member.Config) { c.Ranks = []int{11, 10} },
		"ranks: [10 11 12] here, [10 11] in the group":  func(c *member.Config) { c.Ranks = []int{10, 11, 12} },
		"AutoSync: false here, true in the group":       func(c *member.Config) { c.AutoSync = false },
		"global rank 11 is in slots 1 and 2":            func(c *member.Config) { c.Ranks = []int{10, 11, 11} },
		"it is the number of ranks or more, up to 1024": func(c *member.Config) { c.Cap = 1 },
		"do not have this process, 11":                  func(c *member.Config) { c.Ranks = []int{10, 12} },
		`"a/b" has '/'`:                                 func(c *member.Config) { c.ID = "a/b" },
		"AutoSync requires AutoDeactivate":              func(c *member.Config) { c.AutoDeactivate = false },
		"ranks: [12 11] here":                           func(c *member.Config) { c.Ranks, c.Extension = []int{12, 11}, true },
		"ranks: [11 10 1 2 3] here":                     func(c *member.Config) { c.Ranks, c.Cap, c.Extension = []int{11, 10, 1, 2, 3}, 5, true },
	} {
		cfg := config(2, 2)
		change(&cfg)
		require.ErrorContains(t, n.attach(t.Context(), cfg), want)
	}
}

// TestExtend: a group grows beyond what was reserved, and takes in a process that it did not know of.
func TestExtend(t *testing.T) {
	t.Parallel()
	j := &job{t: t, open: stores["tcp"](t)}
	nodes := j.found(2, 0, nil)
	for _, n := range nodes {
		require.NoError(t, n.group.Extend(t.Context(), 3))
		assert.Equal(t, 3, n.group.Cap())
		_, err := n.group.Activate(t.Context(), 3)
		var re *member.RankError
		require.ErrorAs(t, err, &re)
	}
	require.Error(t, nodes[0].group.Extend(t.Context(), member.MaxCap+1))
	n := j.start(12)
	cfg := config(3, 0)
	cfg.Extension = true
	require.NoError(t, n.attach(t.Context(), cfg))
	joined := make(chan error)
	go func() { joined <- n.group.Join(t.Context()) }()
	require.Eventually(t, func() bool { up, _ := nodes[1].group.PeerState(2); return up[0] }, 5*time.Second, time.Millisecond)
	r, err := nodes[1].group.Activate(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, member.Applied, r.Status, r.Reason)
	require.NoError(t, <-joined)
	for _, x := range append(nodes, n) {
		x.within(0, 1, 2)
	}
}

// TestLeaseLost: a process whose lease has ended stops, announces itself again and joins in place.
func TestLeaseLost(t *testing.T) {
	t.Parallel()
	j := &job{t: t, open: stores["tcp"](t)}
	nodes := j.found(2, 0, nil)
	e, err := nodes[0].store.Get(t.Context(), "pg/job/grp/world/slot/1")
	require.NoError(t, err)
	require.NoError(t, nodes[0].store.Delete(t.Context(), e.Key)) // as if its lease had ended
	nodes[0].within(0)
	require.Eventually(t, func() bool {
		nodes[1].mu.Lock()
		defer nodes[1].mu.Unlock()
		return len(nodes[1].lost) == 1 && errors.Is(nodes[1].lost[0], member.ErrLeaseLost)
	}, 5*time.Second, time.Millisecond)
	require.ErrorIs(t, nodes[1].group.Join(t.Context()), member.ErrLeaseLost)
	require.NoError(t, nodes[1].reg.Announce(t.Context()))
	joined := make(chan error)
	go func() { joined <- nodes[1].group.Join(t.Context()) }()
	r, err := nodes[0].group.Activate(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, member.Applied, r.Status, r.Reason)
	require.NoError(t, <-joined)
	nodes[1].within(0, 1)
}
