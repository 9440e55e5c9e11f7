package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"larder/pg/link"
	"larder/pg/member"
	"larder/pg/store"
	"larder/transfer"
)

// Config is what a world is made of. Store is required.
type Config struct {
	// Job is what the processes that work together have in common; "default" if it is empty.
	Job string
	// Rank is this process's number in the job, its global rank.
	Rank int
	// Store is where ranks find each other and agree. It stays the caller's, who closes it after the world.
	Store store.Store
	// Token must be the same in all processes of the job.
	Token string
	// Host says which processes share memory: those that give the same. Empty finds out.
	Host string
	// Listen are the TCP addresses, host:port, at which processes of other hosts reach this one; none if there are no others.
	// Advertise are what they are told instead. A port of 0 takes a free one.
	Listen, Advertise []string
	// Transports are those that may be used, the preferred ones first: shm, unix, rdma, tcp; none means all. engine is rdma by
	// whatever transports the engine has.
	Transports []string
	// Engine moves bytes over RDMA, if it has NICs. It stays the caller's, who closes it after the world; several worlds may
	// share one.
	Engine *transfer.Engine
	// Deadline is how long a collective may make no progress until the ranks are asked whether they are alive; 10 s if it is 0.
	Deadline time.Duration
	// Logger gets what an operator may want to know; nil for nothing.
	Logger *slog.Logger
}

const (
	// defaultDeadline is long for a collective, and short beside defaultTimeout.
	defaultDeadline = 10 * time.Second
	// defaultTimeout is torch's.
	defaultTimeout = 30 * time.Minute
	// redialTime is how long a process is left alone that could not be connected, or was lost.
	redialTime = 50 * time.Millisecond
)

// World is one process's part in a job. Its methods may be called concurrently.
type World struct {
	cfg         Config
	incarnation uint64
	node        *link.Node
	registry    *member.Registry
	works       sync.Pool // of *Work, for Do
	ctx         context.Context
	cancel      context.CancelFunc
	wg          sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[int]*peer // by global rank
	groups []*Group
}

// peer is another process as long as it is announced.
type peer struct {
	member.Process

	cancel context.CancelFunc
	lost   chan struct{} // its connection was
}

// New announces this process to its job. While another one of the same rank is alive it waits, until ctx ends.
func New(ctx context.Context, cfg Config) (*World, error) {
	if cfg.Store == nil {
		return nil, wrong("a world needs a Store: see larder/pg/store")
	}
	cfg.Job = cmp.Or(cfg.Job, "default")
	cfg.Deadline = cmp.Or(cfg.Deadline, defaultDeadline)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	w := &World{cfg: cfg, incarnation: rand.Uint64() | 1, peers: map[int]*peer{}} //nolint:gosec // a name, not a secret
	w.ctx, w.cancel = context.WithCancel(context.Background())                    // until Close
	node, err := link.New(link.Config{                                            //nolint:contextcheck // it lives until Close
		Job: cfg.Job, Rank: cfg.Rank, Incarnation: w.incarnation, Token: cfg.Token, Host: cfg.Host, Listen: cfg.Listen,
		Advertise: cfg.Advertise, Transports: cfg.Transports, Engine: cfg.Engine, Logger: cfg.Logger,
		Up: w.up, Down: w.down, Answer: w.answer,
	})
	if err != nil {
		w.cancel()
		return nil, fmt.Errorf("pg: %w", err)
	}
	w.node = node
	w.mu.Lock() // what the registry tells waits until it is there
	w.registry, err = member.NewRegistry(ctx, member.RegistryConfig{
		Store: cfg.Store, Prefix: "pg/" + cfg.Job, Lease: cfg.Store.Lease(), Logger: cfg.Logger,
		Self:     member.Process{Rank: cfg.Rank, Incarnation: w.incarnation, Address: node.Address(), Host: cfg.Host},
		Appeared: w.appeared, Gone: w.gone, Lost: w.leaseLost,
	})
	w.mu.Unlock()
	if err != nil {
		w.cancel()
		return nil, errors.Join(fmt.Errorf("pg: %w", err), node.Close())
	}
	w.wg.Go(w.watch)
	return w, nil
}

// Rank is this process's global rank.
func (w *World) Rank() int { return w.cfg.Rank }

// Close leaves the job, and all groups.
func (w *World) Close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	w.closed = true
	groups := slices.Clone(w.groups)
	w.mu.Unlock()
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.Close())
	}
	w.cancel()
	errs = append(errs, w.registry.Close())
	w.wg.Wait()
	return errors.Join(append(errs, w.node.Close())...)
}

