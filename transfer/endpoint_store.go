package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// EndpointConfig is what an endpoint store is made of. Exchange is required.
type EndpointConfig struct {
	// Exchange tells a peer of the queue pairs of this end and returns those of its end, one for each, ready to receive, and
	// its link, which may be nil. It must return when ctx ends.
	Exchange func(ctx context.Context, peer string, local []QPAddress) ([]QPAddress, Link, error)
	// Lost is called, by the monitor or by Close, after a reset of the NIC, once for each counter that had work outstanding.
	// None of that work can land any more and no completion of it will come: whoever keeps it ends it. May be nil.
	Lost func(d *Depth)
	// MaxEndpoints bounds the peers that are connected at once; 4096 if it is 0.
	MaxEndpoints int
	// MaxServed bounds the endpoints that others have connected to, see [EndpointStore.Accept]; MaxEndpoints if it is 0.
	MaxServed int
	// QPsPerEndpoint is how many queue pairs an endpoint has; 2 if it is 0, at most 64.
	QPsPerEndpoint int
	// QueueDepth bounds the work requests that are outstanding on a queue pair; DefaultQueueDepth if it is 0. The NIC's queue pairs must
	// have been given as much.
	QueueDepth int
	// MaxWaiting bounds the endpoints that wait to be destroyed; MaxEndpoints if it is 0. Those beyond it keep their places
	// among MaxEndpoints.
	MaxWaiting int
	// QPBudget bounds the queue pairs of the NIC that are allocated, whatever their state; QPsPerEndpoint for each of
	// MaxEndpoints, MaxServed and MaxWaiting if it is 0. A NIC has 64 Ki or so, for all processes together.
	QPBudget int
	// Eviction is the policy that chooses who makes room for a new peer: fifo or sieve; sieve if it is empty.
	Eviction string
	// ConnectTimeout is how long a peer may wait for room and for its answer, together; 5 s if it is 0.
	ConnectTimeout time.Duration
	// StuckAfter is how long a retired endpoint may take to drain until it is reported; 5 s if it is 0.
	StuckAfter time.Duration
	// FenceAfter is how long it may take until its NIC is fenced off and reset; 30 s if it is 0.
	FenceAfter time.Duration
	// BackoffFirst is how long a peer is left alone after it has failed, doubling up to BackoffMost; 100 ms and 30 s if they
	// are 0.
	BackoffFirst, BackoffMost time.Duration
	// MaxBackoffs bounds the failed peers that are remembered; twice MaxEndpoints if it is 0.
	MaxBackoffs int
	// Jitter draws from [0, 1) to spread the peers that failed together; rand.Float64 if it is nil. It is not called
	// concurrently.
	Jitter func() float64
	// Now is a monotonic clock in nanoseconds; the process's if it is nil.
	Now func() int64
	// Logger gets what an operator may want to know; nil for nothing.
	Logger *slog.Logger
}

func (c *EndpointConfig) withDefaults() error {
	def := func(d *time.Duration, v time.Duration) { *d = cmp.Or(*d, v) }
	def(&c.ConnectTimeout, 5*time.Second)
	def(&c.StuckAfter, 5*time.Second)
	def(&c.FenceAfter, 30*time.Second)
	def(&c.BackoffFirst, 100*time.Millisecond)
	def(&c.BackoffMost, 30*time.Second)
	c.MaxEndpoints = cmp.Or(c.MaxEndpoints, 4096)
	c.QPsPerEndpoint = cmp.Or(c.QPsPerEndpoint, 2)
	c.QueueDepth = cmp.Or(c.QueueDepth, DefaultQueueDepth)
	c.MaxServed = cmp.Or(c.MaxServed, c.MaxEndpoints)
	c.MaxWaiting = cmp.Or(c.MaxWaiting, c.MaxEndpoints)
	c.QPBudget = cmp.Or(c.QPBudget, (c.MaxEndpoints+c.MaxServed+c.MaxWaiting)*c.QPsPerEndpoint)
	c.MaxBackoffs = cmp.Or(c.MaxBackoffs, 2*c.MaxEndpoints)
	c.Eviction = cmp.Or(c.Eviction, "sieve")
	if c.Jitter == nil {
		c.Jitter = rand.Float64
	}
	if c.Now == nil {
		c.Now = monotonic()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case c.Exchange == nil:
		return errors.New("transfer: endpoints need an Exchange")
	case c.MaxEndpoints < 1 || c.MaxServed < 1 || c.MaxWaiting < 1 || c.MaxBackoffs < 1:
		return errors.New("transfer: MaxEndpoints, MaxServed, MaxWaiting and MaxBackoffs: at least 1")
	case c.QPsPerEndpoint < 1 || c.QPsPerEndpoint > maxQPsPerEndpoint:
		return fmt.Errorf("transfer: %d queue pairs an endpoint: from 1 to %d", c.QPsPerEndpoint, maxQPsPerEndpoint)
	case c.QPBudget < c.QPsPerEndpoint:
		return fmt.Errorf("transfer: a budget of %d queue pairs: at least one endpoint's %d", c.QPBudget, c.QPsPerEndpoint)
	case c.QueueDepth < 1 || c.QueueDepth > maxQueueDepth:
		return fmt.Errorf("transfer: a queue depth of %d: from 1 to %d", c.QueueDepth, maxQueueDepth)
	case c.ConnectTimeout < 0 || c.StuckAfter < 0 || c.FenceAfter < c.StuckAfter || c.BackoffFirst < 0 || c.BackoffMost < c.BackoffFirst:
		return errors.New("transfer: a negative time, or FenceAfter < StuckAfter, or BackoffMost < BackoffFirst")
	}
	return nil
}

