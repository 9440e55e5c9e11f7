package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Op is what a request does.
type Op uint8

// The two operations, as their issuer sees them.
const (
	Read  Op = 1 + iota // from the segment to here
	Write               // from here to the segment
)

// String implements fmt.Stringer.
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("op %d", uint8(o))
}

// Request moves bytes between memory of this process and a buffer of a segment.
type Request struct {
	Op      Op
	Segment *Segment
	Buffer  Handle
	Offset  uint64 // in the buffer
	// Local is memory of this process, and More what follows it, piece by piece: they are gathered from or scattered to,
	// and all of them together are as long as the range in the buffer. They must not be touched until the request has ended.
	Local []byte
	More  [][]byte
}

// length is how many bytes a request moves.
func (r *Request) length() uint64 {
	n := uint64(len(r.Local))
	for _, p := range r.More {
		n += uint64(len(p))
	}
	return n
}

// Bounds of a batch.
const (
	maxBatch = 64 << 10 // requests
	maxSlice = 16 << 20 // bytes of a slice: a frame's body
	minSlice = 4 << 10
	// MaxPieces are the pieces of local memory that a request may have: as many as one system call takes.
	MaxPieces = 512
)

// State is how far a request has come.
type State uint8

// The states of a request. All but Pending are final.
const (
	Pending   State = iota
	Done            // all bytes have been moved
	Failed          // some may have been, and none will be
	Unsettled       // some may still be: see ErrUnsettled
)

// String implements fmt.Stringer.
func (s State) String() string {
	return [...]string{"pending", "done", "failed", "unsettled"}[s]
}

// Batch is a set of requests that were submitted together. Its methods may be called concurrently.
type Batch struct {
	e        *Engine
	requests []Request
	entries  []entry
	slices   []slice
	bytes    uint64 // of all requests
	deadline int64  // of the engine's clock
	left     atomic.Int64
	canceled atomic.Bool
	stopAt   atomic.Int64 // when a canceled batch gives up what is under way; 0: it is not canceled
	done     chan struct{}
	loose    atomic.Int64 // slices that are not settled, and one until the batch is done

	begun     int64  // of the engine's clock
	own       bool   // it is the engine's own, and not counted
	then      func() // is called before it is done; nil for nothing
	failed    atomic.Bool
	unsettled atomic.Bool

	mu        sync.Mutex
	isSettled bool
	settled   chan struct{} // nil until somebody asks for it
}

// entry is what has become of a request.
type entry struct {
	here  string // memory locations, if they matter
	there string
	left  atomic.Int32 // slices
	loose atomic.Bool
	mu    sync.Mutex
	err   error // the first
}

// slice is a part of a request that is moved at once. One goroutine has it at a time.
type slice struct {
	batch    *Batch
	request  *Request
	entry    *entry
	peer     *Segment
	next     *slice // in a queue
	from     uint64 // of the request
	length   uint64
	began    int64  // when it was handed to a connection
	sent     uint64 // what the connection has sent once it is, in bytes
	under    int64  // bytes that were under way on the connection then, its own among them
	prefer   uint64 // rails that it should take, by number; 0 for any
	tried    uint64 // lanes that have nothing left for it, by number
	avoid    uint64 // rails on which it has failed, by number
	attempts int
	last     error // of the last attempt
	hedged   bool  // it has been asked for once more
	orphan   bool  // nobody waits for it any more: what it brings is thrown away
}

// Submit begins to carry out requests, and returns at once. Those that cannot be right fail here, and then none is
// begun. The batch ends after timeout, 0 for [Config.Timeout].
func (e *Engine) Submit(requests []Request, timeout time.Duration) (*Batch, error) {
	count, err := e.check(requests)
	if err != nil {
		return nil, err
	}
	if timeout <= 0 {
		timeout = e.cfg.Timeout
	}
	now := e.now()
	b := e.newBatch(requests, count, now+int64(timeout))
	b.begun = now
	e.counters.begun.Add(1)
	e.counters.slices.Add(uint64(count)) //nolint:gosec // not negative
	b.cut()
	if count == 0 {
		b.finish()
		return b, nil
	}
	for i := 0; i < count; { // runs of slices for one segment's memory, or storage, are queued together
		j := i + 1
		for j < count && b.slices[j].sameWay(&b.slices[i]) {
			b.slices[j-1].next = &b.slices[j]
			j++
		}
		b.slices[i].peer.push(&b.slices[i], &b.slices[j-1])
		i = j
	}
	return b, nil
}

