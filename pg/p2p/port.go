package p2p

import (
	"errors"
	"fmt"
	"slices"

	"larder/pg/shm"
)

// Config is what a port needs.
type Config struct {
	Me int // this process's rank: what it sends to itself arrives, too

	// Ranks are those that a receive from [Any] may hear of. It is asked when one is posted; those that Reset names later are
	// added.
	Ranks func() []int

	// Lane gives the rings to and from a rank. It is asked when a lane is first needed, and again at each Poll as long as it says
	// [ErrPending]; any other error ends the operations that need the lane. It must not block. The port closes what it gets.
	Lane func(rank int) (*shm.Producer, *shm.Consumer, error)

	// Bell is rung when a method has ended operations, for those that wait for them on other threads. It may be nil.
	Bell shm.Ringer
}

// Port is one group's point-to-point messages of this process. Its methods must not be called concurrently.
type Port struct {
	cfg    Config
	lanes  map[int]*lane
	all    []*lane // the same, in the order in which they are polled
	any    []*Op   // receives from anybody that have not been matched, in order
	posts  uint64  // receives posted so far
	seen   uint64  // messages kept so far
	ended  bool    // operations have ended since the bell was rung
	closed bool
}

// NewPort makes a port.
func NewPort(cfg Config) *Port {
	return &Port{cfg: cfg, lanes: map[int]*lane{}}
}

// lane is the lane with a rank, which need not be connected.
func (p *Port) lane(rank int) *lane {
	l := p.lanes[rank]
	if l == nil {
		l = newLane(p, rank)
		p.lanes[rank] = l
		p.all = append(p.all, l)
	}
	return l
}

var errNobody = errors.New("p2p: the port knows no ranks")

var errTarget = errors.New("p2p: a message goes to one rank, and has a tag that is not AnyTag")

// Send sends buf to a rank. Any number may be under way. What can go at once does; the rest goes in Poll. The message is in
// buf until the operation is done, which must not be changed until then.
func (p *Port) Send(to int, tag uint64, buf []byte) *Op {
	o := &Op{rank: to, tag: tag, buf: buf, size: len(buf)}
	switch {
	case p.closed:
		p.end(o, ErrClosed)
	case to < 0 || tag == AnyTag:
		p.end(o, fmt.Errorf("%w: not to rank %d with tag %d", errTarget, to, tag))
	default:
		p.lane(to).send(o)
	}
	return o
}

// Recv receives a message of a rank, or of [Any], with a tag, or with [AnyTag], into buf. Receives that a message
// matches take it in the order of these calls.
func (p *Port) Recv(from int, tag uint64, buf []byte) *Op {
	p.posts++
	o := &Op{rank: from, tag: tag, buf: buf, seq: p.posts}
	switch {
	case p.closed:
		p.end(o, ErrClosed)
	case from == Any:
		p.receiveAny(o)
	case from < 0:
		p.end(o, fmt.Errorf("%w: not from rank %d", errTarget, from))
	default:
		p.lane(from).receive(o)
	}
	return o
}

// receiveAny takes the message that came first of those that match, or posts the receive.
func (p *Port) receiveAny(o *Op) {
	for _, rank := range p.cfg.Ranks() {
		p.lane(rank)
	}
	var from *lane
	var at int
	for _, l := range p.all {
		if i := l.findKept(o, true); i >= 0 && (from == nil || l.kept[i].seq < from.kept[at].seq) {
			from, at = l, i
		}
	}
	if from != nil {
		from.take(o, at)
		return
	}
	p.any = append(p.any, o)
	p.endAny()
}

// endAny ends receives from anybody when no other rank is left that could send. A port that knows no other may hear of itself.
func (p *Port) endAny() {
	var err error
	for _, l := range p.all {
		switch {
		case l.rank == p.cfg.Me && len(p.all) > 1:
		case l.err == nil:
			return
		default:
			err = l.err
		}
	}
	if err == nil {
		err = errNobody
	}
	for _, o := range p.any {
		p.end(o, &DownError{Any, err})
	}
	p.any = nil
}

// match finds the receive that takes a message, and takes it off its list.
func (p *Port) match(l *lane, tag uint64) *Op {
	takes := func(o *Op) bool { return o.matches(tag) }
	i, j := slices.IndexFunc(l.posted, takes), slices.IndexFunc(p.any, takes)
	switch {
	case i < 0 && j < 0:
		return nil
	case j < 0 || i >= 0 && l.posted[i].seq < p.any[j].seq:
		o := l.posted[i]
		l.posted = slices.Delete(l.posted, i, i+1)
		return o
	default:
		o := p.any[j]
		p.any = slices.Delete(p.any, j, j+1)
		return o
	}
}

// Poll moves what can move, and reports whether anything has.
func (p *Port) Poll() (progress bool) {
	for _, l := range p.all {
		if l.poll() {
			progress = true
		}
	}
	p.tell()
	return progress
}

// Fail says that a rank is dead. Messages of it that have arrived whole stay to be received; all other operations with it end, and
// those that are begun from now on.
func (p *Port) Fail(rank int, err error) {
	if l := p.lane(rank); l.err == nil {
		l.lastWords()
		l.down(err)
	}
	p.tell()
}

// Reset says that a rank is another process from now on, and reachable by a lane of its own. Nothing of the old one is left.
func (p *Port) Reset(rank int) {
	if p.closed {
		return
	}
	if l := p.lanes[rank]; l != nil {
		l.down(ErrReplaced)
		l.close()
		p.all = slices.DeleteFunc(p.all, func(x *lane) bool { return x == l })
		delete(p.lanes, rank)
	}
	p.lane(rank)
	p.tell()
}

// Close ends all operations and lets go of the lanes.
func (p *Port) Close() {
	if p.closed {
		return
	}
	p.closed = true
	for _, l := range p.all {
		l.down(ErrClosed)
		l.close()
	}
	for _, o := range p.any {
		p.end(o, ErrClosed)
	}
	p.any = nil
	p.tell()
}

// end ends an operation.
func (p *Port) end(o *Op, err error) {
	o.err = err
	o.done.Store(true)
	p.ended = true
}

// tell rings the bell if operations have ended.
func (p *Port) tell() {
	if p.ended && p.cfg.Bell != nil {
		p.cfg.Bell.Ring()
	}
	p.ended = false
}
