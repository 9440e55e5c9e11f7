package raft

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

// memNet connects Nodes in memory; links can be cut, one way each.
type memNet struct {
	mu  sync.Mutex
	h   map[uint64]Handler
	cut map[[2]uint64]bool
	in  map[uint64]chan *pb.Message
}

type memTransport struct {
	net  *memNet
	id   uint64
	done chan struct{}
	wg   sync.WaitGroup
}

func newMemNet() *memNet {
	return &memNet{h: map[uint64]Handler{}, cut: map[[2]uint64]bool{}, in: map[uint64]chan *pb.Message{}}
}

func (n *memNet) transport(id uint64) *memTransport {
	return &memTransport{net: n, id: id, done: make(chan struct{})}
}

func (n *memNet) setCut(a, b uint64, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[[2]uint64{a, b}], n.cut[[2]uint64{b, a}] = cut, cut
}

func (t *memTransport) Start(h Handler) error {
	in := make(chan *pb.Message, 1000)
	t.net.mu.Lock()
	t.net.h[t.id], t.net.in[t.id] = h, in
	t.net.mu.Unlock()
	t.wg.Go(func() {
		for {
			select {
			case m := <-in:
				_ = h.Receive(m)
			case <-t.done:
				return
			}
		}
	})
	return nil
}

func (t *memTransport) SetMembers([]Member) {}

func (t *memTransport) Send(msgs []*pb.Message) {
	t.net.mu.Lock()
	defer t.net.mu.Unlock()
	for _, m := range msgs {
		if in := t.net.in[m.GetTo()]; in != nil && !t.net.cut[[2]uint64{t.id, m.GetTo()}] {
			select {
			case in <- m:
			default:
			}
		}
	}
}

func (t *memTransport) SendSnapshot(_ context.Context, m *pb.Message, write func(io.Writer) error) error {
	t.net.mu.Lock()
	h, cut := t.net.h[m.GetTo()], t.net.cut[[2]uint64{t.id, m.GetTo()}]
	t.net.mu.Unlock()
	if h == nil || cut {
		return errors.New("unreachable")
	}
	var buf bytes.Buffer
	if err := write(&buf); err != nil {
		return err
	}
	return h.ReceiveSnapshot(m, &buf)
}

func (t *memTransport) Stop() { close(t.done); t.wg.Wait() }

// memCluster is Nodes on crashable disks whose time the test moves.
type memCluster struct {
	net   *memNet
	nodes []*memNode
	clock atomic.Int64 // everybody's CLOCK_BOOTTIME
}

const memTick = 20 * time.Millisecond

type memNode struct {
	id    uint64
	node  *Node
	store *Store
	kv    *kvMachine
	ticks chan time.Time
	w     waiters
	fs    *vfs.MemFS
	fails bool // the test breaks it
}

func startMem(t *testing.T, ids ...uint64) *memCluster {
	t.Helper()
	c := &memCluster{net: newMemNet()}
	for _, id := range ids {
		n := &memNode{id: id, ticks: make(chan time.Time), fs: vfs.NewCrashableMem()}
		n.w = waiters{m: map[uint64]waiter{}, recent: map[uint64]uint64{}}
		var err error
		n.store, err = OpenStore("/data", testStoreOptions(n.fs))
		require.NoError(t, err)
		require.NoError(t, n.store.Bootstrap(7, id, simMembers(ids...)))
		n.kv = newKV(n.store.State())
		n.kv.onApply = n.w.applied
		n.node, err = StartNode(NodeConfig{
			Core:  CoreConfig{ID: id, ClusterID: 7, Machine: n.kv, Logger: testLogger()},
			Store: n.store, Ticks: n.ticks, Tick: memTick, Transport: c.net.transport(id),
			Boottime: c.clock.Load,
		})
		require.NoError(t, err)
		c.nodes = append(c.nodes, n)
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			n.node.fail(ErrStopped)
		}
		for _, n := range c.nodes {
			err := n.node.Stop(context.Background())
			require.Equal(t, n.fails, err != nil, "%v", err)
			require.NoError(t, n.store.Close())
		}
	})
	return c
}

// tick lets one tick of time pass for all, and tells every node that is not left
// out; then it waits a moment for what they do.
func (c *memCluster) tick(except ...uint64) {
	c.clock.Add(int64(memTick))
	for _, n := range c.nodes {
		if !slices.Contains(except, n.id) {
			n.ticks <- time.Time{}
		}
	}
	time.Sleep(2 * time.Millisecond)
}

func (c *memCluster) leader(t *testing.T, except ...uint64) *memNode {
	t.Helper()
	for range 500 {
		for _, n := range c.nodes {
			if !slices.Contains(except, n.id) && n.node.Status().Ready {
				return n
			}
		}
		c.tick(except...)
	}
	t.Fatal("no leader")
	return nil
}

