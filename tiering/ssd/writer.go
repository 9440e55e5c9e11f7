package ssd

import "errors"

// errStale means that what compaction was to copy has changed meanwhile.
var errStale = errors.New("ssd: changed meanwhile")

// class is a kind of request. Those of a group are all compaction's, or none is; discards come before writes.
type class int

const (
	classMove class = iota
	classDiscard
	classWrite
	classCount
)

// request is one record on its way to the log.
type request struct {
	rec     record
	payload []byte // whole blocks
	pooled  []byte // goes back to from
	from    *pool
	cost    int64 // reserved
	results chan<- error

	move *piece // of compaction: holds only while this piece is as it was
	tomb bool   // of compaction: holds only while the range is empty
}

// piece is what the index is to hold once the record lies in slot.
func (r *request) piece(slot int) piece {
	n := uint32(r.rec.length) //nolint:gosec // only of data, which is short
	return piece{
		off: r.rec.off, length: n, raw: n, stored: r.rec.stored, crc: r.rec.crc, pos: r.rec.pos,
		slot: uint16(slot), zstd: r.rec.kind == kindZstd, //nolint:gosec // below maxSlots
	}
}

// writer is the state of the one goroutine that writes: the log's end, and the superblock.
type writer struct {
	sb      superblock
	active  int    // slot of the segment that is written to, -1: none
	pos     uint32 // its next free block
	seq     uint64 // of the next group
	records []record
	free    []int
	dirty   bool // something was written since the last flush
	closing bool // has been seen

	header []byte
	held   [classCount]*request // taken from the queue, and for the next group
	batch  []*request
	blocks uint32 // of batch's payloads
	moved  bool   // the batch is compaction's; it shares no group with others, which alternate with it
}

// run writes group after group until stop.
func (s *Store) run() {
	defer s.done.Done()
	for {
		s.fill()
		if len(s.w.batch) == 0 {
			if !s.wait() {
				return
			}
			continue
		}
		if err := s.failure(); err != nil {
			s.finish(s.w.batch, err)
			continue
		}
		s.commit()
	}
}

// open reports whether requests of a class are taken: the last free segments are compaction's.
func (s *Store) open(c class) bool {
	switch c {
	case classWrite:
		return len(s.w.free) >= writeThreshold
	case classDiscard:
		return len(s.w.free) >= discardThreshold
	default:
		return true
	}
}

func (s *Store) source(c class) chan *request {
	return [classCount]chan *request{s.moves, s.discards, s.writes}[c]
}

// fill takes what is queued into a batch, as far as it goes into one group.
func (s *Store) fill() {
	w := &s.w
	w.batch, w.blocks = w.batch[:0], 0
	order := []class{classMove, classDiscard, classWrite}
	if w.moved {
		order = []class{classDiscard, classWrite, classMove}
	}
	for _, c := range order {
		if len(w.batch) > 0 && (c == classMove || w.moved) {
			return
		}
		for s.open(c) {
			r := w.held[c]
			w.held[c] = nil
			if r == nil {
				select {
				case r = <-s.source(c):
				default:
				}
			}
			if r == nil {
				break
			}
			if !s.fits(r) {
				w.held[c] = r
				return
			}
			w.batch = append(w.batch, r)
			w.blocks += r.rec.blocks()
			w.moved = c == classMove
		}
	}
}

// fits reports whether r goes into the batch. For the first one it makes room; if it cannot, that one fails later.
func (s *Store) fits(r *request) bool {
	w := &s.w
	n, blocks := len(w.batch)+1, w.blocks+r.rec.blocks()
	if n > maxRecords || blocks > maxGroupBytes/block {
		return false
	}
	room := w.active >= 0 && w.pos+1+blocks+footerBlocks(len(w.records)+n) <= s.segBlocks
	if room || n > 1 {
		return room
	}
	if s.failure() == nil {
		if err := s.rotate(); err != nil && !errors.Is(err, ErrNoSpace) {
			_ = s.fail(err) // the batch is answered with it
		}
	}
	return true
}

// wait blocks until there is something to do, and reports false when the store closes.
func (s *Store) wait() bool {
	w := &s.w
	refuse := s.refusal()
	var from [classCount]chan *request
	for c := range classCount {
		if !s.open(c) && refuse != nil && w.held[c] != nil {
			s.finish([]*request{w.held[c]}, refuse)
			w.held[c] = nil
		}
		if s.open(c) || refuse != nil {
			from[c] = s.source(c)
			continue
		}
		s.waiting.Store(true)
		signal(s.kick)
	}
	closing := s.closing
	if w.closing {
		closing = nil
	}
	take := func(c class, r *request) {
		if refuse != nil && !s.open(c) {
			s.finish([]*request{r}, refuse)
			return
		}
		w.held[c] = r
	}
	select {
	case r := <-from[classMove]:
		take(classMove, r)
	case r := <-from[classDiscard]:
		take(classDiscard, r)
	case r := <-from[classWrite]:
		take(classWrite, r)
	case f := <-s.ctl:
		f()
	case <-s.nudge:
	case <-closing:
		w.closing = true
	case <-s.stop:
		return false
	}
	return true
}

