package server

import (
	"sync"

	"larder/meta"
	"larder/protocol"
)

// slotChunk is how many slots' leases are allocated at a time: 96 KiB, so that a pool of which only a part is read
// pays for that part only.
const slotChunk = 4096

// maxHolders is how many holders of one entry's lease can end it early. More of them share a name, by which they can only
// prolong it.
const maxHolders = 63

// slotLease is what the leader knows of one entry beside the index: 24 bytes, no pointers.
type slotLease struct {
	until int64  // CLOCK_BOOTTIME in ns until which bytes stay put, if anyone holds it
	held  uint64 // bit per holder that has not released
	era   uint32 // upper 26 bits: era of the lease; lower 6: holders so far
	touch uint32 // see touchTable
}

const (
	eraShift   = 6
	holderMask = 1<<eraShift - 1
)

// regionLease sums up the leases and evictions within one region.
type regionLease struct {
	until     int64 // no lease or quarantine in it lasts longer
	condemned int   // plans that take the region as a whole
}

// pageKey names a page run.
type pageKey struct {
	region meta.RegionID
	offset uint64
}

// leases is the leader's volatile table: who may be reading what, which entries are about to go, and which were just
// used. A new leader starts with an empty one and a grace, in which nothing is evicted.
//
// A lease is named by slot, era and holder. An era begins when somebody reads an entry that nobody holds, and is
// never used twice for a slot within 2^26 eras of the whole table, so that a late or repeated release ends nobody
// else's lease.
type leases struct {
	mu      sync.Mutex
	chunks  []*[slotChunk]slotLease
	regions map[meta.RegionID]*regionLease
	lastID  meta.RegionID // the region looked up last: readers of a prefix stay in one
	last    *regionLease
	era     uint32
	// quarantine holds pages that were freed while somebody held a lease on them, until when.
	quarantine map[pageKey]int64
	// parted has, by slot, the holders of leases on entries of which a location went meanwhile, a bit each: they may be
	// reading that, so that their leases end when they would have, and the page rests no longer.
	parted map[meta.Slot]uint64
	grace  int64 // nothing is evicted before
	// maruGrace is the same for regions with keys of Maru's, whose clients' leases may be longer. Set under Master.mu.
	maruGrace int64
	touches   touchTable

	condemned int // slots and regions, for a quick no

	// undo is what was registered for clients of Maru's when they had given up on it, and is not told until it is gone.
	undo    map[string]meta.MaruEntry
	undoing bool // a command does it
}

// reset forgets everything, at the beginning of a term. era is random, so that the tokens of an earlier term of this
// process mean nothing.
func (l *leases) reset(era uint32, grace int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.chunks = nil
	l.regions = map[meta.RegionID]*regionLease{}
	l.quarantine = map[pageKey]int64{}
	l.parted = map[meta.Slot]uint64{}
	l.last, l.lastID = nil, 0
	l.era = era
	l.grace = grace
	l.condemned = 0
	l.undo, l.undoing = nil, false
	l.touches.reset()
}

// at returns the record of a slot, making it if need be.
func (l *leases) at(s meta.Slot) *slotLease {
	i := int(s / slotChunk)
	if i >= len(l.chunks) || l.chunks[i] == nil {
		for i >= len(l.chunks) {
			l.chunks = append(l.chunks, nil)
		}
		l.chunks[i] = new([slotChunk]slotLease)
	}
	return &l.chunks[i][s%slotChunk]
}

// peek returns the record of a slot, or nil if there is none.
func (l *leases) peek(s meta.Slot) *slotLease {
	i := int(s / slotChunk)
	if i >= len(l.chunks) || l.chunks[i] == nil {
		return nil
	}
	return &l.chunks[i][s%slotChunk]
}

// region returns the record of a region, making it if need be.
func (l *leases) region(r meta.RegionID) *regionLease {
	if l.last != nil && l.lastID == r {
		return l.last
	}
	x := l.regions[r]
	if x == nil {
		x = &regionLease{}
		l.regions[r] = x
	}
	l.last, l.lastID = x, r
	return x
}

// blocked reports whether an entry, or the region it lies in, is about to go, so that no lease may be granted.
func (l *leases) blocked(s meta.Slot, r meta.RegionID) bool {
	if l.condemned == 0 {
		return false
	}
	if x := l.peek(s); x != nil && x.touch&slotCondemned != 0 {
		return true
	}
	x := l.regions[r]
	return x != nil && x.condemned > 0
}

