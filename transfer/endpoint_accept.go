package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Peers connect to this process, too. Their end of such an endpoint does all the work; this end, which is "served", holds
// queue pairs that answer, and sees nothing of what is read and written. So this end cannot tell which of them are idle.
// When there is no room for one more it recalls the oldest: it asks its peer to let go of it, and takes it away if that
// takes too long.

// ServedLink is the peer's end of an endpoint that it has connected to this process.
type ServedLink interface {
	Link
	// Recall asks the peer to let go of the endpoint. It must not wait, nor call the store.
	Recall()
}

const (
	// tenure is how long an endpoint is left to a peer before others have it: a connection takes some ms.
	tenure = 50 * time.Millisecond
	// yieldTime is how long the work of an endpoint that makes room may take to end by itself. A slice takes some ms.
	yieldTime = time.Second
	// recallTime is how long a peer may take to let go: its own yieldTime, and messages.
	recallTime = 2 * yieldTime
)

// Accept makes this end of an endpoint that a peer connects, which has these queue pairs. It waits for room for a little less
// than Acquire does; the error is a [*BudgetError] if there is none. An earlier one of the same peer is retired. The queue
// pairs answer until [EndpointStore.Dismiss], or until the store retires the endpoint by itself: then link hears that they
// are gone.
func (s *EndpointStore) Accept(ctx context.Context, peer string, remote []QPAddress, link ServedLink) (*Endpoint, error) {
	c, err := s.beginAccept(peer, len(remote))
	if err != nil {
		return nil, err
	}
	defer s.wg.Done()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout*4/5) // the peer, which waits no longer, is to hear why
	defer cancel()
	defer c.endWithEra(cancel)()
	e, err := s.allocate(ctx, c)
	if err == nil {
		e.link = link
		for i, q := range e.queues {
			if err = q.qp.Connect(remote[i]); err != nil { //nolint:gosec // as many: beginAccept has looked
				err = &PathError{Peer: peer, Path: "rdma " + s.name, Err: err}
				break
			}
		}
	}
	return s.endAccept(c, e, err)
}

// endWithEra has cancel called when the NIC is not active any more, unless stop is called before.
func (c *connecting) endWithEra(cancel func()) (stop func() bool) {
	return context.AfterFunc(c.era, cancel)
}

func (s *EndpointStore) beginAccept(peer string, n int) (*connecting, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	switch {
	case s.state != NICActive:
		err = s.notActive()
	case n != s.cfg.QPsPerEndpoint:
		err = fmt.Errorf("transfer: %s connects with %d queue pairs, an endpoint has %d here: configure both processes alike",
			peer, n, s.cfg.QPsPerEndpoint)
	case s.guests[peer] != nil:
		err = fmt.Errorf("transfer: %s connects already", peer)
	case len(s.guests) >= maxConnecting:
		err = s.noRoom(peer, errors.New("too many peers are connecting"))
	}
	if err != nil {
		s.count.acceptsFailed++
		return nil, err
	}
	if old := s.served[peer]; old != nil { // it would not connect again if it still used that
		s.count.deletions++
		s.retire(old)
	}
	c := &connecting{peer: peer, guest: true, era: s.era}
	s.guests[peer] = c
	s.wg.Add(1)
	return c, nil
}

func (s *EndpointStore) endAccept(c *connecting, e *Endpoint, err error) (*Endpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.guests, c.peer)
	if c.era.Err() != nil {
		err = context.Cause(c.era)
	}
	if err != nil {
		s.count.acceptsFailed++
		s.giveUp(c, e)
		return nil, err
	}
	s.leaveSlot(c)
	s.count.accepted++
	e.since = s.cfg.Now()
	s.served[e.peer] = e
	s.order.push(e)
	return e, nil
}

// Dismiss ends what Accept began. When it returns nil the queue pairs are in ERR or destroyed: nothing that the peer has
// posted lands any more.
func (s *EndpointStore) Dismiss(e *Endpoint) error {
	s.reclaiming.Lock()
	defer s.reclaiming.Unlock()
	s.mu.Lock()
	if s.served[e.peer] == e {
		s.count.deletions++
		s.retire(e)
	}
	gone := e.list == nil
	s.mu.Unlock()
	if gone {
		return nil
	}
	s.reclaimOne(e)
	if !e.erred {
		return fmt.Errorf("transfer: a queue pair of %s does not go to ERR", e.peer)
	}
	return nil
}

// press has endpoints that have been there for a while make room for the first in line.
func (s *EndpointStore) press(c *connecting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unblock() // idle ones first
	if s.state != NICActive || !s.line(c).first(c) {
		return
	}
	if c.guest {
		s.recall()
	} else {
		s.yieldOldest()
	}
	s.unblock()
}

// recall asks the peers of the oldest endpoints that are served for as many as there are guests who wait, and takes away
// those that were asked for long ago. The mu is held.
func (s *EndpointStore) recall() {
	now, asked := s.cfg.Now(), 0
	for e := s.order.oldest; e != nil && asked < len(s.refused); {
		next := e.next
		switch {
		case e.recalled != 0 && now-e.recalled >= int64(recallTime):
			s.count.deletions++
			s.retire(e)
		case e.recalled == 0 && now-e.since >= int64(tenure):
			e.recalled = now
			s.count.recalls++
			e.link.(ServedLink).Recall() //nolint:forcetypeassert // endAccept has put it there
		}
		if e.recalled != 0 {
			asked++
		}
		e = next
	}
}

// yieldOldest retires the endpoint that was connected first among those that nobody holds. Idle ones have been evicted
// before: this one is always busy. The mu is held.
func (s *EndpointStore) yieldOldest() {
	var oldest *Endpoint
	now := s.cfg.Now()
	for _, e := range s.live {
		if e.refs.Load() == 0 && now-e.since >= int64(tenure) && (oldest == nil || e.since < oldest.since) {
			oldest = e
		}
	}
	if oldest != nil && s.waiting.n < s.cfg.MaxWaiting {
		s.yield(oldest)
	}
}

// Yield retires the endpoint to a peer if it has this link, which the peer has asked for. Work that is outstanding ends by
// itself, if it does so soon.
func (s *EndpointStore) Yield(peer string, link Link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.live[peer]; e != nil && e.link == link {
		s.yield(e)
	}
}

// yield retires an endpoint so that its work may end by itself. The mu is held.
func (s *EndpointStore) yield(e *Endpoint) {
	s.count.yields++
	s.retire(e)
	e.drainUntil = s.cfg.Now() + int64(yieldTime)
}
