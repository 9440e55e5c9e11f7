package raft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Key prefixes of the one Pebble database. They are on disk: never renumber.
const (
	prefixMeta  = 0x01 // identity, hard state, log base
	prefixLog   = 0x02 // prefixLog, index (8 bytes big-endian) -> entry
	prefixConf  = 0x03 // prefixConf, index (8 bytes big-endian) -> configuration as of that index
	prefixState = 0x10 // everything of the state machine, replaced as a whole by a snapshot
	// Inside the state range: the mark of the last installed snapshot, and the machine's own keys.
	stateMark = 0x00
	stateData = 0x01
)

var (
	keyIdentity = []byte{prefixMeta, 'i'}
	keyHard     = []byte{prefixMeta, 'h'}
	keyBase     = []byte{prefixMeta, 'b'}
	keyRestored = []byte{prefixMeta, 'r'}
	keyMark     = []byte{prefixState, stateMark}
	stateLow    = []byte{prefixState}
	stateHigh   = []byte{prefixState + 1}
	logLow      = []byte{prefixLog}
	logHigh     = []byte{prefixLog + 1}
)

// formatVersion is Pebble's on-disk format. 024 is the newest of v2.1.7: it is
// past what IngestAndExcise needs (016), what makes write-ahead logs detect rot
// between syncs (020), and nothing older has to read our stores. It ratchets one
// way; raise it one release after every member can read the new one.
const formatVersion = pebble.FormatValueSeparation

// Pebble's settings, where its own defaults are for a small embedded store.
const (
	defaultCacheBytes    = 256 << 20 // block cache: an index of 10^7 records has hot blocks of about this size
	defaultMemTableBytes = 64 << 20  // a flush interval at 300k entries/s fits
	memTableStop         = 4         // 4 x 64 MiB absorb one slow flush without stalling writers
	l0CompactionFiles    = 500       // Pebble's default; sublevels, not files, drive compactions here
	l0CompactionTrigger  = 4         // sublevels
	l0StopWrites         = 32        // sublevels: Pebble's 12 stalls a burst that compactions would absorb
	maxOpenFiles         = 4096      // of the store alone; the process needs LimitNOFILE above it
	walBytesPerSync      = 512 << 10 // smooths large appends; small ones are synced anyway
	defaultBallastBytes  = 64 << 20  // freed at ENOSPC: room for one memtable flush
	defaultMinFreeBytes  = 1 << 30   // 16 memtables: hours for an operator, long before Pebble hangs
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// StoreOptions configures a Store. The zero value is for production on the
// operating system's files.
type StoreOptions struct {
	// FS is the file system, nil for the operating system's.
	FS vfs.FS
	// Logger gets the store's messages, nil for none.
	Logger *slog.Logger
	// CacheBytes is the block cache's size; 0 is 256 MiB. Without cgo it is Go heap: count it in GOMEMLIMIT.
	CacheBytes int64
	// MemTableBytes is the size of one memtable; 0 is 64 MiB. Four may exist.
	MemTableBytes uint64
	// BallastBytes is the size of a file that is given up when the disk is full; 0 is 64 MiB, negative for none.
	BallastBytes int64
	// MinFreeBytes of disk space are kept: below, ErrDiskFull; 0 is 1 GiB.
	MinFreeBytes uint64
	// FailStop is called, at most once, when the store can no longer be trusted; it may be called from any
	// goroutine, also while the store holds locks, and must not call the store. Nil logs and exits the process.
	FailStop func(error)
	// DisableAutomaticCompactions makes runs repeat exactly; for simulators.
	DisableAutomaticCompactions bool
	// CompactionScheduler says when a compaction may run, nil for as soon as there is need; for simulators, too. With one,
	// tables are not read for statistics in the background either, and what failed there is not tried again once FailStop
	// has returned: a store that has failed cannot be closed then.
	CompactionScheduler pebble.CompactionScheduler
	// LogCacheBytes bounds the recent log entries kept in memory; 0 is 16 MiB.
	LogCacheBytes int
}

// Store is one Pebble database under a directory, with the witness beside it:
// raft log, hard state and configuration, and under its own key prefix the state
// machine's records. It is safe for concurrent use except where said.
type Store struct {
	dir    string
	fs     vfs.FS // unwrapped
	db     *pebble.DB
	cache  *pebble.Cache
	opts   *pebble.Options
	log    *logStore
	wit    *witness
	health health
	logger *slog.Logger
	slow   io.Closer // of the disk health checker

	closeOnce sync.Once
	closeErr  error
	spoolSeq  uint64 // names spools and checkpoints; guarded by spoolMu
	spoolMu   sync.Mutex

	id    identity
	holds holds
}

// OpenStore opens the store in dir, creating it if there is none, and verifies
// every log entry it holds. It returns a CorruptionError or a LostDataError if
// the disk lost something. A new store belongs to nobody until Bootstrap or Join.
func OpenStore(dir string, o StoreOptions) (*Store, error) {
	o = withDefaults(o)
	o.FS = aheadFS{withFailpoints(o.FS)}
	s := &Store{dir: dir, fs: o.FS, logger: o.Logger}
	s.health.init(s, &o)
	if err := s.fs.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("raft: create data directory %s: %w", dir, err)
	}
	if err := syncDir(s.fs, s.fs.PathDir(dir)); err != nil { // a new directory's name must survive too
		return nil, err
	}
	for _, tmp := range []string{"spool", "checkpoints"} { // leftovers of a crash
		if err := s.fs.RemoveAll(s.path(tmp)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("raft: remove %s: %w", s.path(tmp), err)
		}
	}
	if err := s.openDB(&o); err != nil {
		return nil, err
	}
	if err := s.load(o.LogCacheBytes); err != nil {
		return nil, errors.Join(err, s.closeFiles())
	}
	return s, nil
}

