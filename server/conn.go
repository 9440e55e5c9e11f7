package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"larder/protocol"
	"larder/sock"
)

// Limits of one connection's output.
const (
	// burstOutput is when the replies of a burst are sent before it is over.
	burstOutput = 256 << 10
	// softOutput waiting bytes stop the reading of further requests: a client that does not read gets no more work done.
	softOutput = 1 << 20
	// hardOutput waiting bytes cut the client off. Replies that were under way when reading stopped, and pushes, fit.
	hardOutput = 32 << 20
	// keptOutput is the largest buffer that an idle pool of buffers keeps.
	keptOutput = 64 << 10
	// readTimeoutIndex is how long a member that does not lead waits to learn from the leader how far it must have read.
	readTimeoutIndex = 5 * time.Second
)

var outputs = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}

func getOutput() []byte {
	b, _ := outputs.Get().(*[]byte)
	return (*b)[:0]
}

func putOutput(b []byte) {
	if cap(b) > 0 && cap(b) <= keptOutput {
		outputs.Put(&b)
	}
}

// conn is one client's connection: a goroutine that reads and serves, and one that writes while the client is slower
// than the server. It implements Peer.
type conn struct {
	s      *network
	c      *sock.Conn
	client *Client
	ctx    context.Context
	cancel context.CancelFunc
	// distant says that its frames cross a network: see protocol.Distant. It does not change once the connection serves.
	distant bool
	// packs says that large frames are compressed: it is distant, and has named FeatureCompression.
	packs atomic.Bool

	mu      sync.Mutex
	out     []byte // waits to be sent; nil = nothing
	large   bool   // out has a frame that the writer compresses, since it is the only one without the Master's locks
	whole   int    // with large: where in out whole frames begin
	writing bool   // a goroutine is sending
	closed  bool
	drained chan struct{} // closed when out is below softOutput again; nil = it is
}

func newConn(s *network, c *sock.Conn) *conn {
	x := &conn{s: s, c: c}
	x.ctx, x.cancel = context.WithCancel(s.ctx)
	x.client = s.master.NewClient(x)
	return x
}

// Lock implements Peer.
func (c *conn) Lock() []byte {
	c.mu.Lock()
	if c.out == nil {
		return getOutput()
	}
	return c.out
}

// Unlock implements Peer.
func (c *conn) Unlock(buf []byte) {
	if len(buf)-len(c.out) > protocol.CompressAbove && !c.large && c.packs.Load() {
		c.large, c.whole = true, len(c.out)
	}
	if c.out = buf; c.closed {
		c.out = nil
	}
	over := len(c.out) > hardOutput
	c.mu.Unlock()
	if over {
		c.Close("it does not read its replies")
	}
}

// Flush implements Peer.
func (c *conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.writing || len(c.out) == 0 {
		return
	}
	if c.large {
		c.startWriter()
		return
	}
	n := c.try(c.out)
	c.n().BytesOut.Add(uint64(n)) //nolint:gosec // not negative
	if n == len(c.out) {
		putOutput(c.out)
		c.out = nil
		if c.drained != nil { // the reader saw what was appended before it was sent
			close(c.drained)
			c.drained = nil
		}
		return
	}
	c.out = c.out[:copy(c.out, c.out[n:])]
	c.startWriter()
}

// write sends b after what waits.
func (c *conn) write(b []byte) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	if len(c.out) == 0 && !c.writing {
		n := c.try(b)
		c.n().BytesOut.Add(uint64(n)) //nolint:gosec // not negative
		b = b[n:]
	}
	over := false
	if len(b) > 0 {
		if c.out == nil {
			c.out = getOutput()
		}
		c.out = append(c.out, b...)
		over = len(c.out) > hardOutput
		if !c.writing {
			c.startWriter()
		}
	}
	c.mu.Unlock()
	if over {
		c.Close("it does not read its replies")
	}
}

func (c *conn) n() *Counters { return c.s.counters }

// try writes as much as the socket takes without waiting, and returns how much that was. Errors are left to the
// writer, which meets them again. The caller holds mu.
func (c *conn) try(b []byte) int {
	n, err := c.c.WriteNow(b)
	if err != nil {
		return 0
	}
	return n
}

// startWriter starts the goroutine that sends what waits. The caller holds mu.
func (c *conn) startWriter() {
	c.writing = true
	if c.drained == nil && len(c.out) > softOutput {
		c.drained = make(chan struct{})
	}
	c.s.wg.Add(1)
	go c.writeLoop()
}

