package raft

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/raft/v3/raftpb"
)

// spoolTableBytes is about the size of one table of a received snapshot, in
// records before compression: Pebble's size for the lowest levels.
const spoolTableBytes = 64 << 20

// checkpoint is the state as of an index, as hard links to Pebble's files.
type checkpoint struct {
	s       *Store
	dir     string
	m       *manifest
	release func()
}

// capture flushes the Machine and takes a checkpoint of the state store. It runs
// on the apply side, so that nothing comes between the two.
func (c *Core) capture() (cp *checkpoint, err error) {
	index, err := c.cfg.Machine.Flush()
	if err != nil {
		return nil, fmt.Errorf("raft: flush the state: %w", err)
	}
	m := &manifest{Version: snapFormatVersion, Cluster: c.cfg.ClusterID}
	c.log.mu.Lock()
	m.Index = max(index, c.log.base.index)
	m.Term, err = c.log.term(m.Index)
	m.Conf = c.log.confs.at(m.Index)
	c.log.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("raft: term of the flushed index %d: %w", index, err)
	}
	s := c.store
	cp = &checkpoint{s: s, m: m, dir: s.tempName("checkpoints"), release: s.holdAt(m.Index)}
	if err := s.fs.MkdirAll(s.path("checkpoints"), 0o750); err != nil {
		cp.release()
		return nil, fmt.Errorf("raft: create the checkpoint directory: %w", err)
	}
	spans := []pebble.CheckpointSpan{{Start: stateLow, End: stateHigh}}
	if err := s.db.Checkpoint(cp.dir, pebble.WithFlushedWAL(), pebble.WithRestrictToSpans(spans)); err != nil {
		cp.close()
		return nil, fmt.Errorf("raft: checkpoint: %w", err)
	}
	return cp, nil
}

func (cp *checkpoint) close() {
	cp.release()
	_ = cp.s.fs.RemoveAll(cp.dir) // a leftover is removed at the next start
}

