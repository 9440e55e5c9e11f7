package raft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sort"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/zeebo/xxh3"
	etcdraft "go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// defaultLogCacheBytes of recent entries stay in memory: four times what one
// slow follower may have in flight, so that replication seldom reads Pebble.
const defaultLogCacheBytes = 16 << 20

// entryOverhead is what an entry costs in memory beside its data: the struct,
// its boxed numbers and a slot in the cache.
const entryOverhead = 160

// logMarkBytes is the granularity at which the log's size is known: finer than
// any limit that is compared with it.
const logMarkBytes = 256 << 10

// An entry's value is CRC32C (4, of key and what follows), chain (8), term (8),
// type (1), data. The chain is XXH3-64 of term, type and data, seeded with the
// chain of the entry before and the index: two logs with the same chain at an
// index are the same up to it, and a lost or exchanged entry shows.
const entryHeader = 4 + 8 + 8 + 1

// hardState is what raft must not forget beside the log.
type hardState struct{ term, vote, commit uint64 }

// logBase is the entry before the first: where the log was cut, or what a
// snapshot contained.
type logBase struct{ index, term, chain uint64 }

// termRun says that entries from index on have the term, up to the next run.
type termRun struct{ index, term uint64 }

// logMark says how many bytes were appended before the entry at index.
type logMark struct{ index, bytes uint64 }

// logStore is raft's Storage on Pebble: every entry is in the database, recent
// ones are also in memory, and terms of all are. Reading methods may be called
// while another goroutine appends.
type logStore struct {
	db *pebble.DB

	mu         sync.Mutex
	base       logBase
	last       uint64
	lastChain  uint64
	hard       hardState
	runs       []termRun // of base and all entries, ascending
	cache      []*pb.Entry
	cacheBytes int
	cacheLimit int
	marks      []logMark
	appended   uint64 // bytes, ever
	confs      confHistory
	snapIndex  uint64 // flushed into the state store: what a snapshot would contain at least
}

func newLogStore(db *pebble.DB, cacheLimit int) *logStore {
	return &logStore{db: db, cacheLimit: cacheLimit}
}

func logKey(index uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{prefixLog}, index)
}

func chainOf(prev, index uint64, body []byte) uint64 {
	return xxh3.HashSeed(body, prev^(index*0x9e3779b97f4a7c15))
}

// putEntry adds e to the batch and returns its chain.
func putEntry(b *pebble.Batch, e *pb.Entry, prev uint64) uint64 {
	data := e.GetData()
	op := b.SetDeferred(9, entryHeader+len(data))
	op.Key[0] = prefixLog
	binary.BigEndian.PutUint64(op.Key[1:], e.GetIndex())
	v := op.Value
	binary.BigEndian.PutUint64(v[12:], e.GetTerm())
	v[20] = byte(e.GetType()) //nolint:gosec // three types exist
	copy(v[entryHeader:], data)
	chain := chainOf(prev, e.GetIndex(), v[12:])
	binary.BigEndian.PutUint64(v[4:], chain)
	crc := crc32.Update(crc32.Checksum(op.Key, castagnoli), castagnoli, v[4:])
	binary.BigEndian.PutUint32(v, crc)
	_ = op.Finish() // fails only on an indexed batch
	return chain
}

// decodeEntry checks and copies a stored entry; want is the chain before it.
func decodeEntry(index uint64, key, v []byte, prev uint64, checkChain bool) (e *pb.Entry, chain uint64, err error) {
	bad := func(why string) (*pb.Entry, uint64, error) {
		return nil, 0, &CorruptionError{What: "a log entry", Index: index, Cause: errors.New(why)}
	}
	if len(key) != 9 || binary.BigEndian.Uint64(key[1:]) != index {
		return bad("the entry is missing")
	}
	if len(v) < entryHeader {
		return bad("the record is too short")
	}
	if crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, v[4:]) != binary.BigEndian.Uint32(v) {
		return bad(errChecksum.Error())
	}
	chain = binary.BigEndian.Uint64(v[4:])
	if checkChain && chain != chainOf(prev, index, v[12:]) {
		return bad("it does not continue the entry before it")
	}
	e = &pb.Entry{Index: new(index), Term: new(binary.BigEndian.Uint64(v[12:])), Type: pb.EntryType(v[20]).Enum()}
	if len(v) > entryHeader {
		e.Data = append([]byte(nil), v[entryHeader:]...)
	}
	return e, chain, nil
}