// refusal is what requests get that would have to wait for compaction in vain; nil if they are to wait.
func (s *Store) refusal() error {
	if err := s.failure(); err != nil {
		return err
	}
	if s.w.closing {
		return ErrClosed
	}
	if s.stuck.Load() {
		s.index.mu.RLock()
		defer s.index.mu.RUnlock()
		return noSpace(s.index.live, s.usable)
	}
	return nil
}

// signal wakes whoever waits on c, once.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// finish answers requests.
func (s *Store) finish(list []*request, err error) {
	for _, r := range list {
		s.release(r)
		r.results <- err
	}
}

// commit writes the batch as one group, makes it durable, and puts it into the index.
func (s *Store) commit() {
	w := &s.w
	s.sift()
	if len(w.batch) == 0 {
		return
	}
	if w.active < 0 || w.pos+1+w.blocks+footerBlocks(len(w.records)+len(w.batch)) > s.segBlocks {
		s.finish(w.batch, noSpace(s.usable, s.usable)) // no segment is free, not even for compaction
		return
	}
	err := s.writeGroup()
	if err != nil {
		err = s.fail(err)
		s.finish(w.batch, err)
		return
	}
	s.apply()
	s.finish(w.batch, nil)
}

// sift takes out of the batch what is not to be written: compaction's records of what has changed, and discards of
// what is not there, which an earlier record has seen to.
func (s *Store) sift() {
	w := &s.w
	s.index.mu.RLock()
	defer s.index.mu.RUnlock()
	kept := w.batch[:0]
	var found []piece
	w.blocks = 0
	for _, r := range w.batch {
		found = s.index.overlapping(found[:0], r.rec.off, r.rec.off+r.rec.length)
		var err error
		drop := false
		switch {
		case r.move != nil:
			drop, err = len(found) != 1 || found[0] != *r.move, errStale
		case r.tomb:
			drop, err = len(found) != 0, errStale
		case r.rec.kind == kindDiscard:
			drop = len(found) == 0
		}
		if drop {
			s.finish([]*request{r}, err)
			continue
		}
		kept = append(kept, r)
		w.blocks += r.rec.blocks()
	}
	w.batch = kept
}

// writeGroup writes the header and the payloads of the batch.
func (s *Store) writeGroup() error {
	w := &s.w
	if err := s.unseal(); err != nil {
		return err
	}
	g := group{first: w.sb.slots[w.active].first, seq: w.seq, blocks: w.blocks + 1, moved: w.moved}
	g.records = make([]record, 0, len(w.batch))
	bufs := make([][]byte, 1, len(w.batch)+1)
	pos := w.pos + 1
	for _, r := range w.batch {
		if n := r.rec.blocks(); n > 0 {
			r.rec.pos = pos
			pos += n
			bufs = append(bufs, r.payload)
		}
		g.records = append(g.records, r.rec)
	}
	w.header = g.appendTo(w.header[:0], w.sb.salt)
	bufs[0] = w.header
	f := s.segments[w.active].file
	w.dirty = true
	if err := f.writeVec(bufs, int64(w.pos)*block); err != nil {
		return err
	}
	if !s.o.NoSync {
		if err := s.flush(); err != nil {
			return err
		}
	}
	w.pos, w.seq = pos, w.seq+1
	w.records = append(w.records, g.records...)
	s.stats.groups.Add(1)
	s.stats.groupRecords.Add(int64(len(w.batch)))
	s.stats.stored.Add(int64(w.blocks) * block)
	return nil
}

// flush makes the active segment durable.
func (s *Store) flush() error {
	if !s.w.dirty {
		return nil
	}
	if err := s.segments[s.w.active].file.sync(); err != nil {
		return err
	}
	s.w.dirty = false
	s.stats.syncs.Add(1)
	return nil
}

