package rm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of a listener.
const (
	// MaxClients are connected at once, as in Maru; more are closed when they connect.
	MaxClients = 256
	// frameTime is how long a frame may take from its first byte to its last, and the first one from the connection's start:
	// clients connect when they have something to ask.
	frameTime = 30 * time.Second
	// writeTime is how long a client may take to read its reply.
	writeTime = 10 * time.Second
	// serveTime is how long a request may wait for the pool: clients give up after 10 s.
	serveTime = 8 * time.Second
	// acceptAgain is how long a listener waits that cannot accept: files run out, say, and come back.
	acceptAgain = 50 * time.Millisecond
)

// keepAlive has the kernel find out within half a minute that a client's host is gone, as Maru's does.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}

// Regions is where regions come from. All methods may be called concurrently; they wait, within ctx, for a leader that can
// answer. Any error but those named here means that none did.
type Regions interface {
	// Alloc gives a client a region of at least size bytes, of the pool at path, or of any if that is empty. It may fail
	// with ErrSize, ErrNoPool, ErrUnknownPath or ErrNoRoom.
	Alloc(ctx context.Context, client string, size uint64, path string) (Region, error)
	// Free takes a region back from the client that it was given to. It may fail with ErrNotFound, ErrToken or ErrOwner.
	Free(ctx context.Context, client string, h Handle) error
	// Access says where a region lies. It may fail with ErrNotFound or ErrToken.
	Access(ctx context.Context, h Handle) (Region, error)
	// Pools lists the devices that regions come from.
	Pools(ctx context.Context) ([]Pool, error)
}

// What Regions refuse.
var (
	ErrSize        = errors.New("rm: a size of 0, or above 2^48 bytes")
	ErrNoPool      = errors.New("rm: no device serves")
	ErrUnknownPath = errors.New("rm: no device of the pool has this path")
	ErrNoRoom      = errors.New("rm: no room")
	ErrNotFound    = errors.New("rm: no such region")
	ErrToken       = errors.New("rm: the handle's token is not the region's")
	ErrOwner       = errors.New("rm: the region is another client's")
)

// statusOf is how an error is told. A nil Error means a status in the reply itself.
func statusOf(err error) (Status, bool) {
	for _, v := range [...]struct {
		err    error
		status Status
	}{
		{nil, StatusOK},
		{ErrSize, StatusInvalid},
		{ErrNoPool, StatusNoPool},
		{ErrUnknownPath, StatusNotFound},
		{ErrNoRoom, StatusNoRoom},
		{ErrNotFound, StatusNotFound},
		{ErrToken, StatusToken},
		{ErrOwner, StatusOwner},
	} {
		if errors.Is(err, v.err) {
			return v.status, true
		}
	}
	return StatusUnavailable, false
}

// Counters count what a listener did. Read them at any time.
type Counters struct {
	Requests [int(KindAccess) + 1]atomic.Uint64 // by kind
	Faults   atomic.Uint64                      // requests that were answered with an error of their own
	Refused  atomic.Uint64                      // connections above MaxClients
	Clients  atomic.Int64                       // connected now
}

// Server listens and serves.
type Server struct {
	Counters

	l       net.Listener
	regions Regions
	logger  *slog.Logger
	replies *replies
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

// Listen begins to serve at host:port.
func Listen(ctx context.Context, address string, regions Regions, logger *slog.Logger) (*Server, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("rm: listen: %w", err)
	}
	s := &Server{
		l: l, regions: regions, logger: logger, replies: newReplies(sinceStart()), conns: map[net.Conn]struct{}{},
	}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wg.Go(s.accept)
	return s, nil
}

// Addr is where the server listens.
func (s *Server) Addr() net.Addr { return s.l.Addr() }

// Close ends all connections. It returns when nothing is served any more.
func (s *Server) Close() error {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		_ = c.Close() // its goroutine sees it end
	}
	s.mu.Unlock()
	err := s.l.Close()
	s.wg.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("rm: close: %w", err)
	}
	return nil
}

func (s *Server) accept() {
	for {
		nc, err := s.l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			pause(acceptAgain)
		case s.admit(nc):
			s.wg.Go(func() { s.serve(nc) })
		default:
			s.Refused.Add(1)
			_ = nc.Close() // nothing has been said yet
		}
	}
}

func (s *Server) admit(nc net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= MaxClients {
		return false
	}
	s.conns[nc] = struct{}{}
	s.Clients.Add(1)
	return true
}

func (s *Server) serve(nc net.Conn) {
	c := conn{s: s, nc: nc, buf: make([]byte, 0, 256)}
	err := c.serve()
	if e, ok := errors.AsType[*Error](err); ok {
		s.logger.LogAttrs(s.ctx, slog.LevelWarn, "ending a resource manager's client",
			slog.String("client", nc.RemoteAddr().String()), slog.String("why", e.Message))
	}
	_ = nc.Close() // it has ended
	s.mu.Lock()
	delete(s.conns, nc)
	s.mu.Unlock()
	s.Clients.Add(-1)
}
