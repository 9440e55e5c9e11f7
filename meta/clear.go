package meta

import (
	"bytes"
	"slices"

	"larder/protocol"
)

// clearMark kills the entries that were born up to a point, in contexts that match, with keys that have a prefix.
type clearMark struct {
	want   Context // empty fields match everything
	prefix []byte
	born   uint64
	left   uint64 // slots that sweeps have yet to look at for it
}

// alive reports whether an entry may be served as of the last stamped log time: it was not cleared, its bytes were not
// lost, its region not taken, its time is not over.
func (m *Machine) alive(x *entry) bool {
	return (m.regionOf(x).served() || x.places != 0 && m.servedCopy(x) != 0) && m.kept(x)
}

// kept reports whether an entry was not cleared, and its time is not over.
func (m *Machine) kept(x *entry) bool {
	return x.birth > m.head.clearedAll &&
		(x.expires == 0 || x.expires > m.head.now) && (len(m.head.marks) == 0 || !m.marked(x))
}

// over reports whether an entry will never be served again. One whose device is away may be.
func (m *Machine) over(x *entry) bool {
	sound := false
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		sound = r.sound()
		return !sound
	})
	return !sound || !m.kept(x)
}

func (m *Machine) marked(x *entry) bool {
	for i := range m.head.marks {
		c := &m.head.marks[i]
		if x.birth <= c.born && c.want.matches(&m.contextOf(x).Context) && bytes.HasPrefix(m.table.key(x), c.prefix) {
			return true
		}
	}
	return false
}

// whyDead says why an entry that is not alive died.
func (m *Machine) whyDead(x *entry) Reason {
	r := m.regionOf(x)
	switch {
	case r.generation != r.device.Generation:
		return ReasonLost
	case r.state > RegionDeparted:
		return ReasonTaken
	case x.expires != 0 && x.expires <= m.head.now:
		return ReasonExpired
	case m.kept(x): // its device is away, and it is given up for another entry
		return ReasonLost
	default:
		return ReasonCleared
	}
}

// applyClear marks what it names as dead; sweeps remove it. Its cost does not depend on how much that is.
func (m *Machine) applyClear(s *session, c *Clear, out *Results) {
	// Without a session it is an operator's, and reaches all tenants where it names none.
	want := Context{}
	if c.Context != nil && !c.All {
		want = *c.Context
	}
	if s != nil {
		want.Tenant = s.tenant.name
	}
	code := protocol.Code(0)
	switch {
	case c.All && s == nil:
		m.head.clearedAll = m.head.births
		m.blocksCleared()
	case c.All, c.validPrefix(), c.Context != nil && len(c.Prefix) == 0:
		code = m.mark(clearMark{want, c.Prefix, m.head.births, uint64(m.table.end)})
	default:
		code = protocol.CodeBadRequest
	}
	if code != 0 {
		out.fail(code)
		return
	}
	m.startSweep()
	out.code(0)
}

// mark adds a mark, or moves the one that says the same.
func (m *Machine) mark(c clearMark) protocol.Code {
	i := slices.IndexFunc(m.head.marks, func(o clearMark) bool { return o.want == c.want && bytes.Equal(o.prefix, c.prefix) })
	ofTenant := 0
	for j := range m.head.marks {
		if m.head.marks[j].want.Tenant == c.want.Tenant {
			ofTenant++
		}
	}
	switch {
	case m.table.count == 0: // no sweep would come to remove the mark
	case i >= 0:
		m.head.marks[i].born, m.head.marks[i].left = c.born, c.left
	case len(m.head.marks) >= MaxClearMarks, c.want.Tenant != "" && ofTenant >= MaxTenantMarks:
		return protocol.CodeBusy
	default:
		c.prefix = clone(c.prefix)
		m.head.marks = append(m.head.marks, c)
	}
	return 0
}

// validPrefix reports whether the command is by prefix, of all that a tenant has: those who are told of a CLEAR are told
// a prefix or a context.
func (c *Clear) validPrefix() bool {
	return len(c.Prefix) > 0 && len(c.Prefix) <= protocol.MaxKeyBytes &&
		(c.Context == nil || *c.Context == Context{Tenant: c.Context.Tenant} && len(c.Context.Tenant) <= protocol.MaxNameBytes)
}

