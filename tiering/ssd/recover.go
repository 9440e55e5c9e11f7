package ssd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"slices"
	"sync"
)

// scanBytes are read at a time when a segment is searched for headers.
const scanBytes = 1 << 20

// Open opens the store in dir, or makes one. It reads the superblock and each segment's footer, or its headers where
// there is none; it does not read data. One process at a time has a store open.
//
// The error is ErrNoStore, ErrCorrupt, ErrVersion, ErrMismatch, ErrLocked, ErrOptions, ErrNoSpace, or one of the
// operating system.
func Open(dir string, o Options) (*Store, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Store{
		o: o, fs: o.fs,
		writeBuf: newPool(o.WriteBufferBytes), readBuf: newPool(o.ReadBufferBytes),
		writes: make(chan *request, queueLength), discards: make(chan *request, queueLength),
		moves: make(chan *request, queueLength), ctl: make(chan func()),
		kick: make(chan struct{}, 1), nudge: make(chan struct{}, 1),
		closing: make(chan struct{}), stop: make(chan struct{}),
	}
	s.idle = sync.NewCond(&s.idleMu)
	s.w.active, s.w.header = -1, alignedBytes(block)
	if s.fs == nil {
		s.fs = dirFS{dir}
		if o.Create {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return nil, fmt.Errorf("ssd: open: %w", err)
			}
		}
	}
	if s.locked, err = s.fs.lock(); err != nil {
		return nil, fmt.Errorf("ssd: open: %w", err)
	}
	if err = s.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("ssd: open %s: %w", dir, err), s.closeFiles())
	}
	s.start()
	return s, nil
}

func (s *Store) start() {
	s.done.Add(1)
	go s.run()
	s.compacting.Add(1)
	go s.compactLoop()
}

// load brings the store to where the log ends.
func (s *Store) load() (err error) {
	if s.packer, err = newCompressor(s.o.Compression); err != nil {
		return err
	}
	torn, err := s.loadSuper()
	if err != nil {
		return err
	}
	sb := &s.w.sb
	s.segBlocks = uint32(sb.segment / block) //nolint:gosec // bounded by maxSegmentBytes
	s.maxRecord = int(min(maxRecordBytes, sb.segment/recordShare))
	n := int64(len(sb.slots))
	s.usable = usableBytes(n, int64(sb.segment)) //nolint:gosec // bounded
	s.index.used = make([]usage, n)
	if err := s.openSegments(int64(sb.segment)); err != nil { //nolint:gosec // bounded
		return err
	}
	changed, err := s.replay()
	if err != nil {
		return err
	}
	for i, t := range sb.slots {
		if t.first == 0 {
			s.w.free = append(s.w.free, i)
		}
	}
	s.stats.generation.Store(sb.generation)
	if torn {
		s.stats.superTorns.Add(1)
	}
	s.stats.free.Store(int64(len(s.w.free)))
	s.stats.used.Store(int64(len(s.segments) - len(s.w.free)))
	if torn || changed {
		if err := s.flush(); err != nil { // the superblock will say that what was read is durable
			return err
		}
		return s.writeSuper()
	}
	return nil
}

// loadSuper reads the superblock, or makes it.
func (s *Store) loadSuper() (torn bool, err error) {
	f, _, err := s.fs.open(superblockName, s.o.Create, false)
	if errors.Is(err, fs.ErrNotExist) {
		return false, ErrNoStore
	}
	if err != nil {
		return false, err
	}
	s.super = f
	sb, torn, err := readSuperblock(f)
	if errors.Is(err, ErrNoStore) && s.o.Create {
		return false, s.format()
	}
	if err != nil {
		return false, err
	}
	if err := s.matches(sb); err != nil {
		return false, err
	}
	s.w.sb = *sb
	s.o.Size, s.o.UUID, s.o.Pool = sb.size, sb.uuid, sb.pool
	return torn, nil
}

