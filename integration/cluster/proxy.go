package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Clients is the end of a [Link] that stands for all clients; members are named by their ids.
const Clients = 0

// Rules say what a directed link does to what passes it. The zero value lets everything through.
type Rules struct {
	// Delay is added to each piece, give or take up to Jitter. Nothing overtakes.
	Delay, Jitter time.Duration
	// Drop is the fraction of frames with messages between members that are lost, the connection staying whole. Between
	// members only: the log expects losses, the protocol of clients relies on TCP.
	Drop float64
	// Hold lets nothing through and takes nothing in: whoever sends runs into full buffers. When it ends everything goes
	// on, as TCP does when a network that lost packets loses no more.
	Hold bool
	// Swallow takes everything in and loses it. Connections stay open, and no end of one passes. When it ends, the
	// connections that lost something are reset.
	Swallow bool
}

// Link is one direction between two ends, over whatever connections there are. It is safe for concurrent use.
type Link struct {
	mu      sync.Mutex
	rules   Rules
	changed chan struct{} // closed at the next change
	pipes   map[*pipe]struct{}

	passed, lost atomic.Uint64 // bytes
}

func newLink() *Link {
	return &Link{changed: make(chan struct{}), pipes: make(map[*pipe]struct{})}
}

// Set changes the rules.
func (l *Link) Set(r Rules) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rules = r
	close(l.changed)
	l.changed = make(chan struct{})
	if !r.Swallow {
		for p := range l.pipes {
			if p.swallowed.Load() {
				p.c.reset()
			}
		}
	}
}

// Reset cuts off every connection that uses the link, as a rebooted router or a killed process does.
func (l *Link) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.pipes {
		p.c.reset()
	}
}

// get returns the rules, and what is closed when they change.
func (l *Link) get() (Rules, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rules, l.changed
}

func (l *Link) add(p *pipe) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pipes[p] = struct{}{}
}

func (l *Link) remove(p *pipe) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pipes, p)
}

// proxy stands before one listening address of a member. Connections of members name their sender in their first frame,
// which the proxy reads to know which link they belong to.
type proxy struct {
	listener net.Listener
	target   string
	member   bool // for the other members, not for clients
	link     func(from uint64, up bool) *Link

	mu     sync.Mutex
	conns  map[*proxied]struct{}
	closed bool
	wg     sync.WaitGroup
}

// startProxy begins to listen on addr. Link gives the link of a connection's sender to the member (up) and back.
func startProxy(addr, target string, member bool, link func(from uint64, up bool) *Link) (*proxy, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("proxy for %s: %w", target, err)
	}
	p := &proxy{listener: l, target: target, member: member, link: link, conns: make(map[*proxied]struct{})}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		c := &proxied{near: conn, done: make(chan struct{})}
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			conn.Close() //nolint:errcheck // nobody has used it
			return
		}
		p.conns[c] = struct{}{}
		p.mu.Unlock()
		p.wg.Go(func() {
			p.serve(c)
			c.reset()
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

// close ends all connections, and returns when nothing of the proxy runs any more.
func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.reset()
	}
	p.mu.Unlock()
	p.listener.Close() //nolint:errcheck // opened for listening
	p.wg.Wait()
}

// Between members, a frame begins with the length of its payload (4 bytes), a sum (4) and its type; the first one says
// in its payload what kind of connection it opens, and who does. See raft's frame.go.
const (
	peerHeader    = 9
	peerMessages  = 3 // the type of frames with messages
	helloKind     = peerHeader + 8
	helloFrom     = helloKind + 1 + 8
	helloEnd      = helloFrom + 8
	helloSnapshot = 2 // a connection for a stream without frames
)

// serve passes one connection on until both directions have ended.
func (p *proxy) serve(c *proxied) {
	var from uint64
	var hello []byte
	framed := false
	if p.member {
		hello = make([]byte, helloEnd)
		if _, err := io.ReadFull(c.near, hello); err != nil {
			return
		}
		from, framed = binary.BigEndian.Uint64(hello[helloFrom:]), hello[helloKind] != helloSnapshot
	}
	up, down := p.link(from, true), p.link(from, false)
	if !p.opens(c, up) {
		return
	}
	far, err := net.Dial("tcp", p.target)
	if err != nil {
		return // the member is down: the connection ends, as it would without a proxy
	}
	c.setFar(far)
	there := &pipe{c: c, src: c.near, dst: far, link: up, framed: framed, first: hello}
	back := &pipe{c: c, src: far, dst: c.near, link: down, framed: framed}
	var wg sync.WaitGroup
	wg.Go(there.run)
	wg.Go(back.run)
	wg.Wait()
}

// opens waits until the link lets a new connection through. What comes over one that is opened into nothing is lost.
func (p *proxy) opens(c *proxied, up *Link) bool {
	for {
		rules, changed := up.get()
		if !rules.Hold && !rules.Swallow {
			return true
		}
		select {
		case <-changed:
			if rules.Swallow {
				return false // whoever dialled dials again
			}
		case <-c.done:
			return false
		}
	}
}

// proxied is one connection through a proxy.
type proxied struct {
	near net.Conn // to who dialled
	once sync.Once
	done chan struct{} // closed by reset

	mu  sync.Mutex
	far net.Conn // to the member; nil before it was reached
}

