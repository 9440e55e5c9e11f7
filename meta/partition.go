package meta

import (
	"encoding/binary"
	"fmt"

	"larder/meta/policy"
)

// policyTable is the machine as its policies see it.
type policyTable Machine

var _ policy.Table = (*policyTable)(nil)

func (t *policyTable) Order(s Slot) policy.Order { return t.table.at(s).order() }

func (t *policyTable) SetOrder(s Slot, o policy.Order) {
	x := t.table.at(s)
	if x.birth != 0 && !t.loading {
		t.orderSum += orderHash(s, o) - orderHash(s, x.order())
	}
	x.stamp, x.aux, x.list = o.Stamp, o.Aux, o.List
	(*Machine)(t).markOrder(s)
}

func (t *policyTable) Links(s Slot) *policy.Links { return &t.table.at(s).links }

func (t *policyTable) Info(s Slot) policy.Info {
	m := (*Machine)(t)
	x := m.table.at(s)
	return policy.Info{
		KeyHash: stableKeyHash(m.table.key(x)), Bytes: uint64(x.length), AddedMS: x.added, ExpiresMS: x.expires,
		Index: x.index, Context: uint32(m.contextOf(x).id), Parent: m.validParent(x), Children: x.children, Class: uint8(x.class()),
	}
}

func (t *policyTable) NextStamp() int64 {
	t.head.hot++
	return t.head.hot
}

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
		p = &partition{session: r.owner, pageSize: r.pageSize, class: c, pol: m.newPolicy()}
		r.owner.parts = append(r.owner.parts, p)
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

// newPolicy makes a policy by the settings, which Apply has checked.
func (m *Machine) newPolicy() policy.Policy {
	p, err := policy.New(m.settings.Policy, policy.Config{TTLMS: m.settings.TTLMS}, (*policyTable)(m))
	if err != nil {
		panic(fmt.Sprintf("meta: the replicated settings name a policy that this binary does not have: %v", err))
	}
	return p
}

// appendKey makes the key of one page of a partition's policy state.
func (p *partition) appendKey(b []byte, page uint32) []byte {
	b = binary.BigEndian.AppendUint64(append(b, recPolicy), uint64(p.session.id))
	b = binary.BigEndian.AppendUint64(b, p.pageSize)
	return binary.BigEndian.AppendUint32(append(b, byte(p.class)), page)
}

// sum is the partition's part of the state hash, beyond the order of its entries.
func (p *partition) sum() uint64 {
	if h := p.pol.StateHash(); h != 0 {
		return mix(h ^ mix(uint64(p.session.id)^mix(p.pageSize+uint64(p.class))))
	}
	return 0
}

// discard removes what an empty partition has in the store.
func (p *partition) discard(m *Machine) {
	p.pol.FlushState(true, func(page uint32, data []byte) {
		if len(data) > 0 {
			m.deletions = append(m.deletions, p.appendKey(nil, page))
		}
	})
}

// setPolicy replaces the policy of every partition. Entries go over in the order in which the old policy would have
// evicted them, coldest first.
func (m *Machine) setPolicy(old Settings) {
	if old.Policy == m.settings.Policy && old.TTLMS == m.settings.TTLMS {
		return
	}
	for _, s := range m.sortedSessions() {
		for _, p := range s.parts {
			p.discard(m)
			slots := make([]Slot, 0, p.pol.Len())
			p.pol.Victims(m.head.now, func(s Slot) policy.Verdict {
				slots = append(slots, s)
				return policy.Take
			})
			p.pol = m.newPolicy()
			for _, slot := range slots {
				(*policyTable)(m).SetOrder(slot, policy.Order{})
				p.pol.Add(slot)
			}
		}
	}
}
