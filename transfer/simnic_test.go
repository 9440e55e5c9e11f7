package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// temper is how a simulated peer behaves.
type temper int

const (
	healthy  temper = iota
	refusing        // it does not connect
	hanging         // it does not answer when somebody connects
	slow            // it takes slowTime for that
	dead            // it connects, and work on it ends after retries, with an error
	stuck           // the same, and then its queue pairs do not flush
)

// retryTime is how long a simulated NIC sends to a peer that does not answer.
const retryTime = 2 * time.Second

const slowTime = 100 * time.Millisecond

// fleet is all simulated peers.
type fleet struct {
	mu      sync.Mutex
	tempers map[string]temper // healthy if it is not in there
}

func (f *fleet) set(peer string, how temper) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tempers == nil {
		f.tempers = map[string]temper{}
	}
	f.tempers[peer] = how
}

func (f *fleet) of(peer string) temper {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tempers[peer]
}

var errRefused = errors.New("refused")

// exchange is EndpointConfig.Exchange. A peer's name is in the address of its queue pairs.
func (f *fleet) exchange(ctx context.Context, peer string, local []QPAddress) ([]QPAddress, Link, error) {
	switch f.of(peer) {
	case refusing:
		return nil, nil, errRefused
	case hanging:
		<-ctx.Done()
		return nil, nil, ctx.Err()
	case slow:
		time.Sleep(slowTime)
	default:
	}
	remote := make([]QPAddress, len(local))
	for i := range remote {
		copy(remote[i].GID[:], peer)
	}
	return remote, nil, nil
}

// simNIC is a NIC with a finite pool of queue pairs, which keeps the rules of libibverbs and takes note of who breaks them.
type simNIC struct {
	name   string
	fleet  *fleet
	events chan PortEvent
	every  time.Duration // it carries
	lags   bool          // see simQP.carried

	mu       sync.Mutex
	pool     int // queue pairs it has
	others   int // that other processes have allocated
	qps      map[uint32]*simQP
	busy     map[*simQP]struct{} // those with work outstanding
	lastQPN  uint32
	most     int // queue pairs that were ever allocated at once
	cq       []Completion
	port     PortState
	resets   int
	resetErr error
	broken   []string
}

type simQP struct {
	nic         *simNIC
	qpn         uint32
	state       string // INIT, RTS, ERR, gone
	peer        string
	outstanding []uint64
	left        uint64    // the last of them when the NIC came by, if it lags
	since       time.Time // the first of them was posted
	unpolled    int
}

func newSimNIC(name string, pool int, f *fleet) *simNIC {
	return &simNIC{
		name: name, fleet: f, pool: pool, qps: map[uint32]*simQP{}, busy: map[*simQP]struct{}{}, port: PortActive,
		events: make(chan PortEvent, 16), every: 10 * time.Millisecond,
	}
}

func (n *simNIC) Name() string             { return n.name }
func (n *simNIC) NUMANode() int            { return 0 }
func (n *simNIC) MaxMessage() int          { return 1 << 30 }
func (n *simNIC) Events() <-chan PortEvent { return n.events }

func (n *simNIC) Register([]byte, Access) (Region, error) { return nil, syscall.ENOSYS } // it moves no bytes

func (n *simNIC) Wait(ctx context.Context, _ []Completion) (int, error) {
	<-ctx.Done() // carriers poll
	return 0, ctx.Err()
}

func (n *simNIC) breaks(format string, args ...any) {
	n.broken = append(n.broken, fmt.Sprintf(format, args...))
}

func (n *simNIC) CreateQP() (QueuePair, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.qps)+n.others >= n.pool {
		return nil, fmt.Errorf("ibv_create_qp: %w", syscall.ENOMEM)
	}
	n.lastQPN++
	q := &simQP{nic: n, qpn: n.lastQPN, state: "INIT"}
	n.qps[q.qpn] = q
	n.most = max(n.most, len(n.qps))
	return q, nil
}

func (n *simNIC) Poll(out []Completion) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	k := copy(out, n.cq)
	for _, c := range n.cq[:k] {
		if q := n.qps[c.QPN]; q != nil {
			q.unpolled--
		}
	}
	n.cq = n.cq[k:]
	return k, nil
}

func (n *simNIC) PortState() (PortState, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.port, nil
}

func (n *simNIC) flap(up bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.port = PortDown; up {
		n.port = PortActive
		n.events <- EventPortUp
		return
	}
	n.events <- EventPortDown
}

func (n *simNIC) Reset(context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.resetErr != nil {
		return n.resetErr
	}
	n.resets++
	for _, q := range n.qps {
		q.state = "gone"
	}
	clear(n.qps)
	clear(n.busy)
	n.cq = nil
	return nil
}

func (n *simNIC) allocated() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.qps)
}