// matches compares the store with what was asked for, and makes it larger if that was.
func (s *Store) matches(sb *superblock) error {
	o := &s.o
	switch {
	case o.UUID != [16]byte{} && o.UUID != sb.uuid:
		return fmt.Errorf("%w: device %x, not %x", ErrMismatch, sb.uuid, o.UUID)
	case o.Pool != [16]byte{} && o.Pool != sb.pool:
		return fmt.Errorf("%w: of pool %x, not %x", ErrMismatch, sb.pool, o.Pool)
	case o.Device != 0 && o.Device != sb.device:
		return fmt.Errorf("%w: of device %d, not %d", ErrMismatch, sb.device, o.Device)
	case o.Size != 0 && o.Size != sb.size:
		return fmt.Errorf("%w: of %d logical bytes, not %d", ErrMismatch, sb.size, o.Size)
	case o.SegmentBytes != 0 && uint64(o.SegmentBytes) != sb.segment: //nolint:gosec // checked
		return fmt.Errorf("%w: of segments of %d bytes, not %d", ErrMismatch, sb.segment, o.SegmentBytes)
	}
	n := int(o.Capacity / int64(sb.segment)) //nolint:gosec // bounded
	if n > maxSlots || o.Capacity != 0 && n < len(sb.slots) {
		return fmt.Errorf("%w: a capacity of %d segments, not %d: it may only grow, up to %d", ErrMismatch, len(sb.slots), n, maxSlots)
	}
	for len(sb.slots) < n {
		sb.slots = append(sb.slots, slotState{})
	}
	return nil
}

// format makes a store. The files come first, so that a store that is there has its space.
func (s *Store) format() error {
	segment, slots, err := s.o.shape()
	if err != nil {
		return err
	}
	var salt [8]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return err
	}
	s.w.sb = superblock{
		salt: binary.LittleEndian.Uint64(salt[:]), uuid: s.o.UUID, pool: s.o.Pool, device: s.o.Device,
		generation: s.o.Generation, size: s.o.Size,
		segment: uint64(segment), slots: make([]slotState, slots), next: 1, //nolint:gosec // positive
	}
	s.w.seq = 1
	if err := s.openSegments(segment); err != nil {
		return err
	}
	return s.writeSuper()
}

// openSegments opens the files, and makes those that are not there.
func (s *Store) openSegments(size int64) error {
	s.direct = !s.o.Buffered
	for i := len(s.segments); i < len(s.w.sb.slots); i++ {
		f, direct, err := s.fs.open(fmt.Sprintf("%04d.segment", i), true, s.direct)
		if err != nil {
			return err
		}
		s.segments = append(s.segments, &segment{file: f})
		s.direct = s.direct && direct
		if err := f.allocate(size); err != nil {
			return err
		}
	}
	return s.fs.syncDir()
}

// replay indexes the segments in the order they were written, and finds the end of the log. It reports whether the
// superblock is to be written.
func (s *Store) replay() (changed bool, err error) {
	w := &s.w
	w.seq = max(w.sb.next, 1)
	order := s.order()
	for i, slot := range order {
		t := &w.sb.slots[slot]
		if t.last == unsealedLast && i != len(order)-1 {
			return false, fmt.Errorf("%w: segment %d is not the newest, and open", ErrCorrupt, slot)
		}
		got := s.readLog(slot, *t)
		if got.lost != 0 && got.lost >= w.sb.floor {
			// What is missing was acknowledged, and may have replaced or discarded anything older. Who keeps an index of
			// what lies here hears of it by the generation, also if this process does not come so far as to tell.
			s.stats.lost.Add(1)
			s.o.Logger.Error("a part of the SSD store's log is lost, and with it all that is older: its generation is over")
			s.index.reset()
			w.sb.generation = 0
			w.sb.floor = got.lost + 1
			t.footer, t.records = 0, 0
			changed = true
		}
		got.groups = slices.DeleteFunc(got.groups, func(g group) bool { return g.seq < w.sb.floor })
		if t.last == unsealedLast {
			s.checkLast(slot, &got)
		} else {
			s.indexLog(slot, got.groups)
		}
		w.seq = max(w.seq, got.next(*t))
		if i == len(order)-1 {
			changed = s.resume(slot, &got) || changed
		}
	}
	for _, slot := range order {
		if t := &w.sb.slots[slot]; t.last != unsealedLast && t.last < w.sb.floor && slot != w.active {
			*t, changed = slotState{}, true
		}
	}
	return changed, nil
}

