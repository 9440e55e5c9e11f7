package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"larder/pg/store"
)

// maxPrefix and maxID bound keys: store.MaxKeyBytes has room for both and what is around them.
const (
	maxPrefix = 100
	maxID     = 128
)

// Registry is this process's place in its job: what it announces, and what it knows of others. Its methods may be called
// concurrently. It has one watch of the store for all groups of the process.
type Registry struct {
	cfg  RegistryConfig
	life context.Context //nolint:containedctx // of the goroutines, until Close
	end  context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	known   map[int]Process
	links   map[int]link           // by global rank
	entries map[string]store.Entry // of groups, without the prefix
	groups  map[string]*Group
	changed chan struct{} // closed and replaced whenever anything has changed
	seen    chan struct{} // closed once the watch has told what there is
}

// NewRegistry announces this process. While another one of the same rank is alive it waits; the error is a [*TakenError] if that is
// so until ctx ends.
func NewRegistry(ctx context.Context, cfg RegistryConfig) (*Registry, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Registry{
		cfg: cfg, known: map[int]Process{}, links: map[int]link{}, entries: map[string]store.Entry{}, groups: map[string]*Group{},
		changed: make(chan struct{}), seen: make(chan struct{}),
	}
	r.life, r.end = context.WithCancel(context.WithoutCancel(ctx))
	r.wg.Go(r.watch)
	err := r.Announce(ctx)
	if err == nil {
		select {
		case <-r.seen:
		case <-ctx.Done():
			err = fmt.Errorf("member: the store has not told what there is: %w", ctx.Err())
		}
	}
	if err != nil {
		_ = r.Close() //nolint:contextcheck // ctx may be over
		return nil, err
	}
	return r, nil
}

func (cfg *RegistryConfig) check() error {
	switch {
	case cfg.Store == nil:
		return &ConfigError{"Store", "is missing"}
	case cfg.Prefix == "" || len(cfg.Prefix) > maxPrefix || strings.HasSuffix(cfg.Prefix, "/"):
		return &ConfigError{"Prefix", fmt.Sprintf("has 1 to %d bytes and no slash at its end, not %.40q", maxPrefix, cfg.Prefix)}
	case cfg.Self.Rank < 0 || cfg.Self.Rank >= MaxGlobal:
		return &ConfigError{"Self.Rank", fmt.Sprintf("is 0 to %d, not %d", MaxGlobal-1, cfg.Self.Rank)}
	case cfg.Self.Incarnation == 0:
		return &ConfigError{"Self.Incarnation", "is a random number of this process's life, not 0"}
	}
	return nil
}

func (r *Registry) rankKey(rank int) string { return r.cfg.Prefix + "/rank/" + strconv.Itoa(rank) }

// Announce announces this process anew after its lease was lost, and has its groups take their slots again, outside of their views.
func (r *Registry) Announce(ctx context.Context) error {
	lost := r.cfg.Store.Lost()
	self := r.cfg.Self
	value := encode(announcement{self.Incarnation, self.Address, self.Host})
	key := r.rankKey(self.Rank)
	began, rev, other := now(), uint64(0), ""
	for {
		changed := r.changes()
		e, err := r.cfg.Store.Put(ctx, key, value, store.IfRevision(rev), store.Leased())
		if err == nil {
			break
		}
		if errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrLimit) {
			return fmt.Errorf("member: announce: %w", err)
		}
		rev = 0
		if errors.Is(err, store.ErrConflict) {
			if a, ok := decodeAnnouncement(e.Value); ok && a.Incarnation == self.Incarnation {
				rev = e.Modified // it is our own, of a lease before
				continue
			}
			if a, ok := decodeAnnouncement(e.Value); ok {
				other = fmt.Sprintf("incarnation %x on host %q", a.Incarnation, a.Host)
			}
		}
		if ctx.Err() == nil && sleep(10*RetryPause, changed, ctx.Done()) {
			continue
		}
		if other != "" {
			return &TakenError{fmt.Sprintf("rank %d of the job", self.Rank), other, now() - began, ctx.Err()}
		}
		return fmt.Errorf("member: announce: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	for _, g := range r.groups {
		g.announced()
	}
	r.wg.Go(func() { r.awaitLost(lost) })
	return nil
}

// awaitLost tells when a lease has ended.
func (r *Registry) awaitLost(lost <-chan struct{}) {
	select {
	case <-r.life.Done():
		return
	case <-lost:
	}
	if r.life.Err() != nil {
		return
	}
	r.cfg.Logger.Warn("lease lost", slog.Int("rank", r.cfg.Self.Rank))
	r.mu.Lock()
	for _, g := range r.groups {
		g.input((*core).leaseLost)
	}
	r.mu.Unlock()
	if r.cfg.Lost != nil {
		r.cfg.Lost(ErrLeaseLost)
	}
}

// watch keeps the mirror of the store.
func (r *Registry) watch() {
	for r.life.Err() == nil {
		err := r.cfg.Store.Watch(r.life, r.cfg.Prefix+"/", func(changes []store.Change) error {
			r.apply(changes)
			return nil
		})
		if r.life.Err() != nil || errors.Is(err, store.ErrClosed) {
			return
		}
		r.cfg.Logger.Warn("watch of the store ended", slog.Any("error", err))
		sleep(RetryPause, nil, r.life.Done())
	}
}