// carry has the NIC carry what is outstanding.
func (n *simNIC) carry() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for q := range n.busy {
		if q.state != "RTS" {
			continue
		}
		switch how := n.fleet.of(q.peer); {
		case (how == healthy || how == slow) && n.port == PortActive:
			q.complete(StatusOK, q.carried())
		case time.Since(q.since) >= retryTime:
			q.complete(StatusRetryExceeded, 1)
			q.fail()
		}
	}
}

// carried is how many work requests have ended. With a NIC that lags, the last one ends only when it comes by again, so
// that who keeps posting is never idle.
func (q *simQP) carried() int {
	k := len(q.outstanding)
	if last := q.outstanding[k-1]; q.nic.lags && last != q.left {
		q.left = last
		k--
	}
	return k
}

func (q *simQP) complete(status CompletionStatus, k int) {
	for _, id := range q.outstanding[:k] {
		q.nic.cq = append(q.nic.cq, Completion{ID: id, QPN: q.qpn, Status: status})
		q.unpolled++
	}
	if q.outstanding = q.outstanding[k:]; len(q.outstanding) == 0 {
		q.outstanding = nil
		delete(q.nic.busy, q)
	}
}

func (q *simQP) fail() {
	q.state = "ERR"
	if q.nic.fleet.of(q.peer) != stuck {
		q.complete(StatusFlushed, len(q.outstanding))
	}
}

func (q *simQP) Address() QPAddress { return QPAddress{QPN: q.qpn} }

func (q *simQP) Connect(remote QPAddress) error {
	q.nic.mu.Lock()
	defer q.nic.mu.Unlock()
	if q.state != "INIT" {
		q.nic.breaks("connect in %s", q.state)
	}
	q.peer = string(slices.DeleteFunc(remote.GID[:], func(b byte) bool { return b == 0 }))
	q.state = "RTS"
	return nil
}

func (q *simQP) Post(list []WorkRequest) (int, error) {
	q.nic.mu.Lock()
	defer q.nic.mu.Unlock()
	if q.state != "RTS" && q.state != "ERR" {
		q.nic.breaks("post in %s", q.state)
		return 0, syscall.EINVAL
	}
	if len(list) > 0 && len(q.outstanding) == 0 {
		q.since = time.Now()
		q.nic.busy[q] = struct{}{}
	}
	for _, w := range list {
		q.outstanding = append(q.outstanding, w.ID)
	}
	if q.state == "ERR" {
		q.fail()
	}
	return len(list), nil
}

func (q *simQP) ToError() error {
	q.nic.mu.Lock()
	defer q.nic.mu.Unlock()
	if q.state == "gone" {
		q.nic.breaks("to ERR when gone")
		return syscall.EINVAL
	}
	q.fail()
	return nil
}

func (q *simQP) Destroy() error {
	q.nic.mu.Lock()
	defer q.nic.mu.Unlock()
	if q.state == "gone" {
		q.nic.breaks("destroyed twice")
		return syscall.EINVAL
	}
	if q.state != "ERR" || len(q.outstanding) > 0 || q.unpolled > 0 {
		q.nic.breaks("destroyed in %s with %d outstanding and %d unpolled", q.state, len(q.outstanding), q.unpolled)
	}
	q.state = "gone"
	delete(q.nic.qps, q.qpn)
	return nil
}

// carrier does what a transport does with an endpoint store: it posts, polls, and keeps a depth counter with each request.
type carrier struct {
	tb    testing.TB
	nic   *simNIC
	store *EndpointStore

	mu     sync.Mutex
	lastID uint64
	posted map[uint64]sent
	ended  map[CompletionStatus]int
	lost   int
}

type sent struct {
	peer  string
	depth *Depth
}

// newCarrier makes a carrier and its store, with a poller unless the store is to have no monitor.
func newCarrier(tb testing.TB, nic *simNIC, cfg EndpointConfig) *carrier {
	tb.Helper()
	c := unmonitored(tb, nic, cfg)
	c.store.wg.Add(1)
	go c.store.monitor()
	return c
}

// unmonitored makes one whose store reclaims after insertions only.
func unmonitored(tb testing.TB, nic *simNIC, cfg EndpointConfig) *carrier {
	tb.Helper()
	c := &carrier{tb: tb, nic: nic, posted: map[uint64]sent{}, ended: map[CompletionStatus]int{}}
	cfg.Exchange, cfg.Lost = nic.fleet.exchange, c.lose
	s, err := newEndpointStore(nic, cfg)
	require.NoError(tb, err)
	c.store = s
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { c.poll(ctx) })
	tb.Cleanup(func() {
		require.NoError(tb, c.store.Close())
		require.Zero(tb, nic.allocated(), "closed")
		cancel()
		wg.Wait()
		require.Empty(tb, nic.broken)
	})
	return c
}

func (c *carrier) poll(ctx context.Context) {
	tick := time.NewTicker(c.nic.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		c.nic.carry()
		c.drain()
	}
}