// matches reports whether x has all that c names.
func (c *Context) matches(x *Context) bool {
	return (c.Tenant == "" || c.Tenant == x.Tenant) && (c.Model == "" || c.Model == x.Model) &&
		(c.LoRA == "" || c.LoRA == x.LoRA) && (c.Salt == "" || c.Salt == x.Salt) &&
		(c.BlockSize == 0 || c.BlockSize == x.BlockSize) && (c.Seed == 0 || c.Seed == x.Seed)
}

// startSweep has every slot looked at once from here on.
func (m *Machine) startSweep() { m.head.sweepLeft = uint64(m.table.end) }

// sweepGrows keeps what a sweep in progress has left to look at when the table grows beyond end: a sweep that goes on at
// the first slot after the last one comes by the new ones on its way.
func (m *Machine) sweepGrows(end uint64) {
	grown := uint64(m.table.end) - end
	if m.head.sweepAt+m.head.sweepLeft > end {
		m.head.sweepLeft += grown
	}
	for i := range m.head.marks {
		if c := &m.head.marks[i]; m.head.sweepAt+c.left > end {
			c.left += grown
		}
	}
}

// SweepPending returns how much is left for sweeps to do: slots to look at, and entries that go over to another policy.
func (m *Machine) SweepPending() uint64 { return m.head.sweepLeft + m.migrating() }

func (m *Machine) applySweep(c *Sweep, out *Results) {
	m.migrate(int(min(c.Limit, MaxChorePerCommand)))
	dropped := uint64(0)
	adopted, looked := 0, uint64(0)
	for range c.Limit {
		if m.head.sweepLeft == 0 || dropped >= MaxChorePerCommand || adopted >= MaxChorePerCommand {
			break
		}
		m.head.sweepLeft--
		looked++
		if m.head.sweepAt >= uint64(m.table.end) {
			m.head.sweepAt = 0
		}
		slot := Slot(m.head.sweepAt) //nolint:gosec // below table.end
		m.head.sweepAt++
		if !m.table.live(slot) {
			continue
		}
		if x := m.table.at(slot); !m.over(x) {
			if m.adopt(slot) {
				adopted++
			}
			dropped += uint64(m.prune(slot, m.emptied)) //nolint:gosec // a few
		} else {
			held := m.regionsOf(x)
			m.drop(slot, m.whyDead(x), true)
			dropped++
			for _, r := range held {
				m.emptied(r)
			}
		}
	}
	m.swept(looked)
	out.code(0)
	out.uvarint(dropped)
	out.uvarint(m.SweepPending())
}

// regionsOf are the regions that an entry has locations in.
func (m *Machine) regionsOf(x *entry) []*region {
	var few [protocol.MaxCopies + 1]*region
	list := few[:0]
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		list = append(list, r)
		return true
	})
	return list
}

// emptied drains a region that nobody writes to, once nothing is left in it.
func (m *Machine) emptied(r *region) {
	if r.live == 0 && (r.state == RegionDeparted || r.state == RegionDraining) {
		m.drain(r)
	}
}

// swept takes note that sweeps have looked at so many more slots. A mark has been carried out when all slots have been
// looked at since it was made, whatever was cleared after it: otherwise those who clear often would keep all marks.
func (m *Machine) swept(slots uint64) {
	m.head.marks = slices.DeleteFunc(m.head.marks, func(c clearMark) bool { return c.left <= slots })
	for i := range m.head.marks {
		m.head.marks[i].left -= slots
	}
	if len(m.head.marks) == 0 {
		m.head.marks = nil
	}
}

// idBits is how many ids of each kind an incarnation has, as a power of two, before they run into those of the next
// one. The server counts incarnations in milliseconds: no pool makes four million of anything in one.
const idBits = 22

