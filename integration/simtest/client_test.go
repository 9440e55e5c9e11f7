package simtest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"larder/protocol"
)

// Timing of clients.
const (
	minCall    = 500 * ms // the least and the most that a client waits for an answer
	maxCall    = 6 * sec
	keepEvery  = 200 * ms
	pollEvery  = 4 * sec // clients that read no pushes ask by resuming their session
	heartbeats = 3
	maxBackoff = 200 * ms
)

// client is one life of a client process: it speaks the native protocol as the client package does, in steps that can
// be paused, lost or cut off anywhere.
type client struct {
	s        *sim
	n        int
	instance string
	life     *actor
	pid      uint64
	remote   bool // on another host than the masters: its death cannot be proven
	clock    clock
	rng      *rand.Rand
	conn     *clientConn // to the leader, nil if there is none
	hint     uint64      // who leads, as somebody said
	next     int
	left     uint64   // the master that was left last
	known    []uint64 // members

	sess       *csession
	opening    uint64
	lastAnswer int64
	polled     int64
	pool       share
	maps       map[uint64]*memory
	quarantine uint64
	allocating bool
	revoking   []uint64
	releases   []uint64
	pins       map[string]bool
	reads      bool  // only reads while there is much to do: it may be with a leader that nobody follows
	deaf       bool  // does not answer REVOKE
	silentTo   int64 // sends no heartbeat and begins nothing until then
	quits      bool  // gives calls up
	busy       int   // operations in progress
	views      int   // of them, views
	watching   bool  // names
	node       *node // what it serves, if it is a node
	answerIn   int64 // how long it waits for an answer
}

// csession is a session as the client knows it.
type csession struct {
	id, secret uint64
	ttl        int64
	fenceAt    int64
	ended      bool
	nextSeq    uint64
	open       map[uint64]bool // seqs without an answer
}

func (ss *csession) acked() uint64 {
	low := ss.nextSeq
	for seq := range ss.open {
		low = min(low, seq)
	}
	return low
}

func (ss *csession) alive(now int64) bool { return ss.ttl == 0 || now < ss.fenceAt }

func (ss *csession) answered(sentAt int64) {
	ss.fenceAt = max(ss.fenceAt, sentAt+ss.ttl-margin(ss.ttl))
}

// newClient starts a client process.
func (s *sim) newClient(n int) *client {
	c := s.newProcess(n, fmt.Sprint("i", n))
	s.clients[n] = c
	c.life.spawn(c.connector)
	c.life.spawn(c.keeper)
	for range s.mix.workers {
		c.life.spawn(c.worker)
	}
	return c
}

// newProcess makes a process that does nothing yet.
func (s *sim) newProcess(n int, instance string) *client {
	s.pids++
	c := &client{
		s: s, n: n, instance: instance, pid: s.pids, maps: map[uint64]*memory{}, pins: map[string]bool{},
		rng: s.stream(streamClient + s.pids), clock: clock{s: s, start: s.rngSetup.Int64N(1e12) + 1e12},
	}
	c.life = s.newActor(fmt.Sprint("client ", n))
	c.pool = share{c: c, gone: map[uint64]uint64{}}
	c.remote = c.rng.Float64() < s.mix.remote
	c.answerIn = minCall + c.rng.Int64N(maxCall-minCall)
	c.quits = s.faulty(clientQuits) && c.rng.IntN(2) == 0
	if s.faulty(clockSkew) {
		c.clock.ppm = c.rng.Int64N(8001) - 4000
	}
	for id := range s.memberIDs() {
		c.known = append(c.known, id)
	}
	return c
}

// place is where the client is, for partitions: members have smaller numbers.
func (c *client) place() uint64 { return clientPlaces + uint64(c.n) }

// wakeAll lets everything that waits in the client look again.
func (c *client) wakeAll() {
	for _, p := range c.life.procs {
		p.wake()
	}
}

// later runs something in the background.
func (c *client) later(fn func(p *proc)) { c.life.spawn(fn) }

// crash ends the process.
func (c *client) crash() {
	s := c.s
	s.trace("client dies", uint64(c.n), c.pid)
	c.life.kill()
	s.deadPIDs[c.pid] = true
	for _, r := range append(slices.Clone(c.pool.list), c.pool.dying...) {
		if r.hold != nil {
			r.hold.end()
			r.hold = nil
		}
	}
	if x := c.conn; x != nil {
		x.dead = true
		if sc := x.server; sc != nil && sc.m.up() {
			x.up.send(sc.m.life, func() { sc.reset(false) })
		}
	}
	s.processDied(c)
	s.leasesEnd(c)
	s.linear.abandon(c)
}

