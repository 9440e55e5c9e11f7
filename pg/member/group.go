package member

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"

	"larder/pg/store"
)

// Group is one group as this process takes part in it. Its methods may be called concurrently.
//
// It drives a core: inputs come from the registry's watch, from answers of the store and from callers, and are taken in under mu.
// What the core says about the data plane is done by one goroutine in that order, without mu, so that hooks may call the group.
type Group struct {
	reg        *Registry
	cfg        Config
	slot       int
	generation uint64
	life       context.Context //nolint:containedctx // of its goroutines, until Close
	end        context.CancelFunc
	wg         sync.WaitGroup
	wake       chan struct{} // the time to look at has changed
	work       chan struct{} // todo has something
	requests   chan output   // to the store: the core has at most one of its row and one of the view on their way

	mu       sync.Mutex
	core     *core
	closed   bool
	replaced bool
	view     View // the last one that Hooks.Commit has returned from
	todo     []output
	calls    map[int]chan output
	connects map[uint64]*connecting
	attached chan struct{} // closed once our row is there
	// superseded is closed when another group of this name is seen.
	superseded chan struct{}
}

// connecting is a Hooks.Connect in progress.
type connecting struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// NewGroup attaches this process to a group, which its first process makes: a [*SpecError] says that others describe it otherwise,
// a [*TakenError] that another process has its slot. From then on the hooks may be called.
func (r *Registry) NewGroup(ctx context.Context, cfg Config) (*Group, error) {
	for {
		g, err := r.newGroup(ctx, cfg)
		if err != nil {
			return nil, err
		}
		same, err := g.confirm(ctx)
		if same {
			return g, nil
		}
		_ = g.Close() //nolint:contextcheck // it is over
		if err != nil {
			return nil, &StartError{Group: cfg.ID, Detail: "the store has not confirmed the group", Err: err}
		}
	}
}

// newGroup attaches to the group that is there, which may be about to be removed.
func (r *Registry) newGroup(ctx context.Context, cfg Config) (*Group, error) {
	cfg.Ranks = slices.Clone(cfg.Ranks)
	slot, err := cfg.check(r.cfg.Self.Rank)
	if err != nil {
		return nil, err
	}
	g := &Group{
		reg: r, cfg: cfg, slot: slot, wake: make(chan struct{}, 1), work: make(chan struct{}, 1), calls: map[int]chan output{},
		connects: map[uint64]*connecting{}, attached: make(chan struct{}), superseded: make(chan struct{}),
		requests: make(chan output, requestsAtOnce),
	}
	s, generation, err := g.attach(ctx)
	if err != nil {
		return nil, err
	}
	g.generation = generation
	g.life, g.end = context.WithCancel(r.life)
	g.core = newCore(coreConfig{
		group: cfg.ID, rank: slot, incarnation: r.cfg.Self.Incarnation, attached: rand.Uint64(), generation: generation, //nolint:gosec // a name
		lease: r.cfg.Store.Lease(), table: cfg.Table,
	}, s, now())
	g.core.joining = g.core.joining && !cfg.Extension
	if err := g.register(); err != nil {
		return nil, err
	}
	began := now()
	g.wg.Go(g.keepTime)
	g.wg.Go(g.doWork)
	for range requestsAtOnce {
		g.wg.Go(g.askStore)
	}
	g.input(func(*core) {})
	select {
	case <-g.attached:
		return g, nil
	case <-g.superseded:
		return g, nil // which confirm finds
	case <-ctx.Done():
	case <-g.life.Done():
	}
	g.mu.Lock()
	taken := g.core.takenBy
	g.mu.Unlock()
	_ = g.Close() //nolint:contextcheck // ctx is over
	if taken != 0 {
		what := fmt.Sprintf("slot %d of group %q", slot, cfg.ID)
		return nil, &TakenError{what, fmt.Sprintf("incarnation %x", taken), now() - began, ctx.Err()}
	}
	return nil, &StartError{Group: cfg.ID, Detail: "the store has not taken this process's row", Err: ctx.Err()}
}

