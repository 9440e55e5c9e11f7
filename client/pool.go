package client

import (
	"slices"
	"sync"
	"time"

	"larder/protocol"
)

// pool is this client's share of the pool: its regions and the state of their pages.
type pool struct {
	clock func() int64
	// discards says that dirty pages are discarded, by somebody who listens to dirt.
	discards bool
	dirt     chan struct{} // 1: pages may be dirty

	mu      sync.Mutex
	regions map[uint64]*region
	list    []*region // in the order they came: stores fill the oldest first
	seconds []*region // those that hold replicas alone
	nfree   int       // free pages of list
	busy    int       // pages taken by Put and PutBatch, which come free or used within the time of a call
	// cleaning are those of busy that are being discarded.
	cleaning int
	resting  []rest
	queue    []*want
	kick     chan struct{}
	// gone are regions that a REVOKE named before the reply that gave them was read: region id to epoch. It is emptied
	// whenever the outcomes of all REQUEST_ALLOCs are known, so it stays small.
	asking int // REQUEST_ALLOCs whose outcomes are not known yet
	gone   map[uint64]uint64
	dying  map[uint64]*region // given up, and perhaps still written to
	sends  map[*sending]struct{}
	// kept is what was said of pages of unknown regions while some are being adopted: it may be theirs.
	adopting int
	kept     []protocol.Page
	// doubtful says that pages may count as used that are free. The answer to a REGISTER that was sent again may be older
	// than the HANDSHAKE before it: an entry that had gone by then was not among the occupied pages, and nothing else will
	// say that it has gone.
	doubtful bool
}

// rest is a run of pages in quarantine until due.
type rest struct {
	due int64
	run run
}

func newPool(clock func() int64, discards bool) *pool {
	return &pool{
		clock: clock, discards: discards, dirt: make(chan struct{}, 1), regions: make(map[uint64]*region), gone: make(map[uint64]uint64),
		dying: make(map[uint64]*region), kick: make(chan struct{}, 1),
		sends: make(map[*sending]struct{}),
	}
}

// wakeAllocator tells the allocator that pages came free, or that somebody waits for some.
func (p *pool) wakeAllocator() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// takeRun takes n consecutive free pages. It costs a few steps for one page.
func (p *pool) takeRun(n int) (run, bool) {
	if p.nfree < n {
		return run{}, false
	}
	return p.takeWhere(p.list, n, nil)
}

// takeWhere takes n consecutive free pages of the first region of a list that will do; any if ok is nil.
func (p *pool) takeWhere(list []*region, n int, ok func(*region) bool) (run, bool) {
	for _, r := range list {
		if r.free.count < n || ok != nil && !ok(r) {
			continue
		}
		page := r.free.run(n)
		if page < 0 {
			continue
		}
		return p.takeAt(r, page, n), true
	}
	return run{}, false
}

// takeAt takes n free pages from one on.
func (p *pool) takeAt(r *region, page, n int) run {
	for i := range n {
		r.free.remove(page + i)
		if r.dirty != nil {
			r.dirty.remove(page + i)
		}
	}
	r.note(page, n)
	if !r.second {
		p.nfree -= n
	}
	return run{r, page, n}
}

// release makes pages free that something may lie in.
func (p *pool) release(t run) {
	if t.n == 0 || t.r.lost != nil {
		return
	}
	p.soil(t)
	p.free(t)
}

// free makes pages free.
func (p *pool) free(t run) {
	if t.r.lost != nil {
		return
	}
	for i := range t.n {
		t.r.free.add(t.page + i)
		t.r.used.remove(t.page + i)
	}
	t.r.keys[t.page] = 0
	t.r.note(t.page, t.n)
	if t.r.second {
		return
	}
	p.nfree += t.n
	if len(p.queue) > 0 {
		p.wakeAllocator()
	}
}

// retire puts pages into quarantine for ms milliseconds, from now.
func (p *pool) retire(t run, ms uint64) {
	if ms == 0 {
		p.release(t)
		return
	}
	if t.r.lost != nil {
		return
	}
	for i := range t.n {
		t.r.used.remove(t.page + i)
	}
	t.r.keys[t.page] = 0
	t.r.note(t.page, t.n)
	p.restUntil(t, p.restEnd(ms))
}

// restEnd is when a quarantine of ms milliseconds that begins now is over.
func (p *pool) restEnd(ms uint64) int64 {
	d := millis(ms)
	return p.clock() + d + margin(d)
}

// restUntil puts pages that hold nothing into quarantine until due.
func (p *pool) restUntil(t run, due int64) {
	r := rest{due, t}
	at, _ := slices.BinarySearchFunc(p.resting, r, func(a, b rest) int { return int(min(max(a.due-b.due, -1), 1)) })
	p.resting = slices.Insert(p.resting, at, r)
	p.wakeDiscarder()
}

// restFree puts all free pages of a region that is about to be added into quarantine for ms milliseconds.
func (p *pool) restFree(r *region, ms uint64) {
	if ms == 0 {
		return
	}
	due := p.restEnd(ms)
	for page := r.free.first(); page >= 0; page = r.free.first() {
		n := r.free.end(page) - page
		for i := range n {
			r.free.remove(page + i)
		}
		p.restUntil(run{r, page, n}, due)
	}
}