// writeLoop sends what waits until nothing does. A client that takes nothing for the write timeout is cut off.
func (c *conn) writeLoop() {
	defer c.s.wg.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.out) > 0 && !c.closed {
		b, large, whole := c.out, c.large, c.whole
		c.out, c.large = nil, false
		c.mu.Unlock()
		if large {
			b = protocol.CompressFrames(b, whole)
		}
		err := c.writeAll(b)
		putOutput(b)
		if err != nil {
			c.Close("writing to it failed: " + err.Error())
		}
		c.mu.Lock()
		if c.drained != nil && len(c.out) <= softOutput {
			close(c.drained)
			c.drained = nil
		} else if c.drained == nil && len(c.out) > softOutput {
			c.drained = make(chan struct{})
		}
	}
	c.writing = false
}

// writeAll writes b in pieces, each of which must be taken within the write timeout.
func (c *conn) writeAll(b []byte) error {
	for len(b) > 0 {
		piece := b[:min(len(b), burstOutput)]
		if err := c.c.SetWriteDeadline(socketDeadline(c.s.cfg.WriteTimeout)); err != nil {
			return err
		}
		n, err := c.c.Write(piece)
		c.n().BytesOut.Add(uint64(n)) //nolint:gosec // not negative
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return c.c.SetWriteDeadline(time.Time{})
}

// Close implements Peer: it cuts the client off, and why is logged.
func (c *conn) Close(why string) {
	if c.shut() {
		c.n().ConnectionsDropped.Add(1)
		c.s.logger.Warn("cutting a client off", slog.String("client", c.c.RemoteAddr().String()), slog.String("why", why))
	}
}

// shut closes the socket, and reports whether this call did it.
func (c *conn) shut() bool {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return false
	}
	c.closed = true
	if c.drained != nil {
		close(c.drained)
		c.drained = nil
	}
	c.mu.Unlock()
	c.cancel()
	_ = c.c.Close() // nothing is to be saved: replies that were not taken are gone
	return true
}

// backlog returns a channel that is closed when little enough waits to be sent, nil if that is so now.
func (c *conn) backlog() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out) <= softOutput || c.closed {
		return nil
	}
	if c.drained == nil {
		c.drained = make(chan struct{})
	}
	return c.drained
}

// serve reads and serves requests until the connection ends.
func (c *conn) serve() {
	defer c.s.remove(c)
	r := protocol.NewReader(countedReader{c.c, c.s.counters})
	first := true
	for {
		if err := c.setReadDeadline(first); err != nil {
			return
		}
		h, payload, err := r.Next()
		if err != nil {
			c.readFailed(err)
			return
		}
		if first && c.s.cfg.IdleTimeout == 0 {
			_ = c.c.SetReadDeadline(time.Time{}) // fails only on a closed socket, which the next read notices
		}
		first = false
		if !c.burst(r, h, payload) {
			return
		}
		if wait := c.backlog(); wait != nil {
			select {
			case <-wait:
			case <-c.ctx.Done():
				return
			}
		}
	}
}

// setReadDeadline limits how long the next frame may take to come.
func (c *conn) setReadDeadline(first bool) error {
	switch {
	case first:
		return c.c.SetReadDeadline(socketDeadline(c.s.cfg.HandshakeTimeout))
	case c.s.cfg.IdleTimeout > 0:
		return c.c.SetReadDeadline(socketDeadline(c.s.cfg.IdleTimeout))
	default:
		return nil
	}
}

// readFailed ends a connection whose stream cannot be read any further.
func (c *conn) readFailed(err error) {
	if f, ok := errors.AsType[*protocol.FrameError](err); ok {
		out := getOutput()
		out, mark := protocol.BeginFrame(out, protocol.ReplyBit, 0)
		e := protocol.Error{Code: protocol.CodeBadRequest, Message: f.Error()}
		c.write(protocol.EndFrame(protocol.AppendErrorReply(out, &e), mark))
		putOutput(out)
		c.Close(f.Error())
		return
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, unix.ECONNRESET):
		c.shut()
	default:
		c.Close(err.Error())
	}
}

// round is what the requests of a burst have in common.
type round struct {
	out  []byte // replies that are ready
	now  int64
	term uint64 // in which they were made; 0 = as one that does not lead
}

// restart begins anew, after what is ready has been sent.
func (c *conn) restart(b *round) {
	b.out = c.settle(b.out, b.term)
	b.now, b.term = c.s.master.now(), c.s.master.Term()
}

// burst serves a frame, and all that have arrived behind it, and sends the replies that there are. It returns false
// when the connection is to end.
func (c *conn) burst(r *protocol.Reader, h protocol.Header, payload []byte) bool {
	m := c.s.master
	b := round{out: getOutput(), now: m.now(), term: m.Term()}
	defer func() { putOutput(b.out) }()
	for {
		if !c.request(&b, h, payload) {
			return false
		}
		if len(b.out) >= burstOutput {
			b.out = c.settle(b.out, b.term)
		}
		if !r.Buffered() {
			break
		}
		var err error
		if h, payload, err = r.Next(); err != nil {
			c.settle(b.out, b.term)
			c.readFailed(err)
			return false
		}
	}
	b.out = c.settle(b.out, b.term)
	return true
}

