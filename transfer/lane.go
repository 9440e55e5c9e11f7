package transfer

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// lane is all rails of one transport to one peer, and the slices that wait for them.
type lane struct {
	seg       *Segment
	transport string
	storage   bool          // it leads to buffers on storage; others lead to memory
	parallel  int           // connections of a rail
	run       func(r *rail) // one connection of a rail, from its beginning to its end

	mu     sync.Mutex
	cond   sync.Cond
	head   *slice
	tail   *slice
	queued int
	rails  []*rail
	closed bool
	wg     sync.WaitGroup
	last   error // why the last rail paused

	index          int    // in the segment's list
	seen           uint64 // slices that had been carried when it was compared last; the keeper's
	cost           costs
	counts         *transportCounters
	preferences    map[[2]string]uint64 // rails that pairs of locations prefer, as far as they have been worked out
	ended, drained func()               // called when it is closed: before its workers have ended, and after; may be nil
}

func newLane(seg *Segment, transport string, parallel int, run func(*rail)) *lane {
	l := &lane{seg: seg, transport: transport, parallel: parallel, run: run, counts: seg.e.counters.transports[transport]}
	l.cond.L = &l.mu
	return l
}

// add adds a rail, before the lane is used.
func (l *lane) add(from, to string) {
	l.rails = append(l.rails, &rail{lane: l, index: len(l.rails), from: from, to: to, conns: map[*connection]struct{}{}})
}

// push queues slices, linked from first to last.
func (l *lane) push(first, last *slice) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		endAll(first, ErrClosed)
		return
	}
	l.append(first, last)
	dropped := l.ensure(l.seg.e.now())
	l.cond.Broadcast()
	l.mu.Unlock()
	l.pass(dropped)
}

func (l *lane) append(first, last *slice) {
	if l.tail == nil {
		l.head = first
	} else {
		l.tail.next = first
	}
	l.tail = last
	for s := first; s != nil; s = s.next {
		l.queued++
		if l.seg.choosy {
			s.prefer = l.prefers(s.entry.here, s.entry.there)
		}
	}
}

// ensure opens connections for what is queued. If there is no rail left that may be tried it empties the queue, for the
// caller to pass on. The lane's mu is held.
func (l *lane) ensure(now int64) (dropped *slice) {
	if l.closed || l.queued == 0 {
		return nil
	}
	open := 0
	for _, r := range l.rails {
		if now >= r.pausedUntil {
			open += l.open(r)
		}
	}
	for _, r := range l.rails { // rails that break all the time are better than none, and each slice has its budget
		if open == 0 && r.misses < maxErrors {
			open += l.open(r)
		}
	}
	if open > 0 {
		return nil
	}
	dropped = l.head
	l.head, l.tail, l.queued = nil, nil, 0
	return dropped
}

// open has a rail carry what is queued. It reports how many connections may do so.
func (l *lane) open(r *rail) int {
	want := l.parallel - r.unsettled // a peer that is stuck gets no more than these to hold
	if r.probing {
		want = min(want, 1)
	}
	for r.running < min(want, l.queued) {
		r.running++
		l.wg.Add(1)
		go l.serve(r)
	}
	return max(want, 0)
}

func (l *lane) serve(r *rail) {
	defer l.wg.Done()
	l.run(r)
	l.mu.Lock()
	r.running--
	dropped := l.ensure(l.seg.e.now())
	l.mu.Unlock()
	l.pass(dropped)
}

// pass gives slices to the next lane, or ends them.
func (l *lane) pass(first *slice) {
	if first == nil {
		return
	}
	l.mu.Lock()
	why := l.last
	l.mu.Unlock()
	unlink(first, func(s *slice) {
		s.tried |= 1 << l.index
		if next := l.seg.next(s); next != nil {
			s.avoid, s.attempts = 0, 0
			next.push(s, s)
		} else {
			s.end(errors.Join(ErrNoPath, s.last, why))
		}
	})
}

// unlink takes a list apart, and calls fn for each slice.
func unlink(first *slice, fn func(s *slice)) {
	for s := first; s != nil; {
		following := s.next
		s.next = nil
		fn(s)
		s = following
	}
}

