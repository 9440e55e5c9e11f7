package transfer

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Bounds of what is under way on one rail: a NIC of 400 Gbit/s has 5 MB on a way of 100 us. What is beyond waits where
// other rails find it.
const (
	wayBytes  = 8 << 20
	waySlices = 256
)

// rdmaLane is the way to a peer over NICs: a rail from each here to each there. A rail's worker takes what is queued and
// posts it; it lives for as long as something is queued.
type rdmaLane struct {
	*lane
	peer   *rdmaPeer
	ways   []*way          // by rail
	ctx    context.Context //nolint:containedctx // it ends when the lane is closed
	cancel context.CancelFunc

	mu      sync.Mutex
	none    sync.Cond
	pending int // flights, and WRITEs that wait for their link to be closed
}

// way is a rail: a NIC here and one there.
type way struct {
	l    *rdmaLane
	rail *rail
	port *port
	nic  string // there
	peer string // its path: engine/nic

	bytes  uint64 // under way; guarded by the port's mu
	slices int
}

// newRDMALane makes the lane to a peer with these NICs. If there are more than enough pairs, each NIC has some.
func newRDMALane(s *Segment, peer *rdmaPeer, nics []string) *lane {
	l := &rdmaLane{peer: peer}
	l.none.L = &l.mu
	l.ctx, l.cancel = context.WithCancel(s.e.ctx)
	l.lane = newLane(s, TransportRDMA, 1, l.carry)
	l.ended, l.drained = l.end, l.drain
	ports := s.e.rdma.ports
	for step := range nics {
		for i, p := range ports {
			if len(l.ways) == maxRails {
				return l.lane
			}
			nic := nics[(i+step)%len(nics)]
			l.add(p.nic.Name(), nic)
			l.ways = append(l.ways, &way{l: l, rail: l.rails[len(l.rails)-1], port: p, nic: nic, peer: peer.engine + "/" + nic})
		}
	}
	return l.lane
}

// carry posts what is queued until nothing is, or the rail fails.
func (l *rdmaLane) carry(r *rail) {
	w := l.ways[r.index]
	var out [burst]*slice
	for more := true; more; {
		n, room, ok := w.waitForRoom()
		if !ok {
			return
		}
		more = w.round(out[:n], room)
		w.port.giveBack(n)
	}
}

// round posts up to len(out) slices. It reports whether more may be queued, and nothing has failed.
func (w *way) round(out []*slice, room uint64) (more bool) {
	e, err := w.acquire()
	if w.l.ctx.Err() != nil {
		if err == nil {
			e.Release()
		}
		return false
	}
	if err != nil {
		w.rail.missed(err)
		return false
	}
	w.rail.reached()
	n, more := w.l.grab(w.rail, out, room, e.Release)
	if n > 0 {
		w.send(e, out[:n])
		e.Release()
		clear(out)
	}
	return more
}

// waitForRoom waits until the rail and its NIC have room for more, and says for how many slices, which are set aside, and
// bytes. It reports false when the lane is closed.
func (w *way) waitForRoom() (n int, room uint64, ok bool) {
	p := w.port
	p.mu.Lock()
	defer p.mu.Unlock()
	most := w.most()
	for w.slices >= most || w.bytes >= wayBytes || len(p.flights)+p.aside+burst > maxFlights {
		if w.l.ctx.Err() != nil {
			return 0, 0, false
		}
		p.room.Wait()
		most = w.most()
	}
	n = min(burst, most-w.slices)
	p.aside += n
	return n, wayBytes - w.bytes, w.l.ctx.Err() == nil
}

// most is how many slices may be under way: few until one has arrived, since a NIC takes a second or more to find out that
// the way leads nowhere.
func (w *way) most() int {
	if !w.rail.carries.Load() {
		return burst
	}
	return waySlices
}

// giveBack ends what waitForRoom has set aside.
func (p *port) giveBack(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.aside -= n
	p.room.Broadcast()
}

const (
	// patience is how long a rail waits for a peer or a NIC that has just failed, while slices are queued for it and there is
	// no other transport; a NIC is reset in less.
	patience = 2 * time.Second
	// patienceShort is the same if there is another transport.
	patienceShort = 200 * time.Millisecond
	// nicAgain is how often a NIC that is not active is asked.
	nicAgain = 20 * time.Millisecond
)

