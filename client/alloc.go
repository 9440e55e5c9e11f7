package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"larder/protocol"
)

const (
	// allocWait is how long a master may look for victims before it answers PENDING: its own default.
	allocWait = 2 * time.Second
	// maxRest is how long the allocator waits for pages in quarantine rather than have more evicted: a lease.
	maxRest = 500 * time.Millisecond
	// homeRest is the same for a device's home: nobody waits for its copies, and what it evicted for them would be gone.
	homeRest = 5 * time.Second
	// stuckPause is how long the allocator waits, when the pool has no victim, for this client's own stores in progress
	// to make some.
	stuckPause = 5 * time.Millisecond
	// maxNoAccess is how many regions in a row may turn out to be out of reach before stores fail: with each of them
	// another device is asked for.
	maxNoAccess = 4
)

// want is a wish for pages: for each item of a store the run that it needs. Fields belong to pool.mu while it is in
// the queue.
type want struct {
	keys  [][]byte
	pages []int // per item
	found []bool
	known bool  // found is what a master said
	runs  []run // the result: the zero run for items that were found
	need  int   // pages of all items
	same  int   // pages of every item; 0 if they differ
	done  chan error
	left  bool // the one who wished has gone
}

func (w *want) init(keys [][]byte, pages []int) {
	w.keys, w.pages, w.known, w.left = keys, pages, false, false
	w.need, w.same = 0, pages[0]
	for _, n := range pages {
		w.need += n
		if n != w.same {
			w.same = 0
		}
	}
	w.runs = append(w.runs[:0], make([]run, len(pages))...)
	w.found = append(w.found[:0], make([]bool, len(pages))...)
	if w.done == nil {
		w.done = make(chan error, 1)
	}
}

// longest is the number of pages of the longest item.
func (w *want) longest() int { return slices.Max(w.pages) }

// take gives w all that it needs, or nothing.
func (p *pool) take(w *want) bool {
	need := 0
	for i, n := range w.pages {
		if !w.found[i] {
			need += n
		}
	}
	if need > p.nfree {
		return false
	}
	for i, n := range w.pages {
		if w.found[i] {
			w.runs[i] = run{}
			continue
		}
		t, ok := p.takeRun(n)
		if !ok {
			for j := range i {
				p.release(w.runs[j])
				w.runs[j] = run{}
			}
			return false
		}
		w.runs[i] = t
	}
	p.busy += need
	return true
}

// takeFast gives w all that it needs of what is free in tiers that are worth a promotion, or nothing.
func (p *pool) takeFast(w *want) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakeResting()
	if len(p.queue) > 0 {
		return false
	}
	for i, n := range w.pages {
		t, ok := p.takeWhere(p.list, n, func(r *region) bool { return r.dev.tier != slowTier })
		if !ok {
			for j := range i {
				p.release(w.runs[j])
				p.busy -= w.runs[j].n
				w.runs[j] = run{}
			}
			return false
		}
		p.busy += n
		w.runs[i] = t
	}
	return true
}

// putBack releases the runs that w still has.
func (p *pool) putBack(w *want) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, t := range w.runs {
		p.busy -= t.n
		p.release(t)
		w.runs[i] = run{}
	}
}

// acquire gets w its pages: from those that are free, or else from a master, which says which of the keys it holds
// already. It fails with ErrNoSpace, ErrClosed, what a master answered, or the context's error.
func (c *Client) acquire(ctx context.Context, w *want) error {
	p := c.pool
	p.mu.Lock()
	if len(p.queue) == 0 {
		if len(p.resting) > 0 {
			p.wakeResting()
		}
		if p.take(w) {
			p.mu.Unlock()
			return nil
		}
	}
	p.queue = append(p.queue, w)
	p.mu.Unlock()
	c.counters.shortages.Add(1)
	p.wakeAllocator()
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.cfg.Timeout)
		defer cancel()
	}
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
	case <-c.life.Done():
	}
	p.mu.Lock()
	if i := slices.Index(p.queue, w); i >= 0 {
		p.queue = slices.Delete(p.queue, i, i+1)
		w.left = true
		p.mu.Unlock()
		if c.life.Err() != nil {
			return ErrClosed
		}
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	p.mu.Unlock()
	return <-w.done // it was served just now
}

