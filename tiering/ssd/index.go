package ssd

import (
	"slices"
	"sort"
	"sync"
)

// leafEntries fill a leaf of 4 KiB, with its counter.
const leafEntries = 127

// piece is a part of a record that is live: the bytes [skip, skip+length) of its payload, before compression.
type piece struct {
	off    uint64
	length uint32 // of the piece
	skip   uint32
	raw    uint32 // of the record, before compression
	stored uint32
	crc    uint32
	pos    uint32 // block of the segment
	slot   uint16
	zstd   bool
}

func (p *piece) end() uint64 { return p.off + uint64(p.length) }

// cost is what the piece takes of the disk once compaction has copied it.
func (p *piece) cost() int64 {
	n := int(uint64(p.stored) * uint64(p.length) / uint64(p.raw)) //nolint:gosec // at most 2^20
	return int64(roundUp(max(n, 1))) + recordOverhead
}

// entry is a packed piece: 32 bytes. Lengths up to 2^20 are kept less one.
type entry struct {
	off  uint64
	a, b uint64 // length 20, raw 20, skip 20, zstd 1; slot 12, pos 24, stored 20 bits
	crc  uint32
}

func pack(p *piece) entry {
	e := entry{off: p.off, crc: p.crc}
	e.a = uint64(p.length-1) | uint64(p.raw-1)<<20 | uint64(p.skip)<<40
	if p.zstd {
		e.a |= 1 << 60
	}
	e.b = uint64(p.slot) | uint64(p.pos)<<12 | uint64(p.stored-1)<<36
	return e
}

func (e *entry) unpack() piece {
	const m20 = 1<<20 - 1
	return piece{
		off: e.off, crc: e.crc, zstd: e.a>>60&1 != 0,
		length: uint32(e.a&m20) + 1, raw: uint32(e.a>>20&m20) + 1, skip: uint32(e.a >> 40 & m20),
		slot: uint16(e.b & (maxSlots - 1)), pos: uint32(e.b >> 12 & (1<<24 - 1)), stored: uint32(e.b>>36&m20) + 1,
	}
}

func (e *entry) end() uint64 { return e.off + e.a&(1<<20-1) + 1 }

type leaf struct {
	n int
	e [leafEntries]entry
}

// usage is what an index knows of one segment.
type usage struct {
	live   int64 // cost of its pieces
	pieces int64
}

// index knows which piece holds which logical bytes. Pieces do not overlap. It is a sorted list of leaves: finding is
// two binary searches, a change moves at most a leaf, and now and then the list. Its methods want mu held.
type index struct {
	mu     sync.RWMutex
	firsts []uint64 // offset of the first entry of each leaf
	leaves []*leaf
	used   []usage // by slot
	live   int64
	pieces int64
}

// reset forgets everything.
func (x *index) reset() {
	x.firsts, x.leaves, x.live, x.pieces = nil, nil, 0, 0
	clear(x.used)
}

// bytes is the memory that the index takes.
func (x *index) bytes() int64 {
	return int64(len(x.leaves))*block + int64(cap(x.leaves)+cap(x.firsts))*8 + int64(len(x.used))*16
}

// seek gives the place of the first entry that ends behind off: a leaf, maybe behind the last, and an entry in it.
func (x *index) seek(off uint64) (li, ei int) {
	li = sort.Search(len(x.firsts), func(i int) bool { return x.firsts[i] > off }) - 1
	if li < 0 {
		return 0, 0
	}
	l := x.leaves[li]
	ei = sort.Search(l.n, func(i int) bool { return l.e[i].end() > off })
	if ei == l.n {
		return li + 1, 0
	}
	return li, ei
}

// at gives the entry at a place, nil behind the end.
func (x *index) at(li, ei int) *entry {
	if li >= len(x.leaves) {
		return nil
	}
	return &x.leaves[li].e[ei]
}

// next gives the place behind.
func (x *index) next(li, ei int) (int, int) {
	if ei+1 < x.leaves[li].n {
		return li, ei + 1
	}
	return li + 1, 0
}

// overlapping appends the pieces that have bytes of [off, end) to list, cut to it.
func (x *index) overlapping(list []piece, off, end uint64) []piece {
	li, ei := x.seek(off)
	for e := x.at(li, ei); e != nil && e.off < end; e = x.at(li, ei) {
		list = append(list, clip(e.unpack(), off, end))
		li, ei = x.next(li, ei)
	}
	return list
}

