package ssd

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
)

// Extent is a stretch of the logical address space, in bytes.
type Extent struct{ Off, Len uint64 }

// segment is one file. Its state belongs to the writer; readers hold it by refs, which they take while they hold the
// index, so that a segment without pieces gets no new ones.
type segment struct {
	file file
	refs atomic.Int64
}

// Store is an open store. Its methods may be called concurrently.
type Store struct {
	o         Options
	fs        fileSystem
	locked    io.Closer
	super     file
	direct    bool
	segments  []*segment
	segBlocks uint32
	maxRecord int
	usable    int64

	index    index
	packer   *compressor
	writeBuf *pool
	readBuf  *pool

	writes, discards, moves chan *request // queueLength each
	ctl                     chan func()   // runs on the writer
	kick                    chan struct{} // compaction looks again
	nudge                   chan struct{} // the writer looks again
	closing                 chan struct{} // closed when no more calls are taken
	stop                    chan struct{} // closed when no call is under way any more
	done                    sync.WaitGroup
	compacting              sync.WaitGroup

	calls   sync.RWMutex // held for reading by every call
	closed  bool         // under calls
	failed  atomic.Pointer[error]
	stuck   atomic.Bool  // compaction finds nothing to gain
	waiting atomic.Bool  // writes wait for compaction
	pending atomic.Int64 // cost of records that are queued

	idleMu  sync.Mutex // guards waiting for segments without readers
	idle    *sync.Cond
	waiters atomic.Int64

	w     writer // of the writer's goroutine alone, after Open
	stats counters
}

// counters behind Stats.
type counters struct {
	generation                                      atomic.Uint64
	free, used                                      atomic.Int64
	writes, writtenBytes, reads, readBytes          atomic.Int64
	discards, discardedBytes, groups, groupRecords  atomic.Int64
	syncs, stored                                   atomic.Int64
	compressed, compactions, compacted, noSpace     atomic.Int64
	damaged, dropped, scans, lost, torn, superTorns atomic.Int64
}

// enter begins a call; leave ends it if there is no error.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	s.calls.RLock()
	if s.closed {
		s.calls.RUnlock()
		return ErrClosed
	}
	if err := s.failure(); err != nil {
		s.calls.RUnlock()
		return err
	}
	return nil
}

func (s *Store) leave() { s.calls.RUnlock() }

func (s *Store) failure() error {
	if p := s.failed.Load(); p != nil {
		return *p
	}
	return nil
}

// fail stops the store for good; the first cause stays.
func (s *Store) fail(cause error) error {
	err := fmt.Errorf("%w: %w", ErrFailed, cause)
	if s.failed.CompareAndSwap(nil, &err) {
		s.o.Logger.Error("the SSD store stops: its storage failed", slog.Any("error", cause))
	}
	return s.failure()
}

func (s *Store) checkRange(off, n uint64) error {
	if size := s.o.Size; n > size || off > size-n {
		return fmt.Errorf("%w: %d bytes at %d of %d", ErrRange, n, off, size)
	}
	return nil
}

// Write stores b at logical offset off, in place of all that overlaps it. It returns when the bytes are durable, or,
// with [Options.NoSync], when they are written. Concurrent writes share one write to the disk and one flush. b must
// not change until then.
//
// Bytes are stored in records of at most 1 MiB, each of which appears as a whole. After an error, or a loss of power
// during the call, each record's range holds what it did, what was written, or nothing. ctx ends waiting for a place
// in the queue; what is in the queue is awaited. The error is ErrNoSpace for a full store.
func (s *Store) Write(ctx context.Context, off uint64, b []byte) error {
	if err := s.checkRange(off, uint64(len(b))); err != nil {
		return err
	}
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	n := (len(b) + s.maxRecord - 1) / s.maxRecord
	results := make(chan error, n)
	var err error
	sent := 0
	for ; sent < n; sent++ {
		at := sent * s.maxRecord
		part := b[at:min(len(b), at+s.maxRecord)]
		if err = s.writeRecord(ctx, off+uint64(at), part, results); err != nil { //nolint:gosec // not negative
			break
		}
	}
	return errors.Join(err, await(results, sent))
}

