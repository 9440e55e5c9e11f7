package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
)

// newTCPLane is the way over TCP: a rail from each address here to each there. Storage has connections of its own, so that
// memory does not wait for a disk.
func newTCPLane(s *Segment, from, to []string, storage bool) *lane {
	l := newLane(s, TransportTCP, s.e.cfg.Connections, carryTCP)
	l.storage = storage
	for _, f := range from {
		for _, t := range to {
			l.add(f, t)
		}
	}
	return l
}

// Bounds of what is under way on one connection. The window covers 25 GB/s times 160 us.
const (
	windowBytes  = 4 << 20
	windowSlices = 256
	burst        = 16 // slices that are written with one system call
)

// connection is the active end of one TCP connection: a writer that takes slices from the lane, and a reader that takes
// the answers, which come in the same order.
type connection struct {
	rail *rail
	id   uint64
	s    *stream
	stop func() bool

	// heads are the writer's, in the order of ring: each stays as it is until it has been answered, as what is not copied must.
	heads [windowSlices * headerSize]byte

	scratch [][]byte // the writer's
	mu      sync.Mutex
	room    sync.Cond
	ring    [windowSlices]*slice
	head    uint64 // the last slice that was answered; slices are numbered from 1
	tail    uint64 // the last that was handed to the writer
	bytes   uint64 // under way
	sent    uint64 // bytes of frames, once those up to tail are
	landing uint64 // the slice whose bytes are being read into their place
	err     error  // why it ends
	bye     uint64 // the peer's last word
	byeSeen bool

	dead atomic.Bool
	idle atomic.Bool // it is to end, for there is no work
	seen int64       // bytes that had been read when used was set; the keeper's
	used int64       // when something last moved
}

var (
	errIdle    = errors.New("transfer: idle")
	errStalled = errors.New("transfer: the peer does not answer")
	errBye     = errors.New("transfer: the peer closes the connection")
)

// carryTCP opens a connection of a rail and carries slices until it ends.
func carryTCP(r *rail) {
	e := r.lane.seg.e
	ctx, cancel := context.WithTimeout(e.ctx, greetTimeout)
	id := e.lastCon.Add(1)
	s, engine, err := e.dial(ctx, r.from, r.to, kindData, id)
	cancel()
	if err == nil && engine != r.lane.seg.Descriptor().Engine {
		err = errors.Join(fmt.Errorf("%w: another process answers: open its segment anew", ErrRefused), s.conn.Close())
	}
	if err != nil {
		r.missed(err)
		return
	}
	e.spareCopies(s)
	c := &connection{rail: r, id: id, s: s, used: e.now()}
	c.room.L = &c.mu
	c.stop = func() bool { return c.dead.Load() || c.idle.Load() }
	if !r.register(c) {
		s.close() // nothing has been sent
		return
	}
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		c.kill(c.write())
	}()
	c.kill(c.read())
	<-wrote
	r.unregister(c)
	c.finish()
}

func (r *rail) register(c *connection) bool {
	r.lane.mu.Lock()
	defer r.lane.mu.Unlock()
	if r.lane.closed {
		return false
	}
	r.conns[c] = struct{}{}
	r.misses = 0
	return true
}

func (r *rail) unregister(c *connection) {
	r.lane.mu.Lock()
	defer r.lane.mu.Unlock()
	delete(r.conns, c)
	r.lane.cond.Broadcast() // others may have left slices to this one
}

// kill ends the connection. The first reason counts.
func (c *connection) kill(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.dead.Store(true)
	c.room.Broadcast()
	c.mu.Unlock()
	c.s.expire()
	l := c.rail.lane
	l.mu.Lock()
	l.cond.Broadcast()
	l.mu.Unlock()
}

