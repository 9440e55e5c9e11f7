package pg

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"larder/pg/member"
	"larder/pg/p2p"
	"larder/pg/shm"
)

// Policy says what a group does by itself about ranks that have failed.
type Policy uint8

const (
	// Automatic deactivates ranks that have failed; collectives that cannot go on without them wait until that is done.
	Automatic Policy = iota
	// Deferred deactivates them, too, but when [Group.Sync] is called; until then collectives fail at once.
	Deferred
	// Manual leaves them active for their user to see, until [Group.Deactivate]; collectives go on without them.
	Manual
)

// GroupConfig says what a group is. Its processes give the same, but for Extension.
type GroupConfig struct {
	// ID is the group's name in its job.
	ID string
	// Ranks are the global ranks of the places; nil stands for one rank, this process's.
	Ranks []int
	// Capacity is how many places the group has room for; 0 stands for len(Ranks), and [Group.Extend] raises it.
	Capacity int
	// Extension says that this process was not there from the beginning: it is alone, as if the group had nobody else, until it
	// has joined.
	Extension bool
	// Failures says what is done about ranks that have failed.
	Failures Policy
	// Retry has collectives that a failure has interrupted be run again without those who failed. Operands in place are copied before.
	Retry bool
	// Timeout is how long a call may take when nobody has failed; 30 minutes if it is 0.
	Timeout time.Duration
}

// Group is an ordered list of ranks that call collectives together. Its methods may be called concurrently, but which call comes
// first must be the same at all ranks.
type Group struct {
	w       *World
	cfg     GroupConfig
	rank    int
	bell    *shm.Bell
	members *member.Group
	ctx     context.Context // ends with the group
	cancel  context.CancelFunc
	kicked  chan struct{} // the worker is told by it
	later   *time.Timer   // tells it after a moment
	wg      sync.WaitGroup

	locals  atomic.Int32 // active ranks on this host
	waiters atomic.Int32 // who carry calls on

	turn     sync.Mutex // see exec.go; of what follows, too
	spare    []byte     // memory for operands that may be needed again
	port     *p2p.Port
	pairs    map[int]*pair // by rank
	messages []*Work       // sends and receives that are not over

	mu      sync.Mutex
	stopped error // why there are no calls; nil while there are
	joining bool
	leaving bool    // it is being closed
	queue   []*Work // collectives that are not over, in order
	room    []*Work // memory of queue
	waiting int     // sends and receives that were started and are not over
	next    uint64  // number of the next collective
	begun   uint64  // how many have begun, and are over
	done    uint64
	held    bool // a proposed view waits: nothing begins
	frozen  bool // nor goes on
	planes  []*plane
	old     []*plane // to be closed
	made    map[uint64]*plane
	view    member.View
	mark    mark
	downs   map[int]error // of processes, by global rank, that the port has not heard of
}

// Rank is this process's place in the group.
func (g *Group) Rank() int { return g.rank }

// Size is one more than the highest active rank: how many parts calls have. Before this process has joined it is what the group
// was said to have.
func (g *Group) Size() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	ranks := g.view.Active.Ranks()
	if len(ranks) == 0 || !g.view.Active.Has(g.rank) {
		return len(g.cfg.Ranks)
	}
	return ranks[len(ranks)-1] + 1
}

// Capacity is how many ranks the group has room for.
func (g *Group) Capacity() int { return g.members.Cap() }

// Active are the ranks that are active.
func (g *Group) Active() member.Mask {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.view.Active.Clone()
}

// Epoch numbers the view that is in force. It grows.
func (g *Group) Epoch() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.view.Epoch
}

// PeerState tells of ranks whether they may be activated, or are active and well, as far as this process knows.
func (g *Group) PeerState(ranks ...int) ([]bool, error) {
	states, err := g.members.PeerState(ranks...)
	return states, ours(err)
}

// Activate makes ranks active that have asked to join, when all are connected to each other. All active ranks may call it, or one.
func (g *Group) Activate(ctx context.Context, ranks ...int) (member.Response, error) {
	res, err := g.members.Activate(ctx, ranks...)
	return res, ours(err)
}

// Deactivate has ranks take part no more, whether they have failed or not.
func (g *Group) Deactivate(ctx context.Context, ranks ...int) (member.Response, error) {
	res, err := g.members.Deactivate(ctx, ranks...)
	return res, ours(err)
}

// Sync returns when failures that are known here have led to a view without those who failed.
func (g *Group) Sync(ctx context.Context) (member.Response, error) {
	res, err := g.members.Sync(ctx)
	return res, ours(err)
}

// Extend gives the group room for n ranks. The new places are inactive until processes take them, and are activated.
func (g *Group) Extend(ctx context.Context, n int) error { return ours(g.members.Extend(ctx, n)) }

// ours is an error of the members' agreement in this package's words.
func ours(err error) error {
	if errors.Is(err, member.ErrClosed) {
		return ErrClosed
	}
	return err
}

