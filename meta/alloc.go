package meta

import "larder/protocol"

// applyAlloc carries out a plan, checking that what it names is still there. If it is not, the answer is CodePending,
// which is not remembered: the leader plans again under the same seq.
func (m *Machine) applyAlloc(s *session, c *Alloc, out *Results) {
	if s == nil || !s.open {
		out.fail(protocol.CodeSessionExpired)
		return
	}
	for _, slot := range c.Touched {
		if m.table.live(slot) {
			m.touch(slot, 1)
		}
	}
	out.code(0)
	out.buf = append(out.buf, c.Phase)
	mark := len(out.buf)
	switch {
	case len(c.Victims) > 0:
		m.allocEvict(s, c, out)
	case c.Region != 0:
		m.allocRegion(s, c, out)
	default:
		m.allocExtent(s, c, out)
	}
	if !out.failed() {
		out.buf = m.insertHead(out.buf, mark, s, c)
		m.stats.Allocs[min(c.Phase, 3)]++
	}
}

// insertHead puts what is known only afterwards in front of the body that starts at mark.
func (m *Machine) insertHead(b []byte, mark int, s *session, c *Alloc) []byte {
	m.scratch = append(m.scratch[:0], b[mark:]...)
	d := Results{buf: b[:mark]}
	d.uvarint(s.occupiedPages())
	d.uvarint(uint64(c.Keys))
	d.bytes(c.Found)
	return append(d.buf, m.scratch...)
}

// occupiedPages counts the pages of a session's regions that hold entries, by the entries' lengths.
func (s *session) occupiedPages() uint64 {
	n := uint64(0)
	for _, r := range s.regions {
		n += (r.liveBytes + r.pageSize - 1) / r.pageSize
	}
	return n
}

// allocEvict evicts exact victims from the session's own regions.
func (m *Machine) allocEvict(s *session, c *Alloc, out *Results) {
	out.bool(false)
	pages, n := m.scratch[:0], uint64(0)
	for _, v := range c.Victims {
		if !m.evictableNow(s, v) { // or evicted a moment ago, if it is named twice
			continue
		}
		pages = m.giveUp(s, v.Slot, pages)
		n++
	}
	m.scratch = pages
	if n == 0 {
		out.fail(protocol.CodePending)
		return
	}
	out.uvarint(n)
	out.buf = append(out.buf, pages...)
	m.stats.Evictions[1] += n
}

// evictableNow reports whether a victim is still what it was when it was chosen, unpinned, and in an own region.
func (m *Machine) evictableNow(s *session, v Victim) bool {
	if !m.table.live(v.Slot) {
		return false
	}
	x := m.table.at(v.Slot)
	r := m.regionOf(x)
	return x.birth == v.Birth && x.pins == 0 && (r.owner == s && r.state == RegionOwned || m.copyIn(s, x) != 0)
}

// copyIn is the copy of an entry that lies in a session's own region, 0 if none does.
func (m *Machine) copyIn(s *session, x *entry) placeID {
	p := m.firstCopy(x)
	for p != 0 {
		if r := m.placeRegion(m.places.at(p)); r.owner == s && r.state == RegionOwned {
			break
		}
		p = m.places.at(p).next
	}
	return p
}

// giveUp frees the pages that an entry has in a session's own region, and adds them to pages: a copy goes, an entry falls
// to one of its copies, or is evicted.
func (m *Machine) giveUp(s *session, slot Slot, pages []byte) []byte {
	x := m.table.at(slot)
	if p := m.copyIn(s, x); p != 0 {
		m.forgo(slot, m.placeRegion(m.places.at(p)))
		page := m.pageAt(slot, m.placeRegion(m.places.at(p)), m.places.at(p).offset, false)
		page.Copy = true
		pages = page.appendTo(pages)
		m.loseCopy(p, ReasonEvicted, false)
		return pages
	}
	page := m.page(slot, false)
	p := placeID(0)
	if x.places != 0 && m.kept(x) {
		p = m.servedCopy(x)
	}
	page.Copy = p != 0
	pages = page.appendTo(pages)
	if p != 0 {
		m.forgo(slot, m.regionOf(x))
		m.fall(slot, p, true)
	} else {
		m.evict(slot)
	}
	return pages
}

// allocRegion hands a whole region over: an own one emptied, or one that nobody writes to any more.
func (m *Machine) allocRegion(s *session, c *Alloc, out *Results) {
	r := m.regions[c.Region]
	own := r != nil && r.owner == s && r.state == RegionOwned
	if r == nil || r.pinned > 0 || c.PageSize == 0 || r.length < c.PageSize || r.length/c.PageSize > MaxRegionPages || r.beyond() ||
		r.device.Generation == 0 ||
		!own && r.state != RegionDeparted && r.state != RegionDraining ||
		r.state == RegionDraining && r.markedFor != 0 && r.markedFor != s.id && m.sessionOpen(r.markedFor) ||
		!own && (m.overLimit(s, c) || keeps(r, s)) {
		out.fail(protocol.CodePending)
		return
	}
	n := m.empty(r, MaxDropPerCommand)
	if r.state != RegionDraining { // what is left in such a one was counted when it was marked, or lost with its device
		m.stats.Evictions[min(c.Phase, 3)] += uint64(n) //nolint:gosec // not negative
	}
	if r.live > 0 {
		out.fail(protocol.CodePending)
		return
	}
	if !own && s.ttlMS == 0 {
		r = m.renumber(r)
	}
	m.give(r, c.PageSize, s)
	m.regionResult(r, out)
}

func (m *Machine) sessionOpen(id SessionID) bool {
	s := m.sessions[id]
	return s != nil && s.open
}

func (m *Machine) overLimit(s *session, c *Alloc) bool {
	return c.MaxOwned > 0 && uint64(len(s.regions)) >= c.MaxOwned || len(m.regions) >= MaxRegions
}

// allocExtent cuts a new region from free space.
func (m *Machine) allocExtent(s *session, c *Alloc, out *Results) {
	d := m.devices[c.Device]
	if d == nil || d.Generation == 0 || c.PageSize == 0 || c.Size < c.PageSize || c.Size/c.PageSize > MaxRegionPages ||
		c.Size%d.Align != 0 || m.overLimit(s, c) {
		out.fail(protocol.CodePending)
		return
	}
	r := m.newRegion(d, c.Size, c.PageSize, s)
	if r == nil {
		out.fail(protocol.CodePending)
		return
	}
	m.regionResult(r, out)
}

func (m *Machine) regionResult(r *region, out *Results) {
	var l Location
	r.locate(&l)
	out.bool(true)
	out.buf = l.appendTo(out.buf)
	out.uvarint(0) // no evicted pages
}