// load reads everything at start and verifies each entry.
func (l *logStore) load() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.loadMeta(); err != nil {
		return err
	}
	l.reset(l.base)
	it, err := l.db.NewIter(&pebble.IterOptions{LowerBound: logKey(l.base.index + 1), UpperBound: logHigh})
	if err != nil {
		return readError("the log", 0, err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			_ = it.Close() // err is the one to report
			return readError("the log", l.last+1, err)
		}
		e, chain, err := decodeEntry(l.last+1, it.Key(), v, l.lastChain, true)
		if err != nil {
			_ = it.Close() // err is the one to report
			return err
		}
		l.push(e, chain)
	}
	if err := it.Close(); err != nil {
		return readError("the log", l.last+1, err)
	}
	if l.hard.commit > l.last {
		return &LostDataError{Have: l.last, Want: l.hard.commit, Detail: "committed index"}
	}
	return nil
}

func (l *logStore) loadMeta() error {
	v, err := l.getSealed("the log base", keyBase, 24)
	if err != nil {
		return err
	}
	u := func(i int) uint64 { return binary.BigEndian.Uint64(v[8*i:]) }
	l.base = logBase{index: u(0), term: u(1), chain: u(2)}
	if v, err = l.getSealed("the hard state", keyHard, 24); err != nil {
		return err
	}
	l.hard = hardState{term: u(0), vote: u(1), commit: u(2)}
	l.snapIndex = l.base.index
	return l.confs.load(l.db)
}

// getSealed reads a small record of n bytes that must exist.
func (l *logStore) getSealed(what string, key []byte, n int) ([]byte, error) {
	v, closer, err := l.db.Get(key)
	if err != nil {
		if errors.Is(err, pebble.ErrNotFound) {
			return nil, &CorruptionError{What: what, Cause: errors.New("the record is missing")}
		}
		return nil, readError(what, 0, err)
	}
	b, err := unseal(what, append([]byte(nil), v...))
	if err == nil && len(b) != n {
		err = &CorruptionError{What: what, Cause: errors.New("the record has a wrong size")}
	}
	return b, errors.Join(err, closer.Close())
}