// serve ends wishes from the head of the queue on, as long as there are pages. Those that came later wait for those
// before them, so that none starves.
func (p *pool) serve() {
	for len(p.queue) > 0 && p.take(p.queue[0]) {
		w := p.queue[0]
		p.queue = slices.Delete(p.queue, 0, 1)
		w.done <- nil
	}
}

// refuse ends the first n wishes with an error.
func (p *pool) refuse(batch []*want, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range batch {
		if i := slices.Index(p.queue, w); i >= 0 {
			p.queue = slices.Delete(p.queue, i, i+1)
			w.done <- err
		}
	}
}

// allocator serves the wishes that free pages did not satisfy, with one REQUEST_ALLOC at a time for as many of them as
// go together: so a region is not asked for twice.
func (c *Client) allocator() {
	defer c.wg.Done()
	a := &allocator{c: c, p: c.pool}
	for {
		select {
		case <-c.life.Done():
			return
		case <-c.pool.kick:
		}
		for c.life.Err() == nil && a.step() {
		}
	}
}

type allocator struct {
	c     *Client
	p     *pool
	whole bool // evicted pages gave no run that is long enough
	stuck int  // rounds in a row that brought nothing
}

// step does what can be done next. It reports false when there is nothing to do until the next kick.
func (a *allocator) step() bool {
	p := a.p
	p.mu.Lock()
	rest := p.wakeResting()
	p.serve()
	if len(p.queue) == 0 {
		a.stuck, a.whole = 0, false
		p.mu.Unlock()
		return false
	}
	head := p.queue[0]
	enough := p.nfree + p.restingPages() - head.short()
	if p.cleaning > 0 { // they come free when a disk has been flushed
		rest, enough = cmp.Or(min(rest, maxRest), maxRest), enough+p.cleaning
	}
	p.mu.Unlock()
	patience := maxRest
	if a.c.cfg.Home {
		patience = homeRest
	}
	if rest > 0 && rest <= patience && enough >= 0 {
		a.pause(rest)
		return true
	}
	a.ask()
	return true
}

// short is how many pages a wish still needs.
func (w *want) short() int {
	need := 0
	for i, n := range w.pages {
		if !w.found[i] {
			need += n
		}
	}
	return need
}

func (p *pool) restingPages() int {
	n := 0
	for i := range p.resting {
		n += p.resting[i].run.n
	}
	return n
}

// pause waits for a while, or for a kick.
func (a *allocator) pause(d time.Duration) {
	ready, stop := wake(d)
	defer stop()
	select {
	case <-ready:
	case <-a.p.kick:
	case <-a.c.life.Done():
	}
}

// batch chooses the wishes that one request asks for, and writes the request. Items of one size are asked for by key,
// so that the master evicts exactly what their stores would have evicted one by one; others by the number of pages.
func (a *allocator) batch(m *allocMsg) []*want {
	p, cfg := a.p, &a.c.cfg
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return nil
	}
	head := p.queue[0]
	n, need, long, keys := 1, head.need, head.longest(), len(head.keys)
	if head.same > 0 {
		for ; n < len(p.queue) && a.stuck == 0; n++ {
			w := p.queue[n]
			if w.same != head.same || keys+len(w.keys) > protocol.MaxBatch {
				break
			}
			keys += len(w.keys)
			need += w.need
		}
	}
	batch := slices.Clone(p.queue[:n])
	req := &m.req
	*req = protocol.AllocRequest{
		InstanceID: cfg.Instance, PageSize: cfg.PageSize, RunPages: uint64(long), //nolint:gosec // positive
		Size:  max(cfg.RegionSize, uint64(long)*cfg.PageSize), //nolint:gosec // positive
		Evict: true, Whole: a.whole, Tier: cfg.Tier, TimeoutMS: uint64(allocWait / time.Millisecond),
		Near: cfg.Near, Avoid: a.c.avoided(), Device: a.c.only.Load(),
	}
	free := 0
	for _, r := range p.list {
		free += r.free.runs(long) * long
	}
	req.FreePages = uint64(free)
	if head.same > 0 && !a.whole {
		for _, w := range batch {
			for _, k := range w.keys {
				req.Keys = append(req.Keys, slices.Clone(k)) // the caller may leave while the request is repeated
			}
		}
	} else {
		req.NeedPages = uint64(max(head.short()-free, long)) //nolint:gosec // positive
	}
	return batch
}

