package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"larder/cxl"
	"larder/protocol"
)

// session is one session with the pool. It ends once, when a master says that it no longer has it; regions, epochs and
// sequence numbers end with it.
type session struct {
	id, secret uint64
	ttl        int64        // ns; 0 = it does not expire
	fenceAt    atomic.Int64 // BOOTTIME from which no store may start: see alive
	gone       chan struct{}
	window     window
}

// alive reports whether the session's deadline lies ahead at now: a master counts the TTL from when it last heard of
// the client; the client from when it sent what was last answered, and stops a margin early. Past it stores are
// suspended until a master has confirmed the session.
func (s *session) alive(now int64) bool { return s.ttl == 0 || now < s.fenceAt.Load() }

// answered notes that a request sent at sentAt was answered by the leader.
func (s *session) answered(sentAt int64) {
	if s.ttl == 0 {
		return
	}
	at := sentAt + s.ttl - margin(s.ttl)
	for {
		old := s.fenceAt.Load()
		if old >= at || s.fenceAt.CompareAndSwap(old, at) {
			return
		}
	}
}

// SessionStatus is what a client knows of its present session.
type SessionStatus struct {
	ID  uint64
	TTL time.Duration // after which the masters give it up when they hear nothing of the client; 0: they do not
	// Confirmed is how long ago the latest request was sent by whose answer the leader is known to have heard of the client. While
	// it is less than TTL the session is open. 0 if it does not expire.
	Confirmed time.Duration
}

// SessionStatus returns what is known of the present session. Whoever counts on what ends with a session, such as leased names,
// sees by it that the masters may have given it up, and by another ID that they have.
func (c *Client) SessionStatus() SessionStatus {
	s := c.sess.Load()
	st := SessionStatus{ID: s.id, TTL: time.Duration(s.ttl)}
	if s.ttl > 0 {
		sentAt := s.fenceAt.Load() - s.ttl + margin(s.ttl)
		st.Confirmed = time.Duration(max(c.cfg.Clock()-sentAt, 0))
	}
	return st
}

// ended reports whether the session is over.
func (s *session) ended() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

// window hands out the sequence numbers of a session's mutations, at most protocol.Window beyond the lowest that has
// no answer.
type window struct {
	mu    sync.Mutex
	next  uint64 // the next to hand out
	low   uint64 // the lowest without an answer
	open  [protocol.Window]bool
	freed chan struct{} // closed when low moves; nil if nobody waits
}

// take returns the next sequence number. It waits while the window is full.
func (w *window) take(ctx context.Context, gone <-chan struct{}) (uint64, error) {
	for {
		w.mu.Lock()
		if w.next == 0 {
			w.next, w.low = 1, 1
		}
		if w.next-w.low < protocol.Window {
			seq := w.next
			w.next++
			w.open[seq%protocol.Window] = true
			w.mu.Unlock()
			return seq, nil
		}
		if w.freed == nil {
			w.freed = make(chan struct{})
		}
		freed := w.freed
		w.mu.Unlock()
		select {
		case <-freed:
		case <-gone:
			return 0, ErrSessionExpired
		case <-ctx.Done():
			return 0, ctx.Err() //nolint:wrapcheck // callers wrap
		}
	}
}

// release notes that seq has its answer, or never needs one.
func (w *window) release(seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[seq%protocol.Window] = false
	moved := false
	for w.low < w.next && !w.open[w.low%protocol.Window] {
		w.low++
		moved = true
	}
	if moved && w.freed != nil {
		close(w.freed)
		w.freed = nil
	}
}

// inFlight counts the numbers without an answer.
func (w *window) inFlight() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, open := range w.open {
		if open {
			n++
		}
	}
	return n
}

// acked is the lowest sequence number without an answer.
func (w *window) acked() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.low
}

