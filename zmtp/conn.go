package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Conn is a connection to one peer, after the handshake. Read is for one goroutine, all other methods for any.
type Conn struct {
	cfg   Config
	conn  socket
	r     *bufio.Reader
	minor byte // of ZMTP 3, that the peer speaks
	peer  properties

	buf   []byte   // of the message that was read last
	parts [][]byte // of it
	spans []int    // where its parts end

	subscribe func(topic []byte, on bool) error // takes subscriptions; nil where they do not belong

	w    sync.Mutex // held for one message
	out  []byte
	beat *time.Ticker // nil without heartbeats
	done chan struct{}

	closed atomic.Bool
	once   sync.Once
}

// socket is what a connection reads and writes: a [sock.Conn].
type socket interface {
	net.Conn
	WriteNow(b []byte) (int, error)
}

// newConn shakes hands, within the time that the configuration gives.
func newConn(conn socket, cfg Config) (*Conn, error) {
	if err := conn.SetDeadline(soon(cfg.HandshakeTimeout)); err != nil {
		return nil, err
	}
	c := &Conn{cfg: cfg, conn: conn, r: bufio.NewReaderSize(conn, readBuffer), done: make(chan struct{})}
	if _, err := conn.Write(greeting()); err != nil {
		return nil, err
	}
	var err error
	if c.minor, err = readGreeting(c.r); err != nil {
		return nil, err
	}
	if _, err := conn.Write(ready(&cfg)); err != nil {
		return nil, err
	}
	if c.peer, err = readReady(c.r, cfg.Type); err != nil {
		if errors.Is(err, ErrType) {
			_, _ = conn.Write(appendCommand(nil, "ERROR", append([]byte{byte(len(badType))}, badType...))) // it may have gone
		}
		return nil, err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	if cfg.Heartbeat > 0 {
		c.beat = every(cfg.Heartbeat)
		go c.heartbeats()
	}
	return c, nil
}

// badType is what a peer is told whose socket type does not fit; libzmq says the same.
const badType = "Invalid socket type"

// Identity is what the peer calls itself; empty if it does not.
func (c *Conn) Identity() string { return c.peer.identity }

// PeerType is what kind of socket the peer is.
func (c *Conn) PeerType() SocketType { return c.peer.kind }

// RemoteAddr is where the peer is.
func (c *Conn) RemoteAddr() net.Addr { return c.conn.RemoteAddr() }

// Close ends the connection. What is being read or written fails with [ErrClosed].
func (c *Conn) Close() error {
	c.closed.Store(true)
	c.once.Do(func() {
		close(c.done)
		_ = c.conn.Close() // nothing is lost with it that an error would tell
	})
	return nil
}

// failure is an error as the caller sees it.
func (c *Conn) failure(err error) error {
	switch {
	case c.closed.Load():
		return ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrSilent
	}
	return err
}

// missed is after how many heartbeats without a byte a peer is taken for gone.
const missed = 3

// heartbeats asks the peer whether it is there.
func (c *Conn) heartbeats() {
	defer c.beat.Stop()
	ping := make([]byte, 2)
	// The peer may give up on this side after as long as this side does: in tenths of a second.
	binary.BigEndian.PutUint16(ping, uint16(min(missed*c.cfg.Heartbeat/(100*time.Millisecond), 1<<16-1))) //nolint:gosec // bounded
	for {
		select {
		case <-c.done:
			return
		case <-c.beat.C:
			if c.command("PING", ping) != nil {
				_ = c.Close() // it returns nil
				return
			}
		}
	}
}

// Read returns the next message. Its parts are valid until the next call. io.EOF means that the peer has closed the
// connection between two messages.
func (c *Conn) Read() ([][]byte, error) {
	c.buf, c.spans = c.buf[:0], c.spans[:0]
	for {
		flags, size, err := c.next()
		if err != nil {
			return nil, c.failure(err)
		}
		if flags&flagCommand != 0 {
			if err := c.obey(size); err != nil {
				return nil, c.failure(err)
			}
			continue
		}
		if len(c.spans) >= c.cfg.MaxParts || size > uint64(c.cfg.MaxMessage-len(c.buf)) { //nolint:gosec // not negative
			return nil, fmt.Errorf("%w: part %d of %d bytes after %d; at most %d parts and %d bytes",
				ErrLimit, len(c.spans)+1, size, len(c.buf), c.cfg.MaxParts, c.cfg.MaxMessage)
		}
		if c.buf, err = appendBody(c.buf, c.r, int(size)); err != nil { //nolint:gosec // bounded
			return nil, c.failure(err)
		}
		c.spans = append(c.spans, len(c.buf))
		if flags&flagMore == 0 {
			return c.message(), nil
		}
	}
}

// message cuts what was read into its parts.
func (c *Conn) message() [][]byte {
	c.parts = c.parts[:0]
	from := 0
	for _, to := range c.spans {
		c.parts = append(c.parts, c.buf[from:to:to])
		from = to
	}
	if cap(c.buf) > step && cap(c.buf) > 4*len(c.buf) {
		c.buf = nil // one large message is no reason to keep its memory; its parts do for as long as they are used
	}
	return c.parts
}

// next reads a frame's header, for as long as the peer gives a sign.
func (c *Conn) next() (flags byte, size uint64, err error) {
	if c.cfg.Heartbeat > 0 {
		if err := c.conn.SetReadDeadline(soon(missed * c.cfg.Heartbeat)); err != nil {
			return 0, 0, err
		}
	}
	flags, size, err = readHeader(c.r)
	if err == io.EOF && len(c.spans) > 0 { //nolint:errorlint // readHeader's own
		err = io.ErrUnexpectedEOF
	}
	return flags, size, err
}

// obey reads a command and does what it says. Those that nobody knows say nothing.
func (c *Conn) obey(size uint64) error {
	if size > maxCommand {
		return fmt.Errorf("%w: a command of %d bytes, at most %d", ErrLimit, size, maxCommand)
	}
	body, err := appendBody(nil, c.r, int(size))
	if err != nil {
		return err
	}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch name {
	case "PING":
		if len(data) < 2 {
			return fmt.Errorf("%w: a PING of %d bytes", ErrProtocol, len(data))
		}
		return c.command("PONG", data[2:min(len(data), 2+16)])
	case "ERROR":
		return fmt.Errorf("%w: %.255q", ErrPeer, reasonOf(data))
	case "SUBSCRIBE", "CANCEL":
		if c.subscribe != nil {
			return c.subscribe(data, name == "SUBSCRIBE")
		}
	}
	return nil
}

// Buffered reports whether something of a further message, or of a command, has been read from the system already. Whoever
// answers messages uses it to send the answers of a burst at once: see Queue. It is for the goroutine that calls Read.
func (c *Conn) Buffered() bool { return c.r.Buffered() > 0 }

// errNoParts says that a message was to be sent that cannot be.
var errNoParts = errors.New("zmtp: a message has at least one part")

// Write sends a message, after those that are queued. It returns when the system has taken all of it. After an error the
// connection is of no use.
func (c *Conn) Write(parts ...[]byte) error {
	if len(parts) == 0 {
		return errNoParts
	}
	c.w.Lock()
	defer c.w.Unlock()
	c.out = appendMessage(c.out, parts)
	return c.flush()
}

// Queue has a message sent with the next one that is written, or by Flush. What is queued has no bound but the caller's.
func (c *Conn) Queue(parts ...[]byte) error {
	if len(parts) == 0 {
		return errNoParts
	}
	c.w.Lock()
	defer c.w.Unlock()
	c.out = appendMessage(c.out, parts)
	return nil
}

// Flush sends what is queued, in one piece, and returns as Write does.
func (c *Conn) Flush() error {
	c.w.Lock()
	defer c.w.Unlock()
	return c.flush()
}

// flush writes the frames that wait. w is held.
func (c *Conn) flush() error {
	b := c.out
	if len(b) == 0 {
		return nil
	}
	if c.out = b[:0]; cap(b) > 1<<20 {
		c.out = nil // one large message is no reason to keep its memory
	}
	return c.send(b)
}

// send writes whole frames. w is held.
func (c *Conn) send(b []byte) error {
	n, err := c.conn.WriteNow(b)
	if err == nil && n < len(b) {
		if err = c.conn.SetWriteDeadline(soon(c.cfg.WriteTimeout)); err == nil {
			_, err = c.conn.Write(b[n:])
		}
	}
	if err == nil {
		return nil
	}
	err = c.failure(err)
	_ = c.Close() // half a frame may have been written; it returns nil
	return err
}

func (c *Conn) command(name string, data []byte) error {
	c.w.Lock()
	defer c.w.Unlock()
	c.out = appendCommand(c.out, name, data)
	return c.flush()
}

// Subscribe has a PUB send messages whose first part begins with topic; an empty one stands for all.
func (c *Conn) Subscribe(topic string) error {
	if c.minor >= 1 {
		return c.command("SUBSCRIBE", []byte(topic))
	}
	return c.Write(slices.Concat([]byte{1}, []byte(topic))) // before 3.1 it was a message
}