// ask makes one REQUEST_ALLOC and shares out what it brings.
func (a *allocator) ask() {
	c := a.c
	s := c.sess.Load()
	m := &allocMsg{told: func(payload []byte, _ bool) {
		c.lateAlloc(s, payload)
		c.pool.told()
	}}
	batch := a.batch(m)
	if len(batch) == 0 || s == nil {
		return
	}
	c.flushReleases() // what the client has stopped reading is no victim until the master knows
	c.counters.allocs.Add(1)
	a.p.asks()
	defer func() {
		if !m.left {
			a.p.told()
		}
	}()
	err := c.mutate(c.life, s, protocol.TypeRequestAlloc, m, allocWait.Nanoseconds())
	if err != nil {
		a.failed(batch, err)
		return
	}
	got, err := c.takeIn(s, &m.rep)
	switch {
	case errors.Is(err, errNoAccess) && a.stuck < maxNoAccess:
		c.cfg.Logger.Warn("cannot use a region", slog.Any("error", err))
		a.pause(backoff(a.stuck))
		a.stuck++ // the next one comes from another device if there is one, see avoided
	case err != nil:
		a.p.refuse(batch, err)
		a.stuck = 0
	default:
		a.share(batch, &m.rep, got)
	}
}

// share gives each wish what the master said of its keys, and serves those that can be.
func (a *allocator) share(batch []*want, rep *protocol.AllocReply, got int) {
	p := a.p
	p.mu.Lock()
	found := rep.Found
	for _, w := range batch {
		if len(found) >= len(w.keys) {
			w.known = true
			copy(w.found, found)
			found = found[len(w.keys):]
		}
	}
	before := len(p.queue)
	p.wakeResting()
	p.serve()
	served := before - len(p.queue)
	a.whole = false
	if served > 0 {
		a.stuck = 0
		p.mu.Unlock()
		return
	}
	// Enough pages, and yet no run: the next request empties a region.
	head := p.queue[0:min(1, len(p.queue))]
	a.whole = len(head) == 1 && head[0].longest() > 1 && p.nfree >= head[0].short()
	p.mu.Unlock()
	if got == 0 {
		a.stuck++
		a.pause(backoff(a.stuck))
	}
}

// failed handles a REQUEST_ALLOC that brought nothing.
func (a *allocator) failed(batch []*want, err error) {
	switch {
	case errors.Is(err, ErrSessionExpired) || protocol.CodeOf(err) == protocol.CodeSessionExpired:
		a.pause(minBackoff) // the connector opens another session, and the next round asks there
		if _, err := a.c.conn(a.c.life); err != nil {
			a.p.refuse(batch, ErrClosed)
		}
	case protocol.CodeOf(err) == protocol.CodeNoSpace:
		a.stuck++
		a.p.mu.Lock()
		busy := a.p.busy > 0 || len(a.p.resting) > 0
		a.p.mu.Unlock()
		switch {
		case busy:
			// Pages that stores of this client are writing now can be evicted once they are registered.
			a.pause(stuckPause)
		case len(batch) == 1:
			a.p.refuse(batch, fmt.Errorf("%w (%w)", ErrNoSpace, err))
			a.stuck = 0
		}
		// Otherwise the first of the batch is asked for alone, since a.stuck is not 0.
	case final(err):
		a.p.refuse(batch, err)
	default:
		a.c.cfg.Logger.Debug("no pages yet", slog.Any("error", err))
		a.pause(backoff(a.stuck))
		a.stuck++
	}
}

// takeIn enters what a REQUEST_ALLOC brought into the books, and returns how many pages that is.
func (c *Client) takeIn(s *session, rep *protocol.AllocReply) (pages int, err error) {
	p := c.pool
	if rep.Device != nil {
		c.devices.learn("", []protocol.Device{*rep.Device})
	}
	p.mu.Lock()
	for i := range rep.Evicted {
		p.evicted(&rep.Evicted[i])
	}
	p.mu.Unlock()
	c.counters.evicted.Add(uint64(len(rep.Evicted)))
	if phase := rep.Phase; phase < uint64(len(c.counters.phases)) && (rep.Region.Length > 0 || len(rep.Evicted) > 0) {
		c.counters.phases[phase].Add(1)
	}
	if rep.Region.Length > 0 {
		if err := c.addRegion(s, &rep.Region); err != nil {
			return len(rep.Evicted), err
		}
		pages = int(rep.Region.Length / max(rep.Region.PageSize, 1)) //nolint:gosec // bounded by the device
	}
	return pages + len(rep.Evicted), nil
}

