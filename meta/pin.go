package meta

import (
	"cmp"
	"container/heap"
	"encoding/binary"
	"slices"

	"larder/protocol"
)

// pin keeps an entry (hard), or has it evicted last (soft). It belongs to a session and ends with it, or has a name and
// lasts until it is undone or its time is over.
type pin struct {
	object
	id      uint64
	slot    Slot
	session SessionID // 0 = durable or soft
	owner   string    // the name of a durable or soft one
	class   Class
	untilMS uint64 // log time; 0 = no end
	count   uint32 // a session may pin an entry several times, as Maru's clients do
	place   int    // in Machine.timedPins
}

// pinHeap orders pins by their end, as container/heap has it: the leader asks for the next one with every tick.
type pinHeap []*pin

// Len implements heap.Interface.
func (h *pinHeap) Len() int { return len(*h) }

// Less implements heap.Interface.
func (h *pinHeap) Less(i, j int) bool {
	a, b := (*h)[i], (*h)[j]
	return a.untilMS < b.untilMS || a.untilMS == b.untilMS && a.id < b.id
}

// Swap implements heap.Interface.
func (h *pinHeap) Swap(i, j int) {
	p := *h
	p[i], p[j] = p[j], p[i]
	p[i].place, p[j].place = i, j
}

// Push implements heap.Interface.
func (h *pinHeap) Push(x any) {
	p := x.(*pin) //nolint:forcetypeassert // the heap holds nothing else
	p.place = len(*h)
	*h = append(*h, p)
}

// Pop implements heap.Interface.
func (h *pinHeap) Pop() any {
	last := len(*h) - 1
	p := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return p
}

// maxPinsPerEntry bounds the holders of one entry, since undoing looks through them.
const maxPinsPerEntry = 1024

func (m *Machine) applyPin(s *session, c *Pin, out *Results) {
	if len(c.Owner) > protocol.MaxNameBytes || c.Class != ClassHard && c.Class != ClassSoft {
		out.fail(protocol.CodeBadRequest)
		return
	}
	t := m.tenantFor(s)
	out.code(0)
	out.uvarint(uint64(len(c.Keys)))
	stopped := false
	for _, key := range c.Keys {
		code := protocol.CodeNotFound
		if slot, ok := m.find(t, key); !stopped && ok && m.alive(m.table.at(slot)) {
			if c.Undo {
				code = m.unpin(s, slot, c)
			} else {
				code = m.pinEntry(s, t, slot, c)
			}
		}
		stopped = stopped || c.Strict && code != 0
		out.uvarint(uint64(code))
	}
}

// pinOf returns the pin that a command means, if it is there.
func (m *Machine) pinOf(s *session, slot Slot, c *Pin) *pin {
	for _, p := range m.pinsOf[slot] {
		if p.class != c.Class || p.owner != c.Owner {
			continue
		}
		if c.durable() && p.session == 0 || !c.durable() && p.session == s.sid() {
			return p
		}
	}
	return nil
}

// durable reports whether the pin outlives its session.
func (c *Pin) durable() bool { return c.Owner != "" || c.Class == ClassSoft }

func (s *session) sid() SessionID {
	if s == nil {
		return 0
	}
	return s.id
}

func (m *Machine) pinEntry(s *session, t *tenant, slot Slot, c *Pin) protocol.Code {
	if p := m.pinOf(s, slot, c); p != nil {
		p.count++
		x := m.table.at(slot)
		m.countPin(p, x, -1)
		p.untilMS = c.Until
		m.countPin(p, x, 1)
		m.changed(p)
		return 0
	}
	switch {
	case !c.durable() && s == nil:
		return protocol.CodeBadRequest
	case !c.durable() && len(s.pins) >= MaxSessionPins, c.durable() && t.pins >= MaxDurablePins,
		t.limits.MaxPins != 0 && t.pins+t.sessionPins >= t.limits.MaxPins, len(m.pinsOf[slot]) >= maxPinsPerEntry:
		return protocol.CodeLimit
	}
	m.head.nextPin++
	p := &pin{id: m.head.nextPin, slot: slot, owner: c.Owner, class: c.Class, untilMS: c.Until, count: 1}
	if !c.durable() {
		p.session = s.id
	}
	m.changed(p)
	m.moveEntry(slot, func(x *entry) { m.holdPin(p, x) })
	return 0
}