// drainTime is how long Join waits for calls that are under way.
const drainTime = 5 * time.Second

// Join has this process take part from a view on that an active rank makes with [Group.Activate]. Calls fail until then.
func (g *Group) Join(ctx context.Context) error {
	g.mu.Lock()
	if err := g.refusal(); err != nil {
		g.mu.Unlock()
		return err
	}
	g.joining = true
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.joining = false
		g.mu.Unlock()
	}()
	if !g.bell.Wait(func() bool { g.help(); return g.idle() }, 0, drainTime) {
		return wrong("Join: calls have been under way for %v: wait for them first", drainTime)
	}
	return ours(g.members.Join(ctx))
}

// refusal is why calls are not taken now, nil if they are. It holds mu.
func (g *Group) refusal() error {
	if g.stopped == nil && g.joining {
		return ErrJoining
	}
	return g.stopped
}

// idle tells whether no call is under way.
func (g *Group) idle() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.queue) == 0 && g.waiting == 0
}

// Do carries out a call in the caller's thread and returns when it is over.
func (g *Group) Do(c Call) (Result, error) {
	w, _ := g.w.works.Get().(*Work)
	if w == nil {
		w = &Work{}
		w.ready = func() bool { w.g.help(); return w.over.Load() }
	}
	w.reset(g, c)
	if err := g.enqueue(w); err != nil {
		return Result{}, err
	}
	for !g.carry(w.ready, time.Hour) { // calls end by their timeouts; an hour is the bell's bound
	}
	res, err := w.res, w.err
	g.w.works.Put(w)
	return res, err
}

// Start begins a call, any number of them, and leaves it to the group: see [Work.Leave]. Collectives run in the order of their
// starts.
func (g *Group) Start(c Call) *Work {
	w := g.Queue(c)
	w.Leave()
	return w
}

// Queue is Start for a caller that waits at once, and so carries the call on itself: nobody else does until it waits, or leaves it.
func (g *Group) Queue(c Call) *Work {
	w := &Work{}
	w.reset(g, c)
	if err := g.enqueue(w); err != nil {
		w.finish(Result{}, err)
		return w
	}
	g.help() // what is small is with the others now
	return w
}

// enqueue gives a call its number.
func (g *Group) enqueue(w *Work) error {
	if err := g.check(&w.call); err != nil {
		return err
	}
	if w.call.p2p != none {
		return g.enqueueMessage(w)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.refusal(); err != nil {
		return err
	}
	w.seq = g.next
	g.next++
	if len(g.queue) == 0 {
		g.mark = newMark()
	}
	if cap(g.queue) == len(g.queue) {
		g.room = append(slices.Grow(g.room[:0], 2*len(g.queue)+16), g.queue...)
		g.queue = g.room
	}
	g.queue = append(g.queue, w)
	return nil
}

// wait is Work.Wait.
func (g *Group) wait(ctx context.Context, w *Work) error {
	stop := context.AfterFunc(ctx, g.bell.Ring)
	defer stop()
	ready := func() bool { g.help(); return w.over.Load() || ctx.Err() != nil }
	for !g.carry(ready, time.Hour) { // as in Do
	}
	if w.over.Load() {
		return nil
	}
	return ctx.Err()
}

// leaveTime is how long a rank that leaves waits for the others to agree: if they do not, it is lost to them.
const leaveTime = 2 * time.Second

// leave has the others agree on a view without this rank, which says from which collective on they are without it: those before, which
// this rank has completed, they can complete, too.
func (g *Group) leave() {
	g.mu.Lock()
	g.leaving = true
	alone := g.stopped != nil || len(g.view.Members) < 2 || g.view.Index(g.rank) < 0
	g.mu.Unlock()
	if alone {
		return
	}
	ctx, cancel := context.WithTimeout(g.ctx, leaveTime)
	defer cancel()
	_, _ = g.members.Deactivate(ctx, g.rank) // see leaveTime
}

// Close leaves the group. Calls that are under way fail with [ErrClosed].
func (g *Group) Close() error {
	g.leave()
	if !g.stop(ErrClosed) {
		return nil
	}
	g.endCalls(ErrClosed) // before ctx ends, which would end them in other words
	g.w.forget(g)
	g.cancel()
	err := g.members.Close()
	g.halt()
	g.w.node.Unpair(g.cfg.ID, -1)
	return err
}

// halt waits for the group's goroutines, whose ctx is over, and closes all channels.
func (g *Group) halt() {
	g.later.Stop()
	g.wg.Wait()
	g.turn.Lock()
	defer g.turn.Unlock()
	g.mu.Lock()
	g.dropPlanes()
	for _, p := range g.made {
		g.old = append(g.old, p)
	}
	g.made = nil
	g.mu.Unlock()
	g.closeOld()
}
