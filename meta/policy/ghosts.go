package policy

import (
	"encoding/binary"
	"fmt"
)

const (
	// ghostsHardLimit bounds Config.MaxGhosts: 2^26 ghosts take 2.5 GB.
	ghostsHardLimit = 1 << 26
	// ghostPage is the number of ghosts in one page of state.
	ghostPage = MaxStatePage / 8
	// ghostHeader is the length of page 0.
	ghostHeader = 16
	// maxGhostNumber is beyond what a pool can evict in its life.
	maxGhostNumber = 1 << 62
)

// ghosts remembers the key hashes of the latest evictions, oldest forgotten
// first. A hash keeps its number from the order of evictions, so that taking one
// leaves a hole and the others age on (the age rule of S3-FIFO, section 4.2).
//
// State: page 0 holds first and next as big-endian 64-bit numbers. Page 1+k
// holds the hashes number 512k to 512k+511, big-endian, 0 for a hole and for
// what lies outside of first and next.
type ghosts struct {
	ring  []uint64 // hash number i is at i modulo its length, a power of two
	first uint64   // number of the oldest hash
	next  uint64   // number of the next hash
	at    map[uint64]uint64
	hash  uint64 // of the hashes with their numbers, in any order

	dirty          []bool // by page modulo their number: to be written
	flushedFrom    uint64 // no data page below this one was left by earlier writes
	flushedHeaders [2]uint64
}

func newGhosts() ghosts { return ghosts{at: make(map[uint64]uint64)} }

func (g *ghosts) cell(number uint64) *uint64 { return &g.ring[number&(uint64(len(g.ring))-1)] }

func (g *ghosts) touch(number uint64) {
	g.dirty[number/ghostPage&(uint64(len(g.dirty))-1)] = true
}

// set fills an empty cell.
func (g *ghosts) set(number, key uint64) {
	*g.cell(number) = key
	if key != 0 {
		g.at[key] = number
		g.hash += mix64(key ^ mix64(number))
	}
}

// clear empties a cell.
func (g *ghosts) clear(number uint64) {
	c := g.cell(number)
	if *c != 0 {
		delete(g.at, *c)
		g.hash -= mix64(*c ^ mix64(number))
		*c = 0
	}
}

// empty reports whether no key is remembered, as in a pool that was never full.
func (g *ghosts) empty() bool { return len(g.at) == 0 }

// take forgets a key and reports whether it was remembered.
func (g *ghosts) take(key uint64) bool {
	number, ok := g.at[key]
	if !ok {
		return false
	}
	g.clear(number)
	g.touch(number)
	return true
}

// push remembers a key as the newest, and of all at most the newest limit.
// Hash 0 stands for an unknown key and is not remembered.
func (g *ghosts) push(key, limit uint64) {
	for g.first < g.next && g.next-g.first >= limit {
		g.clear(g.first)
		g.first++
	}
	if key == 0 {
		return
	}
	g.take(key)
	g.grow(g.next + 1)
	g.set(g.next, key)
	g.touch(g.next)
	g.next++
}

// grow makes room for the numbers below next, in whole pages: the page of first
// and that of next never share cells.
func (g *ghosts) grow(next uint64) {
	need := (next+ghostPage-1)/ghostPage - g.first/ghostPage
	if need <= uint64(len(g.dirty)) {
		return
	}
	pages := uint64(1)
	for pages < need {
		pages *= 2
	}
	old := *g
	g.ring = make([]uint64, pages*ghostPage)
	g.dirty = make([]bool, pages)
	for i := g.first; i < g.next; i++ {
		*g.cell(i) = *old.cell(i)
		if old.dirty[i/ghostPage&(uint64(len(old.dirty))-1)] {
			g.touch(i)
		}
	}
}

func (g *ghosts) stateHash() uint64 {
	if g.next == 0 {
		return 0
	}
	return mix64(mix64(g.first)+g.next) + g.hash
}

func (g *ghosts) flush(all bool, put func(page uint32, data []byte)) {
	headers := [2]uint64{g.first, g.next}
	if !all && headers == g.flushedHeaders && !g.anyDirty() {
		return
	}
	buf := make([]byte, 0, MaxStatePage)
	buf = binary.BigEndian.AppendUint64(buf, g.first)
	put(0, binary.BigEndian.AppendUint64(buf, g.next))
	g.flushedHeaders = headers
	page := g.first / ghostPage
	for ; g.flushedFrom < page; g.flushedFrom++ {
		put(dataPage(g.flushedFrom), nil)
	}
	for ; page*ghostPage < g.next; page++ {
		dirty := &g.dirty[page&(uint64(len(g.dirty))-1)]
		if !all && !*dirty {
			continue
		}
		*dirty = false
		buf = buf[:0]
		for i := page * ghostPage; i < (page+1)*ghostPage; i++ {
			var key uint64
			if i >= g.first && i < g.next {
				key = *g.cell(i)
			}
			buf = binary.BigEndian.AppendUint64(buf, key)
		}
		put(dataPage(page), buf)
	}
}

// dataPages is how many numbers of state pages there are beside page 0.
const dataPages = 1<<32 - 1

// dataPage is the state page of ghost page k. It wraps around after 2^41
// evictions, when its namesakes are long deleted.
func dataPage(k uint64) uint32 { return uint32(k%dataPages) + 1 }

func (g *ghosts) anyDirty() bool {
	for page := g.first / ghostPage; page*ghostPage < g.next; page++ {
		if g.dirty[page&(uint64(len(g.dirty))-1)] {
			return true
		}
	}
	return false
}

// restore takes one page back; page 0 comes first. Of more ghosts than limit
// (which was higher when they were written) only the newest are kept.
func (g *ghosts) restore(page uint32, data []byte, limit uint64) error {
	if page == 0 {
		return g.restoreHeader(data, limit)
	}
	if len(data) != MaxStatePage {
		return fmt.Errorf("s3fifo: %d bytes of ghosts instead of %d: %w", len(data), MaxStatePage, errPage(page))
	}
	ahead := uint64(page) + dataPages - uint64(dataPage(g.flushedFrom))
	k := g.flushedFrom + ahead%dataPages
	if k*ghostPage >= g.next {
		return fmt.Errorf("s3fifo: ghosts %d to %d do not reach it: %w", g.first, g.next, errPage(page))
	}
	for j := range uint64(ghostPage) {
		key, number := binary.BigEndian.Uint64(data[8*j:]), k*ghostPage+j
		if key == 0 || number < g.first {
			continue // a hole, or forgotten since the page was written
		}
		if _, twice := g.at[key]; twice || number >= g.next || *g.cell(number) != 0 {
			return fmt.Errorf("s3fifo: ghost %d is there twice or out of bounds: %w", number, errPage(page))
		}
		g.set(number, key)
	}
	return nil
}

func (g *ghosts) restoreHeader(data []byte, limit uint64) error {
	if len(data) != ghostHeader {
		return fmt.Errorf("s3fifo: a header of %d bytes instead of %d: %w", len(data), ghostHeader, errPage(0))
	}
	first, next := binary.BigEndian.Uint64(data), binary.BigEndian.Uint64(data[8:])
	if first > next || next-first > ghostsHardLimit || next > maxGhostNumber || g.next != 0 {
		return fmt.Errorf("s3fifo: ghosts from %d to %d, after %d: %w", first, next, g.next, errPage(0))
	}
	g.flushedFrom = first / ghostPage
	g.flushedHeaders = [2]uint64{first, next}
	g.first = max(first, next-min(next, limit))
	g.grow(next)
	g.next = next
	return nil
}