// retry gives a slice, which lands no more, another attempt after r has failed with it; nil if no rail is to blame.
func (l *lane) retry(s *slice, r *rail, err error) {
	s.next, s.last = nil, err
	if r != nil {
		s.attempts++
		s.avoid |= 1 << r.index
	}
	switch over := s.over(l.seg.e.now()); {
	case over != nil:
		s.end(over)
	case s.attempts > l.seg.e.cfg.Retries:
		l.mu.Lock()
		l.last = err
		l.mu.Unlock()
		l.pass(s)
	default:
		l.push(s, s)
	}
}

// take waits for slices that a rail may carry: at most len(out), and of at most room bytes, but one. stop ends the wait.
func (l *lane) take(r *rail, out []*slice, room uint64, stop func() bool) (n int) {
	l.mu.Lock()
	for n == 0 && !l.closed && !stop() {
		var over *slice
		if n, over = l.choose(r, out, room); over != nil {
			l.mu.Unlock()
			l.endOver(over)
			l.mu.Lock()
		} else if n == 0 {
			l.cond.Wait()
		}
	}
	l.mu.Unlock()
	return n
}

// maxLook slices are looked at for some that a rail may carry: the queue may be long, and is locked meanwhile.
const maxLook = 256

// choose takes slices from the queue. Those that should not be begun any more are linked to over.
func (l *lane) choose(r *rail, out []*slice, room uint64) (n int, over *slice) {
	now, left := l.seg.e.now(), room
	faster := l.faster(r)
	var kept *slice
	for at, looked := &l.head, 0; *at != nil && n < len(out) && looked < maxLook; looked++ {
		s := *at
		dead := s.over(now) != nil
		if !dead && (faster&^s.avoid != 0 || l.avoids(r, s, now) || l.leaves(r, s, now) || n > 0 && s.length > left) {
			kept = s
			at = &s.next
			continue
		}
		*at = s.next
		if l.tail == s {
			l.tail = kept
		}
		l.queued--
		s.next = nil
		if dead {
			s.next, over = over, s
			continue
		}
		s.began = now
		if r != nil {
			s.under = int64(s.length) * int64(r.running) //nolint:gosec // at most maxSlice
		}
		out[n] = s
		n++
		left -= min(left, s.length)
	}
	return n, over
}

// endOver ends slices whose batch is over.
func (l *lane) endOver(first *slice) {
	now := l.seg.e.now()
	unlink(first, func(s *slice) { s.end(s.over(now)) })
}

// avoids reports whether a slice should take another rail, on which it has not failed.
func (l *lane) avoids(r *rail, s *slice, now int64) bool {
	if r == nil || s.avoid&(1<<r.index) == 0 {
		return false
	}
	for _, o := range l.rails {
		if now >= o.pausedUntil && s.avoid&(1<<o.index) == 0 {
			return true
		}
	}
	return false
}

// faster are the rails, one bit each, to which r should leave what is queued: so few slices that another will have carried
// them before this one has carried its first.
func (l *lane) faster(r *rail) (set uint64) {
	if r == nil || len(l.rails) == 1 {
		return 0
	}
	own := r.latency.load()
	for _, o := range l.rails {
		if n := len(o.conns) + o.joined; o != r && n > 0 && !o.probing && own > o.latency.load()*int64(2+l.queued/n) {
			set |= 1 << o.index
		}
	}
	return set
}

// tick ends what takes too long, and looks whether a rail may be tried again.
func (l *lane) tick(now int64) {
	l.mu.Lock()
	var over *slice
	if l.queued > 0 {
		over = l.expired(now)
		l.cond.Broadcast() // whom a rail leaves its slices to may be gone
	}
	conns := l.connections()
	dropped := l.ensure(now)
	l.mu.Unlock()
	l.endOver(over)
	l.pass(dropped)
	for _, c := range conns {
		c.tick(now)
		l.hedge(c, now)
	}
}

// connections are those that are open. The lane's mu is held.
func (l *lane) connections() (all []*connection) {
	for _, r := range l.rails {
		for c := range r.conns {
			all = append(all, c)
		}
	}
	return all
}

// expired takes the slices out of the queue whose batch is over.
func (l *lane) expired(now int64) (over *slice) {
	var kept *slice
	for at := &l.head; *at != nil; {
		s := *at
		if s.over(now) == nil {
			kept = s
			at = &s.next
			continue
		}
		*at = s.next
		l.queued--
		s.next, over = over, s
	}
	l.tail = kept
	return over
}

