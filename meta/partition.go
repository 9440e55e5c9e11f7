package meta

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"larder/meta/policy"
)

// policyTable is the machine as its policies see it.
type policyTable Machine

var _ policy.Table = (*policyTable)(nil)

// Order implements policy.Table.
func (t *policyTable) Order(s Slot) policy.Order { return t.table.at(s).order() }

// SetOrder implements policy.Table.
func (t *policyTable) SetOrder(s Slot, o policy.Order) {
	x := t.table.at(s)
	if x.birth != 0 && !t.loading {
		t.orderSum -= orderHash(s, x.place())
		x.setOrder(o)
		t.orderSum += orderHash(s, x.place())
	}
	x.setOrder(o)
	(*Machine)(t).markOrder(s)
}

// Links implements policy.Table.
func (t *policyTable) Links(s Slot) *policy.Links { return &t.table.at(s).links }

// Info implements policy.Table.
func (t *policyTable) Info(s Slot) policy.Info {
	m := (*Machine)(t)
	x := m.table.at(s)
	return policy.Info{
		Bytes: uint64(x.length), AddedMS: x.added, ExpiresMS: x.expires,
		Index: x.index, Context: uint32(m.contextOf(x).id), Children: x.children, Class: uint8(x.class()),
	}
}

// KeyHash implements policy.Table.
func (t *policyTable) KeyHash(s Slot) uint64 { return stableKeyHash(t.table.key(t.table.at(s))) }

// Parent implements policy.Table.
func (t *policyTable) Parent(s Slot) Slot { return (*Machine)(t).parentInPolicy(t.table.at(s)) }

// parentInPolicy returns an entry's parent if the same policy orders both.
func (m *Machine) parentInPolicy(x *entry) Slot {
	parent := m.validParent(x)
	if parent == None {
		return None
	}
	if p := m.table.at(parent); p.pins > 0 || m.policyOf(p) != m.policyOf(x) {
		return None
	}
	return parent
}

// NextStamp implements policy.Table.
func (t *policyTable) NextStamp() int64 {
	t.head.hot++
	return t.head.hot
}

// ColdStamp implements policy.Table.
func (t *policyTable) ColdStamp() int64 {
	t.head.cold--
	return t.head.cold
}

// partition returns the partition of a region's entries of a class, made when first needed.
func (m *Machine) partition(r *region, c Class) *partition {
	if p := r.parts[c]; p != nil {
		return p
	}
	p := m.partitionOf(r.owner, r.pageSize, c)
	if p == nil {
		p = &partition{
			session: r.owner, pageSize: r.pageSize, class: c, pol: m.newPolicy(m.settings.Policy, m.settings.TTLMS),
		}
		if m.loading && m.set.oldPolicy != "" {
			p.old = m.newPolicy(m.set.oldPolicy, m.set.oldTTLMS)
		}
		r.owner.parts = append(r.owner.parts, p)
		slices.SortFunc(r.owner.parts, func(a, b *partition) int { // migrate goes by it: see there
			return cmp.Or(cmp.Compare(a.pageSize, b.pageSize), cmp.Compare(a.class, b.class))
		})
		m.parts = append(m.parts, p)
	}
	r.parts[c] = p
	return p
}

func (m *Machine) partitionOf(s *session, pageSize uint64, c Class) *partition {
	for _, p := range s.parts {
		if p.pageSize == pageSize && p.class == c {
			return p
		}
	}
	return nil
}

// policyOf returns the policy that orders an entry, which is not hard-pinned.
func (m *Machine) policyOf(x *entry) policy.Policy {
	p := m.partition(m.regionOf(x), x.class())
	if p.old != nil && x.list&parityBit != m.set.parity() {
		return p.old
	}
	return p.pol
}

// addToPolicy gives an entry to the policy of its partition. What another policy noted of it, before the pool's policy
// changed, means nothing to this one.
func (m *Machine) addToPolicy(slot Slot, x *entry) {
	present := x.list&parityBit == m.set.parity() && (x.stamp > m.set.hotAt || x.stamp < m.set.coldAt)
	if !present && x.order() != (policy.Order{}) {
		(*policyTable)(m).SetOrder(slot, policy.Order{})
	}
	m.orderSum -= orderHash(slot, x.place())
	x.list = x.list&^parityBit | m.set.parity()
	m.orderSum += orderHash(slot, x.place())
	m.markOrder(slot)
	m.partition(m.regionOf(x), x.class()).pol.Add(slot)
}

// newPolicy makes a policy, whose name Apply and Open have checked.
func (m *Machine) newPolicy(name string, ttlMS uint64) policy.Policy {
	p, err := policy.New(name, policy.Config{TTLMS: ttlMS}, (*policyTable)(m))
	if err != nil {
		panic(fmt.Sprintf("meta: the replicated settings name a policy that this binary does not have: %v", err))
	}
	return p
}

// oldPages is set in the page number of the state of a policy that is being replaced.
const oldPages = 1 << 31

// appendKey makes the key of one page of a partition's policy state.
func (p *partition) appendKey(b []byte, page uint32) []byte {
	b = binary.BigEndian.AppendUint64(append(b, recPolicy), uint64(p.session.id))
	b = binary.BigEndian.AppendUint64(b, p.pageSize)
	return binary.BigEndian.AppendUint32(append(b, byte(p.class)), page)
}

