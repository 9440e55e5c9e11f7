package collective

import (
	"fmt"

	"larder/pg/shm"
)

// onLanes is the fabric of members that have rings to each other. Every receiver is sent what it wants as messages of its own.
type onLanes struct {
	list []int
	me   int
	most int // bytes of a message, without header
	p    []*shm.Producer
	c    []*shm.Consumer
	len  []int // of the message that peek has given, with header
}

// ringShare is how many of the longest messages a ring has room for: one that is read, one that lies there, and one that is being
// written, and a producer is told of room only when half of a ring is free.
const ringShare = 4

func newOnLanes(c *Comm, list []int, me int) (*onLanes, error) {
	l := &onLanes{list: list, me: me, most: c.Table.LaneChunk, p: make([]*shm.Producer, len(list)), c: make([]*shm.Consumer, len(list))}
	l.len = make([]int, len(list))
	for k, i := range list {
		if k == me {
			continue
		}
		if c.Lane == nil {
			return nil, fmt.Errorf("%w: no lane to member %d", ErrComm, i)
		}
		if l.p[k], l.c[k] = c.Lane(i); l.p[k] == nil || l.c[k] == nil {
			return nil, fmt.Errorf("%w: no lane to member %d", ErrComm, i)
		}
		if l.p[k].Size() != l.c[k].Size() {
			return nil, fmt.Errorf("%w: rings to and from member %d have %d and %d bytes", ErrComm, i, l.p[k].Size(), l.c[k].Size())
		}
		l.most = min(l.most, l.p[k].Size()/ringShare-headerBytes-besideBlock)
	}
	if l.most &^= leastChunk - 1; l.most < 2*leastChunk {
		return nil, fmt.Errorf("%w: rings of %d bytes or more are needed", ErrComm, ringShare*4*leastChunk)
	}
	return l, nil
}

func (l *onLanes) members() ([]int, int) { return l.list, l.me }

func (l *onLanes) shares() bool { return false }

func (l *onLanes) chunk(bool) int { return l.most }

// Blocks leave room in a ring for two notices, and one that says that its sender waits for one: so there always is room for
// that of why its sender has given up, which is the last of all messages.
const (
	roomForNotice = headerBytes + noticeBytes
	besideBlock   = 2 * roomForNotice
	besideNotice  = roomForNotice
)

// room is the free memory of a lane if it is enough for a message of so many bytes, and others beside it; ok is true if nobody will
// read it, too.
func (l *onLanes) room(k, bytes, beside int) (free []byte, ok bool) {
	free = l.p[k].Free()
	if len(free) >= headerBytes+bytes+beside {
		return free, true
	}
	return nil, l.p[k].Err() != nil
}

func (l *onLanes) send(o *flow, t, b int) bool {
	for k := range l.list {
		if o.wants(t, o.me, k) && o.left(t, b, k) >= 0 {
			if _, ok := l.room(k, o.size(t, b, k), besideBlock); !ok {
				return false
			}
		}
	}
	for k := range l.list {
		left := o.left(t, b, k)
		if !o.wants(t, o.me, k) || left < 0 {
			continue
		}
		if free, _ := l.room(k, o.size(t, b, k), besideBlock); free != nil {
			n := o.fill(free[headerBytes:], t, b, k)
			header{seq: o.seq, sig: o.sig, left: u32(left), len: u32(n), track: byte(t & 3)}.put(free)
			l.p[k].Commit(headerBytes + n)
		}
	}
	return true
}

// post sends bytes that are no flow's block, and reports false if there is no room for now.
func (l *onLanes) post(o *flow, k int, b []byte) bool {
	free, ok := l.room(k, len(b), besideBlock)
	if free != nil {
		header{seq: o.seq, sig: o.sig, len: u32(len(b)), track: inputs}.put(free)
		l.p[k].Commit(headerBytes + copy(free[headerBytes:], b))
	}
	return ok
}

