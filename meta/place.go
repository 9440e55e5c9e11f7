package meta

import (
	"cmp"
	"encoding/binary"
	"slices"

	"larder/meta/policy"
	"larder/protocol"
)

// placeID names a place within this process. 0 is none. It never leaves the machine.
type placeID uint32

// place is a location of an entry beside the one that it was registered at. Places of an entry are chained: the primary
// comes first if the entry has been moved (flagMoved), then the copies, of the fastest tier first, of those the oldest
// first. It has no pointers, as entries have none.
type place struct {
	birth        uint64 // unique and increasing, of the births of entries
	offset       uint64 // in the region
	slot         Slot   // of the entry
	next         placeID
	region       handle
	rprev, rnext placeID // places in the same region
}

// placeSlab is how many places are allocated at a time, as a power of two.
const placeSlab = 10

// places holds the places.
type places struct {
	slabs []*[1 << placeSlab]place
	free  placeID // the first free one; others follow by next
	end   placeID
	count uint64
}

func (t *places) at(p placeID) *place { return &t.slabs[p>>placeSlab][p&(1<<placeSlab-1)] }

// put makes a place.
func (t *places) put(v place) placeID {
	p := t.free
	if p != 0 {
		t.free = t.at(p).next
	} else {
		t.end++ // 0 is none
		p = t.end
		for int(p)>>placeSlab >= len(t.slabs) {
			t.slabs = append(t.slabs, new([1 << placeSlab]place))
		}
	}
	t.count++
	*t.at(p) = v
	return p
}

func (t *places) drop(p placeID) {
	*t.at(p) = place{next: t.free}
	t.free = p
	t.count--
}

// tierRank orders tiers, the fastest first.
func tierRank(tier string) int { return max(protocol.TierRank(tier), 0) }

func (r *region) rank() int { return tierRank(r.device.Tier) }

// slow reports whether a device is of the slowest tier.
func (d *device) slow() bool { return tierRank(d.Tier) == tierRank("ssd") }

// slow reports whether what lies in a region is in the slowest tier. Prefix-aware policies do not count children there:
// they would keep their parents in a fast tier for ever.
func (r *region) slow() bool { return r.device.slow() }

func (m *Machine) placeRegion(p *place) *region { return m.regionAt.at[p.region] }

// locations calls fn with every location of an entry, the primary first, until it returns false. p is 0 for the one that
// the entry was registered at.
func (m *Machine) locations(x *entry, fn func(p placeID, r *region, offset uint64) bool) {
	if x.flags&flagMoved == 0 && !fn(0, m.regionOf(x), x.offset) {
		return
	}
	for p := x.places; p != 0; {
		v := m.places.at(p)
		next := v.next
		if !fn(p, m.placeRegion(v), v.offset) {
			return
		}
		p = next
	}
}

// copies counts the locations of an entry beside its primary.
func (m *Machine) copies(x *entry) (n int) {
	for p := m.firstCopy(x); p != 0; p = m.places.at(p).next {
		n++
	}
	return n
}

// firstCopy is the first place of an entry that is not its primary.
func (m *Machine) firstCopy(x *entry) placeID {
	if x.flags&flagMoved != 0 {
		return m.places.at(x.places).next
	}
	return x.places
}

// servedCopy is the first copy of an entry that is served, 0 if none is.
func (m *Machine) servedCopy(x *entry) placeID {
	p := m.firstCopy(x)
	for p != 0 && !m.placeRegion(m.places.at(p)).served() {
		p = m.places.at(p).next
	}
	return p
}

// take occupies the pages of a location of an entry.
func (r *region) take(x *entry, offset uint64) {
	first, end := r.span(offset, uint64(x.length))
	r.occupy(first, end, true)
	r.live++
	r.liveBytes += uint64(x.length)
	if x.pins > 0 {
		r.pinned++
	}
}

// letGo frees them.
func (r *region) letGo(x *entry, offset uint64) {
	first, end := r.span(offset, uint64(x.length))
	r.occupy(first, end, false)
	r.live--
	r.liveBytes -= uint64(x.length)
	if x.pins > 0 {
		r.pinned--
	}
}

