package client

import (
	"context"
	"log/slog"
	"time"
)

const (
	// discardEvery is for how long free pages gather before they are discarded: neighbours become one extent, and what is
	// stored to again by then is not discarded for nothing.
	discardEvery = 250 * time.Millisecond
	// discardPause is the pause between two calls of Config.Discard, each of which may flush a disk.
	discardPause = 20 * time.Millisecond
	// maxDiscards bounds the extents of one call.
	maxDiscards = 120
)

// Unused is a stretch of one of this client's regions in which nothing lies any more, in whole pages.
type Unused struct {
	Region, Epoch  uint64
	Offset, Length uint64 // within the region
}

// A page is dirty if it is free, and what lay there has not been discarded. All free pages of a new region are: another may
// have had it before. Dirty pages are given out as others are; those that are being discarded are not, so that nothing is
// written to them meanwhile. All of this is for clients with a Config.Discard alone; others have no dirty pages.

// watchDirt begins to note which pages of a region are dirty.
func (p *pool) watchDirt(r *region) {
	if !p.discards {
		return
	}
	r.dirty = newBitset(len(r.keys), false)
	for page := r.free.next(0); page >= 0; page = r.free.next(page + 1) {
		r.dirty.add(page)
	}
	p.wakeDiscarder()
}

// soil notes that pages came free.
func (p *pool) soil(t run) {
	if t.r.dirty == nil {
		return
	}
	for i := range t.n {
		t.r.dirty.add(t.page + i)
	}
	p.wakeDiscarder()
}

func (p *pool) wakeDiscarder() {
	if !p.discards {
		return
	}
	select {
	case p.dirt <- struct{}{}:
	default:
	}
}

// takeDirty takes dirty pages out of use, half of the free ones at most: stores find the others. While a store waits for
// pages there are none. The regions count as being written to until cleaned.
func (p *pool) takeDirty() (runs []run) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakeResting()
	p.serve()
	if len(p.queue) > 0 {
		return nil
	}
	left := max(p.nfree/2, 1)
	for _, r := range p.list {
		if r.dirty == nil {
			continue
		}
		for r.dirty.count > 0 && left > 0 && len(runs) < maxDiscards {
			page := r.dirty.first()
			t := p.takeAt(r, page, min(r.dirty.end(page)-page, left))
			r.copies++
			left -= t.n
			p.busy += t.n
			p.cleaning += t.n
			runs = append(runs, t)
		}
	}
	return runs
}

// cleaned puts pages back into use that takeDirty took. They are not dirty any more, whether they could be discarded or not:
// what could not is dropped.
func (p *pool) cleaned(runs []run) {
	p.mu.Lock()
	for _, t := range runs {
		p.busy -= t.n
		p.cleaning -= t.n
		p.free(t)
	}
	p.mu.Unlock()
	for _, t := range runs {
		p.endCopy(t.r)
	}
}

// hasDirt reports whether there is something to discard, now or soon.
func (p *pool) hasDirt() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.resting) > 0 {
		return true
	}
	for _, r := range p.list {
		if r.dirty != nil && r.dirty.count > 0 {
			return true
		}
	}
	return false
}

// discarder has Config.Discard forget what lies in free pages, until the client is closed.
func (c *Client) discarder() {
	defer c.wg.Done()
	for {
		select {
		case <-c.life.Done():
			return
		case <-c.pool.dirt:
		}
		for c.pool.hasDirt() {
			if sleep(c.life, discardEvery) != nil {
				return
			}
			for c.discardSome() {
				if sleep(c.life, discardPause) != nil {
					return
				}
			}
		}
	}
}

// discardSome makes one call of Config.Discard, and reports whether there was something to discard. Like a store it does
// nothing while the session's deadline has passed.
func (c *Client) discardSome() bool {
	s := c.sess.Load()
	if s == nil || s.ended() || !s.alive(c.cfg.Clock()) {
		return false
	}
	runs := c.pool.takeDirty()
	if len(runs) == 0 {
		return false
	}
	defer c.pool.cleaned(runs)
	list := make([]Unused, len(runs))
	for i, t := range runs {
		list[i] = Unused{Region: t.r.id, Epoch: t.r.epoch, Offset: t.offset(), Length: uint64(t.n) * t.r.pageSize} //nolint:gosec // positive
	}
	ctx, cancel := context.WithTimeout(c.life, c.cfg.Timeout)
	defer cancel()
	if err := c.cfg.Discard(ctx, list); err != nil {
		c.cfg.Logger.Debug("free pages are not discarded", slog.Int("extents", len(list)), slog.Any("error", err))
	}
	return true
}
