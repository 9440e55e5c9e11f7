package maru

import (
	"slices"
	"time"
)

// attempt serves what is open of the burst, in order, here or at the leader. What found none stays open.
func (c *conn) attempt(deadline time.Time) {
	if c.term = c.s.index.Term(); c.term == 0 {
		if !c.member {
			c.forward(deadline)
		}
		return
	}
	for i := range c.slots[:c.n] {
		x := &c.slots[i]
		if x.state != open || !c.open(x) {
			continue
		}
		if !c.local(x, deadline.Add(-x.age)) {
			break // what follows must not overtake it
		}
	}
	if c.inLog.wait(c.ctx) {
		c.confirm()
		c.inDoubt()
	}
}

// confirm settles what was read, if this member led meanwhile. Otherwise it is read again, unless what came behind it has
// been carried out.
func (c *conn) confirm() {
	if !slices.ContainsFunc(c.slots[:c.n], func(x slot) bool { return x.state == read }) {
		return
	}
	leads, behind := c.s.index.Confirm(c.ctx, c.term), false
	for i := c.n - 1; i >= 0; i-- {
		x := &c.slots[i]
		behind = behind || x.state == settled && x.h.Type.Mutates()
		switch {
		case x.state != read:
		case leads:
			x.state = settled
		case behind:
			c.fail(x, &x.h)
		default:
			x.state = open
		}
	}
}

// inDoubt has no request wait for another attempt that may already have been carried out, if that would do it twice.
func (c *conn) inDoubt() {
	for i := range c.slots[:c.n] {
		if x := &c.slots[i]; x.state == open && x.again && !repeatable(x.h.Type) {
			c.fail(x, &x.h)
		}
	}
}

// repeatable reports whether a request may be carried out again when nobody knows whether it was: those that change
// nothing, and those that find what they have done. A pin would count twice.
func repeatable(t Type) bool {
	switch t {
	case Pin, BatchPin, Unpin, BatchUnpin, RequestAlloc, ReportStats:
		return false
	default:
		return true
	}
}

// local serves a request, which c.q holds, as the leader. It returns false if those behind it must wait.
func (c *conn) local(x *slot, deadline time.Time) bool {
	switch t := x.h.Type; {
	case t == ReportStats:
		c.s.Stats.Record(c.q.Reports)
		c.reply(x, func(b []byte) []byte { return appendBool(appendStr(append(b, 0x81), "success"), true) })
		return true
	case t == RequestAlloc:
		return c.inLog.wait(c.ctx) && c.alloc(x, deadline)
	case t.Mutates():
		return c.log(x, deadline)
	case t.reads():
		if c.pending() {
			return c.log(x, deadline)
		}
	default: // a list of all
		if !c.inLog.wait(c.ctx) {
			return false
		}
	}
	b, mark := beginReply(x.reply[:0], x.h)
	b, outcome := c.s.index.Read(&c.q, b)
	switch outcome {
	case Done:
		x.reply, x.state = endReply(b, mark), read
	case Later:
		return c.log(x, deadline)
	case Failed:
		c.fail(x, &x.h)
		x.state = read
	default:
		return false
	}
	return true
}

// pending reports whether requests of the burst are in the log.
func (c *conn) pending() bool {
	c.inLog.mu.Lock()
	defer c.inLog.mu.Unlock()
	return c.inLog.n > 0
}

// log has a request decided in the log's order.
func (c *conn) log(x *slot, deadline time.Time) bool {
	x.state = logged
	c.inLog.add()
	c.s.index.Log(&c.q, x.again, deadline.Sub(now()), func(o Outcome, payload func(b []byte) []byte) {
		c.logged(x, o, payload)
		c.inLog.done()
	})
	return true
}

// logged takes the outcome of what was logged. It is called from another goroutine while the connection's own waits, or
// works on other slots.
func (c *conn) logged(x *slot, o Outcome, payload func(b []byte) []byte) {
	switch o {
	case Done:
		c.reply(x, payload)
	case Doubt:
		x.state, x.again = open, true
	case Elsewhere:
		x.state = open
	default:
		if x.h.Type.Mutates() {
			c.s.Late.Add(1)
		}
		c.fail(x, &x.h)
	}
}

// alloc carries out a REQUEST_ALLOC. What is in front of it has been decided.
func (c *conn) alloc(x *slot, deadline time.Time) bool {
	h, o := c.s.index.Alloc(c.ctx, &c.client, &c.q, deadline.Sub(now()))
	switch o {
	case Done, Refused:
		c.reply(x, func(b []byte) []byte { return appendAlloc(b, h, o == Done) })
	case Elsewhere:
		return false
	default:
		c.fail(x, &x.h)
	}
	return true
}
