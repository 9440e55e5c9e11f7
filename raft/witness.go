package raft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// witnessSlot is the distance of the two slots: a disk block, so that a write
// torn by power loss damages at most the slot it was for.
const witnessSlot = 4096

const witnessMagic = 0x4c52_5749_544e_4531 // "LRWITNE1"

// witnessRecord is what a slot holds: the newest term and vote, and the index and
// term of an entry that was durable in the log when the record was written.
type witnessRecord struct {
	seq, term, vote, index, indexTerm uint64
}

const witnessBytes = 6*8 + 4 // magic, five numbers, CRC32C

// witness is a small file outside Pebble that remembers how far the log had got.
// It protects against what a write-ahead log cannot notice by itself: that its
// tail is gone. Term and vote are written here before they are written to the
// log, so that a lost tail cannot make a member vote twice. Indexes are written
// here only after the log has them on disk, so that power loss between the two
// cannot make a sound log look short.
//
// Why not with every append: a second fsync, even beside the log's, made appends
// 15 to 70% slower (BenchmarkAppendWitness), while one every [witnessInterval]
// costs nothing that can be measured.
//
// It is used by one goroutine at a time.
type witness struct {
	f   vfs.File
	cur witnessRecord
}

// openWitness opens or creates the file; found is false if neither slot was ever
// written.
func openWitness(fs vfs.FS, name string) (w *witness, found bool, err error) {
	_, err = fs.Stat(name)
	fresh := errors.Is(err, os.ErrNotExist)
	f, err := fs.OpenReadWrite(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, false, fmt.Errorf("raft: open witness %s: %w", name, err)
	}
	w = &witness{f: f}
	if fresh {
		if err = w.create(fs, name); err != nil {
			return nil, false, errors.Join(err, f.Close())
		}
		return w, false, nil
	}
	found, err = w.read()
	if err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	return w, found, nil
}

// create allocates both slots, so that later syncs need not write metadata.
func (w *witness) create(fs vfs.FS, name string) error {
	if _, err := w.f.WriteAt(make([]byte, 2*witnessSlot), 0); err != nil {
		return fmt.Errorf("raft: allocate witness: %w", err)
	}
	if err := w.f.Sync(); err != nil {
		return fmt.Errorf("raft: sync witness: %w", err)
	}
	return syncDir(fs, fs.PathDir(name))
}

// syncDir makes the names in dir durable.
func syncDir(fs vfs.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return fmt.Errorf("raft: open %s: %w", dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("raft: sync %s: %w", dir, err)
	}
	return nil
}

// read takes the newer of the valid slots. One damaged slot is a torn write if
// the other is valid; the record it would have held was never relied on. Two
// damaged ones are not.
func (w *witness) read() (found bool, err error) {
	blank := 0
	for i := range int64(2) {
		b := make([]byte, witnessBytes)
		n, err := w.f.ReadAt(b, i*witnessSlot)
		if n < len(b) {
			if n == 0 { // created, but the crash came before the slots were durable
				blank++
				continue
			}
			return false, &CorruptionError{What: "the witness file", Cause: err}
		}
		if isZero(b) {
			blank++
			continue
		}
		if r, ok := decodeWitness(b); ok && (!found || r.seq > w.cur.seq) {
			w.cur, found = r, true
		}
	}
	if !found && blank < 2 {
		return false, &CorruptionError{What: "the witness file", Cause: errChecksum}
	}
	return found, nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func decodeWitness(b []byte) (witnessRecord, bool) {
	b, err := unseal("witness", b)
	if err != nil || len(b) != witnessBytes-4 || binary.BigEndian.Uint64(b) != witnessMagic {
		return witnessRecord{}, false
	}
	u := func(i int) uint64 { return binary.BigEndian.Uint64(b[8*i:]) }
	return witnessRecord{seq: u(1), term: u(2), vote: u(3), index: u(4), indexTerm: u(5)}, true
}

// last is the newest record.
func (w *witness) last() witnessRecord { return w.cur }

// write makes r durable, in the slot that does not hold the newest record.
func (w *witness) write(r witnessRecord) error {
	r.seq = w.cur.seq + 1
	b := make([]byte, 0, witnessBytes)
	for _, v := range [...]uint64{witnessMagic, r.seq, r.term, r.vote, r.index, r.indexTerm} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	b = sealed(b)
	if _, err := w.f.WriteAt(b, int64(r.seq%2)*witnessSlot); err != nil {
		return fmt.Errorf("raft: write witness: %w", err)
	}
	if err := w.f.SyncData(); err != nil {
		return fmt.Errorf("raft: sync witness: %w", err)
	}
	w.cur = r
	return nil
}

func (w *witness) close() error { return w.f.Close() }

// syncWitness records how far the log is durable, if that has moved.
func (s *Store) syncWitness() error {
	index, term := s.log.durable()
	hard := s.log.hardState()
	r := witnessRecord{term: hard.term, vote: hard.vote, index: index, indexTerm: term}
	cur := s.wit.last()
	if cur.term == r.term && cur.vote == r.vote && cur.index == r.index && cur.indexTerm == r.indexTerm {
		return nil
	}
	return s.wit.write(r)
}
