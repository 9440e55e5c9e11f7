package client

import (
	"context"
	"slices"
	"sync"
	"time"

	"larder/protocol"
)

// secondPause is for how long no memory for replicas is asked for after there was none: another node, or room on one, comes
// by an operator's doing, or by eviction.
const secondPause = 5 * time.Second

// secondWait is how long stores wait for such memory, from when it was asked for, and never longer than half of the time
// that they have: one is better off without a replica than late.
const secondWait = 500 * time.Millisecond

// secondRegions bounds what a batch asks for at once for its replicas, in regions.
const secondRegions = 16

// WithReplicas stores the value on n nodes in all, as far as they have room: 1 to 1+protocol.MaxCopies. Where it lies on
// fewer, also since a node went, the leader has others copy it as soon as they have room.
func WithReplicas(n int) StoreOption { return func(a *Attrs) { a.Replicas = n } }

// seconds is what is known of memory for replicas: of Config.WriteThrough, and of other nodes.
type seconds struct {
	mu    sync.Mutex
	begun [2]int64         // when it was asked for last, on Config.Clock
	ended [2]chan struct{} // closed when what became of that is known; nil if nobody asks
	none  [2]int64         // until when it is not asked for, since there was none
}

// extra is a run for one more location of an item that is being stored.
type extra struct {
	k    int // the item's place in todo
	step int // 1 for the first replica
	run  run
}

// replicas is on how many nodes an item is to be stored.
func (c *Client) replicas(a *Attrs) int {
	if a.Replicas != 0 {
		return a.Replicas
	}
	return c.cfg.Replicas
}

// locations is how many locations an item is stored at, at best.
func (c *Client) locations(a *Attrs) int {
	n := c.replicas(a)
	if c.cfg.WriteThrough != "" {
		n = max(n, 2)
	}
	return min(max(n, 1), 1+protocol.MaxCopies)
}

// replicates reports whether any item is stored at more than one location.
func (c *Client) replicates(items []Item) bool {
	if c.cfg.Replicas > 1 || c.cfg.WriteThrough != "" {
		return true
	}
	for i := range items {
		if items[i].Attrs.Replicas > 1 {
			return true
		}
	}
	return false
}

// replicate finds pages for the replicas of the items that are about to be written: first what is free, then what one
// REQUEST_ALLOC of each kind brings, if that comes soon. What does not find any is stored without.
func (op *storeOp) replicate(ctx context.Context, s *session) {
	c := op.c
	ctx, cancel := context.WithTimeout(ctx, timeLeft(ctx, 2*secondWait)/2)
	defer cancel()
	for step := 1; step <= protocol.MaxCopies; step++ {
		short := op.takeExtras(step)
		if short.pages == 0 {
			continue
		}
		if c.askSecond(ctx, s, c.through(step), short) {
			op.takeExtras(step)
		}
	}
}

// through reports whether the replicas of a step are those of Config.WriteThrough.
func (c *Client) through(step int) bool { return step == 1 && c.cfg.WriteThrough != "" }

// shortage is what replicas want for.
type shortage struct {
	pages, longest uint64   // of all of them, and of the longest
	avoid          []string // nodes where they may not lie
}

// takeExtras takes free pages for the replicas of a step, and returns what those want for that found none.
func (op *storeOp) takeExtras(step int) (short shortage) {
	c, p := op.c, op.c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakeResting()
	now := c.cfg.Clock()
	for k, i := range op.todo {
		done := func(x extra) bool { return x.k == k && x.step == step }
		if op.want.found[k] || step >= c.locations(&op.items[i].Attrs) || slices.ContainsFunc(op.extras, done) {
			continue
		}
		n := op.pages[k]
		t, ok := p.takeWhere(p.seconds, n, func(r *region) bool {
			return r.dev.avoid.Load() <= now && op.suits(k, step, r.dev.id, r.dev.node, r.dev.tier)
		})
		if ok {
			p.busy += n
			op.extras = append(op.extras, extra{k, step, t})
			continue
		}
		short.add(uint64(n), op.want.runs[k]) //nolint:gosec // positive
		for _, x := range op.extras {
			if x.k == k {
				short.add(0, x.run)
			}
		}
	}
	return short
}

// add adds pages that may not lie where t does.
func (q *shortage) add(pages uint64, t run) {
	q.pages, q.longest = q.pages+pages, max(q.longest, pages)
	if t.r != nil && !slices.Contains(q.avoid, t.r.dev.node) {
		q.avoid = append(q.avoid, t.r.dev.node)
	}
}

