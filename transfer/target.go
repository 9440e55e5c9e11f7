package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// target is the passive side of an engine: it carries out what peers ask for, and never begins anything.
type target struct {
	e         *Engine
	listeners []net.Listener
	addresses []string
	wg        sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[*served]struct{}
}

// listen opens the listeners.
func (e *Engine) listen() (*target, error) {
	t := &target{e: e, conns: map[*served]struct{}{}}
	for i, addr := range e.cfg.Listen {
		l, err := (&net.ListenConfig{}).Listen(e.ctx, "tcp", addr)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("transfer: listen at %s: %w", addr, err), t.stop())
		}
		t.listeners = append(t.listeners, l)
		if len(e.cfg.Advertise) > 0 {
			t.addresses = append(t.addresses, e.cfg.Advertise[i])
		} else {
			t.addresses = append(t.addresses, l.Addr().String())
		}
	}
	return t, nil
}

// begin takes connections from now on.
func (t *target) begin() {
	for _, l := range t.listeners {
		t.wg.Add(1)
		go t.accept(l)
	}
}

func (t *target) stop() (err error) {
	for _, l := range t.listeners {
		err = errors.Join(err, l.Close())
	}
	return err
}

// close ends all connections, and then the listeners: whoever is refused knows that nobody reads any more. It reports
// whether all have ended before stop.
func (t *target) close(stop <-chan struct{}) bool {
	t.mu.Lock()
	t.closed = true
	for c := range t.conns {
		c.interrupt()
	}
	gone := make([]*served, 0, len(t.conns))
	for c := range t.conns {
		gone = append(gone, c)
	}
	t.mu.Unlock()
	for _, c := range gone {
		select {
		case <-c.gone:
		case <-stop: // its storage hangs; the listeners stay, for whoever is refused would take it for gone
			return false
		}
	}
	_ = t.stop() // nothing is lost with them
	t.wg.Wait()
	return true
}

func (t *target) accept(l net.Listener) {
	defer t.wg.Done()
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of files, say: it passes
			t.e.cfg.Logger.Warn("transfer: accept", slog.Any("error", err))
			<-after(tickEvery)
			continue
		}
		c, err := t.admit(conn.(*net.TCPConn)) //nolint:forcetypeassert // that is what the network tcp gives
		if err != nil {
			_ = conn.Close() // nothing has been said yet
			continue
		}
		go c.serve()
	}
}

var errFull = errors.New("transfer: too many connections")

func (t *target) admit(conn *net.TCPConn) (*served, error) {
	c := &served{t: t, gone: make(chan struct{}), used: t.e.now(), heads: &[burst * headerSize]byte{}}
	c.ctx, c.stop = context.WithCancel(context.Background())
	s, err := newStream(conn)
	if err != nil {
		return nil, err
	}
	c.s = s
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.conns) >= t.e.cfg.MaxPeers {
		return nil, errFull
	}
	t.conns[c] = struct{}{}
	t.wg.Add(1)
	return c, nil
}

// tick ends connections that hold something for too long, or nothing for very long.
func (t *target) tick(now int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		if moved := c.s.moved.Load() + c.storing.moved.Load(); moved != c.seen {
			c.seen, c.used = moved, now
		}
		limit := 10 * t.e.cfg.IdleTimeout
		if c.busy.Load() || c.storing.count.Load() > 0 {
			limit = 2 * t.e.cfg.StallTimeout // the peer gives up earlier, and says so
		}
		if h := c.hello.Load(); h != nil && h.Kind == kindRDMA {
			limit = quietTime
		}
		if now-c.used > int64(limit) {
			c.interrupt()
		}
	}
}

// find looks for a peer's connection.
func (t *target) find(who string, id uint64) *served {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		if h := c.hello.Load(); h != nil && h.Engine == who && h.Conn == id && h.Kind == kindData {
			return c
		}
	}
	return nil
}

// served is one connection from a peer. One goroutine reads it and answers.
type served struct {
	t     *target
	s     *stream
	hello atomic.Pointer[hello]
	gone  chan struct{}   // closed when nobody reads it any more
	busy  atomic.Bool     // in the middle of a request
	ctx   context.Context //nolint:containedctx // ends what the connection's reader waits for besides bytes
	stop  context.CancelFunc
	seen  int64 // what has moved and when that last changed; guarded by the target's mu
	used  int64

	done    uint64 // the last request that was carried out
	unacked int
	torn    bool // what was written last is not whole
	out     [headerSize]byte
	body    [1][]byte

	// Answers to reads wait for more that have been asked for already, and are written at once.
	reading []*Buffer // held
	heads   *[burst * headerSize]byte
	frames  [][]byte
	bytes   uint64 // of buffers

	storing storing
}