func (c *memCluster) put(t *testing.T, n *memNode, k, v string, except ...uint64) {
	t.Helper()
	index, term, err := n.node.Propose([]byte(k + "=" + v))
	require.NoError(t, err)
	ch := make(chan bool, 1)
	n.w.wait(index, term, ch)
	for {
		select {
		case ok := <-ch:
			require.True(t, ok)
			return
		default:
			c.tick(except...)
		}
	}
}

// TestPausedLeaderCannotAnswer stops a leader between each two steps of a confirmed
// read, lets the others elect a new one and write, and requires that the old one's
// last check fails before anything stale can be answered.
func TestPausedLeaderCannotAnswer(t *testing.T) {
	for _, pauseAt := range []string{"before reading", "before answering"} {
		t.Run(pauseAt, func(t *testing.T) {
			c := startMem(t, 1, 2, 3)
			old := c.leader(t)
			c.put(t, old, "x", "1")
			deadline, err := old.node.Confirm(t.Context())
			require.NoError(t, err)
			pause := func() { // nothing reaches it, it gets no ticks: a SIGSTOP as others see it
				for _, n := range c.nodes {
					c.net.setCut(old.id, n.id, true)
				}
				next := c.leader(t, old.id)
				require.NotEqual(t, old.id, next.id)
				c.put(t, next, "x", "2", old.id)
			}
			if pauseAt == "before reading" {
				pause()
			}
			require.Equal(t, "1", old.kv.get("x"), "it cannot know better")
			if pauseAt == "before answering" {
				require.Less(t, c.clock.Load(), deadline, "without a pause it may answer")
				pause()
			}
			require.GreaterOrEqual(t, c.clock.Load(), deadline, "a stale value would be answered")
			_, err = old.node.Confirm(within(t, 50*time.Millisecond))
			require.Error(t, err, "no quorum, no confirmation")
		})
	}
}

// TestConfirmDeadlineIsShorterThanAnyElection checks the margin for other settings.
func TestConfirmDeadlineIsShorterThanAnyElection(t *testing.T) {
	for _, x := range []struct {
		ticks int
		tick  time.Duration
	}{{10, 100 * time.Millisecond}, {5, 10 * time.Millisecond}, {20, time.Second}} {
		n := &Node{core: &Core{cfg: CoreConfig{ElectionTicks: x.ticks}}, cfg: NodeConfig{Tick: x.tick}}
		shortest := time.Duration(x.ticks-2) * x.tick // see confirmSpan
		require.Less(t, time.Duration(n.confirmSpan()), shortest)
	}
}

func TestReadIndexDuringAPartition(t *testing.T) {
	c := startMem(t, 1, 2, 3)
	lead := c.leader(t)
	c.put(t, lead, "x", "1")
	var others []*memNode
	for _, n := range c.nodes {
		if n != lead {
			others = append(others, n)
		}
	}
	cutoff := others[0]
	for _, n := range c.nodes {
		c.net.setCut(cutoff.id, n.id, true)
	}
	result := make(chan error, 1)
	go func() {
		_, err := cutoff.node.ReadIndex(t.Context())
		result <- err
	}()
	for range 30 {
		c.tick()
		select {
		case err := <-result:
			t.Fatalf("a member that is cut off answered: %v", err)
		default:
		}
	}
	c.put(t, lead, "x", "2")
	for _, n := range c.nodes {
		c.net.setCut(cutoff.id, n.id, false)
	}
	for done := false; !done; {
		c.tick()
		select {
		case err := <-result:
			require.NoError(t, err)
			done = true
		default:
		}
	}
	require.Equal(t, "2", cutoff.kv.get("x"), "the read sees what was acknowledged before it was answered")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := lead.node.ReadIndex(ctx)
	if err != nil {
		require.ErrorIs(t, err, context.Canceled)
	}
}

