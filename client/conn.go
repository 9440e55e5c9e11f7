package client

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"larder/protocol"
)

const (
	// slotBits sizes the table of calls in flight on one connection: 1024 small calls keep any link busy, and a call
	// that finds it full waits.
	slotBits = 10
	slots    = 1 << slotBits
	// maxOut bounds the bytes that wait to be sent: two frames of the largest size.
	maxOut = 2 * (protocol.MaxPayload + protocol.HeaderSize)
	// keepOut is the largest send buffer that is kept for reuse.
	keepOut = 1 << 20
	// flushRounds is how often a caller sends for others before it hands that over, so that its own answer is not
	// left lying.
	flushRounds = 8
)

// message encodes a request's payload. It may be called again, for a retry.
type message interface {
	appendTo(b []byte) []byte
}

// call is one request in flight. The goroutine that makes it owns it, except between the moment a conn takes it into
// its table and the one token on done.
type call struct {
	typ     protocol.Type
	msg     message
	timeout int64 // ns to wait for the answer, from sentAt
	sentAt  int64 // when it was handed to the connection, or earlier
	seq     uint32
	buf     []byte // the reply's payload
	err     error  // why there is none
	done    chan struct{}
}

var calls = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCall(t protocol.Type, m message, timeout int64) *call {
	c := calls.Get().(*call) //nolint:forcetypeassert // the pool holds nothing else
	c.typ, c.msg, c.timeout, c.err = t, m, timeout, nil
	return c
}

// freeCall gives a call back that no connection holds. A buffer that one large reply needed does not stay.
func freeCall(c *call) {
	c.msg = nil
	if cap(c.buf) > keepOut {
		c.buf = nil
	}
	calls.Put(c)
}

// conn is one pipelined connection. Requests of many goroutines are gathered in out and sent by whichever of them
// finds nobody sending. What comes is read by a goroutine of its own, or by a caller that looks for its answer (see
// Spin), and each reply handed to its call by the sequence number.
type conn struct {
	nc       socket
	in       intake
	addr     string
	clock    func() int64
	sess     atomic.Pointer[session]                  // set before the connection is shared
	onPush   func(*conn, protocol.Type, []byte) error // called by who reads: must not block, nor close; an error ends the connection
	onClose  func(*conn, error)                       // called once
	room     chan struct{}                            // a token per call in flight
	flight   atomic.Int32
	heard    atomic.Uint64 // frames that came
	writes   atomic.Uint64 // writes begun and ended: odd while one is going on
	seen     progress      // the keeper's
	packs    atomic.Bool   // compresses large requests: the master reads them so, and they cross a network
	noLeader atomic.Int64  // when the master began to answer nothing but UNAVAILABLE, 0 if it does not
	done     chan struct{}

	mu         sync.Mutex
	out, spare []byte
	writing    bool
	bursting   bool  // a burst of replies is being handed out, and then sent what their callers ask for next
	err        error // set once, when closed
	gen        uint32
	free       []uint16
	table      [slots]*call
}

// progress is what the keeper last saw of a connection, and when: reading the clock for each frame would cost more than
// the rest of handling it.
type progress struct {
	heard, writes     uint64
	heardAt, writesAt int64
}

// look compares a connection with what was seen of it before.
func (s *progress) look(c *conn, now int64) {
	if n := c.heard.Load(); n != s.heard || s.heardAt == 0 {
		s.heard, s.heardAt = n, now
	}
	if n := c.writes.Load(); n != s.writes || s.writesAt == 0 {
		s.writes, s.writesAt = n, now
	}
}

// startConn begins to read. The connection ends by close or by a fault, which onClose hears of; done is closed when
// its goroutine has ended.
func startConn(nc socket, addr string, clock func() int64, onPush func(*conn, protocol.Type, []byte) error,
	onClose func(*conn, error), readers *sync.WaitGroup,
) *conn {
	c := &conn{
		nc: nc, addr: addr, clock: clock, onPush: onPush, onClose: onClose,
		room: make(chan struct{}, slots), done: make(chan struct{}), free: make([]uint16, slots),
	}
	for i := range c.free {
		c.free[i] = uint16(i)
	}
	c.in.r = protocol.NewReader(atOnce{nc})
	readers.Go(func() {
		c.read()
	})
	return c
}

// do sends cl and waits for its reply, whose payload is then in cl.buf. If it fails, the request may or may not have
// been carried out, unless sent is false.
func (c *conn) do(ctx context.Context, cl *call) (sent bool, err error) {
	select {
	case c.room <- struct{}{}:
	default:
		select {
		case c.room <- struct{}{}:
		case <-c.done:
			return false, c.reason()
		case <-ctx.Done():
			return false, ctx.Err() //nolint:wrapcheck // callers wrap
		}
	}
	cl.err = nil
	cl.sentAt = c.clock()
	if err := c.send(cl); err != nil {
		<-c.room
		return false, err
	}
	spin(ctx, cl.done, c.look, c.clock)
	if d := ctx.Done(); d != nil {
		select {
		case <-cl.done:
		case <-d:
			if c.abandon(cl) {
				return true, ctx.Err() //nolint:wrapcheck // callers wrap
			}
			<-cl.done
		}
	} else {
		<-cl.done
	}
	return true, cl.err
}

