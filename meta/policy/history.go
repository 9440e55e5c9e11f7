package policy

import (
	"encoding/binary"
	"fmt"
)

// history is the latest uses of sampled keys, held or not, in order. Only the
// last use of each key counts; a use that another has followed leaves a hole.
//
// It reaches back over historyUses uses for each entry held, within a limit. Of
// a partition too large for that it samples every second key, every fourth, and
// so on: those with hashes that begin with zero bits.
//
// State, in the pages of larder: use number 256k to 256k+255 are in page
// historyPages+k, 16 bytes each: the key, and the stamp with class and uses. A
// page may also hold uses that are not in the history any more, since others of
// the same keys have followed. Uses are only ever added at the end, so that each
// page is written once, or a few times while it is the last.
type history struct {
	limit  uint64
	ring   []record // use number i is at i modulo its length, a power of two
	at     numbers[uint64]
	first  uint64
	next   uint64
	shift  uint   // one of 1<<shift keys is sampled
	lru    uint64 // uses from this number on are as many keys as LRU would hold
	inLRU  uint64
	hash   uint64
	edited uint64 // uses from this number on have changed since they were written

	writtenFrom uint64 // no page below this one is in the store
}

// record is the last use of a key, of 24 bytes; key 0 is a hole.
type record struct {
	key   uint64
	stamp int64
	class uint8
	uses  uint8
}

const (
	historyUses   = 16
	historyLeast  = 1 << 14 // uses, also where there are few entries
	historyPage   = MaxStatePage / recordBytes
	recordBytes   = 16
	recordBits    = 8       // of class and uses each, below the stamp
	historyPages  = 16      // the first page
	historyModulo = 1 << 30 // the number of pages, of which few are used at a time
	lessonShare   = 8       // each eighth of the history is a lesson
	lessonLeast   = 256
	thinBelow     = 8 // so many uses for each entry are kept before fewer keys are sampled
	maxShift      = 32
)

func newHistory(limit uint64) history { return history{limit: limit} }

// samples reports whether uses of a key are in the history. Hash 0 stands for an
// unknown key, and the highest is no key of the table of numbers.
func (h *history) samples(key uint64) bool {
	return key != 0 && key != ^uint64(0) && key>>(64-h.shift) == 0
}

func (h *history) cell(number uint64) *record { return &h.ring[number&(uint64(len(h.ring))-1)] }

// find returns the last use of a key, nil when it is not known. It is good until
// the history changes.
func (h *history) find(key uint64) *record {
	if number := h.at.find(key); number != nil {
		return h.cell(*number)
	}
	return nil
}

// recent reports whether a use is among those that LRU would still hold.
func (h *history) recent(r *record) bool { return *h.at.find(r.key) >= h.lru }

// span is over how many uses the history reaches, with so many sampled entries.
func (h *history) span(held uint64) uint64 {
	return max(1, min(h.limit, max(historyLeast, historyUses*held)))
}

// crowded reports whether a use has to be forgotten before another.
func (h *history) crowded(held uint64) bool { return h.next-h.first >= h.span(held) }

// lesson is how many uses are worth learning from.
func (h *history) lesson() uint64 { return max(lessonLeast, (h.next-h.first)/lessonShare) }

func recordHash(number uint64, r *record) uint64 {
	return mix64(r.key ^ mix64(number^mix64(r.packed())))
}

func (r *record) packed() uint64 {
	return (uint64(r.stamp)<<recordBits|uint64(r.class))<<recordBits | uint64(r.uses) //nolint:gosec // stamps are positive
}

// clear makes a hole of a use.
func (h *history) clear(number uint64) {
	r := h.cell(number)
	h.hash -= recordHash(number, r)
	h.at.drop(r.key)
	r.key = 0
	if number >= h.lru {
		h.inLRU--
	}
}

// forget drops the oldest use, and returns it if it was the last of its key. It
// is good until the next push.
func (h *history) forget() *record {
	r, number := h.cell(h.first), h.first
	h.first++
	if r.key == 0 {
		return nil
	}
	gone := *r
	h.clear(number)
	*r = gone
	return r
}

// set makes a number the last use of a key that has none.
func (h *history) set(number uint64, r record) {
	*h.cell(number) = r
	*h.at.add(r.key) = number
	h.hash += recordHash(number, &r)
	if number >= h.lru {
		h.inLRU++
	}
}