// TestManyReadersShareRounds asks from many goroutines at once.
func TestManyReadersShareRounds(t *testing.T) {
	c := startMem(t, 1, 2, 3)
	lead := c.leader(t)
	before := lead.node.Metrics().ReadRounds
	const readers = 2000
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			if _, err := lead.node.Confirm(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	rounds := lead.node.Metrics().ReadRounds - before
	require.Less(t, rounds, uint64(readers/2), "callers share rounds")
}

// TestFailedTransferStepsDown hands over to a member that hears nothing of it.
func TestFailedTransferStepsDown(t *testing.T) {
	c := startMem(t, 1, 2, 3)
	lead := c.leader(t)
	c.put(t, lead, "x", "1")
	to := uint64(1)
	if lead.id == to {
		to = 2
	}
	term := lead.node.Status().Term
	c.net.setCut(lead.id, to, true)
	result := make(chan error, 1)
	go func() { result <- lead.node.TransferLeadership(t.Context(), to) }()
	for done := false; !done; {
		c.tick()
		select {
		case err := <-result:
			if err != nil {
				require.ErrorIs(t, err, ErrTransferring)
			}
			done = true
		default:
		}
	}
	c.net.setCut(lead.id, to, false)
	next := c.leader(t)
	require.Greater(t, next.node.Status().Term, term)
	c.put(t, next, "y", "2")
}

func TestQuorumLossIsRefused(t *testing.T) {
	c := startMem(t, 1, 2, 3)
	lead := c.leader(t)
	dead, alive := uint64(0), uint64(0)
	for _, n := range c.nodes {
		if n == lead {
			continue
		}
		if dead == 0 {
			dead = n.id
			c.net.setCut(lead.id, n.id, true)
		} else {
			alive = n.id
		}
	}
	for range 15 {
		c.tick(dead)
	}
	require.ErrorIs(t, lead.node.Remove(t.Context(), alive), ErrQuorumLoss)
	result := make(chan error, 1)
	go func() { result <- lead.node.Remove(t.Context(), dead) }()
	for done := false; !done; {
		c.tick(dead)
		select {
		case err := <-result:
			require.NoError(t, err)
			done = true
		default:
		}
	}
}

func TestStorageFailureStopsTheNode(t *testing.T) {
	c := startMem(t, 1)
	n := c.nodes[0]
	c.leader(t)
	n.fails = true
	n.store.health.fail(errors.New("disk gone")) // as Pebble's callbacks do
	for range 1000 {
		select {
		case n.ticks <- time.Time{}:
			time.Sleep(time.Millisecond)
			continue
		case <-n.node.Done():
		}
		break
	}
	require.Error(t, n.node.Err())
	_, _, err := n.node.Propose([]byte("a=b"))
	require.ErrorIs(t, err, ErrStopped)
}

// TestHostileConnections sends garbage of many kinds to a member's port; it stays up.
func TestHostileConnections(t *testing.T) {
	nodes := startCluster(t, 1)
	lead := leaderOf(t, nodes)
	good := hello{kind: helloMessages, cluster: 7, from: 2, to: 1, addr: "127.0.0.1:1"}
	with := func(f func(*hello)) []byte { h := good; f(&h); return appendFrame(nil, frameHello, h.encode()) }
	start := with(func(*hello) {})
	big := binary.BigEndian.AppendUint32(nil, 1<<31)
	msg := func(m *pb.Message) []byte {
		b, err := appendMessage(nil, m)
		require.NoError(t, err)
		return appendFrame(bytes.Clone(start), frameMessages, b)
	}
	for name, b := range map[string][]byte{
		"nothing":         {},
		"text":            []byte("GET / HTTP/1.1\r\n\r\n"),
		"huge frame":      append(big, make([]byte, 5)...),
		"foreign cluster": with(func(h *hello) { h.cluster = 8 }),
		"other member":    with(func(h *hello) { h.to = 3 }),
		"itself":          with(func(h *hello) { h.from = 1 }),
		"unknown kind":    with(func(h *hello) { h.kind = 9 }),
		"bad checksum":    append(start[:len(start)-1:len(start)-1], start[len(start)-1]^1),
		"hello twice":     append(bytes.Clone(start), start...),
		"bad payload":     appendFrame(bytes.Clone(start), frameMessages, []byte{0xff, 0xff}),
		"not a message":   appendFrame(bytes.Clone(start), frameMessages, []byte{3, 0xff, 0xff, 0xff}),
		"forged sender":   msg(&pb.Message{Type: pb.MsgHeartbeat.Enum(), From: new(uint64(3)), To: new(uint64(1)), Term: new(uint64(1))}),
		"proposal":        msg(&pb.Message{Type: pb.MsgProp.Enum(), From: new(uint64(2)), To: new(uint64(1))}),
		"stream of nonsense": append(with(func(h *hello) { h.kind = helloSnapshot }),
			appendFrame(nil, frameSnapshot, []byte{1, 2, 3})...),
	} {
		c, err := net.Dial("tcp", lead.addr)
		require.NoError(t, err, name)
		_, err = c.Write(b)
		require.NoError(t, err, name)
		require.NoError(t, c.(*net.TCPConn).CloseWrite(), name)
		require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
		_, err = io.Copy(io.Discard, c)
		var timeout net.Error
		require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "%s: the connection stays open", name)
		require.NoError(t, c.Close())
	}
	ok, err := lead.put(within(t, 10*time.Second), "still", "up")
	require.NoError(t, err)
	require.True(t, ok)
}

