package model

import (
	"cmp"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// primary is where an entry has its place in the order of eviction.
func (e *entry) primary() *location { return e.at[0] }

// found is where a reader is sent: to the primary, if that is served, or to the next best.
func (e *entry) found() *location {
	if served := e.served(); len(served) > 0 {
		return served[0]
	}
	return e.primary()
}

// served returns where the bytes of an entry are served, the fastest first.
func (e *entry) served() []*location {
	at := slices.DeleteFunc(slices.Clone(e.at), func(l *location) bool { return !l.served() })
	slices.SortStableFunc(at, func(a, b *location) int { return cmp.Compare(a.rank(), b.rank()) })
	return at
}

// settleCopies puts the copies of an entry in their order: the fastest first, of those the oldest.
func (e *entry) settleCopies() {
	slices.SortFunc(e.at[1:], func(a, b *location) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.birth, b.birth))
	})
}

// first reports whether an entry was registered at a location, and its primary has not been raised from there.
func (l *location) first() bool { return l.birth == l.entry.birth }

// rank orders tiers, the fastest first. What is not known is as fast as can be.
func (l *location) rank() int { return slices.Index([]string{"dram", "ssd"}, l.region.device.Tier) }

// sound reports whether the bytes in a region are what they were, and nobody else's: it was not taken, nor were they lost.
func (r *region) sound() bool {
	return r.state != meta.RegionMarked && r.state != meta.RegionDraining && !r.lost()
}

func (l *location) sound() bool { return l.region.sound() }

// served reports whether readers may be sent there.
func (l *location) served() bool { return l.sound() && l.region.device.mode == meta.DeviceServing }

// hears reports whether a region's owner is to be told when pages there come free. One that loses the whole region hears
// of that in another way.
func (l *location) hears() bool { return l.region.state == meta.RegionOwned && l.region.owner.open }

// pages returns the pages of its region that a location takes, from first up to end.
func (l *location) pages() (first, end uint64) {
	size := l.region.pageSize
	return l.offset / size, (l.offset + l.entry.length + size - 1) / size
}

// page describes the pages of a location.
func (l *location) page() meta.Page {
	e := l.entry
	p := meta.Page{Key: []byte(e.key), Slot: e.slot, Region: l.region.id, Offset: l.offset, Length: e.length}
	if l.region.owner != nil {
		p.Owner = l.region.owner.id
	}
	return p
}

// describe describes where a location is.
func (l *location) describe() meta.Location {
	at := l.region.location()
	at.Offset, at.Length, at.Checksum = l.offset, l.entry.length, l.entry.checksum
	return at
}

// tell has the owner of pages hear that they are free, while their entry lives on or has more of them.
func (w *world) tell(l *location, why meta.Reason) {
	if l.hears() {
		p := l.page()
		p.Copy = true
		w.effects = append(w.effects, meta.Effect{Page: p, Reason: why})
	}
}

// heir is the copy that an entry lives on in when its primary goes, nil if it does not.
func (w *world) heir(e *entry) *location {
	for _, l := range e.at[1:] {
		if l.served() && w.kept(e) {
			return l
		}
	}
	return nil
}

// leaves takes a location from its entry, which has another: its heir, if it is the primary.
func (w *world) leaves(l *location) {
	e := l.entry
	w.moved = append(w.moved, e.slot)
	if l != e.primary() {
		e.at = slices.DeleteFunc(e.at, func(x *location) bool { return x == l })
		return
	}
	heir := w.heir(e)
	e.at = append([]*location{heir}, slices.DeleteFunc(e.at[1:], func(x *location) bool { return x == heir })...)
	e.settleCopies()
	w.joins(e)
	w.counts.Fallen++
}

// lose takes a location away, and with it the entry if that is the end of it.
func (w *world) lose(l *location, why meta.Reason) {
	e := l.entry
	switch {
	case l == e.primary() && w.heir(e) == nil:
		w.drop(e, why, true)
		return
	case why != meta.ReasonTaken:
		w.tell(l, why)
	}
	w.leaves(l)
}

// evict is lose where the owner is told by the result.
func (w *world) evict(l *location) {
	w.waive(l)
	if l == l.entry.primary() && w.heir(l.entry) == nil {
		w.drop(l.entry, meta.ReasonEvicted, false)
	} else {
		w.leaves(l)
	}
}

// prune takes away the locations of an entry that are of no use any more, as long as another one is served, and returns
// how many.
func (w *world) prune(e *entry) uint64 {
	n := uint64(0)
	for _, l := range append(slices.Clone(e.at[1:]), e.primary()) {
		if l.sound() || l == e.primary() && w.heir(e) == nil {
			continue
		}
		w.lose(l, meta.ReasonLost)
		w.emptied(l.region)
		n++
	}
	return n
}

// registerCopy adds a location to an entry.
func (w *world) registerCopy(s *session, tenant string, x *protocol.RegisterEntry) meta.RegisterResult {
	refuse := func(code protocol.Code) meta.RegisterResult { return meta.RegisterResult{Code: code} }
	e := w.find(tenant, string(x.Key))
	if s != nil && w.home(s) && x.Of != 0 { // a home knows entries by their slots, of whatever tenant
		e = nil
		if x.Slot < uint64(len(w.entries)) {
			e = w.entries[x.Slot]
		}
	}
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refuse(protocol.CodeUnsupported)
	case e == nil || e.key != string(x.Key) || !w.alive(e):
		return refuse(protocol.CodeNotFound)
	case x.Of != 0 && x.Of != e.birth, x.Of == 0 && e.birth <= w.before:
		return refuse(protocol.CodeNotFound)
	}
	r, code := w.admit(s, x)
	switch {
	case code != 0:
		return refuse(code)
	case x.KVLength != e.length, x.Checksum != 0 && e.checksum != 0 && x.Checksum != e.checksum:
		return refuse(protocol.CodeNotFound)
	case slices.ContainsFunc(e.at, func(l *location) bool { return l.sound() && l.region.device == r.device }):
		w.leave(e, x.MoveFrom, r.device)
		return refuse(protocol.CodeDuplicate)
	case len(e.at) > protocol.MaxCopies:
		return refuse(protocol.CodeLimit)
	}
	w.births++
	w.addCopy(&location{e, r, x.KVOffset, w.births})
	w.wish(e, x.Replicas)
	w.leave(e, x.MoveFrom, r.device)
	return meta.RegisterResult{New: true}
}

// addCopy adds a location to its entry, as the primary if it is in a faster tier than that.
func (w *world) addCopy(l *location) {
	e := l.entry
	w.counts.Copied++
	old := e.primary()
	if l.rank() >= old.rank() {
		e.at = append(e.at, l)
		e.settleCopies()
		return
	}
	if old.first() {
		w.births++
		old.birth = w.births
	}
	e.at = append([]*location{l}, e.at...)
	e.settleCopies()
	w.joins(e)
}

// leave takes the locations of an entry on a device away, or with the highest id there is those on all but one device.
// Pins keep them.
func (w *world) leave(e *entry, from uint64, but *device) {
	for _, l := range append(slices.Clone(e.at[1:]), e.primary()) {
		on := l.region.device
		goes := on != but && (from >= uint64(^meta.DeviceID(0)) || from == uint64(on.id))
		if goes && !e.hard() && (l != e.primary() || w.heir(e) != nil) {
			w.lose(l, meta.ReasonMoved)
		}
	}
}
