package policy

import (
	"encoding/binary"
	"fmt"
)

// State of larder: page 0 is the numbers of header, page 1+c what was learned of
// class c, and from page 16 on there is the history. All are big-endian 64-bit
// numbers.

// maxStamp is beyond what a pool can give in its life, and fits a record.
const (
	headerNumbers = 17
	maxStamp      = 1<<56 - 1
)

// header is all that is neither of an entry, nor learned, nor history.
func (p *larder) header() [headerNumbers]uint64 {
	h := &p.past
	return [headerNumbers]uint64{
		uint64(p.now), bit(p.full), p.judged, p.ours, p.lrus, p.deficit, p.yielding, p.patience, p.studied, //nolint:gosec // positive
		h.first, h.next, h.lru, uint64(h.shift), h.lesson, h.swept, bit(h.thinning), p.noise,
	}
}

func bit(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (p *larder) restoreHeader(data []byte) error {
	if len(data) != 8*headerNumbers {
		return fmt.Errorf("larder: a header of %d bytes instead of %d: %w", len(data), 8*headerNumbers, errPage(0))
	}
	var v [headerNumbers]uint64
	for i := range v {
		v[i] = binary.BigEndian.Uint64(data[8*i:])
	}
	now, full, judged, studied := v[0], v[1], v[2], v[8]
	first, next, lru, shift, lesson, swept, thinning := v[9], v[10], v[11], v[12], v[13], v[14], v[15]
	h := &p.past
	switch {
	case h.next != 0, now > maxStamp, full > 1, first > next, next > maxGhostNumber, next-first > max(historyPage, 2*h.limit),
		max(lru, judged, lesson) > next, swept > lesson, swept < min(first, lesson), shift > maxShift, thinning > min(shift, 1),
		max(v[6], v[7]) > patienceMost, v[5] > maxCount, v[16] > noiseMost, studied > 2*larderClasses:
		return fmt.Errorf("larder: uses %d to %d, sampled by %d: %w", first, next, shift, errPage(0))
	}
	p.now, p.full, p.judged, p.studied = int64(now), full == 1, judged, studied
	p.ours, p.lrus, p.deficit, p.yielding, p.patience, p.noise = v[3], v[4], v[5], v[6], v[7], v[16]
	h.reserve(first, next)
	h.lru, h.shift, h.lesson, h.swept, h.thinning = lru, uint(shift), lesson, swept, thinning == 1
	p.flushed = v
	return nil
}

// RestoreState takes one page back.
func (p *larder) RestoreState(page uint32, data []byte) error {
	switch {
	case page == 0:
		return p.restoreHeader(data)
	case page >= historyPages:
		return p.past.restore(page, data)
	case page > larderClasses:
		return errPage(page)
	case len(data) != 8*4*ages:
		return fmt.Errorf("larder: %d bytes of a class instead of %d: %w", len(data), 8*4*ages, errPage(page))
	}
	return p.model.restore(int(page)-1, data)
}

// restore takes back what was learned of a class.
func (m *model) restore(class int, data []byte) error {
	l := &m.classes[class]
	for kind, cells := range l.cells() {
		for i := range cells {
			v := binary.BigEndian.Uint64(data[8*(kind*ages+i):])
			if kind < 3 && v > maxCount || kind == 1 && v < l.returns[i] {
				return fmt.Errorf("larder: %d of class %d at step %d: %w", v, class, i, errPage(uint32(class)+1)) //nolint:gosec // small
			}
			m.set(class, kind, i, &cells[i], v)
		}
	}
	m.dirty &^= 1 << class
	return nil
}

// FlushState hands out the pages that changed, or all. Before the first use
// there are none.
func (p *larder) FlushState(all bool, put func(page uint32, data []byte)) {
	header := p.header()
	if !all && header == p.flushed && p.model.dirty == 0 && p.past.edited == p.past.next {
		return
	}
	p.flushed = header
	buf := make([]byte, 0, MaxStatePage)
	for _, v := range header {
		buf = binary.BigEndian.AppendUint64(buf, v)
	}
	put(0, buf)
	for c := range p.model.classes {
		if !all && p.model.dirty>>c&1 == 0 {
			continue
		}
		buf = buf[:0]
		for _, cells := range p.model.classes[c].cells() {
			for _, v := range cells {
				buf = binary.BigEndian.AppendUint64(buf, v)
			}
		}
		put(uint32(c)+1, buf)
	}
	p.model.dirty = 0
	p.past.flush(all, put)
}

// StateHash is that of all pages; 0 before the first use.
func (p *larder) StateHash() uint64 {
	if p.now == 0 {
		return 0
	}
	h := uint64(0)
	for _, v := range p.header() {
		h = mix64(h ^ v)
	}
	return h + p.model.hash + p.past.hash
}