func TestConnectionLimit(t *testing.T) {
	nodes := startCluster(t, 1)
	lead := leaderOf(t, nodes)
	conns := make([]net.Conn, 0, maxConns+20)
	defer func() {
		for _, c := range conns {
			_ = c.Close() // the test is over
		}
	}()
	for range maxConns + 20 {
		c, err := net.Dial("tcp", lead.addr)
		require.NoError(t, err)
		conns = append(conns, c)
	}
	last := conns[len(conns)-1]
	require.NoError(t, last.SetDeadline(time.Now().Add(4*time.Second)))
	_, err := last.Read(make([]byte, 1))
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "connections above the limit are closed")
}

func sampleSnapshot(tb testing.TB, records int) []byte {
	tb.Helper()
	var buf bytes.Buffer
	m := &manifest{
		Version: snapFormatVersion, Cluster: 7, Index: 10, Term: 2,
		Conf: &conf{Index: 1, Members: simMembers(1, 2)},
	}
	w, err := newSnapWriter(&buf, m)
	require.NoError(tb, err)
	for i := range records {
		require.NoError(tb, w.add(fmt.Appendf(nil, "k%06d", i), bytes.Repeat([]byte{byte(i)}, i%300)))
	}
	require.NoError(tb, w.finish())
	return buf.Bytes()
}

func TestSnapshotStreamDetectsDamage(t *testing.T) {
	whole := sampleSnapshot(t, 20000)
	read := func(b []byte) (n int, err error) {
		err = readSnapshot(bytes.NewReader(b), func(*manifest) error { return nil },
			func(_, _ []byte) error { n++; return nil })
		return n, err
	}
	n, err := read(whole)
	require.NoError(t, err)
	require.Equal(t, 20000, n)
	for i := range 200 {
		at := len(whole) * i / 200
		bad := bytes.Clone(whole)
		bad[at] ^= 1
		_, err := read(bad)
		require.ErrorIs(t, err, ErrSnapshotInvalid, "bit flipped at %d", at)
		_, err = read(whole[:at])
		require.ErrorIs(t, err, ErrSnapshotInvalid, "cut at %d", at)
	}
}

func FuzzSnapshotStream(f *testing.F) {
	f.Add(sampleSnapshot(f, 0))
	f.Add(sampleSnapshot(f, 50))
	f.Add([]byte(snapMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		var last []byte
		err := readSnapshot(bytes.NewReader(b), func(m *manifest) error { return m.validate() },
			func(k, _ []byte) error {
				if last != nil && bytes.Compare(k, last) <= 0 {
					t.Fatal("keys do not ascend")
				}
				last = append(last[:0], k...)
				return nil
			})
		if err != nil {
			require.ErrorIs(t, err, ErrSnapshotInvalid)
		}
	})
}

func FuzzFrame(f *testing.F) {
	m := &pb.Message{Type: pb.MsgApp.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(1))}
	b, err := appendMessage(nil, m)
	require.NoError(f, err)
	h := hello{kind: helloMessages, cluster: 7, from: 2, to: 1, addr: "a:1"}
	r := reply{status: replyRefused, cluster: 7, from: 1, text: "no"}
	f.Add(appendFrame(nil, frameMessages, b))
	f.Add(appendFrame(nil, frameHello, h.encode()))
	f.Add(appendFrame(nil, frameReply, r.encode()))
	f.Fuzz(func(t *testing.T, b []byte) {
		rd := bytes.NewReader(b)
		var buf []byte
		for {
			typ, payload, reuse, err := readFrame(rd, buf)
			if err != nil {
				return
			}
			buf = reuse
			again := appendFrame(nil, typ, payload)
			require.Equal(t, b[len(b)-rd.Len()-len(again):len(b)-rd.Len()], again, "a frame reads as it is written")
			_ = splitMessages(payload, func(m *pb.Message) error { _ = checkMessage(m, 1); return nil })
			if h, err := decodeHello(payload); err == nil {
				require.Equal(t, payload, h.encode())
			}
			if r, err := decodeReply(payload); err == nil {
				require.Equal(t, payload, r.encode())
			}
		}
	})
}

// FuzzLogEntry requires that no stored bytes other than those written are taken for
// an entry, and that nothing panics.
func FuzzLogEntry(f *testing.F) {
	f.Add([]byte("short"), uint64(5))
	f.Add(make([]byte, entryHeader+10), uint64(1))
	f.Fuzz(func(t *testing.T, v []byte, index uint64) {
		_, _, err := decodeEntry(index, logKey(index), v, 0, true)
		var corrupt *CorruptionError
		require.ErrorAs(t, err, &corrupt, "a CRC and a chain found by chance")
	})
}