// acquire is the peer's endpoint. What passes soon is waited for; room is, if there is no other transport, for as long as
// something is queued.
func (w *way) acquire() (*Endpoint, error) {
	left, only := patienceShort, w.l.alone()
	if only {
		left = patience
	}
	for {
		e, err := w.port.store.Acquire(w.l.ctx, w.peer)
		if err == nil {
			return e, nil
		}
		_, full := errors.AsType[*BudgetError](err)
		full = full || errors.Is(err, ErrNoRoom)
		if full && only && w.l.wanted() && sleep(w.l.ctx, nicAgain) {
			continue
		}
		pause := time.Duration(0)
		if back, ok := errors.AsType[*BackoffError](err); ok {
			pause = back.Left
		} else if _, ok := errors.AsType[*NICError](err); ok {
			pause = nicAgain
		}
		if left -= pause; pause == 0 || left < 0 || !sleep(w.l.ctx, pause) {
			return nil, err
		}
	}
}

// wanted reports whether something is queued.
func (l *lane) wanted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queued > 0 && !l.closed
}

// flight is a slice whose work request is outstanding, or is about to be.
type flight struct {
	s     *slice
	way   *way
	grant *grant
	work  WorkRequest
	slab  []byte // nil if the request's own memory is used
	link  *rdmaLink
	depth *Depth // the queue pair's: the endpoint may be gone when this ends
	qpn   uint32

	id     uint64 // the port's mu guards these
	posted int64
}

var (
	errPrivateRDMA = errors.New("transfer: no NIC there takes the buffer's memory")
	errNoKey       = errors.New("transfer: this NIC there does not take the buffer's memory")
	errNoSlabs     = errors.New("transfer: the NIC does not take bounce buffers")
	errEmpty       = errors.New("transfer: all bounce buffers are in use")
)

// send posts slices on an endpoint.
func (w *way) send(e *Endpoint, list []*slice) {
	fs := make([]*flight, 0, len(list))
	for _, s := range list {
		f, err := w.load(s, false)
		if errors.Is(err, errEmpty) { // what holds slabs must be on its way before more are waited for
			w.launch(e, fs)
			fs = make([]*flight, 0, len(list))
			f, err = w.load(s, true)
		}
		if err != nil {
			w.refuse(s, err)
			continue
		}
		fs = append(fs, f)
	}
	w.launch(e, fs)
}

// refuse deals with a slice that cannot be posted.
func (w *way) refuse(s *slice, err error) {
	switch {
	case errors.Is(err, ErrStale), errors.Is(err, ErrRange), errors.Is(err, ErrReadOnly), errors.Is(err, ErrMemory):
		s.end(err)
	case errors.Is(err, errPrivateRDMA):
		s.last = err
		w.l.pass(s)
	case w.l.ctx.Err() != nil:
		w.l.push(s, s) // it is closed
	case errors.Is(err, errNoKey):
		w.l.retry(s, w.rail, err) // nothing is wrong with the rail
	default:
		w.l.retry(s, w.rail, w.rail.failed(err))
	}
}

// load finds out where the two ends of a slice lie.
func (w *way) load(s *slice, wait bool) (*flight, error) {
	r := s.request
	g, err := w.l.peer.grant(w.l.ctx, r.Buffer)
	if err != nil {
		return nil, err
	}
	off := s.offset()
	switch {
	case off > g.Bytes || s.length > g.Bytes-off:
		return nil, ErrRange
	case r.Op == Write && g.ReadOnly:
		return nil, ErrReadOnly
	case len(g.Keys) == 0:
		return nil, errPrivateRDMA
	}
	key, ok := g.Keys[w.nic]
	if !ok {
		return nil, errNoKey
	}
	f := &flight{s: s, way: w, grant: g, work: WorkRequest{Op: r.Op, Remote: g.Address + off, RKey: key}}
	pieces := s.pieces(make([][]byte, 0, MaxLocal))
	if w.direct(f, pieces) {
		return f, nil
	}
	return f, w.bounce(f, pieces, wait)
}

// direct has a flight use the request's own memory, if it is registered.
func (w *way) direct(f *flight, pieces [][]byte) bool {
	if len(pieces) > MaxLocal {
		return false
	}
	local := make([]Piece, 0, len(pieces))
	for _, b := range pieces {
		m := w.port.r.find(b, f.work.Op)
		if m == nil {
			return false
		}
		region := m.regions[w.port.index].Load()
		if region == nil {
			return false
		}
		local = append(local, Piece{Region: *region, Offset: int(uint64(addressOf(b)) - m.address), Length: len(b)}) //nolint:gosec // within
	}
	f.work.Local = local
	return true
}