// newBatch makes a batch of so many slices.
func (e *Engine) newBatch(requests []Request, count int, deadline int64) *Batch {
	b, pooled := e.batches.Get().(*Batch)
	if !pooled {
		b = &Batch{e: e}
	}
	b.requests, b.deadline, b.bytes, b.done = requests, deadline, 0, make(chan struct{})
	b.entries = slices.Grow(b.entries[:0], len(requests))[:len(requests)]
	b.slices = slices.Grow(b.slices[:0], count)[:count]
	b.left.Store(int64(count))
	b.loose.Store(1)
	return b
}

// check refuses requests that cannot be right, and counts slices.
func (e *Engine) check(requests []Request) (count int, err error) {
	if len(requests) > maxBatch {
		return 0, fmt.Errorf("transfer: %d requests in a batch, at most %d: split it", len(requests), maxBatch)
	}
	size := uint64(e.cfg.SliceSize) //nolint:gosec // checked by withDefaults
	for i := range requests {
		r := &requests[i]
		n := r.length()
		switch {
		case r.Op != Read && r.Op != Write:
			return 0, fmt.Errorf("transfer: request %d: %v is no operation", i, r.Op)
		case r.Segment == nil || r.Segment.e != e:
			return 0, fmt.Errorf("transfer: request %d: its segment is not one of this engine's", i)
		case len(r.More) >= MaxPieces:
			return 0, fmt.Errorf("transfer: request %d: %d pieces, at most %d", i, len(r.More)+1, MaxPieces)
		case r.Offset+n < r.Offset:
			return 0, fmt.Errorf("transfer: request %d: %w", i, ErrRange)
		}
		count += int((n + size - 1) / size) //nolint:gosec // no more than memory has bytes
	}
	return count, nil
}

// cut makes the slices.
func (b *Batch) cut() {
	size, at := uint64(b.e.cfg.SliceSize), 0 //nolint:gosec // checked by withDefaults
	for i := range b.requests {
		r := &b.requests[i]
		n := r.length()
		b.bytes += n
		if r.Segment.choosy {
			b.entries[i].here, b.entries[i].there = b.e.localLocation(r.Local), r.Segment.location(r.Buffer)
		}
		first := at
		for from := uint64(0); from < n; from += size {
			b.slices[at] = slice{
				batch: b, request: r, entry: &b.entries[i], peer: r.Segment, from: from, length: min(size, n-from),
			}
			at++
		}
		b.entries[i].left.Store(int32(at - first))
	}
}

// Len is how many requests the batch has.
func (b *Batch) Len() int { return len(b.requests) }

// Done is closed when all requests have ended.
func (b *Batch) Done() <-chan struct{} { return b.done }

// Settled is closed when all requests have ended and nothing of them can land any more. Without a request that is
// [Unsettled] that is when the batch is done.
func (b *Batch) Settled() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.settled == nil {
		b.settled = make(chan struct{})
		if b.isSettled {
			close(b.settled)
		}
	}
	return b.settled
}

// maxPooled bounds the slices that a batch may have whose memory is kept for later ones.
const maxPooled = 4096

// Release gives the memory of a batch that is done to later ones; nobody may use the batch after that. Without it the
// garbage collector does so. A batch that is not done, or not settled, is left as it is.
func (b *Batch) Release() {
	select {
	case <-b.done:
	default:
		return
	}
	b.mu.Lock()
	over := b.isSettled
	b.isSettled = false // a second call does nothing
	b.mu.Unlock()
	if !over || cap(b.slices) > maxPooled || cap(b.entries) > maxPooled {
		return
	}
	clear(b.entries)
	clear(b.slices) // they hold on to the caller's memory
	b.requests, b.settled = nil, nil
	b.canceled.Store(false)
	b.stopAt.Store(0)
	b.failed.Store(false)
	b.unsettled.Store(false)
	b.e.batches.Put(b)
}

