package meta

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"larder/meta/policy"
	"larder/protocol"
)

// Store is where the state is kept between restarts.
type Store interface {
	// Scan calls fn with every record whose key has the prefix, in ascending order. key and value are valid during the
	// call only. It stops at the first error.
	Scan(prefix []byte, fn func(key, value []byte) error) error
}

// Batch takes the records of a flush, which have to reach the store all together.
type Batch interface {
	// Set writes a record. It does not keep key and value.
	Set(key, value []byte)
	// Delete removes a record, if it is there.
	Delete(key []byte)
}

// First bytes of record keys. The numbers are for ever.
const (
	recHead     = 'A'
	recSettings = 'B'
	recContext  = 'C'
	recDevice   = 'D'
	recEntry    = 'E'
	recAnswer   = 'N'
	recOrder    = 'O'
	recPin      = 'P'
	recPolicy   = 'L'
	recRegion   = 'R'
	recSession  = 'S'
	recTask     = 'K'
	recTenant   = 'T'
	recName     = 'M'
	recNames    = 'V'
	recMaru     = 'U'
)

// stateFormat is the first byte of the head record, raised when the layout of records changes.
const stateFormat = 3

// minMark is the least that a mark of a CLEAR takes in the head record: four names, a block size, a seed, a prefix, a
// birth and what is left.
const minMark = 4 + 1 + 8 + 1 + 1 + 1

// dirtySlots are the entries whose records, or whose places in their policy, have changed since the last flush.
type dirtySlots struct {
	entries, orders      []Slot
	entryBits, orderBits []uint64
}

func setBit(bits []uint64, s Slot) ([]uint64, bool) {
	for int(s/64) >= len(bits) {
		bits = append(bits, 0)
	}
	was := bits[s/64]&(1<<(s%64)) != 0
	bits[s/64] |= 1 << (s % 64)
	return bits, !was
}

func (m *Machine) markEntry(s Slot) {
	var fresh bool
	if m.dirty.entryBits, fresh = setBit(m.dirty.entryBits, s); fresh {
		m.dirty.entries = append(m.dirty.entries, s)
	}
}

func (m *Machine) markOrder(s Slot) {
	if m.loading {
		return
	}
	var fresh bool
	if m.dirty.orderBits, fresh = setBit(m.dirty.orderBits, s); fresh {
		m.dirty.orders = append(m.dirty.orders, s)
	}
}

// DirtyLen returns how many records the next flush writes, about.
func (m *Machine) DirtyLen() int {
	return len(m.dirty.entries) + len(m.dirty.orders) + len(m.stale) + len(m.pending) + len(m.edits) + len(m.maru.dirty)
}

// Flush puts everything that has changed since the last flush into b, with the applied index, which it returns. It
// must not run beside anything else of the machine; what happens to b afterwards may. If b does not reach the store,
// the process has to stop: the machine takes it as written.
func (m *Machine) Flush(b Batch) uint64 {
	m.refresh()
	var key, value []byte
	for _, r := range m.pending {
		key = r.appendKey(key[:0])
		if o := r.obj(); o.dead {
			b.Delete(key)
		} else {
			value = r.appendValue(value[:0])
			b.Set(key, value)
		}
		r.obj().pending = false
	}
	clear(m.pending)
	m.pending = m.pending[:0]
	for _, e := range m.edits {
		if e.value == nil {
			b.Delete(e.key)
		} else {
			b.Set(e.key, e.value)
		}
	}
	m.edits = nil
	m.flushMaru(b, key, value)
	for _, s := range m.dirty.entries {
		m.dirty.entryBits[s/64] &^= 1 << (s % 64)
		key = binary.BigEndian.AppendUint32(append(key[:0], recEntry), s)
		if !m.table.live(s) {
			b.Delete(key)
			continue
		}
		value = m.appendEntry(value[:0], m.table.at(s))
		b.Set(key, value)
		if int(s/64) < len(m.dirty.orderBits) {
			m.dirty.orderBits[s/64] &^= 1 << (s % 64) // the record has it
		}
	}
	for _, s := range m.dirty.orders {
		if m.dirty.orderBits[s/64]&(1<<(s%64)) == 0 {
			continue
		}
		m.dirty.orderBits[s/64] &^= 1 << (s % 64)
		if m.table.live(s) {
			x := m.table.at(s)
			key = binary.BigEndian.AppendUint32(append(key[:0], recOrder), s)
			value = binary.AppendUvarint(binary.AppendUvarint(value[:0], m.head.applied), x.birth)
			b.Set(key, appendOrder(value, x.place()))
		}
	}
	m.dirty.entries, m.dirty.orders = m.dirty.entries[:0], m.dirty.orders[:0]
	m.flushPolicies(b)
	b.Set([]byte{recHead}, m.appendHead(value[:0]))
	return m.head.applied
}

