package shm

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
)

// Offsets in a ring's first page. The producer writes the first line, the consumer the second.
const (
	ringHead    = 0  // uint64: bytes written since the beginning
	ringPEnded  = 8  // uint64: not 0 when the producer was given up
	ringStarved = 16 // uint64: not 0 while the producer wants to be told of room

	ringTail   = apart     // uint64: bytes read since the beginning
	ringCEnded = apart + 8 // uint64: not 0 when the consumer was given up
)

// maxRing bounds a ring's data in bytes: more would not make anything faster.
const maxRing = 1 << 30

// ring is the memory of a stream of bytes as one process maps it: a page of counters, and data that is mapped twice in a row,
// so that what is free and what is ready are each one slice.
type ring struct {
	mem  []byte
	data []byte
	size uint64 // of data, mapped once: a power of two
	ends atomic.Int32

	// Why an end of this process was given up, to tell the other end if that is of this process, too.
	producerErr, consumerErr atomic.Pointer[error]
}

func (r *ring) word(at int) *atomic.Uint64 { return word64(r.mem, at) }

// slice is n bytes of data from a position in the stream.
func (r *ring) slice(at, n uint64) []byte {
	at &= r.size - 1
	return r.data[at : at+n : at+n]
}

// release unmaps the memory once all ends have let go of it.
func (r *ring) release() error {
	if r.ends.Add(-1) > 0 {
		return nil
	}
	return unmap(r.mem)
}

// end is what both ends of a ring are. Its mutex has Fail, which anybody may call, not meet memory that Close has unmapped.
type end struct {
	r    *ring
	peer Ringer

	mu     sync.Mutex
	closed atomic.Bool
}

