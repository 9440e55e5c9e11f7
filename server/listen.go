package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"larder/protocol"
	"larder/raft"
	"larder/sock"
)

// acceptPause is how long accepting rests after it failed, as it does when descriptors have run out.
const acceptPause = 20 * time.Millisecond

// network serves clients: it owns the listeners and connections.
type network struct {
	cfg      Config
	master   *Master
	node     *raft.Node
	counters *Counters
	logger   *slog.Logger
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	forwarder *forwarder

	mu        sync.Mutex
	listeners []net.Listener
	conns     map[*conn]struct{}
	stopping  bool
}

// listenUnix listens on a Unix socket, whose file an earlier server may have left behind.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	const maxPath = 107 // of sockaddr_un
	if len(path) > maxPath {
		return nil, fmt.Errorf("server: the socket's path %q is longer than %d bytes: choose a shorter one with socket", path, maxPath)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err == nil {
		return l, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("server: listen on %s: %w", path, err)
	}
	var d net.Dialer
	if c, derr := d.DialContext(ctx, "unix", path); derr == nil {
		_ = c.Close() // it was a question only
		return nil, fmt.Errorf("server: another server listens on %s: stop it, or choose another socket: %w", path, err)
	}
	if rerr := os.Remove(path); rerr != nil {
		return nil, fmt.Errorf("server: remove the old socket: %w", rerr)
	}
	if l, err = lc.Listen(ctx, "unix", path); err != nil {
		return nil, fmt.Errorf("server: listen on %s: %w", path, err)
	}
	return l, nil
}

// open starts to listen.
func (s *network) open() error {
	var lc net.ListenConfig
	if s.cfg.Listen != Off && s.cfg.Listen != "" {
		l, err := lc.Listen(s.ctx, "tcp", s.cfg.Listen)
		if err != nil {
			return fmt.Errorf("server: listen for clients: %w", err)
		}
		s.listeners = append(s.listeners, l)
	}
	if s.cfg.Socket != Off && s.cfg.Socket != "" {
		l, err := listenUnix(s.ctx, s.cfg.Socket)
		if err != nil {
			return err
		}
		s.listeners = append(s.listeners, l)
	}
	return nil
}

// start begins to accept.
func (s *network) start() {
	s.forwarder = &forwarder{
		s: s, timeout: s.cfg.ElectionTimeout, leader: s.node.Leader, address: s.master.cfg.Leader,
	}
	for _, l := range s.listeners {
		s.wg.Add(1)
		go s.accept(l)
	}
}

// addr returns the address of the first listener of a network kind, "" if there is none.
func (s *network) addr(kind string) string {
	for _, l := range s.listeners {
		if l.Addr().Network() == kind {
			return l.Addr().String()
		}
	}
	return ""
}

func (s *network) accept(l net.Listener) {
	defer s.wg.Done()
	for {
		c, err := l.Accept()
		if err == nil {
			s.add(c)
			continue
		}
		if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		s.logger.Warn("accepting a client failed", slog.Any("error", err))
		if !pause(s.ctx, acceptPause) {
			return
		}
	}
}

// add takes in a connection, or refuses it if there are too many.
func (s *network) add(nc net.Conn) {
	sc, err := sock.New(nc)
	if err != nil {
		_ = nc.Close() // it is broken already
		return
	}
	s.mu.Lock()
	full := len(s.conns) >= s.cfg.MaxConnections
	if full || s.stopping {
		s.mu.Unlock()
		s.counters.ConnectionsRefused.Add(1)
		s.refuse(nc)
		return
	}
	c := newConn(s, sc)
	c.distant = protocol.Distant(nc.LocalAddr().String(), nc.RemoteAddr().String())
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	s.counters.ConnectionsAccepted.Add(1)
	s.counters.Connections.Add(1)
	go c.serve()
}

// refuse tells a client that there are too many, if its socket takes that at once.
func (s *network) refuse(nc net.Conn) {
	b, mark := protocol.BeginFrame(nil, protocol.ReplyBit, 0)
	b = protocol.EndFrame(protocol.AppendErrorReply(b, &protocol.Error{
		Code: protocol.CodeBusy, Message: "this server has as many connections as it may: retry, or raise max_connections",
		RetryAfterMS: 1000,
	}), mark)
	_ = nc.SetWriteDeadline(socketDeadline(acceptPause)) // a courtesy: whether it arrives does not matter
	_, _ = nc.Write(b)                                   // as above
	_ = nc.Close()                                       // as above
}

// remove forgets a connection that has ended.
func (s *network) remove(c *conn) {
	c.shut()
	s.master.CloseClient(c.client)
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.counters.Connections.Add(-1)
	s.wg.Done()
}

// closeListeners stops accepting.
func (s *network) closeListeners() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	for _, l := range s.listeners {
		_ = l.Close() // nothing waits on it
	}
}

// stop cuts everybody off and waits for all goroutines.
func (s *network) stop() {
	s.closeListeners()
	s.cancel()
	if s.forwarder != nil {
		s.forwarder.stop()
	}
	s.mu.Lock()
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		c.Flush()
		c.shut()
	}
	s.wg.Wait()
}