// head is the first message of a lane, if all of it is there. Notices are taken unless they are for later.
func (l *onLanes) head(o *flow, k int) (h header, p []byte, ok bool) {
	for {
		ready := l.c[k].Ready()
		h, ok, err := readHeader(ready, l.most)
		if err != nil {
			o.reject(l.list[k], "%v", err)
		}
		if !ok || len(ready) < headerBytes+int(h.len) {
			return header{}, nil, false
		}
		p = ready[headerBytes : headerBytes+int(h.len)]
		if h.track != notices {
			return h, p, true
		}
		n, err := readNotice(h.seq, h.sig, p)
		if o.heed(l.list[k], n, err) {
			return header{}, nil, false
		}
		l.c[k].Consume(headerBytes + int(h.len))
	}
}

func (l *onLanes) peek(o *flow, t, from int) (piece []byte, left int, ok bool) {
	h, p, ok := l.head(o, from)
	if !ok {
		return nil, 0, false
	}
	if h.seq != o.seq || h.sig != o.sig {
		o.differ(l.list[from], h.seq, h.sig)
		return nil, 0, false
	}
	l.len[from] = headerBytes + len(p)
	return p, int(h.left), int(h.track) == t
}

func (l *onLanes) next(_, from int) { l.c[from].Consume(l.len[from]) }

func (l *onLanes) dead(o *flow, from int) error {
	err := l.c[from].Ended()
	if err == nil {
		return nil
	}
	// It has ended, so this is all: what can be taken is not missing.
	if _, _, ok := l.head(o, from); ok || o.err != nil {
		return o.err
	}
	return &DownError{Member: l.list[from], Err: err}
}

func (l *onLanes) look(o *flow) {
	for k := range l.list {
		if k == o.me {
			continue
		}
		due := o.want[inputs][k] != 0 || o.want[results][k] != 0
		h, _, ok := l.head(o, k)
		if !ok { // a notice for later, perhaps: what is due now does not come then
			h, ok, _ = readHeader(l.c[k].Ready(), l.most)
			ok = ok && h.track == notices && h.seq>>stageBits > o.seq>>stageBits
		}
		if ok && (h.seq < o.seq || h.seq == o.seq && !due || h.seq > o.seq && due) {
			o.differ(l.list[k], h.seq, h.sig)
		}
		l.lookBehind(o, k)
	}
}

func (l *onLanes) hear(o *flow) {
	for k := range l.list {
		if k != l.me {
			l.head(o, k)
			l.lookBehind(o, k)
		}
	}
}

// behindPolls is after how many polls that moved nothing what lies behind the first message of a lane is looked at: as often as a
// waiting caller polls before it sleeps.
const behindPolls = 64

// lookBehind finds a notice of why a position has given up this operation behind blocks that are not taken yet, and may never be:
// this member may be waiting for room, which that position will not make any more. It looks from time to time: a peer may have run
// ahead by thousands of small messages.
func (l *onLanes) lookBehind(o *flow, k int) {
	if o.stuck%behindPolls != behindPolls-1 {
		return
	}
	ready := l.c[k].Ready()
	for o.err == nil {
		h, ok, err := readHeader(ready, l.most)
		if !ok || err != nil || len(ready) < headerBytes+int(h.len) {
			return
		}
		if h.track == notices {
			n, err := readNotice(h.seq, h.sig, ready[headerBytes:][:h.len])
			o.heed(l.list[k], n, err)
		}
		ready = ready[headerBytes+int(h.len):]
	}
}

func (l *onLanes) notify(n notice) {
	for k := range l.list {
		if k == l.me {
			continue
		}
		beside := 0
		if n.cause == waits {
			beside = besideNotice
		}
		if free, _ := l.room(k, noticeBytes, beside); free != nil {
			n.put(free[headerBytes:])
			header{seq: n.seq, sig: n.sig, len: noticeBytes, track: notices}.put(free)
			l.p[k].Commit(headerBytes + noticeBytes)
		}
	}
}
