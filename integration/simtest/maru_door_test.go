package simtest

import (
	"fmt"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"larder/maru"
	"larder/meta"
	"larder/protocol"
)

const (
	maruRetry = 20 * ms  // between two attempts while there is no leader
	maruStall = 500 * ms // that a member stands still, and does not notice
)

var (
	errMaruLost   = protocol.Error{Code: codeLost}
	errMaruFailed = protocol.Error{Code: protocol.CodeInternal}
)

// maruExchange is one request, on its way or served, and its reply. What a member does with it are the steps of a connection
// of package maru, for one request at a time.
type maruExchange struct {
	q      maru.Request
	op     *maruOp
	p      *proc // that waits for the reply
	done   bool
	reply  []byte         // its payload; empty = an error
	fields map[string]any // decoded
	term   uint64         // of the leader that made it
	queued int64          // how long it waits behind others, in the member that gets it first
	// Between members.
	passed    bool  // by a member that does not lead
	age       int64 // until it was
	again     bool  // it may have been carried out
	elsewhere bool  // of a reply: it was not carried out here
}

// send has a member serve a request.
func (x *maruExchange) send(c *maruClient, m *member) {
	s := c.s
	if m == nil || !m.up() || !s.net.open(c.place(), m.id) {
		return
	}
	x.carry(m, c.life, &byteLink{s: s}, &byteLink{s: s}, func() bool { return s.net.open(m.id, c.place()) })
}

// carry brings a request to a member, and the reply back to who asked.
func (x *maruExchange) carry(m *member, home *actor, up, down *byteLink, open func() bool) {
	s, life := m.s, m.life
	up.send(life, func() {
		late := s.now - up.last
		if x.op != nil && x.op.arrived == 0 {
			x.op.arrived = up.last
		}
		y := &maruExchange{q: x.q, op: x.op, passed: x.passed, age: x.age, again: x.again}
		switch { // it came while the member stood still
		case late > maruStall:
			y.age += late
		case x.op != nil:
			x.op.stalls += late
		}
		life.spawn(func(p *proc) {
			y.p = p
			m.serveMaru(y, x.queued)
			if m.silent() || !open() {
				return
			}
			down.send(home, func() {
				x.done, x.reply, x.term, x.elsewhere, x.again = true, y.reply, y.term, y.elsewhere, x.again || y.again
				x.p.wake()
			})
		})
	})
}

// serveMaru serves a request, when those before it are done, until it is answered or has waited for too long.
func (m *member) serveMaru(x *maruExchange, queued int64) {
	deadline := m.clock.Boottime() + int64(maru.Patience) - x.age
	if queued > 0 {
		x.p.sleep(queued)
	}
	for {
		m.attemptMaru(x, deadline)
		switch {
		case x.done || m.silent():
			return
		case x.passed:
			x.elsewhere = true
			return
		case x.again && !repeatable(x.q.Type), m.clock.Boottime() >= deadline:
			return // an error
		}
		x.p.sleep(maruRetry)
	}
}

// repeatable is that of package maru.
func repeatable(t maru.Type) bool {
	return t != maru.Pin && t != maru.Unpin && t != maru.RequestAlloc
}

func (m *member) attemptMaru(x *maruExchange, deadline int64) {
	if m.silent() {
		return
	}
	x.term = 0
	if m.master.Serving() {
		x.term = m.master.Term()
	}
	switch {
	case x.term == 0 && !x.passed:
		m.forwardMaru(x, deadline)
	case x.term == 0:
	case x.q.Type == maru.RequestAlloc:
		m.allocMaru(x, deadline)
	case x.q.Type.Mutates():
		m.logMaru(x, deadline)
	default:
		m.readMaru(x, deadline)
	}
}

// readMaru answers a read from memory, if the member leads until after that.
func (m *member) readMaru(x *maruExchange, deadline int64) {
	b, outcome := m.master.ReadMaru(&x.q, nil, nil)
	switch outcome {
	case maru.Later:
		m.logMaru(x, deadline)
		return
	case maru.Done:
	default:
		x.done = true
		return
	}
	if !m.s.opt.careless {
		m.gap(x.p)
		until, err := m.confirm(x.p)
		m.gap(x.p)
		if err != nil || m.master.Term() != x.term || m.clock.Boottime() >= until {
			m.s.cover.Disowned++
			return
		}
	}
	x.reply, x.done = b, true
}