// bounce has a flight use a slab, which it waits for, or fails with errEmpty.
func (w *way) bounce(f *flight, pieces [][]byte, wait bool) error {
	b := &w.port.r.bounce
	slabs, err := b.open()
	if err != nil {
		return err
	}
	region := b.m.regions[w.port.index].Load()
	if region == nil {
		return errNoSlabs
	}
	select {
	case f.slab = <-slabs:
	default:
		if !wait {
			return errEmpty
		}
		select {
		case f.slab = <-slabs:
		case <-w.l.ctx.Done():
			return w.l.ctx.Err()
		}
	}
	if f.work.Op == Write {
		if err := copyPieces(Write, f.slab, pieces, f.s.length); err != nil {
			f.letGoOfSlab()
			return err
		}
	}
	off := int(uint64(addressOf(f.slab)) - b.m.address)                             //nolint:gosec // within
	f.work.Local = []Piece{{Region: *region, Offset: off, Length: int(f.s.length)}} //nolint:gosec // at most a slab
	return nil
}

// letGoOfSlab gives a slab back. The NIC does not use it any more.
func (f *flight) letGoOfSlab() {
	if f.slab != nil {
		f.way.port.r.bounce.slabs <- f.slab // there is room for each
		f.slab = nil
	}
}

// launch posts flights on the queue pair with the least work.
func (w *way) launch(e *Endpoint, fs []*flight) {
	if len(fs) == 0 {
		return
	}
	i := e.Pick()
	work := make([]WorkRequest, len(fs))
	for _, f := range fs {
		f.link, f.depth, f.qpn = e.Link().(*rdmaLink), e.Depth(i), e.QPN(i) //nolint:forcetypeassert // exchange has put it there
	}
	w.l.expect(len(fs))
	w.port.board(fs)
	for k, f := range fs {
		f.work.ID = f.id
		work[k] = f.work
	}
	seen := w.port.endedSoFar()
	n, err := e.Post(i, work)
	for _, f := range fs[n:] {
		w.port.unboard(f)
		f.letGoOfSlab()
		switch {
		case errors.Is(err, ErrRetired), errors.Is(err, ErrQueueFull):
			w.l.push(f.s, f.s)
		default:
			w.port.store.Fail(w.peer, f.qpn, err)
			w.l.retry(f.s, w.rail, w.rail.failed(err))
		}
		w.l.expect(-1)
	}
	if errors.Is(err, ErrQueueFull) {
		w.port.waitForEnd(w.l, seen)
	}
}

// land ends a flight: its work request has a completion, or never will have one.
func (f *flight) land(status CompletionStatus, err error) {
	l, r, s := f.way.l, f.way.rail, f.s
	defer l.expect(-1)
	if status == StatusOK {
		if f.slab != nil && f.work.Op == Read {
			err = copyPieces(Read, f.slab, s.pieces(nil), s.length)
		}
		f.letGoOfSlab()
		if err != nil {
			s.end(err)
		} else {
			r.carried(s)
		}
		return
	}
	f.letGoOfSlab()
	via := r
	switch status {
	case StatusFlushed: // another has failed
		via = nil
	case StatusRemoteAccess:
		l.peer.forget(s.request.Buffer, f.grant)
	default:
		err = r.failed(err)
	}
	if f.work.Op == Read { // it lands no more
		l.retry(s, via, err)
		return
	}
	l.expect(1)
	f.link.settle(&unsure{s: s, l: l, via: via, err: err})
}

// expect counts what has not ended.
func (l *rdmaLane) expect(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending += n; l.pending == 0 {
		l.none.Broadcast()
	}
}

// end has the lane's workers end: it is closed.
func (l *rdmaLane) end() {
	l.cancel()
	for _, p := range l.seg.e.rdma.ports {
		p.mu.Lock()
		p.room.Broadcast()
		p.mu.Unlock()
	}
}

// drain ends what is under way. No worker runs any more.
func (l *rdmaLane) drain() {
	for _, w := range l.ways {
		w.port.mu.Lock()
		busy := w.slices > 0
		w.port.mu.Unlock()
		if busy { // other segments of the same peer try theirs again
			w.port.store.Delete(w.peer)
		}
	}
	l.mu.Lock()
	for l.pending > 0 {
		l.none.Wait()
	}
	l.mu.Unlock()
	l.peer.part()
}

// grab is take for a rail that holds something while it takes: before it waits it lets go, and has taken nothing. more says
// that something is queued.
func (l *lane) grab(r *rail, out []*slice, room uint64, letGo func()) (n int, more bool) {
	l.mu.Lock()
	n, over := l.choose(r, out, room)
	more = l.queued > 0 && !l.closed
	if n == 0 {
		letGo()
		if more && over == nil {
			l.cond.Wait()
		}
	}
	l.mu.Unlock()
	l.endOver(over)
	return n, more
}
