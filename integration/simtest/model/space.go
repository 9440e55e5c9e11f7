package model

import (
	"cmp"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// extent is a run of bytes of a device.
type extent struct{ offset, length uint64 }

// end is the end of the part of a device that regions are cut from.
func (d *device) end() uint64 { return d.Size / d.Align * d.Align }

// free returns what lies between a device's regions.
func (w *world) free(d *device) []extent {
	var regions []*region
	for _, r := range w.regions {
		if r.device == d {
			regions = append(regions, r)
		}
	}
	slices.SortFunc(regions, func(a, b *region) int { return cmp.Compare(a.offset, b.offset) })
	var free []extent
	at := d.DataOffset
	add := func(until uint64) {
		if until = min(until, d.end()); until > at {
			free = append(free, extent{at, until - at})
		}
	}
	for _, r := range regions {
		add(r.offset)
		at = max(at, r.offset+r.length)
	}
	add(d.end())
	return free
}

// beyond reports whether a region reaches beyond the end of its device, which has shrunk.
func (r *region) beyond() bool { return r.offset+r.length > r.device.end() }

// depart makes a region one that nobody writes to any more, whose entries are served.
func (w *world) depart(r *region) {
	if w.live(r) == 0 || r.lost() {
		w.abandon(r)
	} else {
		r.state = meta.RegionDeparted
	}
}

// abandon makes a region one without a writer, whose entries, if there are any, are dead.
func (w *world) abandon(r *region) {
	r.state = meta.RegionDraining
	if w.live(r) == 0 {
		w.disown(r)
	}
}

// drain does the same and removes them.
func (w *world) drain(r *region) {
	r.state = meta.RegionDraining
	w.empty(r, meta.MaxDropPerCommand)
	if w.live(r) == 0 {
		w.disown(r)
	}
}

// disown takes a region from its owner.
func (w *world) disown(r *region) {
	s := r.owner
	r.owner = nil
	w.forget(s)
}

// empty takes away what lies in a region that is being taken, the newest first, at most so much.
func (w *world) empty(r *region, most int) int {
	in := w.in(r)
	in = in[:min(len(in), most)]
	wanted := r.forSession != 0 || !r.device.draining && (r.state == meta.RegionOwned || r.state == meta.RegionDeparted)
	for _, l := range in {
		if wanted {
			w.waive(l)
		}
		w.lose(l, meta.ReasonTaken)
	}
	return len(in) + w.emptyMaru(r, most-len(in))
}

// give hands an empty region to a session under a new epoch.
func (w *world) give(r *region, pageSize uint64, s *session) {
	if r.owner != s {
		w.disown(r)
		r.owner = s
	}
	w.epochs++
	r.epoch, r.pageSize, r.generation, r.born, r.forSession = w.epochs, pageSize, r.device.Generation, w.now, 0
	r.state = meta.RegionOwned
}

func (w *world) alloc(s *session, c *meta.Alloc, raw []byte) (result, error) {
	if s == nil {
		return refused(protocol.CodeSessionExpired), nil
	}
	for _, slot := range c.Touched {
		if e := w.at(slot); e != nil {
			w.touch(e, 1)
		}
	}
	got := meta.AllocResult{Phase: c.Phase, Keys: c.Keys, Found: c.Found}
	var done bool
	switch {
	case len(c.Victims) > 0:
		done = w.allocEvict(s, c, &got)
	case c.Region != 0:
		done = w.allocRegion(s, c, &got)
	default:
		var err error
		if done, err = w.allocExtent(s, c, &got, raw); err != nil {
			return result{}, err
		}
	}
	if !done {
		return refused(protocol.CodePending), nil
	}
	for _, r := range w.owned(s) {
		bytes := uint64(0)
		for _, l := range w.in(r) {
			bytes += l.entry.length
		}
		got.Occupied += (bytes + r.pageSize - 1) / r.pageSize
	}
	w.counts.Allocs[min(c.Phase, 3)]++
	return result{value: got}, nil
}

// allocEvict frees what those of the named victims that are still there, unpinned, have in own regions: a copy or else,
// also if it is named again, the primary.
func (w *world) allocEvict(s *session, c *meta.Alloc, got *meta.AllocResult) bool {
	for _, v := range c.Victims {
		e := w.at(v.Slot)
		if e == nil || e.birth != v.Birth || e.hard() {
			continue
		}
		own := slices.DeleteFunc(slices.Clone(e.at), func(l *location) bool {
			return l.region.owner != s || l.region.state != meta.RegionOwned
		})
		if len(own) == 0 {
			continue
		}
		goes := own[0]
		if goes == e.primary() && len(own) > 1 {
			goes = own[1]
		}
		page := goes.page()
		page.Copy = goes != e.primary() || w.heir(e) != nil
		got.Evicted = append(got.Evicted, page)
		w.evict(goes)
	}
	w.counts.Evictions[1] += uint64(len(got.Evicted))
	return len(got.Evicted) > 0
}

// givable reports whether a region may be given to a session: its own, or one that nobody writes to and that is not
// kept for somebody else.
func (w *world) givable(r *region, s *session, c *meta.Alloc) bool {
	own := r.owner == s && r.state == meta.RegionOwned
	if !own {
		if r.state != meta.RegionDeparted && r.state != meta.RegionDraining || w.overLimit(s, c) {
			return false
		}
		waits := w.sessions[r.forSession]
		if r.state == meta.RegionDraining && waits != nil && waits.open && waits != s || w.guaranteed(r, s) {
			return false
		}
	}
	return w.pinned(r) == 0 && !r.beyond() && r.device.Generation != 0 && fits(r.length, c.PageSize)
}

// fits reports whether a region of this size can have pages of that one.
func fits(size, pageSize uint64) bool {
	return pageSize != 0 && size >= pageSize && size/pageSize <= meta.MaxRegionPages
}

func (w *world) overLimit(s *session, c *meta.Alloc) bool {
	return c.MaxOwned > 0 && uint64(len(w.owned(s))) >= c.MaxOwned || len(w.regions) >= meta.MaxRegions
}

// allocRegion hands a whole region over.
func (w *world) allocRegion(s *session, c *meta.Alloc, got *meta.AllocResult) bool {
	r := w.regions[c.Region]
	if r == nil || !w.givable(r, s, c) {
		return false
	}
	owned := r.state == meta.RegionOwned
	n := w.empty(r, meta.MaxDropPerCommand)
	if r.state != meta.RegionDraining {
		w.counts.Evictions[min(c.Phase, 3)] += uint64(n)
	}
	if w.live(r) > 0 {
		return false
	}
	if !owned && s.info.TTLMS == 0 { // clients of Maru's know regions by their numbers alone
		w.disown(r)
		delete(w.regions, r.id)
		w.lastRegion++
		r = &region{id: w.lastRegion, device: r.device, offset: r.offset, length: r.length}
		w.regions[r.id] = r
	}
	w.give(r, c.PageSize, s)
	got.Given, got.Location = true, r.location()
	return true
}

// allocExtent cuts a new region from free space: from which place is the machine's choice, as long as it is free.
func (w *world) allocExtent(s *session, c *meta.Alloc, got *meta.AllocResult, raw []byte) (bool, error) {
	d := w.devices[c.Device]
	if d == nil || d.Generation == 0 || !fits(c.Size, c.PageSize) || c.Size%d.Align != 0 || w.overLimit(s, c) {
		return false, nil
	}
	free := w.free(d)
	if !slices.ContainsFunc(free, func(e extent) bool { return e.length >= c.Size }) {
		return false, nil
	}
	code, body, err := meta.DecodeCode(raw)
	if err != nil || code != 0 {
		return false, w.violation("free space is given", free, code)
	}
	has, err := meta.DecodeAlloc(body)
	if err != nil {
		return false, w.violation("results decode", "an alloc's", body)
	}
	offset := has.RegionOffset
	if offset%d.Align != 0 || !slices.ContainsFunc(free, func(e extent) bool {
		return e.offset <= offset && offset-e.offset <= e.length && e.length-(offset-e.offset) >= c.Size
	}) {
		return false, w.violation("a region is cut from free space, aligned: no byte is given twice", free,
			extent{offset, c.Size})
	}
	w.lastRegion++
	r := &region{id: w.lastRegion, device: d, offset: offset, length: c.Size}
	w.regions[r.id] = r
	w.give(r, c.PageSize, s)
	got.Given, got.Location = true, r.location()
	return true, nil
}

func (w *world) returnRegion(s *session, c *meta.ReturnRegion) result {
	r := w.regions[c.Region]
	if r == nil || s == nil || r.owner != s || r.state == meta.RegionDraining {
		return refused(protocol.CodeNotFound)
	}
	if c.Epoch != 0 && c.Epoch != r.epoch {
		return refused(protocol.CodeStaleEpoch)
	}
	switch r.state {
	case meta.RegionOwned, meta.RegionOrphaned:
		w.depart(r)
	case meta.RegionMarked:
		w.drain(r)
	case meta.RegionDeparted, meta.RegionDraining:
	}
	return result{}
}

func (w *world) mark(c *meta.Mark) result {
	r := w.regions[c.Region]
	if r == nil || r.state != meta.RegionOwned && r.state != meta.RegionOrphaned || w.pinned(r) > 0 ||
		c.For != 0 && w.guaranteed(r, w.sessions[c.For]) {
		return refused(protocol.CodePending)
	}
	r.forSession = c.For
	w.counts.Evictions[3] += uint64(w.live(r))
	if r.owner.fenced {
		w.drain(r)
		return result{}
	}
	r.state = meta.RegionMarked
	w.empty(r, meta.MaxDropPerCommand)
	return result{}
}

func (w *world) revokeDone(s *session, c *meta.RevokeDone) result {
	r := w.regions[c.Region]
	switch {
	case r == nil || s == nil || r.owner != s || r.epoch != c.Epoch:
		return refused(protocol.CodeStaleEpoch)
	case r.state == meta.RegionMarked:
		w.drain(r)
	case r.state != meta.RegionDraining:
		return refused(protocol.CodeBadRequest)
	}
	return result{}
}

func (w *world) emptyRegion(c *meta.EmptyRegion) result {
	r := w.regions[c.Region]
	if r == nil || r.state == meta.RegionOwned || r.state == meta.RegionOrphaned ||
		r.state == meta.RegionDeparted && w.pinned(r) > 0 || c.For != 0 && w.guaranteed(r, w.sessions[c.For]) {
		return refused(protocol.CodePending)
	}
	n := w.empty(r, meta.MaxChorePerCommand)
	if r.state == meta.RegionDeparted {
		w.counts.Evictions[2] += uint64(n)
	}
	left := w.live(r)
	w.emptied(r)
	return result{value: meta.CountResult{Count: uint64(n), Left: uint64(left)}}
}

// emptied makes a region that nobody writes to and that has no entries left one that can be freed.
func (w *world) emptied(r *region) {
	if w.live(r) == 0 && (r.state == meta.RegionDeparted || r.state == meta.RegionDraining) {
		w.drain(r)
	}
}

func (w *world) freeRegion(c *meta.FreeRegion) result {
	r := w.regions[c.Region]
	if r == nil || r.state != meta.RegionDraining || w.live(r) > 0 {
		return refused(protocol.CodePending)
	}
	w.disown(r)
	delete(w.regions, r.id)
	return result{}
}

func (w *world) addDevice(c *meta.AddDevice) result {
	align := max(c.Align, meta.MinPageSize)
	switch {
	case c.UUID == "" || len(c.UUID) > protocol.MaxNameBytes || c.Generation == 0,
		c.DataOffset%align != 0, c.Size < c.DataOffset, c.Size > 1<<60:
		return refused(protocol.CodeBadRequest)
	case w.settings.Version < meta.VersionTiers && (c.Home != "" || c.NUMA != 0):
		return refused(protocol.CodeUnsupported)
	case len(w.devices) >= meta.MaxDevices:
		return refused(protocol.CodeLimit)
	}
	for _, d := range w.deviceList() {
		if d.UUID == c.UUID {
			return result{value: meta.CountResult{Count: uint64(d.id), Left: 1}}
		}
	}
	w.lastDevice++
	d := &device{AddDevice: *c, id: w.lastDevice}
	d.Align = align
	w.devices[d.id] = d
	return result{value: meta.CountResult{Count: uint64(d.id)}}
}

// retire gives a device a new generation: nothing that lay there is served any more.
func (w *world) retire(c *meta.Retire) result {
	d := w.devices[c.Device]
	switch {
	case d == nil || c.Generation == 0:
		return refused(protocol.CodeNotFound)
	case d.Generation == c.Generation:
		return result{}
	case d.Generation == 0 && !c.Fenced:
		return refused(protocol.CodeForbidden)
	}
	d.Generation, d.mode, d.until = c.Generation, meta.DeviceServing, 0
	w.cancelTasks(d)
	d.BootID, d.Path, d.Size = cmp.Or(c.BootID, d.BootID), cmp.Or(c.Path, d.Path), cmp.Or(c.Size, d.Size)
	for _, r := range w.regionList() {
		switch {
		case r.device != d || r.state == meta.RegionDraining:
		case c.Fenced || r.state == meta.RegionDeparted || r.state == meta.RegionOwned && r.owner.fenced:
			w.abandon(r)
		case r.state == meta.RegionOwned:
			r.state, r.forSession = meta.RegionMarked, 0
		}
	}
	w.startSweep()
	return result{}
}

func (w *world) dropDevice(c *meta.DropDevice) result {
	d := w.devices[c.Device]
	if d == nil {
		return refused(protocol.CodeNotFound)
	}
	for _, r := range w.regions {
		if r.device == d {
			return refused(protocol.CodeBusy)
		}
	}
	w.cancelTasks(d)
	delete(w.devices, d.id)
	return result{}
}