// logMaru has a request decided by the log.
func (m *member) logMaru(x *maruExchange, deadline int64) {
	decided, outcome := false, maru.Failed
	left := time.Duration(deadline - m.clock.Boottime())
	m.master.LogMaru(&x.q, x.again, left, func(o maru.Outcome, payload func(b []byte) []byte) {
		if outcome = o; o == maru.Done {
			x.reply = payload(nil)
		}
		decided = true
		x.p.wake()
	})
	m.poke()
	x.p.wait(func() bool { return decided })
	switch outcome {
	case maru.Doubt:
		x.again = true
	case maru.Elsewhere:
	default:
		x.done = true
	}
}

// allocMaru gives an instance a region: in a session of its name, which is opened first.
func (m *member) allocMaru(x *maruExchange, deadline int64) {
	_, code := m.do(x.p, &meta.OpenSession{
		Instance: x.q.Instance, Tenant: meta.DefaultTenant, Secret: 1, Features: meta.FeatureMaru, Process: meta.Process{BootID: "host/"},
	})
	left := deadline - m.clock.Boottime()
	if code != protocol.CodeOK && code != protocol.CodeDuplicate || left <= 0 {
		x.again = true
		return
	}
	req := protocol.AllocRequest{
		InstanceID: x.q.Instance, Size: x.q.Size, PageSize: pageSize, Tier: "cxl", TimeoutMS: uint64(max(1, left/ms)),
	}
	body := req.Append(nil)
	peer := &insider{}
	c := m.master.NewClient(peer)
	defer m.master.CloseClient(c)
	h := protocol.Header{Type: protocol.TypeRequestAlloc, Sequence: 1, Length: uint32(len(body))}
	peer.p = x.p
	peer.out, _ = m.master.Serve(c, h, body, nil, m.clock.Boottime())
	m.poke()
	x.p.wait(func() bool { return peer.flushed || len(peer.out) > 0 })
	var rep protocol.AllocReply
	if len(peer.out) < protocol.HeaderSize || rep.Decode(peer.out[protocol.HeaderSize:]) != nil || rep.Code == protocol.CodeNotLeader {
		x.again = true
		return
	}
	x.done = true
	fields := map[string]any{"success": rep.Code == 0}
	if rep.Code == 0 {
		fields["handle"] = map[string]any{"region_id": rep.Region.RegionID}
	}
	x.reply, _ = msgpack.Marshal(fields) // of these types it does not fail
}

// insider is who asks a Master in its own process. It implements server.Peer.
type insider struct {
	p       *proc
	out     []byte
	flushed bool
}

// Lock implements server.Peer.
func (x *insider) Lock() []byte { return x.out }

// Unlock implements server.Peer.
func (x *insider) Unlock(b []byte) { x.out = b }

// Flush implements server.Peer.
func (x *insider) Flush() {
	x.flushed = true
	x.p.wake()
}

// Close implements server.Peer.
func (x *insider) Close(string) { x.Flush() }

// forwardMaru passes a request on to the leader, and waits for what becomes of it there.
func (m *member) forwardMaru(x *maruExchange, deadline int64) {
	s := m.s
	_, id := m.leader()
	to := s.members[id]
	if to == nil || to == m || !to.up() || !s.net.open(m.id, id) {
		return
	}
	arrived := deadline - int64(maru.Patience)
	y := &maruExchange{q: x.q, op: x.op, p: x.p, passed: true, age: m.clock.Boottime() - arrived, again: x.again}
	life := to.life
	y.carry(to, m.life, &byteLink{s: s}, &byteLink{s: s}, func() bool { return s.net.open(id, m.id) })
	for !y.done && !life.dead && m.clock.Boottime() < deadline {
		x.p.waitFor(func() bool { return y.done }, maruRetry)
	}
	switch {
	case !y.done:
		x.again = true
	case y.elsewhere:
		x.again = x.again || y.again
	default:
		x.done, x.reply, x.term = true, y.reply, y.term
	}
}

// stuckMaru describes those of Maru's clients that have not come to an end.
func (s *sim) stuckMaru() (text string) {
	for _, c := range s.marus {
		if c != nil && c.busy > 0 {
			text += fmt.Sprintf("\nclient %d of Maru's: busy %d", c.n, c.busy)
		}
	}
	return text
}
