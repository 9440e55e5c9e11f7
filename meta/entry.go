package meta

import (
	"bytes"
	"hash/maphash"

	"github.com/zeebo/xxh3"

	"larder/meta/policy"
)

// entry is one key and where its bytes lie. It has no pointers, so that ten million of them cost the garbage
// collector nothing, and takes 128 bytes.
type entry struct {
	birth    uint64 // unique and increasing; 0 = the slot is free
	offset   uint64 // in the region
	checksum uint64
	hash     uint64 // prefix hash, if flagPrefix
	expires  uint64 // log time in ms; 0 = by the pool's default
	added    uint64 // log time in ms
	stamp    int64  // policy.Order
	key      uint32 // keyArena
	length   uint32
	region   handle // of its region
	ctx      handle // of its context
	aux      uint32 // policy.Order
	links    policy.Links
	rprev    Slot // entries of the same region
	rnext    Slot
	hnext    Slot // entries whose keys have the same hash
	pnext    Slot // entries with the same prefix hash
	parent   Slot // of the prefix; valid only while born before this entry
	children uint32
	index    uint32
	group    uint32
	places   placeID // other locations, see place
	keyLen   uint16
	pins     uint16 // hard pins
	list     uint8  // policy.Order
	flags    uint8
	used     uint8 // uses in the slowest tier since it fell there: a hint, not part of the state
	want     uint8 // on how many nodes it is to lie, see replicas.go; 0 = on one
}

const (
	flagPrefix = 1 << iota
	flagSoft
	flagMoved  // the primary is the first place: where the entry was registered it does not lie any more, or as a copy
	flagPlaces // of records only: places follow
	flagWant   // of records only: want follows
)

const (
	slabBits = 12 // 4096 entries, 512 KiB, are allocated at a time
	slabSize = 1 << slabBits
	slabMask = slabSize - 1
)

// table holds the entries and finds them by key.
type table struct {
	slabs []*[slabSize]entry
	slots slotSet
	end   Slot // all slots that were ever taken are below
	count uint64
	keys  keyArena
	// index maps the hash of a key to the first entry with that hash; the others follow by hnext. The hash is seeded
	// per process, so that nobody can choose keys that collide; nothing that leaves the machine depends on it.
	index map[uint64]Slot
	seed  maphash.Seed
}

func newTable() table {
	return table{index: map[uint64]Slot{}, seed: maphash.MakeSeed()}
}

func (t *table) at(s Slot) *entry { return &t.slabs[s>>slabBits][s&slabMask] }

// live reports whether s is a taken slot.
func (t *table) live(s Slot) bool { return s < t.end && t.at(s).birth != 0 }

func (t *table) key(e *entry) []byte { return t.keys.at(e.key, int(e.keyLen)) }

// hashOf is the hash of a tenant's key in the index.
func (t *table) hashOf(salt uint64, key []byte) uint64 { return maphash.Bytes(t.seed, key) ^ salt }

// find returns the entry of a tenant's key.
func (m *Machine) find(t *tenant, key []byte) (Slot, bool) {
	s, ok := m.table.index[m.table.hashOf(t.salt, key)]
	if !ok {
		return None, false
	}
	return m.findFrom(s, t, key)
}

// findFrom looks for a tenant's key among the entries that share a hash, from the first on.
func (m *Machine) findFrom(s Slot, t *tenant, key []byte) (Slot, bool) {
	for s != None {
		x := m.table.at(s)
		if bytes.Equal(m.table.key(x), key) && m.contextOf(x).tenant == t {
			return s, true
		}
		s = x.hnext
	}
	return None, false
}

// insert puts an entry for a tenant's key into slot s, which must be free, and returns it, otherwise zero. The index is
// asked once, since each time costs a cache miss or two: that the hash was there already shows in its length.
func (m *Machine) insert(s Slot, owner *tenant, key []byte) *entry {
	t := &m.table
	t.slots.take(s)
	t.reach(s + 1)
	t.count++
	e := t.at(s)
	*e = entry{
		key: t.keys.put(key), keyLen: uint16(len(key)), //nolint:gosec // at most protocol.MaxKeyBytes
		links: policy.Links{Colder: None, Hotter: None},
		rprev: None, rnext: None, hnext: None, pnext: None, parent: None,
	}
	h, n := t.hashOf(owner.salt, key), len(t.index)
	if t.index[h] = s; len(t.index) == n {
		e.hnext = m.twin(s, h)
	}
	return e
}

