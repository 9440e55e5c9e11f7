package simtest

import (
	"bytes"
	"slices"

	"github.com/zeebo/xxh3"

	"larder/integration/simtest/model"
	"larder/meta"
	"larder/protocol"
)

// history is the committed log as the first member to apply each entry saw it, and a state machine of its own that
// never restarts and applies each entry once. Whatever members and clients see is compared with it.
type history struct {
	s        *sim
	state    *meta.Machine
	results  meta.Results
	entries  []entryRecord // of index first + i
	first    uint64
	model    reference
	answers  map[seqKey]answer // of mutations that were answered for good
	keys     map[string]keyRecord
	tenant   meta.TenantID
	proposed int64                // when the entry that is being applied was proposed
	raw      [][]byte             // every entry from the first of all on
	base     uint64               // state hash before the first entry
	closed   bool                 // restored, and without an incarnation of its own yet: what it holds must not be served
	at       map[place]string     // which key lies where, of the entries that may be served
	hidden   map[string]keyRecord // entries that may be served again, since a device is away
	unseen   map[string]bool      // keys that were registered, and have not been served yet
	maru     maruHistory
	changes  []model.NameChange // of names, by all entries
	revision uint64             // of the last of them
	moved    map[string]int     // keys that were hidden (-1) or have come back (1) with the entry that is being applied
}

type entryRecord struct {
	data  uint64 // hash of term and data
	state uint64 // state hash after it
	when  int64
}

// seqKey names a request for ever.
type seqKey struct{ session, seq uint64 }

type answer struct {
	kind   meta.Kind
	result []byte
	index  uint64
}

// keyRecord is the entry of a key now.
type keyRecord struct {
	slot  meta.Slot
	birth uint64
	where []meta.Location
	since int64 // when the first member applied what made it
}

// place is a page of a device.
type place struct {
	device meta.DeviceID
	page   uint64
}

// reference is another implementation of the state machine, which is told every entry and what came of it.
type reference interface {
	Apply(index uint64, data []byte, got *meta.Results) error
}

// noStore is an empty store.
type noStore struct{}

// Scan implements meta.Store.
func (noStore) Scan([]byte, func(key, value []byte) error) error { return nil }

func newHistory(s *sim, first uint64) *history {
	state, err := meta.Open(noStore{})
	if err != nil {
		panic(err) // an empty store cannot be wrong
	}
	h := &history{
		s: s, state: state, first: first, answers: map[seqKey]answer{}, keys: map[string]keyRecord{},
		at: map[place]string{}, hidden: map[string]keyRecord{}, unseen: map[string]bool{}, model: newReference(),
	}
	h.tenant = state.Tenant(meta.DefaultTenant)
	return h
}

// last is the index of the last entry.
func (h *history) last() uint64 { return h.first + uint64(len(h.entries)) - 1 }

// committed takes note of an entry that a member applies: the first does it for all, and the others must agree.
func (s *sim) committed(m *member, index, term uint64, data []byte) {
	h := s.log
	sum := xxh3.HashSeed(data, index*0x9e3779b97f4a7c15+term)
	if index < h.first {
		s.fail("log", "member %d applies entry %d, before the first", m.id, index)
		return
	}
	if i := index - h.first; i < uint64(len(h.entries)) {
		if h.entries[i].data != sum {
			s.fail("log", "member %d applies another entry %d than others did: a committed entry was lost", m.id, index)
		}
		return
	}
	if index != h.last()+1 {
		s.fail("log", "member %d applies entry %d, and nobody has applied %d", m.id, index, h.last()+1)
		return
	}
	h.apply(index, sum, data)
	h.noteMaru(term, data)
	s.trace("commit", m.id, sum)
}

// apply applies the next entry.
func (h *history) apply(index, sum uint64, data []byte) {
	s := h.s
	h.results.Reset()
	h.results.WantEffects = true
	h.raw = append(h.raw, bytes.Clone(data))
	incarnation := h.state.Incarnation()
	if err := h.state.Apply(index, data, &h.results); err != nil {
		s.fail("log", "entry %d does not apply: %v", index, err)
		return
	}
	h.entries = append(h.entries, entryRecord{sum, h.state.StateHash(), s.now})
	if err := h.model.Apply(index, data, &h.results); err != nil {
		s.fail("model", "entry %d: %v", index, err)
	}
	h.noteNames()
	if len(data) == 0 {
		return
	}
	h.once(index)
	if h.closed {
		h.closed = h.state.Incarnation() == incarnation
		return
	}
	before := map[string]int64{}
	for key, r := range h.keys {
		before[key] = r.since
	}
	h.scan(index)
	h.proposed = s.proposedAt(index)
	h.tally(before)
}

