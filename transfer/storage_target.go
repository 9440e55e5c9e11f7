package transfer

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Bounds of what one connection has under way in storage.
const (
	storageRequests = 32              // as many as an SSD's queue needs to be busy
	storageBytes    = 2 * windowBytes // of staging memory; a peer of this release asks for half
)

// storing is a connection's requests for storage. Its reader begins them, and they are carried out beside each other; a
// goroutine answers in their order. While there are any, nobody else writes to the connection.
type storing struct {
	answers chan *stored
	ended   chan struct{}  // closed when the goroutine has ended
	pending sync.WaitGroup // those that have not been answered
	count   atomic.Int64
	bytes   atomic.Int64 // of staging memory
	moved   atomic.Int64 // answers, ever
	broken  bool         // an answer could not be written: the rest is not
}

// stored is a request for storage, under way or refused.
type stored struct {
	seq  uint64
	op   Op
	sums bool
	job  *storageJob // nil if err is not
	err  error
}

// store carries out a request for storage. The error says that the connection is to end.
func (c *served) store(h *header, op Op) error {
	if err := c.memoryFirst(h.seq); err != nil {
		return err
	}
	n := h.length
	if op == Write {
		n = h.body
	}
	a := &stored{seq: h.seq, op: op, sums: h.sum != 0}
	if _, a.err = c.t.e.find(op, Handle{h.buffer, h.gen}, h.off, uint64(n)); a.err != nil {
		if err := c.s.discard(h.body); err != nil {
			return err
		}
		c.enqueue(a)
		return nil
	}
	if int64(n)+c.storing.bytes.Load() > storageBytes {
		c.storing.pending.Wait() // a peer that asks for more gets it piece by piece
	}
	mem, err := c.t.e.staging.get(int(n), c.ctx.Done())
	if err != nil {
		return err
	}
	if op == Write {
		if err := c.s.readBody([][]byte{mem}); err != nil {
			c.t.e.staging.put(mem)
			return err
		}
		if good, err := fits(h.sum, [][]byte{mem}); err != nil || !good {
			a.err = ErrChecksum
		}
	}
	if a.err == nil {
		a.job, a.err = c.t.e.store(op, Handle{h.buffer, h.gen}, h.off, mem)
	}
	if a.err != nil {
		c.t.e.staging.put(mem)
	}
	c.enqueue(a)
	return nil
}

// memoryFirst answers the requests for memory that came before number seq.
func (c *served) memoryFirst(seq uint64) error {
	if len(c.reading) > 0 {
		return c.flush(seq - 1)
	}
	return c.acknowledge()
}

// storageFirst waits until requests for storage that came earlier are answered.
func (c *served) storageFirst() {
	if c.storing.answers != nil {
		c.storing.pending.Wait()
	}
}

// enqueue has a request answered when its turn comes.
func (c *served) enqueue(a *stored) {
	q := &c.storing
	if q.answers == nil {
		q.answers, q.ended = make(chan *stored, storageRequests), make(chan struct{})
		go c.answerStored()
	}
	if a.job != nil {
		q.bytes.Add(int64(len(a.job.mem)))
	}
	q.count.Add(1)
	q.pending.Add(1)
	q.answers <- a
}

// answerStored answers requests for storage in their order.
func (c *served) answerStored() {
	q := &c.storing
	defer close(q.ended)
	for a := range q.answers {
		if a.job != nil {
			<-a.job.done
			a.err = a.job.err
		}
		if !q.broken {
			if err := c.answerOne(a); err != nil {
				q.broken = true
				c.interrupt()
			}
		}
		if a.job != nil {
			q.bytes.Add(-int64(len(a.job.mem)))
			c.t.e.staging.put(a.job.mem)
		}
		q.moved.Add(1)
		q.count.Add(-1)
		q.pending.Done()
	}
}

// answerOne writes the answer to one request.
func (c *served) answerOne(a *stored) error {
	if a.err != nil {
		return c.refuse(a.seq, a.err)
	}
	answer := header{kind: frameAck, seq: a.seq}
	frames := [][]byte{c.out[:]}
	if a.op == Read {
		answer.kind, answer.body = frameData, uint32(len(a.job.mem)) //nolint:gosec // at most maxSlice
		if a.sums {
			answer.sum, _ = sumOf(a.job.mem) // staging memory cannot be truncated
		}
		frames = append(frames, a.job.mem)
	}
	answer.encode(c.out[:])
	c.torn = true
	if err := c.s.write(frames); err != nil {
		return err
	}
	c.torn, c.done = false, a.seq
	c.t.e.counters.served[a.op].add(uint64(len(a.job.mem)))
	return nil
}

// endStorage waits until nothing of the connection is under way in storage. Its reader has ended.
func (c *served) endStorage() {
	if c.storing.answers != nil {
		close(c.storing.answers)
		<-c.storing.ended
	}
}

// maxReason bounds the text of an error that goes to a peer, in bytes.
const maxReason = 512

// reason is what a peer is told of an error beyond its code: only a storage's errors say more.
func reason(err error) string {
	if !errors.Is(err, ErrStorage) && !errors.Is(err, ErrMissing) {
		return ""
	}
	text := err.Error()
	return text[:min(len(text), maxReason)]
}

// peerError is an error that a peer has explained.
type peerError struct {
	kind error
	text string
}

// Error implements error.
func (e *peerError) Error() string { return fmt.Sprintf("the peer says: %.*q", maxReason, e.text) }

// Unwrap gives what it can be compared with.
func (e *peerError) Unwrap() error { return e.kind }
