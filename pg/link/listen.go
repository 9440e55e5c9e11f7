package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

const (
	// aliveEvery is how often TCP asks whether a host is there that says nothing, and vanished how long it may be silent.
	aliveEvery = time.Second
	vanished   = 3 * time.Second
	// dialFirst and dialAtMost are the pauses between attempts to dial.
	dialFirst  = 5 * time.Millisecond
	dialAtMost = 200 * time.Millisecond
	// acceptPause is how long a listener waits that cannot accept: the process is out of files, which passes.
	acceptPause = 50 * time.Millisecond
)

// listen opens the node's sockets: an abstract one for the processes of its network namespace, and those of Config.Listen.
func (n *Node) listen() error {
	var a address
	a.Unix = fmt.Sprintf("larder-pg-%016x%016x", draw(), draw())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + a.Unix, Net: "unix"})
	if err != nil {
		return fmt.Errorf("link: listen for processes of this host: %w", err)
	}
	n.listener = append(n.listener, l)
	for i, at := range n.cfg.Listen {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", at)
		if err != nil {
			return errors.Join(fmt.Errorf("link: listen: %w", err), n.closeListeners())
		}
		n.listener = append(n.listener, l)
		if len(n.cfg.Advertise) > 0 {
			a.TCP = append(a.TCP, n.cfg.Advertise[i])
			continue
		}
		reached, err := reachedAt(l.Addr().String())
		if err != nil {
			return errors.Join(err, n.closeListeners())
		}
		a.TCP = append(a.TCP, reached...)
	}
	a.TCP = a.TCP[:min(len(a.TCP), maxAddresses)]
	n.address = marshal(a)
	if _, err := parseAddress(n.address); err != nil { // what was advertised
		return errors.Join(err, n.closeListeners())
	}
	return nil
}

func (n *Node) closeListeners() (all error) {
	for _, l := range n.listener {
		all = errors.Join(all, l.Close())
	}
	return all
}

// reachedAt is where others reach a socket that is bound to an address: where that is a wildcard, those of the interfaces.
func reachedAt(bound string) ([]string, error) {
	host, port, err := net.SplitHostPort(bound)
	if err != nil {
		return nil, fmt.Errorf("link: the address that was bound: %w", err)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsUnspecified() {
		return []string{bound}, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("link: look for this host's addresses: %w", err)
	}
	var out []string
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			out = append(out, net.JoinHostPort(ip.IP.String(), port))
		}
	}
	if len(out) == 0 { // a host by itself
		out = append(out, net.JoinHostPort("127.0.0.1", port))
	}
	return out, nil
}

// accept takes connections until the node is closed. Those that do not say who they are keep others out until their time is over.
func (n *Node) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			select {
			case <-after(acceptPause):
			case <-n.ctx.Done():
			}
			continue
		}
		select {
		case n.greeting <- struct{}{}:
			n.wg.Go(func() { n.receive(conn) })
		default:
			n.refuse(conn, &RefusedError{Code: RefusedBusy, Text: "too many connections at once: try again"})
			_ = conn.Close() // it has been told why
		}
	}
}

// receive greets who has dialed.
func (n *Node) receive(conn net.Conn) {
	c, err := n.welcome(conn)
	<-n.greeting
	if err == nil && c != nil {
		err = n.adopt(c)
	}
	if err != nil {
		n.log("link: a connection was not taken", conn, err)
		_ = conn.Close() // it has been told why
	}
}

// adopt keeps a control connection whose greetings are over.
func (n *Node) adopt(c *control) error {
	if tcp, ok := c.conn.(*net.TCPConn); ok {
		if err := watchHost(tcp); err != nil {
			return fmt.Errorf("link: watch the peer's host: %w", err)
		}
	}
	return n.register(c)
}

// dial dials a process, at each of its addresses in turn and again after a pause, until it is connected, it is no use to try again, or ctx
// has ended.
func (n *Node) dial(ctx context.Context, to Peer, at address) error {
	var told error // why the last attempt has failed that was not cut off
	for pause := dialFirst; ; pause = min(2*pause, dialAtMost) {
		var last error
		for _, one := range n.ways(at, true) {
			conn, err := n.open(ctx, one)
			if err == nil {
				err = n.dialControl(ctx, conn, to, at)
			}
			if err == nil {
				return nil
			}
			var refused *RefusedError
			if errors.As(err, &refused) && refused.lasting() {
				return err
			}
			last = errors.Join(last, err)
		}
		if last == nil {
			return fmt.Errorf("%w: rank %d has no address that can be dialed: give it one to listen at", ErrNoTransport, to.Rank)
		}
		if told == nil || ctx.Err() == nil {
			told = last
		}
		select {
		case <-after(pause):
		case <-n.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("link: connect to rank %d: %w: %w", to.Rank, ctx.Err(), told)
		}
		if n.overtaken(to) {
			return nil
		}
	}
}

// overtaken reports whether another incarnation is wanted by now.
func (n *Node) overtaken(to Peer) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.peerOf(to.Rank).wanted != to.Incarnation
}

func (n *Node) dialControl(ctx context.Context, conn net.Conn, to Peer, at address) error {
	c, err := n.greet(ctx, conn, to)
	if err == nil {
		c.at = at
		err = n.adopt(c)
	}
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	return nil
}

// way is one address of a process.
type way struct{ network, address string }

// ways are the addresses to try. A Unix socket that cannot be reached is one of another network namespace, and says so at once.
func (n *Node) ways(at address, local bool) (list []way) {
	if local && at.Unix != "" {
		list = append(list, way{"unix", "@" + at.Unix})
	}
	for _, a := range at.TCP {
		list = append(list, way{"tcp", a})
	}
	return list
}

// open opens a connection.
func (n *Node) open(ctx context.Context, w way) (net.Conn, error) {
	d := net.Dialer{Timeout: greetTimeout, KeepAlive: -1}
	conn, err := d.DialContext(ctx, w.network, w.address)
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	return conn, nil
}

// watchHost has TCP find out when a host is not there any more.
func watchHost(conn *net.TCPConn) error {
	probes := net.KeepAliveConfig{Enable: true, Idle: aliveEvery, Interval: aliveEvery, Count: int(vanished / aliveEvery)}
	return errors.Join(conn.SetNoDelay(true), conn.SetKeepAliveConfig(probes), setUserTimeout(conn, vanished))
}