// once checks that each request is carried out once, and answered the same ever after.
func (h *history) once(index uint64) {
	for i := range h.results.Spans {
		x := &h.results.Spans[i]
		h.s.cover.Commands++
		if x.Session == 0 || x.Seq == 0 {
			continue
		}
		b := h.results.Bytes(x)
		code, _, err := meta.DecodeCode(b)
		if err != nil {
			h.s.fail("once", "entry %d has a result that does not decode", index)
			return
		}
		k := seqKey{uint64(x.Session), x.Seq}
		old, known := h.answers[k]
		switch {
		case x.Remembered && !known:
			h.s.fail("once", "entry %d answers request %d of session %d from memory, and it was never carried out", index,
				x.Seq, x.Session)
		case x.Remembered && !bytes.Equal(b, old.result):
			h.s.fail("once", "entry %d answers request %d of session %d otherwise than entry %d did", index, x.Seq,
				x.Session, old.index)
		case x.Remembered, code.Retryable(), code == protocol.CodeSessionExpired, code == protocol.CodeTooOld,
			code == protocol.CodeCanceled:
		case known:
			h.s.fail("once", "entry %d carries request %d of session %d out again, as entry %d did", index, x.Seq,
				x.Session, old.index)
		default:
			h.answers[k] = answer{x.Kind, append([]byte(nil), b...), index}
		}
	}
}

// scan finds out which keys have come, gone or moved. Keys are few in a simulation.
func (h *history) scan(index uint64) {
	h.moved = map[string]int{}
	for _, key := range h.s.keys {
		slot, found := h.state.Find(h.tenant, []byte(key))
		old, had := h.keys[key]
		if found && had && old.birth == h.state.Birth(slot) && old.slot == slot {
			if slices.Equal(h.state.Locations(slot, nil), old.where) {
				continue
			}
		}
		if had {
			for _, p := range old.places() {
				if h.at[p] == key {
					delete(h.at, p)
				}
			}
			delete(h.keys, key)
			if !found && h.away(&old) {
				h.hidden[key], h.moved[key] = old, -1
			}
		}
		if found {
			r := keyRecord{slot: slot, birth: h.state.Birth(slot), since: h.s.now}
			if had && old.birth == r.birth {
				r.since = old.since
			}
			if was, ok := h.hidden[key]; ok && !had && was.birth == r.birth {
				h.moved[key] = 1
			}
			delete(h.hidden, key)
			r.where = h.state.Locations(slot, nil)
			h.keys[key] = r
			for _, p := range r.places() {
				if other, taken := h.at[p]; taken && other != key {
					if q, there := h.keys[other]; there && q.birth == h.state.Birth(q.slot) && h.state.Live(q.slot) {
						h.s.fail("overlap", "entry %d puts %q into a page of %q", index, key, other)
					}
				}
				h.at[p] = key
			}
		}
	}
}

// places are the pages that an entry takes up, counted from the beginning of its device.
func (r *keyRecord) places() (p []place) {
	for _, l := range r.where {
		from := (l.RegionOffset + l.Offset) / pageSize
		for i := range (l.Length + pageSize - 1) / pageSize {
			p = append(p, place{l.Device, from + i})
		}
	}
	return p
}

// away reports whether an entry that is not served any more lies on a device that may come back.
func (h *history) away(r *keyRecord) bool {
	if h.state.Birth(r.slot) != r.birth {
		return false
	}
	for _, d := range h.state.Devices() {
		if d.Mode != meta.DeviceAway {
			continue
		}
		for _, x := range h.state.Regions() {
			var l meta.Location
			if x.Device == d.ID && h.state.LocationIn(r.slot, x.ID, &l) {
				return true
			}
		}
	}
	return false
}

// checkReplica compares a member's state with the history.
func (s *sim) checkReplica(m *member) {
	if m.silent() || m.master == nil {
		return
	}
	at, hash := m.master.StateHash()
	if at == m.at && hash == m.hash {
		return
	}
	m.at, m.hash = at, hash
	s.compareState(m, at, hash)
}

func (s *sim) compareState(m *member, at, hash uint64) {
	h := s.log
	if at == 0 {
		return
	}
	if at == h.first-1 && h.base != 0 {
		if hash != h.base {
			s.fail("hash", "member %d is restored to another state than the log led to at %d", m.id, at)
		}
		return
	}
	if at > h.last() || at < h.first {
		if at >= h.first || at == 0 {
			s.fail("hash", "member %d has applied %d, and the log ends at %d", m.id, at, h.last())
		}
		return
	}
	s.cover.HashChecks++
	if want := h.entries[at-h.first].state; want != hash {
		s.fail("hash", "member %d has another state at %d than the log leads to", m.id, at)
	}
}