// send puts cl into the table and its frame into the send buffer, and sees to it that somebody sends that.
func (c *conn) send(cl *call) error {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return c.err
	}
	if len(c.out) > maxOut {
		c.mu.Unlock()
		return errBacklog
	}
	slot := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	if c.gen++; c.gen >= 1<<(32-slotBits) {
		c.gen = 1 // 0 could make a sequence of 0, which means a push
	}
	cl.seq = c.gen<<slotBits | uint32(slot)
	c.table[slot] = cl
	c.flight.Add(1)
	c.appendFrame(cl.typ, cl.seq, cl.msg)
	c.unlockAndFlush()
	return nil
}

// post sends a request whose reply nobody waits for. It may be lost.
func (c *conn) post(t protocol.Type, m message) {
	c.mu.Lock()
	if c.err != nil || len(c.out) > maxOut {
		c.mu.Unlock()
		return
	}
	// A sequence of generation 0 belongs to no call: the reply is passed over.
	c.appendFrame(t, 1, m)
	c.unlockAndFlush()
}

func (c *conn) appendFrame(t protocol.Type, seq uint32, m message) {
	b, mark := protocol.BeginFrame(c.out, t, seq)
	c.out = protocol.EndFrame(m.appendTo(b), mark)
}

// unlockAndFlush ends a locked section that has appended to out.
func (c *conn) unlockAndFlush() {
	if c.writing || c.bursting {
		c.mu.Unlock()
		return
	}
	c.writing = true
	c.mu.Unlock()
	if c.flight.Load() > 1 {
		// Others that the same burst of replies woke are about to send too: one system call serves them all.
		runtime.Gosched()
	}
	if !c.flush(flushRounds) {
		go c.flush(-1)
	}
}

// flush sends until nothing is left, or for a number of rounds if that is not negative. It reports whether it is done.
func (c *conn) flush(rounds int) bool {
	for ; rounds != 0; rounds-- {
		c.mu.Lock()
		if len(c.out) == 0 || c.err != nil {
			c.writing = false
			c.mu.Unlock()
			return true
		}
		buf := c.out
		c.out, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		if c.packs.Load() {
			buf = protocol.CompressFrames(buf, 0) // here, where it holds nobody up who appends
		}
		c.writes.Add(1)
		_, err := c.nc.Write(buf)
		c.writes.Add(1)
		if err != nil {
			c.close(err)
		}
		if cap(buf) <= keepOut {
			c.mu.Lock()
			c.spare = buf[:0]
			c.mu.Unlock()
		}
	}
	return false
}

// remove takes the call with this sequence number out of the table; nil if it was abandoned.
func (c *conn) remove(seq uint32) *call {
	slot := seq & (slots - 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	cl := c.table[slot]
	if cl == nil || cl.seq != seq {
		return nil
	}
	c.table[slot] = nil
	c.free = append(c.free, uint16(slot))
	return cl
}

func (c *conn) finish(cl *call) {
	c.flight.Add(-1)
	cl.done <- struct{}{}
	<-c.room
}

// abandon takes cl back. It reports false if the reply is on its way to done already.
func (c *conn) abandon(cl *call) bool {
	if c.remove(cl.seq) == nil {
		return false
	}
	c.flight.Add(-1)
	<-c.room
	return true
}

// expire ends the calls that have waited too long at now. A connection from which nothing came since the oldest of
// them was sent, or on which a write does not get on, is closed: its master is gone, cut off or paused. Only the keeper
// calls it.
func (c *conn) expire(now, writeTimeout int64) {
	c.seen.look(c, now)
	var late []*call
	c.mu.Lock()
	for _, cl := range c.table {
		if cl != nil && now-cl.sentAt > cl.timeout {
			late = append(late, cl)
		}
	}
	// What came was noticed up to a look of the keeper's later: it may have come before the call was sent.
	silent := false
	for _, cl := range late {
		silent = silent || c.seen.heardAt-int64(keepIdle) < cl.sentAt
	}
	c.mu.Unlock()
	stuck := c.seen.writes%2 == 1 && now-c.seen.writesAt > writeTimeout
	if silent || stuck {
		c.close(errCallTimeout)
		return
	}
	for _, cl := range late {
		if c.remove(cl.seq) == cl {
			cl.err = errCallTimeout
			c.finish(cl)
		}
	}
}

// close ends the connection and fails every call on it. It may be called often, by anyone.
func (c *conn) close(why error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = errors.Join(errConnLost, why)
	var lost []*call
	for i, cl := range c.table {
		if cl != nil {
			c.table[i] = nil
			c.free = append(c.free, uint16(i))
			lost = append(lost, cl)
		}
	}
	c.out = nil
	c.mu.Unlock()
	_ = c.nc.Close() // nothing is expected of it any more
	for _, cl := range lost {
		cl.err = c.err
		c.finish(cl)
	}
	c.onClose(c, why)
}

func (c *conn) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// leaderPatience is for how long a master may know of no leader before the client asks the others: half an election.
const leaderPatience = 500 * time.Millisecond

// unavailable notes that the master knew of no leader, and reports whether it has for too long.
func (c *conn) unavailable() bool {
	now := c.clock()
	since := c.noLeader.Load()
	if since == 0 {
		c.noLeader.CompareAndSwap(0, now)
		return false
	}
	return now-since > int64(leaderPatience)
}