func (c *carrier) drain() {
	var out [64]Completion
	for {
		n, err := c.nic.Poll(out[:])
		require.NoError(c.tb, err)
		if n == 0 {
			return
		}
		for _, d := range out[:n] {
			c.mu.Lock()
			s := c.posted[d.ID]
			delete(c.posted, d.ID)
			c.ended[d.Status]++
			c.mu.Unlock()
			s.depth.Done()
			if d.Status != StatusOK && d.Status != StatusFlushed {
				c.store.Fail(s.peer, d.QPN, errors.New(d.Status.String()))
			}
		}
	}
}

func (c *carrier) lose(d *Depth) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, s := range c.posted {
		if s.depth == d {
			delete(c.posted, id)
			c.lost++
			d.Done()
		}
	}
}

// send posts n requests to a peer.
func (c *carrier) send(ctx context.Context, peer string, n int) error {
	e, err := c.store.Acquire(ctx, peer)
	if err != nil {
		return err
	}
	defer e.Release()
	i := e.Pick()
	list := make([]WorkRequest, n)
	c.mu.Lock()
	for k := range list {
		c.lastID++
		list[k] = WorkRequest{ID: c.lastID, Op: Write}
		c.posted[c.lastID] = sent{peer: peer, depth: e.Depth(i)}
	}
	c.mu.Unlock()
	taken, err := e.Post(i, list)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range list[taken:] {
		delete(c.posted, w.ID)
	}
	return err
}

// simGuest is a peer that has connected: it lets go when it is asked, unless it is deaf.
type simGuest struct {
	c    *carrier
	deaf bool
	e    chan *Endpoint
	gone atomic.Int64
}

func (g *simGuest) Gone() { g.gone.Add(1) }

func (g *simGuest) Recall() {
	if !g.deaf {
		go func() { _ = g.c.store.Dismiss(<-g.e) }()
	}
}

// guest has a peer connect to this end.
func (c *carrier) guest(ctx context.Context, peer string, deaf bool) (*simGuest, error) {
	g := &simGuest{c: c, deaf: deaf, e: make(chan *Endpoint, 1)}
	remote := make([]QPAddress, c.store.cfg.QPsPerEndpoint)
	for i := range remote {
		copy(remote[i].GID[:], peer)
	}
	e, err := c.store.Accept(ctx, peer, remote, g)
	if err == nil {
		g.e <- e
	}
	return g, err
}

func (c *carrier) outstanding() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.posted)
}

// check compares the store with the NIC and with its bounds. Nothing is under way.
func (c *carrier) check() {
	c.tb.Helper()
	synctest.Wait()
	s := c.store
	s.mu.Lock()
	defer s.mu.Unlock()
	sum, reserved := 0, 0
	for _, e := range s.live {
		require.True(c.tb, e.active.Load())
		sum += len(e.queues)
	}
	for _, e := range s.served {
		sum += len(e.queues)
	}
	for _, e := range s.parked.appendTo(s.waiting.appendTo(nil)) {
		sum += len(e.queues) - e.destroyed
	}
	for _, peers := range []map[string]*connecting{s.peers, s.guests} {
		for _, p := range peers {
			if p.slot {
				sum += s.cfg.QPsPerEndpoint - p.qps
				reserved += p.qps
			}
		}
	}
	require.Equal(c.tb, sum, s.qps, "queue pairs of endpoints")
	require.Equal(c.tb, c.nic.allocated(), s.qps, "queue pairs of the NIC")
	require.Equal(c.tb, reserved, s.reserved)
	require.LessOrEqual(c.tb, s.qps+s.reserved, s.cfg.QPBudget)
	require.LessOrEqual(c.tb, len(s.live)+s.slots+s.parked.n, s.cfg.MaxEndpoints)
	require.LessOrEqual(c.tb, len(s.served)+s.seats, s.cfg.MaxServed)
	require.Len(c.tb, s.served, s.order.n)
	require.LessOrEqual(c.tb, s.waiting.n, s.cfg.MaxWaiting)
	require.LessOrEqual(c.tb, len(s.peers), maxConnecting)
	require.LessOrEqual(c.tb, s.fails.order.Len(), s.cfg.MaxBackoffs)
	require.Len(c.tb, s.fails.peers, s.fails.order.Len())
	require.Empty(c.tb, c.nic.broken)
	for _, e := range s.waiting.appendTo(nil) { // whoever drains has the monitor look at once
		require.False(c.tb, e.outstanding() == 0 && !s.reclaimOnInsert, "%s has drained and is still there", e.peer)
	}
}

// endpoint is the one to a peer, nil if there is none.
func (c *carrier) endpoint(peer string) *Endpoint {
	c.store.mu.RLock()
	defer c.store.mu.RUnlock()
	return c.store.live[peer]
}

func peerName(i int) string { return fmt.Sprintf("peer%06d", i) }

// counter hands out numbers.
type counter struct{ n atomic.Int64 }

func (c *counter) next() int { return int(c.n.Add(1)) }