// Wait waits for all requests, and returns what the first that failed failed with. If ctx ends first, the batch goes on.
func (b *Batch) Wait(ctx context.Context) error {
	select {
	case <-b.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	for i := range b.entries {
		if _, err := b.Status(i); err != nil {
			return fmt.Errorf("transfer: request %d of %d: %w", i, len(b.requests), err)
		}
	}
	return nil
}

// Status tells how far the i-th request has come, and why it failed.
func (b *Batch) Status(i int) (State, error) {
	t := &b.entries[i]
	if t.left.Load() > 0 {
		return Pending, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.err == nil:
		return Done, nil
	case t.loose.Load():
		return Unsettled, t.err
	}
	return Failed, t.err
}

// cancelGrace is how long after Cancel, or the end of its time, a request that is under way has to end by itself, and the
// peer to confirm that it has: with one that answers that takes less.
const cancelGrace = 100 * time.Millisecond

// Cancel has the batch end soon: requests that no connection has begun with at once, others when they are through, or after
// a moment as if their time were over. A WRITE to a peer that does not answer ends as [Unsettled]. When the batch is done,
// nobody uses the caller's memory any more.
func (b *Batch) Cancel() {
	if b.canceled.CompareAndSwap(false, true) {
		b.stopAt.Store(b.e.now() + int64(cancelGrace))
		b.e.expire()
	}
}

// late reports whether what is under way is to be given up.
func (b *Batch) late(now int64) bool {
	stop := b.stopAt.Load()
	return now >= b.deadline || stop != 0 && now >= stop
}

// over says why a slice should not be begun, nil if it should.
func (s *slice) over(now int64) error {
	switch {
	case s.batch.canceled.Load():
		return ErrCanceled
	case now >= s.batch.deadline:
		return errors.Join(ErrTimeout, s.last)
	}
	return nil
}

// end is the outcome of a slice, which cannot land any more.
func (s *slice) end(err error) {
	if err != nil {
		s.entry.fail(err)
		s.batch.failed.Store(true)
	}
	s.entry.left.Add(-1)
	if s.batch.left.Add(-1) == 0 {
		s.batch.finish()
	}
}

// endLoose is the outcome of a slice that may still land. settle follows.
func (s *slice) endLoose(err error) {
	s.entry.loose.Store(true)
	s.batch.loose.Add(1)
	s.batch.unsettled.Store(true)
	s.end(errors.Join(ErrUnsettled, err))
}

// settle says that a slice which has ended can land no more.
func (s *slice) settle() { s.batch.settleOne() }

func (t *entry) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
	}
}

func (b *Batch) finish() {
	if !b.own {
		b.e.counters.ended(b, b.e.now()-b.begun)
	}
	if b.then != nil {
		b.then()
	}
	b.settleOne()
	close(b.done) // last of all: whoever waits may release the batch
}

func (b *Batch) settleOne() {
	if b.loose.Add(-1) > 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.isSettled = true
	if b.settled != nil {
		close(b.settled)
	}
}

// pieces appends the local memory of a slice to list.
func (s *slice) pieces(list [][]byte) [][]byte {
	skip, left := s.from, s.length
	take := func(p []byte) {
		if n := uint64(len(p)); skip >= n {
			skip -= n
			return
		}
		p = p[skip:]
		skip = 0
		if uint64(len(p)) > left {
			p = p[:left]
		}
		if len(p) > 0 {
			list = append(list, p)
			left -= uint64(len(p))
		}
	}
	take(s.request.Local)
	for _, p := range s.request.More {
		if left == 0 {
			break
		}
		take(p)
	}
	return list
}

// sameWay reports whether two slices take the same lanes.
func (s *slice) sameWay(o *slice) bool {
	return s.peer == o.peer && s.request.Buffer.OnStorage() == o.request.Buffer.OnStorage()
}

// offset is where a slice lies in its buffer.
func (s *slice) offset() uint64 { return s.request.Offset + s.from }
