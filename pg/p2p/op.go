package p2p

import "sync/atomic"

// Any is the rank of a receive that takes messages from whomever they come, AnyTag the tag of one that takes them whatever their
// tag is. No message can be sent with AnyTag.
const (
	Any    = -1
	AnyTag = ^uint64(0)
)

// Op is a send or a receive. Its buffer belongs to it until it is done.
type Op struct {
	rank int // the peer; Any of a receive that has not been matched
	tag  uint64
	buf  []byte
	seq  uint64 // of a receive: the order of posting
	id   uint64 // of the ask
	sent int    // bytes of a granted message that are in the ring, or have come out of it
	size int    // of the message; of a granted send: what was granted
	room int    // of a receive that was granted: what it has room for of the message
	done atomic.Bool
	err  error
}

// Done reports whether the operation has ended. It may be called by any goroutine; the other methods once Done is true.
func (o *Op) Done() bool { return o.done.Load() }

// Err is nil if it has succeeded: a [*DownError], a [*TruncateError], or [ErrClosed] otherwise.
func (o *Op) Err() error { return o.err }

// From is who has sent what was received; of a send it is the receiver.
func (o *Op) From() int { return o.rank }

// Tag is the message's.
func (o *Op) Tag() uint64 { return o.tag }

// Len is how many bytes of the buffer were filled, or sent.
func (o *Op) Len() int { return min(len(o.buf), o.size) }

// matches reports whether a receive takes a message with that tag.
func (o *Op) matches(tag uint64) bool { return o.tag == AnyTag || o.tag == tag }

// fifo is a queue that grows as needed and does not move what is in it.
type fifo[T any] struct {
	list []T
	head int
}

func (q *fifo[T]) push(v T)    { q.list = append(q.list, v) }
func (q *fifo[T]) empty() bool { return q.head == len(q.list) }
func (q *fifo[T]) first() T    { return q.list[q.head] }

func (q *fifo[T]) pop() T {
	var zero T
	v := q.list[q.head]
	q.list[q.head] = zero
	if q.head++; q.head == len(q.list) {
		q.list, q.head = q.list[:0], 0
	} else if q.head > 64 && q.head > len(q.list)/2 { // what is left moves down, once for each that was taken
		n := copy(q.list, q.list[q.head:])
		clear(q.list[n:])
		q.list, q.head = q.list[:n], 0
	}
	return v
}

// drain empties the queue.
func (q *fifo[T]) drain() []T {
	rest := q.list[q.head:]
	*q = fifo[T]{}
	return rest
}
