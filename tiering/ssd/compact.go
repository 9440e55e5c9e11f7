package ssd

import (
	"context"
	"errors"
	"hash/crc32"
	"time"
)

const (
	// compactBuffers hold a group of copies, in buffers that may be twice as long as needed, and what is being read.
	compactBuffers = 2*maxGroupBytes + 4*maxBuffer
	// lowBase and lowShare say below how many free segments compaction copies live data: some more than writes need.
	// It stays below the reserve, so that a full store comes to rest.
	lowBase  = 3
	lowShare = 24
	// leastGain is the part of a segment that must not be live for it to be worth emptying.
	leastGain = 32
)

// victim is a segment to be emptied.
type victim struct {
	slot   int
	state  slotState
	oldest bool // no segment is older: nothing is left that its discards would keep away
}

// compactLoop empties segments until the store closes: when it is kicked, and by its own clock.
func (s *Store) compactLoop() {
	defer s.compacting.Done()
	for {
		for s.failure() == nil && !s.isClosing() && s.compactOne() {
			continue
		}
		if !s.pause(defaultTickMillis*time.Millisecond, s.kick) {
			return
		}
	}
}

func (s *Store) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// pause waits for d or until early; it reports false when the store closes.
func (s *Store) pause(d time.Duration, early <-chan struct{}) bool {
	c, end := s.o.clock.after(d)
	defer end()
	select {
	case <-c:
		return true
	case <-early:
		return true
	case <-s.closing:
		return false
	}
}

// compactOne empties a segment, and reports whether to go on.
func (s *Store) compactOne() bool {
	v, found := s.choose()
	if !found {
		return false
	}
	m := &mover{s: s, v: v, buffers: newPool(compactBuffers), gaps: map[uint64]bool{}}
	if err := m.empty(); err != nil {
		if errors.Is(err, ErrNoSpace) {
			s.giveUp()
		}
		return false
	}
	s.awaitIdle(v.slot)
	err := s.onWriter(context.Background(), func() error { return s.freeSlot(v.slot, v.state.first) })
	s.stats.compactions.Add(1)
	return err == nil
}

// giveUp tells writes that wait for compaction that it finds nothing to gain.
func (s *Store) giveUp() {
	if s.waiting.Load() {
		s.stuck.Store(true)
		signal(s.nudge)
	}
}

// choose picks the segment with the least live bytes, if it is empty or space is short.
func (s *Store) choose() (v victim, found bool) {
	var slots []slotState
	active, free := -1, 0
	_ = s.onWriter(context.Background(), func() error {
		slots, active, free = append(slots, s.w.sb.slots...), s.w.active, len(s.w.free)
		return nil
	})
	s.index.mu.RLock()
	defer s.index.mu.RUnlock()
	best, first := int64(1<<62), uint64(1<<63)
	for i, t := range slots {
		if t.first == 0 {
			continue
		}
		first = min(first, t.first)
		if i != active && s.index.used[i].live < best {
			v, best = victim{slot: i, state: t}, s.index.used[i].live
		}
	}
	v.oldest = v.state.first == first
	segment := int64(s.segBlocks) * block
	switch {
	case best == 0:
		return v, true
	case free >= lowBase+len(slots)/lowShare:
		return v, false
	case best > segment-segment/leastGain:
		s.giveUp()
		return v, false
	}
	return v, true
}

// mover copies what is live of a segment to the log's end, a group at a time.
type mover struct {
	s       *Store
	v       victim
	buffers *pool
	batch   []*request
	answers []chan error
	blocks  uint32
	gaps    map[uint64]bool // starts of stretches whose emptiness has been logged
}

// empty leaves no piece in the segment, and has logged anew what its discards keep away.
func (m *mover) empty() error {
	s := m.s
	got := s.readLog(m.v.slot, m.v.state)
	for _, g := range got.groups {
		for i := range g.records {
			r := &g.records[i]
			var err error
			if r.kind == kindDiscard {
				err = m.discards(r.off, r.off+r.length)
			} else {
				err = m.data(r.off, r.off+r.length, r.pos)
			}
			if err != nil {
				return errors.Join(err, m.flush())
			}
		}
	}
	if got.lost != 0 { // what its missing records discarded is not known: log all that is empty
		if err := m.discards(0, s.o.Size); err != nil {
			return errors.Join(err, m.flush())
		}
	}
	if err := m.flush(); err != nil {
		return err
	}
	s.index.mu.RLock()
	left := s.index.used[m.v.slot].pieces
	s.index.mu.RUnlock()
	if left != 0 { // of records that could not be read any more
		return errors.Join(m.data(0, s.o.Size, 0), m.flush())
	}
	return nil
}

// data copies the segment's pieces in [off, end) whose record lies at block pos, or all, if that is 0.
func (m *mover) data(off, end uint64, pos uint32) error {
	s := m.s
	for off < end {
		if s.isClosing() {
			return ErrClosed
		}
		s.index.mu.RLock()
		p, found := s.index.firstOf(m.v.slot, pos, off, end)
		if found {
			s.segments[m.v.slot].refs.Add(1)
		}
		s.index.mu.RUnlock()
		if !found {
			return nil
		}
		r, err := m.copyOf(&p)
		s.letGo(p.slot)
		if err != nil {
			return err
		}
		if err := m.add(r); err != nil {
			return err
		}
		off = p.end()
	}
	return nil
}