// twin finds the first entry that hash h led to before slot s took its place. It looks at every slot: that any two of a
// billion keys share a hash of 64 bits happens in one of forty pools.
func (m *Machine) twin(s Slot, h uint64) Slot {
	var twins []Slot
	behind := map[Slot]bool{}
	for i := range m.table.end {
		x := m.table.at(i)
		if i == s || x.birth == 0 || m.table.hashOf(m.contextOf(x).tenant.salt, m.table.key(x)) != h {
			continue
		}
		twins = append(twins, i)
		behind[x.hnext] = true
	}
	for _, i := range twins {
		if !behind[i] {
			return i
		}
	}
	return None
}

// reach makes room for the slots below end. How far a table ever reached is part of the state: sweeps go that far.
func (t *table) reach(end Slot) {
	for int(end) > len(t.slabs)*slabSize {
		t.slabs = append(t.slabs, new([slabSize]entry))
	}
	t.end = max(t.end, end)
}

// remove takes the entry of slot s out of the index and frees the slot.
func (t *table) remove(s Slot, salt uint64) {
	e := t.at(s)
	h := t.hashOf(salt, t.key(e))
	if first := t.index[h]; first != s {
		p := t.at(first)
		for p.hnext != s {
			p = t.at(p.hnext)
		}
		p.hnext = e.hnext
	} else if e.hnext != None {
		t.index[h] = e.hnext
	} else {
		delete(t.index, h)
	}
	t.keys.drop(e.key, int(e.keyLen))
	*e = entry{}
	t.slots.free(s)
	t.count--
}

// entryHash sums up what must be equal on every replica about an entry, except its order.
func (m *Machine) entryHash(s Slot, e *entry) uint64 {
	h := xxh3.HashSeed(m.table.key(e), uint64(s)+1)
	for _, v := range [...]uint64{
		e.birth, e.offset, e.checksum, e.hash, e.expires, e.added,
		uint64(e.length)<<32 | uint64(m.regionOf(e).id), uint64(m.contextOf(e).id)<<32 | uint64(e.index),
		uint64(e.group)<<32 | uint64(e.pins)<<16 | uint64(e.want)<<8 | uint64(e.flags), uint64(e.parent),
	} {
		h = mix(h ^ v)
	}
	return m.placesHash(h, e)
}

// place is the entry's order with its parity.
func (x *entry) place() policy.Order { return policy.Order{Stamp: x.stamp, Aux: x.aux, List: x.list} }

// orderHash sums up an entry's place.
func orderHash(s Slot, o policy.Order) uint64 {
	return mix(mix(uint64(s)+0x9e3779b97f4a7c15) ^ uint64(o.Stamp) ^ mix(uint64(o.Aux)<<8|uint64(o.List))) //nolint:gosec // bits, not a number
}

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood, 2014): every input bit reaches every output bit.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// handle is how an entry refers to its region and context: a small number of this process, reused, so that an entry
// finds them without a map. It never leaves the machine.
type handle uint32

// handles hands out handles.
type handles[T any] struct {
	at   []*T
	free []handle
}

func (h *handles[T]) put(v *T) handle {
	if n := len(h.free); n > 0 {
		i := h.free[n-1]
		h.free = h.free[:n-1]
		h.at[i] = v
		return i
	}
	h.at = append(h.at, v)
	return handle(len(h.at) - 1) //nolint:gosec // bounded by MaxRegions and MaxContexts
}

func (h *handles[T]) drop(i handle) {
	h.at[i] = nil
	h.free = append(h.free, i)
}

func (m *Machine) regionOf(x *entry) *region         { return m.regionAt.at[x.region] }
func (m *Machine) contextOf(x *entry) *contextRecord { return m.contextAt.at[x.ctx] }
