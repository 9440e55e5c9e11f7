package meta

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/zeebo/xxh3"
)

// maruKey is one key of Maru's. As an entry it has no pointers, so that the garbage collector never looks at it, and it fills a cache
// line of 64 bytes.
type maruKey struct {
	birth                  uint64 // in order of registration, of which there is one with entries; 0 = the slot is free
	region, offset, length uint64 // without their signs
	pins                   uint64
	ref                    uint32 // of the key's bytes
	kind                   uint32 // flags, and how long the key is
	prev, next             Slot   // keys of the same region; 0 = none
	same                   Slot   // keys with the same hash, or slots that are free too; 0 = none
	at                     handle // of the region that it hangs on, if maruHangs
}

// Flags of a maruKey, above the length of its key.
const (
	maruRegionNeg = 1 << (31 - iota)
	maruOffsetNeg
	maruLengthNeg
	maruOdd   // one of its three is no integer: see maruTable.odd
	maruHangs // its region was there when it was registered
	maruOther // its bytes are in the second of maruTable.keys

	maruLengthMask = 1<<24 - 1 // MaxMaruKeyBytes is below
)

// maruTable is all of Maru's keys.
type maruTable struct {
	slabs []*[slabSize]maruKey
	end   Slot // all slots that were ever taken are below; the first is 1
	free  Slot // the first free slot below end; 0 = none
	// keys are the bytes of the keys. New ones go to keys[in]; the other arena is empty, or its keys are on their way out of it:
	// those of slots below moved have left it.
	keys  [2]keyArena
	in    int
	moved Slot // 0 = the other arena is empty
	// index maps the hash of a key to the first slot with that hash; the others follow by same. It is as the one of entries.
	index map[uint64]Slot
	seed  maphash.Seed
	odd   map[Slot][3]MaruInt // locations that are no integers
	count int
	bytes uint64  // of the keys themselves
	size  MaruSum // of what they name
	// dirty are the keys whose records have changed since the last flush. What has gone is in Machine.edits, which come before.
	dirty     []Slot
	dirtyBits []uint64
}

// maruList is the keys of a region, the oldest first.
type maruList struct {
	first, last Slot // 0 = none
	size        MaruSum
}

func newMaruTable() maruTable {
	return maruTable{index: map[uint64]Slot{}, seed: maphash.MakeSeed(), odd: map[Slot][3]MaruInt{}, end: 1}
}

func (t *maruTable) at(s Slot) *maruKey { return &t.slabs[s>>slabBits][s&slabMask] }

func (k *maruKey) has(flag uint32) bool { return k.kind&flag != 0 }

func (t *maruTable) key(k *maruKey) []byte {
	return t.keys[k.arena()].at(k.ref, int(k.kind&maruLengthMask))
}

// arena is which of maruTable.keys has a key's bytes.
func (k *maruKey) arena() int {
	if k.has(maruOther) {
		return 1
	}
	return 0
}

// store puts a key's bytes into the arena of new ones.
func (t *maruTable) store(k *maruKey, key []byte) {
	k.ref = t.keys[t.in].put(key)
	k.kind = k.kind&^(maruOther|maruLengthMask) | uint32(len(key)) //nolint:gosec // at most MaxMaruKeyBytes
	if t.in == 1 {
		k.kind |= maruOther
	}
}

// find returns the slot of a key, 0 if there is none.
func (t *maruTable) find(key []byte) Slot {
	s := t.index[maphash.Bytes(t.seed, key)]
	for s != 0 && string(t.key(t.at(s))) != string(key) {
		s = t.at(s).same
	}
	return s
}

// location is where a key was said to lie.
func (t *maruTable) location(s Slot) (region, offset, length MaruInt) {
	k := t.at(s)
	if k.has(maruOdd) {
		v := t.odd[s]
		return v[0], v[1], v[2]
	}
	return MaruInt{Neg: k.has(maruRegionNeg), Abs: k.region}, MaruInt{Neg: k.has(maruOffsetNeg), Abs: k.offset},
		MaruInt{Neg: k.has(maruLengthNeg), Abs: k.length}
}

// locate sets where a key lies.
func (t *maruTable) locate(s Slot, region, offset, length MaruInt) {
	k := t.at(s)
	if region.Raw+offset.Raw+length.Raw != "" {
		k.kind |= maruOdd
		t.odd[s] = [3]MaruInt{region, offset, length}
		return
	}
	k.region, k.offset, k.length = region.Abs, offset.Abs, length.Abs
	for _, v := range []struct {
		of   MaruInt
		flag uint32
	}{{region, maruRegionNeg}, {offset, maruOffsetNeg}, {length, maruLengthNeg}} {
		if v.of.Neg {
			k.kind |= v.flag
		}
	}
}