// push adds a use, with held sampled entries. It reports whether it has dropped
// half of the keys.
func (h *history) push(key uint64, stamp int64, class int, uses uint32, held uint64) (thinned bool) {
	if number := h.at.find(key); number != nil {
		h.clear(*number)
	}
	h.grow()
	h.set(h.next, record{key, stamp, uint8(class), uint8(uses)}) //nolint:gosec // small
	h.next++
	if h.span(held) == h.limit && thinBelow*held > h.limit && h.shift < maxShift {
		h.thin()
		thinned, held = true, held/2
	}
	for ; h.inLRU > max(1, held); h.lru++ {
		if h.lru >= h.first && h.cell(h.lru).key != 0 {
			h.inLRU--
		}
	}
	return thinned
}

// thin drops every second key.
func (h *history) thin() {
	h.shift++
	for i := h.first; i < h.next; i++ {
		if key := h.cell(i).key; key != 0 && !h.samples(key) {
			h.clear(i)
		}
	}
}

// grow makes room for one more use.
func (h *history) grow() {
	if h.next-h.first < uint64(len(h.ring)) {
		return
	}
	old := *h
	h.ring = make([]record, max(historyPage, 2*len(old.ring)))
	for i := h.first; i < h.next; i++ {
		*h.cell(i) = *old.cell(i)
	}
}

// reclass changes the class of the last use of a key, if it is known.
func (h *history) reclass(key uint64, class int) {
	number := h.at.find(key)
	if number == nil {
		return
	}
	r := h.cell(*number)
	h.hash -= recordHash(*number, r)
	r.class = uint8(class) //nolint:gosec // small
	h.hash += recordHash(*number, r)
	h.edited = min(h.edited, *number)
}

// each calls fn with the last use of every key.
func (h *history) each(fn func(r *record)) {
	for i := h.first; i < h.next; i++ {
		if r := h.cell(i); r.key != 0 {
			fn(r)
		}
	}
}

func historyPageOf(k uint64) uint32 { return uint32(k%historyModulo) + historyPages }

func (h *history) flush(all bool, put func(page uint32, data []byte)) {
	from := h.first / historyPage
	for ; h.writtenFrom < from; h.writtenFrom++ {
		put(historyPageOf(h.writtenFrom), nil)
	}
	if !all {
		from = max(from, h.edited/historyPage)
	}
	buf := make([]byte, 0, MaxStatePage)
	for ; from*historyPage < h.next; from++ {
		buf = buf[:0]
		for i := from * historyPage; i < (from+1)*historyPage; i++ {
			r := record{}
			if i >= h.first && i < h.next {
				r = *h.cell(i)
			}
			if r.key == 0 {
				r = record{}
			}
			buf = binary.BigEndian.AppendUint64(buf, r.key)
			buf = binary.BigEndian.AppendUint64(buf, r.packed())
		}
		put(historyPageOf(from), buf)
	}
	h.edited = h.next
}

// restore takes one page back, after the numbers of the header.
func (h *history) restore(page uint32, data []byte) error {
	if len(data) != MaxStatePage {
		return fmt.Errorf("larder: %d bytes of history instead of %d: %w", len(data), MaxStatePage, errPage(page))
	}
	k := h.first / historyPage
	k += (uint64(page-historyPages) + historyModulo - k%historyModulo) % historyModulo
	if k*historyPage >= h.next {
		return fmt.Errorf("larder: uses %d to %d do not reach it: %w", h.first, h.next, errPage(page))
	}
	for j := range uint64(historyPage) {
		key, packed := binary.BigEndian.Uint64(data[recordBytes*j:]), binary.BigEndian.Uint64(data[recordBytes*j+8:])
		number := k*historyPage + j
		if number < h.first || number >= h.next || !h.samples(key) {
			continue // forgotten or thinned out since the page was written
		}
		if at := h.at.find(key); at != nil {
			if *at >= number {
				continue // another use has followed
			}
			h.clear(*at)
		}
		r := record{key, int64(packed >> (2 * recordBits)), uint8(packed >> recordBits), uint8(packed)} //nolint:gosec // parts
		if r.class >= larderClasses || r.uses > auxUses || h.cell(number).key != 0 {
			return fmt.Errorf("larder: use %d is of class %d: %w", number, r.class, errPage(page))
		}
		h.set(number, r)
	}
	return nil
}

// reserve makes an empty history of uses first to next.
func (h *history) reserve(first, next, size uint64) {
	h.first, h.next, h.edited, h.writtenFrom = first, next, next, first/historyPage
	h.ring = make([]record, size)
}
