package maru

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"larder/zmtp"
)

// slot is one request of a burst, and its reply.
type slot struct {
	envelope [][]byte // the parts in front of the body; nil = the one empty part that everybody sends
	body     []byte   // the request
	reply    []byte
	h        Header
	state    state
	again    bool          // it may have been carried out before
	age      time.Duration // on its way here, by what the member says that passed it on
}

type state uint8

const (
	open    state = iota // to be served
	read                 // answered, if this member still leads
	logged               // in the log
	settled              // answered
)

// conn serves one connection, a burst of requests at a time: those that have arrived. Their effects and replies have their
// order. What changes the index goes into the log without waiting for what is in front of it, and so do reads behind that;
// those that come first are answered from memory. While the log is waited for, the next burst gathers in the socket.
type conn struct {
	s      *Server
	c      *zmtp.Conn
	client Client
	ctx    context.Context
	cancel context.CancelFunc
	member bool // the peer is another member's listener, which finds the leader by itself
	q      Request
	slots  []slot
	n      int // slots in use
	bytes  int
	inLog  waiting
	term   uint64 // in which the reads of the burst were made

	linking sync.Mutex // held while the link is made, or used
	link    *link      // to the leader, nil = none

	arrived time.Time // when the oldest request of the burst can have come
	ended   time.Time // when the last burst had been read; at first: when the client had connected
	first   bool      // nothing has come yet
	begun   time.Time // when the first message came
	stale   bool      // what comes may have waited in the client while it had no connection
}

// serve is what a connection's goroutine does.
func (s *Server) serve(zc *zmtp.Conn) {
	joined := now()
	if !s.started() {
		return
	}
	c := &conn{s: s, c: zc, slots: make([]slot, 0, 4), first: true, member: zc.PeerType() == zmtp.ROUTER, ended: joined}
	c.inLog.none = make(chan struct{}, 1)
	c.client = clientOf(zc, c.member)
	c.ctx, c.cancel = context.WithCancel(s.ctx)
	s.Accepted.Add(1)
	s.Connections.Add(1)
	s.index.Joined(&c.client)
	s.mu.Lock()
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	defer c.leave()
	for c.burst() {
	}
}

// leave undoes what serve began.
func (c *conn) leave() {
	s := c.s
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.index.Left(&c.client)
	s.Connections.Add(-1)
	c.cancel() // no further link is made
	c.linking.Lock()
	c.unlink()
	c.linking.Unlock()
}

// clientOf says who is at the other end: of what another member passes on, who is behind that.
func clientOf(zc *zmtp.Conn, member bool) Client {
	host, _, err := net.SplitHostPort(zc.RemoteAddr().String())
	if err != nil {
		host = zc.RemoteAddr().String()
	}
	if member {
		host, id, _ := strings.Cut(zc.Identity(), "/")
		return Client{Host: host, Identity: id}
	}
	id := []byte(zc.Identity())
	if len(id) > maxNamed {
		sum := sha256.Sum256(id)
		id = sum[:]
	}
	return Client{Host: host, Identity: hex.EncodeToString(id)}
}

// maxNamed is the longest identity that is passed on to the leader as it is, with room for the host beside it. Maru's clients
// have 8 bytes.
const maxNamed = 64

// burst reads and serves what has arrived. It returns false when the connection ends.
func (c *conn) burst() bool {
	c.n, c.bytes = 0, 0
	if !c.receive() {
		return false
	}
	deadline := c.arrived.Add(Patience)
	for {
		c.attempt(deadline)
		if c.s.ctx.Err() != nil {
			return false
		}
		if c.answered() {
			return c.send()
		}
		if left := deadline.Sub(now()); left <= 0 || c.member {
			c.giveUp()
			return c.send()
		}
		if !c.send() || !pause(c.ctx, leaderRetry) { // what has been answered need not wait
			return false
		}
	}
}

// receive reads the messages that have arrived, and at least one.
func (c *conn) receive() bool {
	before := now()
	for {
		parts, err := c.c.Read()
		if err != nil {
			return false
		}
		if c.n == 0 {
			c.clock(before, now())
		}
		c.take(parts)
		if !c.c.Buffered() || c.n >= maxBurst || c.bytes >= maxBurstBytes {
			c.ended = now()
			return true
		}
	}
}

// clock works out since when the requests of a burst can have waited: what was there as soon as it was looked for may have
// come while the burst before was served, or while the process was stopped.
func (c *conn) clock(before, after time.Time) {
	blocked := after.Sub(before)
	c.arrived = after
	if blocked < time.Millisecond {
		c.arrived = c.ended
	}
	if t := c.s.since(before, after); t.Before(c.arrived) {
		c.arrived = t
	}
	if c.stale && (blocked >= quiet || after.Sub(c.begun) >= staleFor) {
		c.stale = false
	}
}

