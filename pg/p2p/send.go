package p2p

// creditBatch is how much credit is given back at once: little enough that the sender does not run out, and so much that
// nearly no frames are spent on it.
const creditBatch = creditBytes / 4

// send begins a send.
func (l *lane) send(o *Op) {
	if l.err != nil {
		l.port.end(o, l.err)
		return
	}
	l.out.queue.push(o)
	if l.p != nil || l.connect() {
		l.flush()
	}
}

// flush writes what there is room for, and reports whether it was anything. Answers go first, then messages in their order, then
// parts of long ones.
func (l *lane) flush() (moved bool) {
	if l.p == nil || l.err != nil || l.idle() {
		return false
	}
	if err := l.p.Err(); err != nil {
		l.lastWords()
		l.down(err)
		return true
	}
	for budget := l.p.Size(); budget > 0; {
		n := 0
		switch {
		case l.out.kind != 0:
			n = l.pour(0)
		case len(l.p.Free()) >= headerBytes:
			n = l.next()
		}
		if n == 0 {
			break
		}
		moved = true
		budget -= n
	}
	return moved
}

// idle reports whether there is nothing to write.
func (l *lane) idle() bool {
	o := &l.out
	return o.kind == 0 && o.queue.empty() && o.grants.empty() && o.ready.empty() && o.owed < creditBatch
}

// next begins the frame that comes next.
func (l *lane) next() int {
	o := &l.out
	switch {
	case o.owed >= creditBatch:
		f := frame{kind: credit, size: o.owed}
		o.owed = 0
		return l.begin(f, nil, nil)
	case !o.grants.empty():
		return l.begin(o.grants.pop(), nil, nil)
	case !o.queue.empty() && (l.isEager(o.queue.first()) || len(o.asked) < maxAsks):
		return l.announce(o.queue.pop())
	case !o.ready.empty():
		op := o.ready.first()
		n := min(op.size-op.sent, partBytes)
		return l.begin(frame{kind: data, size: n, id: op.id}, op.buf[op.sent:op.sent+n], op)
	}
	return 0
}

// isEager reports whether a message can be sent without asking.
func (l *lane) isEager(op *Op) bool {
	return op.size <= eagerBytes && span(op.size) <= l.out.credit
}

// announce sends a message, or asks whether it may.
func (l *lane) announce(op *Op) int {
	o := &l.out
	if l.isEager(op) {
		o.credit -= span(op.size)
		return l.begin(frame{kind: eager, tag: op.tag, size: op.size}, op.buf, op)
	}
	o.ids++
	op.id = o.ids
	o.asked[op.id] = op
	return l.begin(frame{kind: ask, tag: op.tag, size: op.size, id: op.id}, nil, nil)
}

// begin writes a header, for which there is room, and as much of the body as goes with it.
func (l *lane) begin(f frame, body []byte, op *Op) int {
	o := &l.out
	f.put(l.p.Free())
	o.kind, o.op, o.body, o.pad = f.kind, op, body, span(f.body())-headerBytes-f.body()
	return l.pour(headerBytes)
}

// pour writes what is left of the frame, behind so many bytes that lie in the ring already.
func (l *lane) pour(at int) int {
	o := &l.out
	free := l.p.Free()
	free = free[:min(len(free), stepBytes)]
	n := copy(free[at:], o.body)
	o.body = o.body[n:]
	n += at
	if len(o.body) == 0 {
		pad := min(o.pad, len(free)-n)
		o.pad -= pad
		n += pad
	}
	l.p.Commit(n)
	if len(o.body) == 0 && o.pad == 0 {
		l.sent()
	}
	return n
}

// sent is called when a frame is in the ring.
func (l *lane) sent() {
	o := &l.out
	op, kind := o.op, o.kind
	o.op, o.body, o.kind = nil, nil, 0
	if kind == eager {
		l.port.end(op, nil)
	}
	if kind == data {
		op.sent += min(op.size-op.sent, partBytes)
		if op.sent == op.size {
			o.ready.pop()
			l.port.end(op, nil)
		}
	}
}

// granted takes the answer to an ask.
func (l *lane) granted(f frame) {
	op := l.out.asked[f.id]
	switch {
	case op == nil:
		l.broken("the answer to a message that does not wait for one")
		return
	case f.size > op.size:
		l.broken("room for %d bytes of a message of %d", f.size, op.size)
		return
	}
	delete(l.out.asked, f.id)
	op.size = f.size
	if f.size == 0 { // nothing of it, or nothing in it
		l.port.end(op, nil)
		return
	}
	l.out.ready.push(op)
}

// credited takes room for eager messages back.
func (l *lane) credited(f frame) {
	if l.out.credit += f.size; l.out.credit > creditBytes {
		l.broken("more room for messages than there is")
	}
}
