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
	for _, check := range []func() error{w.checkDevices, w.checkRegions, w.checkEntries, w.checkSessions} {
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
			good = s != nil && s.open
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

// checkEntries verifies that entries lie in their regions, that no page is in two, that no key is held twice, and that
// ids are not used twice.
func (w *world) checkEntries() error {
	held := w.held()
	slices.SortFunc(held, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.region.id, b.region.id), cmp.Compare(a.offset, b.offset))
	})
	for i, e := range held {
		first, end := e.pages()
		if e.offset%e.region.pageSize != 0 || end > e.region.length/e.region.pageSize || w.regions[e.region.id] != e.region {
			return w.violation("an entry lies inside its region, on whole pages", e.region.id, describe(e.page()))
		}
		if i > 0 && held[i-1].region == e.region {
			if _, before := held[i-1].pages(); before > first {
				return w.violation("no page is in two entries", describe(held[i-1].page()), describe(e.page()))
			}
		}
		if e.region.owner == nil {
			return w.violation("entries lie in regions of somebody", "", describe(e.page()))
		}
		for _, p := range e.pins {
			if s := w.sessions[p.session]; p.session != 0 && (s == nil || !s.open) {
				return w.violation("pins of a session end with it", p.session, describe(e.page()))
			}
		}
	}
	keys := map[[2]string]bool{}
	births := map[uint64]bool{}
	for _, e := range held {
		key := [2]string{e.ctx.Tenant, e.key}
		if keys[key] || births[e.birth] || e.birth > w.births {
			return w.violation("a key is held once, under a birth of its own", "", describe(e.page()))
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