// pinned has the regions of all locations of an entry know that it is hard-pinned from now on, or with by -1 that it is
// no more: who holds it may have found it in any of them.
func (m *Machine) pinned(x *entry, by int32) {
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		r.pinned += uint32(by) //nolint:gosec // by is 1 or -1: wraps to a subtraction
		return true
	})
}

// addPlace makes a place of an entry, and enters it in its region's list, but not in the entry's chain.
func (m *Machine) addPlace(slot Slot, r *region, offset, birth uint64) placeID {
	p := m.places.put(place{birth: birth, offset: offset, slot: slot, region: r.handle})
	m.linkPlace(p, r)
	return p
}

// linkPlace puts a place in front of its region's list.
func (m *Machine) linkPlace(p placeID, r *region) {
	v := m.places.at(p)
	v.rprev, v.rnext = 0, r.places
	if r.places != 0 {
		m.places.at(r.places).rprev = p
	}
	r.places = p
}

// dropPlace takes a place out of its region and forgets it. It is in no chain any more.
func (m *Machine) dropPlace(x *entry, p placeID) {
	v := m.places.at(p)
	r := m.placeRegion(v)
	if v.rprev == 0 {
		r.places = v.rnext
	} else {
		m.places.at(v.rprev).rnext = v.rnext
	}
	if v.rnext != 0 {
		m.places.at(v.rnext).rprev = v.rprev
	}
	r.letGo(x, v.offset)
	m.places.drop(p)
}

// chain puts a place among the copies of an entry.
func (m *Machine) chain(x *entry, p placeID) {
	v := m.places.at(p)
	at := &x.places
	if x.flags&flagMoved != 0 {
		at = &m.places.at(x.places).next
	}
	for *at != 0 && m.before(m.places.at(*at), v) {
		at = &m.places.at(*at).next
	}
	v.next, *at = *at, p
	m.placeRegion(v).copyBytes += uint64(x.length)
}

// before reports whether one copy comes before another.
func (m *Machine) before(a, b *place) bool {
	return cmp.Or(cmp.Compare(m.placeRegion(a).rank(), m.placeRegion(b).rank()), cmp.Compare(a.birth, b.birth)) < 0
}

// unchain takes a place out of the chain of its entry.
func (m *Machine) unchain(x *entry, p placeID) {
	at := &x.places
	for *at != p {
		at = &m.places.at(*at).next
	}
	*at = m.places.at(p).next
	m.placeRegion(m.places.at(p)).copyBytes -= uint64(x.length)
}

// registerCopy adds a location to an entry, for REGISTER with Copy.
func (m *Machine) registerCopy(h Header, s *session, t *tenant, e *protocol.RegisterEntry, out *Results) {
	slot, code := m.copyOf(s, t, e)
	var r *region
	if code == 0 {
		r, code = m.admit(h, s, e)
	}
	if code == 0 {
		code = m.mayCopy(m.table.at(slot), r, e)
	}
	if m.settings.Version < VersionTiers {
		code = protocol.CodeUnsupported
	}
	if code == 0 {
		m.addCopy(slot, r, e.KVOffset)
		m.ask(slot, e.Replicas)
	}
	from := DeviceID(min(e.MoveFrom, uint64(^DeviceID(0))))
	if from != 0 && (code == 0 || code == protocol.CodeDuplicate) { // what lies there already need not come to leave the others
		m.leave(slot, from, r.device)
	}
	if code != 0 {
		out.buf = append(out.buf, regRefused)
		out.uvarint(uint64(code))
		return
	}
	out.buf = append(out.buf, regNew)
}

// copyOf finds the entry that a copy is of.
func (m *Machine) copyOf(s *session, t *tenant, e *protocol.RegisterEntry) (Slot, protocol.Code) {
	var slot Slot
	var ok bool
	if home := s != nil && m.home(s); home && e.Of != 0 {
		slot = Slot(min(e.Slot, uint64(None)))
		ok = m.table.live(slot) && string(m.Key(slot)) == string(e.Key)
	} else {
		slot, ok = m.find(t, e.Key)
	}
	if !ok || !m.alive(m.table.at(slot)) {
		return None, protocol.CodeNotFound
	}
	birth := m.table.at(slot).birth
	if e.Of == 0 && birth <= m.bornBefore || e.Of != 0 && birth != e.Of {
		return None, protocol.CodeNotFound
	}
	return slot, 0
}