// request serves one frame. It returns false when the connection is to end.
func (c *conn) request(b *round, h protocol.Header, payload []byte) bool {
	m := c.s.master
	for {
		if !c.mayServe(h, b) {
			return false
		}
		if b.term == 0 && AccessOf(h.Type) == AccessRead && !c.readIndex() {
			b.out = appendError(b.out, h, &errNoLeader)
			return true
		}
		if c.mayForward(h, b.term) {
			if m.Term() == 0 {
				b.out = c.forward(h, payload, b.out)
				return true
			}
			c.restart(b) // elected since the burst began
		}
		c.client.Follow(b.term == 0)
		if h.Type == protocol.TypeHandshake {
			c.hear(payload)
		}
		var outcome Outcome
		if b.out, outcome = m.Serve(c.client, h, payload, b.out, b.now); outcome != Blocked {
			return true
		}
		b.out = c.settle(b.out, b.term)
		if !c.await(m.Settled()) {
			return false
		}
		c.restart(b)
	}
}

// hear notes what a HANDSHAKE says of the frames that the client reads. Whether a session comes of it does not matter.
func (c *conn) hear(payload []byte) {
	var req protocol.HandshakeRequest
	if c.distant && req.Decode(payload) == nil {
		c.packs.Store(req.Features&protocol.FeatureCompression != 0)
	}
}

var errNoLeader = protocol.Error{
	Code: protocol.CodeUnavailable, Message: "no leader could be asked: retry", RetryAfterMS: 100,
}

// mayServe waits until the client has room for another request. What is ready is sent before.
func (c *conn) mayServe(h protocol.Header, b *round) bool {
	limit := maxClientBytes
	if c.mayForward(h, b.term) {
		limit = forwardWindow
	} else if AccessOf(h.Type) != AccessLeader || h.Type == protocol.TypeLookup || h.Type == protocol.TypeBatchLookup {
		return true
	}
	for c.client.fullAt(limit) {
		b.out = c.settle(b.out, b.term)
		if !c.await(c.client.Room()) {
			return false
		}
	}
	return true
}

// await waits for ch. It returns false when the connection ends.
func (c *conn) await(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	case <-c.ctx.Done():
		return false
	}
}

// readIndex makes sure that this member has applied all that was acknowledged up to now.
func (c *conn) readIndex() bool {
	ctx, cancel := context.WithTimeout(c.ctx, readTimeoutIndex)
	defer cancel()
	_, err := c.s.node.ReadIndex(ctx)
	return err == nil
}

// settle sends the replies in out, which were made while this member led in term, once it is sure that nobody else
// did. If that cannot be shown they are thrown away, and each request is told to retry. It returns out, empty.
func (c *conn) settle(out []byte, term uint64) []byte {
	if len(out) == 0 {
		return out
	}
	if c.packs.Load() {
		out = protocol.CompressFrames(out, 0) // first, so that nothing lies between the confirmation and the sending
	}
	if term != 0 {
		m := c.s.master
		deadline, err := c.s.node.Confirm(c.ctx)
		m.n.Confirms.Add(1)
		if err != nil || m.Term() != term || m.now() >= deadline {
			m.n.ConfirmFailures.Add(1)
			fault := m.notLeader()
			if m.Term() != 0 {
				fault = protocol.Error{Code: protocol.CodeUnavailable, Message: "leadership was in doubt: retry", RetryAfterMS: 20}
			}
			out = disown(out, &fault)
		}
	}
	c.write(out)
	return out[:0]
}

// disown replaces every reply in a buffer of whole frames by an error.
func disown(frames []byte, f *protocol.Error) []byte {
	var out []byte
	for len(frames) >= protocol.HeaderSize {
		h, err := protocol.ParseHeader(frames)
		if err != nil {
			break // cannot be: they are our own
		}
		var mark int
		out, mark = protocol.BeginFrame(out, h.Type, h.Sequence)
		out = protocol.EndFrame(protocol.AppendErrorReply(out, f), mark)
		frames = frames[protocol.HeaderSize+int(h.Length):]
	}
	return out
}

// countedReader counts what is read.
type countedReader struct {
	r io.Reader
	n *Counters
}

// Read implements io.Reader.
func (r countedReader) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	r.n.BytesIn.Add(uint64(n)) //nolint:gosec // not negative
	return n, err
}