// close ends the lane. It returns when none of its connections is at work any more.
func (l *lane) close() {
	l.mu.Lock()
	l.closed = true
	first := l.head
	l.head, l.tail, l.queued = nil, nil, 0
	conns := l.connections()
	l.cond.Broadcast()
	l.mu.Unlock()
	for _, c := range conns {
		c.kill(ErrClosed)
	}
	endAll(first, ErrClosed)
	if l.ended != nil {
		l.ended()
	}
	l.wg.Wait()
	if l.drained != nil {
		l.drained()
	}
}

func endAll(first *slice, err error) {
	unlink(first, func(s *slice) { s.end(err) })
}

// Health of rails.
const (
	// errorWindow is within what time maxErrors pause a rail.
	errorWindow = 10 * time.Second
	maxErrors   = 3
	// cooldown is the first pause, and doubles up to cooldownMost.
	cooldown     = 500 * time.Millisecond
	cooldownMost = 30 * time.Second
)

// rail is one way of a lane. Its fields are guarded by the lane's mu, but for the averages.
type rail struct {
	lane        *lane
	index       int
	from, to    string // addresses
	conns       map[*connection]struct{}
	joined      int // 1 if it reaches the peer without a connection of its own
	running     int // connections, and those that are being made
	unsettled   int // connections whose end the peer has not confirmed
	failures    []int64
	pausedUntil int64
	pause       time.Duration // the last one
	probing     bool          // it has been paused and has not carried anything since
	misses      int           // connections that could not be made, since the last that was
	latency     atomicEWMA    // ns from a slice's hand-over to its end
	pace        atomicEWMA    // ns that 64 KiB take: a slice's latency over all that was under way with it
	compared    int64         // when it last carried a slice that prefers others
	carries     atomic.Bool   // nothing has failed since it last carried something

	slices, bytes, errors atomic.Uint64 // carried, and what failed
}

// name is what a rail is called in messages.
func (r *rail) name() string {
	from := r.from
	if from == "" {
		from = "any"
	}
	return fmt.Sprintf("%s %s-%s", r.lane.transport, from, r.to)
}

// reached takes note that a connection was made.
func (r *rail) reached() {
	r.lane.mu.Lock()
	defer r.lane.mu.Unlock()
	r.misses, r.joined = 0, 1
}

// missed is failed for a connection that could not be made.
func (r *rail) missed(err error) {
	r.lane.mu.Lock()
	r.misses++
	r.joined = 0
	r.lane.mu.Unlock()
	_ = r.failed(err) // the lane keeps what it returns
}

// failed counts an error, and pauses the rail if there were too many. A rail that is being probed needs only one.
func (r *rail) failed(err error) error {
	r.errors.Add(1)
	r.lane.counts.errors.Add(1)
	err = &PathError{Peer: r.lane.seg.d.name(), Path: r.name(), Err: err}
	l := r.lane
	now := l.seg.e.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = err
	r.carries.Store(false)
	if now < r.pausedUntil {
		return err
	}
	r.failures = slices.DeleteFunc(r.failures, func(at int64) bool { return now-at >= int64(errorWindow) })
	r.failures = append(r.failures, now)
	if !r.probing && len(r.failures) < maxErrors {
		return err
	}
	r.pause = min(max(2*r.pause, cooldown), cooldownMost)
	r.pausedUntil, r.probing, r.failures = now+int64(r.pause), true, r.failures[:0]
	l.seg.e.cfg.Logger.Warn("transfer: a rail pauses", slog.String("rail", r.name()), slog.Duration("for", r.pause), slog.Any("error", err))
	return err
}

// paceUnit are the bytes whose time is a rail's pace.
const paceUnit = 64 << 10

// carried ends a slice that a rail has carried.
func (r *rail) carried(s *slice) {
	r.slices.Add(1)
	r.bytes.Add(s.length)
	r.lane.counts.ops[s.request.Op].add(s.length)
	took := r.lane.seg.e.now() - s.began
	r.latency.add(took)
	if s.under > 0 {
		r.pace.add(took * paceUnit / s.under)
		r.lane.cost.add(s.length, took, s.under)
	}
	r.succeeded()
	s.end(nil)
}

// succeeded takes note that a rail carries.
func (r *rail) succeeded() {
	if r.carries.Load() {
		return
	}
	l := r.lane
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.probing {
		l.seg.e.cfg.Logger.Info("transfer: a rail carries again", slog.String("rail", r.name()))
	}
	r.carries.Store(true)
	r.probing, r.pausedUntil, r.pause, r.failures = false, 0, 0, r.failures[:0]
}
