package p2p

import (
	"errors"
	"fmt"
	"slices"

	"larder/pg/shm"
)

// stepBytes is how much is copied before the other side hears of it: little enough that both copy at once, and that what one has
// written is in a cache when the other reads it.
const stepBytes = 64 << 10

// selfBytes is the size of the ring from a process to itself.
const selfBytes = 256 << 10

// lane is what a port has with one rank.
type lane struct {
	port *Port
	rank int
	p    *shm.Producer // nil until it is connected
	c    *shm.Consumer
	err  error // a DownError once the rank is dead: nothing moves any more

	posted []*Op      // receives that name this rank and have not been matched, in order
	kept   []*message // messages without a receive, in order
	out    outlet
	in     inlet
}

// outlet is the sending side.
type outlet struct {
	op   *Op    // whose bytes are being written
	body []byte // what is left of them in this frame
	pad  int    // and of what fills the frame up
	kind kind   // of the frame

	queue  fifo[*Op]      // sends that the peer does not know of
	asked  map[uint64]*Op // sends that wait for their receive
	ready  fifo[*Op]      // sends whose receive is there
	grants fifo[frame]    // to be sent
	owed   int            // credit to be given back
	credit int            // room that the peer has for eager messages
	ids    uint64         // asks so far
}

// inlet is the receiving side.
type inlet struct {
	frame  frame // that is arriving, if busy
	busy   bool
	dst    []byte // where the rest of the body goes; what it has no room for is dropped
	left   int    // of the body
	pad    int
	op     *Op      // that it is for
	keep   *message // or what keeps it
	taking map[uint64]*Op
	credit int    // room that the peer may take for eager messages
	asks   int    // that are kept
	ids    uint64 // of the last ask
}

// message is one that came before its receive.
type message struct {
	frame frame
	seq   uint64 // order of arrival, over all lanes
	buf   []byte // of an eager one
	lost  bool   // its sender has died before it was here
}

func newLane(p *Port, rank int) *lane {
	return &lane{
		port: p, rank: rank,
		out: outlet{asked: map[uint64]*Op{}, credit: creditBytes},
		in:  inlet{taking: map[uint64]*Op{}, credit: creditBytes},
	}
}

// poll moves what can move on this lane.
func (l *lane) poll() bool {
	if l.err != nil || l.p == nil && !l.connect() {
		return false
	}
	read := l.read()
	if l.err != nil {
		return true
	}
	return l.flush() || read
}

// connect asks for the lane if somebody needs it.
func (l *lane) connect() bool {
	if l.out.queue.empty() && len(l.posted) == 0 && len(l.port.any) == 0 {
		return false
	}
	var err error
	if l.rank == l.port.cfg.Me {
		l.p, l.c, err = shm.NewRing(selfBytes, l.port.ringer(), l.port.ringer())
	} else {
		l.p, l.c, err = l.port.cfg.Lane(l.rank)
	}
	if err == nil {
		return true
	}
	l.p, l.c = nil, nil
	if !errors.Is(err, ErrPending) { // perhaps the next operation has more luck
		l.endAll(&DownError{l.rank, err})
	}
	return false
}

// silent is a bell for a port that has none.
type silent struct{}

// Ring does nothing: there is nobody to wake.
func (silent) Ring() {}

func (p *Port) ringer() shm.Ringer {
	if p.cfg.Bell == nil {
		return silent{}
	}
	return p.cfg.Bell
}

// lastWords reads what a rank that is dead has left.
func (l *lane) lastWords() {
	for l.c != nil && l.err == nil && l.read() {
		continue
	}
}

// down ends the lane.
func (l *lane) down(err error) {
	if l.err != nil {
		return
	}
	l.err = &DownError{l.rank, err}
	if l.p != nil {
		l.p.Fail(err)
		l.c.Fail(err)
	}
	if l.in.keep != nil { // it has not come whole
		l.in.keep.lost = true
	}
	for _, m := range l.kept {
		m.lost = m.lost || m.frame.kind == ask
	}
	l.endAll(l.err)
	l.port.endAny()
}

// endAll ends all operations of the lane.
func (l *lane) endAll(err error) {
	o, in := &l.out, &l.in
	ops := slices.Concat(o.queue.drain(), o.ready.drain(), l.posted)
	for _, op := range o.asked {
		ops = append(ops, op)
	}
	for _, op := range in.taking {
		ops = append(ops, op)
	}
	if o.op != nil {
		ops = append(ops, o.op)
	}
	if in.op != nil {
		ops = append(ops, in.op)
	}
	for _, op := range ops {
		if !op.Done() {
			l.port.end(op, err)
		}
	}
	clear(o.asked)
	clear(in.taking)
	l.posted, in.op, in.keep = nil, nil, nil
	o.op, o.body, o.pad, o.kind = nil, nil, 0, 0
}

// close lets go of the rings, of a lane that is down.
func (l *lane) close() {
	if l.p != nil {
		_ = errors.Join(l.p.Close(), l.c.Close()) // mappings that there are
	}
	l.p, l.c, l.kept = nil, nil, nil
}

// broken ends the lane because of what has come by it.
func (l *lane) broken(format string, args ...any) {
	l.down(&ProtocolError{l.rank, fmt.Sprintf(format, args...)})
}
