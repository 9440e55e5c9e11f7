package raft

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Limits of the transport.
const (
	maxConns       = 128              // incoming: two of each member at most, and those being replaced
	queueMessages  = 4096             // to one peer: several inflight windows
	queueBytes     = 64 << 20         // to one peer, as raft's own window
	maxLearned     = 64               // addresses of senders that are no members yet
	ioBuffer       = 64 << 10         // of a connection and direction
	helloTimeout   = 5 * time.Second  // to connect and be answered: several retransmissions
	writeTimeout   = 10 * time.Second // a peer that takes nothing for so long is gone
	keepAlive      = 3 * time.Second  // a frame on an idle connection
	readTimeout    = 10 * time.Second // three keep-alives missed
	snapIOTimeout  = 30 * time.Second // one read or write of a snapshot: a busy disk at the other end
	snapReplyTime  = 2 * time.Minute  // for the last table's sync
	backoffFirst   = 50 * time.Millisecond
	backoffMax     = time.Second // a restarted peer is found within an election timeout or two
	acceptBackoff  = 100 * time.Millisecond
	incomingStream = 1 // snapshots received at once: a second would come from a deposed leader
)

// TCPConfig configures a TCP transport.
type TCPConfig struct {
	// ClusterID and ID of this member.
	ClusterID, ID uint64
	// Listener accepts the others' connections. The transport closes it.
	Listener net.Listener
	// Addr is where others reach the Listener: host:port.
	Addr string
	// Dial connects to an address; nil for TCP. For tests and for wrapping in TLS.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Logger, nil for none.
	Logger *slog.Logger
}