// interrupt implements interrupter.
func (c *served) interrupt() {
	c.stop()
	c.s.expire()
}

func (c *served) serve() {
	defer c.t.wg.Done()
	err := c.run()
	c.endStorage()
	c.stop()
	grace := time.Duration(0)
	if !c.torn && c.hello.Load() != nil && c.hello.Load().Kind == kindData && !errors.Is(err, io.EOF) {
		_ = c.s.conn.SetWriteDeadline(soon(100 * time.Millisecond)) // whoever does not get it asks
		if c.s.send(&header{kind: frameBye, seq: c.done}, nil) == nil {
			grace = zeroCopyGrace
		}
	}
	c.s.zero.Load().finish(grace, forever) // answers hold buffers until then
	c.t.mu.Lock()
	delete(c.t.conns, c)
	c.t.mu.Unlock()
	c.s.close()
	close(c.gone)
	c.t.e.cfg.Logger.Debug("transfer: a connection ends", slog.String("peer", c.s.conn.RemoteAddr().String()), slog.Any("error", err))
}

func (c *served) run() error {
	// The peer may have what it sends next aborted: the connection must be found by then.
	h, err := c.t.e.answerHello(c.s, c.hello.Store)
	if err != nil {
		return err
	}
	if h.Kind == kindData {
		c.t.e.spareCopies(c.s)
	}
	switch {
	case c.ctx.Err() != nil: // it was interrupted, and its deadline may have been taken back
		return ErrClosed
	case h.Kind == kindControl:
		return c.control()
	case h.Kind == kindRDMA:
		return c.serveRDMA()
	}
	c.s.idle = c.acknowledge
	return c.data()
}

// ackEvery bounds the writes that one ack covers: a peer's window is larger.
const ackEvery = 16

// data carries out reads and writes, in their order.
func (c *served) data() error {
	defer c.letGo()
	for {
		var h header
		if err := c.s.readHeader(&h); err != nil {
			return err
		}
		c.busy.Store(true)
		if err := c.request(&h); err != nil {
			return err
		}
		c.busy.Store(false)
	}
}

func (c *served) request(h *header) error {
	storage := Handle{ID: h.buffer}.OnStorage()
	if !storage {
		c.storageFirst()
	}
	switch {
	case h.kind == frameRead && storage:
		return c.store(h, Read)
	case h.kind == frameRead:
		return c.read(h)
	case h.kind == frameWrite && storage:
		return c.store(h, Write)
	case h.kind == frameWrite:
		return c.write(h)
	}
	return fmt.Errorf("transfer: a frame of type %d on a data connection", h.kind)
}

// read answers with the bytes of a buffer, unless another read has come already: then both are answered at once.
func (c *served) read(h *header) error {
	b, mem, err := c.t.e.hold(Read, Handle{h.buffer, h.gen}, h.off, uint64(h.length), c)
	if err != nil {
		return c.fail(h, err)
	}
	answer := header{kind: frameData, seq: h.seq, body: h.length}
	switch {
	case h.sum != 0:
		answer.sum, err = sumOf(mem)
	case b.suspect.Load():
		err = touch(mem)
	}
	b.looked()
	if err != nil {
		b.release(c)
		return c.fail(h, err)
	}
	head := c.heads[len(c.reading)*headerSize:][:headerSize]
	answer.encode(head)
	c.t.e.counters.served[Read].add(uint64(h.length))
	c.frames = append(c.frames, head, mem)
	c.reading = append(c.reading, b)
	c.bytes += uint64(len(mem))
	if c.s.more() == frameRead && len(c.reading) < burst {
		return nil
	}
	return c.flush(h.seq)
}

// flush answers the reads up to a number.
func (c *served) flush(seq uint64) error {
	defer c.letGo()
	if err := c.acknowledge(); err != nil {
		return err
	}
	c.torn = true
	if err := c.writeAnswers(); err != nil {
		if errors.Is(err, syscall.EFAULT) { // the peer asks again, and then it is told
			for _, b := range c.reading {
				b.suspect.Store(true)
			}
		}
		return err
	}
	c.torn, c.done = false, seq
	return nil
}

