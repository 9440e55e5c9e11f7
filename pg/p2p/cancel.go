package p2p

import (
	"bytes"
	"slices"
)

// Cancel ends an operation with err, unless it is done: its buffer may be used for something else from then on. A receive that has
// not been matched takes no message. One that has loses its message. A send that the receiver does not know of is not sent; one that
// it may be waiting for is, from a copy.
func (p *Port) Cancel(o *Op, err error) {
	if o.Done() {
		return
	}
	if i := slices.Index(p.any, o); i >= 0 {
		p.any = slices.Delete(p.any, i, i+1)
	} else if l := p.lanes[o.rank]; l != nil && o.seq > 0 {
		l.cancelReceive(o)
	} else if l != nil {
		l.cancelSend(o)
	}
	p.end(o, err)
	p.tell()
}

// cancelReceive takes a receive back, or leaves another in its place that drops what comes.
func (l *lane) cancelReceive(o *Op) {
	if i := slices.Index(l.posted, o); i >= 0 {
		l.posted = slices.Delete(l.posted, i, i+1)
		return
	}
	other := &Op{rank: o.rank, tag: o.tag, seq: o.seq, id: o.id, sent: o.sent, size: o.size, room: o.room}
	if l.in.op == o {
		l.in.op, l.in.dst = other, nil
	}
	if l.in.taking[o.id] == o {
		l.in.taking[o.id] = other
	}
}

// cancelSend takes a send back, or leaves another in its place that sends a copy.
func (l *lane) cancelSend(o *Op) {
	out := &l.out
	if i := slices.Index(out.queue.list, o); i >= 0 {
		out.queue.list = slices.Delete(out.queue.list, i, i+1)
		return
	}
	other := &Op{rank: o.rank, tag: o.tag, buf: bytes.Clone(o.buf), id: o.id, sent: o.sent, size: o.size}
	if out.asked[o.id] == o {
		out.asked[o.id] = other
	}
	if i := slices.Index(out.ready.list, o); i >= 0 {
		out.ready.list[i] = other
	}
	if out.op == o { // the rest of the frame comes from the copy, too
		end := o.size
		if out.kind == data {
			end = o.sent + min(o.size-o.sent, partBytes)
		}
		out.op, out.body = other, other.buf[end-len(out.body):end]
	}
}
