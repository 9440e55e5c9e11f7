package server

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"os"
	"sync"
	"time"

	"larder/protocol"
)

// Limits of forwarding: see also maxClientRequests, which holds for each client.
const (
	// forwardWindow bytes of one client's lookups and of the answers to them are on their way; its further ones stay in
	// the socket. So a client that does not read never has more waiting than it may, and one that asks for much does not
	// fill the queue that all share.
	forwardWindow = 1 << 20
	// maxForwarded lookups of all clients wait for the leader; more are answered Busy. They are the full pipelines of
	// 64 clients.
	maxForwarded = 64 * maxClientRequests
	// maxForwardBytes of them wait to be written to the leader; more are answered Busy.
	maxForwardBytes = 64 << 20
	// forwardIdle is when a connection that nobody uses is given up: this member may lead by then, and its old leader has
	// a descriptor to keep.
	forwardIdle = 30 * time.Second
	// maxFaultBytes is the longest reply that is looked into for an error: a code, a sentence and an address.
	maxFaultBytes = 1 << 10
)

// Forward outcomes, in the order of Counters.Forwarded.
const (
	forwardAnswered = iota // with what was asked for
	forwardRefused         // with an error, such as that the other member does not lead either
	forwardNoLeader        // no leader is known
	forwardLost            // the connection to the leader could not be made, or broke
	forwardTimeout         // the leader did not answer within one election timeout
	forwardBusy            // too much is on its way
	forwardOutcomeCount
)

// forwardOutcomes name them in metrics.
var forwardOutcomes = [forwardOutcomeCount]string{"answered", "refused", "no_leader", "lost", "timeout", "busy"}

var (
	errForwardTimeout = protocol.Error{
		Code: protocol.CodeUnavailable, Message: "the leader did not answer this member in time: retry", RetryAfterMS: 100,
	}
	errForwardLost = protocol.Error{
		Code: protocol.CodeUnavailable, Message: "this member has lost its connection to the leader: retry", RetryAfterMS: 100,
	}
	errForwardBusy = protocol.Error{
		Code: protocol.CodeBusy, Message: "too many lookups wait for the leader: retry, or ask it directly",
		RetryAfterMS: uint64(busyRetry / time.Millisecond),
	}
)

// maxResultBytes is the longest that one result of a lookup is on the wire.
var maxResultBytes = func() int {
	const most = math.MaxUint64
	r := protocol.LookupResult{Found: true, Lease: most, LeaseMS: most}
	r.Handle = protocol.Handle{RegionID: most, Offset: most, Length: most, AuthToken: most}
	r.Device, r.Generation, r.Epoch, r.PageSize = most, most, most, most
	r.KVOffset, r.KVLength, r.Checksum = most, most, most
	return max(len(protocol.AppendLookupResult(nil, &r)), protocol.PackedSize)
}()

// forwarder passes lookups on to the leader, and its answers back, for clients that do not know how to find it: those of
// other systems. All clients share one connection, without a session, which is made when it is needed. A lookup is
// marked as forwarded, and a member that does not lead refuses it, so that it never goes in circles. The leader grants
// and confirms as it does for its own clients; the lease counts from when the client sent its request.
type forwarder struct {
	s       *network
	timeout time.Duration                  // one election timeout
	leader  func() (id uint64, self bool)  // cheap
	address func() (addr string, _ uint64) // the leader's, for clients, and its id

	mu      sync.Mutex
	link    *leaderLink // nil = none
	stopped bool
}

// forwarded is a lookup that waits for the leader's answer.
type forwarded struct {
	c      *conn           // nil = it has been answered by the leader, or told that its time is over
	h      protocol.Header // the client's
	weight int             // counted against the client: see Client.took
	began  int64
	done   bool // the leader has answered it
}

// leaderLink is a connection to the leader: a goroutine that dials and writes, and one that reads.
type leaderLink struct {
	f      *forwarder
	id     uint64
	addr   string
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{} // 1: there is something to write

	mu      sync.Mutex
	nc      net.Conn // nil = not connected yet
	out     []byte   // frames that wait to be written
	pending []forwarded
	first   uint32 // sequence of pending's first, which the leader has not answered; the others follow
	live    int    // of pending, how many at the front have been told that their time is over, or are done
	heard   int64  // when the leader answered last, or began to owe an answer
	dead    bool
}

// mayForward reports whether a request that arrived while this member did not lead is one that the leader is asked on
// the client's behalf. Clients with sessions find the leader themselves; their keys are perhaps another tenant's.
func (c *conn) mayForward(h protocol.Header, term uint64) bool {
	return term == 0 && (h.Type == protocol.TypeLookup || h.Type == protocol.TypeBatchLookup) &&
		h.Flags&protocol.FlagForwarded == 0 && !c.client.native() && !c.client.named
}