// DefaultQueueDepth is [EndpointConfig.QueueDepth] if that is 0.
const DefaultQueueDepth = 256

const (
	// maxQPsPerEndpoint: a NIC's caches hold the state of a few hundred queue pairs; more to one peer only spread it.
	maxQPsPerEndpoint = 64
	// maxQueueDepth is the largest max_qp_wr of the NICs there are.
	maxQueueDepth = 32 << 10
	// maxConnecting bounds the peers that wait for room or for an answer, a goroutine each. A connection takes some ms.
	maxConnecting = 256
	// maxProbing bounds those among them that have failed before: dead peers leave room for healthy ones.
	maxProbing = maxConnecting / 2
)

// NICState is whether an endpoint store hands out endpoints.
type NICState uint8

// The states of a NIC.
const (
	NICActive NICState = iota
	NICDown            // its port is: the monitor waits for it
	NICFenced          // a queue pair does not drain, or the device failed: the monitor resets it
	NICClosed          // the store was closed
)

// String implements fmt.Stringer.
func (s NICState) String() string { return [...]string{"active", "down", "fenced", "closed"}[s] }

// EndpointStore has the endpoints of one NIC, by peer. An endpoint that fails, or makes room for another, is retired: it
// leaves the peers' map for a list of those that wait to be destroyed, its queue pairs go to ERR so that outstanding work
// flushes, and when none is left they are destroyed. That is the work of a monitor, a goroutine with a clock of its own:
// nothing that callers do, or stop doing, keeps queue pairs from being freed. Its methods may be called concurrently.
type EndpointStore struct {
	nic    NIC
	name   string
	cfg    EndpointConfig
	signal signal
	stop   chan struct{}
	wg     sync.WaitGroup // the monitor, and whoever connects

	// reclaimOnInsert has tests see what becomes of a store without a monitor, which reclaims only after it has inserted.
	reclaimOnInsert bool
	reclaiming      sync.Mutex // one reclaims at a time
	batch           []*Endpoint

	mu        sync.RWMutex
	state     NICState
	why       error // it is not active
	mustReset bool  // only a reset ends the fence
	fencedAt  int64
	resetAt   int64         // no reset is tried earlier
	pause     time.Duration // after the last one that failed

	live     map[string]*Endpoint
	policy   evictionPolicy
	served   map[string]*Endpoint // those that peers have connected to
	order    endpointList         // the same, oldest first
	waiting  endpointList         // retired; at most MaxWaiting
	parked   endpointList         // retired when waiting was full; each has a place among MaxEndpoints
	peers    map[string]*connecting
	guests   map[string]*connecting // peers that connect to this process
	blocked  waitLine               // those without room
	refused  waitLine               // guests without room
	probing  int                    // peers that have failed before and connect
	slots    int                    // places among MaxEndpoints that are promised to those who connect
	seats    int                    // places among MaxServed that are promised to guests
	reserved int                    // queue pairs that are promised to them
	qps      int                    // allocated
	evicting int                    // of these, those of endpoints that were idle when they were evicted
	limit    int                    // what the NIC has turned out to have, at most QPBudget
	fails    backoffs
	era      context.Context //nolint:containedctx // it ends connecting when the NIC is active no more
	endEra   context.CancelCauseFunc

	count       counts
	lastReclaim atomic.Int64
}

