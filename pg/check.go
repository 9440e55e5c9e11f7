package pg

import (
	"cmp"
	"context"
	"slices"
	"time"

	"larder/pg/collective"
	"larder/pg/member"
	"larder/pg/p2p"
	"larder/pg/reduce"
)

// newGroup is a group that is not attached to the others yet.
func (w *World) newGroup(cfg GroupConfig) (*Group, error) {
	if cfg.Ranks == nil {
		cfg.Ranks = []int{w.cfg.Rank}
	}
	cfg.Ranks = slices.Clone(cfg.Ranks)
	cfg.Capacity = cmp.Or(cfg.Capacity, len(cfg.Ranks))
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	rank := slices.Index(cfg.Ranks, w.cfg.Rank)
	switch {
	case cfg.ID == "":
		return nil, wrong("a group needs an ID")
	case rank < 0:
		return nil, wrong("group %s has no place for global rank %d: its ranks are %v", cfg.ID, w.cfg.Rank, cfg.Ranks)
	case cfg.Capacity < len(cfg.Ranks):
		return nil, wrong("group %s has %d ranks and a capacity of %d", cfg.ID, len(cfg.Ranks), cfg.Capacity)
	case cfg.Failures > Manual:
		return nil, wrong("group %s has an unknown policy for failures", cfg.ID)
	case cfg.Timeout < 0:
		return nil, wrong("group %s has a timeout of %v", cfg.ID, cfg.Timeout)
	}
	g := &Group{w: w, cfg: cfg, rank: rank, bell: w.node.Bell(), kicked: make(chan struct{}, 1), made: map[uint64]*plane{}}
	g.ctx, g.cancel = context.WithCancel(w.ctx)
	g.later = newTimer(g.kick)
	g.pairs = map[int]*pair{}
	g.port = p2p.NewPort(p2p.Config{Me: rank, Lane: g.lane, Ranks: g.others, Bell: g.bell})
	if cfg.Extension {
		alone := member.View{Group: cfg.ID, Members: []member.Member{{Rank: rank, Global: w.cfg.Rank, Incarnation: w.incarnation}}}
		g.planes = []*plane{newPlane(alone, nil, &collective.Comm{N: 1})}
	}
	g.locals.Store(1)
	return g, nil
}

// check finds what cannot be right about a call before it gets a number: nobody else needs to know then.
func (g *Group) check(c *Call) error {
	if c.p2p != none {
		return g.checkMessage(c)
	}
	if c.Kind.Reduces() {
		if err := reduce.Check(c.Op, c.DType); err != nil {
			return wrong("%v", err)
		}
	}
	if c.rooted() && (c.Root < 0 || c.Root >= g.Capacity()) {
		return wrong("%s: root %d of a group of %d", c, c.Root, g.Size())
	}
	if c.Kind == collective.Barrier {
		return nil
	}
	size := c.DType.Size()
	if size == 0 {
		return wrong("%s: a call needs a dtype", c)
	}
	for _, b := range [][][]byte{{c.Src, c.Dst}, c.SrcParts, c.DstParts} {
		for _, p := range b {
			if len(p)%size != 0 {
				return wrong("%s: %d bytes are no whole number of %v", c, len(p), c.DType)
			}
		}
	}
	return nil
}

func (g *Group) checkMessage(c *Call) error {
	switch {
	case c.Root == Any && c.p2p == recv:
	case c.Root < 0 || c.Root >= g.Capacity():
		return wrong("%s: the group has ranks 0 to %d", c, g.Capacity()-1)
	case c.Root == g.rank:
		return wrong("%s: that is this rank itself", c)
	case c.Tag == AnyTag && c.p2p == send:
		return wrong("%s: a message needs a tag", c)
	}
	return nil
}

// rooted tells whether a call has a root.
func (c *Call) rooted() bool { return c.p2p == none && c.Kind.Rooted() }

// newTimer is a timer that calls f, and does not run yet.
func newTimer(f func()) *time.Timer {
	t := afterFunc(time.Hour, f)
	t.Stop()
	return t
}