// register has the registry tell this group of changes, from what is there on.
func (g *Group) register() error {
	r := g.reg
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return ErrClosed
	case r.groups[g.cfg.ID] != nil:
		return &ConfigError{"ID", fmt.Sprintf("%q is the name of another group of this process", g.cfg.ID)}
	}
	r.groups[g.cfg.ID] = g
	for key, e := range r.entries {
		if rest, ok := strings.CutPrefix(key, "grp/"+g.cfg.ID+"/"); ok && rest != keySpec {
			g.core.change(rest, e.Value, e.Modified, false)
		}
	}
	// Whatever was in the view before is not this membership: it begins after all epochs that are known.
	g.core.out = g.core.rec.Last
	for slot, global := range g.core.spec.Ranks {
		if l, ok := r.links[global]; ok && l.up {
			g.core.linked(slot, l.incarnation)
		}
	}
	return nil
}

// key is a key of the group in the store.
func (g *Group) key(rest string) string { return g.reg.cfg.Prefix + "/grp/" + g.cfg.ID + "/" + rest }

// input has the core take something in, and does what follows.
func (g *Group) input(fn func(c *core)) {
	confirmed := g.reg.cfg.Store.Confirmed()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	c := g.core
	c.tick(now(), confirmed)
	fn(c)
	c.step()
	for _, o := range c.take() {
		g.dispatch(o)
	}
	if c.attached {
		select {
		case <-g.attached:
		default:
			close(g.attached)
		}
	}
	signal(g.wake)
}

// signal wakes who waits for c, now or next.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// dispatch begins requests to the store, and leaves the rest to doWork. mu is held.
func (g *Group) dispatch(o output) {
	switch o.kind {
	case outPut, outGet:
		g.requests <- o
		return
	case outAbandon:
		if x := g.connects[o.epoch]; x != nil {
			x.cancel()
		}
	default:
	}
	g.todo = append(g.todo, o)
	signal(g.work)
}

// requestsAtOnce is how many requests a core has on their way at most: see write.
const requestsAtOnce = 2

// askStore makes requests to the store.
func (g *Group) askStore() {
	for {
		select {
		case <-g.life.Done():
			return
		case o := <-g.requests:
			g.request(o)
		}
	}
}

// request is one put or get.
func (g *Group) request(o output) {
	ctx, cancel := context.WithTimeout(g.life, storeTimeout)
	defer cancel()
	var e store.Entry
	var err error
	if o.kind == outGet {
		e, err = g.reg.cfg.Store.Get(ctx, g.key(o.key))
	} else {
		opts := []store.Option{store.IfRevision(o.rev)}
		if o.leased {
			opts = append(opts, store.Leased())
		}
		e, err = g.reg.cfg.Store.Put(ctx, g.key(o.key), o.value, opts...)
		e.Value = o.value
	}
	f := fateUnknown
	switch {
	case err == nil:
		f = fateDone
	case errors.Is(err, store.ErrConflict) && o.kind == outPut:
		f = fateConflict
	case errors.Is(err, store.ErrNotFound) && o.kind == outGet:
		f = fateAbsent
	}
	g.input(func(c *core) { c.stored(o.id, f, e.Value, e.Modified) })
}

// change is what the registry's watch tells of one of the group's entries. The registry's mu is held.
func (g *Group) change(key string, x *store.Change) {
	if key != keySpec {
		g.input(func(c *core) { c.change(key, x.Value, x.Modified, x.Deleted) })
		return
	}
	s, err := decodeSpec(x.Value)
	g.input(func(c *core) {
		switch {
		case x.Deleted || x.Created < g.generation: // an earlier group of this name; a deletion's revision may be later than it was
		case x.Created > g.generation:
			if !g.replaced {
				g.replaced = true
				close(g.superseded)
				c.leaseLost()
				c.put(output{kind: outIsolated, err: ErrReplaced})
			}
		case err == nil:
			c.spec = s
			for slot, global := range s.Ranks {
				if l := g.reg.links[global]; l.up && c.links[slot] == (link{}) {
					c.linked(slot, l.incarnation) // it has a slot only now
				}
			}
		}
	})
}

// announced has the group take its slot again.
func (g *Group) announced() {
	g.input(func(c *core) {
		if !g.replaced {
			c.announced()
		}
	})
}

// onLink is news of the connection to a process that has a slot of the group.
func (g *Group) onLink(global int, fn func(c *core, slot int)) {
	g.input(func(c *core) {
		if slot := slices.Index(c.spec.Ranks, global); slot >= 0 {
			fn(c, slot)
		}
	})
}

