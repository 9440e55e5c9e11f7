package client

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"larder/protocol"
	"larder/sock"
)

const (
	unixScheme = "unix:"
	// dialTimeout bounds one attempt to reach a master: a host in reach answers in milliseconds.
	dialTimeout = time.Second
	// minBackoff and maxBackoff bound the pause between attempts. The longest is a fraction of an election timeout, so
	// that a new leader is found soon after it is elected.
	minBackoff = 2 * time.Millisecond
	maxBackoff = 200 * time.Millisecond
	// maxRedirects is how many leader hints are followed in a row before the client pauses: during an election masters
	// may point at each other.
	maxRedirects = 3
)

// link is the set of connections to the leader that calls use.
type link struct {
	conns []*conn
	next  atomic.Uint32
}

// pick returns one of the connections, in turn.
func (l *link) pick() *conn {
	if len(l.conns) == 1 {
		return l.conns[0]
	}
	return l.conns[l.next.Add(1)%uint32(len(l.conns))] //nolint:gosec // at most MaxConns
}

func (l *link) close(why error) {
	for _, cn := range l.conns {
		cn.close(why)
	}
}

// backoff returns a jittered pause that grows with the number of attempts before.
func backoff(attempt int) time.Duration {
	d := min(minBackoff<<min(attempt, 10), maxBackoff)
	return d/2 + rand.N(d/2+1) //nolint:gosec // no secret
}

// conn returns a connection to the leader. It waits while there is none.
func (c *Client) conn(ctx context.Context) (*conn, error) {
	if l := c.link.Load(); l != nil {
		return l.pick(), nil
	}
	for {
		c.linkMu.Lock()
		changed := c.linkChanged
		c.linkMu.Unlock()
		if l := c.link.Load(); l != nil {
			return l.pick(), nil
		}
		select {
		case <-changed:
		case <-c.life.Done():
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err() //nolint:wrapcheck // callers wrap
		}
	}
}

// setLink makes l the link, and wakes who waits for one. nil takes the link away.
func (c *Client) setLink(l *link) {
	c.linkMu.Lock()
	defer c.linkMu.Unlock()
	c.link.Store(l)
	close(c.linkChanged)
	c.linkChanged = make(chan struct{})
}

// connClosed hears of every connection that ends. One that belonged to the link takes the others with it: they lead to
// the same master.
func (c *Client) connClosed(cn *conn, why error) {
	l := c.link.Load()
	if l == nil || !slices.Contains(l.conns, cn) {
		return
	}
	c.linkMu.Lock()
	mine := c.link.CompareAndSwap(l, nil)
	if mine {
		c.left = cn.addr
	}
	c.linkMu.Unlock()
	if !mine {
		return
	}
	if c.life.Err() == nil {
		c.cfg.Logger.Info("connection lost", slog.String("addr", cn.addr), slog.Any("error", why))
	}
	l.close(why)
	c.counters.reconnects.Add(1)
	select {
	case c.needLink <- struct{}{}:
	default:
	}
}

// redirect leaves the master of cn for the leader that it named.
func (c *Client) redirect(cn *conn, hint string) {
	c.linkMu.Lock()
	if hint != "" && hint != cn.addr {
		c.hint = hint
	}
	c.linkMu.Unlock()
	cn.close(refused(protocol.CodeNotLeader, "redirected"))
}

// connector keeps a link up until the client is closed.
func (c *Client) connector() {
	defer c.wg.Done()
	for {
		select {
		case <-c.life.Done():
			return
		case <-c.needLink:
		}
		redirects := 0
		for attempt := 0; c.link.Load() == nil; {
			addr, hinted := c.nextAddr()
			err := c.connect(addr)
			if err == nil {
				break
			}
			if c.life.Err() != nil {
				return
			}
			c.noteConnectError(addr, err)
			if c.followed(err) && redirects < maxRedirects {
				redirects++
				continue
			}
			if !hinted {
				redirects = 0
				attempt++
			}
			if sleep(c.life, backoff(attempt)) != nil {
				return
			}
		}
	}
}

