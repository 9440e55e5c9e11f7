package meta

import (
	"math"

	"larder/meta/policy"
	"larder/protocol"
)

// applyRegister registers entries one by one; each has an outcome of its own. It reads the command as it goes, so that
// a batch costs no memory.
func (m *Machine) applyRegister(h Header, s *session, d *decoder, out *Results) {
	ctx := m.contextFor(s, decodeContext(d))
	n := d.count(4)
	out.code(0)
	out.uvarint(uint64(n)) //nolint:gosec // not negative
	if ctx != nil {
		ctx.refs++ // so that it does not go with the last entry, when this very command replaces that
	}
	m.bornBefore = m.head.births
	var e protocol.RegisterEntry
	for range n {
		decodeEntry(d, &e)
		if d.err != nil {
			return
		}
		m.register(h, s, ctx, &e, out)
	}
	if ctx != nil {
		m.releaseContext(ctx)
	}
}

func (m *Machine) register(h Header, s *session, ctx *contextRecord, e *protocol.RegisterEntry, out *Results) {
	if ctx == nil {
		out.buf = append(out.buf, regRefused)
		out.uvarint(uint64(protocol.CodeLimit))
		return
	}
	if e.Copy {
		m.registerCopy(h, s, ctx.tenant, e, out)
		return
	}
	if slot, ok := m.find(ctx.tenant, e.Key); ok {
		if m.alive(m.table.at(slot)) {
			m.registerExists(slot, e, out)
			return
		}
		if !e.Touch {
			m.drop(slot, m.whyDead(m.table.at(slot)), true)
		}
	}
	if e.HasPrefix && !e.Touch && e.Group <= math.MaxUint32 { // admit refuses a larger one
		if slot, ok := m.prefixTwin(ctx.handle, e.Hash, uint32(e.Group)); ok {
			m.registerExists(slot, e, out)
			m.stats.Deduplicated++
			return
		}
	}
	r, code := m.admit(h, s, e)
	if code != 0 {
		out.buf = append(out.buf, regRefused)
		out.uvarint(uint64(code))
		return
	}
	m.admitted(r, ctx, e)
	out.buf = append(out.buf, regNew)
}

// registerExists counts a use of an entry and tells where it lies.
func (m *Machine) registerExists(slot Slot, e *protocol.RegisterEntry, out *Results) {
	m.touch(slot, 1)
	m.ask(slot, e.Replicas)
	var l Location
	m.Location(slot, &l)
	out.buf = append(out.buf, regExists)
	if held := m.Key(slot); string(held) != string(e.Key) {
		out.bytes(held)
	} else {
		out.bytes(nil)
	}
	out.buf = l.appendTo(out.buf)
	m.stats.Existing++
}

// admit checks everything that can be wrong with a new entry.
func (m *Machine) admit(h Header, s *session, e *protocol.RegisterEntry) (*region, protocol.Code) {
	switch {
	case e.Touch:
		return nil, protocol.CodeNotFound
	case len(e.Key) > protocol.MaxKeyBytes:
		return nil, protocol.CodeKeyTooLong
	case e.KVLength == 0 || e.KVLength > MaxEntryBytes, e.Index > 1<<32-1,
		e.Group > 1<<32-1 || e.Group&0xffff > MaxGroupMembers: // which PREFIX_MATCH could not ask for
		return nil, protocol.CodeBadRequest
	}
	r := m.regions[RegionID(e.RegionID)]
	native := e.Epoch != 0 || s != nil && s.ttlMS != 0 // Maru's clients have neither
	switch {
	case r == nil || r.state == RegionDraining || native && r.epoch != e.Epoch:
		return nil, protocol.CodeStaleEpoch
	case native && (s == nil || r.owner != s || h.Session == 0):
		return nil, protocol.CodeNotOwner
	case r.state == RegionMarked:
		return nil, protocol.CodeRevoking
	case native && r.state != RegionOwned:
		return nil, protocol.CodeStaleEpoch
	case r.generation != r.device.Generation, r.device.mode != DeviceServing: // what is acknowledged is served
		return nil, protocol.CodeStaleGeneration
	case e.KVOffset > r.length || e.KVLength > r.length-e.KVOffset:
		return nil, protocol.CodeOutOfRegion
	case e.KVOffset%r.pageSize != 0:
		return nil, protocol.CodeMisaligned
	}
	first, end := r.span(e.KVOffset, e.KVLength)
	if end > r.pages() {
		return nil, protocol.CodeOutOfRegion
	}
	if r.overlaps(first, end) {
		return nil, protocol.CodeOverlap
	}
	return r, 0
}