// suits reports whether a device may hold the replica of an item: one of the tier that is written through to, or one of
// another node than its other locations.
func (op *storeOp) suits(k, step int, id uint64, node, tier string) bool {
	c := op.c
	if c.through(step) {
		return tier == c.cfg.WriteThrough && (op.want.runs[k].r == nil || op.want.runs[k].r.dev.id != id)
	}
	if tier == slowTier && c.cfg.Tier != slowTier {
		return false
	}
	if r := op.want.runs[k].r; r != nil && r.dev.node == node {
		return false
	}
	return !slices.ContainsFunc(op.extras, func(x extra) bool {
		return x.k == k && (x.run.r.dev.id == id || !c.through(x.step) && x.run.r.dev.node == node)
	})
}

// putExtras releases the pages of replicas that were not stored.
func (op *storeOp) putExtras() {
	p := op.c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range op.extras {
		t := op.extras[i].run
		p.busy -= t.n
		p.release(t)
	}
	clear(op.extras)
	op.extras = op.extras[:0]
}

// askSecond has a region for replicas asked for, in the background and once for all who wait for one. It reports whether
// there may be one now. Those who come while a node takes its time wait no longer than the first.
func (c *Client) askSecond(ctx context.Context, s *session, through bool, short shortage) bool {
	kind, q := 0, &c.seconds
	if through {
		kind, short.avoid = 1, nil
	}
	q.mu.Lock()
	now, ended := c.cfg.Clock(), q.ended[kind]
	switch {
	case now < q.none[kind]:
		q.mu.Unlock()
		return false
	case ended == nil:
		ended = make(chan struct{})
		q.begun[kind], q.ended[kind] = now, ended
		if !c.spawn(func() { c.findSecond(s, kind, short) }) {
			close(ended)
			q.ended[kind] = nil
		}
	}
	left := time.Duration(q.begun[kind] + secondWait.Nanoseconds() - now)
	q.mu.Unlock()
	ready, stop := wake(left)
	defer stop()
	select {
	case <-ended:
		return true
	case <-ready:
	case <-ctx.Done():
	}
	return false
}

// findSecond asks for a region for replicas of a kind. It takes free space alone: a store is not worth less than another's
// replica.
func (c *Client) findSecond(s *session, kind int, short shortage) {
	through, q := kind == 1, &c.seconds
	m := &allocMsg{req: protocol.AllocRequest{
		InstanceID: c.cfg.Instance, PageSize: c.cfg.PageSize, RunPages: short.longest, Tier: c.cfg.Tier, TimeoutMS: 1,
		Size:  max(min(short.pages*c.cfg.PageSize, secondRegions*c.cfg.RegionSize), short.longest*c.cfg.PageSize, c.cfg.RegionSize),
		Avoid: slices.Concat(short.avoid, c.avoided()),
	}}
	if through {
		m.req.Tier = c.cfg.WriteThrough
	}
	m.req.Avoid = m.req.Avoid[:min(len(m.req.Avoid), protocol.MaxPlaces)]
	m.told = func(payload []byte, _ bool) { // nobody waits for it any more
		var rep protocol.AllocReply
		if payload != nil && rep.Decode(payload) == nil && rep.Region.Length > 0 {
			c.returnRegion(s, rep.Region)
		}
		c.pool.told()
	}
	c.pool.asks()
	err := c.mutate(c.life, s, protocol.TypeRequestAlloc, m, 0)
	if err == nil {
		err = c.takeSecond(s, through, &m.rep, short.avoid)
	}
	if !m.left {
		c.pool.told()
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if err != nil {
		q.none[kind] = c.cfg.Clock() + secondPause.Nanoseconds()
	}
	close(q.ended[kind])
	q.ended[kind] = nil
}

// takeSecond takes a region for replicas into the books, and gives it back if it is not where it was asked for.
func (c *Client) takeSecond(s *session, through bool, rep *protocol.AllocReply, avoid []string) error {
	d := rep.Device
	switch {
	case rep.Region.Length == 0:
		return ErrNoSpace
	case d == nil, through && d.Tier != c.cfg.WriteThrough, !through && slices.Contains(avoid, d.Node),
		!through && d.Tier == slowTier && c.cfg.Tier != slowTier:
		c.returnRegion(s, rep.Region)
		return ErrNoSpace
	}
	c.devices.learn("", []protocol.Device{*d})
	return c.addRegionAs(s, &rep.Region, true, nil)
}
