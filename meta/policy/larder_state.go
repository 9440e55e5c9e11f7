package policy

import (
	"encoding/binary"
	"fmt"
)

// State of larder: page 0 is the numbers of header, page 1+c what was learned of
// class c, and from page 16 on there is the history. All are big-endian 64-bit
// numbers.

const headerNumbers = 14

// header is all that is neither of an entry, nor learned, nor history.
func (p *larder) header() [headerNumbers]uint64 {
	full := uint64(0)
	if p.full {
		full = 1
	}
	return [headerNumbers]uint64{
		uint64(p.now), full, p.learned, p.judged, p.ours, p.lrus, p.deficit, p.yielding, p.patience, //nolint:gosec // positive
		p.past.first, p.past.next, p.past.lru, uint64(p.past.shift), uint64(len(p.past.ring)),
	}
}

func (p *larder) restoreHeader(data []byte) error {
	if len(data) != 8*headerNumbers {
		return fmt.Errorf("larder: a header of %d bytes instead of %d: %w", len(data), 8*headerNumbers, errPage(0))
	}
	var v [headerNumbers]uint64
	for i := range v {
		v[i] = binary.BigEndian.Uint64(data[8*i:])
	}
	now, full, learned, judged := v[0], v[1], v[2], v[3]
	first, next, lru, shift, size := v[9], v[10], v[11], v[12], v[13]
	switch {
	case p.past.next != 0, now > 1<<62, full > 1, first > next, next-first > ghostsHardLimit, next > maxGhostNumber,
		max(lru, learned, judged) > next, shift > maxShift, size&(size-1) != 0, size < next-first,
		size > max(historyPage, 2*p.past.limit), v[7] > patienceMost, v[8] > patienceMost:
		return fmt.Errorf("larder: uses %d to %d, sampled by %d: %w", first, next, shift, errPage(0))
	}
	p.now, p.full, p.learned, p.judged = int64(now), full == 1, learned, judged
	p.ours, p.lrus, p.deficit, p.yielding, p.patience = v[4], v[5], v[6], v[7], v[8]
	p.past.reserve(first, next, size)
	p.past.lru, p.past.shift = lru, uint(shift)
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
	case len(data) != 8*3*ages:
		return fmt.Errorf("larder: %d bytes of a class instead of %d: %w", len(data), 8*3*ages, errPage(page))
	}
	return p.model.restore(int(page)-1, data)
}

func (m *model) restore(class int, data []byte) error {
	l := &m.classes[class]
	for i, cells := range l.cells() {
		for j := range cells {
			cells[j] = binary.BigEndian.Uint64(data[8*(i*ages+j):])
			if i < 2 && cells[j] > maxCount || i == 1 && cells[j] < l.returns[j] {
				return fmt.Errorf("larder: %d of class %d at step %d: %w", cells[j], class, j, errPage(uint32(class)+1)) //nolint:gosec // small
			}
			m.hash += cellHash(class, i*ages+j, cells[j])
		}
	}
	return nil
}

// cells are the numbers of a class, in the order in which they are written.
func (l *lessons) cells() [3]*[ages]uint64 { return [3]*[ages]uint64{&l.returns, &l.ends, &l.rates} }

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