// applyIncarnation makes everything that was known before unusable: the metadata may be older than the bytes. Sessions
// end, entries are dropped, and devices are out of service until Retire says that nobody can write to them any more:
// regions that were given after the snapshot are not known here, and their owners may be in the middle of a copy.
func (m *Machine) applyIncarnation(c *NewIncarnation, out *Results) {
	switch {
	case c.Incarnation > MaxIncarnation:
		out.fail(protocol.CodeBadRequest)
		return
	case c.Incarnation <= m.head.incarnation:
		out.code(0)
		return
	}
	first := m.head.incarnation == 0 // there was nothing before it
	m.head.incarnation = c.Incarnation
	m.head.clearedAll = m.head.births
	m.blocksCleared()
	names := uint64(0)
	if !first {
		names = c.Incarnation << idBits
		m.skipIDs(names)
	}
	m.endAllNames(names)
	for _, s := range m.sortedSessions() {
		m.closeSession(s)
		m.forgetSession(s)
	}
	for _, r := range m.sortedRegions() {
		m.head.epochs++
		r.epoch = m.head.epochs
		if r.state == RegionDeparted {
			m.abandon(r)
		}
		m.changed(r)
	}
	for _, d := range m.sortedDevices() {
		d.Generation = 0
		m.changed(d)
	}
	for _, r := range m.sortedRegions() {
		r.recount()
	}
	m.startSweep()
	out.code(0)
}

// skipIDs has all ids go on from where no incarnation before can have come: clients of a history that a restored
// snapshot has cut off know ids that were given after it, and must not be mistaken for their new bearers.
func (m *Machine) skipIDs(base uint64) {
	h := &m.head
	h.nextSession, h.nextRegion = max(h.nextSession, SessionID(base)), max(h.nextRegion, RegionID(base))
	h.births, h.epochs, h.nextPin = max(h.births, base), max(h.epochs, base), max(h.nextPin, base)
}

// ListKeys is Reading.ListKeys as of the last stamped log time.
func (m *Machine) ListKeys(tenantName string, prefix []byte, cursor uint64, limit int, fn func(s Slot)) uint64 {
	r := m.At(m.head.now)
	return r.ListKeys(tenantName, prefix, cursor, limit, fn)
}

// ListKeys calls fn with the live entries of a tenant ("" = all) whose keys have a prefix, from cursor on, at most
// limit, and returns the cursor for the next page, 0 at the end. A call looks at a bounded number of slots, so a page
// may be short, or empty, and yet not the last.
func (r *Reading) ListKeys(tenantName string, prefix []byte, cursor uint64, limit int, fn func(s Slot)) uint64 {
	const maxLooked = 1 << 18
	m := r.m
	end := min(uint64(m.table.end), cursor+maxLooked)
	for ; cursor < end && limit > 0; cursor++ {
		s := Slot(cursor) //nolint:gosec // below table.end
		if !m.table.live(s) {
			continue
		}
		x := m.table.at(s)
		if bytes.HasPrefix(m.table.key(x), prefix) && r.alive(x) &&
			(tenantName == "" || m.contextOf(x).tenant.name == tenantName) {
			fn(s)
			limit--
		}
	}
	if cursor >= uint64(m.table.end) {
		return 0
	}
	return cursor
}

func (m *Machine) sortedContexts() []*contextRecord {
	return sortedValues(m.contexts, func(c *contextRecord) uint64 { return uint64(c.id) })
}

func (m *Machine) sortedSessions() []*session {
	return sortedValues(m.sessions, func(s *session) uint64 { return uint64(s.id) })
}

// sortedRegions returns the regions by id. Callers must not add or remove any while they go through it.
func (m *Machine) sortedRegions() []*region { return m.regionList }

func (m *Machine) sortedDevices() []*device {
	return sortedValues(m.devices, func(d *device) uint64 { return uint64(d.id) })
}

// sortedValues returns a map's values in the order of their ids: the order of a map must never reach the state.
func sortedValues[K comparable, V any](in map[K]V, id func(V) uint64) []V {
	out := make([]V, 0, len(in))
	for _, v := range in {
		out = append(out, v)
	}
	slices.SortFunc(out, func(a, b V) int {
		switch x, y := id(a), id(b); {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	return out
}