// handshakeRequest makes the request that opens a session, or resumes old.
func (c *Client) handshakeRequest(old *session) *protocol.HandshakeRequest {
	req := &protocol.HandshakeRequest{
		ClientVersion: protocol.Version, Protocol: protocol.Version,
		InstanceID: c.cfg.Instance, Tenant: c.cfg.Tenant,
		TTLMS:    uint64(c.cfg.TTL / time.Millisecond), //nolint:gosec // not negative
		Features: protocol.FeaturePush | protocol.FeaturePacked | protocol.FeatureCompression | protocol.FeatureCopies,
	}
	if c.cfg.Checksums {
		req.Features |= protocol.FeatureChecksums
	}
	if c.cfg.Home {
		req.Features |= protocol.FeatureNode
	}
	if old != nil {
		req.Session, req.Secret = old.id, old.secret
	} else {
		req.Secret = c.openingSecret()
	}
	if boot, err := cxl.BootID(); err == nil {
		req.BootID = formatID(boot)
		req.PIDNamespace = cxl.PIDNamespace()
		req.PID = uint64(os.Getpid()) //nolint:gosec // a pid is positive
		if start, _, err := cxl.ProcessStart(os.Getpid()); err == nil {
			req.PIDStart = start
		}
	}
	return req
}

// openingSecret is the number that names the opening of a session until one is open, so that a HANDSHAKE that is
// repeated because its reply was lost gets the session of the first, and another client of the same process does not.
func (c *Client) openingSecret() uint64 {
	for c.opening == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails: see crypto/rand
		c.opening = binary.LittleEndian.Uint64(b[:])
	}
	return c.opening
}

// formatID writes an id as the kernel writes boot ids.
func formatID(id [16]byte) string {
	const hex = "0123456789abcdef"
	b := make([]byte, 0, 36)
	for i, v := range id {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			b = append(b, '-')
		}
		b = append(b, hex[v>>4], hex[v&15])
	}
	return string(b)
}

// handshake opens or resumes the session on a new connection, and brings the pages of this client in line with what
// the master says. first says whether cn is the first connection of a new link: only then may the session change.
func (c *Client) handshake(ctx context.Context, cn *conn, first bool) (*protocol.HandshakeReply, error) {
	old := c.sess.Load()
	if first {
		c.pool.noteChanges() // what the master says of pages is compared with what has not changed here since
	}
	if first && c.cfg.Home {
		c.pool.adopts(1)
		defer c.pool.adopts(-1)
	}
	reply, sentAt, err := c.sendHandshake(ctx, cn, c.handshakeRequest(old))
	if old != nil && first && forgotten(err) {
		return c.replaceSession(ctx, cn, old)
	}
	if err != nil {
		return nil, err
	}
	if old != nil && reply.Session == old.id {
		if first {
			c.reconcile(reply)
		}
		old.answered(sentAt)
		cn.sess.Store(old)
		return reply, nil
	}
	if !first {
		return nil, refused(protocol.CodeSessionExpired, "the session ended between two connections")
	}
	if old != nil {
		c.endSession(old)
	}
	c.beginSession(cn, reply, sentAt) //nolint:contextcheck // the session outlives the call
	return reply, nil
}

// forgotten reports whether a master that was asked to resume a session says that it never will: the session is over, or
// its number is somebody else's by now. What does not last, and what a new session would not mend, is no reason to give
// one up.
func forgotten(err error) bool {
	e, ok := errors.AsType[*protocol.Error](err)
	if !ok {
		return false // nobody has answered
	}
	switch e.Code {
	case protocol.CodeLimit, protocol.CodeInternal, protocol.CodeUnsupported, protocol.CodeWrongPool:
		return false
	default:
		return !e.Code.Retryable()
	}
}