// order lists the slots in use, oldest first.
func (s *Store) order() []int {
	var order []int
	for i, t := range s.w.sb.slots {
		if t.first != 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(s.w.sb.slots[a].first, s.w.sb.slots[b].first) })
	return order
}

// resume goes on writing where the newest segment ends, unless its end is lost: free segments may be short. It reports
// whether the superblock is to be written.
func (s *Store) resume(slot int, got *contents) (changed bool) {
	w := &s.w
	t := &w.sb.slots[slot]
	if got.next(*t) != w.seq || t.last != unsealedLast && got.last != t.last {
		if t.last == unsealedLast { // groups that were durable are missing: nothing of it counts any more
			*t = slotState{}
			return true
		}
		return false
	}
	w.active, w.pos = slot, got.end
	for _, g := range got.groups {
		w.records = append(w.records, g.records...)
	}
	w.dirty = t.last == unsealedLast // what was read may not be durable
	return false
}

// contents is what a segment holds.
type contents struct {
	groups []group // one, of sequence last, if it comes from a footer
	last   uint64
	end    uint32 // block behind the last
	lost   uint64 // highest sequence of a group that is missing; 0: none
}

// next gives the sequence of the group that follows those of the segment.
func (c *contents) next(t slotState) uint64 { return max(c.last+1, t.last+1, t.first) }

// readLog reads a segment's footer, or, failing that, its headers.
func (s *Store) readLog(slot int, t slotState) contents {
	if t.footer != 0 {
		b := alignedBytes(int(footerBlocks(int(t.records))) * block)
		if n, _ := s.segments[slot].file.ReadAt(b, int64(t.footer)*block); n == len(b) {
			if records, err := decodeFooter(b, s.w.sb.salt, s.w.sb.size, t); err == nil {
				return contents{[]group{{first: t.first, seq: t.last, records: records}}, t.last, t.footer, 0}
			}
		}
	}
	s.stats.scans.Add(1)
	return s.scan(slot, t)
}

// scan follows a segment's headers. Where one is damaged it searches for the next.
func (s *Store) scan(slot int, t slotState) (got contents) {
	want, pos := t.first, uint32(0)
	limit := t.last
	if limit == unsealedLast {
		limit = 1<<63 - 1
	}
	one := alignedBytes(block)
	for want <= limit && pos < s.segBlocks {
		p := place{salt: s.w.sb.salt, size: s.w.sb.size, first: t.first, at: pos, end: s.segBlocks}
		var g group
		n, _ := s.segments[slot].file.ReadAt(one, int64(pos)*block)
		err := errNoGroup
		if n == block {
			g, err = decodeGroup(one, p)
		}
		if err != nil || g.seq != want {
			var found bool
			if g, pos, found = s.search(slot, p, want, limit); !found {
				break
			}
			if g.seq != want {
				got.lost = g.seq - 1
			}
		}
		got.groups = append(got.groups, g)
		pos += g.blocks
		got.last, got.end, want = g.seq, pos, g.seq+1
	}
	if t.last != unsealedLast && got.last < t.last {
		got.lost = t.last
	}
	if t.last == unsealedLast && want < s.w.sb.next {
		got.lost = s.w.sb.next - 1 // those were durable when the superblock was written
	}
	return got
}