// appeared connects this process to another one for as long as that is announced.
func (w *World) appeared(p member.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	if old := w.peers[p.Rank]; old != nil {
		old.cancel()
	}
	ctx, cancel := context.WithCancel(w.ctx)
	q := &peer{Process: p, cancel: cancel, lost: make(chan struct{}, 1)}
	w.peers[p.Rank] = q
	w.wg.Go(func() { w.keep(ctx, q) })
}

func (w *World) gone(p member.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if q := w.peers[p.Rank]; q != nil && q.Incarnation == p.Incarnation {
		q.cancel()
		delete(w.peers, p.Rank)
	}
}

// keep keeps a connection to a process.
func (w *World) keep(ctx context.Context, p *peer) {
	defer p.cancel()
	for ctx.Err() == nil {
		err := w.node.Connect(ctx, link.Peer{Rank: p.Rank, Incarnation: p.Incarnation, Address: p.Address})
		if err == nil {
			select {
			case <-p.lost:
			case <-ctx.Done():
			}
		} else if ctx.Err() == nil {
			w.cfg.Logger.Warn("pg: cannot connect to a rank", slog.Int("rank", p.Rank), slog.Any("err", err))
		}
		pause(redialTime, ctx.Done())
	}
}

// up and down are told by the node.
func (w *World) up(rank int, incarnation uint64) {
	w.mu.Lock()
	r := w.registry
	w.mu.Unlock()
	if r != nil { // else New has failed
		r.Linked(rank, incarnation)
	}
}

func (w *World) down(rank int, incarnation uint64, err error) {
	w.mu.Lock()
	r, groups := w.registry, slices.Clone(w.groups)
	if p := w.peers[rank]; p != nil && p.Incarnation == incarnation {
		select {
		case p.lost <- struct{}{}:
		default: // it knows
		}
	}
	w.mu.Unlock()
	if r != nil {
		r.Suspect(rank, incarnation, err)
	}
	for _, g := range groups {
		g.peerDown(rank, err)
	}
	w.node.Bell().Ring()
}

// leaseLost has this process announced again: its groups have stopped.
func (w *World) leaseLost(err error) {
	w.cfg.Logger.Warn("pg: the store has given this process up: announcing it again", slog.Any("err", err))
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	w.wg.Go(func() {
		for w.ctx.Err() == nil {
			if err := w.registry.Announce(w.ctx); err == nil {
				return
			}
			pause(redialTime, w.ctx.Done())
		}
	})
}

// Group is this process's part in a group, from when all its founders have come, or ctx ends. A process that is an extension of
// a group is alone in it until it joins.
func (w *World) Group(ctx context.Context, cfg GroupConfig) (*Group, error) {
	g, err := w.newGroup(cfg)
	if err != nil {
		return nil, err
	}
	m, err := w.registry.NewGroup(ctx, member.Config{
		ID: g.cfg.ID, Ranks: g.cfg.Ranks, Cap: g.cfg.Capacity, Extension: g.cfg.Extension,
		AutoDeactivate: cfg.Failures != Manual, AutoSync: cfg.Failures == Automatic, Retry: cfg.Retry,
		Hooks: g, Isolated: g.isolated, Table: g.tableOf,
	})
	if err != nil {
		g.cancel()
		return nil, fmt.Errorf("pg: %w", err)
	}
	g.members = m
	w.mu.Lock()
	closed := w.closed
	w.groups = append(w.groups, g)
	w.mu.Unlock()
	g.wg.Go(g.work)
	if closed {
		return nil, errors.Join(ErrClosed, g.Close()) //nolint:contextcheck // ctx may be over
	}
	if !cfg.Extension {
		if err := m.Start(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("pg: %w", err), g.Close()) //nolint:contextcheck // ctx is over
		}
	}
	return g, nil
}

func (w *World) forget(g *Group) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups = slices.DeleteFunc(w.groups, func(o *Group) bool { return o == g })
}

// spinTime is how long a waiting thread looks before it sleeps: several times what a message between two cores takes.
const spinTime = 30 * time.Microsecond

// spin is how long to look before sleeping: not at all when there are fewer cores than ranks here, since the one that is
// waited for needs one of them.
func (g *Group) spin() time.Duration {
	if g.locals.Load() > int32(runtime.NumCPU()) { //nolint:gosec // it is small
		return 0
	}
	return spinTime
}
