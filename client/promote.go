package client

import (
	"bytes"
	"context"
	"sync/atomic"

	"larder/protocol"
)

const (
	// maxPromotions bounds the entries that wait to be copied to a faster tier, and promoteBytes their bytes: the leader
	// asks again when they are read again.
	maxPromotions = 64
	promoteBytes  = 32 << 20
)

// promotions are values that were read from a slow tier and wait to be copied to a faster one.
type promotions struct {
	queue chan promotion
	bytes atomic.Int64
}

type promotion struct {
	of    CopyItem
	value []byte
}

// promote has a value copied into this client's own memory in the background, if the leader wants that and there is a free
// page: nothing is evicted for it. r is the result of the lookup that it was read by.
func (c *Client) promote(key []byte, r *protocol.LookupResult, value []byte) {
	if c.cfg.NoPromote || r.Version == 0 {
		return
	}
	n, p := int64(len(value)), c.pool
	p.mu.Lock()
	room := p.nfree >= c.pagesOf(len(value)) && len(p.queue) == 0
	p.mu.Unlock()
	if !room || c.promotions.bytes.Add(n) > promoteBytes {
		if room {
			c.promotions.bytes.Add(-n)
		}
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