// grant leases an entry until a time, and returns the lease's name. The caller has seen that it is not blocked.
func (l *leases) grant(s meta.Slot, r meta.RegionID, now, until int64) uint64 {
	x := l.at(s)
	if x.until <= now || x.held == 0 {
		l.era++
		x.era = l.era << eraShift
		x.held = 0
		if len(l.parted) > 0 {
			delete(l.parted, s)
		}
		x.until = until
	} else if until > x.until {
		x.until = until
	}
	if g := l.region(r); until > g.until {
		g.until = until
	}
	holder := x.era & holderMask
	x.held |= 1 << holder
	if holder < maxHolders {
		x.era++
	}
	return uint64(x.era&^holderMask|holder)<<32 | uint64(s)
}

// grantCopies extends a lease to the other locations of the entry, and returns those that it holds for: not those whose
// regions are about to go.
func (l *leases) grantCopies(copies []protocol.Location, until int64) []protocol.Location {
	kept := copies[:0]
	for i := range copies {
		id := meta.RegionID(copies[i].RegionID)
		if x := l.regions[id]; x == nil || x.condemned == 0 {
			l.note(id, until)
			kept = append(kept, copies[i])
		}
	}
	return kept
}

// note has nothing of a region given to anybody else before until.
func (l *leases) note(r meta.RegionID, until int64) {
	g := l.region(r)
	g.until = max(g.until, until)
}

// lookup finds the record and the bit of a lease that is still held.
func (l *leases) lookup(lease uint64) (*slotLease, uint64) {
	s := meta.Slot(lease & 0xffffffff)
	era := uint32(lease >> 32)
	x := l.peek(s)
	if x == nil || x.era>>eraShift != era>>eraShift {
		return nil, 0
	}
	bit := uint64(1) << (era & holderMask)
	if x.held&bit == 0 {
		return nil, 0
	}
	return x, bit
}

// release ends a lease early, and reports whether it was held. What has been released or renamed before is ignored, and
// so is a name that others may have too.
func (l *leases) release(lease uint64, now int64) bool {
	x, bit := l.lookup(lease)
	if x == nil || bit == 1<<maxHolders {
		return false
	}
	x.held &^= bit
	held := x.until > now
	if x.held == 0 {
		x.until = 0
	}
	return held
}

// renew prolongs a lease that is still held, and reports whether it was.
func (l *leases) renew(lease uint64, r meta.RegionID, now, until int64) bool {
	x, bit := l.lookup(lease)
	if x == nil || x.until <= now || len(l.parted) > 0 && l.parted[meta.Slot(lease&0xffffffff)]&bit != 0 {
		return false
	}
	x.until = max(x.until, until)
	l.note(r, until)
	return true
}

// freed takes note that a page run is free whose entry lives on elsewhere, or of which more is yet to be told: what is left
// of a lease goes into the quarantine.
func (l *leases) freed(p *meta.Page, now int64) {
	if x := l.peek(p.Slot); x != nil && x.held != 0 && x.until > now {
		l.quarantine[pageKey{p.Region, p.Offset}] = x.until
	}
}

// part takes note that one of an entry's locations has gone, which the holders of leases on it may be reading.
func (l *leases) part(s meta.Slot, now int64) {
	if x := l.peek(s); x != nil && x.held != 0 && x.until > now {
		l.parted[s] |= x.held
	}
}

// gone is freed for the last page run of an entry that has left: the slot is ready for its next entry.
func (l *leases) gone(p *meta.Page, now int64) {
	x := l.peek(p.Slot)
	if x == nil {
		return
	}
	l.freed(p, now)
	l.dropTouch(x)
	if x.touch&slotCondemned != 0 {
		l.condemned--
	}
	*x = slotLease{}
	delete(l.parted, p.Slot)
}

// dropped takes note that an entry has left together with its region, or in one that nobody writes to: the leases on it
// end by themselves, for which the region as a whole waits. They must not be taken for leases on the slot's next entry.
func (l *leases) dropped(s meta.Slot) {
	x := l.peek(s)
	if x == nil {
		return
	}
	l.dropTouch(x)
	if x.touch&slotCondemned != 0 {
		l.condemned--
	}
	*x = slotLease{}
	delete(l.parted, s)
}