// call is one request in flight.
type call struct {
	seq     uint32
	typ     protocol.Type
	p       *proc
	sentAt  int64
	timeout int64
	done    bool
	body    []byte
	lost    string // why there is no answer
}

func (cl *call) finish(body []byte, lost string) {
	cl.done, cl.body, cl.lost = true, body, lost
	cl.p.wake()
}

// do sends a request on a connection and waits for the answer.
func (x *clientConn) do(p *proc, t protocol.Type, body []byte, wait int64) *call {
	x.seq++
	cl := &call{seq: x.seq, typ: t, p: p, sentAt: x.c.clock.Boottime(), timeout: x.c.answerIn + wait}
	x.calls[cl.seq] = cl
	x.order = append(x.order, cl)
	b, mark := protocol.BeginFrame(nil, t, cl.seq)
	b = protocol.EndFrame(append(b, body...), mark)
	x.send(b)
	p.wait(func() bool { return cl.done })
	return cl
}

// post sends a request whose answer nobody waits for.
func (x *clientConn) post(t protocol.Type, body []byte) {
	b, mark := protocol.BeginFrame(nil, t, 1<<31)
	x.send(protocol.EndFrame(append(b, body...), mark))
}

// connector keeps a connection to the leader.
func (c *client) connector(p *proc) {
	for {
		p.wait(func() bool { return c.conn == nil })
		for attempt := 0; c.conn == nil; attempt++ {
			if !c.connect(p) {
				p.sleep(c.backoff(attempt))
			}
		}
		c.wakeAll()
	}
}

func (c *client) backoff(attempt int) int64 {
	d := min(2*ms<<min(attempt, 8), maxBackoff)
	return d/2 + c.rng.Int64N(d/2+1)
}

// connect tries one member.
func (c *client) connect(p *proc) bool {
	s := c.s
	id := c.hint
	c.hint = 0
	if id == 0 || s.members[id] == nil {
		id = c.nextMember()
	}
	if s.members[id] == nil { // names lead to whoever is there now
		if list := s.sorted(); len(list) > 0 {
			id = list[c.next%len(list)].id
		}
	}
	m := s.members[id]
	slow := int64(0)
	if s.linkSlowTo > s.now {
		slow = s.linkSlow
	}
	p.sleep(s.mix.delay + slow)
	if m == nil || !m.up() || s.expelled[id] || !s.net.open(c.place(), id) {
		return false
	}
	x := &clientConn{c: c, to: m, calls: map[uint32]*call{}, heard: c.clock.Boottime()}
	x.up = &byteLink{s: s, slow: slow}
	life := m.life
	x.up.send(life, func() {
		if !x.dead {
			x.server = m.accept(x)
		}
	})
	c.s.watchConn(x)
	e := c.handshake(p, x)
	if e == nil && x.dead {
		return false
	}
	if e != nil {
		s.cover.Errors["HANDSHAKE "+e.Code.String()]++
		if e.Leader != "" {
			c.hint = s.memberAt(e.Leader)
		}
		x.lost("handshake")
		return false
	}
	c.conn = x
	return true
}

// nextMember is the next of the known masters in turn. The one that was left last is passed over once.
func (c *client) nextMember() (id uint64) {
	for range 2 {
		id = c.known[c.next%len(c.known)]
		c.next++
		if id != c.left {
			break
		}
		c.left = 0
	}
	return id
}

// watchConn makes a call on a connection that is not the link's yet time out.
func (s *sim) watchConn(x *clientConn) {
	c := x.c
	var look func()
	look = func() {
		if x.dead {
			return
		}
		x.expire()
		if !x.dead {
			s.after(keepEvery, c.life, look)
		}
	}
	s.after(keepEvery, c.life, look)
}

// expire ends calls that take too long; a connection from which nothing came since is closed.
func (x *clientConn) expire() {
	now := x.c.clock.Boottime()
	var late []*call
	rest := x.order[:0]
	for _, cl := range x.order {
		if cl.done {
			continue
		}
		rest = append(rest, cl)
		if now-cl.sentAt > cl.timeout {
			late = append(late, cl)
		}
	}
	x.order = rest
	for _, cl := range late {
		if x.heard < cl.sentAt {
			x.lost("timeout")
			return
		}
	}
	for _, cl := range late {
		delete(x.calls, cl.seq)
		cl.finish(nil, "timeout")
	}
}

