package link

import (
	"context"
	"errors"
	"fmt"

	"larder/pg/shm"
)

// maxPairs bounds the pairs that a peer may have made here which nobody here has asked for.
const maxPairs = 256

// pair is the lane between this process and another for what a group sends from point to point. It is built when either
// side asks for it.
type pair struct {
	n     *Node
	key   scope
	c     *control
	party *party        // that makes it
	stop  func()        // ends that
	asked bool          // Pair has given it out, or is about to
	anew  bool          // the peer has begun to make another
	built chan struct{} // closed when lane or err is there
	lane  *lane
	err   error
	old   *lane // that was given out and has ended: its user may still have it
}

// Pair is the lane between this process and another for a group's messages from point to point; it does not belong to a view. It is
// made when the first of both sides asks, and stays the same until it has ended, here or there, or one of the processes has: then the
// next call makes another, and nobody may use the former one any more. The other side has it made without being asked. Either end
// may be closed by who uses it; [Node.Unpair] lets go of the rest.
func (n *Node) Pair(ctx context.Context, group string, rank int, incarnation uint64) (*shm.Producer, *shm.Consumer, error) {
	if len(group) > maxName {
		return nil, nil, fmt.Errorf("link: a group's name has at most %d bytes, not %d", maxName, len(group))
	}
	for {
		p, err := n.pairOf(scope{pair: true, group: group, peer: rank}, incarnation) //nolint:contextcheck // it is built whoever waits
		if err != nil {
			return nil, nil, err
		}
		select {
		case <-p.built:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("link: wait for %s: %w", p.key, ctx.Err())
		}
		var refused *RefusedError
		switch {
		case p.err == nil:
			return p.lane.p, p.lane.c, nil
		case ctx.Err() != nil || !errors.As(p.err, &refused) || refused.Code != RefusedClosed: // else the other side has begun anew
			return nil, nil, p.err
		}
	}
}

// pairOf finds a pair that works, or is being made, or has one made.
func (n *Node) pairOf(key scope, incarnation uint64) (*pair, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	c := n.connection(key.peer, incarnation)
	if c == nil {
		return nil, fmt.Errorf("%w: rank %d (incarnation %016x)", ErrNotConnected, key.peer, incarnation)
	}
	p := n.pairs[key]
	if p != nil && p.c == c && p.usable() {
		p.asked = true
		if p.old != nil {
			p.old.close()
			p.old = nil
		}
		return p, nil
	}
	if p != nil {
		n.unpair(p)
	}
	p, err := n.newPair(key, c)
	if err != nil {
		return nil, err
	}
	p.asked = true
	return p, nil
}

// usable reports whether a pair is being made or works. The node's lock is held.
func (p *pair) usable() bool {
	select {
	case <-p.built:
		return p.err == nil && p.lane.p.Err() == nil && p.lane.c.Ended() == nil
	default:
		return true
	}
}

// newPair begins to make a pair. The lock is held.
func (n *Node) newPair(key scope, c *control) (*pair, error) {
	members := []Member{{n.cfg.Rank, n.cfg.Incarnation}, {c.who.Rank, c.who.Incarnation}}
	me := 0
	if members[0].Rank > members[1].Rank {
		members[0], members[1] = members[1], members[0]
		me = 1
	}
	party, err := n.gather(key, &MeshConfig{Group: key.group, Me: me, Members: members})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(n.ctx)
	p := &pair{n: n, key: key, c: c, party: party, stop: stop, built: make(chan struct{})}
	n.pairs[key] = p
	n.wg.Go(func() { p.build(ctx) })
	return p, nil
}

// build makes the lane. It goes on for as long as the connection lasts, whoever waits for it.
func (p *pair) build(ctx context.Context) {
	defer p.stop()
	s := p.party.seats[1-p.party.me]
	err := p.party.build(ctx, func() {
		p.lane = s.lane
		close(p.built)
	})
	if err == nil {
		return
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	switch p.err = err; {
	case p.n.pairs[p.key] == p:
		delete(p.n.pairs, p.key)
		p.closeOld()
	case p.anew:
		p.err = &RefusedError{Code: RefusedClosed, By: "the other side", Text: "it has begun anew"}
	default:
		p.err = ErrClosed
	}
	close(p.built)
}

func (p *pair) closeOld() {
	if p.old != nil {
		p.old.close()
		p.old = nil
	}
}

// offered hears that a peer makes a pair. The lock is held.
func (n *Node) offered(key scope, c *control, m *partyMessage) {
	made := 0
	for _, p := range n.pairs {
		if p.c == c && !p.asked {
			made++
		}
	}
	if made >= maxPairs {
		why := &RefusedError{Code: RefusedBusy, Text: fmt.Sprintf("%d pairs that nobody here has asked for", made)}
		n.wg.Go(func() { c.leave(key, 0, m.From, why) })
		return
	}
	was := n.pairs[key]
	if m.To != 0 || n.connection(c.who.Rank, c.who.Incarnation) != c { // an answer to what nobody wants any more
		return
	}
	c.early[key] = m
	if was != nil {
		was.anew = true
		was.giveUp()
	}
	p, err := n.newPair(key, c)
	delete(c.early, key)
	if err != nil { // no transport leads there: it finds out by itself
		return
	}
	if was != nil {
		p.succeed(was)
	}
}

// succeed takes the place of a pair that the peer has given up.
func (p *pair) succeed(was *pair) {
	p.old, was.old = was.old, nil
	if was.lane == nil {
		return
	}
	if !was.asked {
		was.lane.cut(ErrEnded)
		was.lane.close()
		return
	}
	was.lane.cut(&LaneError{Rank: was.key.peer, Transport: was.lane.via, Err: ErrEnded})
	p.closeOld()
	p.old = was.lane
}

// left hears that a peer has no part in a pair any more. The lock is held.
func (n *Node) left(key scope, c *control, m *partyMessage) {
	p := n.pairs[key]
	if p == nil || p.c != c || p.lane == nil || m.From != p.party.seats[1-p.party.me].theirs || m.To != p.party.number {
		return
	}
	if !p.asked { // who has it reads what is on its way still, and then the end
		delete(n.pairs, key)
		p.close()
	}
}

// losePair fails what leads to a process that is down, and lets go of it if nobody has it. The lock is held.
func (n *Node) losePair(p *pair, c *control, err error) {
	if p.c != c || p.lane == nil { // one that is being made fails by itself
		return
	}
	p.lane.lose(err)
	if !p.asked {
		delete(n.pairs, p.key)
		p.close()
	}
	n.bell.Ring()
}

// giveUp takes a pair out of the node's, and ends the building of one that is being made. The lock is held.
func (p *pair) giveUp() {
	delete(p.n.pairs, p.key)
	if p.n.parties[p.key] == p.party {
		delete(p.n.parties, p.key)
	}
	p.stop()
}

// unpair lets go of a pair and tells the peer. The lock is held.
func (n *Node) unpair(p *pair) {
	p.giveUp()
	if p.lane != nil && !p.c.ended() {
		n.wg.Go(func() { p.c.leave(p.key, p.party.number, p.party.seats[1-p.party.me].theirs, nil) })
	}
	p.close()
}

// Unpair closes a group's pairs, those with one rank or, if rank is -1, with all. Nobody here may use them any more; the other side
// reads what was written before, and then that they have ended.
func (n *Node) Unpair(group string, rank int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for key, p := range n.pairs {
		if key.group == group && (rank == -1 || key.peer == rank) {
			n.unpair(p)
		}
	}
}

// close lets go of the memory.
func (p *pair) close() {
	p.closeOld()
	if p.lane != nil {
		p.lane.close()
	}
}