// followed keeps the leader hint of an error, if it has one.
func (c *Client) followed(err error) bool {
	e, ok := errors.AsType[*protocol.Error](err)
	if !ok || e.Leader == "" {
		return false
	}
	c.linkMu.Lock()
	c.hint = e.Leader
	c.linkMu.Unlock()
	return true
}

func (c *Client) noteConnectError(addr string, err error) {
	c.linkMu.Lock()
	c.lastErr = err
	c.linkMu.Unlock()
	c.cfg.Logger.Debug("cannot connect", slog.String("addr", addr), slog.Any("error", err))
}

// nextAddr returns the leader hint, once, and else the next of the known masters in turn. The one that was left last, of
// several, is passed over once: if it hangs, another attempt would take a CallTimeout.
func (c *Client) nextAddr() (addr string, hinted bool) {
	c.linkMu.Lock()
	defer c.linkMu.Unlock()
	if c.hint != "" {
		addr, c.hint = c.hint, ""
		return c.localPath(addr), true
	}
	for range 2 {
		addr = c.addrs[c.nextAddrIndex%len(c.addrs)]
		c.nextAddrIndex++
		if addr != c.left {
			break
		}
		c.left = ""
	}
	return addr, false
}

// localPath replaces a member's address by that of its Unix socket, if the client was told to use one and the socket
// is on this host.
func (c *Client) localPath(addr string) string {
	if !strings.HasPrefix(c.cfg.Addrs[0], unixScheme) {
		return addr
	}
	for _, m := range c.members {
		if m.Addr == addr && m.Socket != "" {
			if _, err := os.Stat(m.Socket); err == nil {
				return unixScheme + m.Socket
			}
		}
	}
	return addr
}

// connect makes the connections of a link to one master.
func (c *Client) connect(addr string) error {
	ctx, cancel := context.WithTimeout(c.life, dialTimeout+c.cfg.CallTimeout)
	defer cancel()
	l, before := new(link), c.sess.Load()
	for i := range c.cfg.Conns {
		cn, err := c.dial(ctx, addr)
		if err == nil {
			l.conns = append(l.conns, cn)
			var reply *protocol.HandshakeReply
			if reply, err = c.handshake(ctx, cn, i == 0); err == nil && i == 0 {
				c.learn(reply)
			}
		}
		if err != nil {
			l.close(err)
			return err
		}
	}
	c.setLink(l)
	if before != nil {
		c.tellSession(c.sess.Load() != before)
	}
	for _, cn := range l.conns {
		if cn.reason() != nil { // it ended before anyone could see that it was part of the link
			c.connClosed(cn, cn.reason())
		}
	}
	c.cfg.Logger.Info("connected", slog.String("addr", addr), slog.Uint64("session", c.sess.Load().id))
	return nil
}

func (c *Client) dial(ctx context.Context, addr string) (*conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	network, target := "tcp", addr
	if path, ok := strings.CutPrefix(addr, unixScheme); ok {
		network, target = "unix", path
	}
	nc, err := d.DialContext(ctx, network, target)
	if err != nil {
		return nil, errors.Join(errConnLost, err)
	}
	sc, err := sock.New(nc)
	if err != nil {
		_ = nc.Close() // it is broken already
		return nil, errors.Join(errConnLost, err)
	}
	return startConn(sc, addr, c.cfg.Clock, c.pushed, c.connClosed, &c.readers), nil
}

// learn keeps what a HANDSHAKE said of the cluster and its devices.
func (c *Client) learn(reply *protocol.HandshakeReply) {
	c.devices.learn(reply.Pool, reply.Devices)
	c.quarantineMS.Store(reply.QuarantineMS)
	c.linkMu.Lock()
	defer c.linkMu.Unlock()
	if c.leader != 0 && reply.Leader != 0 && c.leader != reply.Leader {
		c.counters.leaderChanges.Add(1)
	}
	c.leader = cmp.Or(reply.Leader, c.leader)
	c.incarnation = reply.Incarnation
	if id, err := parseID(reply.Pool); err == nil {
		c.poolID = id
	}
	c.members = reply.Members
	addrs := slices.Clone(c.cfg.Addrs)
	for _, m := range reply.Members {
		if m.Addr == "" || m.Learner {
			continue
		}
		if a := c.localPath(m.Addr); !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	c.addrs = addrs
}
