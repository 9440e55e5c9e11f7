package pg

import (
	"context"
	"errors"
	"fmt"
	"time"

	"larder/pg/link"
	"larder/pg/p2p"
	"larder/pg/shm"
)

// pairTime is how long a lane for messages may take to be made: the peer is alive and connected, or the sender hears that it is not.
const pairTime = 10 * time.Second

// pair is the lane of messages with a rank, made when it is first needed.
type pair struct {
	out  *shm.Producer
	in   *shm.Consumer
	err  error
	made chan struct{} // closed when the others are set
}

var errNotThere = errors.New("no process has this place now")

// lane is what the port asks for; it has the turn.
func (g *Group) lane(rank int) (*shm.Producer, *shm.Consumer, error) {
	p := g.pairs[rank]
	if p == nil {
		p = &pair{made: make(chan struct{})}
		g.pairs[rank] = p
		g.wg.Go(func() {
			p.out, p.in, p.err = g.pair(rank)
			close(p.made)
			g.bell.Ring()
		})
	}
	select {
	case <-p.made:
		if p.err != nil {
			delete(g.pairs, rank) // the next call tries again
		}
		return p.out, p.in, p.err
	default:
		return nil, nil, p2p.ErrPending
	}
}

// pair makes a lane to whoever has a place now.
func (g *Group) pair(rank int) (*shm.Producer, *shm.Consumer, error) {
	ranks := g.members.Ranks()
	if rank >= len(ranks) {
		return nil, nil, errNotThere
	}
	q := g.w.peer(ranks[rank])
	if q == nil {
		return nil, nil, errNotThere
	}
	ctx, cancel := context.WithTimeout(g.ctx, pairTime)
	defer cancel()
	if err := g.w.node.Connect(ctx, link.Peer{Rank: q.Rank, Incarnation: q.Incarnation, Address: q.Address}); err != nil {
		return nil, nil, fmt.Errorf("pg: %w", err)
	}
	out, in, err := g.w.node.Pair(ctx, g.cfg.ID, q.Rank, q.Incarnation)
	if err != nil {
		return nil, nil, fmt.Errorf("pg: %w", err)
	}
	return out, in, nil
}

// peer is a process that is announced; nil if none has that global rank.
func (w *World) peer(global int) *peer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.peers[global]
}

// others are the ranks whose messages a receive from any may get.
func (g *Group) others() []int {
	var ranks []int
	for rank, global := range g.members.Ranks() {
		if rank != g.rank && g.w.peer(global) != nil {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// peerDown is told that a process has been lost, by its global rank.
func (g *Group) peerDown(global int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.downs == nil {
		g.downs = map[int]error{}
	}
	g.downs[global] = err
}

// takeDowns tells the port of those that were lost; it has the turn.
func (g *Group) takeDowns() {
	g.mu.Lock()
	downs := g.downs
	g.downs = nil
	g.mu.Unlock()
	if len(downs) == 0 {
		return
	}
	for rank, global := range g.members.Ranks() {
		if err := downs[global]; err != nil {
			delete(g.pairs, rank)
			g.port.Fail(rank, err)
			g.port.Reset(rank)
			g.w.node.Unpair(g.cfg.ID, global)
		}
	}
}