// withDefaults fills in what the caller left open.
func withDefaults(o StoreOptions) StoreOptions {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = defaultCacheBytes
	}
	if o.MemTableBytes == 0 {
		o.MemTableBytes = defaultMemTableBytes
	}
	if o.BallastBytes == 0 {
		o.BallastBytes = defaultBallastBytes
	}
	if o.MinFreeBytes == 0 {
		o.MinFreeBytes = defaultMinFreeBytes
	}
	if o.LogCacheBytes == 0 {
		o.LogCacheBytes = defaultLogCacheBytes
	}
	return o
}

func (s *Store) path(name string) string { return s.fs.PathJoin(s.dir, name) }

// openDB opens Pebble. A new database's first write-ahead log is opened before
// its format is raised and would not detect rot; the flush retires that log.
func (s *Store) openDB(o *StoreOptions) error {
	dbDir := s.path("db")
	_, err := s.fs.Stat(s.fs.PathJoin(dbDir, "LOCK"))
	fresh := errors.Is(err, os.ErrNotExist)
	s.opts, s.cache = s.pebbleOptions(o)
	db, err := pebble.Open(dbDir, s.opts)
	if err != nil {
		s.cache.Unref()
		if pebble.IsCorruptionError(err) {
			err = &CorruptionError{What: "the database " + dbDir, Cause: err}
		}
		return errors.Join(fmt.Errorf("raft: open %s: %w", dbDir, err), s.slow.Close())
	}
	s.db = db
	if fresh {
		if err := errors.Join(db.Flush(), syncDir(s.fs, s.dir)); err != nil {
			return errors.Join(fmt.Errorf("raft: retire the first log of %s: %w", dbDir, err), s.closeFiles())
		}
	}
	return nil
}

func (s *Store) pebbleOptions(o *StoreOptions) (*pebble.Options, *pebble.Cache) {
	cache := pebble.NewCache(o.CacheBytes)
	fs, closer := vfs.WithDiskHealthChecks(o.FS, diskSlowAfter, nil, s.health.diskSlow)
	s.slow = closer
	if o.BallastBytes > 0 {
		fs = vfs.OnDiskFull(fs, s.health.diskFull)
	}
	opts := &pebble.Options{
		FS:                          fs,
		Cache:                       cache,
		FormatMajorVersion:          formatVersion,
		MemTableSize:                o.MemTableBytes,
		MemTableStopWritesThreshold: memTableStop,
		L0CompactionFileThreshold:   l0CompactionFiles,
		L0CompactionThreshold:       l0CompactionTrigger,
		L0StopWritesThreshold:       l0StopWrites,
		MaxOpenFiles:                maxOpenFiles,
		WALBytesPerSync:             walBytesPerSync,
		CompactionConcurrencyRange:  func() (int, int) { return 1, 2 },
		DisableAutomaticCompactions: o.DisableAutomaticCompactions,
		DisableTableStats:           o.CompactionScheduler != nil,
		Logger:                      &pebbleLogger{s: s},
		EventListener:               s.health.listener(),
	}
	opts.Experimental.CompactionScheduler = o.CompactionScheduler
	opts.EnsureDefaults()
	return opts, cache
}

