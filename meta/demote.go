package meta

import (
	"math/bits"

	"larder/meta/policy"
	"larder/protocol"
)

// Bounds of a look for what is to be demoted.
const (
	// demoteWindow is how far from the cold end of a partition candidates are looked for: beyond it, what is copied now would
	// be used again before it is evicted.
	demoteWindow = 4096
	// demoteLook is how many entries one look passes over in all, a millisecond or so, and demoteLeast how many of each
	// partition if they are many. What is left out then comes first in another turn.
	demoteLook  = 4 * demoteWindow
	demoteLeast = 64
)

// PlanDemote names entries with their primaries on a device that have no copy in the tier of another device or a slower one,
// and that no task copies already: at most limit, and about goal bytes. Each partition gives the coldest of its own, as many
// as its part of what lies on the device is; what one cannot give is left to those after it. turn says with which one to
// begin: any number, a different one each time. It names none if half of the other device holds copies already: more would
// only push each other out. It changes nothing.
func (m *Machine) PlanDemote(from, to DeviceID, goal uint64, limit int, turn uint64) []Victim {
	src, dst := m.devices[from], m.devices[to]
	if src == nil || dst == nil || src == dst || dst.mode != DeviceServing || dst.draining {
		return nil
	}
	if m.copyBytes(dst) >= dst.room()/2 {
		return nil
	}
	shares, total := m.demoteShares(src)
	w := demotion{m: m, src: src, dst: dst, look: demoteLook}
	for i := range shares {
		s := &shares[(turn+uint64(i))%uint64(len(shares))]
		w.until = w.got + part(goal-min(w.got, goal), s.bytes, total)
		w.most = len(w.victims) + int(part(uint64(limit-len(w.victims)), s.bytes, total))                           //nolint:gosec // at most limit
		w.partition(s.part, min(demoteWindow, max(demoteLeast, int(part(uint64(w.look), s.bytes, total))), w.look)) //nolint:gosec // bounded
		total -= s.bytes
		if w.got >= goal || len(w.victims) >= limit || w.look <= 0 {
			break
		}
	}
	return w.victims
}

// part is n * of / all, rounded up; of is at most all.
func part(n, of, all uint64) uint64 {
	hi, lo := bits.Mul64(n, of)
	if all == 0 || hi >= all {
		return n
	}
	q, r := bits.Div64(hi, lo, all)
	if r > 0 {
		q++
	}
	return q
}

// demoteShare is how much of what lies on a device is a partition's.
type demoteShare struct {
	part  *partition
	bytes uint64
}

// demoteShares lists the partitions with entries on a device, in the order of their sessions, and adds up what they have. What
// is soft-pinned is not told from what is not: both partitions of a page size have the whole of it.
func (m *Machine) demoteShares(d *device) (shares []demoteShare, total uint64) {
	for _, s := range m.sortedSessions() {
		for _, p := range s.parts {
			n := uint64(0)
			for _, r := range s.regions {
				if r.device == d && r.pageSize == p.pageSize {
					n += r.liveBytes - r.copyBytes
				}
			}
			if n > 0 {
				shares, total = append(shares, demoteShare{p, n}), total+n
			}
		}
	}
	return shares, total
}

// demotion is one look for what is to be demoted.
type demotion struct {
	m        *Machine
	src, dst *device
	victims  []Victim
	got      uint64 // their bytes
	until    uint64 // how many there may be of them with those of the present partition
	most     int    // how many there may be with those
	look     int    // how many entries may still be passed over
}

// partition takes entries of a partition, of so many coldest ones.
func (w *demotion) partition(p *partition, window int) {
	p.victims(w.m.head.now, func(slot Slot) policy.Verdict {
		if window <= 0 || w.got >= w.until || len(w.victims) >= w.most {
			return policy.Stop
		}
		window--
		w.look--
		if x := w.m.table.at(slot); w.m.regionOf(x).device == w.src && w.m.demotes(slot, x, w.dst) {
			w.victims = append(w.victims, Victim{slot, x.birth})
			w.got += uint64(x.length)
		}
		return policy.Skip
	})
}

// demotes reports whether an entry should be copied to a device: it may be served, nothing copies it yet, and no copy of it
// is in as slow a tier.
func (m *Machine) demotes(slot Slot, x *entry, to *device) bool {
	if m.tasked[slot] != 0 || !m.alive(x) || m.copies(x) >= protocol.MaxCopies {
		return false
	}
	for p := m.firstCopy(x); p != 0; p = m.places.at(p).next {
		if r := m.placeRegion(m.places.at(p)); r.sound() && r.rank() >= tierRank(to.Tier) {
			return false
		}
	}
	return true
}

// copyBytes is how much of a device holds copies of entries whose primaries lie elsewhere.
func (m *Machine) copyBytes(d *device) (n uint64) {
	for _, r := range m.regionList {
		if r.device == d {
			n += r.copyBytes
		}
	}
	return n
}
