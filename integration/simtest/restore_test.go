package simtest

import (
	"bytes"
	"slices"

	"larder/raft"
)

// backup is a snapshot that an operator keeps.
type backup struct {
	stream []byte
	index  uint64
}

// restore takes a snapshot for later or, if there is one, has the whole cluster be lost and restored from it.
func (x *strike) restore() func() {
	s, l := x.s, x.s.leader()
	if l == nil || s.operator.busy() || s.log.closed || s.log.state.Incarnation() == 0 {
		return nil
	}
	if s.old != nil {
		return func() { s.restoreCluster() }
	}
	return func() {
		var buf bytes.Buffer
		var err error
		l.enter(func() {
			at, werr := l.core.WriteSnapshot(&buf)
			if err = werr; err == nil {
				s.old = &backup{buf.Bytes(), at.GetIndex()}
			}
		})
		if err != nil || l.silent() {
			s.old = nil
		}
		l.settled()
	}
}

// restoreCluster loses all members with their disks and makes a new cluster of one from the old snapshot, which grows
// again afterwards. What was acknowledged since the snapshot is lost, and what it says of the pool is out of date.
func (s *sim) restoreCluster() {
	s.cover.Restores++
	s.trace("restore", s.old.index, s.log.last())
	for _, m := range s.sorted() {
		s.retire(m)
	}
	s.loseMarus(nil) // operators start them again: they could not know
	s.cluster++
	s.linear.over()
	s.past = append(s.past, s.linear)
	s.linear, s.pushes = newLinear(s), newPushLog(s)
	s.questions, s.pins = map[seqKey]*question{}, map[pinKey]bool{}
	s.proposals, s.leaders = map[uint64]int64{}, map[uint64]uint64{}
	s.log = s.log.until(s.old.index)
	m := s.newMember(s.nextID)
	s.nextID++
	var err error
	m.enter(func() {
		_, _, err = raft.RestoreSnapshot("/data", bytes.NewReader(s.old.stream), raft.RestoreOptions{
			Store: m.storeOptions(), ClusterID: s.cluster, Member: memberRecord(m.id),
		})
	})
	if err != nil {
		s.fail("restore", "a snapshot cannot be restored: %v", err)
		return
	}
	s.old = nil
	m.joins = true
	s.after(s.rngFaults.Int64N(3*sec), s.world, m.restart)
	for range s.mix.members - 1 {
		s.operator.add(s.operator.join)
	}
}

// until is the history up to an entry, as a restored cluster goes on from it.
func (h *history) until(index uint64) *history {
	n := newHistory(h.s, index+1)
	n.raw = slices.Clone(h.raw[:index-1]) // which begin at 2
	for i, data := range n.raw {
		n.results.Reset()
		if err := n.state.Apply(uint64(i+2), data, &n.results); err != nil {
			h.s.fail("restore", "entry %d does not apply again: %v", i+2, err)
		}
		if err := n.model.Apply(uint64(i+2), data, &n.results); err != nil {
			h.s.fail("model", "entry %d, again: %v", i+2, err)
		}
		n.noteNames()
	}
	n.noteMaru(0, nil)
	n.base, n.closed = n.state.StateHash(), true
	return n
}
