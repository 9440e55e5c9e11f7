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
// A lesson goes over all of it, a few uses at a time (see sweep). That also drops
// the keys that are not sampled any more: until it has passed they lie where
// nobody looks for them.
//
// State, in the pages of larder: use number 256k to 256k+255 are in page
// historyPages+k, 16 bytes each, as in memory. A page may also hold uses that are
// not in the history any more, since others of the same keys have followed. Uses
// are only ever added at the end, so that each page is written once, or a few
// times while it is the last.
type history struct {
	limit  uint64
	pages  []*recordPage // page k is at k modulo their number, a power of two
	spare  *recordPage   // one that was let go of, for the next
	at     places
	first  uint64
	next   uint64
	shift  uint   // one of 1<<shift keys is sampled
	lru    uint64 // uses from this number on are as many keys as LRU would hold
	inLRU  uint64
	hash   uint64
	edited uint64 // uses from this number on have changed since they were written

	lesson   uint64 // uses below this number belong to the lesson under way, or the last
	swept    uint64 // of those, the ones below this number have been looked at
	thinning bool   // shift has grown, and the sweep drops what is not sampled any more

	writtenFrom uint64 // no page below this one is in the store
}

// record is the last use of a key; key 0 is a hole. Below the stamp, packed has
// four bits each of the class and of the number of uses.
type record struct{ key, packed uint64 }

type recordPage [historyPage]record

const (
	historyUses   = 16
	historyLeast  = 1 << 11 // uses, also where there are few entries
	historyPage   = MaxStatePage / recordBytes
	recordBytes   = 16
	recordBits    = 4 // of class and uses each, below the stamp
	recordMask    = 1<<recordBits - 1
	historyPages  = 16      // the first page
	historyModulo = 1 << 30 // the number of pages, of which few are used at a time
	lessonShare   = 8       // each eighth of the history is a lesson
	lessonLeast   = 256
	thinBelow     = 8 // so many uses for each entry are kept before fewer keys are sampled
	maxShift      = 32

	// What one use may cost: each step is a line or two of memory. A sweep is done
	// within a quarter of the uses between two lessons. What the others lag behind by
	// after the number of entries has changed at once, they make up for soon.
	sweepStep  = 32
	forgetStep = 4
	lruStep    = 8
)

func newHistory(limit uint64) history { return history{limit: limit, at: newPlaces()} }

func packRecord(stamp int64, class int, uses uint32) uint64 {
	return (uint64(stamp)<<recordBits|uint64(class))<<recordBits | uint64(uses) //nolint:gosec // stamps are positive
}

func (r *record) stamp() int64 { return int64(r.packed >> (2 * recordBits)) }
func (r *record) class() int   { return int(r.packed >> recordBits & recordMask) }
func (r *record) uses() uint32 { return uint32(r.packed & recordMask) }

func (r *record) hash(number uint64) uint64 { return mix64(r.key ^ mix64(number^mix64(r.packed))) }

// samples reports whether uses of a key are in the history. Hash 0 stands for an
// unknown key.
func (h *history) samples(key uint64) bool { return key != 0 && key>>(64-h.shift) == 0 }

// holds reports whether a use of a key at a number may be in the history: where
// the sweep has not been, more keys may.
func (h *history) holds(number, key uint64) bool {
	shift := h.shift
	if h.thinning && number >= h.swept && number < h.lesson {
		shift--
	}
	return key != 0 && key>>(64-shift) == 0
}

// cell is the place of a use, of which the lowest numberBits of the number suffice.
func (h *history) cell(number uint64) *record {
	return &h.pages[number/historyPage&(uint64(len(h.pages))-1)][number%historyPage]
}

// find returns the number of the last use of a sampled key.
func (h *history) find(key uint64) (number uint64, found bool) {
	place := h.place(key)
	if place == nil {
		return 0, false
	}
	return h.next - (h.next-*place)&numberMask, true
}

// place is where the index has a key.
func (h *history) place(key uint64) *uint64 {
	tag := tagOf(key)
	b := h.at.bucket(tag)
	mask := uint64(len(b.cells)) - 1
	for i := tag & mask; b.cells[i] != 0; i = (i + 1) & mask {
		if c := b.cells[i]; c>>numberBits == tag && h.cell(c&numberMask).key == key {
			return &b.cells[i]
		}
	}
	return nil
}

// span is over how many uses the history reaches, with so many sampled entries.
func (h *history) span(held uint64) uint64 {
	return max(1, min(h.limit, max(historyLeast, historyUses*held)))
}

// clear makes a hole of a use that the index knows nothing of any more.
func (h *history) clear(number uint64) {
	r := h.cell(number)
	h.hash -= r.hash(number)
	r.key = 0
	if number >= h.lru {
		h.inLRU--
	}
}

// set makes a number the last use of a key.
func (h *history) set(number uint64, r record) {
	*h.cell(number) = r
	h.hash += r.hash(number)
	if number >= h.lru {
		h.inLRU++
	}
}

// drop takes a key out whose last use has a number.
func (h *history) drop(number uint64) {
	key := h.cell(number).key
	h.at.drop(tagOf(key), number)
	h.clear(number)
}