// clip cuts a piece to [off, end).
func clip(p piece, off, end uint64) piece {
	if p.off < off {
		d := uint32(off - p.off) //nolint:gosec // shorter than the piece
		p.off, p.skip, p.length = off, p.skip+d, p.length-d
	}
	if p.end() > end {
		p.length = uint32(end - p.off) //nolint:gosec // as above
	}
	return p
}

// gap gives the whole stretch without pieces around off, within [0, size), or false if off is taken.
func (x *index) gap(off, size uint64) (from, to uint64, empty bool) {
	li, ei := x.seek(off)
	to = size
	if e := x.at(li, ei); e != nil {
		if e.off <= off {
			return 0, 0, false
		}
		to = e.off
	}
	switch {
	case ei > 0:
		from = x.leaves[li].e[ei-1].end()
	case li > 0:
		l := x.leaves[li-1]
		from = l.e[l.n-1].end()
	}
	return from, to, true
}

// replace removes what lies in [off, end) and puts p there unless it is nil.
func (x *index) replace(off, end uint64, p *piece) {
	for {
		li, ei := x.seek(off)
		e := x.at(li, ei)
		if e == nil || e.off >= end {
			break
		}
		old := e.unpack()
		x.remove(li, ei, &old)
		if old.off < off {
			left := clip(old, old.off, off)
			x.insert(&left)
		}
		if old.end() > end {
			right := clip(old, end, old.end())
			x.insert(&right)
		}
	}
	if p != nil {
		x.insert(p)
	}
}

func (x *index) count(p *piece, sign int64) {
	c := sign * p.cost()
	x.live += c
	x.pieces += sign
	x.used[p.slot].live += c
	x.used[p.slot].pieces += sign
}

// insert puts in a piece that overlaps none.
func (x *index) insert(p *piece) {
	x.count(p, 1)
	li := max(0, sort.Search(len(x.firsts), func(i int) bool { return x.firsts[i] > p.off })-1)
	if len(x.leaves) == 0 {
		x.leaves, x.firsts = []*leaf{{}}, []uint64{p.off}
	}
	l := x.leaves[li]
	ei := sort.Search(l.n, func(i int) bool { return l.e[i].off > p.off })
	if l.n == leafEntries {
		li, ei = x.split(li, ei)
		l = x.leaves[li]
	}
	copy(l.e[ei+1:l.n+1], l.e[ei:l.n])
	l.e[ei] = pack(p)
	l.n++
	x.firsts[li] = l.e[0].off
}

// split makes room for an entry at ei of a full leaf, and says where that place is now. One at the end gets a leaf of
// its own: extents that come in order then leave full leaves behind.
func (x *index) split(li, ei int) (int, int) {
	l, right := x.leaves[li], &leaf{}
	cut := leafEntries / 2
	if ei == leafEntries {
		cut = leafEntries
	}
	right.n = copy(right.e[:], l.e[cut:l.n])
	l.n = cut
	x.leaves = slices.Insert(x.leaves, li+1, right)
	x.firsts = slices.Insert(x.firsts, li+1, right.e[0].off) // of an empty leaf, the caller sets it
	if ei >= cut {
		return li + 1, ei - cut
	}
	return li, ei
}

// remove takes out the entry at a place, and merges a leaf that got small with the next.
func (x *index) remove(li, ei int, p *piece) {
	x.count(p, -1)
	l := x.leaves[li]
	copy(l.e[ei:], l.e[ei+1:l.n])
	l.n--
	if l.n == 0 {
		x.leaves, x.firsts = slices.Delete(x.leaves, li, li+1), slices.Delete(x.firsts, li, li+1)
		return
	}
	x.firsts[li] = l.e[0].off
	if li+1 < len(x.leaves) {
		if r := x.leaves[li+1]; l.n+r.n <= leafEntries*3/4 {
			l.n += copy(l.e[l.n:], r.e[:r.n])
			x.leaves, x.firsts = slices.Delete(x.leaves, li+1, li+2), slices.Delete(x.firsts, li+1, li+2)
		}
	}
}