// connLost hears that a connection has ended.
func (c *client) connLost(x *clientConn) {
	if c.conn == x {
		c.conn, c.left = nil, x.to.id
		c.wakeAll()
	}
}

// handshake opens or resumes the session.
func (c *client) handshake(p *proc, x *clientConn) *protocol.Error {
	old := c.sess
	c.pool.noteChanges()
	if c.node != nil {
		c.node.early = nil
	}
	var reply *protocol.HandshakeReply
	var sentAt int64
	e := &protocol.Error{Code: protocol.CodeSessionExpired}
	if old == nil || !old.ended {
		reply, sentAt, e = c.sendHandshake(p, x, c.greeting(old))
	}
	if old != nil && e != nil && (e.Code == protocol.CodeSessionExpired || e.Code == protocol.CodeNotFound || e.Code == protocol.CodeForbidden) {
		c.s.cover.SessionsLost++
		c.endSession(p, old)
		req := c.greeting(nil)
		req.Replaces, req.ReplacesSecret = old.id, old.secret
		if reply, sentAt, e = c.sendHandshake(p, x, req); e != nil {
			return e
		}
		c.beginSession(reply, sentAt)
		return nil
	}
	if e != nil {
		return e
	}
	c.known = c.known[:0]
	for _, m := range reply.Members {
		if !m.Learner {
			c.known = append(c.known, m.ID)
		}
	}
	c.quarantine = reply.QuarantineMS
	if old != nil && reply.Session == old.id {
		dropped, revoking := c.pool.reconcile(reply.Regions, reply.QuarantineMS)
		for _, r := range dropped {
			c.later(func(p *proc) { c.pool.giveUp(p, r) })
		}
		for _, r := range revoking {
			c.later(func(p *proc) { c.revoke(p, r.id, r.epoch) })
		}
		old.answered(sentAt)
		c.s.cover.Resumed++
		return nil
	}
	if old != nil {
		c.endSession(p, old)
	}
	c.beginSession(reply, sentAt)
	return nil
}

func (c *client) greeting(old *csession) *protocol.HandshakeRequest {
	req := &protocol.HandshakeRequest{
		ClientVersion: protocol.Version, Protocol: protocol.Version, InstanceID: c.instance, TTLMS: uint64(sessionTTL / ms),
		Features: protocol.FeaturePacked, BootID: hostBoot, PIDNamespace: hostNamespace, PID: c.pid, PIDStart: c.pid,
	}
	if c.s.mix.push {
		req.Features |= protocol.FeaturePush
	}
	switch {
	case c.node != nil:
		req.Features |= protocol.FeaturePush | protocol.FeatureCopies | protocol.FeatureNode
	case len(c.s.mix.nodes) > 0:
		req.Features |= protocol.FeatureCopies
	}
	if c.remote {
		req.BootID = fmt.Sprintf("%032x", 0xabc)
	}
	if old != nil {
		req.Session, req.Secret = old.id, old.secret
		return req
	}
	for c.opening == 0 {
		c.opening = c.rng.Uint64()
	}
	req.Secret = c.opening
	return req
}

func (c *client) sendHandshake(p *proc, x *clientConn, req *protocol.HandshakeRequest) (
	*protocol.HandshakeReply, int64, *protocol.Error,
) {
	cl := x.do(p, protocol.TypeHandshake, req.Append(nil), 0)
	if cl.body == nil {
		return nil, 0, &protocol.Error{Code: protocol.CodeUnavailable, Message: cl.lost}
	}
	reply := new(protocol.HandshakeReply)
	if err := reply.Decode(cl.body); err != nil {
		c.s.fail("wire", "a HANDSHAKE's reply does not decode: %v", err)
	}
	if reply.Code != 0 {
		return nil, 0, &reply.Error
	}
	return reply, cl.sentAt, nil
}

func (c *client) beginSession(reply *protocol.HandshakeReply, sentAt int64) {
	c.sess = &csession{
		id: reply.Session, secret: reply.Secret, ttl: int64(reply.TTLMS) * ms, nextSeq: 1, open: map[uint64]bool{},
	}
	c.sess.answered(sentAt)
	c.opening = 0
	clear(c.pins)
	c.s.cover.Sessions++
	ss := c.sess
	for i := range reply.Regions { // of an opening whose reply was lost
		if c.node != nil { // or of the session before
			c.node.adopt(ss, &reply.Regions[i], reply.QuarantineMS)
			continue
		}
		given := &reply.Regions[i].Region
		c.later(func(p *proc) { c.returnRegion(p, ss, given.RegionID, given.Epoch) })
	}
}

