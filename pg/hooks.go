package pg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"larder/pg/collective"
	"larder/pg/link"
	"larder/pg/member"
)

// What follows is called by the members' agreement: see [member.Hooks]. A proposed view's channels are made while the views before
// it are in use. Then nothing more begins until all have said how far they are.

// Connect implements [member.Hooks].
func (g *Group) Connect(ctx context.Context, v member.View) ([]byte, error) {
	p, err := g.connect(ctx, v)
	if err != nil {
		return nil, err
	}
	var report []byte
	if v.Reason == member.ReasonStart && len(v.Members) > 1 {
		if report, err = g.measure(ctx, p); err != nil {
			p.close()
			return nil, g.connectError(v, err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped != nil {
		g.old = append(g.old, p) // Close waits for this
		return nil, g.stopped
	}
	g.made[v.Epoch] = p
	return report, nil
}

// connect makes a plane for a view.
func (g *Group) connect(ctx context.Context, v member.View) (*plane, error) {
	me := v.Index(g.rank)
	c := &collective.Comm{N: len(v.Members), Me: me}
	if len(v.Members) == 1 {
		return newPlane(v, nil, c), nil
	}
	members := make([]link.Member, len(v.Members))
	locals := 0
	for i, m := range v.Members {
		members[i] = link.Member{Rank: m.Global, Incarnation: m.Incarnation}
		if i == me {
			locals++
			continue
		}
		p, err := g.w.registry.Find(ctx, m.Global, m.Incarnation)
		if err == nil {
			err = g.w.node.Connect(ctx, link.Peer{Rank: p.Rank, Incarnation: p.Incarnation, Address: p.Address})
		}
		if err != nil {
			return nil, &member.ConnectError{Ranks: []int{m.Rank}, Err: err}
		}
		if g.w.node.Local(m.Global, m.Incarnation) {
			locals++
		}
	}
	mesh, err := g.w.node.Mesh(ctx, link.MeshConfig{
		Group: g.cfg.ID, Epoch: v.Epoch, Me: me, Members: members, Layout: collective.Layout(locals),
	})
	if err != nil {
		return nil, g.connectError(v, err)
	}
	c.Lane, c.Hosts = mesh.Lane, mesh.Hosts()
	c.Room, c.Local = mesh.Room()
	return newPlane(v, mesh, c), nil
}

// connectError says whose fault it is that a mesh could not be made: of those who are missing, or not connected any more. If it is
// nobody's this rank cannot take part itself.
func (g *Group) connectError(v member.View, err error) error {
	gone := map[int]bool{} // by global rank
	if missing, ok := errors.AsType[*link.MissingError](err); ok {
		for _, m := range missing.Missing {
			gone[m.Rank] = true
		}
	}
	if down, ok := errors.AsType[*link.DownError](err); ok {
		gone[down.Rank] = true
	}
	if lane, ok := errors.AsType[*link.LaneError](err); ok {
		gone[lane.Rank] = true
	}
	if refused, ok := errors.AsType[*link.RefusedError](err); ok {
		for _, rank := range refused.Blames {
			gone[rank] = true
		}
	}
	e := &member.ConnectError{Err: err}
	for _, m := range v.Members {
		if m.Rank != g.rank && (gone[m.Global] || !g.w.node.Connected(m.Global, m.Incarnation)) {
			e.Ranks = append(e.Ranks, m.Rank)
		}
	}
	g.w.cfg.Logger.Warn("pg: cannot make the channels of a view", slog.String("group", g.cfg.ID), slog.Uint64("epoch", v.Epoch),
		slog.Any("for", e.Ranks), slog.Any("err", err))
	if len(e.Ranks) == 0 {
		return fmt.Errorf("pg: %w", err)
	}
	return e
}

// Hold implements [member.Hooks].
func (g *Group) Hold(v member.View) (done, entered uint64) {
	g.turn.Lock() // what is being polled may end
	defer g.turn.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held, g.frozen = true, v.Retry
	return g.done, g.begun
}

// Commit implements [member.Hooks].
func (g *Group) Commit(v member.View) {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer g.bell.Ring()
	g.held, g.frozen = false, false
	was := g.view.Index(g.rank) >= 0
	g.view = v
	p := g.made[v.Epoch]
	delete(g.made, v.Epoch)
	for epoch, q := range g.made { // those before were given up
		if epoch < v.Epoch {
			g.old = append(g.old, q)
			delete(g.made, epoch)
		}
	}
	switch {
	case !was && v.Index(g.rank) < 0: // others' business
		return
	case p == nil || v.Index(g.rank) < 0: // others go on without this rank
		g.dropPlanes()
		return
	}
	p.adopt(v)
	if !was { // what it has called by itself does not count
		g.dropPlanes()
		g.next, g.begun, g.done = v.StartSeq, v.StartSeq, v.StartSeq
	}
	g.planes = append(g.planes, p)
	g.locals.Store(p.locals())
}

// Abandon implements [member.Hooks].
func (g *Group) Abandon(epoch uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer g.bell.Ring()
	g.held, g.frozen = false, false
	if p := g.made[epoch]; p != nil {
		g.old = append(g.old, p)
		delete(g.made, epoch)
	}
}

// isolated is told when others may count on this process's death, and when they do not any more.
func (g *Group) isolated(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.stopped != nil && !errors.Is(g.stopped, ErrIsolated): // for another reason, which lasts
	case err != nil:
		g.stopped = fmt.Errorf("%w: %w", ErrIsolated, err)
	default:
		g.stopped = nil
	}
	g.bell.Ring()
}