// TCP is the Transport between processes: to each peer one connection for
// messages and one per snapshot, each opened by the sender. It authenticates
// nobody: keep its port inside, or wrap Listener and Dial in TLS.
type TCP struct {
	cfg TCPConfig
	h   Handler

	mu      sync.Mutex
	members map[uint64]string
	learned map[uint64]string
	peers   map[uint64]*peer
	conns   map[net.Conn]struct{}
	stopped bool

	streams chan struct{}
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

// NewTCP makes a transport; Start begins to accept.
func NewTCP(cfg TCPConfig) *TCP {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	t := &TCP{
		cfg: cfg, members: map[uint64]string{}, learned: map[uint64]string{}, peers: map[uint64]*peer{},
		conns: map[net.Conn]struct{}{}, streams: make(chan struct{}, incomingStream),
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

// Start implements Transport.
func (t *TCP) Start(h Handler) error {
	t.h = h
	if t.cfg.Listener == nil {
		return errors.New("raft: the transport has no listener")
	}
	t.wg.Add(1)
	go t.accept()
	return nil
}

// Stop implements Transport.
func (t *TCP) Stop() {
	t.mu.Lock()
	t.stopped = true
	t.cancel()
	if t.cfg.Listener != nil {
		_ = t.cfg.Listener.Close() // ends accept
	}
	for c := range t.conns {
		_ = c.Close() // ends its reader
	}
	for _, p := range t.peers {
		p.stop()
	}
	t.mu.Unlock()
	t.wg.Wait()
}

// SetMembers implements Transport.
func (t *TCP) SetMembers(members []Member) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.members)
	for _, m := range members {
		t.members[m.ID] = m.Addr
		delete(t.learned, m.ID)
	}
	for id, p := range t.peers {
		if addr, ok := t.address(id); !ok || addr != p.addr {
			p.stop()
			delete(t.peers, id)
		}
	}
}

// address finds where a member listens. Called with the lock.
func (t *TCP) address(id uint64) (string, bool) {
	if a, ok := t.members[id]; ok && a != "" {
		return a, true
	}
	a, ok := t.learned[id]
	return a, ok
}

// Send implements Transport.
func (t *TCP) Send(msgs []*pb.Message) {
	var lost []uint64
	t.mu.Lock()
	for _, m := range msgs {
		p := t.peer(m.GetTo())
		if p != nil && p.push(m) {
			continue
		}
		if !slices.Contains(lost, m.GetTo()) {
			lost = append(lost, m.GetTo())
		}
	}
	t.mu.Unlock()
	for _, id := range lost {
		t.h.Unreachable(id)
	}
}

// peer finds or starts the sender to id; nil if there is no address. Called with
// the lock.
func (t *TCP) peer(id uint64) *peer {
	if p := t.peers[id]; p != nil {
		return p
	}
	addr, ok := t.address(id)
	if !ok || t.stopped {
		return nil
	}
	p := &peer{t: t, id: id, addr: addr, wake: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancel(t.ctx)
	t.peers[id] = p
	t.wg.Add(1)
	go p.run()
	return p
}

// accept takes connections.
func (t *TCP) accept() {
	defer t.wg.Done()
	for {
		c, err := t.cfg.Listener.Accept()
		if err != nil {
			if t.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			t.cfg.Logger.Warn("accepting a raft connection failed", slog.Any("error", err))
			if !pause(t.ctx, acceptBackoff) { // out of descriptors: they come back
				return
			}
			continue
		}
		if !t.track(c) {
			_ = c.Close() // too many, or stopping
			continue
		}
		go func() {
			defer t.wg.Done()
			err := t.serve(c)
			t.untrack(c)
			if err != nil && t.ctx.Err() == nil && !errors.Is(err, io.EOF) {
				t.cfg.Logger.Warn("a raft connection ended",
					slog.String("remote_addr", c.RemoteAddr().String()), slog.Any("error", err))
			}
		}()
	}
}

func (t *TCP) track(c net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopped || len(t.conns) >= maxConns {
		return false
	}
	t.conns[c] = struct{}{}
	t.wg.Add(1)
	return true
}

func (t *TCP) untrack(c net.Conn) {
	t.mu.Lock()
	delete(t.conns, c)
	t.mu.Unlock()
	_ = c.Close() // it may be closed already
}

// serve reads one incoming connection.
func (t *TCP) serve(c net.Conn) error {
	if err := c.SetDeadline(deadlineIn(helloTimeout)); err != nil {
		return err
	}
	r := bufio.NewReaderSize(c, ioBuffer)
	typ, payload, buf, err := readFrame(r, nil)
	if err != nil {
		return err
	}
	if typ != frameHello {
		return fmt.Errorf("%w: it does not begin with a hello", errFrame)
	}
	h, err := decodeHello(payload)
	if err != nil {
		return err
	}
	if err := t.answer(c, t.judge(h)); err != nil {
		return err
	}
	if h.kind == helloSnapshot {
		return t.serveSnapshot(c, r, h)
	}
	for {
		if err := c.SetDeadline(deadlineIn(readTimeout)); err != nil {
			return err
		}
		var typ byte
		if typ, payload, buf, err = readFrame(r, buf); err != nil {
			return err
		}
		switch typ {
		case frameKeepAlive:
		case frameMessages:
			if err := splitMessages(payload, func(m *pb.Message) error { return t.receive(h, m) }); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: unexpected type %d", errFrame, typ)
		}
	}
}

func (t *TCP) receive(h *hello, m *pb.Message) error {
	if m.GetFrom() != h.from {
		return badMessage(m, "it came over another member's connection")
	}
	if t.h.IsRemoved(h.from) {
		return fmt.Errorf("member %x: %w", h.from, ErrRemoved) // it dials again, and is told
	}
	return t.h.Receive(m)
}

// judge decides on a hello, and learns where a newcomer listens.
func (t *TCP) judge(h *hello) *reply {
	r := &reply{status: replyRefused, cluster: t.cfg.ClusterID, from: t.cfg.ID}
	switch {
	case h.cluster != t.cfg.ClusterID:
		r.text = fmt.Sprintf("this is cluster %x, not %x; check the addresses", t.cfg.ClusterID, h.cluster)
	case h.to != t.cfg.ID:
		r.text = fmt.Sprintf("this is member %x, not %x; check the addresses", t.cfg.ID, h.to)
	case h.from == 0 || h.from == t.cfg.ID:
		r.text = fmt.Sprintf("the id %x is not another member's", h.from)
	case t.h.IsRemoved(h.from):
		r.status, r.text = replyRemoved, ErrRemoved.Error()
	default:
		r.status = replyOK
		t.learn(h)
	}
	return r
}

func (t *TCP) learn(h *hello) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.members[h.from]; known || h.addr == "" {
		return
	}
	if _, known := t.learned[h.from]; known || len(t.learned) < maxLearned {
		t.learned[h.from] = h.addr
	}
}

// answer sends a reply; a refusal is also an error.
func (t *TCP) answer(c net.Conn, r *reply) error {
	if _, err := c.Write(appendFrame(nil, frameReply, r.encode())); err != nil {
		return err
	}
	if r.status != replyOK {
		return fmt.Errorf("refused: %s", r.text)
	}
	return nil
}

// serveSnapshot receives a MsgSnap and its stream, and reports what became of it.
func (t *TCP) serveSnapshot(c net.Conn, r *bufio.Reader, h *hello) error {
	typ, payload, _, err := readFrame(r, nil)
	if err != nil {
		return err
	}
	if typ != frameSnapshot {
		return fmt.Errorf("%w: unexpected type %d", errFrame, typ)
	}
	m, err := decodeMessage(payload)
	if err != nil {
		return err
	}
	res := &reply{status: replyOK, cluster: t.cfg.ClusterID, from: t.cfg.ID}
	select {
	case t.streams <- struct{}{}:
		defer func() { <-t.streams }()
		if m.GetFrom() != h.from {
			err = badMessage(m, "it came over another member's connection")
		} else {
			err = t.h.ReceiveSnapshot(m, &timedReader{c: c, r: r})
		}
	default:
		err = errors.New("raft: another snapshot is being received")
	}
	if err != nil {
		res.status, res.text = replyRefused, err.Error()
	}
	if derr := c.SetDeadline(deadlineIn(helloTimeout)); derr != nil {
		return errors.Join(err, derr)
	}
	return errors.Join(err, t.answer(c, res))
}

// timedReader gives each read of a snapshot its own deadline.
type timedReader struct {
	c net.Conn
	r io.Reader
}

// Read implements io.Reader.
func (t *timedReader) Read(b []byte) (int, error) {
	if err := t.c.SetReadDeadline(deadlineIn(snapIOTimeout)); err != nil {
		return 0, err
	}
	return t.r.Read(b)
}

// timedWriter gives each write of a snapshot its own deadline.
type timedWriter struct{ c net.Conn }

// Write implements io.Writer.
func (t *timedWriter) Write(b []byte) (int, error) {
	if err := t.c.SetWriteDeadline(deadlineIn(snapIOTimeout)); err != nil {
		return 0, err
	}
	return t.c.Write(b)
}

// dial connects to a peer and says hello.
func (t *TCP) dial(ctx context.Context, id uint64, addr string, kind byte) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	c, err := t.cfg.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	if err := t.hello(ctx, c, id, kind); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (t *TCP) hello(ctx context.Context, c net.Conn, id uint64, kind byte) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // ends the read below
	defer stop()
	if err := c.SetDeadline(deadlineIn(helloTimeout)); err != nil {
		return err
	}
	h := hello{kind: kind, cluster: t.cfg.ClusterID, from: t.cfg.ID, to: id, addr: t.cfg.Addr}
	if _, err := c.Write(appendFrame(nil, frameHello, h.encode())); err != nil {
		return err
	}
	if err := t.readReply(c, id); err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}