// await gives the first error of n results.
func await(results <-chan error, n int) (err error) {
	for range n {
		if e := <-results; err == nil {
			err = e
		}
	}
	return err
}

// writeRecord prepares one record and queues it.
func (s *Store) writeRecord(ctx context.Context, off uint64, b []byte, results chan<- error) error {
	r, err := s.prepare(ctx, s.writeBuf, off, b)
	if err != nil {
		return err
	}
	r.results = results
	err = s.admit(r)
	if err == nil {
		err = s.queue(ctx, s.writes, r)
	}
	if err != nil {
		s.release(r)
		return err
	}
	s.stats.writes.Add(1)
	s.stats.writtenBytes.Add(int64(len(b)))
	return nil
}

// admit reserves space. What the record replaces does not count.
func (s *Store) admit(r *request) error {
	p := r.piece(0)
	cost := p.cost()
	s.index.mu.RLock()
	live := s.index.live
	for _, old := range s.index.overlapping(nil, p.off, p.end()) {
		cost -= old.cost()
	}
	s.index.mu.RUnlock()
	cost = max(cost, 0)
	if pending := s.pending.Add(cost); live+pending > s.usable {
		s.pending.Add(-cost)
		s.stats.noSpace.Add(1)
		return noSpace(live+pending-cost, s.usable)
	}
	r.cost = cost
	return nil
}

