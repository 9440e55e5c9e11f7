package meta

import "github.com/zeebo/xxh3"

// object is embedded by everything of the state that has a record of its own in the store, apart from entries, which
// are too many for it. It keeps the record's part in the state hash.
type object struct {
	sum     uint64 // what the record contributes to Machine.objectSum
	stale   bool   // changed since sum was computed
	pending bool   // changed since the last flush
	dead    bool   // to be removed from the store
}

func (o *object) obj() *object { return o }

// record is an object that knows its key and value in the store.
type record interface {
	obj() *object
	appendKey(b []byte) []byte
	appendValue(b []byte) []byte
	load(key, value *decoder)
}

// changed notes that r has to be hashed and flushed again. Changing twice costs nothing.
func (m *Machine) changed(r record) {
	o := r.obj()
	if !o.stale {
		o.stale = true
		m.stale = append(m.stale, r)
	}
}

// gone notes that r is no longer part of the state.
func (m *Machine) gone(r record) {
	r.obj().dead = true
	m.changed(r)
}

// refresh brings the object part of the state hash up to date, and queues what has changed for the next flush.
func (m *Machine) refresh() {
	for _, r := range m.stale {
		o := r.obj()
		o.stale = false
		m.objectSum -= o.sum
		o.sum = 0
		if !o.dead {
			o.sum = m.recordSum(r)
			m.objectSum += o.sum
		}
		if !o.pending {
			o.pending = true
			m.pending = append(m.pending, r)
		}
	}
	clear(m.stale)
	m.stale = m.stale[:0]
}

func (m *Machine) recordSum(r record) uint64 {
	m.scratch = r.appendKey(m.scratch[:0])
	h := xxh3.Hash(m.scratch)
	m.scratch = r.appendValue(m.scratch[:0])
	return xxh3.HashSeed(m.scratch, h)
}