// insert puts a key that is not there into a free slot.
func (t *maruTable) insert(key []byte) Slot {
	s := t.free
	if s != 0 {
		t.free = t.at(s).same
	} else {
		s = t.end
		t.end++
		if int(s) >= len(t.slabs)*slabSize {
			t.slabs = append(t.slabs, new([slabSize]maruKey))
		}
	}
	t.pack(len(key))
	h := maphash.Bytes(t.seed, key)
	k := t.at(s)
	*k = maruKey{same: t.index[h]}
	t.store(k, key)
	t.index[h] = s
	t.count++
	t.bytes += uint64(len(key))
	return s
}

// remove frees a slot. When the last key goes, so does all memory.
func (t *maruTable) remove(s Slot) {
	k := t.at(s)
	key := t.key(k)
	h := maphash.Bytes(t.seed, key)
	if first := t.index[h]; first != s {
		p := t.at(first)
		for p.same != s {
			p = t.at(p.same)
		}
		p.same = k.same
	} else if k.same != 0 {
		t.index[h] = k.same
	} else {
		delete(t.index, h)
	}
	t.count--
	t.bytes -= uint64(len(key))
	t.keys[k.arena()].drop(k.ref, len(key))
	if k.has(maruOdd) {
		delete(t.odd, s)
	}
	*k = maruKey{same: t.free}
	t.free = s
	if t.count == 0 && len(t.slabs) > 1 {
		*t = newMaruTable() // what is dirty has gone, and Machine.edits say so
	}
}

const (
	// packedSlots are looked at in one step of packing, for as many of which come and go as there are.
	packedSlots = 64
	// packedBytes are moved then for each byte of the key that made the step necessary, so that long keys cannot outrun it.
	packedBytes = 4
)

// pack keeps the gaps in the arenas small, whatever lengths keys have that come and go: when half of one is gaps, its keys move to
// another, a few with each key of n bytes that comes.
func (t *maruTable) pack(n int) {
	if t.moved == 0 {
		if !t.keys[t.in].wasted(n) {
			return
		}
		t.in, t.moved = 1-t.in, 1
	}
	size := 0
	for looked := 0; t.moved < t.end && (looked < packedSlots || size < packedBytes*n); looked++ {
		if k := t.at(t.moved); k.ref != 0 && k.arena() != t.in {
			key := t.key(k)
			size += len(key)
			t.store(k, key)
		}
		t.moved++
	}
	if t.moved == t.end {
		t.keys[1-t.in], t.moved = keyArena{}, 0
	}
}

// mark has the next flush write a key.
func (t *maruTable) mark(s Slot) {
	var fresh bool
	if t.dirtyBits, fresh = setBit(t.dirtyBits, s); fresh {
		t.dirty = append(t.dirty, s)
	}
}

// maruRegion is the region that a key hangs on, nil if none.
func (m *Machine) maruRegion(k *maruKey) *region {
	if !k.has(maruHangs) {
		return nil
	}
	return m.regionAt.at[k.at]
}

// maruThere reports whether a slot is that of a key, and no device has lost the key's bytes: such a key is as good as gone.
func (m *Machine) maruThere(s Slot) bool {
	if s == 0 {
		return false
	}
	r := m.maruRegion(m.maru.at(s))
	return r == nil || r.sound()
}

// findMaru returns the slot of a key that is there, or 0.
func (m *Machine) findMaru(key []byte) Slot {
	if s := m.maru.find(key); m.maruThere(s) {
		return s
	}
	return 0
}

// addMaru enters a key that is to hang on r, unless that is nil.
func (m *Machine) addMaru(e *MaruEntry, birth, pins uint64, r *region) Slot {
	t := &m.maru
	s := t.insert(e.Key)
	t.locate(s, e.Region, e.Offset, e.Length)
	t.size.add(e.Length, false)
	k := t.at(s)
	k.birth, k.pins = birth, pins
	if r != nil {
		k.kind |= maruHangs
		k.at = r.handle
	}
	m.objectSum += m.maruSum(s)
	return s
}

// hangMaru puts a key that hangs on a region behind all others there.
func (m *Machine) hangMaru(s Slot) {
	t := &m.maru
	k := t.at(s)
	r := m.maruRegion(k)
	if r == nil {
		return
	}
	r.live++
	if k.pins > 0 {
		r.pinned++
	}
	_, _, length := t.location(s)
	r.maru.size.add(length, false)
	if k.prev = r.maru.last; k.prev == 0 {
		r.maru.first = s
	} else {
		t.at(k.prev).next = s
	}
	r.maru.last = s
}

