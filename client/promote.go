package client

import (
	"bytes"
	"context"
	"sync/atomic"
	"time"

	"larder/protocol"
)

const (
	// maxPromotions bounds the entries that wait to be copied to a faster tier, and promoteBytes their bytes: the leader
	// asks again when they are read again.
	maxPromotions = 64
	promoteBytes  = 32 << 20
	// promoteRest is how long no room is asked for after there was none: what is cold had no copy below, and demotion takes
	// its time.
	promoteRest = time.Second
)

// promotions are values that were read from a slow tier and wait to be copied to a faster one.
type promotions struct {
	queue chan promotion
	bytes atomic.Int64
	rests atomic.Int64 // until when only free pages are taken
}

type promotion struct {
	of    CopyItem
	value []byte
}

// promote has a value copied into this client's own memory in the background, if the leader wants that and there may be room:
// see takeFast. r is the result of the lookup that it was read by.
func (c *Client) promote(key []byte, r *protocol.LookupResult, value []byte) {
	if c.cfg.NoPromote || r.Version == 0 {
		return
	}
	n, p := int64(len(value)), c.pool
	p.mu.Lock()
	room := len(p.queue) == 0 && (p.nfree >= c.pagesOf(len(value)) || p.clock() >= c.promotions.rests.Load())
	p.mu.Unlock()
	if !room || !c.promotions.take(n) {
		c.counters.notPromoted.Add(1)
		return
	}
	x := promotion{
		of:    CopyItem{Key: bytes.Clone(key), Version: r.Version, From: []protocol.Location{r.Location}},
		value: bytes.Clone(value),
	}
	select {
	case c.promotions.queue <- x:
	default:
		c.promotions.bytes.Add(-n)
		c.counters.notPromoted.Add(1)
	}
}

// take counts bytes of a value that is to wait. One that is larger than all that may wait does so alone.
func (w *promotions) take(n int64) bool {
	if sum := w.bytes.Add(n); sum <= promoteBytes || sum == n {
		return true
	}
	w.bytes.Add(-n)
	return false
}

// promoter copies what promote has queued, one by one.
func (c *Client) promoter() {
	defer c.wg.Done()
	for {
		select {
		case <-c.life.Done():
			return
		case x := <-c.promotions.queue:
			if c.promoteOne(c.life, &x) {
				c.counters.promoted.Add(1)
			} else {
				c.counters.notPromoted.Add(1)
			}
			c.promotions.bytes.Add(-int64(len(x.value)))
		}
	}
}

// promoteOne stores one copy, and reports whether it is there.
func (c *Client) promoteOne(ctx context.Context, x *promotion) bool {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	op := c.newStore()
	defer c.freeStore(op)
	op.spare = true
	items, out := []Item{{Key: x.of.Key, Value: x.value}}, make([]PutResult, 1)
	err := op.storeCopies(ctx, items, []CopyItem{x.of}, out)
	return err == nil && out[0].Stored
}

// takeFast gives w pages in tiers that are worth a promotion, or nothing. If none is free it asks the leader for some, which
// gives space that is free, or evicts from such a tier what is cold and has a copy below. Stores come first.
func (c *Client) takeFast(ctx context.Context, s *session, w *want) bool {
	p := c.pool
	if p.takeFast(w) {
		return true
	}
	if p.clock() < c.promotions.rests.Load() || !p.idle() {
		return false
	}
	err := c.askFast(ctx, s, w)
	p.mu.Lock()
	rest := p.wakeResting()
	p.mu.Unlock()
	if err == nil && rest > 0 && rest <= maxRest {
		err = sleep(ctx, rest)
	}
	if err != nil || !p.takeFast(w) {
		c.promotions.rests.Store(p.clock() + int64(promoteRest))
		return false
	}
	return true
}

// idle reports whether no store waits for pages.
func (p *pool) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.queue) == 0
}

// askFast makes the REQUEST_ALLOC of a promotion. It fails if nothing was given.
func (c *Client) askFast(ctx context.Context, s *session, w *want) error {
	long := uint64(w.longest()) //nolint:gosec // positive
	m := &allocMsg{told: func(payload []byte, _ bool) {
		c.lateAlloc(s, payload)
		c.pool.told()
	}}
	m.req = protocol.AllocRequest{
		InstanceID: c.cfg.Instance, PageSize: c.cfg.PageSize, Size: max(c.cfg.RegionSize, long*c.cfg.PageSize),
		NeedPages: long, RunPages: long, Promote: true, Tier: c.cfg.Tier, Near: c.cfg.Near, Avoid: c.avoided(), Device: c.only.Load(),
	}
	c.counters.allocs.Add(1)
	c.pool.asks()
	defer func() {
		if !m.left {
			c.pool.told()
		}
	}()
	err := c.mutate(ctx, s, protocol.TypeRequestAlloc, m, 0)
	if err != nil {
		return err
	}
	_, err = c.takeIn(s, &m.rep)
	c.pool.wakeAllocator()
	return err
}