// admitted makes the entry part of the state.
func (m *Machine) admitted(r *region, ctx *contextRecord, e *protocol.RegisterEntry) {
	slot := m.table.slots.lowest()
	end := m.table.end
	x := m.insert(slot, ctx.tenant, e.Key)
	m.sweepGrows(uint64(end))
	m.head.births++
	m.head.slots = m.table.end
	x.birth = m.head.births
	x.offset, x.length, x.checksum = e.KVOffset, uint32(e.KVLength), e.Checksum //nolint:gosec // checked by admit
	x.region, x.ctx = r.handle, ctx.handle
	x.added = m.head.now
	switch {
	case e.TTLMS != 0:
		x.expires = m.after(e.TTLMS)
	case m.settings.Policy == "ttl" && m.settings.TTLMS != 0:
		x.expires = m.after(m.settings.TTLMS)
	}
	x.want = m.asked(e.Replicas)
	if e.HasPrefix {
		x.flags |= flagPrefix
		x.hash, x.index, x.group = e.Hash, uint32(e.Index), uint32(e.Group) //nolint:gosec // checked by admit
		if e.Index > 0 {
			x.parent = m.prefixParent(ctx.handle, e.Parent, x.group)
		}
	}
	m.attach(slot, x, r, ctx)
	m.entrySum += m.entryHash(slot, x)
	m.orderSum += orderHash(slot, x.place())
	m.addToPolicy(slot, x)
	m.markEntry(slot)
	m.weigh(slot, x)
	if x.parent != None && !r.slow() {
		m.childAdded(x.parent)
	}
	m.stats.Registered++
	m.blockAdded(x, e.Parent)
}

// after returns the log time a while from now, at most the end of time.
func (m *Machine) after(ms uint64) uint64 { return m.head.now + min(ms, math.MaxUint64-m.head.now) }

// attach links an entry with its region, context and prefix. Rebuilding from the store uses it too.
func (m *Machine) attach(slot Slot, x *entry, r *region, ctx *contextRecord) {
	if x.flags&flagMoved == 0 { // otherwise its first place does it
		r.take(x, x.offset)
		m.linkRegion(slot, x, r)
	}
	ctx.refs++
	ctx.tenant.entries++
	ctx.tenant.bytes += uint64(x.length)
	if x.flags&flagPrefix != 0 {
		m.prefixInsert(slot, x)
	}
}

// linkRegion puts an entry in front of its region's list.
func (m *Machine) linkRegion(slot Slot, x *entry, r *region) {
	x.rprev, x.rnext = None, r.head
	if r.head != None {
		m.table.at(r.head).rprev = slot
	}
	r.head = slot
}

// drop removes an entry for whatever reason. With tell, the owner is told that its page is free: it does not know.
func (m *Machine) drop(slot Slot, why Reason, tell bool) {
	x := m.table.at(slot)
	r := m.regionOf(x)
	was := m.blockBefore(x)
	m.entrySum -= m.entryHash(slot, x)
	if x.places != 0 {
		m.dropPlaces(slot, x, why)
	}
	// An owner that loses the whole region learns of that in another way, and may already use its pages anew.
	if tell && why != ReasonTaken && m.out.WantEffects && r.state == RegionOwned && r.owner.open {
		m.out.Effects = append(m.out.Effects, Effect{Page: m.page(slot, true), Reason: why})
	} else if tell && m.out.WantEffects {
		m.out.Dropped = append(m.out.Dropped, slot)
	}
	for _, p := range m.pinsOf[slot] {
		m.forgetPin(p)
	}
	delete(m.pinsOf, slot)
	order := x.order()
	if why != ReasonEvicted && x.pins == 0 {
		m.policyOf(x).Remove(slot)
	}
	m.orderSum -= orderHash(slot, x.place())
	salt, slow := m.contextOf(x).tenant.salt, r.slow()
	m.detach(slot, x, r)
	parent := m.validParent(x)
	m.markEntry(slot)
	m.lacking.remove(slot)
	m.table.remove(slot, salt)
	if parent != None && !slow {
		m.childGone(parent, order)
	}
	m.stats.Removed[why]++
	m.blockAfter(&was, 0)
}

// evict removes an entry by the decision of its policy.
func (m *Machine) evict(slot Slot) {
	x := m.table.at(slot)
	m.policyOf(x).Evict(slot)
	m.drop(slot, ReasonEvicted, false)
}