// endSession gives up everything that belonged to a session.
func (c *client) endSession(p *proc, ss *csession) {
	ss.ended = true
	for _, r := range slices.Clone(c.pool.list) {
		c.pool.forget(r)
	}
	for _, r := range slices.Clone(c.pool.dying) {
		c.pool.giveUp(p, r)
	}
	c.s.pinsEnd(c)
	if c.node != nil {
		c.node.sessionEnded()
	}
	c.wakeAll()
}

// keeper keeps the session alive.
func (c *client) keeper(p *proc) {
	beating := false
	for {
		p.sleep(keepEvery)
		ss := c.sess
		now := c.clock.Boottime()
		if c.conn == nil || ss == nil || now < c.silentTo {
			continue
		}
		if now-c.lastAnswer > ss.ttl/heartbeats && !beating {
			beating = true
			c.later(func(p *proc) {
				defer func() { beating = false }()
				if x := c.conn; x != nil {
					_, _ = c.attempt(p, x, protocol.TypeHeartbeat, protocol.AppendEmpty(nil), 0, readError)
				}
			})
		}
		if !c.s.mix.push && c.node == nil && now-c.polled > pollEvery {
			c.polled = now
			c.conn.lost("looks for what it would be told")
			continue
		}
		if c.pool.doubtful && len(ss.open) == 0 {
			c.conn.lost("looks which of its pages are in use")
			continue
		}
		if len(c.releases) > 0 && c.rng.IntN(4) == 0 {
			req := protocol.LeasesRequest{Leases: c.releases}
			c.conn.post(protocol.TypeRelease, req.Append(nil))
			c.releases = nil
		}
	}
}

// pushed handles what a master sends unasked.
func (c *client) pushed(x *clientConn, t protocol.Type, body []byte) {
	switch t {
	case protocol.TypeRevoke:
		var push protocol.RevokePush
		if err := push.Decode(body); err != nil {
			c.s.fail("wire", "a REVOKE does not decode: %v", err)
			return
		}
		c.s.pushes.revoke(x, &push)
		if c.deaf {
			c.s.cover.fault(clientDeaf)
			return
		}
		c.later(func(p *proc) { c.revoke(p, push.RegionID, push.Epoch) })
	case protocol.TypeFreed:
		var push protocol.FreedPush
		if err := push.Decode(body); err != nil {
			c.s.fail("wire", "a FREED does not decode: %v", err)
			return
		}
		c.s.pushes.freed(x, &push)
		for i := range push.Pages {
			c.pool.freed(&push.Pages[i])
		}
		c.eager()
		req := protocol.FreedAckRequest{ID: push.ID}
		x.post(protocol.TypeFreedAck, req.Append(nil))
		c.wakeAll()
	default:
		if c.node != nil {
			c.node.pushed(x, t, body)
		}
	}
}

// revoke gives a region up and says so.
func (c *client) revoke(p *proc, id, epoch uint64) {
	if slices.Contains(c.revoking, id) {
		return
	}
	c.revoking = append(c.revoking, id)
	defer func() {
		c.revoking = slices.DeleteFunc(c.revoking, func(x uint64) bool { return x == id })
	}()
	r := c.pool.region(id)
	for _, d := range c.pool.dying {
		if d.id == id {
			r = d
		}
	}
	if r == nil || r.epoch < epoch {
		c.pool.gone[id] = max(c.pool.gone[id], epoch)
	}
	if r != nil && r.epoch <= epoch {
		c.pool.giveUp(p, r)
	}
	p.wait(func() bool { return c.conn != nil })
	req := &protocol.RevokeDoneRequest{RegionID: id, Epoch: epoch}
	e := c.mutate(p, c.sess, &mutation{
		typ: protocol.TypeRevokeDone, mut: &req.Mutation, body: func() []byte { return req.Append(nil) }, read: readSuccess,
	})
	if e == nil {
		c.s.pushes.revoked(c.conn, id, epoch)
	}
	c.s.cover.op("revoke-done", e)
}

// returnRegion gives a region back.
func (c *client) returnRegion(p *proc, ss *csession, id, epoch uint64) {
	req := &protocol.ReturnAllocRequest{InstanceID: c.instance, RegionID: id, Epoch: epoch}
	e := c.mutate(p, ss, &mutation{
		typ: protocol.TypeReturnAlloc, mut: &req.Mutation, body: func() []byte { return req.Append(nil) }, read: readSuccess,
	})
	c.s.cover.op("return", e)
}