// mayCopy checks that a copy is one of the entry's bytes, and that the entry has room for it.
func (m *Machine) mayCopy(x *entry, r *region, e *protocol.RegisterEntry) protocol.Code {
	if uint64(x.length) != e.KVLength || e.Checksum != 0 && x.checksum != 0 && e.Checksum != x.checksum {
		return protocol.CodeNotFound
	}
	code := protocol.Code(0)
	m.locations(x, func(_ placeID, o *region, _ uint64) bool {
		if o.device == r.device && o.sound() {
			code = protocol.CodeDuplicate
		}
		return code == 0
	})
	if code == 0 && m.copies(x) >= protocol.MaxCopies {
		code = protocol.CodeLimit
	}
	return code
}

// addCopy adds a location to an entry. One in a faster tier than the primary becomes the primary.
func (m *Machine) addCopy(slot Slot, r *region, offset uint64) {
	m.place(slot, func(x *entry) {
		m.head.births++
		r.take(x, offset)
		p := m.addPlace(slot, r, offset, m.head.births)
		if r.rank() < m.regionOf(x).rank() {
			if m.regionOf(x).slow() {
				m.stats.Promoted++
				m.stats.PromotedSize += uint64(x.length)
			}
			m.raise(slot, x, p)
		} else {
			m.chain(x, p)
		}
	})
	m.stats.Copied++
}

// place changes where an entry lies. If its primary does, the entry goes to the partition of the new one's region, as its
// newest entry.
func (m *Machine) place(slot Slot, change func(x *entry)) {
	x := m.table.at(slot)
	was := m.blockBefore(x)
	m.entrySum -= m.entryHash(slot, x)
	change(x)
	m.entrySum += m.entryHash(slot, x)
	m.markEntry(slot)
	m.weigh(slot, x)
	if was.is {
		m.blockAfter(&was, m.held(x))
	}
}

// raise makes a place that is in no chain the primary of an entry, and the old primary a copy.
func (m *Machine) raise(slot Slot, x *entry, p placeID) {
	old := m.regionOf(x)
	m.move(slot, x, false, func() {
		if x.flags&flagMoved == 0 {
			m.unlinkRegion(x, old)
			m.head.births++
			q := m.addPlace(slot, old, x.offset, m.head.births)
			x.flags |= flagMoved
			m.places.at(p).next, x.places = x.places, p
			m.chain(x, q)
			return
		}
		was := x.places
		x.places = m.places.at(was).next
		m.places.at(p).next, x.places = x.places, p
		m.chain(x, was)
	})
}

// fall makes a copy the primary of an entry and frees the old primary's pages. evicted says that its policy chose it.
func (m *Machine) fall(slot Slot, p placeID, evicted bool) {
	m.place(slot, func(x *entry) {
		old := m.regionOf(x)
		m.move(slot, x, evicted, func() {
			m.unchain(x, p)
			if x.flags&flagMoved == 0 {
				m.unlinkRegion(x, old)
				old.letGo(x, x.offset)
				x.flags |= flagMoved
			} else {
				was := x.places
				x.places = m.places.at(was).next
				m.dropPlace(x, was)
			}
			m.places.at(p).next, x.places = x.places, p
		})
	})
	m.parted(slot)
	m.stats.Fallen++
}

// parted notes that an entry which lives on has lost a location.
func (m *Machine) parted(slot Slot) {
	if m.out.WantEffects {
		m.out.Parted = append(m.out.Parted, slot)
	}
}