// take makes a slot of a message.
func (c *conn) take(parts [][]byte) {
	at := -1
	for i, p := range parts {
		if len(p) == 0 {
			at = i
			break
		}
	}
	if at < 0 {
		return // without an empty part in front of the body it is nothing to a REP either
	}
	if c.n == len(c.slots) {
		c.slots = append(c.slots, slot{})
	}
	x := &c.slots[c.n]
	c.n++
	*x = slot{body: x.body[:0], reply: x.reply[:0]}
	for i := 0; at > 0 && i <= at; i++ {
		x.envelope = append(x.envelope, append([]byte{}, parts[i]...))
	}
	if len(parts) != at+2 {
		c.fail(x, nil) // a body in several parts is decoded as if its first were all of it
		return
	}
	x.body = append(x.body, parts[at+1]...)
	c.bytes += len(x.body)
	if !c.open(x) {
		return
	}
	if c.first {
		// A DEALER that has lost its connection sends what it has queued meanwhile; its numbers do not begin at 1 then.
		c.first, c.begun = false, now()
		c.stale = !c.member && c.c.PeerType() == zmtp.DEALER && x.h.Sequence != 1
	}
	c.s.index.Heard(&c.client, &c.q)
	switch {
	case c.stale && changes(x.h.Type):
		c.s.Late.Add(1)
		c.fail(x, &x.h)
	case x.h.Type == Heartbeat:
		c.reply(x, func(b []byte) []byte { return append(b, 0x80) })
	case x.h.Type == Handshake:
		c.reply(x, func(b []byte) []byte {
			b = appendBool(appendStr(append(b, 0x82), "success"), true)
			return appendStr(appendStr(b, "rm_address"), c.s.index.ResourceManager())
		})
	case x.h.Type == Shutdown:
		x.reply = appendFailure(x.reply[:0], x.h, "Unknown message type: 255")
		x.state = settled
	}
}

// changes reports whether a request does harm when its client has given up on it.
func changes(t Type) bool {
	return t == Register || t == BatchRegister || t == Pin || t == BatchPin || t == RequestAlloc
}

// open decodes the request of a slot into c.q. It returns false if it is answered with that.
func (c *conn) open(x *slot) bool {
	h, ageMS, payload, err := parseHeader(x.body)
	if err == nil {
		err = c.q.Decode(h, payload)
	}
	switch {
	case err == nil:
		if x.h = h; c.member {
			x.age = time.Duration(ageMS) * time.Millisecond
			x.h.Flags, x.again = h.Flags&^flagAgain, h.Flags&flagAgain != 0
		}
		if x.state == open {
			c.s.Requests[h.Type].Add(1)
		}
		c.bytes += (len(c.q.Keys) + len(c.q.Entries)) * replyBytes
		return true
	case errors.Is(err, errRequest):
		c.fail(x, &h)
	default:
		c.fail(x, nil)
	}
	return false
}

// replyBytes is the longest that one key's part of a reply is.
const replyBytes = 160

// fail answers a request with all that Maru's server says of what fails. One that could not be decoded has no header.
func (c *conn) fail(x *slot, h *Header) {
	if h == nil {
		h = &Header{}
	}
	c.s.Failures[h.Type].Add(1)
	x.reply = appendFailure(x.reply[:0], *h, internalError)
	x.state = settled
}

// reply answers a request.
func (c *conn) reply(x *slot, payload func(b []byte) []byte) {
	b, mark := beginReply(x.reply[:0], x.h)
	x.reply = endReply(payload(b), mark)
	x.state = settled
}

// answered reports whether all requests of the burst are.
func (c *conn) answered() bool {
	for i := range c.slots[:c.n] {
		if c.slots[i].state != settled {
			return false
		}
	}
	return true
}

// giveUp answers what found no leader in time. Another member's listener goes on to look for one.
func (c *conn) giveUp() {
	for i := range c.slots[:c.n] {
		x := &c.slots[i]
		if x.state == settled {
			continue
		}
		if c.member {
			x.reply = appendFailure(x.reply[:0], Header{Flags: flagElsewhere, Sequence: x.h.Sequence}, "another member leads")
			if x.again {
				x.reply[4] |= flagAgain
			}
			x.state = settled
			continue
		}
		c.s.Late.Add(1)
		c.fail(x, &x.h)
	}
}

// send sends the replies of the requests up to the first that has none yet, and takes them off the burst.
func (c *conn) send() bool {
	i := 0
	for ; i < c.n && c.slots[i].state == settled; i++ {
		x := &c.slots[i]
		var err error
		if x.envelope == nil {
			err = c.c.Queue(nil, x.reply)
		} else {
			err = c.c.Queue(append(x.envelope, x.reply)...)
		}
		if err != nil {
			return false
		}
		if cap(x.reply) > keptReply {
			x.reply = nil // one large batch is no reason to keep its memory
		}
		if cap(x.body) > keptReply {
			x.body = nil
		}
	}
	if i == 0 {
		return true
	}
	if rest := c.n - i; rest > 0 {
		moved := append([]slot(nil), c.slots[i:c.n]...)
		for k := range c.slots[:c.n] {
			c.slots[k] = slot{}
		}
		copy(c.slots, moved)
	}
	c.n -= i
	return c.c.Flush() == nil
}

// keptReply is the largest buffer that a slot keeps: with two in each of maxBurst slots, 2 MiB for a connection.
const keptReply = 4 << 10