// search looks at every block from p.at on for the header of a group from want to limit. A payload does not look like
// one: who wrote it does not know the salt.
func (s *Store) search(slot int, p place, want, limit uint64) (group, uint32, bool) {
	buf := alignedBytes(scanBytes)
	salt := binary.LittleEndian.AppendUint64(nil, p.salt)
	for at := p.at; at < s.segBlocks; at += scanBytes / block {
		n, _ := s.segments[slot].file.ReadAt(buf, int64(at)*block)
		if n < len(buf) {
			n = s.readSingly(slot, at, buf)
		}
		for i := 0; i+block <= n; i += block {
			b := buf[i : i+block]
			if !bytes.HasPrefix(b, salt) && !bytes.HasPrefix(b[headerCopy:], salt) {
				continue
			}
			p.at = at + uint32(i/block)
			if g, err := decodeGroup(b, p); err == nil && g.seq >= want && g.seq <= limit {
				return g, p.at, true
			}
		}
	}
	return group{}, 0, false
}

// readSingly reads what can be read of a stretch in which a block cannot; the others are zeros.
func (s *Store) readSingly(slot int, at uint32, buf []byte) int {
	clear(buf)
	n := min(len(buf), int(s.segBlocks-at)*block)
	for i := 0; i < n; i += block {
		if got, _ := s.segments[slot].file.ReadAt(buf[i:i+block], int64(at)*block+int64(i)); got < block {
			clear(buf[i : i+block])
		}
	}
	return n
}

// checkLast verifies the payloads of the last group of a log that was not closed: it may have been under way. What
// compaction was copying still lies where it was, and the group is taken as not written. Of other groups, a record that
// did not land whole is taken as a discard, since what it replaced has been given up.
func (s *Store) checkLast(slot int, got *contents) {
	n := len(got.groups)
	if n == 0 {
		return
	}
	s.indexLog(slot, got.groups[:n-1])
	g := &got.groups[n-1]
	var torn []*record
	for i := range g.records {
		if r := &g.records[i]; r.kind != kindDiscard && !s.landed(slot, r) {
			torn = append(torn, r)
		}
	}
	s.stats.torn.Add(int64(len(torn)))
	if len(torn) > 0 && g.moved && g.seq >= s.w.sb.next && s.unmoved(g) {
		got.last, got.end, got.groups = g.seq-1, got.end-g.blocks, got.groups[:n-1]
		return
	}
	for _, r := range torn {
		*r = record{off: r.off, length: r.length, kind: kindDiscard}
	}
	s.indexLog(slot, got.groups[n-1:])
}

// landed reports whether a record's payload is whole.
func (s *Store) landed(slot int, r *record) bool {
	b := alignedBytes(roundUp(int(r.stored)))
	n, _ := s.segments[slot].file.ReadAt(b, int64(r.pos)*block)
	return n >= int(r.stored) && crc32.Checksum(b[:r.stored], crcTable) == r.crc
}

// unmoved reports whether all that a group of compaction's copied is still where it was.
func (s *Store) unmoved(g *group) bool {
	for i := range g.records {
		r := &g.records[i]
		if r.kind == kindDiscard {
			continue
		}
		old := s.index.overlapping(nil, r.off, r.off+r.length)
		if len(old) != 1 || uint64(old[0].length) != r.length {
			return false
		}
		p := &old[0]
		if p.skip == 0 && p.raw == p.length && p.zstd == (r.kind == kindZstd) {
			if p.crc != r.crc || p.stored != r.stored {
				return false
			}
			continue
		}
		b := make([]byte, p.length)
		if s.readPiece(context.Background(), s.readBuf, p, b) != nil || crc32.Checksum(b, crcTable) != r.crc {
			return false // parts of records are copied as they are
		}
	}
	return true
}

func pieceOf(r *record, slot int) piece {
	q := request{rec: *r}
	return q.piece(slot)
}

// indexLog applies groups of a segment.
func (s *Store) indexLog(slot int, groups []group) {
	for _, g := range groups {
		for i := range g.records {
			r := &g.records[i]
			if r.kind == kindDiscard {
				s.index.replace(r.off, r.off+r.length, nil)
				continue
			}
			p := pieceOf(r, slot)
			s.index.replace(p.off, p.end(), &p)
		}
	}
}
