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

// Bounds of Scan's reading ahead.
const (
	scanChunk = 256 << 10 // bytes of records that are handed over at a time
	scanAhead = 4         // chunks that may wait
)

// scanned is a run of records in one piece of memory.
type scanned struct {
	data []byte
	ends []int // of key, value, key, value ...
	err  error
}

// Scan calls fn for every key that starts with prefix, ascending. The slices are
// valid during the call only. The first error ends it and is returned as it is.
// Reading goes on in the background while fn works, since a rebuild of millions of
// records is bound by the sum of both otherwise.
func (t *StateStore) Scan(prefix []byte, fn func(key, value []byte) error) error {
	it, err := t.s.db.NewIter(&pebble.IterOptions{LowerBound: stateKey(prefix), UpperBound: stateEnd(prefix)})
	if err != nil {
		return readError("the state", 0, err)
	}
	chunks, stop, done := make(chan *scanned, scanAhead), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		readAhead(it, chunks, stop)
	}()
	defer func() {
		close(stop)
		<-done
	}()
	for c := range chunks {
		at := 0
		for i := 0; i < len(c.ends); i += 2 {
			key, value := c.data[at:c.ends[i]], c.data[c.ends[i]:c.ends[i+1]]
			at = c.ends[i+1]
			if err := fn(key, value); err != nil {
				return err
			}
		}
		if c.err != nil {
			return readError("the state", 0, c.err)
		}
	}
	return nil
}

// readAhead reads all records of it in chunks, until stop is closed, and closes it.
func readAhead(it *pebble.Iterator, chunks chan<- *scanned, stop <-chan struct{}) {
	defer close(chunks)
	c := &scanned{}
	send := func() bool {
		select {
		case chunks <- c:
			c = &scanned{data: make([]byte, 0, scanChunk+1024), ends: make([]int, 0, len(c.ends)+64)}
			return true
		case <-stop:
			return false
		}
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			break // Close returns it
		}
		c.data = append(c.data, it.Key()[2:]...)
		c.ends = append(c.ends, len(c.data))
		c.data = append(c.data, v...)
		c.ends = append(c.ends, len(c.data))
		if len(c.data) >= scanChunk && !send() {
			_ = it.Close() // the reader has an error of its own
			return
		}
	}
	if c.err = it.Close(); c.err != nil || len(c.ends) > 0 {
		send()
	}
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
