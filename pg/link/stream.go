package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"larder/pg/shm"
)

const (
	// lingerTime is how long a lane that was closed may take to carry what was written before.
	lingerTime = 3 * time.Second
	// lastWords is how long a lane of a process that is down waits for what may have been on its way.
	lastWords = 200 * time.Millisecond
	// inlineMost is how many bytes whoever writes into a ring sends by itself: a goroutine would take longer to wake. What is more is
	// sent beside the writer.
	inlineMost = 16 << 10
	// carryMost is how many bytes are sent or received at once, so that both ends of a ring are at work.
	carryMost = 256 << 10
)

// stream carries a lane over a connection: what a ring of this process holds goes out, what comes in goes into another.
type stream struct {
	n    *Node
	rank int
	via  string
	conn net.Conn
	raw  syscall.RawConn
	in   *shm.Producer // to this process's user; the receiver's
	room waker         // there is some in in

	mu   sync.Mutex    // of out: the sender has it, or who writes a little
	out  *shm.Consumer // of this process's user
	wake waker         // there is something in out

	halves atomic.Int32
	gone   atomic.Pointer[error] // the peer's process is down
	over   atomic.Bool           // nothing that is sent matters
}

// newStream makes a lane of a connection, of which rest has been read.
func (n *Node) newStream(conn net.Conn, rest []byte, rank int, via string) (*lane, error) {
	s := &stream{n: n, rank: rank, via: via, conn: conn, room: make(waker, 1), wake: make(waker, 1)}
	if tcp, ok := conn.(*net.TCPConn); ok {
		if err := tcp.SetNoDelay(true); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	sys, ok := conn.(syscall.Conn)
	if !ok {
		return nil, errors.Join(errors.ErrUnsupported, conn.Close())
	}
	raw, err := sys.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	s.raw = raw
	l := &lane{rank: rank, via: via, by: s}
	if l.p, s.out, err = shm.NewRing(n.cfg.RingBytes, n.bell, sender{s}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if s.in, l.c, err = shm.NewRing(n.cfg.RingBytes, s.room, n.bell); err != nil {
		return nil, errors.Join(err, conn.Close(), l.p.Close(), s.out.Close())
	}
	s.halves.Store(2)
	n.pumps.Go(s.send)
	n.pumps.Go(func() { s.receive(rest) })
	return l, nil
}

// sender is the bell that the lane's user rings when it has written something.
type sender struct{ s *stream }

// Ring sends what was written, if it is little and nobody is sending, and wakes the sender otherwise.
func (r sender) Ring() {
	s := r.s
	if s.mu.TryLock() {
		more := s.sendLittle()
		s.mu.Unlock()
		if !more {
			return
		}
	}
	poke(s.wake)
}

// sendLittle sends what there is without waiting, and reports whether the sender has to look. The lock is held.
func (s *stream) sendLittle() (more bool) {
	b := s.out.Ready()
	if len(b) == 0 || len(b) > inlineMost {
		return true
	}
	var n int
	var failed error
	err := s.raw.Write(func(fd uintptr) bool {
		n, failed = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return true
	})
	if err != nil || failed != nil {
		return true // the sender finds out
	}
	s.out.Consume(n)
	return n < len(b) || s.out.Ended() != nil
}

// send sends until the lane is closed or fails.
func (s *stream) send() {
	defer s.end()
	for {
		s.mu.Lock()
		err := s.sendAll()
		ended := s.out.Err()
		s.mu.Unlock()
		if err != nil {
			s.out.Fail(s.reason(err))
			return
		}
		if ended != nil || s.over.Load() {
			break
		}
		<-s.wake
	}
	if half, ok := s.conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // then the peer knows already
	}
}

// sendAll sends what there is. The lock is held.
func (s *stream) sendAll() error {
	for !s.over.Load() {
		b := s.out.Ready()
		if len(b) == 0 {
			return nil
		}
		n, err := s.conn.Write(b[:min(len(b), carryMost)])
		s.out.Consume(n)
		if err != nil {
			return err
		}
	}
	return nil
}

// receive takes what comes until the peer ends, or the lane is closed and the peer has heard of it.
func (s *stream) receive(rest []byte) {
	defer s.end()
	err := s.fill(rest)
	s.in.Fail(s.reason(err))
	s.over.Store(true)
	s.out.Fail(s.reason(err))
	poke(s.wake)
}

func (s *stream) fill(rest []byte) error {
	for {
		free := s.in.Free()
		if s.in.Err() != nil { // nobody reads any more: let the peer get rid of what it has, and of the connection
			_, err := io.Copy(io.Discard, s.conn)
			return errors.Join(io.EOF, err)
		}
		if len(free) == 0 {
			<-s.room
			continue
		}
		if len(rest) > 0 {
			n := copy(free, rest)
			rest = rest[n:]
			s.in.Commit(n)
			continue
		}
		if s.gone.Load() != nil {
			_ = s.conn.SetReadDeadline(soon(lastWords)) // it fails for closed ones only
		}
		n, err := s.conn.Read(free[:min(len(free), carryMost)])
		s.in.Commit(n)
		if err != nil {
			return err
		}
	}
}

// reason is what the lane's user is told.
func (s *stream) reason(err error) error {
	if gone := s.gone.Load(); gone != nil {
		return *gone
	}
	if errors.Is(err, io.EOF) {
		err = ErrEnded
	}
	return &LaneError{Rank: s.rank, Transport: s.via, Err: err}
}

// end closes the connection and the rings' inner ends when both halves have ended.
func (s *stream) end() {
	if s.halves.Add(-1) > 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = errors.Join(s.conn.Close(), s.in.Close(), s.out.Close()) // nothing is lost with them
}

// lose implements carrier.
func (s *stream) lose(err error) {
	s.gone.CompareAndSwap(nil, &err)
	_ = s.conn.SetReadDeadline(soon(lastWords)) // it fails for closed ones only, as the next
	_ = s.conn.SetWriteDeadline(past())
}

// cut implements carrier.
func (s *stream) cut(error) {
	s.over.Store(true)
	_ = s.conn.Close() // nothing that was written matters any more
	poke(s.wake)
	poke(s.room)
}

// close implements carrier.
func (s *stream) close() { _ = s.conn.SetDeadline(soon(lingerTime)) } // it fails for closed ones only

// dialLane opens a connection for a lane, at the addresses by which the process was reached.
func (n *Node) dialLane(ctx context.Context, member int, c *control, via string, h *hello) event {
	e := event{member: member, kind: eventDialed}
	at := c.at
	if via == TransportUnix {
		at.TCP = nil
	}
	for _, w := range n.ways(at, via == TransportUnix) {
		conn, err := n.open(ctx, w)
		if err == nil {
			e.rest, err = n.greetLane(ctx, conn, h)
		}
		if err == nil {
			e.conn, e.err = conn, nil
			return e
		}
		if conn != nil {
			_ = conn.Close() // it has failed
		}
		e.err = errors.Join(e.err, err)
	}
	e.err = noLane(c.who, via, errors.Join(e.err, ctx.Err()))
	return e
}

// noLane says what it means that a connection for a lane could not be opened.
func noLane(who identity, via string, err error) error {
	why := &LaneError{Rank: who.Rank, Transport: via, Err: fmt.Errorf("open it: %w", err)}
	var refused *RefusedError
	switch {
	case isShort(err): // the peer has nothing to do with it
		return fmt.Errorf("link: a %s connection to rank %d: %w", via, who.Rank, err)
	case errors.As(err, &refused) && refused.Code == RefusedUnknown: // its word on why is on its way
		return &RefusedError{Code: RefusedClosed, Text: why.Error(), By: who.String()}
	case hungUp(err): // the same, if it is not what lies between
		return &RefusedError{Code: RefusedClosed, Text: why.Error(), Blames: []int{who.Rank}, By: who.String()}
	}
	return why
}

// isShort reports whether this process or host has nothing left to open a connection with.
func isShort(err error) bool {
	for _, why := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

// hungUp reports whether a connection has failed since the other side has closed it.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// greetLane says which lane a connection is, and returns what has come behind the welcome.
func (n *Node) greetLane(ctx context.Context, conn net.Conn, h *hello) (rest []byte, err error) {
	calm := n.hurry(ctx, conn)
	r := newFrameReader(conn)
	defer r.close()
	if err := writeJSON(conn, frameHello, nil, h); err != nil {
		return nil, err
	}
	f, w, err := readWelcome(r)
	if err != nil {
		return nil, err
	}
	f.drop()
	if w.From.Rank != h.To || w.From.Incarnation != h.ToIncarnation {
		return nil, fmt.Errorf("%w: %s answers", ErrFrame, &w.From)
	}
	return r.rest(), calm()
}

// acceptLane gives a connection to who builds its lane.
func (n *Node) acceptLane(r *frameReader, h *hello) *RefusedError {
	key := scope{pair: h.Lane.Pair, group: h.Lane.Group, epoch: h.Lane.Epoch}
	if key.pair {
		key.peer = h.From.Rank
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.connection(h.From.Rank, h.From.Incarnation)
	p := n.parties[key]
	switch {
	case c == nil:
		return &RefusedError{Code: RefusedStale, Text: fmt.Sprintf("%s is not connected", &h.From)}
	case p == nil || p.number != h.Lane.Yours || p.seatOf(c) < 0:
		return &RefusedError{Code: RefusedUnknown, Text: fmt.Sprintf("nobody waits for a lane of %s, attempt %016x", key, h.Lane.Yours)}
	case len(r.rest()) > 0:
		return &RefusedError{Code: RefusedHello, Text: "bytes of the lane have come before it was welcome"}
	case !p.post(event{member: p.seatOf(c), kind: eventConn, conn: r.conn, message: &partyMessage{From: h.Lane.Mine}}):
		return &RefusedError{Code: RefusedBusy, Text: "too many connections for one lane"}
	}
	return nil
}
