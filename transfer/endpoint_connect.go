package transfer

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// connecting is a peer to which an endpoint is being made, for all who want it. The store's mu guards it.
type connecting struct {
	peer    string
	callers int             // that wait for it
	probe   bool            // the peer has failed before
	guest   bool            // it connects to this process: see Accept
	slot    bool            // it has a place among MaxEndpoints, or a guest among MaxServed
	qps     int             // queue pairs that are promised to it
	era     context.Context //nolint:containedctx // of a guest: it ends when the NIC is not active any more
	room    chan struct{}
	done    chan struct{}
	e       *Endpoint // valid once done is closed, like err
	err     error
}

// waitLine is those who wait for room, in order. The store's mu guards it.
type waitLine []*connecting

func (l *waitLine) first(c *connecting) bool { return len(*l) > 0 && (*l)[0] == c }

func (l *waitLine) leave(c *connecting) {
	for i, b := range *l {
		if b == c {
			*l = append((*l)[:i], (*l)[i+1:]...)
			return
		}
	}
}

// line is the one in which a peer waits.
func (s *EndpointStore) line(c *connecting) *waitLine {
	if c.guest {
		return &s.refused
	}
	return &s.blocked
}

// errNoRoom is why there is a [BudgetError] if the NIC has not said that it has no queue pair left.
var errNoRoom = errors.New("all are in use")

// connect waits for the endpoint to a peer, and has it made if nobody has yet.
func (s *EndpointStore) connect(ctx context.Context, peer string) (*Endpoint, error) {
	c, e, err := s.join(peer)
	if c == nil {
		return e, err
	}
	select {
	case <-c.done:
		return c.e, c.err
	case <-ctx.Done():
	}
	s.withdraw(c)
	return nil, fmt.Errorf("transfer: connect to %s by NIC %s: %w", peer, s.name, ctx.Err())
}

// withdraw says that a caller does not wait any more.
func (s *EndpointStore) withdraw(c *connecting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.callers--
	if c.e != nil { // it has been made for this caller, too
		c.e.Release()
	}
}

// join is the connecting of a peer, begun if need be; nil if there is an endpoint by now or there cannot be one.
func (s *EndpointStore) join(peer string) (*connecting, *Endpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.live[peer]; e != nil {
		e.refs.Add(1)
		return nil, e, nil
	}
	if s.state != NICActive {
		return nil, nil, s.notActive()
	}
	if c := s.peers[peer]; c != nil {
		c.callers++
		return c, nil, nil
	}
	failed := s.fails.of(peer)
	if failed != nil {
		if left := failed.until - s.cfg.Now(); left > 0 {
			s.count.backedOff++
			return nil, nil, &BackoffError{NIC: s.name, Peer: peer, Failures: failed.failures, Left: time.Duration(left), Err: failed.err}
		}
	}
	if len(s.peers) >= maxConnecting || failed != nil && s.probing >= maxProbing {
		s.count.creationsFailed++
		return nil, nil, s.noRoom(peer, errors.New("too many peers are connecting"))
	}
	c := &connecting{peer: peer, callers: 1, probe: failed != nil, done: make(chan struct{})}
	if c.probe {
		s.probing++
	}
	s.peers[peer] = c
	s.wg.Add(1)
	go s.run(s.era, c)
	return c, nil, nil
}

func (s *EndpointStore) notActive() error {
	if s.state == NICClosed {
		return ErrClosed
	}
	return &NICError{NIC: s.name, State: s.state, Err: s.why}
}

func (s *EndpointStore) noRoom(peer string, err error) error {
	return &BudgetError{
		NIC: s.name, Peer: peer, QPs: s.qps + s.reserved, Budget: s.limit, Endpoints: len(s.live) + s.slots + s.parked.n,
		MaxEndpoints: s.cfg.MaxEndpoints, Waiting: s.waiting.n, MaxWaiting: s.cfg.MaxWaiting, Connecting: len(s.peers), Err: err,
	}
}

// run makes the endpoint to a peer.
func (s *EndpointStore) run(era context.Context, c *connecting) {
	defer s.wg.Done()
	ctx, cancel := context.WithTimeout(era, s.cfg.ConnectTimeout)
	defer cancel()
	e, err := s.build(ctx, c)
	s.publish(era, c, e, err)
	if s.reclaimOnInsert && err == nil {
		s.reclaim()
	}
}

// build allocates the queue pairs of an endpoint and connects them. It returns them if it fails, too.
func (s *EndpointStore) build(ctx context.Context, c *connecting) (*Endpoint, error) {
	e, err := s.allocate(ctx, c)
	if err != nil {
		return e, err
	}
	local := make([]QPAddress, len(e.queues))
	for i, q := range e.queues {
		local[i] = q.qp.Address()
	}
	remote, link, err := s.cfg.Exchange(ctx, c.peer, local)
	e.link = link
	if err == nil && len(remote) != len(local) {
		err = fmt.Errorf("transfer: %d queue pairs there for %d here", len(remote), len(local))
	}
	for i, q := range e.queues {
		if err == nil {
			err = q.qp.Connect(remote[i])
		}
	}
	if err != nil {
		err = &PathError{Peer: c.peer, Path: "rdma " + s.name, Err: err}
	}
	return e, err
}

