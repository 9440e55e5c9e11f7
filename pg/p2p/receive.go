package p2p

import "slices"

// receive takes a message that is there, or posts the receive.
func (l *lane) receive(o *Op) {
	i := l.findKept(o, false)
	switch {
	case i >= 0:
		l.take(o, i)
	case l.err != nil:
		l.port.end(o, l.err)
	default:
		l.posted = append(l.posted, o)
		if l.p == nil {
			l.connect()
		}
	}
}

// findKept is which of the kept messages a receive takes, or -1. A message that was lost with its sender fails the receive that names
// the sender; one from anybody leaves it, and what would overtake it.
func (l *lane) findKept(o *Op, anybody bool) int {
	i := slices.IndexFunc(l.kept, func(m *message) bool { return o.matches(m.frame.tag) })
	if i >= 0 && anybody && l.kept[i].lost {
		return -1
	}
	return i
}

// take gives a receive the i-th of the kept messages.
func (l *lane) take(o *Op, i int) {
	m := l.kept[i]
	l.kept = slices.Delete(l.kept, i, i+1)
	switch {
	case m.lost:
		l.port.end(o, l.err)
	case m.frame.kind == ask:
		l.in.asks--
		l.agree(o, m.frame)
		l.flush()
	case l.in.keep == m: // the rest goes straight to where it belongs
		l.in.keep, l.in.op = nil, o
		got := m.frame.size - l.in.left
		l.meet(o, m.frame)
		l.in.dst = o.buf[min(copy(o.buf, m.buf[:got]), len(o.buf)):min(len(o.buf), m.frame.size)]
	default:
		l.meet(o, m.frame)
		copy(o.buf, m.buf)
		l.received(o)
		l.flush()
	}
}

// meet notes which message a receive takes. An eager one's room is free again.
func (l *lane) meet(o *Op, f frame) {
	o.rank, o.tag, o.size, o.id = l.rank, f.tag, f.size, f.id
	if f.kind == eager {
		l.in.credit += span(f.size)
		l.out.owed += span(f.size)
	}
}

// agree answers an ask.
func (l *lane) agree(o *Op, f frame) {
	l.meet(o, f)
	o.room = min(f.size, len(o.buf))
	l.out.grants.push(frame{kind: grant, size: o.room, id: f.id})
	if o.room == 0 {
		l.received(o)
		return
	}
	l.in.taking[f.id] = o
}

// received ends a receive that has all it can have.
func (l *lane) received(o *Op) {
	if o.size > len(o.buf) {
		l.port.end(o, &TruncateError{From: l.rank, Tag: o.tag, Bytes: o.size, Buffer: len(o.buf)})
		return
	}
	l.port.end(o, nil)
}

// read takes what has come, no more than a ring's fill, and reports whether it was anything.
func (l *lane) read() (moved bool) {
	for budget := l.c.Size(); budget > 0; {
		ready := l.c.Ready()
		n := 0
		switch {
		case l.in.busy:
			n = l.gulp(ready, 0)
		case len(ready) >= headerBytes:
			n = l.begun(ready)
		}
		if l.err != nil {
			return true
		}
		if n == 0 {
			if err := l.c.Ended(); err != nil && len(l.c.Ready()) == len(ready) { // half a frame, perhaps
				l.down(err)
				return true
			}
			return moved
		}
		moved = true
		budget -= n
	}
	return moved
}

// begun takes a header, and what has come with it.
func (l *lane) begun(ready []byte) int {
	var b [headerBytes]byte
	copy(b[:], ready) // a peer that has gone mad may change it
	f, err := parse(b[:])
	if err != nil {
		l.broken("%s", err)
		return 0
	}
	in := &l.in
	in.frame, in.busy, in.left = f, true, f.body()
	in.pad = span(f.body()) - headerBytes - f.body()
	in.dst, in.op, in.keep = nil, nil, nil
	if l.admit(f); l.err != nil {
		return 0
	}
	return l.gulp(ready, headerBytes)
}

// gulp takes what is there of the frame, behind so many bytes that have been looked at.
func (l *lane) gulp(ready []byte, at int) int {
	in := &l.in
	n := min(len(ready)-at, stepBytes-at, in.left)
	in.dst = in.dst[copy(in.dst, ready[at:at+n]):]
	in.left -= n
	n += at
	if in.left == 0 {
		pad := min(in.pad, len(ready)-n)
		in.pad -= pad
		n += pad
	}
	l.c.Consume(n)
	if in.left == 0 && in.pad == 0 {
		l.arrived()
	}
	return n
}

// admit decides what becomes of a frame whose header has come.
func (l *lane) admit(f frame) {
	in := &l.in
	switch f.kind {
	case grant, credit: // there is nothing to keep
	case eager:
		if span(f.size) > in.credit {
			l.broken("more messages than there is room for")
			return
		}
		in.credit -= span(f.size)
		if in.op = l.port.match(l, f.tag); in.op != nil {
			l.meet(in.op, f)
			in.dst = in.op.buf[:min(len(in.op.buf), f.size)]
			return
		}
		in.keep = l.keep(f)
		in.dst = in.keep.buf
	case ask:
		if f.id != in.ids+1 || in.asks >= maxAsks {
			l.broken("ask %d behind %d, with %d unanswered", f.id, in.ids, in.asks)
			return
		}
		in.ids = f.id
	case data:
		op := in.taking[f.id]
		if op == nil || f.size > op.room-op.sent {
			l.broken("%d bytes that nobody has asked for", f.size)
			return
		}
		if in.op = op; op.buf != nil { // as it is of one that was canceled
			in.dst = op.buf[op.sent : op.sent+f.size]
		}
	}
}

// keep keeps a message without a receive.
func (l *lane) keep(f frame) *message {
	l.port.seen++
	m := &message{frame: f, seq: l.port.seen}
	if f.kind == eager {
		m.buf = make([]byte, f.size)
	}
	l.kept = append(l.kept, m)
	return m
}

// arrived is called when all of a frame has come.
func (l *lane) arrived() {
	in := &l.in
	f, op := in.frame, in.op
	in.busy, in.op, in.keep, in.dst = false, nil, nil, nil
	switch f.kind {
	case eager:
		if op != nil {
			l.received(op)
		}
	case ask:
		if op = l.port.match(l, f.tag); op != nil {
			l.agree(op, f)
			return
		}
		in.asks++
		l.keep(f)
	case grant:
		l.granted(f)
	case data:
		if op.sent += f.size; op.sent == op.room {
			delete(in.taking, f.id)
			l.received(op)
		}
	case credit:
		l.credited(f)
	}
}