func sealedNumbers(nums ...uint64) []byte {
	b := make([]byte, 0, 8*len(nums)+4)
	for _, n := range nums {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return sealed(b)
}

func putHard(b *pebble.Batch, h hardState) {
	_ = b.Set(keyHard, sealedNumbers(h.term, h.vote, h.commit), nil) // fails only on an indexed batch
}

func putBase(b *pebble.Batch, base logBase) {
	_ = b.Set(keyBase, sealedNumbers(base.index, base.term, base.chain), nil) // fails only on an indexed batch
}

// reset empties the log in memory, behind base.
func (l *logStore) reset(base logBase) {
	l.base, l.last, l.lastChain = base, base.index, base.chain
	l.runs = append(l.runs[:0], termRun{index: base.index, term: base.term})
	l.cache, l.cacheBytes = nil, 0
	l.marks = nil
	l.snapIndex = max(l.snapIndex, base.index)
}

// push adds the next entry in memory.
func (l *logStore) push(e *pb.Entry, chain uint64) {
	index, term := e.GetIndex(), e.GetTerm()
	size := len(e.GetData()) + entryOverhead
	if n := len(l.marks); n == 0 || l.appended-l.marks[n-1].bytes >= logMarkBytes {
		l.marks = append(l.marks, logMark{index: index, bytes: l.appended})
	}
	l.appended += uint64(size)
	if l.runs[len(l.runs)-1].term != term {
		l.runs = append(l.runs, termRun{index: index, term: term})
	}
	l.cache = append(l.cache, e)
	l.cacheBytes += size
	for l.cacheBytes > l.cacheLimit && len(l.cache) > 1 {
		l.cacheBytes -= len(l.cache[0].GetData()) + entryOverhead
		l.cache[0] = nil // the array lives on until append moves it
		l.cache = l.cache[1:]
	}
	l.last, l.lastChain = index, chain
}

// cut drops entries from index on, in memory; chain is that of the entry before.
func (l *logStore) cut(index, chain uint64) {
	for len(l.runs) > 1 && l.runs[len(l.runs)-1].index >= index {
		l.runs = l.runs[:len(l.runs)-1]
	}
	for n := len(l.cache); n > 0 && l.cache[n-1].GetIndex() >= index; n = len(l.cache) {
		l.cacheBytes -= len(l.cache[n-1].GetData()) + entryOverhead
		l.cache = l.cache[: n-1 : n-1] // append must not overwrite what readers may hold
	}
	for n := len(l.marks); n > 0 && l.marks[n-1].index >= index; n = len(l.marks) {
		l.marks = l.marks[:n-1]
	}
	l.last, l.lastChain = index-1, chain
}

// chainAt reads the chain of an entry.
func (l *logStore) chainAt(index uint64) (uint64, error) {
	switch index {
	case l.last:
		return l.lastChain, nil
	case l.base.index:
		return l.base.chain, nil
	}
	v, closer, err := l.db.Get(logKey(index))
	if err != nil {
		return 0, readError("a log entry", index, err)
	}
	_, chain, err := decodeEntry(index, logKey(index), v, 0, false)
	return chain, errors.Join(err, closer.Close())
}

// append writes entries and, if not nil, the hard state in one batch. It returns
// when they are durable, if sync is set. Only one goroutine appends.
func (l *logStore) append(ents []*pb.Entry, hard *hardState, sync bool) error {
	if len(ents) == 0 && hard == nil {
		return nil
	}
	size := 64
	for _, e := range ents {
		size += len(e.GetData()) + 64
	}
	b := l.db.NewBatchWithSize(size)
	chains, err := l.fillBatch(b, ents)
	if err != nil {
		return errors.Join(err, b.Close())
	}
	if hard != nil {
		putHard(b, *hard)
	}
	opt := pebble.NoSync
	if sync {
		opt = pebble.Sync
	}
	if err := b.Commit(opt); err != nil {
		return fmt.Errorf("raft: write the log: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(ents) > 0 && ents[0].GetIndex() <= l.last {
		first := ents[0].GetIndex()
		l.cut(first, 0) // the chain is set by push
	}
	for i, e := range ents {
		l.push(e, chains[i])
	}
	if hard != nil {
		l.hard = *hard
	}
	return b.Close()
}

// fillBatch encodes entries, behind the deletion of those they replace.
func (l *logStore) fillBatch(b *pebble.Batch, ents []*pb.Entry) (chains []uint64, err error) {
	if len(ents) == 0 {
		return nil, nil
	}
	first, last := ents[0].GetIndex(), ents[len(ents)-1].GetIndex()
	if first <= l.base.index || first > l.last+1 {
		return nil, fmt.Errorf("raft: entries from %d on do not continue a log from %d to %d", first, l.base.index, l.last)
	}
	chain, err := l.chainAt(first - 1)
	if err != nil {
		return nil, err
	}
	if last < l.last { // a shorter log of a newer leader
		_ = b.DeleteRange(logKey(last+1), logKey(l.last+1), nil) // fails only on an indexed batch
	}
	chains = make([]uint64, len(ents))
	for i, e := range ents {
		chain = putEntry(b, e, chain)
		chains[i] = chain
	}
	return chains, nil
}

// durable is the last index in the log and its term.
func (l *logStore) durable() (index, term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, l.runs[len(l.runs)-1].term
}

func (l *logStore) hardState() hardState {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hard
}

// InitialState implements raft.Storage.
func (l *logStore) InitialState() (*pb.HardState, *pb.ConfState, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &pb.HardState{Term: new(l.hard.term), Vote: new(l.hard.vote), Commit: new(l.hard.commit)}
	return h, proto.CloneOf(l.confs.newest().state()), nil
}

// Entries implements raft.Storage.
func (l *logStore) Entries(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lo <= l.base.index {
		return nil, etcdraft.ErrCompacted
	}
	if hi > l.last+1 || lo >= hi {
		return nil, etcdraft.ErrUnavailable
	}
	var out []*pb.Entry
	var size uint64
	if first := l.last + 1 - uint64(len(l.cache)); lo < first {
		var err error
		if out, size, err = l.readEntries(lo, min(hi, first), maxSize); err != nil {
			return nil, err
		}
		lo += uint64(len(out))
		if lo < min(hi, first) || size >= maxSize {
			return out, nil
		}
	}
	cached := l.cache[lo-(l.last+1-uint64(len(l.cache))):]
	for _, e := range cached[:hi-lo] {
		size += uint64(proto.Size(e)) //nolint:gosec // not negative
		if size > maxSize && len(out) > 0 {
			break
		}
		out = append(out, e)
	}
	return out, nil
}

// readEntries reads from Pebble, and verifies what it reads.
func (l *logStore) readEntries(lo, hi, maxSize uint64) (out []*pb.Entry, size uint64, err error) {
	it, err := l.db.NewIter(&pebble.IterOptions{LowerBound: logKey(lo), UpperBound: logKey(hi)})
	if err != nil {
		return nil, 0, readError("the log", lo, err)
	}
	defer func() {
		if cerr := it.Close(); cerr != nil && err == nil {
			out, err = nil, readError("the log", lo, cerr)
		}
	}()
	it.First()
	var chain uint64
	for index := lo; index < hi; index++ {
		if !it.Valid() {
			return nil, 0, errors.Join(it.Error(), &CorruptionError{
				What: "the log", Index: index, Cause: errors.New("the entry is missing"),
			})
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return nil, 0, readError("a log entry", index, err)
		}
		e, next, err := decodeEntry(index, it.Key(), v, chain, index > lo)
		if err != nil {
			return nil, 0, err
		}
		size += uint64(proto.Size(e)) //nolint:gosec // not negative
		if size > maxSize && len(out) > 0 {
			break
		}
		out, chain = append(out, e), next
		it.Next()
	}
	return out, size, nil
}

// Term implements raft.Storage.
func (l *logStore) Term(i uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.term(i)
}

func (l *logStore) term(i uint64) (uint64, error) {
	switch {
	case i < l.base.index:
		return 0, etcdraft.ErrCompacted
	case i > l.last:
		return 0, etcdraft.ErrUnavailable
	case i == l.base.index:
		return l.base.term, nil
	}
	n := sort.Search(len(l.runs), func(n int) bool { return l.runs[n].index > i })
	return l.runs[n-1].term, nil
}

// LastIndex implements raft.Storage.
func (l *logStore) LastIndex() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, nil
}

// FirstIndex implements raft.Storage.
func (l *logStore) FirstIndex() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.base.index + 1, nil
}