// apply puts the batch into the index.
func (s *Store) apply() {
	w := &s.w
	s.index.mu.Lock()
	defer s.index.mu.Unlock()
	var gone []piece
	for _, r := range w.batch {
		if r.rec.kind == kindDiscard {
			gone = s.index.overlapping(gone[:0], r.rec.off, r.rec.off+r.rec.length)
			s.index.replace(r.rec.off, r.rec.off+r.rec.length, nil)
			for i := range gone {
				s.stats.discardedBytes.Add(int64(gone[i].length))
			}
			s.stats.discards.Add(1)
			s.stuck.Store(false)
			if s.waiting.Load() {
				signal(s.kick)
			}
			continue
		}
		p := r.piece(w.active)
		s.index.replace(p.off, p.end(), &p)
	}
}

// writeSuper makes the superblock durable.
func (s *Store) writeSuper() error {
	s.w.sb.next = s.w.seq
	s.stats.free.Store(int64(len(s.w.free)))
	s.stats.used.Store(int64(len(s.segments) - len(s.w.free)))
	return writeSuperblock(s.super, &s.w.sb)
}

// rotate seals the active segment and begins another.
func (s *Store) rotate() error {
	w := &s.w
	if len(w.free) == 0 {
		return noSpace(s.usable, s.usable)
	}
	if err := s.writeFooter(); err != nil {
		return err
	}
	w.active, w.free = w.free[0], w.free[1:]
	w.pos, w.records = 0, w.records[:0]
	w.sb.slots[w.active] = slotState{first: w.seq}
	if err := s.writeSuper(); err != nil {
		return err
	}
	signal(s.kick)
	return nil
}

// writeFooter ends the active segment; the superblock is the caller's to write.
func (s *Store) writeFooter() error {
	w := &s.w
	if w.active < 0 || w.sb.slots[w.active].last != unsealedLast {
		return nil
	}
	t := &w.sb.slots[w.active]
	if w.pos == 0 { // nothing was written to it
		*t = slotState{}
		w.free = append(w.free, w.active)
		return nil
	}
	last := w.seq - 1
	f := s.segments[w.active].file
	w.dirty = true
	if err := f.writeVec([][]byte{appendFooter(nil, w.sb.salt, t.first, last, w.records)}, int64(w.pos)*block); err != nil {
		return err
	}
	if err := s.flush(); err != nil {
		return err
	}
	t.last, t.footer, t.records = last, w.pos, uint32(len(w.records)) //nolint:gosec // records of a segment are bounded
	return nil
}

// seal ends the log for a clean start. The writer's goroutine has ended.
func (s *Store) seal() error {
	w := &s.w
	if w.active < 0 || w.sb.slots[w.active].last != unsealedLast {
		return nil // nothing was written since it was sealed
	}
	err := s.writeFooter()
	if err == nil {
		err = s.writeSuper()
	}
	if err != nil {
		return s.fail(err)
	}
	return nil
}

// unseal says that the segment which the last Close sealed is written to again.
func (s *Store) unseal() error {
	t := &s.w.sb.slots[s.w.active]
	if t.last == unsealedLast {
		return nil
	}
	t.last, t.footer, t.records = unsealedLast, 0, 0
	return s.writeSuper()
}

// freeSlot takes an empty segment out of the log, if it is still the one that begins with first.
func (s *Store) freeSlot(slot int, first uint64) error {
	w := &s.w
	if err := s.failure(); err != nil {
		return err
	}
	if w.sb.slots[slot].first != first || slot == w.active {
		return nil
	}
	err := s.flush() // what was copied from it must not be less durable
	if err == nil {
		w.sb.slots[slot] = slotState{}
		err = s.writeSuper()
	}
	if err != nil {
		return s.fail(err)
	}
	w.free = append(w.free, slot)
	s.stats.free.Store(int64(len(w.free)))
	s.stats.used.Store(int64(len(s.segments) - len(w.free)))
	s.stuck.Store(false)
	if s.open(classWrite) {
		s.waiting.Store(false)
	}
	return nil
}

// setGeneration is SetGeneration, on the writer.
func (s *Store) setGeneration(generation uint64) error {
	w := &s.w
	if generation == 0 {
		return errors.Join(ErrOptions, errors.New("ssd: zero is no generation"))
	}
	if err := s.failure(); err != nil {
		return err
	}
	s.index.mu.Lock()
	s.index.reset()
	s.index.mu.Unlock()
	if err := s.flush(); err != nil {
		return s.fail(err)
	}
	w.free = w.free[:0]
	for i := range w.sb.slots {
		s.awaitIdle(i)
		w.sb.slots[i] = slotState{}
		w.free = append(w.free, i)
	}
	w.active, w.records = -1, w.records[:0]
	w.sb.generation, w.sb.floor = generation, w.seq
	if err := s.writeSuper(); err != nil {
		return s.fail(err)
	}
	s.stats.generation.Store(generation)
	s.stuck.Store(false)
	s.waiting.Store(false)
	return nil
}