func (m *Machine) flushPolicies(b Batch) {
	var key []byte
	for _, p := range m.parts {
		key = p.flush(b, key)
	}
}

func appendOrder(b []byte, o policy.Order) []byte {
	b = binary.AppendVarint(b, o.Stamp)
	return append(binary.AppendUvarint(b, uint64(o.Aux)), o.List)
}

func decodeOrder(d *decoder, x *entry) {
	x.stamp, x.aux, x.list = d.varint(), d.u32(), d.byte()
}

func (m *Machine) appendEntry(b []byte, x *entry) []byte {
	b = binary.AppendUvarint(b, m.head.applied)
	b = appendBytes(b, m.table.key(x))
	for _, v := range [...]uint64{
		x.birth, x.offset, uint64(x.length), uint64(m.regionOf(x).id), uint64(m.contextOf(x).id), x.expires, x.added,
	} {
		b = binary.AppendUvarint(b, v)
	}
	b = appendU64(b, x.checksum)
	flags := x.flags & (flagPrefix | flagMoved)
	if x.places != 0 {
		flags |= flagPlaces
	}
	if x.want != 0 {
		flags |= flagWant
	}
	b = append(b, flags)
	if x.flags&flagPrefix != 0 {
		b = appendU64(b, x.hash)
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(x.index)), uint64(x.group))
		b = binary.AppendUvarint(b, uint64(x.parent))
	}
	if x.places != 0 {
		b = m.appendPlaces(b, x)
	}
	if x.want != 0 {
		b = append(b, x.want)
	}
	return appendOrder(b, x.place())
}

func (h *head) appendTo(b []byte) []byte {
	b = append(b, stateFormat)
	for _, v := range [...]uint64{
		h.applied, h.now, h.births, h.epochs, uint64(h.hot), uint64(-h.cold), uint64(h.nextSession), uint64(h.nextRegion), //nolint:gosec // hot >= 0 >= cold
		uint64(h.nextDevice), uint64(h.nextContext), h.nextPin, h.incarnation, h.clearedAll, h.sweepLeft, h.sweepAt,
		uint64(h.slots), uint64(len(h.marks)),
	} {
		b = binary.AppendUvarint(b, v)
	}
	for _, c := range h.marks {
		b = binary.AppendUvarint(binary.AppendUvarint(appendBytes(c.want.appendTo(b), c.prefix), c.born), c.left)
	}
	return b
}

// appendHead writes the head record: the head, how many entries were evicted, and the hash of all records. Every member counts the
// same from the same log, and goes on from what it had counted, so that differences hold across restarts and changes of
// the leader.
func (m *Machine) appendHead(b []byte) []byte {
	b = m.head.appendTo(b)
	for _, n := range m.stats.Evictions {
		b = binary.AppendUvarint(b, n)
	}
	return appendU64(b, m.recordHash())
}

// decodeHead reads the head record, and returns the hash that all records together must have.
func (m *Machine) decodeHead(d *decoder) (uint64, error) {
	if err := m.head.decode(d); err != nil {
		return 0, err
	}
	for i := range m.stats.Evictions {
		m.stats.Evictions[i] = d.uvarint()
	}
	return d.u64(), d.end()
}

func (h *head) decode(d *decoder) error {
	switch v := d.byte(); {
	case v < stateFormat:
		return fmt.Errorf("meta: the stored state has format %d, this binary reads %d: run the one that wrote it, "+
			"or start with an empty data directory", v, stateFormat)
	case v > stateFormat:
		return fmt.Errorf("meta: the stored state has format %d, this binary reads %d: run a newer one", v, stateFormat)
	}
	h.applied, h.now, h.births, h.epochs = d.uvarint(), d.uvarint(), d.uvarint(), d.uvarint()
	h.hot, h.cold = int64(d.uvarint()), -int64(d.uvarint()) //nolint:gosec // written from int64
	h.nextSession, h.nextRegion = SessionID(d.uvarint()), RegionID(d.uvarint())
	h.nextDevice, h.nextContext = DeviceID(d.u32()), ContextID(d.u32())
	h.nextPin, h.incarnation, h.clearedAll, h.sweepLeft = d.uvarint(), d.uvarint(), d.uvarint(), d.uvarint()
	h.sweepAt, h.slots = d.uvarint(), d.u32()
	for n := d.count(minMark); n > 0; n-- {
		var c clearMark
		c.want.decode(d)
		c.prefix, c.born, c.left = clone(d.bytes()), d.uvarint(), d.uvarint()
		h.marks = append(h.marks, c)
	}
	if uint64(h.slots) > h.births {
		d.fail() // a slot is taken by a birth: memory for them all is got before they are seen
	}
	return d.err
}

