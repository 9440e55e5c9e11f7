package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"larder/sock"
)

// Server listens at an endpoint and gives each connection, after its handshake, to a goroutine of its own. A peer that
// does not finish its handshake holds up nobody.
type Server struct {
	cfg    Config
	l      net.Listener
	handle func(*Conn)
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

// Listen begins to serve. handle is called for each connection, which is closed when it returns.
func Listen(ctx context.Context, endpoint string, cfg Config, handle func(*Conn)) (*Server, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	network, address, err := parse(endpoint, true)
	if err != nil {
		return nil, err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: listen at %s: %w", endpoint, err)
	}
	s := &Server{cfg: cfg, l: l, handle: handle, conns: map[net.Conn]struct{}{}}
	s.wg.Go(s.accept)
	return s, nil
}

// Endpoint is where the server listens.
func (s *Server) Endpoint() string { return endpointOf(s.l.Addr()) }

// Close ends all connections. It returns when no handler runs any more.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for conn := range s.conns {
		_ = conn.Close() // its handler sees it end
	}
	s.mu.Unlock()
	err := s.l.Close()
	s.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// acceptAgain is how long a listener waits that cannot accept: files run out, say, and come back.
const acceptAgain = 50 * time.Millisecond

func (s *Server) accept() {
	for {
		conn, err := s.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			pause(acceptAgain)
			continue
		}
		if s.admit(conn) {
			s.wg.Go(func() { s.serve(conn) })
		} else {
			_ = conn.Close() // nothing has been said yet
		}
	}
}

func (s *Server) admit(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= s.cfg.MaxPeers {
		return false
	}
	s.conns[conn] = struct{}{}
	return true
}

func (s *Server) serve(conn net.Conn) {
	defer func() {
		_ = conn.Close() // it has ended
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	}()
	sc, err := sock.New(conn)
	if err != nil {
		return // it is broken already
	}
	c, err := newConn(sc, s.cfg)
	if err != nil {
		return // the peer sees the connection end, or was told why
	}
	defer func() { _ = c.Close() }() // it returns nil
	s.handle(c)
}