// dropMaru removes a key, and returns its region, which is left as it is, were it empty; nil if it hung on none.
func (m *Machine) dropMaru(s Slot) *region {
	t := &m.maru
	k := t.at(s)
	m.objectSum -= m.maruSum(s)
	m.edits = append(m.edits, edit{key: m.appendMaruKey(nil, k)})
	_, _, length := t.location(s)
	t.size.add(length, true)
	r := m.maruRegion(k)
	if r != nil {
		r.live--
		if k.pins > 0 {
			r.pinned--
		}
		r.maru.size.add(length, true)
		if k.prev == 0 {
			r.maru.first = k.next
		} else {
			t.at(k.prev).next = k.next
		}
		if k.next == 0 {
			r.maru.last = k.prev
		} else {
			t.at(k.next).prev = k.prev
		}
	}
	t.remove(s)
	return r
}

// pinMaru sets how many pins a key has.
func (m *Machine) pinMaru(s Slot, pins uint64) {
	k := m.maru.at(s)
	m.objectSum -= m.maruSum(s)
	if r := m.maruRegion(k); r != nil && (pins > 0) != (k.pins > 0) {
		if pins > 0 {
			r.pinned++
		} else {
			r.pinned--
		}
	}
	k.pins = pins
	m.objectSum += m.maruSum(s)
	m.maru.mark(s)
}

// emptyMaru removes up to limit of the keys of a region, the oldest first, and returns how many.
func (m *Machine) emptyMaru(r *region, limit int) int {
	n := 0
	for ; n < limit && r.maru.first != 0; n++ {
		m.dropMaru(r.maru.first)
		m.stats.Removed[ReasonTaken]++
	}
	return n
}

func (m *Machine) appendMaruKey(b []byte, k *maruKey) []byte {
	return append(append(b, recMaru), m.maru.key(k)...)
}

func (m *Machine) appendMaruValue(b []byte, s Slot) []byte {
	k := m.maru.at(s)
	region, offset, length := m.maru.location(s)
	b = appendMaruInts(b, region, offset, length)
	b = binary.AppendUvarint(binary.AppendUvarint(b, k.birth), k.pins)
	return appendBool(b, k.has(maruHangs))
}

// maruSum is what the record of a key contributes to Machine.objectSum.
func (m *Machine) maruSum(s Slot) uint64 {
	m.scratch = m.appendMaruKey(m.scratch[:0], m.maru.at(s))
	h := xxh3.Hash(m.scratch)
	m.scratch = m.appendMaruValue(m.scratch[:0], s)
	return xxh3.HashSeed(m.scratch, h)
}

// flushMaru writes the records that have changed.
func (m *Machine) flushMaru(b Batch, key, value []byte) {
	t := &m.maru
	for _, s := range t.dirty {
		t.dirtyBits[s/64] &^= 1 << (s % 64)
		if k := t.at(s); k.birth != 0 {
			key, value = m.appendMaruKey(key[:0], k), m.appendMaruValue(value[:0], s)
			b.Set(key, value)
		}
	}
	t.dirty = t.dirty[:0]
}

// loadMaru reads Maru's keys, and has those of each region follow each other as they were registered.
func (m *Machine) loadMaru(store Store) error {
	var slots []Slot
	if err := store.Scan([]byte{recMaru}, func(key, value []byte) error {
		d := decoder{b: value}
		e := MaruEntry{Key: key[1:]}
		decodeMaruInts(&d, &e.Region, &e.Offset, &e.Length)
		birth, pins, hangs := d.uvarint(), d.uvarint(), d.bool()
		bad := d.end() != nil || len(e.Key) > MaxMaruKeyBytes || birth == 0 || birth > m.head.births
		var r *region
		if hangs {
			r = m.regions[RegionID(e.Region.Abs)]
			bad = bad || r == nil || e.Region.Neg || e.Region.Raw != ""
		}
		if bad {
			return fmt.Errorf("record %q: %w", key, ErrCorrupt)
		}
		slots = append(slots, m.addMaru(&e, birth, pins, r))
		return nil
	}); err != nil {
		return err
	}
	slices.SortFunc(slots, func(a, b Slot) int { return cmp.Compare(m.maru.at(a).birth, m.maru.at(b).birth) })
	for _, s := range slots {
		m.hangMaru(s)
	}
	return nil
}