// holdPin links a pin to its entry and holder. Rebuilding from the store uses it too.
func (m *Machine) holdPin(p *pin, x *entry) {
	m.pinsOf[p.slot] = append(m.pinsOf[p.slot], p)
	if p.class == ClassHard {
		if x.pins == 0 {
			m.pinned(x, 1)
		}
		x.pins++
	} else {
		x.flags |= flagSoft
	}
	m.countPin(p, x, 1)
	if p.session != 0 {
		s := m.sessions[p.session]
		s.pins = append(s.pins, p)
	}
}

// countPin keeps the tenant's counters and the list of pins with an end.
func (m *Machine) countPin(p *pin, x *entry, by int) {
	t := m.contextOf(x).tenant
	if p.session != 0 {
		t.sessionPins += uint64(by) //nolint:gosec // by is 1 or -1: wraps to a subtraction
		return
	}
	t.pins += uint64(by) //nolint:gosec // by is 1 or -1: wraps to a subtraction
	if p.untilMS == 0 {
		return
	}
	if by > 0 {
		heap.Push(&m.timedPins, p)
	} else {
		heap.Remove(&m.timedPins, p.place)
	}
}

func (m *Machine) unpin(s *session, slot Slot, c *Pin) protocol.Code {
	p := m.pinOf(s, slot, c)
	if p == nil {
		return protocol.CodeNotFound
	}
	if p.count > 1 && !c.durable() {
		p.count--
		m.changed(p)
		return 0
	}
	m.undoPin(p)
	if p.session != 0 {
		s.pins = slices.DeleteFunc(s.pins, func(x *pin) bool { return x == p })
	}
	return 0
}

// undoPin removes a pin from its entry; its session's list is the caller's.
func (m *Machine) undoPin(p *pin) {
	m.moveEntry(p.slot, func(x *entry) {
		left := slices.DeleteFunc(m.pinsOf[p.slot], func(y *pin) bool { return y == p })
		if len(left) == 0 {
			delete(m.pinsOf, p.slot)
		} else {
			m.pinsOf[p.slot] = left
		}
		if p.class == ClassHard {
			if x.pins--; x.pins == 0 {
				m.pinned(x, -1)
			}
		} else if !slices.ContainsFunc(left, func(y *pin) bool { return y.class == ClassSoft }) {
			x.flags &^= flagSoft
		}
		m.countPin(p, x, -1)
	})
	m.gone(p)
}

// forgetPin removes a pin whose entry goes.
func (m *Machine) forgetPin(p *pin) {
	m.countPin(p, m.table.at(p.slot), -1)
	if s := m.sessions[p.session]; s != nil {
		s.pins = slices.DeleteFunc(s.pins, func(x *pin) bool { return x == p })
	}
	m.gone(p)
}

// moveEntry changes an entry's pins, taking it out of the partition that it was in and putting it into that where it
// belongs afterwards. To come back is to be used: the entry returns at the hot end.
func (m *Machine) moveEntry(slot Slot, change func(x *entry)) {
	x := m.table.at(slot)
	wasIn := x.pins == 0
	m.entrySum -= m.entryHash(slot, x)
	if wasIn {
		m.policyOf(x).Remove(slot)
	}
	change(x)
	m.entrySum += m.entryHash(slot, x)
	if x.pins == 0 {
		m.addToPolicy(slot, x)
	}
	m.markEntry(slot)
}

// NextPinExpiry returns the log time at which the next pin ends.
func (m *Machine) NextPinExpiry() (uint64, bool) {
	if len(m.timedPins) == 0 {
		return 0, false
	}
	return m.timedPins[0].untilMS, true
}

