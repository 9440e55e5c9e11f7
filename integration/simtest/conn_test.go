package simtest

import (
	"larder/protocol"
	"larder/server"
)

// serverConn is the master's end of a client's connection. Its steps are those of the server's conn: serve a burst,
// confirm leadership, check the deadline, send. Each is a point where the member can stand still.
type serverConn struct {
	m      *member
	peer   *clientConn
	down   *byteLink // to the client
	client *server.Client
	p      *proc
	in     []inFrame
	out    []byte // what the Master appended and has not sent
	closed bool
	waits  bool // for something that the member does
}

type inFrame struct {
	h    protocol.Header
	body []byte
}

// accept takes a client's connection in.
func (m *member) accept(peer *clientConn) *serverConn {
	c := &serverConn{m: m, peer: peer, down: &byteLink{s: m.s, slow: peer.up.slow}}
	c.client = m.master.NewClient(c)
	m.conns = append(m.conns, c)
	c.p = m.life.spawn(c.serve)
	return c
}

// Lock implements server.Peer.
func (c *serverConn) Lock() []byte { return c.out }

// Unlock implements server.Peer.
func (c *serverConn) Unlock(b []byte) { c.out = b }

// Flush implements server.Peer.
func (c *serverConn) Flush() {
	out := c.out
	c.out = nil
	c.send(out)
}

// Close implements server.Peer.
func (c *serverConn) Close(string) {
	if !c.closed {
		c.reset(true)
	}
}

// send puts whole frames on their way to the client.
func (c *serverConn) send(b []byte) {
	if c.closed || c.m.silent() || len(b) == 0 {
		return
	}
	c.m.s.sent(c, b)
	b = append([]byte(nil), b...)
	peer := c.peer
	c.down.send(peer.c.life, func() { peer.arrived(b) })
}

// receive takes frames in.
func (c *serverConn) receive(b []byte) {
	if c.closed {
		return
	}
	for len(b) > 0 {
		h, body, err := protocol.ParseFrame(b)
		if err != nil {
			c.m.s.fail("wire", "a client's frame does not parse: %v", err)
			return
		}
		c.in = append(c.in, inFrame{h, body})
		b = b[protocol.HeaderSize+len(body):]
	}
	c.p.wake()
}

// reset ends the connection. told says that the client hears of it; otherwise it must find out.
func (c *serverConn) reset(told bool) {
	if c.closed {
		return
	}
	c.closed = true
	if c.m.up() {
		c.m.master.CloseClient(c.client)
		conns := c.m.conns[:0]
		for _, x := range c.m.conns {
			if x != c {
				conns = append(conns, x)
			}
		}
		c.m.conns = conns
		c.p.wake()
	}
	if told {
		peer := c.peer
		c.down.send(peer.c.life, func() { peer.lost("reset") })
	}
}

func (c *serverConn) serve(p *proc) {
	c.p = p
	for {
		p.wait(func() bool { return len(c.in) > 0 || c.closed })
		if c.closed {
			return
		}
		c.burst(p)
	}
}

// burst serves all frames that are there.
func (c *serverConn) burst(p *proc) {
	m := c.m
	var out []byte
	now, term := m.clock.Boottime(), m.master.Term()
	for len(c.in) > 0 && !c.closed {
		f := c.in[0]
		c.in = c.in[1:]
		outcome := server.Blocked
		for outcome == server.Blocked {
			if mutates(f.h.Type) && c.client.Full() {
				out = c.settle(p, out, term)
				c.waits = true
				p.wait(func() bool { return !c.client.Full() || c.closed })
				c.waits = false
			}
			if c.closed {
				return
			}
			if term == 0 && server.AccessOf(f.h.Type) == server.AccessRead && !m.readIndex(p) {
				out = appendFault(out, f.h, &protocol.Error{Code: protocol.CodeUnavailable, RetryAfterMS: 100})
				break
			}
			c.client.Follow(term == 0)
			out, outcome = m.master.Serve(c.client, f.h, f.body, out, now)
			if outcome == server.Blocked {
				out = c.settle(p, out, term)
				settled := m.master.Settled()
				c.waits = true
				p.wait(func() bool {
					select {
					case <-settled:
						return true
					default:
						return c.closed
					}
				})
				c.waits = false
				now, term = m.clock.Boottime(), m.master.Term()
			}
		}
		m.poke()
	}
	c.settle(p, out, term)
}

// mutates reports whether requests of a type wait for room.
func mutates(t protocol.Type) bool {
	return server.AccessOf(t) == server.AccessLeader && t != protocol.TypeLookup && t != protocol.TypeBatchLookup
}