// move takes an entry from the partition of its old primary to that of the new one, which change has put first in the
// chain.
func (m *Machine) move(slot Slot, x *entry, evicted bool, change func()) {
	old, order, parent := m.regionOf(x), x.order(), m.validParent(x)
	switch {
	case x.pins > 0: // no policy orders it
	case evicted:
		m.policyOf(x).Evict(slot)
	default:
		m.policyOf(x).Remove(slot)
	}
	change()
	v := m.places.at(x.places)
	x.region, x.offset, x.used = v.region, v.offset, 0
	now := m.regionOf(x)
	if x.pins == 0 {
		// What the old partition's policy noted means nothing to this one.
		(*policyTable)(m).SetOrder(slot, policy.Order{})
		m.addToPolicy(slot, x)
	}
	switch {
	case parent == None || old.slow() == now.slow():
	case now.slow():
		m.childGone(parent, order)
	default:
		m.childAdded(parent)
	}
}

// unlinkRegion takes an entry out of its region's list.
func (m *Machine) unlinkRegion(x *entry, r *region) {
	if x.rprev == None {
		r.head = x.rnext
	} else {
		m.table.at(x.rprev).rnext = x.rnext
	}
	if x.rnext != None {
		m.table.at(x.rnext).rprev = x.rprev
	}
	x.rprev, x.rnext = None, None
}

// lose takes the primary of an entry away. The entry lives on in a copy, if one is served, or goes. The owner of the pages
// that come free is told.
func (m *Machine) lose(slot Slot, why Reason) {
	x := m.table.at(slot)
	p := placeID(0)
	if x.places != 0 && m.kept(x) {
		p = m.servedCopy(x)
	}
	if p == 0 {
		m.drop(slot, why, true)
		return
	}
	if why != ReasonTaken {
		m.tell(slot, m.regionOf(x), x.offset, why)
	}
	m.fall(slot, p, false)
}

// loseCopy frees a copy's pages. With tell, their owner is told.
func (m *Machine) loseCopy(p placeID, why Reason, tell bool) {
	v := m.places.at(p)
	slot := v.slot
	if tell {
		m.tell(slot, m.placeRegion(v), v.offset, why)
	}
	m.place(slot, func(x *entry) {
		m.unchain(x, p)
		m.dropPlace(x, p)
	})
	m.parted(slot)
}

// tell has the owner of pages hear that they are free, while their entry lives on, or before more of it is told.
func (m *Machine) tell(slot Slot, r *region, offset uint64, why Reason) {
	if !m.out.WantEffects || r.state != RegionOwned || !r.owner.open {
		return // see drop
	}
	p := m.pageAt(slot, r, offset, true)
	p.Copy = true
	m.out.Effects = append(m.out.Effects, Effect{Page: p, Reason: why})
}

// dropPlaces takes all places of an entry away that goes, but a moved primary, which goes with the entry.
func (m *Machine) dropPlaces(slot Slot, x *entry, why Reason) {
	for p := m.firstCopy(x); p != 0; {
		next := m.places.at(p).next
		v := m.places.at(p)
		m.tell(slot, m.placeRegion(v), v.offset, why)
		m.unchain(x, p)
		m.dropPlace(x, p)
		p = next
	}
}

// leave takes the locations of an entry on a device away, or, if from is the last id there is, those on all devices but to.
func (m *Machine) leave(slot Slot, from DeviceID, to *device) {
	x := m.table.at(slot)
	goes := func(r *region) bool { return r.device != to && (from == ^DeviceID(0) || r.device.id == from) }
	for p := m.firstCopy(x); p != 0; {
		next := m.places.at(p).next
		if x.pins == 0 && goes(m.placeRegion(m.places.at(p))) { // a pin keeps the bytes where readers may have found them
			m.loseCopy(p, ReasonMoved, true)
		}
		p = next
	}
	if x.pins == 0 && goes(m.regionOf(x)) && m.servedCopy(x) != 0 {
		m.lose(slot, ReasonMoved)
	}
}

