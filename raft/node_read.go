package raft

import (
	"context"
	"time"
)

// confirmCap bounds the deadline of Confirm beside half an election timeout. A
// caller needs it for the microseconds between its read and its check; a transfer
// of leadership has to wait for what was given out.
const confirmCap = 250 * time.Millisecond

// readRound is one question to the cluster, shared by all who asked before it was
// put.
type readRound struct {
	ctx      uint64
	started  int64  // boottime before it was put
	leadTerm uint64 // of this member at that time, 0 if it followed
	age      int    // ticks since
	done     chan struct{}
	// Valid after done.
	index     uint64
	confirmed bool // answered while this member led, in the same term
}

// readState holds the round that is on its way, and the one that collects callers.
type readState struct {
	ctx     uint64
	current *readRound
	next    *readRound
}

// joinRead enters the round that will be put next. Called with the lock.
func (n *Node) joinRead() *readRound {
	if n.reads.next == nil {
		n.reads.next = &readRound{done: make(chan struct{})}
	}
	r := n.reads.next
	if n.reads.current == nil {
		n.putRead()
	}
	return r
}

// putRead puts the next round. Called with the lock.
func (n *Node) putRead() {
	n.reads.current, n.reads.next = n.reads.next, nil
	if n.reads.current != nil {
		n.askRead()
	}
}

// askRead asks the current round's question, under a new context each time: an
// answer to an older one must not pass for it.
func (n *Node) askRead() {
	r := n.reads.current
	n.reads.ctx++
	r.ctx, r.age = n.reads.ctx, 0
	r.leadTerm = n.core.leadTerm
	r.started = n.cfg.Boottime()
	n.core.ReadIndex(r.ctx)
	n.stats.readRounds.Add(1)
	n.poke()
}

// readDone is raft's answer. Called with the lock.
func (n *Node) readDone(ctx, index uint64) {
	r := n.reads.current
	if r == nil || r.ctx != ctx {
		return
	}
	r.index = index
	r.confirmed = r.leadTerm != 0 && r.leadTerm == n.core.leadTerm
	close(r.done)
	n.reads.current = nil
	n.putRead()
}

// readTick asks again when the answer may have been lost. Called with the lock.
func (n *Node) readTick() {
	r := n.reads.current
	if r == nil {
		return
	}
	r.age++
	if r.age >= max(n.core.cfg.ElectionTicks/2, 2) || r.leadTerm != n.core.leadTerm {
		n.askRead()
	}
}

// ReadIndex returns an index that this member has applied, such that a read of its
// state now sees everything that was acknowledged before the call. Any member may
// be asked. It lasts until there is a leader or ctx ends.
func (n *Node) ReadIndex(ctx context.Context) (uint64, error) {
	n.mu.Lock()
	r := n.joinRead()
	n.mu.Unlock()
	if err := n.waitRead(ctx, r); err != nil {
		return 0, err
	}
	return r.index, nil
}

// waitRead waits for the answer, and until its index is applied.
func (n *Node) waitRead(ctx context.Context, r *readRound) error {
	select {
	case <-r.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-n.done:
		return ErrStopped
	}
	return n.waitApplied(ctx, r.index)
}

func (n *Node) waitApplied(ctx context.Context, index uint64) error {
	if n.Applied() >= index {
		return nil
	}
	for {
		ch := n.applied.wait()
		if n.Applied() >= index {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		case <-n.done:
			return ErrStopped
		}
	}
}

// confirmSpan is how long after the start of a round its answer can be relied on.
//
// A voter that answers a heartbeat refuses to elect anybody for ElectionTicks
// ticks of its own, of which the first may come at once and the last be early by
// one: at least ElectionTicks-2 tick lengths. Half of ElectionTicks leaves more
// than any drift between two clocks. A voter that restarts keeps that promise by
// refusing votes at first (Core.Step), and a transfer of leadership, which does
// not ask for it, waits for every deadline that was given (TransferLeadership).
func (n *Node) confirmSpan() int64 {
	return min(int64(n.core.cfg.ElectionTicks)*int64(n.cfg.Tick)/2, int64(confirmCap))
}

// Confirm proves that this member leads, by asking a quorum after the call began.
// The caller then reads its state, and after that answers only if the clock
// Boottime is still below the deadline: until then no other leader can exist. On
// any other member, and when leadership moves meanwhile, a NotLeaderError;
// ErrTransferring while leadership is handed over.
//
// Callers that come during a round share the next one. A sole voter needs none.
func (n *Node) Confirm(ctx context.Context) (deadline int64, err error) {
	if now := n.cfg.Boottime(); n.solo.Load() { // in this order: see updateSolo
		return now + n.confirmSpan(), nil
	}
	for {
		n.mu.Lock()
		r, err := n.joinConfirm()
		n.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if err := n.waitConfirm(ctx, r); err != nil {
			return 0, err
		}
		deadline = r.started + n.confirmSpan()
		n.mu.Lock()
		again := !r.confirmed || n.cfg.Boottime() >= deadline
		if !again && n.fenced {
			n.mu.Unlock()
			return 0, ErrTransferring
		}
		if !again {
			n.deadline = max(n.deadline, deadline)
		}
		n.mu.Unlock()
		if !again {
			return deadline, nil
		}
	}
}

func (n *Node) joinConfirm() (*readRound, error) {
	switch {
	case n.Err() != nil:
		return nil, ErrStopped
	case n.core.leadTerm == 0:
		return nil, &NotLeaderError{Leader: n.core.soft.Lead}
	case n.fenced:
		return nil, ErrTransferring
	}
	return n.joinRead(), nil
}

// waitConfirm is waitRead for a leader: it gives up when leadership is lost, for
// then the round asks another member.
func (n *Node) waitConfirm(ctx context.Context, r *readRound) error {
	for {
		tick := n.ticks.wait()
		if id, self := n.Leader(); !self {
			return &NotLeaderError{Leader: id}
		}
		select {
		case <-r.done:
			return n.waitApplied(ctx, r.index)
		case <-tick:
		case <-ctx.Done():
			return ctx.Err()
		case <-n.done:
			return ErrStopped
		}
	}
}

// updateSolo follows whether this member is the only voter and ready. Called with
// the lock. When that ends, deadlines given without a round may still stand, for
// as long as one that is given now.
func (n *Node) updateSolo() {
	c := n.core
	solo := false
	if c.leadTerm != 0 && c.apply.announced.Load() == c.leadTerm && n.Err() == nil {
		cur := c.log.confs.newest()
		_, member := cur.find(c.cfg.ID)
		solo = member && cur.voters() == 1
	}
	if n.solo.Load() != solo {
		n.solo.Store(solo)
		if !solo {
			n.deadline = max(n.deadline, n.cfg.Boottime()+n.confirmSpan())
		}
	}
}