// settle sends the replies in out once it is sure that nobody else led when they were made.
func (c *serverConn) settle(p *proc, out []byte, term uint64) []byte {
	if len(out) == 0 {
		return out
	}
	m := c.m
	if term != 0 && !m.s.opt.careless {
		m.gap(p)
		deadline, err := m.confirm(p)
		m.gap(p)
		if err != nil || m.master.Term() != term || m.clock.Boottime() >= deadline {
			m.s.cover.Disowned++
			out = disown(out, &protocol.Error{Code: protocol.CodeUnavailable, Message: "leadership was in doubt", RetryAfterMS: 20})
		}
		m.gap(p)
	}
	c.send(out)
	return out[:0]
}

// gap is a point between two steps of a read, where a leader may stand still for long.
func (m *member) gap(p *proc) {
	s := m.s
	if !s.faulty(memberPauseStep) || s.rngSteps.IntN(3000) != 0 || !s.fires(memberPauseStep) {
		return
	}
	m.pause(ms + s.rngSteps.Int64N(4*sec))
	p.sleep(0) // the pause begins here
}

// pause makes the process stand still for d.
func (m *member) pause(d int64) {
	life := m.life
	if life == nil || life.paused {
		return
	}
	m.s.trace("pause", m.id, uint64(d))
	life.paused = true
	late := max(0, m.s.rngSteps.Int64N(200*ms)-100*ms)
	m.s.after(d, m.s.world, func() { life.wakeUp(late) })
}

// appendFault appends a reply that is an error.
func appendFault(b []byte, h protocol.Header, e *protocol.Error) []byte {
	b, mark := protocol.BeginReply(b, h)
	return protocol.EndFrame(protocol.AppendErrorReply(b, e), mark)
}

// disown replaces every reply in a buffer of whole frames by an error.
func disown(frames []byte, e *protocol.Error) []byte {
	var out []byte
	for len(frames) > 0 {
		h, body, err := protocol.ParseFrame(frames)
		if err != nil {
			return out
		}
		b, mark := protocol.BeginFrame(out, h.Type, h.Sequence)
		out = protocol.EndFrame(protocol.AppendErrorReply(b, e), mark)
		frames = frames[protocol.HeaderSize+len(body):]
	}
	return out
}

// clientConn is the client's end.
type clientConn struct {
	c      *client
	to     *member
	up     *byteLink
	server *serverConn // nil until accepted
	seq    uint32
	calls  map[uint32]*call
	order  []*call
	dead   bool
	heard  int64 // when anything came last, on the client's clock
	// noLeader is when the master began to answer nothing but UNAVAILABLE, 0 if it does not.
	noLeader int64
}

// leaderPatience is for how long a master may know of no leader before the client asks the others, as in the client
// package.
const leaderPatience = 500 * ms

// unavailable notes that the master knew of no leader, and reports whether it has for too long.
func (x *clientConn) unavailable() bool {
	now := x.c.clock.Boottime()
	if x.noLeader == 0 {
		x.noLeader = now
	}
	return now-x.noLeader > leaderPatience
}

// send puts one frame on its way to the master.
func (x *clientConn) send(b []byte) {
	to, life := x.to, x.to.life
	if life == nil {
		return
	}
	x.up.send(life, func() {
		if x.server != nil && to.life == life {
			x.server.receive(b)
		}
	})
}

// arrived takes frames from the master in.
func (x *clientConn) arrived(b []byte) {
	if x.dead {
		return
	}
	x.heard = x.c.clock.Boottime()
	for len(b) > 0 {
		h, body, err := protocol.ParseFrame(b)
		if err != nil {
			x.c.s.fail("wire", "a master's frame does not parse: %v", err)
			return
		}
		if h.Sequence == 0 {
			x.c.pushed(x, h.Type, body)
		} else if cl := x.calls[h.Sequence]; cl != nil {
			delete(x.calls, h.Sequence)
			cl.finish(body, "")
		}
		b = b[protocol.HeaderSize+len(body):]
	}
}

// lost ends the connection at the client's side: calls on it fail, with an unknown outcome.
func (x *clientConn) lost(why string) {
	if x.dead {
		return
	}
	x.dead = true
	for _, cl := range x.order {
		if x.calls[cl.seq] == cl {
			delete(x.calls, cl.seq)
			cl.finish(nil, why)
		}
	}
	x.order = nil
	x.c.connLost(x)
	if sc := x.server; sc != nil && sc.m.up() && !sc.closed {
		x.up.send(sc.m.life, func() { sc.reset(false) })
	}
}