func (c *proxied) setFar(far net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.far = far
	select {
	case <-c.done:
		far.Close() //nolint:errcheck // nobody has used it
	default:
	}
}

// reset ends the connection at both sides at once.
func (c *proxied) reset() {
	c.once.Do(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		close(c.done)
		for _, conn := range [...]net.Conn{c.near, c.far} {
			if tcp, ok := conn.(*net.TCPConn); ok {
				tcp.SetLinger(0) //nolint:errcheck // it may have ended
				tcp.Close()      //nolint:errcheck // as above
			}
		}
	})
}

// Bounds of a pipe.
const (
	pipeRead  = 64 << 10 // bytes read at once
	pipeQueue = 256      // pieces that are on their way: at 64 KiB more than any window here
)

// pipe is one direction of a connection.
type pipe struct {
	c         *proxied
	src, dst  net.Conn
	link      *Link
	framed    bool
	first     []byte // what was read before
	swallowed atomic.Bool

	head    []byte // of a frame, as far as it has come
	left    int    // bytes of the frame that are still to come
	dropped bool   // the frame is being lost
}

// piece is what was read at once, or the end of what there is to read.
type piece struct {
	data []byte
	due  time.Time
	end  bool
}

// run passes bytes on until the source ends or the connection is reset.
func (p *pipe) run() {
	p.link.add(p)
	defer p.link.remove(p)
	queue := make(chan piece, pipeQueue)
	var wg sync.WaitGroup
	wg.Go(func() { p.deliver(queue) })
	p.collect(queue)
	close(queue)
	wg.Wait()
}

// collect reads, loses what is to be lost, and queues the rest.
func (p *pipe) collect(queue chan<- piece) {
	var last time.Time
	if len(p.first) > 0 {
		first, _ := p.sift(p.first, 0)
		queue <- piece{data: first}
	}
	for buf := make([]byte, pipeRead); ; {
		if !p.pass(func(r Rules) bool { return !r.Hold }) {
			return
		}
		n, err := p.src.Read(buf)
		rules, _ := p.link.get()
		if n > 0 && rules.Swallow {
			p.swallowed.Store(true)
			p.link.lost.Add(uint64(n))
			n = 0
		}
		data, lost := p.sift(buf[:n], rules.Drop)
		p.link.lost.Add(uint64(lost))
		last = rules.due(last)
		if len(data) == 0 && err == nil {
			continue
		}
		select {
		case queue <- piece{data: data, due: last, end: err != nil}:
		case <-p.c.done:
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				p.pass(func(r Rules) bool { return !r.Hold && !r.Swallow })
				p.c.reset()
			}
			return
		}
	}
}

// due is when what comes now is passed on: not before what came last.
func (r Rules) due(last time.Time) time.Time {
	due := now().Add(r.Delay)
	if r.Jitter > 0 {
		due = due.Add(rand.N(2*r.Jitter) - r.Jitter)
	}
	if due.Before(last) {
		return last
	}
	return due
}

// deliver writes what is due.
func (p *pipe) deliver(queue <-chan piece) {
	for piece := range queue {
		if wait := until(piece.due); wait > 0 {
			select {
			case <-after(wait):
			case <-p.c.done:
			}
		}
		if !p.pass(func(r Rules) bool { return !r.Hold && (!piece.end || !r.Swallow) }) {
			continue // drain
		}
		if _, err := p.dst.Write(piece.data); err != nil {
			p.c.reset()
			continue
		}
		p.link.passed.Add(uint64(len(piece.data)))
		if piece.end {
			if tcp, ok := p.dst.(*net.TCPConn); ok {
				tcp.CloseWrite() //nolint:errcheck // it may have ended
			}
		}
	}
}

// pass waits until the rules are as wanted. It returns false when the connection was reset.
func (p *pipe) pass(want func(Rules) bool) bool {
	for {
		rules, changed := p.link.get()
		select {
		case <-p.c.done:
			return false
		default:
		}
		if want(rules) {
			return true
		}
		select {
		case <-changed:
		case <-p.c.done:
			return false
		}
	}
}

// sift returns a copy of b without the frames that are lost, and how many bytes these are. It is called with all that
// passes, so that it knows where frames begin.
func (p *pipe) sift(b []byte, drop float64) (kept []byte, lost int) {
	if !p.framed {
		return append([]byte(nil), b...), 0
	}
	for len(b) > 0 {
		if p.left == 0 {
			n := min(peerHeader-len(p.head), len(b))
			p.head, b = append(p.head, b[:n]...), b[n:]
			if len(p.head) < peerHeader {
				break
			}
			p.left = int(binary.BigEndian.Uint32(p.head))
			p.dropped = drop > 0 && p.head[8] == peerMessages && rand.Float64() < drop
			if p.dropped {
				lost += peerHeader
			} else {
				kept = append(kept, p.head...)
			}
			p.head = p.head[:0]
			continue
		}
		n := min(p.left, len(b))
		if p.dropped {
			lost += n
		} else {
			kept = append(kept, b[:n]...)
		}
		p.left -= n
		b = b[n:]
	}
	return kept, lost
}