// stream writes the checkpoint as a snapshot stream.
func (cp *checkpoint) stream(w io.Writer) (err error) {
	cache := pebble.NewCache(snapBuffer)
	defer cache.Unref()
	opts := &pebble.Options{
		FS: cp.s.fs, ReadOnly: true, Cache: cache, FormatMajorVersion: formatVersion,
		Logger: &pebbleLogger{s: cp.s}, DisableAutomaticCompactions: true,
	}
	db, err := pebble.Open(cp.dir, opts)
	if err != nil {
		return readError("a checkpoint", cp.m.Index, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	sw, err := newSnapWriter(w, cp.m)
	if err != nil {
		return err
	}
	state := &StateStore{s: &Store{db: db}}
	if err := state.Scan(nil, sw.add); err != nil {
		return err
	}
	return sw.finish()
}

// WriteSnapshot writes a snapshot stream of the member's state and returns what a
// MsgSnap must carry for it.
func (c *Core) WriteSnapshot(w io.Writer) (*pb.SnapshotMetadata, error) {
	cp, err := c.capture()
	if err != nil {
		return nil, err
	}
	defer cp.close()
	return cp.m.meta(), cp.stream(w)
}

func (m *manifest) meta() *pb.SnapshotMetadata {
	return &pb.SnapshotMetadata{Index: new(m.Index), Term: new(m.Term), ConfState: m.Conf.state()}
}

// spool is a received and verified snapshot: tables, ready to be ingested.
type spool struct {
	s      *Store
	id     uint64
	dir    string
	m      *manifest
	tables []string

	w       *sstable.Writer
	written int
	key     []byte
}

// tempName names a new directory for a snapshot on its way.
func (s *Store) tempName(kind string) string {
	s.spoolMu.Lock()
	defer s.spoolMu.Unlock()
	s.spoolSeq++
	return s.fs.PathJoin(s.dir, kind, fmt.Sprintf("%06d", s.spoolSeq))
}

// receive reads a snapshot stream into tables on disk. Nothing of it is used
// before all of it was verified and is durable.
func (s *Store) receive(r io.Reader) (*spool, error) {
	sp := &spool{s: s, dir: s.tempName("spool")}
	if err := sp.fill(r); err != nil {
		if sp.w != nil {
			_ = sp.w.Close() // its file is removed below
		}
		sp.discard()
		return nil, err
	}
	return sp, nil
}

// fill reads a stream into tables.
func (sp *spool) fill(r io.Reader) error {
	if err := sp.s.fs.MkdirAll(sp.dir, 0o750); err != nil {
		return fmt.Errorf("raft: create the spool: %w", err)
	}
	begin := func(m *manifest) error {
		sp.m = m
		mark, err := json.Marshal(m)
		if err != nil {
			return fmt.Errorf("raft: encode the snapshot's mark: %w", err)
		}
		return sp.set(keyMark, sealed(mark))
	}
	add := func(key, value []byte) error {
		sp.key = append(append(sp.key[:0], prefixState, stateData), key...)
		return sp.set(sp.key, value)
	}
	if err := readSnapshot(r, begin, add); err != nil {
		return err
	}
	if err := sp.closeTable(); err != nil {
		return err
	}
	return syncDir(sp.s.fs, sp.dir)
}

func (sp *spool) set(key, value []byte) error {
	if sp.w != nil && sp.written >= spoolTableBytes {
		if err := sp.closeTable(); err != nil {
			return err
		}
	}
	if sp.w == nil {
		name := sp.s.fs.PathJoin(sp.dir, fmt.Sprintf("%06d.sst", len(sp.tables)))
		f, err := sp.s.fs.Create(name, vfs.WriteCategoryUnspecified)
		if err != nil {
			return fmt.Errorf("raft: create a table: %w", err)
		}
		sp.tables, sp.written = append(sp.tables, name), 0
		const level = 6 // it becomes the bottom of an emptied range
		sp.w = sstable.NewWriter(objstorageprovider.NewFileWritable(f),
			sp.s.opts.MakeWriterOptions(level, sp.s.db.TableFormat()))
	}
	sp.written += len(key) + len(value)
	if err := sp.w.Set(key, value); err != nil {
		return fmt.Errorf("raft: write a table: %w", err)
	}
	return nil
}

// closeTable finishes and syncs the current table.
func (sp *spool) closeTable() error {
	w := sp.w
	sp.w = nil
	if err := w.Close(); err != nil {
		return fmt.Errorf("raft: finish a table: %w", err)
	}
	return nil
}

func (sp *spool) discard() {
	_ = sp.s.fs.RemoveAll(sp.dir) // a leftover is removed at the next start
}

// ingest replaces the state range by the spool's tables, in one atomic step.
func (sp *spool) ingest() error {
	span := pebble.KeyRange{Start: stateLow, End: stateHigh}
	if _, err := sp.s.db.IngestAndExcise(context.Background(), sp.tables, nil, nil, span); err != nil {
		return fmt.Errorf("raft: install the snapshot: %w", err)
	}
	return nil
}

// StepSnapshot takes a MsgSnap whose stream is read from r. It returns after the
// stream was verified and handed to raft; Process then installs it, or drops it if
// raft has no use for it. Errors of the stream concern the sender only.
func (c *Core) StepSnapshot(m *pb.Message, r io.Reader) error {
	sp, err := c.receiveSnapshot(m, r)
	if err != nil {
		return err
	}
	return c.stepSpool(m, sp)
}

// receiveSnapshot is the part of StepSnapshot that takes long and needs no lock.
func (c *Core) receiveSnapshot(m *pb.Message, r io.Reader) (*spool, error) {
	if err := checkMessage(m, c.cfg.ID); err != nil {
		return nil, err
	}
	if m.GetType() != pb.MsgSnap {
		return nil, badMessage(m, "not a snapshot")
	}
	if c.store.health.full.Load() {
		return nil, ErrDiskFull
	}
	sp, err := c.store.receive(r)
	if err != nil {
		return nil, err
	}
	if sp.m.Cluster != c.cfg.ClusterID {
		sp.discard()
		return nil, fmt.Errorf("%w: it is of cluster %x, this is %x", ErrSnapshotInvalid, sp.m.Cluster, c.cfg.ClusterID)
	}
	return sp, nil
}

func (c *Core) stepSpool(m *pb.Message, sp *spool) error {
	c.store.spoolMu.Lock()
	c.store.spoolSeq++
	sp.id = c.store.spoolSeq
	c.store.spoolMu.Unlock()
	c.spools[sp.id] = sp
	m.Snapshot = &pb.Snapshot{Metadata: sp.m.meta(), Data: binary.BigEndian.AppendUint64(nil, sp.id)}
	return c.step(m)
}

// install replaces state and log by the round's snapshot. The tables carry a mark
// with their index: if a crash comes between the two steps, the mark is ahead of
// the log, and the next start does the second step.
func (c *Core) install(r *round, hard *hardState) error {
	return c.runApply(func() error {
		sp := r.spool
		defer sp.discard()
		if err := sp.ingest(); err != nil {
			return err
		}
		h := c.log.hardState()
		if hard != nil {
			h = *hard
		}
		if err := c.store.resetLog(sp.m, h); err != nil {
			return err
		}
		c.apply.term = sp.m.Term
		c.apply.index.Store(sp.m.Index)
		if err := c.cfg.Machine.Restored(sp.m.Index); err != nil {
			return fmt.Errorf("raft: load the snapshot of index %d: %w", sp.m.Index, err)
		}
		if c.cfg.OnMembers != nil {
			c.cfg.OnMembers(sp.m.Conf.Members)
		}
		return nil
	})
}

// resetLog makes the log begin behind a snapshot.
func (s *Store) resetLog(m *manifest, hard hardState) error {
	base := logBase{index: m.Index, term: m.Term}
	hard.commit = max(hard.commit, m.Index)
	b := s.db.NewBatch()
	_ = b.DeleteRange(logLow, logHigh, nil)                            // fails only on an indexed batch
	_ = b.DeleteRange([]byte{prefixConf}, []byte{prefixConf + 1}, nil) // as above
	putBase(b, base)
	putHard(b, hard)
	if err := putConf(b, m.Conf); err != nil {
		return errors.Join(err, b.Close())
	}
	if err := errors.Join(b.Commit(pebble.Sync), b.Close()); err != nil {
		return fmt.Errorf("raft: restart the log at %d: %w", m.Index, err)
	}
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hard = hard
	l.confs.set(m.Conf)
	l.snapIndex = m.Index
	l.reset(base)
	return nil
}

// finishInstall completes, at start, an installation that a crash interrupted.
func (s *Store) finishInstall() error {
	v, ok, err := s.get(keyMark)
	if err != nil || !ok {
		return err
	}
	b, err := unseal("the snapshot's mark", v)
	if err != nil {
		return err
	}
	m := new(manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return &CorruptionError{What: "the snapshot's mark", Cause: err}
	}
	if err := s.log.loadMeta(); err != nil {
		return err
	}
	if m.Index <= s.log.base.index {
		return nil // it was complete
	}
	hard := s.log.hard
	if m.Term > hard.term { // a vote is of its term only
		hard.term, hard.vote = m.Term, 0
	}
	return s.resetLog(m, hard)
}

// holds are log indexes that must not be cut because a snapshot of them is being
// sent: its receiver continues behind it.
type holds struct {
	mu  sync.Mutex
	seq int
	at  map[int]uint64
}

func (s *Store) holdAt(index uint64) (release func()) {
	h := &s.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at == nil {
		h.at = map[int]uint64{}
	}
	h.seq++
	id := h.seq
	h.at[id] = index
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.at, id)
	}
}