// readReply reads a reply. That we were removed is believed from a member that
// names our cluster and itself rightly.
func (t *TCP) readReply(c net.Conn, id uint64) error {
	typ, payload, _, err := readFrame(c, nil)
	if err != nil {
		return err
	}
	r, err := decodeReply(payload)
	if err != nil || typ != frameReply {
		return errors.Join(fmt.Errorf("%w: expected a reply", errFrame), err)
	}
	switch {
	case r.status == replyOK:
		return nil
	case r.status == replyRemoved && r.cluster == t.cfg.ClusterID && r.from == id:
		t.h.Expelled()
		return ErrRemoved
	}
	return fmt.Errorf("raft: member %x refuses: %s", id, r.text)
}

// SendSnapshot implements Transport.
func (t *TCP) SendSnapshot(ctx context.Context, m *pb.Message, write func(io.Writer) error) error {
	t.mu.Lock()
	addr, ok := t.address(m.GetTo())
	t.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: %x has no address", ErrUnknownMember, m.GetTo())
	}
	c, err := t.dial(ctx, m.GetTo(), addr, helloSnapshot)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // ends what follows
	defer stop()
	defer func() { _ = c.Close() }() // the reply said what there is to know
	b, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("raft: encode a snapshot message: %w", err)
	}
	w := &timedWriter{c: c}
	if _, err := w.Write(appendFrame(nil, frameSnapshot, b)); err != nil {
		return err
	}
	if err := write(w); err != nil {
		return err
	}
	if err := c.SetReadDeadline(deadlineIn(snapReplyTime)); err != nil {
		return err
	}
	return t.readReply(c, m.GetTo())
}