// forward asks the leader. What is wrong with the request, or in the way, is answered at once.
func (c *conn) forward(h protocol.Header, payload, out []byte) []byte {
	m := c.s.master
	m.n.Requests[h.Type].Add(1)
	sc, _ := scratches.Get().(*scratch)
	err := sc.lookup.DecodeAs(payload, h.Type)
	weight := len(payload) + min(len(sc.lookup.Keys)*maxResultBytes, protocol.MaxPayload)
	scratches.Put(sc)
	if err != nil {
		return m.refuseErr(out, h, err)
	}
	c.client.took(weight)
	fault, outcome := c.s.forwarder.send(forwarded{c: c, h: h, weight: weight, began: m.now()}, payload)
	if fault == nil {
		return out
	}
	c.client.answered(weight)
	m.n.Forwarded[outcome].Add(1)
	return m.refuse(out, h, fault)
}

// send queues a lookup for the leader, or says why not.
func (f *forwarder) send(p forwarded, payload []byte) (fault *protocol.Error, outcome int) {
	for {
		l := f.connection()
		if l == nil {
			return &errNoLeader, forwardNoLeader
		}
		// If it has ended meanwhile there is another one, or none.
		if fault, ok := l.add(p, payload); ok {
			return fault, forwardBusy
		}
	}
}

// connection returns the connection to the present leader, nil if none is known.
func (f *forwarder) connection() *leaderLink {
	id, self := f.leader()
	f.mu.Lock()
	old := f.link
	if old != nil && old.id == id && !self || f.stopped {
		f.mu.Unlock()
		return old
	}
	f.link = nil
	if addr, id := f.address(); addr != "" && id != 0 && !self {
		l := &leaderLink{f: f, id: id, addr: addr, wake: make(chan struct{}, 1), first: 1}
		l.ctx, l.cancel = context.WithCancel(f.s.ctx)
		f.link = l
		f.s.wg.Go(l.run)
	}
	l := f.link
	f.mu.Unlock()
	if old != nil {
		old.end(forwardLost, errors.New("another member leads"))
	}
	return l
}

// stop ends the connection; there will be no other.
func (f *forwarder) stop() {
	f.mu.Lock()
	l := f.link
	f.link, f.stopped = nil, true
	f.mu.Unlock()
	if l != nil {
		l.end(forwardLost, net.ErrClosed)
	}
}

// forget makes room for another connection.
func (f *forwarder) forget(l *leaderLink) {
	f.mu.Lock()
	if f.link == l {
		f.link = nil
	}
	f.mu.Unlock()
}

// add queues a lookup; it returns false if the connection has ended, and an error if too much waits already.
func (l *leaderLink) add(p forwarded, payload []byte) (fault *protocol.Error, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.dead:
		return nil, false
	case len(l.pending) >= maxForwarded, len(l.out) > 0 && len(l.out)+len(payload) > maxForwardBytes:
		return &errForwardBusy, true
	}
	head := protocol.Header{
		Type: p.h.Type, Flags: p.h.Flags&^protocol.FlagCompressed | protocol.FlagForwarded,
		Sequence: l.first + uint32(len(l.pending)), //nolint:gosec // at most maxForwarded
		Length:   uint32(len(payload)),             //nolint:gosec // at most MaxPayload
	}
	l.out = append(head.Append(l.out), payload...)
	l.pending = append(l.pending, p)
	if len(l.pending) == 1 {
		l.heard = p.began
		l.arm()
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return nil, true
}

// arm makes the reader wake up when the oldest lookup's time is over, or the leader has been silent for too long. The
// caller holds mu.
func (l *leaderLink) arm() {
	if l.nc == nil || l.dead {
		return
	}
	wait := forwardIdle
	if l.live < len(l.pending) {
		wait = l.f.left(l.pending[l.live].began)
	} else if len(l.pending) > 0 {
		wait = l.f.left(l.heard)
	}
	_ = l.nc.SetReadDeadline(socketDeadline(wait)) // fails only on a closed socket, which the reader notices
}

// left is how much is left of one election timeout that began at a time.
func (f *forwarder) left(began int64) time.Duration {
	return f.timeout - time.Duration(f.s.master.now()-began)
}

// run connects, and then writes what is queued until the connection ends.
func (l *leaderLink) run() {
	dialer := net.Dialer{Timeout: l.f.timeout}
	nc, err := dialer.DialContext(l.ctx, "tcp", l.addr)
	if err != nil {
		l.end(forwardLost, err)
		return
	}
	l.mu.Lock()
	l.nc = nc
	dead := l.dead
	l.arm()
	l.mu.Unlock()
	if dead {
		_ = nc.Close() // nothing was sent over it
		return
	}
	l.f.s.wg.Go(l.read)
	var spare []byte
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.wake:
		}
		l.mu.Lock()
		b := l.out
		l.out = spare[:0]
		l.mu.Unlock()
		if spare = b; cap(spare) > softOutput {
			spare = nil // a burst of large batches is not kept for ever
		}
		if err = nc.SetWriteDeadline(socketDeadline(l.f.timeout)); err == nil {
			_, err = nc.Write(b)
		}
		if err != nil {
			l.end(forwardLost, err)
			return
		}
	}
}