// holdIndex is the lowest index held.
func (s *Store) holdIndex() uint64 {
	s.holds.mu.Lock()
	defer s.holds.mu.Unlock()
	low := uint64(math.MaxUint64)
	for _, i := range s.holds.at {
		low = min(low, i)
	}
	return low
}

// RestoreOptions says who the restored member will be.
type RestoreOptions struct {
	// Store configures the store that is written.
	Store StoreOptions
	// ClusterID is that of the new cluster. A new one keeps members of the old cluster away.
	ClusterID uint64
	// Member is the only member, with a new id.
	Member Member
}

// RestoreSnapshot writes the state of a snapshot stream into a fresh data
// directory, as the only member of a new cluster. What it holds is older than what
// clients may have seen: the store carries a marker that Store.TakeRestoredMarker
// reports. It returns the snapshot's index and term.
func RestoreSnapshot(dir string, r io.Reader, o RestoreOptions) (index, term uint64, err error) {
	if err := o.Member.validate(); err != nil {
		return 0, 0, err
	}
	s, err := OpenStore(dir, o.Store)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if s.id != (identity{}) {
		return 0, 0, ErrInitialised
	}
	sp, err := s.receive(r)
	if err != nil {
		return 0, 0, err
	}
	defer sp.discard()
	if _, reused := sp.m.Conf.find(o.Member.ID); (reused || sp.m.Conf.removed(o.Member.ID)) && sp.m.Cluster == o.ClusterID {
		return 0, 0, ErrIDReused
	}
	if err := sp.ingest(); err != nil {
		return 0, 0, err
	}
	me := o.Member
	me.Learner = false
	c := &conf{Index: sp.m.Index, Members: []Member{me}, Removed: sp.m.Conf.Removed}
	base := logBase{index: sp.m.Index, term: sp.m.Term}
	return sp.m.Index, sp.m.Term, s.initialise(identity{o.ClusterID, me.ID}, base, c, sp.m)
}