// Snapshot implements raft.Storage. It names what a snapshot would contain at
// least; the stream that is sent says what it does contain.
func (l *logStore) Snapshot() (*pb.Snapshot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snapshotAt(l.snapIndex)
}

func (l *logStore) snapshotAt(index uint64) (*pb.Snapshot, error) {
	term, err := l.term(index)
	if err != nil {
		return nil, fmt.Errorf("raft: term of the snapshot index %d: %w", index, err)
	}
	meta := &pb.SnapshotMetadata{Index: new(index), Term: new(term), ConfState: proto.CloneOf(l.confs.at(index).state())}
	return &pb.Snapshot{Metadata: meta}, nil
}

// flushed notes that the state store holds everything up to index, and cuts the
// log so that at most keepEntries and keepBytes stay behind it, never above
// hold. The deletion lies behind the flushed batch in the same write-ahead log,
// so no crash can keep the one without the other.
func (l *logStore) flushed(index, keepEntries, keepBytes, hold uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if index > l.last {
		return fmt.Errorf("raft: the state machine flushed index %d, the log ends at %d", index, l.last)
	}
	l.snapIndex = max(l.snapIndex, index)
	to := uint64(0)
	if index > keepEntries {
		to = index - keepEntries
	}
	n := sort.Search(len(l.marks), func(n int) bool { return l.appended-l.marks[n].bytes <= keepBytes })
	if n > 0 {
		to = max(to, l.marks[n-1].index)
	}
	to = min(to, index, hold)
	if to <= l.base.index || to-l.base.index < keepEntries/truncateFraction && n < truncateMarks {
		return nil
	}
	return l.truncate(to)
}

// A truncation is a range tombstone; cutting a tenth of what is kept at a time
// makes them rare.
const (
	truncateFraction = 10
	truncateMarks    = 16 // of logMarkBytes: 4 MiB
)

// truncate drops entries up to and including index.
func (l *logStore) truncate(index uint64) error {
	term, err := l.term(index)
	if err != nil {
		return fmt.Errorf("raft: truncate at %d: %w", index, err)
	}
	chain, err := l.chainAt(index)
	if err != nil {
		return err
	}
	base := logBase{index: index, term: term, chain: chain}
	b := l.db.NewBatch()
	_ = b.DeleteRange(logKey(l.base.index+1), logKey(index+1), nil) // fails only on an indexed batch
	putBase(b, base)
	l.confs.prune(b, min(index, l.snapIndex))
	if err := errors.Join(b.Commit(pebble.NoSync), b.Close()); err != nil {
		return fmt.Errorf("raft: truncate the log: %w", err)
	}
	l.base = base
	n := sort.Search(len(l.runs), func(n int) bool { return l.runs[n].index > index })
	l.runs = l.runs[n-1:]
	l.runs[0].index = index
	for len(l.cache) > 0 && l.cache[0].GetIndex() <= index {
		l.cacheBytes -= len(l.cache[0].GetData()) + entryOverhead
		l.cache[0] = nil
		l.cache = l.cache[1:]
	}
	m := sort.Search(len(l.marks), func(n int) bool { return l.marks[n].index > index })
	l.marks = l.marks[max(m-1, 0):]
	return nil
}

// size is the log's length and about its bytes.
func (l *logStore) size() (first, last, bytes uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.marks) > 0 {
		bytes = l.appended - l.marks[0].bytes
	}
	return l.base.index + 1, l.last, bytes
}
