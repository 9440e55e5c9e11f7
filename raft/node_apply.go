package raft

import (
	"fmt"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/raft/v3/raftpb"
)

// applyItem is work for the apply goroutine: committed entries, or a function.
type applyItem struct {
	msg *pb.Message
	fn  func() error
}

// applyQueue is unbounded in form; raft bounds the bytes that are outstanding in
// it (maxApplying), and functions are few.
type applyQueue struct {
	mu     sync.Mutex
	cond   *sync.Cond
	items  []applyItem
	due    bool // a flush
	closed bool
}

func (q *applyQueue) init() { q.cond = sync.NewCond(&q.mu) }

// push adds an item; false means that nobody will do it.
func (q *applyQueue) push(it applyItem) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.items = append(q.items, it)
	q.cond.Signal()
	return true
}

func (q *applyQueue) flush() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.due = true
	q.cond.Signal()
}

func (q *applyQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cond.Signal()
}

// take waits for work. Ok is false when the queue is closed; what was still in it
// is dropped, since the log has it.
func (q *applyQueue) take(buf []applyItem) (items []applyItem, flush, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) == 0 && !q.due && !q.closed {
		q.cond.Wait()
	}
	items, q.items = q.items, buf[:0]
	flush, q.due = q.due, false
	return items, flush, !q.closed
}

func (q *applyQueue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}

// applyLoop is the goroutine that calls the Machine.
func (n *Node) applyLoop() {
	defer n.wg.Done()
	defer n.fail(ErrStopped) // also when Pebble ended this goroutine
	var buf []applyItem
	for {
		items, flush, ok := n.queue.take(buf)
		if !ok {
			return
		}
		if err := n.applyItems(items); err != nil {
			n.fail(err)
			return
		}
		if flush {
			if err := n.flush(); err != nil {
				n.fail(err)
				return
			}
		}
		clear(items)
		buf = items
	}
}

// applyItems does the work, and reports applied entries to raft together.
func (n *Node) applyItems(items []applyItem) error {
	pending := 0
	report := func(upto int) error {
		n.applied.signal()
		n.sample.end(n.Applied(), n.cfg.Boottime, &n.stats.applies)
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, it := range items[pending:upto] {
			if it.msg == nil {
				continue
			}
			if err := n.core.appliedDone(it.msg); err != nil {
				return err
			}
		}
		pending = upto
		n.updateSolo()
		return nil
	}
	for i, it := range items {
		if it.msg != nil {
			if err := n.core.applyEntries(it.msg); err != nil {
				return err
			}
			continue
		}
		if err := report(i); err != nil { // a function may wait for what raft does with it
			return err
		}
		if err := it.fn(); err != nil {
			return err
		}
	}
	if err := report(len(items)); err != nil {
		return err
	}
	n.poke()
	return nil
}

// flush makes the Machine write its state, and cuts the log.
func (n *Node) flush() error {
	if n.cfg.Store.health.critical.Load() {
		return nil // it would only fill the disk; the log has everything
	}
	index, err := n.cfg.Core.Machine.Flush()
	if err != nil {
		return fmt.Errorf("raft: flush the state: %w", err)
	}
	n.mu.Lock() // raft must not see the log change in the middle of a step
	defer n.mu.Unlock()
	return n.core.flushed(index)
}

// runApply runs fn on the apply goroutine, after what was queued before, and
// waits. It is called by the loop, without the lock, and by snapshot senders.
func (n *Node) runApply(fn func() error) error {
	done := make(chan error, 1)
	var claimed atomic.Bool // by whoever comes first: the apply goroutine, or us giving up
	run := func() error {
		if !claimed.CompareAndSwap(false, true) {
			return nil
		}
		err := ErrStopped // if Pebble ends the goroutine
		defer func() { done <- err }()
		err = fn()
		return nil
	}
	if !n.queue.push(applyItem{fn: run}) {
		return ErrStopped
	}
	select {
	case err := <-done:
		n.applied.signal()
		return err
	case <-n.done:
		if claimed.CompareAndSwap(false, true) {
			return ErrStopped
		}
		return <-done // it is running
	}
}

// broadcast wakes everybody who waits, again and again.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

// wait returns a channel that the next signal closes. Look at the condition after
// calling it, not before.
func (b *broadcast) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

// signal costs nothing when nobody waits.
func (b *broadcast) signal() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