func (s *Store) queue(ctx context.Context, c chan<- *request, r *request) error {
	select {
	case c <- r:
		return nil
	default:
	}
	select {
	case c <- r:
		return nil
	case <-s.closing:
		return ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// release gives back what a request holds.
func (s *Store) release(r *request) {
	if r.pooled != nil {
		r.from.put(r.pooled)
		r.pooled = nil
	}
	s.pending.Add(-r.cost)
	r.cost = 0
}

// prepare makes a record of b: compresses it where it pays, computes its CRC, and sees to it that the payload is whole
// blocks. It runs on the caller, so that callers share this work among the cores.
func (s *Store) prepare(ctx context.Context, from *pool, off uint64, b []byte) (*request, error) {
	r := &request{rec: record{off: off, length: uint64(len(b)), kind: kindData, stored: uint32(len(b))}, from: from} //nolint:gosec // short
	try := s.packer.worthTrying(b)
	if try || len(b)%block != 0 || s.direct && !aligned(b) {
		buf, err := from.get(ctx, roundUp(len(b)))
		if err != nil {
			return nil, err
		}
		r.pooled = buf
	}
	n := 0
	if try {
		n = s.packer.compress(r.pooled, b)
	}
	switch {
	case n > 0:
		r.rec.kind, r.rec.stored = kindZstd, uint32(n)
		s.stats.compressed.Add(1)
		r.payload = r.pooled[:roundUp(n)]
		clear(r.payload[n:])
	case r.pooled != nil:
		r.payload = r.pooled[:roundUp(len(b))]
		clear(r.payload[copy(r.payload, b):])
	default:
		r.payload = b
	}
	r.rec.crc = crc32.Checksum(r.payload[:r.rec.stored], crcTable)
	return r, nil
}

// Discard forgets all bytes of the extents. It returns when that is durable, or, with [Options.NoSync], when it is
// written: then no restart brings them back. Extents of one call, and concurrent calls, share one write. A full store
// takes discards. After an error or a loss of power during the call each extent is there or gone; if it is there, what is
// written there afterwards replaces it, as it does anything older. Nothing of the call happens after it has returned.
func (s *Store) Discard(ctx context.Context, extents ...Extent) error {
	for _, e := range extents {
		if err := s.checkRange(e.Off, e.Len); err != nil {
			return err
		}
	}
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	results := make(chan error, len(extents))
	var err error
	sent := 0
	for _, e := range extents {
		if e.Len == 0 {
			continue
		}
		r := &request{rec: record{off: e.Off, length: e.Len, kind: kindDiscard}, results: results}
		if err = s.queue(ctx, s.discards, r); err != nil {
			break
		}
		sent++
	}
	return errors.Join(err, await(results, sent))
}

// Read fills b with the bytes at logical offset off. Every read checks the CRC of all records that it touches, and
// reads them whole: a part of one costs as much as all of it. The error is ErrNotFound if a byte is not there and
// ErrDamaged if the disk gave back something else than was written; then b is zeros or untouched. ctx ends waiting for
// a buffer.
func (s *Store) Read(ctx context.Context, off uint64, b []byte) error {
	if err := s.checkRange(off, uint64(len(b))); err != nil {
		return err
	}
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	var few [4]piece
	pieces, err := s.hold(few[:0], off, uint64(len(b)))
	if err != nil {
		return err
	}
	for i := range pieces {
		if err == nil {
			p := &pieces[i]
			err = s.readPiece(ctx, s.readBuf, p, b[p.off-off:][:p.length])
		}
		s.letGo(pieces[i].slot)
	}
	if err != nil {
		clear(b)
		return err
	}
	s.stats.reads.Add(1)
	s.stats.readBytes.Add(int64(len(b)))
	return nil
}

// hold finds the pieces of a range, and keeps their segments from being used anew.
func (s *Store) hold(list []piece, off, n uint64) ([]piece, error) {
	s.index.mu.RLock()
	defer s.index.mu.RUnlock()
	list = s.index.overlapping(list, off, off+n)
	at := off
	for i := range list {
		if list[i].off != at {
			break
		}
		at = list[i].end()
	}
	if at != off+n {
		return nil, fmt.Errorf("%w: %d bytes at %d", ErrNotFound, n, off)
	}
	for i := range list {
		s.segments[list[i].slot].refs.Add(1)
	}
	return list, nil
}

func (s *Store) letGo(slot uint16) {
	if s.segments[slot].refs.Add(-1) == 0 && s.waiters.Load() > 0 {
		s.idleMu.Lock()
		s.idle.Broadcast()
		s.idleMu.Unlock()
	}
}

// awaitIdle waits until no reader holds a segment. Its pieces must have left the index.
func (s *Store) awaitIdle(slot int) {
	s.waiters.Add(1)
	defer s.waiters.Add(-1)
	s.idleMu.Lock()
	defer s.idleMu.Unlock()
	for s.segments[slot].refs.Load() != 0 {
		s.idle.Wait()
	}
}

// readPiece reads the record of p, whose segment is held, and puts the piece's bytes into b.
func (s *Store) readPiece(ctx context.Context, from *pool, p *piece, b []byte) error {
	n := roundUp(int(p.stored))
	whole := p.skip == 0 && p.length == p.raw && !p.zstd
	if whole && len(b) == n && (!s.direct || aligned(b)) {
		return s.readStored(p, b)
	}
	buf, err := from.get(ctx, n)
	if err != nil {
		return err
	}
	defer from.put(buf)
	if err := s.readStored(p, buf); err != nil {
		return err
	}
	if !p.zstd {
		copy(b, buf[p.skip:][:p.length])
		return nil
	}
	if p.skip == 0 && p.length == p.raw {
		return s.unpack(b, buf[:p.stored], p)
	}
	raw := make([]byte, p.raw) // a part of a compressed record is rare, and a second buffer of the pool could deadlock
	if err := s.unpack(raw, buf[:p.stored], p); err != nil {
		return err
	}
	copy(b, raw[p.skip:][:p.length])
	return nil
}

func (s *Store) unpack(dst, stored []byte, p *piece) error {
	if s.packer.decompress(dst, stored) {
		return nil
	}
	return s.damaged(p, errors.New("it does not decompress"))
}

// readStored reads a payload and checks it. b is whole blocks.
func (s *Store) readStored(p *piece, b []byte) error {
	n, err := s.segments[p.slot].file.ReadAt(b, int64(p.pos)*block)
	if n < int(p.stored) {
		return s.damaged(p, err)
	}
	if crc32.Checksum(b[:p.stored], crcTable) != p.crc {
		return s.damaged(p, errors.New("its checksum does not match"))
	}
	return nil
}

func (s *Store) damaged(p *piece, cause error) error {
	s.stats.damaged.Add(1)
	return fmt.Errorf("%w: record of %d bytes at block %d of segment %d: %w", ErrDamaged, p.stored, p.pos, p.slot, cause)
}

// SetGeneration drops all content and gives the store a new generation, durably. Its cost does not grow with the
// content. Writes that have not returned before it may fall on either side.
func (s *Store) SetGeneration(ctx context.Context, generation uint64) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	return s.onWriter(ctx, func() error { return s.setGeneration(generation) })
}

// onWriter runs f between two groups.
func (s *Store) onWriter(ctx context.Context, f func() error) error {
	result := make(chan error, 1)
	select {
	case s.ctl <- func() { result <- f() }:
		return <-result
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Generation is what the superblock says; 0 if content was lost since it was set, by more than a record.
func (s *Store) Generation() uint64 { return s.stats.generation.Load() }

// Identity is what the store was made with: the uuid of the device, and the id of its pool.
func (s *Store) Identity() (uuid, pool [16]byte) { return s.o.UUID, s.o.Pool }

// Size is how many bytes the logical address space has.
func (s *Store) Size() uint64 { return s.o.Size }

// Close writes what makes the next start fast, and closes the files. Calls under way end first; those that wait for
// space fail with ErrClosed. A second Close does nothing.
func (s *Store) Close() error {
	s.calls.RLock()
	closed := s.closed
	s.calls.RUnlock()
	if closed || !s.beginClose() {
		return nil
	}
	s.calls.Lock()
	s.closed = true
	s.calls.Unlock()
	s.compacting.Wait() // it needs the writer
	close(s.stop)
	s.done.Wait()
	var err error
	if s.failure() == nil { // what failed is not written to again
		err = s.seal()
	}
	return errors.Join(err, s.closeFiles())
}

// beginClose is true once.
func (s *Store) beginClose() bool {
	s.idleMu.Lock()
	defer s.idleMu.Unlock()
	select {
	case <-s.closing:
		return false
	default:
		close(s.closing)
		return true
	}
}

func (s *Store) closeFiles() (err error) {
	for _, seg := range s.segments {
		if seg != nil && seg.file != nil {
			err = errors.Join(err, seg.file.Close())
		}
	}
	if s.super != nil {
		err = errors.Join(err, s.super.Close())
	}
	if s.packer != nil {
		s.packer.close()
	}
	return errors.Join(err, s.locked.Close())
}

// Stats gives the present numbers.
func (s *Store) Stats() Stats {
	c := &s.stats
	segment := int64(s.segBlocks) * block
	t := Stats{
		Generation: s.Generation(), Size: s.o.Size, Direct: s.direct,
		UsedBytes: c.used.Load() * segment, Usable: s.usable, Capacity: int64(len(s.segments)) * segment,
		Segments: len(s.segments), FreeSegments: int(c.free.Load()),
		Writes: c.writes.Load(), WrittenBytes: c.writtenBytes.Load(), Reads: c.reads.Load(), ReadBytes: c.readBytes.Load(),
		Discards: c.discards.Load(), DiscardedBytes: c.discardedBytes.Load(),
		Groups: c.groups.Load(), GroupRecords: c.groupRecords.Load(), Syncs: c.syncs.Load(),
		StoredBytes: c.stored.Load(), Compressed: c.compressed.Load(), SampledRatio: s.packer.running(),
		Compactions: c.compactions.Load(), CompactedBytes: c.compacted.Load(), NoSpace: c.noSpace.Load(),
		Damaged: c.damaged.Load(), DroppedPieces: c.dropped.Load(), RecoveredByScan: c.scans.Load(),
		LostBatches: c.lost.Load(), TornRecords: c.torn.Load(), SuperblockCopiesMended: c.superTorns.Load(),
	}
	s.index.mu.RLock()
	t.Extents, t.IndexBytes, t.LiveBytes = s.index.pieces, s.index.bytes(), s.index.live
	s.index.mu.RUnlock()
	return t
}
