package rm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Client is a connection to a resource manager, Larder's or Maru's. Its methods may be called concurrently; they take turns.
// After an error that is neither an [Error] nor a [StatusError] the connection is of no use.
type Client struct {
	nc net.Conn
	id string

	mu  sync.Mutex // held for one request and its reply
	buf []byte
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
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("rm: %w", err)
	}
	return &Client{nc: nc, id: id}, nil
}

// Close ends the connection. Regions stay with their owner.
func (c *Client) Close() error { return c.nc.Close() }

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
	if err := c.nc.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("rm: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.nc.SetDeadline(time.Unix(1, 0)) }) // a closed connection says so itself
	defer stop()
	if _, err := c.nc.Write(requestFrame(q)); err != nil {
		return fmt.Errorf("rm: write: %w", errors.Join(err, ctx.Err()))
	}
	kind, b, err := readFrame(c.nc, c.buf, maxReply, func() error { return nil })
	if err != nil {
		return errors.Join(err, ctx.Err())
	}
	c.buf = b[:0]
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