// NewEndpointStore makes the store of a NIC and starts its monitor. Close ends it.
func NewEndpointStore(nic NIC, cfg EndpointConfig) (*EndpointStore, error) {
	s, err := newEndpointStore(nic, cfg)
	if err != nil {
		return nil, err
	}
	s.wg.Add(1)
	go s.monitor()
	return s, nil
}

// newEndpointStore makes a store without a monitor.
func newEndpointStore(nic NIC, cfg EndpointConfig) (*EndpointStore, error) {
	if err := cfg.withDefaults(); err != nil {
		return nil, err
	}
	policy, err := newEvictionPolicy(cfg.Eviction)
	if err != nil {
		return nil, err
	}
	s := &EndpointStore{
		nic: nic, name: nic.Name(), cfg: cfg, signal: signal{c: make(chan struct{}, 1)}, stop: make(chan struct{}),
		live: map[string]*Endpoint{}, served: map[string]*Endpoint{}, policy: policy,
		peers: map[string]*connecting{}, guests: map[string]*connecting{}, limit: cfg.QPBudget,
		fails: backoffs{first: cfg.BackoffFirst, most: cfg.BackoffMost, max: cfg.MaxBackoffs, jitter: cfg.Jitter},
	}
	s.fails.init()
	s.era, s.endEra = context.WithCancelCause(context.Background())
	s.lastReclaim.Store(cfg.Now())
	return s, nil
}

// Acquire is the endpoint to a peer, connected if need be. The caller posts its work and releases it. The error is a
// [*BackoffError] or [*BudgetError], which concern this peer only, a [*NICError], a [*PathError] with what kept it from
// connecting, [ErrClosed], or that of ctx.
func (s *EndpointStore) Acquire(ctx context.Context, peer string) (*Endpoint, error) {
	s.mu.RLock()
	if e := s.live[peer]; e != nil {
		e.refs.Add(1)
		if !e.visited.Load() { // most are, and then nothing has to be written
			e.visited.Store(true)
		}
		s.mu.RUnlock()
		return e, nil
	}
	s.mu.RUnlock()
	return s.connect(ctx, peer)
}

// Fail retires the endpoint to a peer after work on its queue pair qpn has failed, and leaves the peer alone for a while.
// If the queue pair is one of an earlier endpoint, nothing happens.
func (s *EndpointStore) Fail(peer string, qpn uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.live[peer]
	if e == nil || !e.has(qpn) {
		return
	}
	now := s.cfg.Now()
	s.fails.failed(peer, now, now-e.since > int64(s.cfg.BackoffMost), err)
	s.count.deletions++
	s.retire(e)
}

func (e *Endpoint) has(qpn uint32) bool {
	for _, q := range e.queues {
		if q.qpn == qpn {
			return true
		}
	}
	return false
}

// Renew retires the endpoint to a peer after work on its queue pair qpn had to be given up. Unlike Fail it does not hold
// that against the peer.
func (s *EndpointStore) Renew(peer string, qpn uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.live[peer]; e != nil && e.has(qpn) {
		s.count.deletions++
		s.retire(e)
	}
}

// Drop retires the endpoint to a peer if it has this link: the peer's end is gone.
func (s *EndpointStore) Drop(peer string, link Link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.live[peer]; e != nil && e.link == link {
		s.count.deletions++
		s.retire(e)
	}
}

// Delete retires the endpoint to a peer, if there is one: the peer has said that it goes, say.
func (s *EndpointStore) Delete(peer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.live[peer]; e != nil {
		s.count.deletions++
		s.retire(e)
	}
}

// closeTick is how often Close looks whether a queue pair lets itself be destroyed.
const closeTick = 50 * time.Millisecond

// Close retires all endpoints and ends the store. It returns when all queue pairs are destroyed: nothing that was posted
// can land any more. The completions must be polled until then. What does not drain within StuckAfter has the NIC reset.
func (s *EndpointStore) Close() error {
	s.mu.Lock()
	if s.state == NICClosed {
		s.mu.Unlock()
		return nil
	}
	s.leave(NICClosed, ErrClosed)
	s.mu.Unlock()
	close(s.stop)
	s.wg.Wait()
	tick, stop := every(closeTick)
	defer stop()
	for end := s.cfg.Now() + int64(s.cfg.StuckAfter); ; {
		s.reclaim()
		if s.allocated() == 0 {
			return nil
		}
		if s.cfg.Now() >= end {
			return s.resetNIC()
		}
		select {
		case <-s.signal.c:
		case <-tick:
		}
	}
}

func (s *EndpointStore) allocated() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.qps
}
