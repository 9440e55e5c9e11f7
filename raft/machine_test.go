package raft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"

	"larder/cxl"
)

// kvMachine is a state machine for tests: commands are "key=value". It keeps its
// state in memory, writes what changed at a flush, and hashes what it applied.
type kvMachine struct {
	mu      sync.Mutex
	st      *StateStore
	kv      map[string]string
	dirty   map[string]struct{}
	applied uint64
	flushed uint64
	hash    uint64 // of every (index, term, data)
	onApply func(index, term uint64, data []byte)
}

var keyApplied = []byte{0}

func newKV(st *StateStore) *kvMachine {
	m := &kvMachine{st: st}
	if err := m.load(); err != nil {
		panic(err)
	}
	return m
}

func (m *kvMachine) load() error {
	m.kv, m.dirty, m.applied, m.hash = map[string]string{}, map[string]struct{}{}, 0, 0
	v, ok, err := m.st.Get(keyApplied)
	if err != nil {
		return err
	}
	if ok {
		m.applied, m.hash = binary.BigEndian.Uint64(v), binary.BigEndian.Uint64(v[8:])
	}
	m.flushed = m.applied
	return m.st.Scan([]byte("k"), func(k, v []byte) error {
		m.kv[string(k[1:])] = string(v)
		return nil
	})
}

func (m *kvMachine) Apply(index, term uint64, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if index != m.applied+1 && m.applied != 0 {
		return fmt.Errorf("applied %d after %d", index, m.applied)
	}
	m.applied = index
	h := fnv.New64a()
	_ = binary.Write(h, binary.BigEndian, []uint64{m.hash, index, term})
	_, _ = h.Write(data)
	m.hash = h.Sum64()
	if k, v, ok := bytes.Cut(data, []byte("=")); ok {
		m.kv[string(k)] = string(v)
		m.dirty[string(k)] = struct{}{}
	}
	if m.onApply != nil {
		m.onApply(index, term, data)
	}
	return nil
}

func (m *kvMachine) Flush() (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.applied == m.flushed {
		return m.applied, nil
	}
	b := m.st.NewBatch()
	for _, k := range slices.Sorted(maps.Keys(m.dirty)) {
		b.Set([]byte("k"+k), []byte(m.kv[k]))
	}
	b.Set(keyApplied, binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, m.applied), m.hash))
	if err := b.Commit(); err != nil {
		return 0, err
	}
	clear(m.dirty)
	m.flushed = m.applied
	return m.applied, nil
}

func (m *kvMachine) Restored(index uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.load(); err != nil {
		return err
	}
	if m.applied != index && m.applied != 0 {
		return fmt.Errorf("restored %d, found %d", index, m.applied)
	}
	return nil
}

func (m *kvMachine) Applied() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.applied
}

func (m *kvMachine) get(k string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.kv[k]
}

func (m *kvMachine) size() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.kv)
}

func boottime() int64 { return cxl.Boottime() }