// apply takes in what the store tells.
func (r *Registry) apply(changes []store.Change) {
	var calls []func()
	r.mu.Lock()
	for i := range changes {
		c := &changes[i]
		key := strings.TrimPrefix(c.Key, r.cfg.Prefix+"/")
		if digits, ok := strings.CutPrefix(key, "rank/"); ok {
			calls = append(calls, r.applyRank(digits, c)...)
			continue
		}
		if c.Deleted {
			delete(r.entries, key)
		} else {
			r.entries[key] = c.Entry
		}
		if g, rest := r.groupOf(key); g != nil {
			g.change(rest, c)
		}
	}
	close(r.changed)
	r.changed = make(chan struct{})
	select {
	case <-r.seen:
	default:
		close(r.seen)
	}
	r.mu.Unlock()
	for _, call := range calls {
		call()
	}
}

// groupOf is the group of this process that a key "grp/id/rest" is about, nil if it is in none such.
func (r *Registry) groupOf(key string) (g *Group, rest string) {
	key, ok := strings.CutPrefix(key, "grp/")
	id, rest, cut := strings.Cut(key, "/")
	if !ok || !cut {
		return nil, ""
	}
	return r.groups[id], rest
}

// applyRank notes an announcement, and returns whom to tell.
func (r *Registry) applyRank(digits string, c *store.Change) (calls []func()) {
	rank, err := strconv.Atoi(digits)
	if err != nil || rank < 0 || rank >= MaxGlobal {
		return nil
	}
	old, had := r.known[rank]
	a, ok := decodeAnnouncement(c.Value)
	ok = ok && !c.Deleted
	p := Process{rank, a.Incarnation, a.Address, a.Host}
	if had && (!ok || old.Incarnation != p.Incarnation) {
		delete(r.known, rank)
		if rank != r.cfg.Self.Rank && r.cfg.Gone != nil {
			calls = append(calls, func() { r.cfg.Gone(old) })
		}
		had = false
	}
	if ok {
		r.known[rank] = p
		if !had && rank != r.cfg.Self.Rank && r.cfg.Appeared != nil {
			calls = append(calls, func() { r.cfg.Appeared(p) })
		}
	}
	return calls
}

func decodeAnnouncement(value []byte) (a announcement, ok bool) {
	err := json.Unmarshal(value, &a)
	return a, err == nil && a.Incarnation != 0
}

// changes is a channel that is closed at the next change.
func (r *Registry) changes() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// Processes are those who are announced, this one among them, by rank.
func (r *Registry) Processes() []Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.known), func(a, b Process) int { return a.Rank - b.Rank })
}

// Find is a process as it has announced itself; it waits for one that has not yet.
func (r *Registry) Find(ctx context.Context, rank int, incarnation uint64) (Process, error) {
	for {
		r.mu.Lock()
		p, ok := r.known[rank]
		changed, closed := r.changed, r.closed
		r.mu.Unlock()
		if ok && p.Incarnation == incarnation {
			return p, nil
		}
		if closed {
			return Process{}, ErrClosed
		}
		select {
		case <-changed:
		case <-r.life.Done():
		case <-ctx.Done():
			return Process{}, fmt.Errorf("member: process %d, incarnation %x, is not announced: %w", rank, incarnation, ctx.Err())
		}
	}
}

// Linked tells all groups that this process has a connection to another one, given by its global rank.
func (r *Registry) Linked(rank int, incarnation uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.links[rank] = link{incarnation: incarnation, up: true}
	for _, g := range r.groups {
		g.onLink(rank, func(c *core, slot int) { c.linked(slot, incarnation) })
	}
}

// Suspect tells all groups that this process has lost its connection to another one, or has found it dead.
func (r *Registry) Suspect(rank int, incarnation uint64, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.links[rank]; l.incarnation == incarnation {
		r.links[rank] = link{incarnation: incarnation, why: fmt.Sprint(why)}
	}
	for _, g := range r.groups {
		g.onLink(rank, func(c *core, slot int) { c.suspect(slot, incarnation, fmt.Sprint(why), 0) })
	}
}

// Close withdraws the announcement. Close groups first.
func (r *Registry) Close() error {
	r.mu.Lock()
	closed := r.closed
	r.closed = true
	groups := slices.Collect(maps.Values(r.groups))
	r.mu.Unlock()
	if closed {
		return nil
	}
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.Close())
	}
	ctx, cancel := context.WithTimeout(r.life, closeTimeout)
	defer cancel()
	errs = append(errs, withdraw(ctx, r.cfg.Store, r.rankKey(r.cfg.Self.Rank), func(value []byte) bool {
		a, ok := decodeAnnouncement(value)
		return ok && a.Incarnation == r.cfg.Self.Incarnation
	}))
	r.end()
	r.wg.Wait()
	return errors.Join(errs...)
}

// withdraw deletes an entry if it is ours.
func withdraw(ctx context.Context, s store.Store, key string, ours func(value []byte) bool) error {
	e, err := s.Get(ctx, key)
	if err == nil && ours(e.Value) {
		err = s.Delete(ctx, key, store.IfRevision(e.Modified))
	}
	if err == nil || errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrClosed) {
		return nil
	}
	return fmt.Errorf("member: withdraw %s: others wait for the lease to end: %w", key, err)
}