// sum is the partition's part of the state hash, beyond the order of its entries.
func (p *partition) sum() uint64 {
	id := mix(uint64(p.session.id) ^ mix(p.pageSize<<1|uint64(p.class)))
	sum := uint64(0)
	if h := p.pol.StateHash(); h != 0 {
		sum = mix(h ^ id)
	}
	if p.old != nil {
		if h := p.old.StateHash(); h != 0 {
			sum += mix(h ^ id + 1)
		}
	}
	return sum
}

// flush hands out the changed pages of a partition's policies.
func (p *partition) flush(b Batch, key []byte) []byte {
	put := func(bit uint32) func(page uint32, data []byte) {
		return func(page uint32, data []byte) {
			key = p.appendKey(key[:0], page|bit)
			if len(data) == 0 {
				b.Delete(key)
			} else {
				b.Set(key, data)
			}
		}
	}
	p.pol.FlushState(false, put(0))
	if p.old != nil {
		p.old.FlushState(false, put(oldPages))
	}
	return key
}

// discard removes what a policy of the partition has in the store.
func (m *Machine) discard(p *partition, pol policy.Policy, bit uint32) {
	pol.FlushState(true, func(page uint32, _ []byte) {
		m.edits = append(m.edits, edit{key: p.appendKey(nil, page|bit)}) // also of pages that are empty only now
	})
}

// restore takes back one page of policy state.
func (p *partition) restore(page uint32, data []byte) error {
	if page&oldPages == 0 {
		return p.pol.RestoreState(page, data)
	}
	if p.old == nil {
		return ErrCorrupt
	}
	return p.old.RestoreState(page&^oldPages, data)
}

// setPolicy starts to replace the policy of every partition. The entries go over later, a bounded number per sweep, so
// that the change itself costs no more than there are partitions.
func (m *Machine) setPolicy(old Settings) {
	if old.Policy == m.settings.Policy && old.TTLMS == m.settings.TTLMS {
		return
	}
	m.set.oldPolicy, m.set.oldTTLMS = old.Policy, old.TTLMS
	m.set.changes++
	m.set.hotAt, m.set.coldAt = m.head.hot, m.head.cold
	for _, p := range m.parts {
		m.discard(p, p.pol, 0)
		p.old = p.pol
		p.pol = m.newPolicy(m.settings.Policy, m.settings.TTLMS)
		// Its state has to be written under the other page numbers.
		p.old.FlushState(true, func(page uint32, data []byte) {
			m.edits = append(m.edits, edit{p.appendKey(nil, page|oldPages), clone(data)})
		})
	}
	m.endMigration()
}

// victims offers what a policy that is being replaced still holds, coldest first, then what the present one holds.
func (p *partition) victims(now uint64, yield func(Slot) policy.Verdict) {
	stopped := false
	watch := func(s Slot) policy.Verdict {
		v := yield(s)
		stopped = v == policy.Stop
		return v
	}
	if p.old != nil {
		p.old.Victims(now, watch)
	}
	if !stopped {
		p.pol.Victims(now, watch)
	}
}

// edit is a record to be written at the next flush as it is, or, without a value, to be removed.
type edit struct{ key, value []byte }

// migrating returns how many entries still have to go over to the pool's policy, and at least 1 until a sweep has found
// that there are none.
func (m *Machine) migrating() uint64 {
	if m.set.oldPolicy == "" {
		return 0
	}
	n := uint64(0)
	for _, p := range m.parts {
		if p.old != nil {
			n += uint64(p.old.Len()) //nolint:gosec // not negative
		}
	}
	return max(n, 1)
}

// migrate moves up to limit entries to the pool's policy, of each partition the coldest first, so that their order
// among each other stays as it was. Those that their policy does not offer, as it waits for others that it orders no
// more, go over as the sweep comes by: see adopt.
func (m *Machine) migrate(limit int) {
	if m.set.oldPolicy == "" {
		return
	}
	for _, s := range m.sortedSessions() {
		for _, p := range s.parts {
			p.stuck = false
			if p.old == nil || p.old.Len() == 0 || limit == 0 {
				continue
			}
			slots := make([]Slot, 0, min(limit, p.old.Len()))
			p.old.Victims(m.head.now, func(s Slot) policy.Verdict {
				slots = append(slots, s)
				if len(slots) == cap(slots) {
					return policy.Stop
				}
				return policy.Take
			})
			for _, slot := range slots[:min(len(slots), limit)] {
				x := m.table.at(slot)
				p.old.Remove(slot)
				m.addToPolicy(slot, x)
				limit--
			}
			p.stuck = len(slots) == 0
			if p.stuck && m.head.sweepLeft == 0 {
				m.startSweep()
			}
		}
	}
	m.endMigration()
}

// adopt moves an entry to the pool's policy if the one that is being replaced offers none any more, and reports whether
// it did.
func (m *Machine) adopt(slot Slot) bool {
	x := m.table.at(slot)
	if m.set.oldPolicy == "" || x.pins > 0 {
		return false
	}
	p := m.partition(m.regionOf(x), x.class())
	if !p.stuck || p.old == nil || m.policyOf(x) != p.old {
		return false
	}
	p.old.Remove(slot)
	m.addToPolicy(slot, x)
	return true
}

// endMigration forgets the old policy of partitions that have no entries left in it.
func (m *Machine) endMigration() {
	left := false
	for _, p := range m.parts {
		if p.old != nil && p.old.Len() == 0 {
			m.discard(p, p.old, oldPages)
			p.old = nil
		}
		left = left || p.old != nil
	}
	if !left {
		m.set.oldPolicy, m.set.oldTTLMS = "", 0
	}
	m.changed(&m.set)
}
