package client

import (
	"errors"
	"net"
	"runtime"
	"sync"

	"larder/protocol"
	"larder/sock"
)

// socket is what a connection reads and writes: a [sock.Conn].
type socket interface {
	net.Conn
	ReadNow(p []byte) (int, error)
	Await(ready func() bool) error
}

// intake is what comes on a connection. Whoever holds mu reads what is there, and does not wait for more: so a caller that
// looks for its answer gets it without another thread, which would have to wake up first.
type intake struct {
	mu sync.Mutex
	r  *protocol.Reader // of a reader that never waits
	// The frame that next has found, and why no further one comes.
	header  protocol.Header
	payload []byte
	err     error
}

// atOnce reads a socket as far as something is there. That nothing is looks like a timeout to a protocol.Reader: it can go on later.
type atOnce struct{ socket }

// Read implements io.Reader.
func (s atOnce) Read(p []byte) (int, error) { return s.ReadNow(p) }

// next reads a frame. It returns false if none has come. The caller holds mu.
func (in *intake) next() bool {
	if in.err != nil {
		return true
	}
	h, payload, err := in.r.Next()
	if errors.Is(err, sock.ErrNothing) {
		return false
	}
	in.header, in.payload, in.err = h, payload, err
	return true
}

// read hands out replies and pushes until the connection ends.
func (c *conn) read() {
	defer close(c.done)
	come := func() bool { // returns true with mu held
		c.in.mu.Lock()
		if c.in.next() {
			return true
		}
		c.in.mu.Unlock()
		return false
	}
	for {
		if err := c.nc.Await(come); err != nil {
			c.close(err)
			return
		}
		c.handOut()
		err := c.in.err
		c.in.mu.Unlock()
		if err != nil {
			c.close(err)
			return
		}
	}
}

// look hands out what has come, if nobody else is doing so.
func (c *conn) look() {
	if !c.in.mu.TryLock() {
		return
	}
	// The goroutine of the connection may not hear of what has been read here already.
	if err := c.taken(); err != nil {
		c.close(err)
	}
}

// taken hands out what has come, and unlocks in.mu. It returns why nothing more comes.
func (c *conn) taken() error {
	defer c.in.mu.Unlock() // also if what it hands out to panics, and somebody goes on after that
	if c.in.next() {
		c.handOut()
	}
	return c.in.err
}

// handOut hands out the frame that next has found, and those that came with it. The caller holds in.mu, for which the connection's
// goroutine may wait in a function that Await calls: nobody can close the connection until it is unlocked, and nobody may
// wait for the master. So pushes are a burst, in which nobody sends.
func (c *conn) handOut() {
	bursting := false
	for c.in.err == nil {
		c.heard.Add(1)
		more := c.in.r.Buffered()
		if (more || c.in.header.Sequence == 0) && !bursting {
			bursting = true
			c.beginBurst()
		}
		c.deliver(c.in.header, c.in.payload)
		if !more || c.in.err != nil {
			break
		}
		c.in.next()
	}
	if bursting {
		c.endBurst()
	}
}

// deliver hands one frame to whom it concerns.
func (c *conn) deliver(h protocol.Header, payload []byte) {
	if h.Sequence == 0 {
		c.in.err = c.onPush(c, h.Type, payload)
		return
	}
	cl := c.remove(h.Sequence)
	if cl == nil {
		return
	}
	cl.buf = append(cl.buf[:0], payload...)
	if h.Type != cl.typ.Reply() {
		cl.err = &protocol.FrameError{Reason: "reply of type " + h.Type.String() + " to " + cl.typ.String()}
	}
	c.finish(cl)
}

// beginBurst begins to hand out several replies that came at once. The callers that they wake are likely to ask for
// more at once too: until the burst ends, nobody sends.
func (c *conn) beginBurst() {
	c.mu.Lock()
	c.bursting = true
	c.mu.Unlock()
}

// endBurst lets those callers run, and sends what they ask for with one system call. Not in this goroutine: it must go
// on reading even if the master does not.
func (c *conn) endBurst() {
	runtime.Gosched()
	c.mu.Lock()
	c.bursting = false
	send := len(c.out) > 0 && !c.writing && c.err == nil
	if send {
		c.writing = true
	}
	c.mu.Unlock()
	if send {
		go c.flush(-1)
	}
}
