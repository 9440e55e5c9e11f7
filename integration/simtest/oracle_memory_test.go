package simtest

import (
	"maps"
	"slices"

	"larder/meta"
)

// lease is a promise that pages stay put, as its holder counts it.
type lease struct {
	c    *client
	mem  *memory
	from uint64
	n    uint64
	end  int64 // in true time
	key  string
	maru *maruOp // what made the entry, if one of Maru's clients did
}

// void reports whether the writer has the page again by right, as Maru's protocol cannot exclude: see [sim.maruCopied].
func (l *lease) void() bool { return l.maru != nil && l.maru.givenUp }

func (l *lease) covers(page uint64) bool { return page >= l.from && page < l.from+l.n }

// leaseBegins notes a lease whose holder is going to read.
func (s *sim) leaseBegins(c *client, mem *memory, from, n uint64, end int64, key string) *lease {
	left := end - c.clock.Boottime()
	l := &lease{c: c, mem: mem, from: from, n: n, end: s.now + c.clock.length(left), key: key}
	mem.readers = append(mem.readers, l)
	s.cover.Leases++
	return l
}

// leaseRenewed notes that its holder has been told, in time, that it lasts longer.
func (s *sim) leaseRenewed(l *lease, end int64) {
	l.end = max(l.end, s.now+l.c.clock.length(end-l.c.clock.Boottime()))
}

// leaseEnds notes that its holder reads no more.
func (s *sim) leaseEnds(l *lease) {
	l.mem.readers = slices.DeleteFunc(l.mem.readers, func(x *lease) bool { return x == l })
}

// leasesEnd ends what a dead process held.
func (s *sim) leasesEnd(c *client) {
	mems := slices.Collect(maps.Values(c.maps))
	for _, d := range s.devices {
		mems = append(mems, d.mem)
	}
	for _, mem := range mems {
		mem.readers = slices.DeleteFunc(mem.readers, func(l *lease) bool { return l.c == c })
	}
}

// pinned notes that an entry was pinned, and acknowledged so: its page stays until the pin is undone, the session ends,
// or the entry goes by a command that pins do not stop (CLEAR, RETURN, a lost device).
func (s *sim) pinned(c *client, key string) {
	s.pins[pinKey{c.pid, key}] = true
}

// pinKey is who pinned what.
type pinKey struct {
	pid uint64
	key string
}

func (s *sim) unpin(c *client, key string) { delete(s.pins, pinKey{c.pid, key}) }

func (s *sim) pinsEnd(c *client) {
	for k := range s.pins {
		if k.pid == c.pid {
			delete(s.pins, k)
		}
	}
}

// write is a client's store into a page of a region of its. It checks that nobody was promised that page.
func (s *sim) write(c *client, r *cregion, page int, v stamp) {
	at := r.at(page)
	if at >= uint64(len(r.mem.pages)) {
		s.fail("bounds", "client %d writes page %d of a device with %d", c.n, at, len(r.mem.pages))
		return
	}
	for _, l := range r.mem.readers {
		if l.covers(at) && s.now < l.end && !l.void() {
			s.fail("lease", "client %d writes %q to page %d of region %d, which client %d reads as %q under a lease for %d µs more",
				c.n, v.key, page, r.id, l.c.n, l.key, (l.end-s.now)/1000)
		}
	}
	for _, h := range r.mem.owners {
		if h.r != r && h.covers(at) {
			s.fail("owner", "client %d writes to page %d, which client %d owns in region %d", c.n, at, h.c.n, h.r.id)
		}
	}
	for _, d := range s.devices {
		if d.mem != r.mem {
			continue
		}
		for p, key := range s.log.at {
			if p.page == at && s.device(p.device) == d {
				s.fail("reuse", "client %d writes %q to page %d of region %d, where %q lies", c.n, v.key, page, r.id, key)
			}
		}
	}
	r.mem.pages[at] = v
	s.cover.PagesWritten++
}

// accepted checks bytes that a reader takes for good.
func (s *sim) accepted(c *client, key string, got []stamp) (version uint64) {
	s.cover.PagesRead += uint64(len(got))
	for _, g := range got {
		if g.key != key || g.version != got[0].version {
			s.fail("bytes", "client %d reads %q and takes %v for it", c.n, key, got)
		}
	}
	return got[0].version
}

// holding is a claim of a process that pages are its own: while it lasts, the process may write there at any time.
type holding struct {
	c   *client
	r   *cregion
	mem *memory
}

func (h *holding) covers(page uint64) bool {
	return page >= h.r.offset/pageSize && page < (h.r.offset+h.r.length)/pageSize
}

// hold notes that a client takes a region for its own. No other process may do so at the same time.
func (s *sim) hold(c *client, r *cregion) *holding {
	h := &holding{c: c, r: r, mem: r.mem}
	for _, o := range r.mem.owners {
		if o.r.offset < r.offset+r.length && r.offset < o.r.offset+o.r.length {
			s.fail("owner", "client %d owns region %d (epoch %d), which overlaps region %d (epoch %d) of client %d", c.n, r.id,
				r.epoch, o.r.id, o.r.epoch, o.c.n)
		}
	}
	r.mem.owners = append(r.mem.owners, h)
	s.cover.Regions++
	return h
}

// end notes that the process will never write there again.
func (h *holding) end() {
	h.mem.owners = slices.DeleteFunc(h.mem.owners, func(x *holding) bool { return x == h })
}

// evicted checks that no page which a client reads under a lease is taken for a REQUEST_ALLOC: neither as an evicted
// entry's, nor with the region that is given. What clients delete or clear is another matter.
func (s *sim) evicted(index uint64, a *meta.AllocResult) {
	check := func(d *device, from, to uint64, what string) {
		for _, l := range d.mem.readers {
			if l.from < to && from < l.from+l.n && s.now < l.end {
				s.fail("evicted", "entry %d %s page %d, which client %d reads as %q under a lease for %d µs more", index, what, l.from,
					l.c.n, l.key, (l.end-s.now)/1000)
			}
		}
	}
	for i := range a.Evicted {
		p := &a.Evicted[i]
		r, ok := s.log.state.Region(p.Region)
		d := s.device(r.Device)
		if !ok || d == nil || d.mem.generation != r.Generation {
			continue
		}
		from := (r.Offset + p.Offset) / pageSize
		check(d, from, from+(p.Length+pageSize-1)/pageSize, "evicts")
	}
	if d := s.device(a.Device); a.Given && d != nil && d.mem.generation == a.Generation {
		from := a.RegionOffset / pageSize
		check(d, from, from+a.RegionLength/pageSize, "gives away")
	}
}