func (m *Machine) applyExpirePins(out *Results) {
	n, left := uint64(0), uint64(0)
	for ; len(m.timedPins) > 0 && m.timedPins[0].untilMS <= m.head.now; n++ {
		if n == MaxDropPerCommand {
			left = 1 // at least
			break
		}
		m.undoPin(m.timedPins[0])
	}
	out.code(0)
	out.uvarint(n)
	out.uvarint(left)
}

// PinInfo describes a pin for operators.
type PinInfo struct {
	Key     []byte
	Tenant  string
	Owner   string    // of a durable or soft pin
	Session SessionID // of any other, which ends with it
	Class   Class
	UntilMS uint64 // log time; 0 = no end
}

func (m *Machine) pinInfo(p *pin) PinInfo {
	x := m.table.at(p.slot)
	return PinInfo{
		Key: clone(m.table.key(x)), Tenant: m.contextOf(x).tenant.name, Owner: p.owner, Session: p.session, Class: p.class,
		UntilMS: p.untilMS,
	}
}

// Pins lists durable and soft pins in order of their making, at most limit after the id cursor, and returns the
// cursor for the next page, 0 at the end. Its cost is that of all pins: operators are given [Reading.ListPins].
func (m *Machine) Pins(cursor uint64, limit int) ([]PinInfo, uint64) {
	var ids []*pin
	for _, pins := range m.pinsOf {
		for _, p := range pins {
			if p.session == 0 && p.id > cursor {
				ids = append(ids, p)
			}
		}
	}
	slices.SortFunc(ids, func(a, b *pin) int { return cmp.Compare(a.id, b.id) })
	next := uint64(0)
	if len(ids) > limit {
		ids = ids[:limit]
		next = ids[limit-1].id
	}
	infos := make([]PinInfo, len(ids))
	for i, p := range ids {
		infos[i] = m.pinInfo(p)
	}
	return infos, next
}

// ListPins calls fn with the pins of live entries, those of sessions included, of a tenant and an owner ("" = all), from
// cursor on, and returns the cursor for the next page, 0 at the end. It ends with the entry that makes the page at least
// limit long, so that no pin is missed when others of its entry come or go between two pages; a call looks at a bounded
// number of slots, so a page may also be short, or empty, and yet not the last.
func (r *Reading) ListPins(tenantName, owner string, cursor uint64, limit int, fn func(p PinInfo)) uint64 {
	const maxLooked = 1 << 18
	m := r.m
	end := min(uint64(m.table.end), cursor+min(maxLooked, ^cursor))
	for ; cursor < end && limit > 0; cursor++ {
		s := Slot(cursor) //nolint:gosec // below table.end
		if !m.table.live(s) {
			continue
		}
		x := m.table.at(s)
		if x.pins == 0 && x.flags&flagSoft == 0 || !r.alive(x) ||
			tenantName != "" && m.contextOf(x).tenant.name != tenantName {
			continue
		}
		for _, p := range m.pinsOf[s] {
			if (owner == "" || p.owner == owner) && (p.untilMS == 0 || p.untilMS > r.now) {
				fn(m.pinInfo(p))
				limit--
			}
		}
	}
	if cursor >= uint64(m.table.end) {
		return 0
	}
	return cursor
}

func (p *pin) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint64(append(b, recPin), p.id)
}

func (p *pin) appendValue(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(p.slot))
	b = appendBytes(binary.AppendUvarint(b, uint64(p.session)), p.owner)
	b = append(b, byte(p.class))
	return binary.AppendUvarint(binary.AppendUvarint(b, p.untilMS), uint64(p.count))
}

func (p *pin) load(key, value *decoder) {
	p.id = key.be64()
	p.slot, p.session, p.owner = value.u32(), SessionID(value.uvarint()), value.string()
	p.class = Class(value.byte())
	p.untilMS, p.count = value.uvarint(), value.u32()
}