// write hands slices to the peer until the connection ends.
func (c *connection) write() error {
	var out [burst]*slice
	var sums [burst]uint64
	var frames [][]byte
	for {
		most, room, err := c.waitForRoom()
		if err != nil {
			return err
		}
		n := c.rail.lane.take(c.rail, out[:min(most, burst)], room, c.stop)
		if n == 0 {
			return errIdle
		}
		if n = c.prepare(out[:n], &sums); n == 0 {
			continue
		}
		first, ok := c.enter(out[:n])
		if !ok { // nothing has been sent
			for _, s := range out[:n] {
				c.rail.lane.push(s, s)
			}
			return errIdle
		}
		frames = frames[:0]
		bytes := uint64(0)
		for i, s := range out[:n] {
			seq := first + uint64(i)
			head := c.heads[seq%windowSlices*headerSize:][:headerSize]
			frames = append(frames, head)
			c.encode(s, seq, sums[i], head)
			if s.request.Op == Write {
				frames = s.pieces(frames)
				bytes += s.length
			}
		}
		if z := c.s.zero.Load(); z.pays(n, bytes) {
			err = z.write(c.s.raw, frames, nil)
		} else {
			err = c.s.write(frames)
		}
		if err != nil {
			return err
		}
	}
}

// waitForRoom waits until the window has room, and says for how many slices and bytes.
func (c *connection) waitForRoom() (n int, room uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && (c.tail-c.head >= windowSlices || c.bytes >= windowBytes) {
		c.room.Wait()
	}
	return int(windowSlices - (c.tail - c.head)), windowBytes - min(c.bytes, windowBytes), c.err
}

// enter numbers slices. From here on they may land.
func (c *connection) enter(list []*slice) (first uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, false
	}
	first = c.tail + 1
	for _, s := range list {
		c.tail++
		c.ring[c.tail%windowSlices] = s
		c.bytes += s.length
		if c.sent += headerSize; s.request.Op == Write {
			c.sent += s.length
		}
		s.sent = c.sent
		s.under = int64(c.bytes) //nolint:gosec // the window
	}
	return first, true
}

// prepare computes checksums, and ends slices whose local memory is gone. It says how many are left.
func (c *connection) prepare(list []*slice, sums *[burst]uint64) (n int) {
	checksums := c.rail.lane.seg.e.cfg.Checksums
	for _, s := range list {
		sum, err := uint64(0), error(nil)
		switch {
		case checksums && s.request.Op == Write:
			c.scratch = s.pieces(c.scratch[:0])
			sum, err = sumPieces(c.scratch)
		case checksums:
			sum = 1
		case errors.Is(s.last, syscall.EFAULT):
			c.scratch = s.pieces(c.scratch[:0])
			for _, p := range c.scratch {
				err = errors.Join(err, touch(p))
			}
		}
		clear(c.scratch)
		if err != nil {
			s.end(err)
			continue
		}
		list[n], sums[n] = s, sum
		n++
	}
	return n
}

// encode writes the header of a slice's frame.
func (c *connection) encode(s *slice, seq, sum uint64, head []byte) {
	r := s.request
	h := header{
		kind: frameRead, seq: seq, gen: r.Buffer.Generation, buffer: r.Buffer.ID, off: s.offset(), length: uint32(s.length), //nolint:gosec // at most maxSlice
		sum: sum,
	}
	if r.Op == Write {
		h.kind, h.body = frameWrite, h.length
	}
	h.encode(head)
}

// read takes answers until the connection ends.
func (c *connection) read() error {
	var pieces [][]byte
	for {
		var h header
		err := c.s.readHeader(&h)
		if err != nil {
			return err
		}
		switch h.kind {
		case frameAck:
			err = c.answered(h.seq)
		case frameData:
			pieces, err = c.data(&h, pieces[:0])
		case frameFail:
			err = c.failed(&h)
		case frameBye:
			c.mu.Lock()
			c.bye, c.byeSeen = h.seq, true
			c.mu.Unlock()
			return errBye
		default:
			err = fmt.Errorf("transfer: a frame of type %d for an answer", h.kind)
		}
		if err != nil {
			return err
		}
	}
}

var (
	errOrder = errors.New("transfer: the peer answers what was not asked, or in another order")
	errEarly = errors.New("transfer: the peer answers what it has not received")
)