// writeAnswers writes them. Those that the kernel sends from the buffers themselves hold these until it has let go of them.
func (c *served) writeAnswers() error {
	if z := c.s.zero.Load(); z.pays(len(c.reading), c.bytes) {
		if a := z.answering(c.reading, c); a != nil {
			defer z.answered(a)
			a.heads, c.heads = c.heads, a.heads
			return z.write(c.s.raw, c.frames, a)
		}
	}
	return c.s.write(c.frames)
}

// letGo releases what reads have held.
func (c *served) letGo() {
	for i, b := range c.reading {
		b.release(c)
		c.reading[i] = nil
	}
	clear(c.frames)
	c.reading, c.frames, c.bytes = c.reading[:0], c.frames[:0], 0
}

// write takes bytes into a buffer.
func (c *served) write(h *header) error {
	b, mem, err := c.t.e.hold(Write, Handle{h.buffer, h.gen}, h.off, uint64(h.body), c)
	if err != nil {
		if err := c.s.discard(h.body); err != nil {
			return err
		}
		return c.fail(h, err)
	}
	c.body[0] = mem
	good := false
	if err = c.s.readBody(c.body[:]); err == nil {
		good, err = fits(h.sum, c.body[:])
	}
	b.release(c)
	switch {
	case errors.Is(err, ErrMemory):
		return c.fail(h, err)
	case err != nil:
		return err
	case !good:
		return c.fail(h, ErrChecksum)
	}
	c.done = h.seq
	c.t.e.counters.served[Write].add(uint64(h.body))
	if c.unacked++; c.unacked >= ackEvery {
		return c.acknowledge()
	}
	return nil
}

// acknowledge tells the peer which writes have been carried out.
func (c *served) acknowledge() error {
	if c.unacked == 0 {
		return nil
	}
	c.unacked = 0
	h := header{kind: frameAck, seq: c.done}
	h.encode(c.out[:])
	return c.answer(c.out[:])
}

// fail answers a request that was not carried out, after those that came before it.
func (c *served) fail(h *header, err error) error {
	if len(c.reading) > 0 {
		if err := c.flush(h.seq - 1); err != nil {
			return err
		}
	}
	if err := c.acknowledge(); err != nil {
		return err
	}
	return c.refuse(h.seq, err)
}

// refuse says why a request was not carried out.
func (c *served) refuse(seq uint64, err error) error {
	text := reason(err)
	answer := header{kind: frameFail, seq: seq, status: statusOf(err), body: uint32(len(text))} //nolint:gosec // at most maxReason
	answer.encode(c.out[:])
	c.done = seq
	return c.answer(append(c.out[:], text...))
}

func (c *served) answer(b []byte) error {
	c.torn = true
	if _, err := c.s.conn.Write(b); err != nil {
		return err
	}
	c.torn = false
	return nil
}

// control answers questions, one after the other.
func (c *served) control() error {
	for {
		h, question, err := c.s.receive()
		if err != nil {
			return err
		}
		var body []byte
		answer := header{seq: h.seq}
		switch h.kind {
		case frameDescribe:
			answer.kind = frameDescribed
			if body, err = json.Marshal(c.t.e.Describe()); err != nil {
				return err
			}
		case frameAbort:
			if other := c.t.find(c.hello.Load().Engine, h.seq); other != nil {
				other.interrupt()
				select {
				case <-other.gone:
				case <-c.ctx.Done():
					return errStalled
				case <-after(c.t.e.cfg.AbortTimeout): // its storage hangs: whoever asks does so again
					return errStalled
				}
			}
			answer.kind = frameAborted
		case framePing:
			answer.kind = framePong
		case frameNotify:
			if err := c.notified(h, question); err != nil {
				return err
			}
			continue
		case frameStats:
			answer.kind = frameStatistics
			if body, err = json.Marshal(c.t.e.EndpointStats()); err != nil {
				return err
			}
		default:
			return fmt.Errorf("transfer: a frame of type %d on a control connection", h.kind)
		}
		if err := c.s.send(&answer, body); err != nil {
			return err
		}
	}
}
