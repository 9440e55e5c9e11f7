package rm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
)

// Client asks a resource manager, Larder's or Maru's, over one connection. Its methods may be called concurrently; they take
// turns. When the connection breaks a request is sent once more over another one, as Maru's clients do.
type Client struct {
	address string
	id      string

	mu     sync.Mutex // held for one request and its reply
	nc     net.Conn   // nil = none
	closed bool
	buf    []byte
}

// lastRequest numbers the requests of this process, as clients that share a name must.
var lastRequest atomic.Uint64

// StatusError is a status other than OK in a reply of the kind that was asked for.
type StatusError struct{ Status Status }

func (e *StatusError) Error() string { return fmt.Sprintf("rm: refused with status %d", e.Status) }

// ErrReply says that the peer's reply is none.
var ErrReply = errors.New("rm: the reply cannot be decoded")

// Dial connects to host:port, for a client of some name, HOST:PID by custom.
func Dial(ctx context.Context, address, id string) (*Client, error) {
	if id == "" || len(id) > maxClientID {
		return nil, fmt.Errorf("rm: a client's name of %d bytes: from 1 to %d", len(id), maxClientID)
	}
	c := &Client{address: address, id: id}
	return c, c.connect(ctx)
}

func (c *Client) connect(ctx context.Context) (err error) {
	if c.closed {
		return net.ErrClosed
	}
	if c.nc == nil {
		if c.nc, err = (&net.Dialer{}).DialContext(ctx, "tcp", c.address); err != nil {
			c.nc = nil
			return fmt.Errorf("rm: %w", err)
		}
	}
	return nil
}

// disconnect has the next request use a connection of its own.
func (c *Client) disconnect() {
	if c.nc != nil {
		_ = c.nc.Close() // what was to be heard over it has been
		c.nc = nil
	}
}

// Close ends the connection. Regions stay with their owner.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.disconnect()
	return nil
}

// Alloc asks for a region of at least size bytes, of the pool at path, or of any if that is empty.
func (c *Client) Alloc(ctx context.Context, size uint64, path string) (r Region, err error) {
	q := request{kind: KindAlloc, size: size, path: path, client: c.id, id: lastRequest.Add(1)}
	err = c.call(ctx, &q, KindAllocReply, func(b []byte) (status Status, err error) {
		status, r, err = parseAllocReply(b)
		return status, err
	})
	return r, err
}

// Free gives a region back.
func (c *Client) Free(ctx context.Context, h Handle) error {
	q := request{kind: KindFree, handle: h, client: c.id, id: lastRequest.Add(1)}
	return c.call(ctx, &q, KindFreeReply, func(b []byte) (status Status, err error) {
		d := reader{b: b}
		return d.status(), d.err()
	})
}

// Access asks where a region lies.
func (c *Client) Access(ctx context.Context, h Handle) (r Region, err error) {
	q := request{kind: KindAccess, handle: h, client: c.id}
	err = c.call(ctx, &q, KindAccessReply, func(b []byte) (status Status, err error) {
		status, r, err = parseAccessReply(b)
		return status, err
	})
	r.Region, r.Token = h.Region, h.Token
	return r, err
}

// Pools asks for statistics.
func (c *Client) Pools(ctx context.Context) (pools []Pool, err error) {
	err = c.call(ctx, &request{kind: KindStats}, KindStatsReply, func(b []byte) (Status, error) {
		pools, err = parseStatsReply(b)
		return StatusOK, err
	})
	return pools, err
}

// call sends a request and has its reply decoded.
func (c *Client) call(ctx context.Context, q *request, want Kind, decode func(b []byte) (Status, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	fresh := c.nc == nil
	kind, b, err := c.exchange(ctx, q)
	if err != nil && !fresh && ctx.Err() == nil {
		kind, b, err = c.exchange(ctx, q)
	}
	if err != nil {
		return errors.Join(err, ctx.Err())
	}
	if kind == KindError {
		return parseError(b)
	}
	if kind != want {
		return fmt.Errorf("%w: it is of kind %d", ErrReply, kind)
	}
	status, err := decode(b)
	if err == nil && status != StatusOK {
		err = &StatusError{status}
	}
	return err
}

// exchange sends a request and reads its reply, or gives the connection up.
func (c *Client) exchange(ctx context.Context, q *request) (kind Kind, b []byte, err error) {
	if err := c.connect(ctx); err != nil {
		return 0, nil, err
	}
	nc := c.nc
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() }) // then it is read and written in vain
	if _, err = nc.Write(requestFrame(q)); err == nil {
		kind, b, err = readFrame(nc, c.buf, maxReply, func() error { return nil })
	}
	if !stop() || err != nil {
		c.disconnect()
		return kind, b, err
	}
	c.buf = b[:0]
	return kind, b, nil
}

// reader takes a reply apart. What is not there is zero, and makes err return ErrReply.
type reader struct {
	b   []byte
	cut bool
}

func (d *reader) take(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.cut, d.b = true, nil
		return make([]byte, min(max(n, 0), 8))
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *reader) u32() uint32 { return binary.LittleEndian.Uint32(d.take(4)) }
func (d *reader) u64() uint64 { return binary.LittleEndian.Uint64(d.take(8)) }

func (d *reader) status() Status { return Status(int32(d.u32())) } //nolint:gosec // two's complement is what is meant

// text takes a text of some length.
func (d *reader) text(n uint32) string {
	if uint64(n) > uint64(len(d.b)) {
		d.cut, d.b = true, nil
		return ""
	}
	return string(d.take(int(n)))
}

func (d *reader) handle() Handle {
	return Handle{Region: d.u64(), Offset: d.u64(), Length: d.u64(), Token: d.u64()}
}

func (d *reader) err() error {
	if d.cut {
		return fmt.Errorf("%w: it is too short", ErrReply)
	}
	return nil
}

func parseAllocReply(b []byte) (status Status, r Region, err error) {
	d := reader{b: b}
	status = d.status()
	d.u32() // kind of access
	r.Handle = d.handle()
	d.u64() // what was asked for
	r.Path = d.text(d.u32())
	return status, r, d.err()
}

func parseAccessReply(b []byte) (status Status, r Region, err error) {
	d := reader{b: b}
	status = d.status()
	r.Path = d.text(d.u32())
	r.Offset, r.Length = d.u64(), d.u64()
	return status, r, d.err()
}

func parseStatsReply(b []byte) (pools []Pool, err error) {
	const fixed = 32 // bytes of a pool without its path
	d := reader{b: b}
	n := d.u32()
	if uint64(n) > uint64(len(d.b)/fixed) {
		return nil, fmt.Errorf("%w: %d pools in %d bytes", ErrReply, n, len(b))
	}
	for range n {
		length, kind := d.u32(), d.u32()
		p := Pool{File: kind == 1, Total: d.u64(), Free: d.u64(), Align: d.u64()}
		p.Path = d.text(length)
		pools = append(pools, p)
	}
	return pools, d.err()
}

// parseError decodes an error that the peer tells.
func parseError(b []byte) error {
	d := reader{b: b}
	e := &Error{Status: d.status()}
	e.Message = d.text(d.u32())
	if err := d.err(); err != nil {
		return err
	}
	return e
}
