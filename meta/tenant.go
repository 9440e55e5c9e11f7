package meta

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"larder/protocol"
)

// tenant counts what its sessions hold, and has limits.
type tenant struct {
	name        string
	salt        uint64    // sets its keys apart in the index
	base        ContextID // the context of entries that were registered without one
	entries     uint64
	bytes       uint64
	pins        uint64 // durable and soft
	sessionPins uint64
	space       uint64 // of its regions whose entries are served, see recount
	limits      *tenantRecord
	names       []*nameRecord // by key
	nameBytes   int           // of their keys and values
}

func newTenant(name string) *tenant {
	return &tenant{name: name, salt: xxh3.HashString(name), limits: &tenantRecord{name: name}}
}

// TenantLimits are what SetTenant sets.
type TenantLimits struct {
	// Guarantee is how many bytes of the pool, in whole regions, other tenants' requests leave a tenant that has them. It
	// keeps nothing free for one that has less. 0 = none.
	Guarantee uint64
	// MaxPins bounds a tenant's pins, those of its sessions included. 0 = MaxDurablePins durable and soft ones, and
	// MaxSessionPins of each session, which are bounds in any case.
	MaxPins uint64
}

func (l *TenantLimits) appendTo(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, l.Guarantee), l.MaxPins)
}

func (l *TenantLimits) decode(d *decoder) { l.Guarantee, l.MaxPins = d.uvarint(), d.uvarint() }

// tenantRecord is the record of a tenant's limits. A tenant without any has none in the store.
type tenantRecord struct {
	object
	TenantLimits
	name string
}

func (r *tenantRecord) appendKey(b []byte) []byte   { return append(append(b, recTenant), r.name...) }
func (r *tenantRecord) appendValue(b []byte) []byte { return r.appendTo(b) }

func (r *tenantRecord) load(key, value *decoder) {
	r.name, key.b = string(key.b), nil
	r.decode(value)
}

func (m *Machine) loadTenant(r *tenantRecord) error {
	t := m.tenants[r.name]
	if t == nil || r.TenantLimits == (TenantLimits{}) {
		return ErrCorrupt
	}
	t.limits = r
	return nil
}

// applyTenant changes a tenant's limits. All guarantees together are never more than the pool: what no pool can hold
// cannot be kept. One may always be lowered, also where the pool has shrunk below what was guaranteed.
func (m *Machine) applyTenant(c *SetTenant, out *Results) {
	t, none := m.tenants[c.Tenant], c.Limits == TenantLimits{}
	switch {
	case m.settings.Version < VersionTenants:
		out.fail(protocol.CodeUnsupported)
		return
	case len(c.Tenant) == 0 || len(c.Tenant) > protocol.MaxNameBytes || c.Limits.MaxPins > MaxDurablePins:
		out.fail(protocol.CodeBadRequest)
		return
	case t == nil && none:
		out.fail(protocol.CodeNotFound)
		return
	case (t == nil || c.Limits.Guarantee > t.limits.Guarantee) && c.Limits.Guarantee > m.Guaranteeable(c.Tenant):
		out.fail(protocol.CodeNoSpace)
		return
	}
	if t == nil {
		var ok bool
		if t, ok = m.tenantOf(c.Tenant); !ok {
			out.fail(protocol.CodeLimit)
			return
		}
	}
	m.setLimits(t, c.Limits)
	out.code(0)
}

// setLimits replaces a tenant's limits, and its record.
func (m *Machine) setLimits(t *tenant, l TenantLimits) {
	if l == t.limits.TenantLimits {
		return
	}
	if t.limits.TenantLimits != (TenantLimits{}) {
		m.gone(t.limits)
	}
	t.limits = &tenantRecord{TenantLimits: l, name: t.name}
	if l != (TenantLimits{}) {
		m.changed(t.limits)
	}
}

// Guaranteeable returns how much of the pool can be guaranteed to a tenant: what is not to others.
func (m *Machine) Guaranteeable(name string) uint64 {
	left := m.poolBytes()
	for _, t := range m.tenants {
		if t.name != name {
			left -= min(left, t.limits.Guarantee)
		}
	}
	return left
}

// poolBytes is how many bytes regions can be cut from.
func (m *Machine) poolBytes() uint64 {
	n := uint64(0)
	for _, d := range m.devices {
		n += d.room()
	}
	return n
}

// recount keeps the sum of the regions of each tenant whose entries are served: those of its clients, and of clients that
// are gone. A region that was taken, or whose bytes were lost, is nobody's. Whoever changes owner, state or generation
// of a region, or the generation of its device, calls it.
func (r *region) recount() {
	var t *tenant
	if r.owner != nil && r.sound() {
		t = r.owner.tenant
	}
	if t == r.countedFor {
		return
	}
	if r.countedFor != nil {
		r.countedFor.space -= r.length
	}
	if t != nil {
		t.space += r.length
	}
	r.countedFor = t
}

// keeps reports whether a region is not to be taken for a session of another tenant (nil = it has ended), since that
// would leave less than its guarantee to the tenant that has it. Apply asks again what was planned: of plans that were
// made at the same time, each may be right, and all together not.
func keeps(r *region, by *session) bool {
	if r.owner == nil || !r.sound() || by != nil && by.tenant == r.owner.tenant {
		return false
	}
	t := r.owner.tenant
	return t.limits.Guarantee != 0 && t.space-r.length < t.limits.Guarantee
}