// firstOf finds the first whole piece of a slot, and of the record at pos unless that is 0, that overlaps [off, end).
func (x *index) firstOf(slot int, pos uint32, off, end uint64) (piece, bool) {
	li, ei := x.seek(off)
	for e := x.at(li, ei); e != nil && e.off < end; e = x.at(li, ei) {
		if p := e.unpack(); int(p.slot) == slot && (pos == 0 || p.pos == pos) {
			return p, true
		}
		li, ei = x.next(li, ei)
	}
	return piece{}, false
}

// copyOf makes a record of a piece whose segment is held. One that is damaged is discarded, lest what it replaced
// come back.
func (m *mover) copyOf(p *piece) (*request, error) {
	ctx := context.Background() // the buffers are compaction's alone and suffice
	r := &request{from: m.buffers, move: p}
	var err error
	if p.skip == 0 && p.length == p.raw {
		r.rec = record{off: p.off, length: uint64(p.length), kind: kindData, stored: p.stored, crc: p.crc}
		if p.zstd {
			r.rec.kind = kindZstd
		}
		if r.pooled, err = m.buffers.get(ctx, roundUp(int(p.stored))); err != nil {
			return nil, err
		}
		r.payload = r.pooled
		err = m.s.readStored(p, r.pooled)
	} else {
		err = m.cut(ctx, p, r)
	}
	if errors.Is(err, ErrDamaged) {
		m.s.release(r)
		r.payload, r.rec, err = nil, record{off: p.off, length: uint64(p.length), kind: kindDiscard}, nil
	}
	return r, err
}

// cut makes a record of a part of one. It is not compressed: a start after a crash can then compare it with the part.
func (m *mover) cut(ctx context.Context, p *piece, r *request) (err error) {
	if r.pooled, err = m.buffers.get(ctx, roundUp(int(p.length))); err != nil {
		return err
	}
	r.payload = r.pooled
	clear(r.payload[p.length:])
	if err := m.s.readPiece(ctx, m.buffers, p, r.payload[:p.length]); err != nil {
		return err
	}
	sum := crc32.Checksum(r.payload[:p.length], crcTable)
	r.rec = record{off: p.off, length: uint64(p.length), kind: kindData, stored: p.length, crc: sum}
	return nil
}

// discards logs anew that what is empty in [off, end) is empty, with all around it that is: one record for each
// stretch, however many discards made it.
func (m *mover) discards(off, end uint64) error {
	if m.v.oldest {
		return nil
	}
	x := &m.s.index
	for off < end {
		if m.s.isClosing() {
			return ErrClosed
		}
		x.mu.RLock()
		from, to, empty := x.gap(off, m.s.o.Size)
		if !empty {
			to = x.at(x.seek(off)).end()
		}
		x.mu.RUnlock()
		if empty && !m.gaps[from] {
			m.gaps[from] = true
			if err := m.add(&request{rec: record{off: from, length: to - from, kind: kindDiscard}, tomb: true}); err != nil {
				return err
			}
		}
		off = to
	}
	return nil
}

// add puts r into the batch, and writes that when it is full.
func (m *mover) add(r *request) error {
	if len(m.batch) == maxRecords || m.blocks+r.rec.blocks() > maxGroupBytes/block {
		if err := m.flush(); err != nil {
			m.s.release(r)
			return err
		}
	}
	answer := make(chan error, 1)
	r.results = answer
	m.batch, m.answers, m.blocks = append(m.batch, r), append(m.answers, answer), m.blocks+r.rec.blocks()
	return nil
}

// flush writes the batch, and looks again at what has changed meanwhile.
func (m *mover) flush() error {
	batch, answers, blocks := m.batch, m.answers, m.blocks
	m.batch, m.answers, m.blocks = nil, nil, 0
	for _, r := range batch {
		m.s.moves <- r
	}
	var failed error
	var stale []*request
	for i, c := range answers {
		switch err := <-c; {
		case errors.Is(err, errStale):
			stale = append(stale, batch[i])
		case err != nil && failed == nil:
			failed = err
		case err == nil && batch[i].rec.kind == kindDiscard && !batch[i].tomb: // see copyOf
			m.s.stats.dropped.Add(1)
		}
	}
	if failed != nil {
		return failed
	}
	m.s.stats.compacted.Add(int64(blocks) * block)
	if d := time.Duration(int64(blocks) * block * int64(time.Second) / m.s.o.CompactRate); d > 0 && !m.s.waiting.Load() {
		if !m.s.pause(d, nil) {
			return ErrClosed
		}
	}
	for _, r := range stale {
		var err error
		if r.tomb {
			delete(m.gaps, r.rec.off)
			err = m.discards(r.rec.off, r.rec.off+r.rec.length)
		} else {
			err = m.data(r.rec.off, r.rec.off+r.rec.length, r.move.pos)
		}
		if err != nil {
			return err
		}
	}
	if len(stale) > 0 && len(m.batch) > 0 {
		return m.flush()
	}
	return nil
}