// IncompleteError says that a store does not hold the state that was written to it: records are missing, or are old. It
// wraps ErrCorrupt.
type IncompleteError struct {
	Index      uint64 // that was applied last
	Hash, Want uint64 // of what was found, and of what was written
}

// Error implements error.
func (e *IncompleteError) Error() string {
	return fmt.Sprintf("meta: records of the state stored at index %d are missing or old (its hash is %x, and was %x): "+
		"rejoin this member as a new one, or restore a snapshot", e.Index, e.Hash, e.Want)
}

// Unwrap returns ErrCorrupt.
func (e *IncompleteError) Unwrap() error { return ErrCorrupt }

// settingsRecord is the record of the settings.
type settingsRecord struct {
	object
	m         *Machine
	oldPolicy string // what the pool used before, while entries go over; "" otherwise
	oldTTLMS  uint64
	changes   uint64 // of the policy
	hotAt     int64  // head.hot and head.cold at the last of them: what was ordered before is told by its stamp
	coldAt    int64
}

// parity is the parityBit of entries that are ordered under the present policy.
func (r *settingsRecord) parity() uint8 { return uint8(r.changes&1) * parityBit }

func (r *settingsRecord) appendKey(b []byte) []byte { return append(b, recSettings) }

func (r *settingsRecord) appendValue(b []byte) []byte {
	b = appendBytes(r.m.settings.appendTo(b), r.oldPolicy)
	for _, v := range [...]uint64{r.oldTTLMS, r.changes, uint64(r.hotAt), uint64(-r.coldAt)} { //nolint:gosec // hotAt >= 0 >= coldAt
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func (r *settingsRecord) load(_, value *decoder) {
	r.m.settings.decode(value)
	r.oldPolicy, r.oldTTLMS, r.changes = value.string(), value.uvarint(), value.uvarint()
	r.hotAt, r.coldAt = int64(value.uvarint()), -int64(value.uvarint()) //nolint:gosec // written from int64
}

// Open rebuilds a machine from a store. An empty store gives a new pool with DefaultSettings. A store that has lost records,
// or gives old ones, is refused with ErrCorrupt: one bit that flips in Pebble's MANIFEST can make it forget a whole table,
// without an error.
func Open(store Store) (*Machine, error) {
	m := newMachine()
	m.loading = true
	fresh, hash := true, uint64(0)
	if err := store.Scan([]byte{recHead}, func(_, value []byte) (err error) {
		fresh = false
		hash, err = m.decodeHead(&decoder{b: value})
		return err
	}); err != nil {
		return nil, err
	}
	if err := m.loadObjects(store); err != nil {
		return nil, err
	}
	m.table.reach(m.head.slots)
	m.table.index = make(map[uint64]Slot, m.head.slots) // growing it step by step costs as much as filling it
	if err := m.loadEntries(store); err != nil {
		return nil, err
	}
	if err := m.loadPins(store); err != nil {
		return nil, err
	}
	if err := m.loadTasks(store); err != nil {
		return nil, err
	}
	if err := m.loadNames(store); err != nil {
		return nil, err
	}
	if err := m.loadMaru(store); err != nil {
		return nil, err
	}
	if err := m.restorePolicies(store); err != nil {
		return nil, err
	}
	for _, p := range m.parts {
		// With state left it counts in the state hash, until the change of policies ends.
		if p.old != nil && p.old.Len() == 0 && p.old.StateHash() == 0 {
			m.discard(p, p.old, oldPages)
			p.old = nil
		}
	}
	m.loading = false
	m.sumEntries()
	if got := m.recordHash(); !fresh && got != hash {
		return nil, &IncompleteError{Index: m.head.applied, Hash: got, Want: hash}
	}
	if fresh {
		m.changed(&m.set)
	}
	if _, ok := m.tenantOf(DefaultTenant); !ok {
		return nil, fmt.Errorf("meta: %w: no room for the default tenant", ErrCorrupt)
	}
	return m, nil
}

// scan reads all records of a kind into new objects.
func scan[T record](m *Machine, store Store, kind byte, fresh func() T, use func(T) error) error {
	return store.Scan([]byte{kind}, func(k, v []byte) error {
		r := fresh()
		key, value := decoder{b: k[1:]}, decoder{b: v}
		r.load(&key, &value)
		if key.end() != nil || value.end() != nil {
			return fmt.Errorf("record %q: %w", k, ErrCorrupt)
		}
		if err := use(r); err != nil {
			return fmt.Errorf("record %q: %w", k, err)
		}
		o := r.obj()
		o.sum = m.recordSum(r)
		m.objectSum += o.sum
		return nil
	})
}

func (m *Machine) loadObjects(store Store) error {
	if err := scan(m, store, recSettings, func() *settingsRecord { return &m.set }, func(*settingsRecord) error {
		if m.set.oldPolicy != "" {
			if err := knownPolicy(m.set.oldPolicy); err != nil {
				return err
			}
		}
		return m.settings.supported()
	}); err != nil {
		return err
	}
	if err := scan(m, store, recDevice, func() *device { return &device{} }, func(d *device) error {
		if d.Align == 0 {
			return ErrCorrupt
		}
		d.reset()
		m.devices[d.id] = d
		return nil
	}); err != nil {
		return err
	}
	if err := scan(m, store, recContext, func() *contextRecord { return &contextRecord{} }, m.loadContext); err != nil {
		return err
	}
	if err := scan(m, store, recTenant, func() *tenantRecord { return &tenantRecord{} }, m.loadTenant); err != nil {
		return err
	}
	if err := scan(m, store, recSession, func() *session { return &session{} }, func(s *session) error {
		t, ok := m.tenantOf(s.tenant.name)
		if !ok {
			return ErrCorrupt
		}
		s.tenant = t
		m.sessions[s.id] = s
		if s.open {
			m.openOf[s.instance] = s.id
		}
		return nil
	}); err != nil {
		return err
	}
	if err := scan(m, store, recAnswer, func() *answer { return &answer{} }, func(a *answer) error {
		s := m.sessions[a.session]
		if s == nil {
			return ErrCorrupt
		}
		s.answers[a.seq%uint64(len(s.answers))] = a
		s.remembered += len(a.result)
		return nil
	}); err != nil {
		return err
	}
	return scan(m, store, recRegion, func() *region { return &region{} }, m.loadRegion)
}

func (m *Machine) loadContext(c *contextRecord) error {
	t := m.tenants[c.Tenant]
	if t == nil {
		t = newTenant(c.Tenant)
		m.tenants[c.Tenant] = t
	}
	c.tenant = t
	if c.Context == (Context{Tenant: c.Tenant}) {
		t.base = c.id
		c.refs++
	}
	m.contexts[c.id] = c
	c.handle = m.contextAt.put(c)
	m.contextIDs[c.Context] = c.id
	return nil
}

func (m *Machine) loadRegion(r *region) error {
	d := m.devices[r.device.id]
	if d == nil {
		return ErrCorrupt
	}
	r.device = d
	if !d.hold(r) {
		return fmt.Errorf("region %d overlaps another: %w", r.id, ErrCorrupt)
	}
	d.regions++
	owner := m.sessions[r.owner.id]
	if r.owner.id != 0 && owner == nil {
		return ErrCorrupt
	}
	r.owner = owner
	if owner != nil {
		owner.regions = append(owner.regions, r)
	}
	r.occupied = make([]uint64, (r.pages()+63)/64)
	m.addRegion(r)
	r.recount()
	return nil
}

func (m *Machine) loadEntries(store Store) error {
	flushed := make([]uint64, m.head.slots) // by slot: the applied index of the flush that wrote the record
	if err := store.Scan([]byte{recEntry}, func(k, v []byte) error {
		key, d := decoder{b: k[1:]}, decoder{b: v}
		slot := key.be32()
		if slot >= m.head.slots {
			return fmt.Errorf("entry %d of %d: %w", slot, m.head.slots, ErrCorrupt)
		}
		flushed[slot] = d.uvarint()
		if err := m.loadEntry(slot, &d); err != nil || key.end() != nil {
			return fmt.Errorf("entry %d: %w", slot, cmp.Or(err, ErrCorrupt))
		}
		return nil
	}); err != nil {
		return err
	}
	if err := store.Scan([]byte{recOrder}, func(k, v []byte) error {
		key, d := decoder{b: k[1:]}, decoder{b: v}
		slot, at, birth := key.be32(), d.uvarint(), d.uvarint()
		if m.table.live(slot) && at > flushed[slot] && m.table.at(slot).birth == birth {
			decodeOrder(&d, m.table.at(slot))
		}
		return d.err
	}); err != nil {
		return err
	}
	for s := range m.table.end {
		if x := m.table.at(s); x.birth != 0 && !m.regionOf(x).slow() {
			if p := m.validParent(x); p != None {
				m.table.at(p).children++
			}
		}
	}
	m.linkRegions()
	m.linkPlaces()
	return nil
}

// linkRegions lists the entries of every region in the order in which they were registered, as if the machine had never
// been rebuilt: commands that drop some of them go by that order.
func (m *Machine) linkRegions() {
	type born struct {
		birth uint64
		slot  Slot
	}
	order := make([]born, 0, m.table.count)
	for s := range m.table.end {
		if x := m.table.at(s); x.birth != 0 && x.flags&flagMoved == 0 {
			order = append(order, born{x.birth, s})
		}
	}
	slices.SortFunc(order, func(a, b born) int { return cmp.Compare(a.birth, b.birth) })
	for _, r := range m.regionList {
		r.head = None
	}
	for _, o := range order {
		x := m.table.at(o.slot)
		m.linkRegion(o.slot, x, m.regionOf(x))
	}
}

func (m *Machine) loadEntry(slot Slot, d *decoder) error {
	key := d.bytes()
	birth, offset, length := d.uvarint(), d.uvarint(), d.uvarint()
	regionID, ctxID := RegionID(d.uvarint()), ContextID(d.u32())
	expires, added, checksum, flags := d.uvarint(), d.uvarint(), d.u64(), d.byte()
	r, ctx := m.regions[regionID], m.contexts[ctxID]
	if d.err != nil || r == nil || ctx == nil || birth == 0 || length == 0 || offset%r.pageSize != 0 ||
		offset > r.length || length > r.length-offset || len(key) > protocol.MaxKeyBytes {
		return ErrCorrupt
	}
	if _, end := r.span(offset, length); end > r.pages() { // of a region that is not whole pages long
		return ErrCorrupt
	}
	x := m.insert(slot, ctx.tenant, key)
	x.birth, x.offset, x.length, x.checksum = birth, offset, uint32(length), checksum //nolint:gosec // written as 32 bits
	x.region, x.ctx, x.expires, x.added, x.flags = r.handle, ctx.handle, expires, added, flags&(flagPrefix|flagMoved)
	if flags&flagPrefix != 0 {
		x.hash, x.index, x.group = d.u64(), d.u32(), d.u32()
		x.parent = d.u32()
	}
	if flags&flagPlaces != 0 {
		if err := m.loadPlaces(slot, x, d); err != nil {
			return err
		}
	}
	if flags&flagWant != 0 {
		if x.want = d.byte(); x.want < 2 || x.want > MaxReplicas {
			return ErrCorrupt
		}
	}
	decodeOrder(d, x)
	m.attach(slot, x, r, ctx)
	m.weigh(slot, x)
	return d.end()
}

func (m *Machine) loadPins(store Store) error {
	return scan(m, store, recPin, func() *pin { return &pin{} }, func(p *pin) error {
		if !m.table.live(p.slot) || p.session != 0 && m.sessions[p.session] == nil {
			return ErrCorrupt
		}
		m.holdPin(p, m.table.at(p.slot))
		return nil
	})
}

// restorePolicies gives every entry back to its policy, in the order of their stamps.
func (m *Machine) restorePolicies(store Store) error {
	if err := store.Scan([]byte{recPolicy}, func(k, v []byte) error {
		d := decoder{b: k[1:]}
		s, pageSize, class, page := m.sessions[SessionID(d.be64())], d.be64(), Class(d.byte()), d.be32()
		if d.end() != nil || s == nil || class > ClassSoft || pageSize == 0 {
			return fmt.Errorf("policy record %q: %w", k, ErrCorrupt)
		}
		p := m.partition(&region{owner: s, pageSize: pageSize}, class)
		return p.restore(page, v)
	}); err != nil {
		return err
	}
	type place struct {
		stamp int64
		slot  Slot
	}
	places := make([]place, 0, m.table.count)
	for s := range m.table.end {
		if x := m.table.at(s); x.birth != 0 && x.pins == 0 {
			places = append(places, place{x.stamp, s})
		}
	}
	slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.stamp, b.stamp) })
	for _, p := range places {
		x := m.table.at(p.slot)
		r := m.regionOf(x)
		if r.owner == nil {
			return fmt.Errorf("entry %d lies in region %d, which nobody owns: %w", p.slot, r.id, ErrCorrupt)
		}
		m.partition(r, x.class())
		m.policyOf(x).Restore(p.slot)
	}
	return nil
}

func (m *Machine) sumEntries() {
	for s := range m.table.end {
		if x := m.table.at(s); x.birth != 0 {
			m.entrySum += m.entryHash(s, x)
			m.orderSum += orderHash(s, x.place())
		}
	}
}
