package model

import (
	"cmp"
	"fmt"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// check verifies the invariants of the design on the state after a log entry.
func (w *world) check() error {
	for _, check := range []func() error{
		w.checkDevices, w.checkRegions, w.checkLocations, w.checkEntries, w.checkSessions, w.checkTasks, w.checkNames,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// checkDevices verifies that no byte of a device is in two regions, and that used and free bytes are its capacity.
func (w *world) checkDevices() error {
	for _, d := range w.devices {
		var regions []*region
		used := uint64(0)
		for _, r := range w.regions {
			if r.device == d {
				regions = append(regions, r)
				used += min(r.offset+r.length, max(d.end(), r.offset)) - r.offset
			}
		}
		slices.SortFunc(regions, func(a, b *region) int { return cmp.Compare(a.offset, b.offset) })
		for i, r := range regions {
			if r.offset < d.DataOffset {
				return w.violation("regions lie behind the device's header", d.DataOffset, r.offset)
			}
			if i > 0 && regions[i-1].offset+regions[i-1].length > r.offset {
				return w.violation("no byte of a device is in two regions", "disjoint",
					fmt.Sprintf("region %d and %d of device %d", regions[i-1].id, r.id, d.id))
			}
		}
		free := uint64(0)
		for _, e := range w.free(d) {
			free += e.length
		}
		if used+free != d.capacity() {
			return w.violation("used + free = capacity", d.capacity(), fmt.Sprintf("%d + %d", used, free))
		}
	}
	return nil
}

// checkRegions verifies that who owns a region fits the region's state.
func (w *world) checkRegions() error {
	for _, r := range w.regions {
		s := r.owner
		good := false
		switch r.state {
		case meta.RegionOwned:
			good = s != nil && (s.open || w.contributes(s))
		case meta.RegionOrphaned:
			good = s != nil && !s.open && !s.fenced
		case meta.RegionDeparted:
			good = s != nil && !r.lost()
		case meta.RegionMarked:
			good = s != nil && !s.fenced
		case meta.RegionDraining:
			good = s != nil || w.live(r) == 0
		}
		if good = good && (s == nil || w.sessions[s.id] == s); !good {
			return w.violation("a region's owner fits its state", r.state, fmt.Sprintf("region %d of %+v", r.id, s))
		}
		if w.regions[r.id] != r || w.devices[r.device.id] != r.device || r.id > w.lastRegion || r.epoch > w.epochs {
			return w.violation("regions lie on devices that are there, under ids and epochs that were given out", "", r.id)
		}
	}
	return nil
}

// checkLocations verifies that entries lie in their regions, that no page is in two, and that the copies of an entry are
// few, each on a device of its own.
func (w *world) checkLocations() error {
	for _, r := range w.regions {
		in := w.in(r)
		slices.SortFunc(in, func(a, b *location) int { return cmp.Compare(a.offset, b.offset) })
		for i, l := range in {
			first, end := l.pages()
			if l.offset%r.pageSize != 0 || end > r.length/r.pageSize {
				return w.violation("an entry lies inside its region, on whole pages", r.id, describe(l.page()))
			}
			if i > 0 {
				if _, before := in[i-1].pages(); before > first {
					return w.violation("no page is in two entries", describe(in[i-1].page()), describe(l.page()))
				}
			}
			if r.owner == nil {
				return w.violation("entries lie in regions of somebody", "", describe(l.page()))
			}
		}
	}
	return w.checkCopies()
}

func (w *world) checkCopies() error {
	for _, e := range w.held() {
		on := map[*device]bool{}
		for _, l := range e.at {
			if l.sound() && on[l.region.device] || w.regions[l.region.id] != l.region || l.entry != e {
				return w.violation("an entry lies on a device once, in a region that is there", l.region.device.id, describe(l.page()))
			}
			on[l.region.device] = on[l.region.device] || l.sound()
		}
		if n := len(e.at) - 1; n < 0 || n > protocol.MaxCopies {
			return w.violation("an entry has few copies", protocol.MaxCopies, n)
		}
	}
	return nil
}

// checkEntries verifies that no key is held twice, and that ids are not used twice.
func (w *world) checkEntries() error {
	held := w.held()
	for _, e := range held {
		for _, p := range e.pins {
			if s := w.sessions[p.session]; p.session != 0 && (s == nil || !s.open) {
				return w.violation("pins of a session end with it", p.session, describe(e.primary().page()))
			}
		}
	}
	keys := map[[2]string]bool{}
	births := map[uint64]bool{}
	for _, t := range w.tasks {
		births[uint64(t.ID)] = true
	}
	for _, e := range held {
		for _, l := range e.at {
			if l.birth != e.birth && (births[l.birth] || l.birth > w.births) {
				return w.violation("a copy has a birth of its own", "", l.birth)
			}
			births[l.birth] = births[l.birth] || l.birth != e.birth
		}
		key := [2]string{e.ctx.Tenant, e.key}
		if keys[key] || births[e.birth] || e.birth > w.births {
			return w.violation("a key is held once, under a birth of its own", "", describe(e.primary().page()))
		}
		keys[key], births[e.birth] = true, true
	}
	return nil
}

// checkSessions verifies that what is remembered of sessions is bounded, and that ended ones go.
func (w *world) checkSessions() error {
	open, owns := map[string]bool{}, map[*session]bool{}
	for _, r := range w.regions {
		owns[r.owner] = true
	}
	for _, s := range w.sessions {
		if s.open && open[s.info.Instance] {
			return w.violation("an instance has one open session", s.info.Instance, s.id)
		}
		open[s.info.Instance] = open[s.info.Instance] || s.open
		if !s.open && (!owns[s] || len(s.answers) > 0) {
			return w.violation("an ended session is kept only for its regions, without answers", "", s.id)
		}
		for seq := range s.answers {
			if seq < s.acked || seq-s.acked >= protocol.Window {
				return w.violation("answers are kept within the window only", s.acked, seq)
			}
		}
	}
	return nil
}