// fail notes why an end was given up, and tells the peer.
func (e *end) fail(note *atomic.Pointer[error], flag int, err error) {
	if err == nil {
		err = ErrEnded
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed.Load() || !note.CompareAndSwap(nil, &err) {
		return
	}
	e.r.word(flag).Store(1)
	e.peer.Ring()
}

// close gives the end up and lets go of its memory.
func (e *end) close(note *atomic.Pointer[error], flag int) error {
	e.fail(note, flag, ErrEnded)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed.Swap(true) {
		return nil
	}
	return e.r.release()
}

// Producer is the writing end of a ring. One goroutine at a time may use it; Fail and Err may be called by any.
type Producer struct {
	end
	head, tail uint64 // tail: as last seen
	starved    bool
}

// Consumer is the reading end of a ring. One goroutine at a time may use it; Fail may be called by any.
type Consumer struct {
	end
	tail uint64
}

// NewRing makes a ring whose ends are both in this process. bytes is rounded up to a power of two, and to a page.
func NewRing(bytes int, producer, consumer Ringer) (*Producer, *Consumer, error) {
	p, f, err := CreateRing(bytes, consumer)
	if err != nil {
		return nil, nil, err
	}
	p.r.ends.Add(1)
	return p, &Consumer{end: end{r: p.r, peer: producer}}, f.Close()
}

// CreateRing makes a ring to another process, whose bell is rung when there is something to read. The file is for that
// process; who has passed it on closes it. bytes is rounded up to a power of two, and to a page.
func CreateRing(bytes int, consumer Ringer) (*Producer, *os.File, error) {
	if bytes <= 0 || bytes > maxRing {
		return nil, nil, fmt.Errorf("%w: a ring has 1 to %d bytes, not %d", ErrConfig, maxRing, bytes)
	}
	size := max(os.Getpagesize(), 1<<bits.Len(uint(bytes-1)))
	f, err := create("larder-ring", os.Getpagesize()+size)
	if err != nil {
		return nil, nil, err
	}
	r, err := mapRing(f, size)
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return &Producer{end: end{r: r, peer: consumer}}, f, nil
}

// OpenRing opens a ring that another process has created, whose bell is rung when it waits for room. The file may be closed
// afterwards.
func OpenRing(f *os.File, producer Ringer) (*Consumer, error) {
	size, err := admit(f)
	if err != nil {
		return nil, err
	}
	size -= os.Getpagesize()
	if size < os.Getpagesize() || size > maxRing || size&(size-1) != 0 {
		return nil, fmt.Errorf("%w: no ring has %d bytes of data", ErrFile, size)
	}
	r, err := mapRing(f, size)
	if err != nil {
		return nil, err
	}
	return &Consumer{end: end{r: r, peer: producer}}, nil
}

func mapRing(f *os.File, size int) (*ring, error) {
	mem, err := mapTwice(f, os.Getpagesize(), size)
	if err != nil {
		return nil, err
	}
	r := &ring{mem: mem, data: mem[os.Getpagesize():], size: wide(size)}
	r.ends.Store(1)
	return r, nil
}

// Size is the ring's capacity in bytes.
func (p *Producer) Size() int { return narrow(p.r.size) }

// Free is the memory to write next: half of the ring at least, or all that is free, which may be nothing. A producer that finds less
// than half of the ring free has its bell rung when there is more: who waits for room waits for no more than half.
func (p *Producer) Free() []byte {
	if p.closed.Load() || p.r.producerErr.Load() != nil {
		return nil
	}
	if p.free() < p.r.size/2 {
		p.tail = p.r.word(ringTail).Load()
		if p.free() < p.r.size/2 && !p.starved {
			p.starve(true)
			p.tail = p.r.word(ringTail).Load() // the consumer that has not seen it may have stored before
		}
	}
	if p.free() > p.r.size { // or the consumer has read what was not written
		p.Fail(fmt.Errorf("%w: its reader has read %d of %d bytes", ErrCorrupt, p.tail, p.head))
		return nil
	}
	if p.starved && p.free() >= p.r.size/2 {
		p.starve(false)
	}
	return p.r.slice(p.head, p.free())
}

func (p *Producer) free() uint64 { return p.r.size - (p.head - p.tail) }

func (p *Producer) starve(on bool) {
	p.starved = on
	n := uint64(0)
	if on {
		n = 1
	}
	p.r.word(ringStarved).Store(n)
}

// Commit makes the first n bytes of Free visible to the consumer, and rings its bell.
func (p *Producer) Commit(n int) {
	if n < 0 || wide(n) > p.free() {
		panic(fmt.Sprintf("shm: commit of %d bytes where %d are free", n, p.free()))
	}
	if n == 0 || p.closed.Load() {
		return
	}
	p.head += wide(n)
	p.r.word(ringHead).Store(p.head)
	p.peer.Ring()
}

// Err is why writing makes no sense any more: this end was given up, or the other was.
func (p *Producer) Err() error {
	if err := p.r.producerErr.Load(); err != nil {
		return *err
	}
	if err := p.r.consumerErr.Load(); err != nil {
		return *err
	}
	if p.closed.Load() || p.r.word(ringCEnded).Load() != 0 {
		return ErrEnded
	}
	return nil
}

// Fail gives this end up, since its peer is dead, say: Err is err, and the consumer's too if it is of this process and
// ErrEnded otherwise, once it has read what there is. The first reason stays.
func (p *Producer) Fail(err error) { p.fail(&p.r.producerErr, ringPEnded, err) }

// Close gives this end up and lets go of the memory. Slices from Free must not be touched any more.
func (p *Producer) Close() error { return p.close(&p.r.producerErr, ringPEnded) }

// Size is the ring's capacity in bytes.
func (c *Consumer) Size() int { return narrow(c.r.size) }

// Ready is what can be read, all of it, which may be nothing. The bytes stay until Consume; a producer that has gone mad may
// change them, so what decodes them takes a copy of what it checks.
func (c *Consumer) Ready() []byte {
	if c.closed.Load() {
		return nil
	}
	n := c.r.word(ringHead).Load() - c.tail
	if n > c.r.size {
		c.Fail(fmt.Errorf("%w: its writer has written %d bytes into a ring of %d", ErrCorrupt, n, c.r.size))
		return nil
	}
	return c.r.slice(c.tail, n)
}

// Consume gives the first n bytes of Ready back to the producer, and rings its bell if it waits for room.
func (c *Consumer) Consume(n int) {
	if n < 0 || wide(n) > c.r.size {
		panic(fmt.Sprintf("shm: consume %d bytes of a ring of %d", n, c.r.size))
	}
	if n == 0 || c.closed.Load() {
		return
	}
	c.tail += wide(n)
	c.r.word(ringTail).Store(c.tail)
	if c.r.word(ringStarved).Load() != 0 {
		c.peer.Ring()
	}
}

// Err is not nil when Ready is empty and no more will come: the producer was given up, or this end.
func (c *Consumer) Err() error {
	err := c.Ended()
	if err != nil && !errors.Is(err, ErrCorrupt) && len(c.Ready()) > 0 { // looked at after the end: there is no more behind it
		return nil
	}
	return err
}

// Ended is why no more will be written, whatever there is still to be read, or nil.
func (c *Consumer) Ended() error {
	if err := c.r.consumerErr.Load(); err != nil {
		return *err
	}
	if err := c.r.producerErr.Load(); err != nil {
		return *err
	}
	if c.closed.Load() || c.r.word(ringPEnded).Load() != 0 {
		return ErrEnded
	}
	return nil
}

// Fail gives this end up, since its peer is dead, say: the producer sees it at once, Err of this end once all that is there has
// been read. The first reason stays.
func (c *Consumer) Fail(err error) { c.fail(&c.r.consumerErr, ringCEnded, err) }

// Close gives this end up and lets go of the memory. Slices from Ready must not be touched any more.
func (c *Consumer) Close() error { return c.close(&c.r.consumerErr, ringCEnded) }