// keepTime looks at the core when there is something to do by then.
func (g *Group) keepTime() {
	for {
		g.mu.Lock()
		d := tickPause
		if at := g.core.wake; at != 0 {
			d = min(d, max(at-now(), 0))
		}
		g.mu.Unlock()
		before := now()
		if !sleep(d, g.wake, g.life.Done()) {
			return
		}
		if now()-before >= d {
			g.input(func(*core) {})
		}
	}
}

// doWork does what the core says about the data plane, in that order.
func (g *Group) doWork() {
	for {
		select {
		case <-g.life.Done():
			return
		case <-g.work:
		}
		for {
			g.mu.Lock()
			todo := g.todo
			g.todo = nil
			g.mu.Unlock()
			if len(todo) == 0 {
				break
			}
			for _, o := range todo {
				if g.life.Err() == nil {
					g.do(o)
				}
			}
		}
	}
}

func (g *Group) do(o output) {
	switch o.kind {
	case outConnect:
		g.connect(o.view)
	case outHold:
		done, entered := g.cfg.Hooks.Hold(o.view)
		g.input(func(c *core) { c.held(o.view.Epoch, done, entered) })
	case outCommit:
		g.cfg.Hooks.Commit(o.view)
		g.mu.Lock()
		g.view = o.view
		g.mu.Unlock()
	case outAbandon:
		g.mu.Lock()
		x := g.connects[o.epoch]
		g.mu.Unlock()
		if x != nil {
			x.cancel()
			<-x.done
		}
		g.cfg.Hooks.Abandon(o.epoch)
	case outIsolated:
		if g.cfg.Isolated != nil {
			g.cfg.Isolated(o.err)
		}
	case outDone:
		g.mu.Lock()
		call := g.calls[o.id]
		delete(g.calls, o.id)
		g.mu.Unlock()
		if call != nil {
			call <- o
		}
	case outPut, outGet: // by dispatch
	}
}

// connect runs Hooks.Connect beside all else.
func (g *Group) connect(v View) {
	ctx, cancel := context.WithCancel(g.life)
	x := &connecting{cancel, make(chan struct{})}
	g.mu.Lock()
	g.connects[v.Epoch] = x
	if g.core.told != v.Epoch {
		cancel() // it has been given up already
	}
	g.mu.Unlock()
	g.wg.Go(func() {
		defer cancel()
		report, err := g.cfg.Hooks.Connect(ctx, v)
		close(x.done)
		g.input(func(c *core) {
			delete(g.connects, v.Epoch)
			c.connected(v.Epoch, report, err)
		})
	})
}

// ask makes a call of the core and waits for its answer.
func (g *Group) ask(ctx context.Context, kind callKind, ranks []int) (Response, error) {
	answer := make(chan output, 1)
	id := 0
	g.input(func(c *core) {
		id = c.begin(kind, ranks)
		g.calls[id] = answer
	})
	if id == 0 {
		return Response{}, ErrClosed
	}
	select {
	case o := <-answer:
		return o.resp, o.err
	case <-g.life.Done():
		return Response{}, ErrClosed
	case <-ctx.Done():
	}
	g.input(func(c *core) {
		c.cancel(id)
		delete(g.calls, id)
	})
	return Response{}, ctx.Err() //nolint:wrapcheck // callers do
}

// Start waits until the group has a view: founders until they are in the first one. The error is a [*StartError] that names who is
// missing.
func (g *Group) Start(ctx context.Context) error {
	_, err := g.ask(ctx, callStart, nil)
	if err == nil || ctx.Err() == nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	e := &StartError{Group: g.cfg.ID, Err: err, Detail: g.core.rec.Note}
	if g.core.rec.Committed.Epoch == 0 {
		e.Missing, e.Apart = g.core.lacking(16)
	}
	return e
}

// Rank is this process's slot.
func (g *Group) Rank() int { return g.slot }

// Cap is the number of slots, of which Ranks says the global ranks that have one.
func (g *Group) Cap() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.core.spec.Cap
}

// Ranks are the global ranks of the slots. Those at the end that nobody has are left out.
func (g *Group) Ranks() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.core.spec.Ranks)
}

// View is the view that was committed last and that Hooks.Commit has been called with.
func (g *Group) View() View {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.view
}

// PeerState tells of each rank whether it is alive, connected to all members and either a member or waiting to be: from what this
// process knows, without asking anybody.
func (g *Group) PeerState(ranks ...int) ([]bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	list := make([]bool, len(ranks))
	for i, rank := range ranks {
		if rank < 0 || rank >= g.core.spec.Cap {
			return nil, &RankError{rank, fmt.Sprintf("is not of the group, which has %d slots", g.core.spec.Cap)}
		}
		list[i] = g.core.healthy(rank)
	}
	return list, nil
}