// read passes answers on until the connection ends. Those that have arrived together are sent together.
func (l *leaderLink) read() {
	r := protocol.NewReader(l.nc)
	var box outbox
	for {
		h, payload, err := r.Next()
		switch {
		case err == nil:
			err = l.answer(h, payload, &box)
		case errors.Is(err, os.ErrDeadlineExceeded):
			if l.expire() {
				continue
			}
			l.end(forwardTimeout, err)
			return
		}
		if err == nil && r.Buffered() {
			continue
		}
		box.flush()
		if err != nil {
			l.end(forwardLost, err)
			return
		}
		l.mu.Lock()
		l.arm()
		l.mu.Unlock()
	}
}

// expire answers the lookups whose time is over; their leases would be, too, when the leader's answers came. It reports
// whether the connection is of use: the leader has answered something lately.
func (l *leaderLink) expire() bool {
	var late []forwarded
	l.mu.Lock()
	for ; l.live < len(l.pending); l.live++ {
		p := &l.pending[l.live]
		if p.c == nil {
			continue
		}
		if l.f.left(p.began) > 0 {
			break
		}
		late = append(late, *p)
		p.c = nil
	}
	useful := len(l.pending) > 0 && l.f.left(l.heard) > 0
	l.arm()
	l.mu.Unlock()
	l.fail(late, forwardTimeout)
	return useful
}

// take removes the lookup that a reply answers.
func (l *leaderLink) take(h protocol.Header) (forwarded, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := h.Sequence - l.first
	if uint64(i) >= uint64(len(l.pending)) || l.pending[i].done || l.pending[i].h.Type.Reply() != h.Type {
		return forwarded{}, false
	}
	p := l.pending[i]
	l.pending[i] = forwarded{done: true}
	l.heard = l.f.s.master.now()
	for len(l.pending) > 0 && l.pending[0].done {
		l.pending = l.pending[1:]
		l.first++
		l.live = max(l.live-1, 0)
	}
	return p, true
}

// answer gives a client its reply, under its own sequence.
func (l *leaderLink) answer(h protocol.Header, payload []byte, box *outbox) error {
	p, ok := l.take(h)
	if !ok {
		return errors.New("it answers what it was not asked")
	}
	if p.c == nil {
		return nil // too late
	}
	n := l.f.s.counters
	p.c.client.frame(p.h, func(b []byte) []byte { return append(b, payload...) })
	p.c.client.answered(p.weight)
	box.add(p.c.client)
	var reply protocol.HeartbeatReply
	if len(payload) <= maxFaultBytes && reply.Decode(payload) == nil && reply.Code != protocol.CodeOK {
		n.Errors[p.h.Type].Add(1)
		n.Forwarded[forwardRefused].Add(1)
		return nil
	}
	n.Forwarded[forwardAnswered].Add(1)
	if h.Sequence%latencySample == 0 {
		n.observeLatency(p.h.Type, l.f.s.master.now()-p.began)
	}
	return nil
}

// end closes the connection, once, and has every lookup that waits retried: whether the leader has granted its lease is
// not known, and does not matter.
func (l *leaderLink) end(outcome int, why error) {
	l.f.forget(l)
	l.mu.Lock()
	if l.dead {
		l.mu.Unlock()
		return
	}
	l.dead = true
	pending, nc := l.pending, l.nc
	l.pending, l.out = nil, nil
	l.mu.Unlock()
	l.cancel()
	if nc != nil {
		_ = nc.Close() // what it still has to say is not waited for
	}
	if cut := l.fail(pending, outcome); cut > 0 && l.f.s.ctx.Err() == nil {
		l.f.s.logger.Warn("forwarding lookups to the leader failed", slog.String("leader", l.addr),
			slog.Int("requests_cut_off", cut), slog.Any("error", why))
	}
}

// fail has lookups retried, and returns how many had not been answered before.
func (l *leaderLink) fail(pending []forwarded, outcome int) (cut int) {
	fault := &errForwardLost
	if outcome == forwardTimeout {
		fault = &errForwardTimeout
	}
	n := l.f.s.counters
	var box outbox
	for _, p := range pending {
		if p.c == nil {
			continue
		}
		cut++
		n.Forwarded[outcome].Add(1)
		n.Errors[p.h.Type].Add(1)
		p.c.client.frameError(p.h, fault)
		p.c.client.answered(p.weight)
		box.add(p.c.client)
	}
	box.flush()
	return cut
}