// forget drops the oldest use, and returns it if it was the last of a sampled
// key.
func (h *history) forget() (gone record, last bool) {
	if gone = *h.cell(h.first); gone.key != 0 {
		h.drop(h.first)
	}
	if h.first++; h.first%historyPage == 0 {
		page := &h.pages[(h.first/historyPage-1)&(uint64(len(h.pages))-1)]
		h.spare, *page = *page, nil
	}
	h.swept = max(h.swept, min(h.first, h.lesson))
	return gone, h.samples(gone.key)
}

// push adds a use.
func (h *history) push(key, packed uint64) {
	h.grow()
	if place := h.place(key); place != nil {
		h.clear(h.next - (h.next-*place)&numberMask)
		*place = tagOf(key)<<numberBits | h.next&numberMask
	} else {
		h.at.add(tagOf(key), h.next)
	}
	h.set(h.next, record{key, packed})
	h.next++
}

// follow moves the mark of LRU towards held keys. While keys are being thinned
// out it waits, as they are not all counted alike.
func (h *history) follow(held uint64) {
	if h.thinning {
		return
	}
	for k := 0; k < lruStep && h.inLRU > max(1, held); k++ {
		if h.lru >= h.first && h.cell(h.lru).key != 0 {
			h.inLRU--
		}
		h.lru++
	}
}

// grow makes room for one more use.
func (h *history) grow() {
	k := h.next / historyPage
	if h.next%historyPage != 0 && h.next > h.first {
		return
	}
	if k-h.first/historyPage >= uint64(len(h.pages)) {
		h.spread(max(1, 2*uint64(len(h.pages))))
	}
	page := &h.pages[k&(uint64(len(h.pages))-1)]
	if *page != nil {
		return
	}
	if h.spare == nil {
		h.spare = new(recordPage)
	}
	*page, h.spare = h.spare, nil
}

// spread makes room for n pages, a power of two.
func (h *history) spread(n uint64) {
	old := h.pages
	h.pages = make([]*recordPage, n)
	for k := h.first / historyPage; len(old) > 0 && k*historyPage < h.next; k++ {
		h.pages[k&(n-1)] = old[k&(uint64(len(old))-1)]
	}
}

// reclass changes the class of the last use of a key, if it is known.
func (h *history) reclass(key uint64, class int) {
	if !h.samples(key) {
		return
	}
	number, found := h.find(key)
	if !found {
		return
	}
	r := h.cell(number)
	h.hash -= r.hash(number)
	r.packed = packRecord(r.stamp(), class, r.uses())
	h.hash += r.hash(number)
	h.edited = min(h.edited, number)
}

// due reports whether there is enough new for a lesson.
func (h *history) due() bool {
	return h.swept == h.lesson && h.next-h.lesson >= max(lessonLeast, (h.next-h.first)/lessonShare)
}

// begin starts a sweep over all that is in the history, and reports whether from
// now on half of the keys are sampled, as there are too many entries, held of
// them sampled.
func (h *history) begin(held uint64) (thinning bool) {
	h.lesson, h.swept = h.next, h.first
	h.thinning = h.span(held) == h.limit && thinBelow*held > h.limit && h.shift < maxShift
	if h.thinning {
		h.shift++
	}
	return h.thinning
}

// sweep goes on with the lesson under way, calls fn with the last uses of keys,
// and reports whether that was all.
func (h *history) sweep(fn func(r *record)) (done bool) {
	for end := min(h.lesson, h.swept+sweepStep); h.swept < end; h.swept++ {
		r := h.cell(h.swept)
		switch {
		case r.key == 0:
		case h.samples(r.key):
			fn(r)
		default:
			h.drop(h.swept)
		}
	}
	done = h.swept == h.lesson
	h.thinning = h.thinning && !done
	return done
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
			if i >= h.first && i < h.next && h.cell(i).key != 0 {
				r = *h.cell(i)
			}
			buf = binary.BigEndian.AppendUint64(buf, r.key)
			buf = binary.BigEndian.AppendUint64(buf, r.packed)
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
		r := record{binary.BigEndian.Uint64(data[recordBytes*j:]), binary.BigEndian.Uint64(data[recordBytes*j+8:])}
		number := k*historyPage + j
		if number < h.first || number >= h.next || !h.holds(number, r.key) {
			continue // forgotten or thinned out since the page was written
		}
		if at, found := h.find(r.key); found {
			if at >= number {
				continue // another use has followed
			}
			h.drop(at)
		}
		if r.class() >= larderClasses || h.cell(number).key != 0 {
			return fmt.Errorf("larder: use %d is of class %d: %w", number, r.class(), errPage(page))
		}
		h.at.add(tagOf(r.key), number)
		h.set(number, r)
	}
	return nil
}

// reserve makes an empty history of uses first to next.
func (h *history) reserve(first, next uint64) {
	h.first, h.next, h.edited, h.writtenFrom = first, next, next, first/historyPage
	if first == next {
		return
	}
	n := uint64(1)
	for n < (next-1)/historyPage-first/historyPage+1 {
		n *= 2
	}
	h.pages = make([]*recordPage, n)
	for k := first / historyPage; k*historyPage < next; k++ {
		h.pages[k&(n-1)] = new(recordPage)
	}
}