// Flush begins to write what is in memory alone to tables, in the background, before memory is full. A simulator has it
// done at times that repeat: when memory is full depends on random numbers of Pebble's.
func (s *Store) Flush() error {
	if _, err := s.db.AsyncFlush(); err != nil {
		return fmt.Errorf("raft: flush: %w", err)
	}
	return nil
}

// load reads identity, witness and log, and compares them.
func (s *Store) load(cacheBytes int) error {
	id, ok, err := s.readIdentity()
	if err != nil {
		return err
	}
	s.log = newLogStore(s.db, cacheBytes)
	wit, found, err := openWitness(s.fs, s.path("witness"))
	if err != nil {
		return err
	}
	s.wit = wit
	if !ok { // belongs to nobody yet: Bootstrap or Join starts over
		if w := wit.last(); w.index > 0 || w.vote != 0 || w.term > bootTerm {
			return &LostDataError{Want: w.index, Detail: "the database is gone, the witness file is not"}
		}
		return nil
	}
	s.id = id
	if !found {
		return &LostDataError{Detail: "the witness file is missing"}
	}
	if err := s.finishInstall(); err != nil {
		return err
	}
	if err := s.log.load(); err != nil {
		return err
	}
	return s.checkWitness()
}

// checkWitness refuses a log that is shorter than the witness has seen, and
// takes over a newer term and vote, which the witness holds before the log does.
func (s *Store) checkWitness() error {
	w := s.wit.last()
	if w.index > s.log.last {
		return &LostDataError{Have: s.log.last, Want: w.index, Detail: "witness file"}
	}
	if w.index >= s.log.base.index && w.index > 0 {
		term, err := s.log.Term(w.index)
		if err != nil {
			return fmt.Errorf("raft: term of the witnessed index %d: %w", w.index, err)
		}
		if term != w.indexTerm {
			return &LostDataError{
				Have: s.log.last, Want: w.index,
				Detail: fmt.Sprintf("entry %d has term %d, the witness saw %d", w.index, term, w.indexTerm),
			}
		}
	}
	h := &s.log.hard
	switch {
	case w.term > h.term, w.term == h.term && h.vote == 0:
		h.term, h.vote = w.term, w.vote
	case w.term == h.term && w.vote != 0 && w.vote != h.vote:
		return &LostDataError{
			Have: s.log.last, Want: w.index,
			Detail: fmt.Sprintf("vote of term %d is %x, the witness saw %x", w.term, h.vote, w.vote),
		}
	}
	return nil
}

// Close writes the witness, closes the database and releases everything. Nothing
// may use the store at the same time or later.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		var err error
		if s.id.member != 0 && !s.health.failed.Load() {
			err = s.syncWitness()
		}
		s.closeErr = errors.Join(err, s.closeFiles())
	})
	return s.closeErr
}

func (s *Store) closeFiles() error {
	var errs []error
	if s.wit != nil {
		errs = append(errs, s.wit.close())
	}
	if s.db != nil {
		errs = append(errs, s.db.Close())
		s.cache.Unref()
	}
	errs = append(errs, s.slow.Close())
	return errors.Join(errs...)
}

// get copies the value of key.
func (s *Store) get(key []byte) ([]byte, bool, error) {
	v, closer, err := s.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, readError("a record", 0, err)
	}
	v = append([]byte(nil), v...)
	return v, true, closer.Close()
}

// readError makes a CorruptionError of what Pebble calls corruption.
func readError(what string, index uint64, err error) error {
	if pebble.IsCorruptionError(err) {
		return &CorruptionError{What: what, Index: index, Cause: err}
	}
	return fmt.Errorf("raft: read %s: %w", what, err)
}

// sealed appends the CRC32C of b to it; unseal checks and removes it. All small
// records of the store are kept so.
func sealed(b []byte) []byte {
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func unseal(what string, b []byte) ([]byte, error) {
	n := len(b) - 4
	if n < 0 || binary.BigEndian.Uint32(b[n:]) != crc32.Checksum(b[:n], castagnoli) {
		return nil, &CorruptionError{What: what, Cause: errChecksum}
	}
	return b[:n], nil
}

var errChecksum = errors.New("checksum mismatch")

// diskSlowAfter is when an operation on the disk counts as slow. Below an
// election timeout, so that the counter moves before leadership does.
const diskSlowAfter = 500 * time.Millisecond