// peer is the sender to one member.
type peer struct {
	t      *TCP
	id     uint64
	addr   string
	wake   chan struct{}
	ctx    context.Context
	cancel context.CancelFunc

	mu    sync.Mutex
	queue []queued
	bytes int
}

type queued struct {
	m    *pb.Message
	size int
}

func (p *peer) stop() { p.cancel() }

// push queues a message; false means that it was dropped.
func (p *peer) push(m *pb.Message) bool {
	size := entryOverhead
	for _, e := range m.GetEntries() {
		size += len(e.GetData()) + entryOverhead
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) >= queueMessages || p.bytes+size > queueBytes && len(p.queue) > 0 {
		return false
	}
	p.queue = append(p.queue, queued{m, size})
	p.bytes += size
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return true
}

// take empties the queue.
func (p *peer) take(buf []queued) []queued {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.queue
	p.queue, p.bytes = buf[:0], 0
	return q
}

// run connects, sends until that fails, and starts over.
func (p *peer) run() {
	defer p.t.wg.Done()
	wait := backoffFirst
	failed := false
	for p.ctx.Err() == nil {
		c, err := p.t.dial(p.ctx, p.id, p.addr, helloMessages)
		if err == nil {
			p.t.cfg.Logger.Info("connected to a member", slog.Uint64("member_id", p.id), slog.String("addr", p.addr))
			wait, failed = backoffFirst, false
			stop := context.AfterFunc(p.ctx, func() { _ = c.Close() }) // ends a blocked write
			err = p.send(c)
			stop()
			_ = c.Close() // err says more
		}
		if p.ctx.Err() != nil {
			return
		}
		if !failed { // once per outage
			p.t.cfg.Logger.Warn("cannot reach a member", slog.Uint64("member_id", p.id),
				slog.String("addr", p.addr), slog.Any("error", err))
		}
		failed = true
		p.take(nil) // what waits is stale when the peer is back; raft sends what matters again
		p.t.h.Unreachable(p.id)
		jitter := rand.N(wait) //nolint:gosec // spreads reconnects, guards nothing
		if !pause(p.ctx, wait/2+jitter) {
			return
		}
		wait = min(2*wait, backoffMax)
	}
}

// send writes what is queued until the connection fails. The listener sends
// nothing after its reply, so that whatever can be read means that it is gone.
func (p *peer) send(c net.Conn) error {
	gone := make(chan struct{})
	p.t.wg.Go(func() {
		defer close(gone)
		_, _ = c.Read(make([]byte, 1)) // returns when either end closes
	})
	idle := time.NewTicker(keepAlive) //nolint:forbidigo // the network's own clock, see clock.go
	defer idle.Stop()
	var buf []queued
	var out, payload []byte
	for {
		var batch []queued
		select {
		case <-p.ctx.Done():
			return p.ctx.Err()
		case <-gone:
			return io.ErrUnexpectedEOF
		case <-p.wake:
			batch = p.take(buf)
		case <-idle.C:
			out = appendFrame(out[:0], frameKeepAlive, nil)
		}
		var err error
		all := batch
		for len(batch) > 0 || len(out) > 0 {
			if len(batch) > 0 {
				if batch, out, payload, err = encodeBatch(batch, out[:0], payload[:0]); err != nil {
					return err
				}
			}
			if err := c.SetWriteDeadline(deadlineIn(writeTimeout)); err != nil {
				return err
			}
			if _, err := c.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		clear(all) // sent messages must not be kept alive
		buf = all
	}
}

// encodeBatch makes one frame of the first messages, and returns the others.
func encodeBatch(batch []queued, out, payload []byte) ([]queued, []byte, []byte, error) {
	for len(batch) > 0 && len(payload) < frameBatch {
		var err error
		if payload, err = appendMessage(payload, batch[0].m); err != nil {
			return nil, nil, nil, err
		}
		batch = batch[1:]
	}
	return batch, appendFrame(out, frameMessages, payload), payload, nil
}