// Activate makes ranks members. It waits until all who will then be members are alive, connected to each other and members already or
// waiting to be, at most [AdmitTimeout]. That several processes ask for the same is fine.
func (g *Group) Activate(ctx context.Context, ranks ...int) (Response, error) {
	return g.ask(ctx, callActivate, ranks)
}

// Deactivate removes ranks from the active set, dead or alive.
func (g *Group) Deactivate(ctx context.Context, ranks ...int) (Response, error) {
	return g.ask(ctx, callDeactivate, ranks)
}

// Join waits, outside of the view, until somebody activates this process.
func (g *Group) Join(ctx context.Context) error {
	_, err := g.ask(ctx, callJoin, nil)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("member: nobody has activated slot %d of group %q: %w", g.slot, g.cfg.ID, err)
	}
	return err
}

// Sync waits until failures that this process knows of are dealt with; without AutoSync it has them be dealt with. It says
// Reconciled if there were any since it was called last.
func (g *Group) Sync(ctx context.Context) (Response, error) { return g.ask(ctx, callSync, nil) }

// Extend raises the number of slots to n. The new ones are inactive, and have no process until one that extends Ranks attaches.
// That several processes ask for the same, or for less than there is, is fine.
func (g *Group) Extend(ctx context.Context, n int) error {
	if n < 1 || n > MaxCap {
		return &ConfigError{"Cap", fmt.Sprintf("cannot be extended to %d: a group has 1 to %d slots", n, MaxCap)}
	}
	for {
		if g.life.Err() != nil {
			return ErrClosed
		}
		e, err := g.reg.cfg.Store.Get(ctx, g.key(keySpec))
		if err != nil {
			return fmt.Errorf("member: extend group %q: %w", g.cfg.ID, err)
		}
		s, err := decodeSpec(e.Value)
		if err != nil || e.Created != g.generation {
			return ErrReplaced
		}
		if n > s.Cap {
			s.Cap = n
			_, err = g.reg.cfg.Store.Put(ctx, g.key(keySpec), encode(s), store.IfRevision(e.Modified))
		}
		if errors.Is(err, store.ErrConflict) {
			continue
		}
		if err != nil {
			return fmt.Errorf("member: extend group %q: %w", g.cfg.ID, err)
		}
		g.input(func(c *core) {
			if s.Cap > c.spec.Cap {
				c.spec = s
			}
		})
		return nil
	}
}

// Suspect is Registry.Suspect for this group alone, by rank in it: a channel to a member has failed.
func (g *Group) Suspect(rank int, incarnation uint64, why error) {
	g.input(func(c *core) { c.suspect(rank, incarnation, fmt.Sprint(why), 0) })
}

// Linked is Registry.Linked for this group alone.
func (g *Group) Linked(rank int, incarnation uint64) {
	g.input(func(c *core) { c.linked(rank, incarnation) })
}

// Resync asks for a new view of the same members, since they are not at one mind about the operations of an epoch: they have called
// different ones, say. Operations that anybody has begun are not run again. Nothing happens if that epoch is over.
func (g *Group) Resync(epoch uint64, why error) {
	g.input(func(c *core) { c.askResync(epoch, false, fmt.Sprint(why)) })
}

// Close leaves the group. Others go on at once, without waiting for a lease.
func (g *Group) Close() error {
	g.mu.Lock()
	closed := g.closed
	g.closed = true
	g.mu.Unlock()
	g.end()
	g.wg.Wait()
	if closed {
		return nil
	}
	g.reg.mu.Lock()
	delete(g.reg.groups, g.cfg.ID)
	g.reg.mu.Unlock()
	ctx, cancel := context.WithTimeout(g.reg.life, closeTimeout)
	defer cancel()
	err := withdraw(ctx, g.reg.cfg.Store, g.key(keySlot+strconv.Itoa(g.slot)), func(value []byte) bool {
		r, err := decodeRow(value)
		return err == nil && r.Incarnation == g.reg.cfg.Self.Incarnation && r.Generation == g.generation &&
			r.Attached == g.core.cfg.attached
	})
	if err == nil {
		err = g.tidy(ctx)
	}
	return err
}
