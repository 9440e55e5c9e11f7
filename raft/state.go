package raft

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// StateStore is the state machine's key range of a Store. Writes are atomic by
// batch and not synced: after a crash the range holds what some prefix of the
// committed batches wrote. It is safe for concurrent use, but a snapshot that is
// installed replaces everything; see Machine.Restored.
type StateStore struct{ s *Store }

// State gives the state machine's records.
func (s *Store) State() *StateStore { return &StateStore{s: s} }

// stateKey puts a key of the machine into its range.
func stateKey(key []byte) []byte {
	k := make([]byte, 0, 2+len(key))
	return append(append(k, prefixState, stateData), key...)
}

// stateEnd is the end of the machine's keys that start with prefix.
func stateEnd(prefix []byte) []byte {
	end := stateKey(prefix)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] != 0xff {
			end[i]++
			return end[:i+1]
		}
	}
	return stateHigh
}

// Scan calls fn for every key that starts with prefix, ascending. The slices are
// valid during the call only. The first error ends it and is returned as it is.
func (t *StateStore) Scan(prefix []byte, fn func(key, value []byte) error) error {
	it, err := t.s.db.NewIter(&pebble.IterOptions{LowerBound: stateKey(prefix), UpperBound: stateEnd(prefix)})
	if err != nil {
		return readError("the state", 0, err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err == nil {
			err = fn(it.Key()[2:], v)
		}
		if err != nil {
			_ = it.Close() // err is the one to report
			return err
		}
	}
	if err := it.Close(); err != nil { // Close returns Error
		return readError("the state", 0, err)
	}
	return nil
}

// Get copies the value of key; false means that there is none.
func (t *StateStore) Get(key []byte) (value []byte, found bool, err error) {
	return t.s.get(stateKey(key))
}

// NewBatch starts an atomic change. It is used by one goroutine.
func (t *StateStore) NewBatch() *StateBatch { return &StateBatch{b: t.s.db.NewBatch()} }

// StateBatch collects writes that become visible together.
type StateBatch struct {
	b *pebble.Batch
	n int
}

// Set writes a record. The slices are copied.
func (b *StateBatch) Set(key, value []byte) {
	op := b.b.SetDeferred(2+len(key), len(value))
	op.Key[0], op.Key[1] = prefixState, stateData
	copy(op.Key[2:], key)
	copy(op.Value, value)
	_ = op.Finish() // fails only on an indexed batch
	b.n++
}

// Delete removes a record if it is there.
func (b *StateBatch) Delete(key []byte) {
	op := b.b.DeleteDeferred(2 + len(key))
	op.Key[0], op.Key[1] = prefixState, stateData
	copy(op.Key[2:], key)
	_ = op.Finish() // fails only on an indexed batch
	b.n++
}

// DeleteRange removes lo <= key < hi in one step.
func (b *StateBatch) DeleteRange(lo, hi []byte) {
	_ = b.b.DeleteRange(stateKey(lo), stateKey(hi), nil) // fails only on an indexed batch
	b.n++
}

// Len is the number of writes collected.
func (b *StateBatch) Len() int { return b.n }

// Commit writes the batch, unsynced, and ends it.
func (b *StateBatch) Commit() error {
	err := b.b.Commit(pebble.NoSync)
	if err != nil {
		return fmt.Errorf("raft: write state: %w", err)
	}
	return b.b.Close()
}