func (m *Machine) detach(slot Slot, x *entry, r *region) {
	if x.flags&flagMoved == 0 {
		r.letGo(x, x.offset)
		m.unlinkRegion(x, r)
	} else {
		m.dropPlace(x, x.places)
	}
	ctx := m.contextOf(x)
	ctx.tenant.entries--
	ctx.tenant.bytes -= uint64(x.length)
	if x.flags&flagPrefix != 0 {
		m.prefixRemove(slot, x)
	}
	m.releaseContext(ctx)
}

// touch counts n uses of an entry.
func (m *Machine) touch(slot Slot, n uint32) {
	x := m.table.at(slot)
	if x.pins == 0 {
		m.policyOf(x).Touch(slot, n)
	}
	if m.regionOf(x).slow() {
		x.used = uint8(min(uint32(x.used)+n, 255))
	}
	m.stats.Touched += uint64(n)
}

// parityBit of entry.list says under which policy the entry was ordered, when the pool's policy has changed.
const parityBit = 0x80

// order is the entry's place as its policy sees it.
func (x *entry) order() policy.Order {
	return policy.Order{Stamp: x.stamp, Aux: x.aux, List: x.list &^ parityBit}
}

// setOrder replaces it and leaves the parity alone.
func (x *entry) setOrder(o policy.Order) {
	x.stamp, x.aux, x.list = o.Stamp, o.Aux, o.List|x.list&parityBit
}

// class is the class of the partition that the entry is in, if it is not hard-pinned.
func (x *entry) class() Class {
	if x.flags&flagSoft != 0 {
		return ClassSoft
	}
	return ClassNormal
}

// page describes the pages of an entry; with own, its key is copied.
func (m *Machine) page(slot Slot, own bool) Page {
	x := m.table.at(slot)
	return m.pageAt(slot, m.regionOf(x), x.offset, own)
}

// pageAt describes the pages of one location of an entry.
func (m *Machine) pageAt(slot Slot, r *region, offset uint64, own bool) Page {
	x := m.table.at(slot)
	p := Page{Key: m.table.key(x), Slot: slot, Region: r.id, Offset: offset, Length: uint64(x.length)}
	if own {
		p.Key = clone(p.Key)
	}
	if r.owner != nil {
		p.Owner = r.owner.id
	}
	return p
}

func (m *Machine) applyDelete(s *session, c *Delete, out *Results) {
	t := m.tenantFor(s)
	out.code(0)
	out.uvarint(uint64(len(c.Keys)))
	for _, key := range c.Keys {
		slot, ok := m.find(t, key)
		switch {
		case !ok || m.over(m.table.at(slot)):
			out.uvarint(uint64(protocol.CodeNotFound))
		case m.table.at(slot).pins > 0:
			out.uvarint(uint64(protocol.CodePinned))
		case c.Region != 0:
			m.deleteAt(s, slot, c, out)
		default:
			out.uvarint(0)
			p := m.page(slot, false)
			out.buf = p.appendTo(out.buf)
			m.drop(slot, ReasonDeleted, s == nil || p.Owner != s.id)
		}
	}
}

// deleteAt removes the location of an entry whose bytes are damaged. The entry lives on in a copy, if one is served, or goes.
func (m *Machine) deleteAt(s *session, slot Slot, c *Delete, out *Results) {
	if m.settings.Version < VersionTiers {
		out.uvarint(uint64(protocol.CodeUnsupported))
		return
	}
	x := m.table.at(slot)
	var (
		at placeID
		in *region
		p  Page
	)
	m.locations(x, func(id placeID, r *region, offset uint64) bool {
		if r.id == c.Region && c.Offset >= offset && c.Offset-offset < uint64(x.length) {
			at, in, p = id, r, m.pageAt(slot, r, offset, false)
		}
		return in == nil
	})
	if in == nil {
		out.uvarint(uint64(protocol.CodeNotFound))
		return
	}
	tell := s == nil || p.Owner != s.id
	isCopy, heir := at != 0 && (x.flags&flagMoved == 0 || at != x.places), placeID(0)
	if x.places != 0 && m.kept(x) {
		heir = m.servedCopy(x)
	}
	p.Copy = isCopy || heir != 0
	out.uvarint(0)
	out.buf = p.appendTo(out.buf)
	switch {
	case isCopy:
		m.loseCopy(at, ReasonLost, tell)
	case heir != 0:
		if tell {
			m.tell(slot, in, p.Offset, ReasonLost)
		}
		m.fall(slot, heir, false)
	default:
		m.drop(slot, ReasonLost, tell)
	}
}
