package rm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"
)

// conn is one client's connection: one goroutine, one request at a time.
type conn struct {
	s      *Server
	nc     net.Conn
	client string // who it is, once it has said so
	buf    []byte
}

// serve answers requests until the connection ends, and says why it did.
func (c *conn) serve() error {
	deadline := soon(frameTime)
	for {
		if err := c.nc.SetReadDeadline(deadline); err != nil {
			return fmt.Errorf("rm: %w", err)
		}
		deadline = time.Time{} // between two requests a client may be silent for as long as it likes
		kind, payload, err := readFrame(c.nc, c.buf, maxRequest, func() error { return c.nc.SetReadDeadline(soon(frameTime)) })
		var out []byte
		if err == nil {
			c.buf = payload[:0]
			out, err = c.request(kind, payload)
		}
		if e, ok := errors.AsType[*Error](err); ok {
			c.s.Faults.Add(1)
			out = errorFrame(e)
			if !e.fatal {
				err = nil
			}
		}
		if len(out) > 0 {
			if werr := c.write(out); werr != nil {
				return werr
			}
		}
		if err != nil {
			return err
		}
	}
}

// write sends a frame.
func (c *conn) write(frame []byte) error {
	err := c.nc.SetWriteDeadline(soon(writeTime))
	if err == nil {
		_, err = c.nc.Write(frame)
	}
	if err != nil {
		return fmt.Errorf("rm: write: %w", err)
	}
	return nil
}

// request answers a request with a frame, or an Error.
func (c *conn) request(kind Kind, payload []byte) ([]byte, error) {
	q, fault := parseRequest(kind, payload)
	if fault == nil && !c.pin(q.client) {
		fault = errPinned
	}
	if fault != nil {
		return nil, fault
	}
	c.s.Requests[kind].Add(1)
	ctx, cancel := context.WithTimeout(c.s.ctx, serveTime)
	defer cancel()
	switch kind {
	case KindAlloc:
		return c.s.replies.answer(ctx, replyKey{q.client, q.id}, payload, func() ([]byte, bool) { return c.alloc(ctx, &q) }), nil
	case KindFree:
		return c.s.replies.answer(ctx, replyKey{q.client, q.id}, payload, func() ([]byte, bool) { return c.free(ctx, &q) }), nil
	case KindAccess:
		return c.access(ctx, &q)
	default:
		return c.stats(ctx)
	}
}

// pin holds the connection to the first name that it was used under. It reports whether a request's name is that one.
func (c *conn) pin(client string) bool {
	if client != "" && c.client == "" {
		c.client = client
	}
	return client == "" || client == c.client
}

func (c *conn) alloc(ctx context.Context, q *request) (frame []byte, keep bool) {
	r, err := c.s.regions.Alloc(ctx, q.client, q.size, q.path)
	status, known := statusOf(err)
	switch {
	case !known:
		return c.unavailable(err), false
	case status != StatusOK:
		return allocFrame(status, &Region{}, 0), true
	}
	return allocFrame(StatusOK, &r, q.size), true
}

func (c *conn) free(ctx context.Context, q *request) (frame []byte, keep bool) {
	err := c.s.regions.Free(ctx, q.client, q.handle)
	status, known := statusOf(err)
	switch {
	case !known:
		return c.unavailable(err), false
	case status == StatusToken:
		c.s.Faults.Add(1)
		return errorFrame(errFreeToken), false
	}
	return freeFrame(status), true
}

func (c *conn) access(ctx context.Context, q *request) ([]byte, error) {
	r, err := c.s.regions.Access(ctx, q.handle)
	status, known := statusOf(err)
	switch {
	case !known:
		return c.unavailable(err), nil
	case status == StatusToken:
		return nil, errAccessToken
	case status != StatusOK:
		return accessFrame(status, &Region{}), nil
	}
	return accessFrame(StatusOK, &r), nil
}

func (c *conn) stats(ctx context.Context) ([]byte, error) {
	pools, err := c.s.regions.Pools(ctx)
	if err != nil {
		return c.unavailable(err), nil
	}
	return statsFrame(pools), nil
}

// unavailable is the answer where the pool has none.
func (c *conn) unavailable(err error) []byte {
	c.s.Faults.Add(1)
	c.s.logger.LogAttrs(c.s.ctx, slog.LevelWarn, "a resource manager's request failed",
		slog.String("client", c.nc.RemoteAddr().String()), slog.Any("error", err))
	return errorFrame(errUnavailable)
}