// freeAfter returns for how many milliseconds a page that is being freed must not be reused.
func (l *leases) freeAfter(r meta.RegionID, offset uint64, now int64) uint64 {
	until := l.grace
	if len(l.quarantine) > 0 {
		until = max(until, l.quarantine[pageKey{r, offset}])
	}
	return msUp(until - now)
}

// condemn marks an entry as about to be evicted.
func (l *leases) condemn(s meta.Slot) {
	x := l.at(s)
	if x.touch&slotCondemned == 0 {
		x.touch |= slotCondemned
		l.condemned++
	}
}

// spare undoes condemn, if the entry is still there.
func (l *leases) spare(s meta.Slot) {
	if x := l.peek(s); x != nil && x.touch&slotCondemned != 0 {
		x.touch &^= slotCondemned
		l.condemned--
	}
}

// condemnRegion marks a region as about to be given away or emptied.
func (l *leases) condemnRegion(r meta.RegionID) {
	l.region(r).condemned++
	l.condemned++
}

// spareRegion undoes condemnRegion.
func (l *leases) spareRegion(r meta.RegionID) {
	l.region(r).condemned--
	l.condemned--
}

// sweepExpired forgets what has run out: quarantined pages, regions, and chunks of slots in which nothing is held.
func (l *leases) sweepExpired(now int64) {
	for k, until := range l.quarantine {
		if until <= now {
			delete(l.quarantine, k)
		}
	}
	for s := range l.parted {
		if x := l.peek(s); x == nil || x.held == 0 || x.until <= now {
			delete(l.parted, s)
		}
	}
	for id, r := range l.regions {
		if r.until <= now && r.condemned == 0 {
			delete(l.regions, id)
			if l.lastID == id {
				l.last, l.lastID = nil, 0
			}
		}
	}
}

// trim gives up one chunk of slots, the one at cursor, if nothing in it is held, condemned or waiting to be logged. It
// returns the next cursor.
func (l *leases) trim(cursor int, now int64) int {
	if cursor >= len(l.chunks) {
		return 0
	}
	c := l.chunks[cursor]
	if c == nil {
		return cursor + 1
	}
	for i := range c {
		if c[i].touch != 0 || c[i].held != 0 && c[i].until > now {
			return cursor + 1
		}
	}
	l.chunks[cursor] = nil
	return cursor + 1
}

// msUp converts nanoseconds to milliseconds, rounded up, at least 0.
func msUp(ns int64) uint64 {
	if ns <= 0 {
		return 0
	}
	return uint64(ns+999_999) / 1_000_000
}

// guard is the table as meta.PlanAlloc sees it. The caller holds the table's lock.
type guard struct {
	l     *leases
	now   int64
	grace bool // of a new leader: anything may be leased
	// soonest is when the first lease ends of those that were in the way; 0 = none was.
	soonest int64
	// ready is MasterConfig.DeviceReady.
	ready func(d meta.DeviceID, node string, generation uint64) bool
	// lasting reports whether clients of Maru's may be reading in a region by what an earlier leader has told them.
	lasting func(r meta.RegionID) bool
}

// DeviceReady implements meta.Guard.
func (g *guard) DeviceReady(d meta.DeviceID, node string, generation uint64) bool {
	return g.ready == nil || g.ready(d, node, generation)
}

// Leased implements meta.Guard.
func (g *guard) Leased(s meta.Slot) bool {
	if g.grace {
		g.note(g.l.grace)
		return true
	}
	x := g.l.peek(s)
	if x == nil {
		return false
	}
	if x.touch&slotCondemned != 0 {
		return true
	}
	if x.held == 0 || x.until <= g.now {
		return false
	}
	g.note(x.until)
	return true
}

// Touched implements meta.Guard.
func (g *guard) Touched(s meta.Slot) bool {
	x := g.l.peek(s)
	return x != nil && x.touch&^slotCondemned != 0
}

// RegionBusy implements meta.Guard.
func (g *guard) RegionBusy(r meta.RegionID) bool {
	if g.grace {
		g.note(g.l.grace)
		return true
	}
	if g.now < g.l.maruGrace && g.lasting != nil && g.lasting(r) {
		g.note(g.l.maruGrace)
		return true
	}
	x := g.l.regions[r]
	if x == nil {
		return false
	}
	if x.condemned > 0 {
		return true
	}
	if x.until <= g.now {
		return false
	}
	g.note(x.until)
	return true
}

func (g *guard) note(until int64) {
	if g.soonest == 0 || until < g.soonest {
		g.soonest = until
	}
}