// sendHandshake makes one HANDSHAKE.
func (c *Client) sendHandshake(ctx context.Context, cn *conn, req *protocol.HandshakeRequest) (
	*protocol.HandshakeReply, int64, error,
) {
	cl := newCall(protocol.TypeHandshake, (*handshakeMsg)(req), c.cfg.CallTimeout.Nanoseconds())
	defer freeCall(cl)
	if _, err := cn.do(ctx, cl); err != nil {
		return nil, 0, err
	}
	reply := new(protocol.HandshakeReply)
	if err := reply.Decode(cl.buf); err != nil {
		return nil, 0, err //nolint:wrapcheck // typed
	}
	if err := reply.Err(); err != nil {
		return nil, 0, err //nolint:wrapcheck // typed
	}
	if reply.Protocol == 0 || reply.Session == 0 {
		return nil, 0, refused(protocol.CodeUnsupported, "this server opens no sessions: point Addrs at a Larder master")
	}
	cn.packs.Store(reply.Features&protocol.FeatureCompression != 0 &&
		protocol.Distant(cn.nc.LocalAddr().String(), cn.nc.RemoteAddr().String()))
	return reply, cl.sentAt, nil
}

// replaceSession opens a new session after the master has forgotten the old one. By naming the old one as replaced
// the client promises that nothing of it writes any more, which endSession has seen to; where it could not, it makes no
// promise, and the regions stay fenced until this process ends.
func (c *Client) replaceSession(ctx context.Context, cn *conn, old *session) (*protocol.HandshakeReply, error) {
	req := c.handshakeRequest(nil)
	if c.endSession(old) {
		req.Replaces, req.ReplacesSecret = old.id, old.secret
	}
	reply, sentAt, err := c.sendHandshake(ctx, cn, req)
	if err != nil {
		return nil, err
	}
	c.beginSession(cn, reply, sentAt) //nolint:contextcheck // the session outlives the call
	return reply, nil
}

func (c *Client) beginSession(cn *conn, reply *protocol.HandshakeReply, sentAt int64) {
	s := &session{
		id: reply.Session, secret: reply.Secret, ttl: millis(reply.TTLMS), gone: make(chan struct{}),
	}
	s.answered(sentAt)
	c.opening = 0
	c.sess.Store(s)
	cn.sess.Store(s)
	c.spawn(func() { c.putKept(s) })
	if c.cfg.Home && len(reply.Regions) > 0 {
		c.pool.adopts(1)
		// In the background: a node grants itself access, by the connection that is being made.
		if !c.spawn(func() { c.adopt(s, reply.Regions, reply.QuarantineMS) }) {
			c.pool.adopts(-1)
		}
		return
	}
	if reply.Resumed || len(reply.Regions) > 0 {
		// The same process had a session under this name whose secret was lost with a reply: its regions are not known
		// here, and stay unused until they are returned.
		for i := range reply.Regions {
			c.returnRegion(s, reply.Regions[i].Region)
		}
	}
}

// endSession gives up everything that belonged to a session. It reports whether nothing of it can write any more.
func (c *Client) endSession(s *session) bool {
	if !s.ended() { // only the connector, and Close after it, end sessions
		close(s.gone)
	}
	c.counters.sessionsLost.Add(1)
	lost, safe := c.pool.retireAll(ErrSessionExpired)
	for _, r := range lost {
		c.spawn(func() { c.lose(r) })
	}
	return safe
}

// lose gives up a region that was taken away, and says so. The connector leaves it to another goroutine: it may wait for
// open Allocs, and calls the user's function.
func (c *Client) lose(r *region) {
	if c.surrender(r) {
		c.announce(r)
	}
}

// announce tells the user of a region that was given up because it was taken away. The news may come in several ways,
// such as a REVOKE and the refusal of a store, and is told once.
func (c *Client) announce(r *region) {
	c.pool.mu.Lock()
	why := r.lost
	untold := !r.told && why != nil && !errors.Is(why, ErrClosed)
	r.told = r.told || untold
	c.pool.mu.Unlock()
	if untold {
		c.counters.revoked.Add(1)
	}
	if untold && c.cfg.OnRevoke != nil {
		c.cfg.OnRevoke(Revoked{Region: r.id, Bytes: r.length, Reason: why})
	}
}