// addRegion opens a region that a master gave and makes its pages available. A region that the client had under an
// earlier epoch was emptied whole: its old writers end first.
func (c *Client) addRegion(s *session, given *protocol.Region) error {
	return c.addRegionAs(s, given, false, nil)
}

// inherited is what is known of a region that an earlier session had.
type inherited struct {
	occupied []uint64 // by entries: offset, length, offset, length ...
	restMS   uint64   // how long readers may hold leases of what has gone from there
}

// addRegionAs is addRegion of a region that is for replicas alone, if second, or that is taken over, if from is not nil.
func (c *Client) addRegionAs(s *session, given *protocol.Region, second bool, from *inherited) error {
	p := c.pool
	if given.PageSize == 0 {
		given.PageSize = c.cfg.PageSize
	}
	p.mu.Lock()
	old := p.regions[given.RegionID]
	if old == nil {
		old = p.dying[given.RegionID] // given up already, and perhaps still written to
	}
	epoch, gone := p.gone[given.RegionID]
	p.mu.Unlock()
	if gone && epoch >= given.Epoch || old != nil && old.epoch >= given.Epoch {
		return nil
	}
	if old != nil {
		if wait := p.giveUp(old, ErrRevoked); wait != nil {
			c.cfg.Logger.Warn("a region waits for open Allocs", slog.Uint64("region_id", old.id))
			select {
			case <-wait:
			case <-c.life.Done():
				return ErrClosed
			}
		}
	}
	dev := c.patientDevice(given)
	if dev == nil {
		c.returnRegion(s, *given)
		return fmt.Errorf("%w: device %d of the pool, or its present generation, is not to be found on this host",
			ErrConfig, given.Device)
	}
	r, err := c.openRegion(s, given, dev)
	if err != nil {
		dev.drop()
		c.returnRegion(s, *given)
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if epoch, gone := p.gone[r.id]; gone && epoch >= r.epoch || s.ended() {
		r.unmap() // taken away while it was being mapped
		return nil
	}
	r.second = second
	if from != nil {
		r.occupy(from.occupied)
		p.restFree(r, from.restMS)
	}
	p.watchDirt(r)
	p.add(r)
	c.cfg.Logger.Debug("region", slog.Uint64("region_id", r.id), slog.Uint64("bytes", r.length))
	return nil
}

// deviceWait bounds the wait for a device's header to show the generation that its master has committed to. It leaves
// room for that master's death in between, and its successor's formatting a large device.
const deviceWait = 10 * time.Second

// patientDevice returns the device of a region that was given. A master writes a new generation to the log first and
// to the header then, so that for a moment the device may seem to be another.
func (c *Client) patientDevice(given *protocol.Region) *device {
	until := c.cfg.Clock() + deviceWait.Nanoseconds()
	for n := 0; ; n++ {
		if d := c.device(c.life, given.Device, given.Generation); d != nil {
			return d
		}
		if c.cfg.Clock() > until || sleep(c.life, backoff(n)) != nil {
			return nil
		}
	}
}

// lateAlloc takes in a reply whose request was given up.
func (c *Client) lateAlloc(s *session, payload []byte) {
	var rep protocol.AllocReply
	if payload == nil || rep.Decode(payload) != nil || rep.Code != protocol.CodeOK {
		return
	}
	if _, err := c.takeIn(s, &rep); err != nil {
		c.cfg.Logger.Warn("cannot use a region", slog.Any("error", err))
	}
	c.pool.wakeAllocator()
}

// returnRegion gives a region back that the client cannot use, in the background. It names the epoch: the same region
// may be given to it anew meanwhile, in the answer to another request, and then stays.
func (c *Client) returnRegion(s *session, given protocol.Region) {
	m := &returnMsg{req: protocol.ReturnAllocRequest{InstanceID: c.cfg.Instance, RegionID: given.RegionID, Epoch: given.Epoch}}
	c.spawn(func() {
		err := c.mutate(c.life, s, protocol.TypeReturnAlloc, m, 0)
		if f, _ := errors.AsType[*Error](err); err != nil && (f == nil || f.Code != protocol.CodeStaleEpoch) {
			c.cfg.Logger.Warn("cannot return a region", slog.Uint64("region_id", given.RegionID), slog.Any("error", err))
		}
	})
}

func keyHash(key []byte) uint64 { return xxh3.Hash(key) | 1 } // 0 means none
