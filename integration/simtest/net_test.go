package simtest

import (
	"bytes"
	"math/rand/v2"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// network moves messages between members, and bytes between clients and members. Every directed link between two
// places fails on its own.
type network struct {
	s     *sim
	rng   *rand.Rand
	links map[[2]uint64]*peerLink
}

// peerLink is one direction between two members.
type peerLink struct {
	cut     int   // how many faults cut it; what heals in peace is counted down later
	clogged int64 // nothing arrives before
	slow    int64 // more delay, until slowTo
	slowTo  int64
	last    int64 // when the message before arrives: links keep the order, unless they are to break it
}

func (n *network) link(from, to uint64) *peerLink {
	k := [2]uint64{from, to}
	l := n.links[k]
	if l == nil {
		l = &peerLink{}
		n.links[k] = l
	}
	return l
}

// open reports whether anything gets from one place to another.
func (n *network) open(from, to uint64) bool { return n.link(from, to).cut <= 0 }

// arrival draws when a message sent now arrives. ordered messages come after those before them.
func (n *network) arrival(l *peerLink, ordered bool) int64 {
	d := n.s.mix.delay/2 + int64(n.rng.ExpFloat64()*float64(n.s.mix.delay)/2)
	if l.slowTo > n.s.now {
		d += l.slow
	}
	at := max(n.s.now+d, l.clogged)
	if ordered {
		at = max(at, l.last)
		l.last = at
	}
	return at
}

// send moves one message from a member to another. snap is the stream that goes with a snapshot.
func (n *network) send(from *member, m *pb.Message, snap []byte) {
	s := n.s
	body, err := proto.Marshal(m)
	if err != nil {
		s.fail("network", "a message does not encode: %v", err)
		return
	}
	to := m.GetTo()
	l := n.link(from.id, to)
	lost := l.cut > 0
	if s.faulty(netDrop) && n.rng.Float64() < s.mix.drop {
		s.cover.fault(netDrop)
		lost = true
	}
	copies := 1
	if s.faulty(netDuplicate) && n.rng.Float64() < s.mix.duplicate {
		s.cover.fault(netDuplicate)
		copies = 2
	}
	ordered := true
	if s.faulty(netReorder) && n.rng.Float64() < s.mix.reorder {
		s.cover.fault(netReorder)
		ordered = false
	}
	if lost {
		if snap != nil {
			life := from.life
			s.after(sec, life, func() { from.reportSnapshot(to, false) })
		}
		return
	}
	for range copies {
		at := n.arrival(l, ordered)
		if !ordered {
			at += n.rng.Int64N(50 * ms)
		}
		n.deliver(from, to, body, snap, at)
		if snap != nil {
			return // streams do not come twice
		}
	}
}

func (n *network) deliver(from *member, to uint64, body, snap []byte, at int64) {
	s := n.s
	sender := from.life
	s.at(at, s.world, func() {
		dst := s.members[to]
		up := dst != nil && dst.life != nil && !dst.life.dead
		if snap != nil {
			// The stream ends on both sides: what was not taken in is reported as failed.
			ok := up && !dst.life.paused
			s.after(n.s.mix.delay, sender, func() { from.reportSnapshot(to, ok) })
			if !ok {
				return
			}
		}
		if !up {
			return
		}
		s.push(event{at: s.now, a: dst.life, peer: true, fn: func() { dst.receive(from.id, body, snap) }})
	})
}

// receive takes a message in.
func (m *member) receive(from uint64, body, snap []byte) {
	s := m.s
	msg := new(pb.Message)
	if err := proto.Unmarshal(body, msg); err != nil {
		s.fail("network", "a message does not decode: %v", err)
		return
	}
	if s.expelled[from] || s.expelled[m.id] {
		return
	}
	m.enter(func() {
		var err error
		if snap != nil {
			err = m.core.StepSnapshot(msg, bytes.NewReader(snap))
			s.cover.Snapshots++
		} else {
			err = m.core.Step(msg)
		}
		m.note(err)
	})
	m.poke()
}

// byteLink is one direction of a client's connection: a stream, which is late or ends, but keeps its order.
type byteLink struct {
	s    *sim
	last int64
	slow int64
	cut  bool // what is sent gets lost from now on, and nobody says so
}

// send makes fn happen to a when the bytes arrive.
func (l *byteLink) send(a *actor, fn func()) {
	s := l.s
	if l.cut {
		return
	}
	d := s.mix.delay/4 + int64(s.net.rng.ExpFloat64()*float64(s.mix.delay)/4) + l.slow
	l.last = max(s.now+d, l.last)
	s.at(l.last, a, func() {
		if !l.cut {
			fn()
		}
	})
}