// prune removes the locations of a live entry whose bytes are lost, or whose regions were taken, and calls gone with the
// regions that they were in.
func (m *Machine) prune(slot Slot, gone func(r *region)) (pruned int) {
	x := m.table.at(slot)
	if x.places == 0 {
		return 0
	}
	for p := m.firstCopy(x); p != 0; {
		next := m.places.at(p).next
		if r := m.placeRegion(m.places.at(p)); !r.sound() {
			m.loseCopy(p, ReasonLost, true)
			gone(r)
			pruned++
		}
		p = next
	}
	if r := m.regionOf(x); !r.sound() && m.servedCopy(x) != 0 {
		m.lose(slot, ReasonLost)
		gone(r)
		pruned++
	}
	return pruned
}

// inherit gives a session the regions of an earlier one of the same home, which has ended, under new epochs, and the
// order of what lies there with them.
func (m *Machine) inherit(from, to *session) {
	for _, p := range from.parts {
		put := func(bit uint32) func(page uint32, data []byte) {
			return func(page uint32, data []byte) {
				m.edits = append(m.edits, edit{p.appendKey(nil, page|bit), clone(data)})
			}
		}
		m.discard(p, p.pol, 0)
		if p.old != nil {
			m.discard(p, p.old, oldPages)
		}
		p.session = to
		p.pol.FlushState(true, put(0))
		if p.old != nil {
			p.old.FlushState(true, put(oldPages))
		}
	}
	to.parts, from.parts = from.parts, nil
	to.regions, from.regions = from.regions, nil
	for _, r := range to.regions {
		r.owner = to
		m.head.epochs++
		r.epoch = m.head.epochs
		m.changed(r)
		r.recount()
	}
}

// appendPlaces writes where an entry lies beside where it was registered, the first first.
func (m *Machine) appendPlaces(b []byte, x *entry) []byte {
	b = append(b, uint8(m.copies(x))+x.flags&flagMoved/flagMoved) //nolint:gosec // at most MaxCopies and one
	for p := x.places; p != 0; p = m.places.at(p).next {
		v := m.places.at(p)
		b = binary.AppendUvarint(b, v.birth)
		b = binary.AppendUvarint(b, uint64(m.placeRegion(v).id))
		b = binary.AppendUvarint(b, v.offset)
	}
	return b
}

// loadPlaces reads them back, in their order.
func (m *Machine) loadPlaces(slot Slot, x *entry, d *decoder) error {
	last := &x.places
	for n := d.byte(); n > 0; n-- {
		birth, id, offset := d.uvarint(), RegionID(d.uvarint()), d.uvarint()
		r, length := m.regions[id], uint64(x.length)
		if d.err != nil || n > protocol.MaxCopies+1 || r == nil || birth == 0 || birth > m.head.births ||
			offset%r.pageSize != 0 || offset > r.length || length > r.length-offset {
			return ErrCorrupt
		}
		if first, end := r.span(offset, length); end > r.pages() || r.overlaps(first, end) {
			return ErrCorrupt
		}
		r.take(x, offset)
		if primary := x.flags&flagMoved != 0 && x.places == 0; !primary {
			r.copyBytes += length
		}
		*last = m.places.put(place{birth: birth, offset: offset, slot: slot, region: r.handle})
		last = &m.places.at(*last).next
	}
	if x.flags&flagMoved != 0 && (x.places == 0 || m.places.at(x.places).region != x.region || m.places.at(x.places).offset != x.offset) {
		return ErrCorrupt
	}
	return nil
}

// linkPlaces lists the places of every region in the order in which they were made, as linkRegions does for entries.
func (m *Machine) linkPlaces() {
	order := make([]placeID, 0, m.places.count)
	for p := placeID(1); p <= m.places.end; p++ {
		if m.places.at(p).birth != 0 {
			order = append(order, p)
		}
	}
	slices.SortFunc(order, func(a, b placeID) int { return cmp.Compare(m.places.at(a).birth, m.places.at(b).birth) })
	for _, p := range order {
		m.linkPlace(p, m.placeRegion(m.places.at(p)))
	}
}

// placesHash sums up the places of an entry for its hash.
func (m *Machine) placesHash(h uint64, x *entry) uint64 {
	for p := x.places; p != 0; p = m.places.at(p).next {
		v := m.places.at(p)
		h = mix(mix(h^v.birth) ^ v.offset ^ uint64(m.placeRegion(v).id)<<40)
	}
	return h
}