// next is the oldest slice under way, which must have a number.
func (c *connection) next(seq uint64) (*slice, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if seq != c.head+1 || seq > c.tail {
		return nil, errOrder
	}
	s := c.ring[seq%windowSlices]
	if s.request.Op == Write && !c.s.zero.Load().received(s.sent) {
		return nil, errEarly
	}
	c.landing = seq
	return s, nil
}

// pop takes the oldest slice out of the window.
func (c *connection) pop() *slice {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.head++
	s := c.ring[c.head%windowSlices]
	c.ring[c.head%windowSlices] = nil
	c.bytes -= s.length
	c.room.Signal()
	return s
}

// answered ends the writes up to a number.
func (c *connection) answered(seq uint64) error {
	c.mu.Lock()
	head, tail := c.head, c.tail
	c.mu.Unlock()
	if seq <= head || seq > tail {
		return errOrder
	}
	for ; head < seq; head++ {
		s, err := c.next(head + 1)
		if err != nil {
			return err
		}
		if s.request.Op != Write {
			return errOrder
		}
		c.rail.carried(c.pop())
	}
	return nil
}

// data takes the bytes of a read into their place.
func (c *connection) data(h *header, pieces [][]byte) ([][]byte, error) {
	s, err := c.next(h.seq)
	if err != nil {
		return pieces, err
	}
	if s.request.Op != Read || uint64(h.body) != s.length {
		return pieces, errOrder
	}
	if s.orphan {
		err := c.s.discard(h.body)
		c.pop()
		return pieces, err
	}
	pieces = s.pieces(pieces)
	good := false
	if err = c.s.readBody(pieces); err == nil {
		good, err = fits(h.sum, pieces)
	}
	clear(pieces)
	if err != nil && !errors.Is(err, ErrMemory) {
		return pieces, err
	}
	switch c.pop(); {
	case err != nil:
		s.end(err)
	case !good:
		c.rail.lane.retry(s, c.rail, c.rail.failed(ErrChecksum))
	default:
		c.rail.carried(s)
	}
	return pieces, nil
}

// failed ends a request that the peer has not carried out.
func (c *connection) failed(h *header) error {
	if _, err := c.next(h.seq); err != nil {
		return err
	}
	err := failure(h.status)
	if h.body > 0 {
		text := make([]byte, h.body)
		if err := c.s.readBody([][]byte{text}); err != nil {
			return err
		}
		err = &peerError{err, string(text)}
	}
	s := c.pop()
	if s.orphan {
		return nil
	}
	if errors.Is(err, ErrChecksum) {
		c.rail.lane.retry(s, c.rail, c.rail.failed(err))
	} else {
		s.end(err)
	}
	return nil
}

// tick ends the connection if it has work and nothing moves, if a request on it is out of time, or if it has long had no
// work.
func (c *connection) tick(now int64) {
	e := c.rail.lane.seg.e
	c.mu.Lock()
	var oldest *slice
	if c.head < c.tail {
		oldest = c.ring[(c.head+1)%windowSlices]
	}
	moved := c.s.moved.Load()
	if moved != c.seen || oldest != nil && oldest.began > c.used {
		c.seen, c.used = moved, max(now, c.used)
	}
	late := c.late(now)
	quiet := now - c.used
	c.mu.Unlock()
	switch {
	case late:
		c.kill(ErrTimeout)
	case oldest != nil && quiet > int64(e.cfg.StallTimeout):
		c.kill(errStalled)
	case oldest == nil && quiet > int64(e.cfg.IdleTimeout):
		c.idle.Store(true)
		c.kill(errIdle)
	}
}

// late reports whether a request under way is out of time, be it behind others that have more. The caller holds mu.
func (c *connection) late(now int64) bool {
	for seq := c.head + 1; seq <= c.tail; seq++ {
		if s := c.ring[seq%windowSlices]; s != nil && !s.orphan && s.batch.late(now) {
			return true
		}
	}
	return false
}