// wakeResting releases the pages whose quarantine is over, and returns how long the next one lasts; 0 if there is none.
func (p *pool) wakeResting() time.Duration {
	now := p.clock()
	n := 0
	for n < len(p.resting) && p.resting[n].due <= now {
		p.release(p.resting[n].run)
		n++
	}
	p.resting = slices.Delete(p.resting, 0, n)
	if len(p.resting) == 0 {
		return 0
	}
	return time.Duration(p.resting[0].due - now)
}

// use notes that an entry lies in the run.
func (p *pool) use(t run) {
	if t.r.lost != nil {
		return
	}
	if due, ok := t.r.early[t.page]; ok {
		// The entry is gone, but a reader may have come in between: the page rests as any other would.
		delete(t.r.early, t.page)
		if due <= p.clock() {
			p.release(t)
			return
		}
		t.r.keys[t.page] = 0
		t.r.note(t.page, t.n)
		p.restUntil(t, due)
		return
	}
	for i := range t.n {
		t.r.used.add(t.page + i)
	}
	t.r.note(t.page, t.n)
}

// freed handles the news that an entry is gone: evicted, deleted, or freed by somebody else. A page is freed only if
// it holds that very key: news may come twice, after the page has been used again.
func (p *pool) freed(pg *protocol.Page) {
	r := p.regions[pg.RegionID]
	if r == nil {
		p.keep(pg)
		return
	}
	page, n := r.pagesAt(pg.KVOffset, pg.KVLength)
	unknown := r.adopted && r.keys[page] == 0 && r.used.has(page) // what an earlier session stored there
	if n == 0 || r.free.has(page) || !unknown && (r.keys[page] == 0 || len(pg.Key) > 0 && r.keys[page] != keyHash(pg.Key)) {
		return
	}
	if !r.used.has(page) {
		if len(pg.Key) > 0 {
			// Its REGISTER has worked, and the answer is still on its way or was lost.
			if r.early == nil {
				r.early = make(map[int]int64)
			}
			due := int64(0)
			if pg.FreeAfterMS > 0 {
				due = p.restEnd(pg.FreeAfterMS)
			}
			r.early[page] = due
		}
		return
	}
	p.retire(run{r, page, n}, pg.FreeAfterMS)
}

// maxKept bounds the pages that are kept while regions are adopted. Of more than these only a HANDSHAKE can tell.
const maxKept = 1 << 16

// keep remembers that a page of a region was freed that may be about to be adopted: nobody says so again.
func (p *pool) keep(pg *protocol.Page) {
	switch {
	case p.adopting == 0:
	case len(p.kept) == maxKept:
		p.doubtful = true
	default:
		kept := *pg
		kept.Key = slices.Clone(pg.Key)
		p.kept = append(p.kept, kept)
	}
}

// adopts notes that regions are about to be adopted, or that one who did so has ended.
func (p *pool) adopts(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.adopting += n; p.adopting == 0 {
		p.kept = nil
	}
}

// evicted is freed for the pages that the answer to a REQUEST_ALLOC names. An answer that was long on its way may tell of
// an eviction that a HANDSHAKE has told since, and the page may hold its key again: what has changed since that HANDSHAKE
// keeps its pages, which cost room until the next at worst.
func (p *pool) evicted(pg *protocol.Page) {
	if r := p.regions[pg.RegionID]; r != nil && r.since != nil {
		if page, n := r.pagesAt(pg.KVOffset, pg.KVLength); n > 0 && r.since.has(page) {
			return
		}
	}
	p.freed(pg)
}

// asks notes that a REQUEST_ALLOC is about to be sent.
func (p *pool) asks() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asking++
}

// told notes that what became of a REQUEST_ALLOC is known, and in the books.
func (p *pool) told() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asking--; p.asking == 0 {
		clear(p.gone)
		for _, r := range p.regions {
			r.since = nil
		}
	}
}

// add makes a region's pages available. It replaces nothing: see Client.addRegion.
func (p *pool) add(r *region) {
	p.regions[r.id] = r
	if r.second {
		p.seconds = append(p.seconds, r)
		return
	}
	p.list = append(p.list, r)
	p.nfree += r.free.count
	for i := range p.kept {
		if p.kept[i].RegionID == r.id {
			p.freed(&p.kept[i])
		}
	}
}

// forget takes a region out of the books: none of its pages is given out or freed any more.
func (p *pool) forget(r *region, why error) {
	if r.lost != nil {
		return
	}
	r.lost = why
	delete(p.regions, r.id)
	p.dying[r.id] = r
	is := func(x *region) bool { return x == r }
	if r.second {
		p.seconds = slices.DeleteFunc(p.seconds, is)
	} else {
		p.list = slices.DeleteFunc(p.list, is)
		p.nfree -= r.free.count
	}
	p.resting = slices.DeleteFunc(p.resting, func(q rest) bool { return q.run.r == r })
	p.halt(r)
	p.wakeAllocator()
}

