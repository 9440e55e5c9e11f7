package transfer

import (
	"errors"
	"sync"
	"sync/atomic"
)

// Endpoint is the queue pairs of one NIC to one peer. Whoever has acquired it may post until it is released; its work may
// be outstanding for longer. Its methods may be called concurrently.
type Endpoint struct {
	store  *EndpointStore
	peer   string
	queues []*queue
	link   Link // nil until its peer has answered

	refs    atomic.Int32 // holders. It grows under the store's mu only, shared or not
	visited atomic.Bool  // acquired since the eviction policy last looked
	active  atomic.Bool  // false for ever once it is retired: nothing is posted any more

	// The store's mu guards what follows.
	list       *endpointList // that it is in
	prev, next *Endpoint
	since      int64 // when it was connected, or retired
	evicted    bool  // it was idle when it was retired
	drainUntil int64 // retired to make room: its work may end by itself until then
	recalled   int64 // when its peer was asked to let go of it; 0 if it was not
	stuck      bool  // it has been reported
	destroyed  int   // so many of its queue pairs, the first ones, are gone

	erred bool // its queue pairs are in ERR; the reclaimer's
}

// queue is one queue pair of an endpoint.
type queue struct {
	mu    sync.Mutex // one posts at a time, and nobody once it goes to ERR
	qp    QueuePair
	qpn   uint32
	depth *Depth
}

// Depth counts the work requests that are outstanding on one queue pair. Whoever keeps a work request keeps its Depth, and
// needs nothing else of the endpoint, which may be gone from the store by then. Its queue pair is not destroyed until the
// count is zero.
type Depth struct {
	n    atomic.Int32
	done *signal
}

// Done says that a work request has completed, whatever its status, and that its completion was polled. It is called once
// for each that was posted.
func (d *Depth) Done() {
	switch n := d.n.Add(-1); {
	case n == 0:
		d.done.raise()
	case n < 0: // a queue pair might be destroyed under work that is outstanding
		panic("transfer: Depth.Done called more often than work was posted")
	}
}

// Outstanding is the count.
func (d *Depth) Outstanding() int { return int(d.n.Load()) }

// signal wakes the monitor, if anybody waits for what it would do.
type signal struct {
	wanted atomic.Bool
	c      chan struct{} // of capacity 1: several are as good as one
}

func (s *signal) raise() {
	if !s.wanted.Load() {
		return
	}
	select {
	case s.c <- struct{}{}:
	default:
	}
}

// Reasons why nothing was posted. Compare with errors.Is.
var (
	// ErrRetired says that the endpoint takes no work any more. Acquire the peer's anew.
	ErrRetired = errors.New("transfer: the endpoint is retired: acquire the peer's anew")
	// ErrQueueFull says that a queue pair has as much work outstanding as it can hold. Wait for completions.
	ErrQueueFull = errors.New("transfer: the send queue is full: wait for completions")
)

// Link is the peer's end of an endpoint, to whoever arranged it.
type Link interface {
	// Gone is called once, by the monitor or by Close, when the queue pairs of this end are destroyed. It must not wait.
	Gone()
}

// Peer is who is at the other end.
func (e *Endpoint) Peer() string { return e.peer }

// Link is what [EndpointConfig.Exchange] has returned, or Accept was called with.
func (e *Endpoint) Link() Link { return e.link }

// QPN is the number of the i-th queue pair.
func (e *Endpoint) QPN(i int) uint32 { return e.queues[i].qpn }

// Pick is the number of the queue pair with the least work outstanding.
func (e *Endpoint) Pick() int {
	best, least := 0, e.queues[0].depth.n.Load()
	for i, q := range e.queues[1:] {
		if n := q.depth.n.Load(); n < least {
			best, least = i+1, n
		}
	}
	return best
}

// Depth is the counter of the i-th queue pair. Keep it with each work request before that is posted: the completion may be
// polled before Post has returned.
func (e *Endpoint) Depth(i int) *Depth { return e.queues[i].depth }

// Post hands work requests, in order, to the i-th queue pair and says how many it has taken. The error is why it has not
// taken the others: [ErrQueueFull], [ErrRetired], or the NIC's. It must not be called after Release.
func (e *Endpoint) Post(i int, list []WorkRequest) (int, error) {
	q := e.queues[i]
	q.mu.Lock()
	defer q.mu.Unlock()
	if !e.active.Load() {
		return 0, ErrRetired
	}
	room := e.store.cfg.QueueDepth - int(q.depth.n.Load())
	if room <= 0 {
		return 0, ErrQueueFull
	}
	want := len(list)
	list = list[:min(want, room)]
	q.depth.n.Add(int32(len(list))) //nolint:gosec // at most QueueDepth
	n, err := q.qp.Post(list)
	for range len(list) - n {
		q.depth.Done()
	}
	if err == nil && n < want {
		err = ErrQueueFull
	}
	return n, err
}

// Release ends what Acquire began. Work that was posted goes on.
func (e *Endpoint) Release() {
	switch n := e.refs.Add(-1); {
	case n == 0:
		e.store.signal.raise()
	case n < 0:
		panic("transfer: Endpoint.Release called more often than Acquire")
	}
}

// busy reports whether somebody holds an endpoint or has work outstanding on it. If the store's mu is held for writing
// and it does not, nobody can begin.
func (e *Endpoint) busy() bool { return e.refs.Load() > 0 || e.outstanding() > 0 }

func (e *Endpoint) outstanding() (n int) {
	for _, q := range e.queues {
		n += q.depth.Outstanding()
	}
	return n
}

// toError takes the queue pairs to ERR. No Post is under way afterwards, nor begins.
func (e *Endpoint) toError() error {
	var all error
	for _, q := range e.queues {
		q.mu.Lock()
		all = errors.Join(all, q.qp.ToError())
		q.mu.Unlock()
	}
	return all
}

// destroy frees the queue pairs and says how many; the rest are kept for another attempt. Only the reclaimer calls it.
func (e *Endpoint) destroy() (n int, err error) {
	for _, q := range e.queues[e.destroyed:] {
		if err = q.qp.Destroy(); err != nil {
			break
		}
		n++
	}
	return n, err
}

// endpointList is a list of endpoints, oldest first. An endpoint is in one at a time.
type endpointList struct {
	oldest, newest *Endpoint
	n              int
}

func (l *endpointList) push(e *Endpoint) {
	e.list, e.prev, e.next = l, l.newest, nil
	if l.newest == nil {
		l.oldest = e
	} else {
		l.newest.next = e
	}
	l.newest = e
	l.n++
}

func (l *endpointList) remove(e *Endpoint) {
	if e.prev == nil {
		l.oldest = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		l.newest = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.list, e.prev, e.next = nil, nil, nil
	l.n--
}

// appendTo appends the endpoints to out.
func (l *endpointList) appendTo(out []*Endpoint) []*Endpoint {
	for e := l.oldest; e != nil; e = e.next {
		out = append(out, e)
	}
	return out
}