// finish deals with what was under way when the connection ended. Neither its reader nor its writer runs any more.
func (c *connection) finish() {
	l := c.rail.lane
	err := c.err
	if errors.Is(err, errIdle) && c.head == c.tail {
		c.s.close() // nothing is under way
		return
	}
	c.s.zero.Load().finish(0, l.seg.e.cfg.AbortTimeout) // a NIC that keeps it for longer keeps nothing from being confirmed
	via := c.rail
	switch {
	case errors.Is(err, ErrTimeout), errors.Is(err, syscall.EFAULT): // of one batch: nothing is wrong with the rail
		via = nil
	case !errors.Is(err, ErrClosed):
		err = c.rail.failed(err)
	}
	var unsure []*slice
	for c.head < c.tail {
		s := c.pop()
		switch {
		case s.orphan:
		case s.request.Op == Write && c.byeSeen && c.head <= c.bye:
			c.rail.carried(s)
		case s.request.Op == Write && !c.byeSeen:
			unsure = append(unsure, s)
		default:
			l.retry(s, via, err)
		}
	}
	c.s.close()
	if len(unsure) > 0 {
		c.settle(unsure, via, err)
	}
}

// closedThere are the errors of a connection that the other side has closed.
var closedThere = []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE}

// settle asks the peer to confirm that nothing of the connection can land any more, and then tries writes again. A peer
// that does not answer is asked on, while the requests have ended as unsettled: those that nobody waits for any more at once.
func (c *connection) settle(unsure []*slice, via *rail, err error) {
	l, e := c.rail.lane, c.rail.lane.seg.e
	reset := slices.ContainsFunc(closedThere, func(reason error) bool { return errors.Is(c.err, reason) })
	confirmed := make(chan struct{})
	e.background(func() {
		if c.confirm(e.ctx, reset) {
			close(confirmed)
		}
	})
	kept, loose := c.lose(unsure, confirmed, err)
	for _, s := range kept {
		l.retry(s, via, err)
	}
	if len(loose) == 0 {
		return
	}
	l.mu.Lock()
	c.rail.unsettled++
	l.mu.Unlock()
	e.background(func() {
		select {
		case <-confirmed:
		case <-e.ctx.Done():
			return
		}
		l.mu.Lock()
		c.rail.unsettled--
		l.mu.Unlock()
		for _, s := range loose {
			s.settle()
		}
	})
}

// lose waits for the peer's confirmation. Requests without it end as unsettled, those that are over after a moment, others
// after AbortTimeout. It returns those that have not ended, and those that have.
func (c *connection) lose(unsure []*slice, confirmed <-chan struct{}, err error) (kept, loose []*slice) {
	e := c.rail.lane.seg.e
	for begun := e.now(); len(unsure) > 0; {
		select {
		case <-confirmed:
			return unsure, loose
		case <-e.ctx.Done():
		case <-after(min(cancelGrace, e.cfg.AbortTimeout)):
		}
		now := e.now()
		unsure = slices.DeleteFunc(unsure, func(s *slice) bool {
			why := s.over(now)
			if why == nil && (now-begun >= int64(e.cfg.AbortTimeout) || e.ctx.Err() != nil) {
				why = err
			}
			if why != nil {
				loose = append(loose, s)
				s.endLoose(why)
			}
			return why != nil
		})
	}
	return nil, loose
}

// confirm asks until the peer confirms, at each of its addresses in turn, the connection's own first.
func (c *connection) confirm(ctx context.Context, reset bool) bool {
	rails := c.rail.lane.rails
	wait := retryEvery
	for i := c.rail.index; ; i++ {
		err := c.rail.lane.seg.abort(ctx, rails[i%len(rails)].to, c.id, reset)
		if err == nil {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-after(wait):
		}
		wait = min(2*wait, retryAtMost)
	}
}

// background runs fn until the engine is closed, which waits for it.
func (e *Engine) background(fn func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	e.wg.Go(fn)
}