// allocate waits for room and creates the queue pairs of an endpoint.
func (s *EndpointStore) allocate(ctx context.Context, c *connecting) (*Endpoint, error) {
	var last error // that of the NIC
	for {
		if err := s.admit(ctx, c, last); err != nil {
			return nil, err
		}
		e := &Endpoint{store: s, peer: c.peer, queues: make([]*queue, 0, s.cfg.QPsPerEndpoint)}
		err := s.createQPs(c, e)
		if err == nil {
			return e, nil
		}
		if !errors.Is(err, syscall.ENOMEM) {
			return e, &PathError{Peer: c.peer, Path: "rdma " + s.name, Err: err}
		}
		last = err
		s.exhausted(c, e)
	}
}

func (s *EndpointStore) createQPs(c *connecting, e *Endpoint) error {
	for len(e.queues) < s.cfg.QPsPerEndpoint {
		qp, err := s.nic.CreateQP()
		if err != nil {
			return fmt.Errorf("create a queue pair: %w", err)
		}
		e.queues = append(e.queues, &queue{qp: qp, qpn: qp.Address().QPN, depth: &Depth{done: &s.signal}})
		s.mu.Lock()
		c.qps--
		s.reserved--
		s.qps++
		s.count.qpsCreated++
		s.mu.Unlock()
	}
	return nil
}

// exhausted takes note that the NIC has no more queue pairs than are allocated now, and gives back those of a peer that
// did not get all it needs. From here on the others are given out like a budget that is used up.
func (s *EndpointStore) exhausted(c *connecting, e *Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count.noMemory++
	s.limit = min(s.limit, s.qps)
	s.giveUp(c, e)
}

// giveUp ends what a peer that connects has been promised, and retires the endpoint it has so far. The mu is held.
func (s *EndpointStore) giveUp(c *connecting, e *Endpoint) {
	s.leaveSlot(c)
	s.reserved -= c.qps
	c.qps = 0
	if e != nil && len(e.queues) > 0 {
		s.retire(e)
	}
	s.signal.raise() // others may have room now
}

// leaveSlot takes back the place that was promised to a peer. The mu is held.
func (s *EndpointStore) leaveSlot(c *connecting) {
	switch {
	case !c.slot:
	case c.guest:
		s.seats--
	default:
		s.slots--
	}
	c.slot = false
}

// admit waits until there is room for an endpoint: a place and its queue pairs, which are then promised to the peer. last
// is what the NIC has said so far.
func (s *EndpointStore) admit(ctx context.Context, c *connecting, last error) error {
	s.mu.Lock()
	line := s.line(c)
	if len(*line) == 0 && s.promise(c) {
		s.mu.Unlock()
		return nil
	}
	c.room = make(chan struct{})
	*line = append(*line, c)
	s.want()
	s.mu.Unlock()
	s.signal.raise() // what was idle already raises no signal
	for waits := true; waits; {
		select {
		case <-c.room:
			return nil
		case <-after(tenure):
			s.press(c)
		case <-ctx.Done():
			waits = false
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	line.leave(c)
	select {
	case <-c.room: // at the same moment
		return nil
	default:
	}
	if last == nil {
		last = errNoRoom
	}
	return s.noRoom(c.peer, last)
}

// promise promises a peer room, if there is some, or has others make it. The mu is held.
func (s *EndpointStore) promise(c *connecting) bool {
	if s.state != NICActive {
		return false
	}
	switch {
	case c.guest && len(s.served)+s.seats >= s.cfg.MaxServed: // only their peers know which are idle: see press
		return false
	case !c.guest && len(s.live)+s.slots+s.parked.n >= s.cfg.MaxEndpoints && !s.evict():
		return false
	}
	n := s.cfg.QPsPerEndpoint
	for short := s.qps + s.reserved + n - s.limit; short > 0; {
		if s.evicting >= short || !s.evict() { // those that are idle are as good as destroyed, others may take their time
			return false
		}
	}
	if c.guest {
		s.seats++
	} else {
		s.slots++
	}
	s.reserved += n
	c.slot, c.qps = true, n
	return true
}

// evict retires an idle endpoint, unless there is none or as many are retired as may be. The mu is held.
func (s *EndpointStore) evict() bool {
	if s.waiting.n >= s.cfg.MaxWaiting {
		return false
	}
	e := s.policy.victim()
	if e == nil {
		return false
	}
	e.evicted = true
	s.evicting += len(e.queues)
	s.count.evictions++
	s.retire(e)
	return true
}

// publish ends connecting to a peer, with an endpoint or an error.
func (s *EndpointStore) publish(era context.Context, c *connecting, e *Endpoint, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.peers, c.peer)
	if c.probe {
		s.probing--
	}
	if era.Err() != nil { // what the endpoint is connected to may be stale
		err = context.Cause(era)
	} else if p := (*PathError)(nil); errors.As(err, &p) && !errors.Is(err, ErrNoRoom) { // a peer that is full has not failed
		s.fails.failed(c.peer, s.cfg.Now(), false, err)
	}
	if err != nil {
		s.count.creationsFailed++
		s.giveUp(c, e)
		c.err = err
	} else {
		s.leaveSlot(c)
		s.count.creations++
		e.since = s.cfg.Now()
		e.active.Store(true)
		e.refs.Store(int32(c.callers)) //nolint:gosec // goroutines
		s.live[e.peer] = e
		s.policy.insert(e)
		c.e = e
	}
	close(c.done)
	if s.state == NICFenced || len(s.blocked)+len(s.refused) > 0 {
		s.signal.raise()
	}
}