// beginCopy enters a section in which the caller writes to the run's memory. It fails if the region was given up.
func (p *pool) beginCopy(r *region) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.lost != nil {
		return false
	}
	r.copies++
	return true
}

// endCopy leaves it.
func (p *pool) endCopy(r *region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.copies--
	if r.copies > 0 {
		return
	}
	if r.drained != nil {
		close(r.drained)
		r.drained = nil
	}
	p.unmapIfUnused(r)
}

// unmapIfUnused unmaps a region that was given up when its last writer has gone.
func (p *pool) unmapIfUnused(r *region) {
	if r.lost != nil && r.copies == 0 && r.allocs == 0 && r.covered {
		r.unmap()
	}
}

// giveUp makes sure that nothing of this process writes to a region any more, other than what the user stores through
// open Allocs; their memory is replaced by private memory. It returns nil when that is done, or a channel that is
// closed when the last of those Allocs has ended, if it could not be, or when no transfer can land any more.
func (p *pool) giveUp(r *region, why error) (wait <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(r, why)
	for r.copies > 0 {
		if r.drained == nil {
			r.drained = make(chan struct{})
		}
		drained := r.drained
		p.mu.Unlock()
		<-drained
		p.mu.Lock()
	}
	if r.covered || r.mapping == nil && r.access == nil {
		return nil
	}
	if r.far {
		if r.loose == 0 {
			p.harmless(r)
			return nil
		}
		if r.idle == nil {
			r.idle = make(chan struct{})
		}
		return r.idle
	}
	_ = r.mapping.Surrender(r.mem) // a truncated file has no cache lines to surrender
	if r.allocs > 0 {
		if err := r.cover(); err != nil {
			if r.idle == nil {
				r.idle = make(chan struct{})
			}
			return r.idle
		}
	}
	p.harmless(r)
	return nil
}

// harmless notes that nothing can write to a region that was given up any more.
func (p *pool) harmless(r *region) {
	r.covered = true
	if p.dying[r.id] == r {
		delete(p.dying, r.id)
	}
	p.unmapIfUnused(r)
}

// endAlloc notes that an Alloc has ended: its user may not touch the memory any more.
func (p *pool) endAlloc(r *region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.allocs--
	if r.allocs > 0 {
		return
	}
	if r.idle != nil && !r.far {
		close(r.idle)
		r.idle = nil
		p.harmless(r)
		return
	}
	p.unmapIfUnused(r)
}

// retireAll gives up every region. It returns them, and whether nothing can write to any of them any more.
func (p *pool) retireAll(why error) (all []*region, safe bool) {
	p.mu.Lock()
	all = slices.Concat(p.list, p.seconds)
	for _, r := range all {
		p.forget(r, why)
	}
	p.mu.Unlock()
	safe = true
	for _, r := range all {
		safe = p.giveUp(r, why) == nil && safe
	}
	return all, safe
}

// noteChanges begins to record which pages change state, since what a master is about to say of them may be older.
func (p *pool) noteChanges() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doubtful = false
	for _, r := range p.regions {
		r.changed = newBitset(len(r.keys), false)
	}
}

// doubts reports whether only a HANDSHAKE can tell which pages are in use.
func (p *pool) doubts() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.doubtful
}

// reconcile compares the books with what a master says of this client's regions, and returns the regions that are no
// longer owned or are to be given up. Pages that changed while the answer was on its way are left alone.
func (p *pool) reconcile(owned []protocol.OwnedRegion, quarantineMS uint64) (dropped, revoking []*region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	byID := make(map[uint64]*protocol.OwnedRegion, len(owned))
	for i := range owned {
		byID[owned[i].RegionID] = &owned[i]
	}
	for _, r := range slices.Concat(p.list, p.seconds) {
		o := byID[r.id]
		switch {
		case r.changed == nil: // given while the HANDSHAKE was on its way
		case o == nil || o.Epoch != r.epoch:
			p.forget(r, ErrRevoked)
			dropped = append(dropped, r)
		case o.Revoking:
			revoking = append(revoking, r)
		default:
			p.compare(r, o.Occupied, quarantineMS)
		}
		r.changed, r.since = nil, nil
		if p.asking > 0 {
			r.since = newBitset(len(r.keys), false)
		}
	}
	return dropped, revoking
}

// compare brings one region in line with the entries that a master knows there.
func (p *pool) compare(r *region, occupied []uint64, quarantineMS uint64) {
	there := newBitset(len(r.keys), false)
	for i := 0; i+1 < len(occupied); i += 2 {
		page, n := r.pagesAt(occupied[i], occupied[i+1])
		for j := range n {
			there.add(page + j)
		}
	}
	for page := range r.keys {
		if r.changed.has(page) {
			continue
		}
		switch {
		case there.has(page) && r.free.has(page):
			p.takeAt(r, page, 1)
			r.used.add(page)
		case !there.has(page) && r.used.has(page):
			p.retire(run{r, page, 1}, quarantineMS)
		}
	}
}
