package meta

import (
	"math/bits"
	"slices"

	"larder/protocol"
)

// MaxReplicas is on how many nodes an entry can lie.
const MaxReplicas = 1 + protocol.MaxCopies

// lacking is the entries that lie on fewer nodes than was asked for. It follows from the entries, so it is in no record,
// and every member has it. Places whose bytes are lost count until a sweep has removed them.
type lacking struct {
	bits  []uint64 // by slot
	count uint64
}

func (l *lacking) has(s Slot) bool { return int(s/64) < len(l.bits) && l.bits[s/64]&(1<<(s%64)) != 0 }

func (l *lacking) add(s Slot) {
	var fresh bool
	if l.bits, fresh = setBit(l.bits, s); fresh {
		l.count++
	}
}

func (l *lacking) remove(s Slot) {
	if l.has(s) {
		l.bits[s/64] &^= 1 << (s % 64)
		l.count--
	}
}

// from returns the first slot at or behind s, None if there is none.
func (l *lacking) from(s Slot) Slot {
	for i := int(s / 64); i < len(l.bits); i++ {
		w := l.bits[i]
		if i == int(s/64) {
			w &= ^uint64(0) << (s % 64)
		}
		if w != 0 {
			return Slot(i*64 + bits.TrailingZeros64(w)) //nolint:gosec // slots have 32 bits
		}
	}
	return None
}

// asked is what an entry remembers of a number of nodes that it is to lie on.
func (m *Machine) asked(n uint64) uint8 {
	if n < 2 || m.settings.Version < VersionTiers {
		return 0
	}
	return uint8(min(n, MaxReplicas))
}

// ask has an entry lie on more nodes than was asked for so far.
func (m *Machine) ask(slot Slot, n uint64) {
	if want := m.asked(n); want > m.table.at(slot).want {
		m.place(slot, func(x *entry) { x.want = want })
	}
}

// forgo notes that an entry is about to leave a region whose space is needed for something else. Where it then lies on a
// node less than was asked for, one node less is asked for from now on: a copy that was evicted must not be made again, to
// be evicted again.
func (m *Machine) forgo(slot Slot, r *region) {
	x := m.table.at(slot)
	if x.want == 0 {
		return
	}
	if left := m.spread(x, r); left < m.spread(x, nil) && left < int(x.want) {
		m.place(slot, func(x *entry) {
			if x.want--; x.want < 2 {
				x.want = 0
			}
		})
	}
}

// forgoTaken is forgo for a region that is being taken, unless it is not its space that is wanted: its device is given up.
func (m *Machine) forgoTaken(slot Slot, r *region) {
	whole := (r.state == RegionOwned || r.state == RegionDeparted) && !r.device.draining
	if whole || r.markedFor != 0 {
		m.forgo(slot, r)
	}
}

// spread counts the nodes that an entry lies on, but for what lies in a region.
func (m *Machine) spread(x *entry, but *region) (n int) {
	var seen [MaxReplicas + 1]*device
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		if r == but {
			return true
		}
		for _, d := range seen[:n] {
			if d.Node == r.device.Node {
				return true
			}
		}
		seen[n] = r.device
		n++
		return true
	})
	return n
}

// weigh notes whether an entry lies on fewer nodes than was asked for.
func (m *Machine) weigh(slot Slot, x *entry) {
	if x.want != 0 && m.spread(x, nil) < int(x.want) {
		m.lacking.add(slot)
	} else {
		m.lacking.remove(slot)
	}
}

// LackingCount returns how many entries lie on fewer nodes than was asked for.
func (m *Machine) LackingCount() uint64 { return m.lacking.count }

// EachLacking calls fn with the entries that lie on fewer nodes than was asked for, by slot, from one on, until it returns
// false. It says whether it has come to the last.
func (m *Machine) EachLacking(from Slot, fn func(s Slot) bool) (last bool) {
	for s := m.lacking.from(from); s != None; s = m.lacking.from(s + 1) {
		if !fn(s) {
			return false
		}
	}
	return true
}

// Repairable reports whether another copy of the entry of a taken slot can be made: it is served and has room for one, and
// no task copies it.
func (m *Machine) Repairable(s Slot) bool {
	x := m.table.at(s)
	return m.tasked[s] == 0 && m.alive(x) && m.copies(x) < protocol.MaxCopies
}

// Replicas returns on how many nodes the entry of a taken slot is to lie.
func (m *Machine) Replicas(s Slot) int { return max(int(m.table.at(s).want), 1) }

// KeptOn appends the names of the nodes where the bytes of the entry of a taken slot are, also if they are away at the
// moment, each once.
func (m *Machine) KeptOn(s Slot, nodes []string) []string { return m.nodesOf(s, nodes, false) }

// StaysOn is KeptOn without what lies on devices that are given up.
func (m *Machine) StaysOn(s Slot, nodes []string) []string { return m.nodesOf(s, nodes, true) }

func (m *Machine) nodesOf(s Slot, nodes []string, staying bool) []string {
	m.locations(m.table.at(s), func(_ placeID, r *region, _ uint64) bool {
		if r.sound() && (!staying || !r.device.draining) && !slices.Contains(nodes, r.device.Node) {
			nodes = append(nodes, r.device.Node)
		}
		return true
	})
	return nodes
}

// Tasked reports whether a task that is not over copies the entry of a taken slot.
func (m *Machine) Tasked(s Slot) bool { return m.tasked[s] != 0 }
