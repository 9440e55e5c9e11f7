// Package sock reads and writes sockets by system calls that Go's scheduler does not hear of.
//
// Package net tells it of each call, which might block. Those on its sockets do not, but the system may take a thread off its
// processor in one: who is at the other end was woken by it, and wants to run there. To the runtime's monitor that looks like a
// thread that blocks. It has another thread run goroutines in its place, and comes back every 20 us from then on, where it
// otherwise looks a hundred times a second. On two processors, 8 clients that each wait for one reply of another process got 38%
// more of them by this package, and 64 clients 16% (docs/MARU.md).
package sock

import (
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// most is how much one call moves: while it does, nobody else runs in its thread's place. It is copied in about 50 us.
const most = 256 << 10

// ErrNothing says that nothing can be read yet. It is a timeout to whoever asks: reading can go on later.
var ErrNothing = os.ErrDeadlineExceeded

// Conn is a connection whose Read and Write are as those of net.Conn, but each for one goroutine at a time.
type Conn struct {
	net.Conn
	raw     syscall.RawConn
	in, out transfer
	ready   func() bool
	await   func(fd uintptr) bool // calls ready
}

// transfer is what a call in one direction has to move, and what came of it.
type transfer struct {
	p     []byte
	n     int
	errno syscall.Errno
	wait  func(fd uintptr) bool // moves something; false if that cannot be yet
	once  func(fd uintptr)      // the same
}

// New returns a connection that reads and writes nc, which is one of package net. Closing either closes both.
func New(nc net.Conn) (*Conn, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("sock: a %T is no socket", nc)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("sock: %w", err)
	}
	c := &Conn{Conn: nc, raw: raw}
	c.await = func(uintptr) bool { return c.ready() }
	c.in.with(sysRead)
	c.out.with(sysWrite)
	return c, nil
}

// with has the transfer made by a system call.
func (t *transfer) with(call func(fd uintptr, p []byte) (int, syscall.Errno)) {
	t.wait = func(fd uintptr) bool {
		for {
			t.n, t.errno = call(fd, t.p[:min(len(t.p), most)])
			if t.errno != syscall.EINTR {
				return t.errno != syscall.EAGAIN
			}
		}
	}
	t.once = func(fd uintptr) { t.wait(fd) }
}

// end returns what came of a call by the system, or by package net in front of it.
func (t *transfer) end(name string, err error) (int, error) {
	t.p = nil
	switch {
	case err != nil:
		return 0, err
	case t.errno == syscall.EAGAIN:
		return 0, ErrNothing
	case t.errno != 0:
		return 0, os.NewSyscallError(name, t.errno)
	}
	return t.n, nil
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	c.in.p = p
	return c.read(p, c.raw.Read(c.in.wait))
}

// ReadNow reads what is there, and returns ErrNothing if that is nothing. It may run beside Await, and instead of Read.
func (c *Conn) ReadNow(p []byte) (int, error) {
	c.in.p = p
	return c.read(p, c.raw.Control(c.in.once))
}

func (c *Conn) read(p []byte, err error) (int, error) {
	n, err := c.in.end("read", err)
	if n == 0 && err == nil && len(p) > 0 {
		err = io.EOF
	}
	return n, err
}

// Await calls ready, and again whenever more may have come, until it returns true. ready may call ReadNow; it must not close
// the connection, which would wait for it. Like Read, it is for one goroutine.
func (c *Conn) Await(ready func() bool) error {
	c.ready = ready
	return c.raw.Read(c.await)
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (n int, err error) {
	for n < len(p) {
		c.out.p = p[n:]
		m, err := c.out.end("write", c.raw.Write(c.out.wait))
		if n += m; err != nil {
			return n, err
		}
	}
	return n, nil
}

// WriteNow writes as much as the socket takes at once, at least none.
func (c *Conn) WriteNow(p []byte) (int, error) {
	c.out.p = p
	n, err := c.out.end("write", c.raw.Control(c.out.once))
	if err == ErrNothing { //nolint:errorlint // end's own
		err = nil
	}
	return n, err
}
