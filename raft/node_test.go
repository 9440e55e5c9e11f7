package raft

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/internal/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testNode is a real member on a real disk and real sockets.
type testNode struct {
	id      uint64
	dir     string
	addr    string
	store   *Store
	kv      *kvMachine
	node    *Node
	waiters waiters
	stopped chan error
	leads   chan bool
}

// waiters resolves proposals when they are applied.
type waiters struct {
	mu sync.Mutex
	m  map[uint64]waiter
	// terms of recent entries, for proposals that are applied before they are waited for
	recent map[uint64]uint64
}

type waiter struct {
	term uint64
	ch   chan bool
}

func (w *waiters) applied(index, term uint64, _ []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x, ok := w.m[index]; ok {
		delete(w.m, index)
		x.ch <- x.term == term
		return
	}
	w.recent[index] = term
	delete(w.recent, index-10000)
}

func (w *waiters) wait(index, term uint64, ch chan bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t, ok := w.recent[index]; ok {
		ch <- t == term
		return
	}
	w.m[index] = waiter{term, ch}
}

const testTick = 20 * time.Millisecond

func startCluster(t *testing.T, ids ...uint64) []*testNode {
	t.Helper()
	nodes := make([]*testNode, 0, len(ids))
	members := make([]Member, 0, len(ids))
	for _, id := range ids {
		n := &testNode{id: id, dir: filepath.Join(t.TempDir(), strconv.FormatUint(id, 10)), addr: freeport.For(t)}
		nodes = append(nodes, n)
		members = append(members, Member{ID: id, Addr: n.addr})
	}
	for _, n := range nodes {
		n.open(t)
		require.NoError(t, n.store.Bootstrap(7, n.id, members))
		n.start(t)
	}
	return nodes
}

func (n *testNode) open(t *testing.T) {
	t.Helper()
	o := testStoreOptions(nil)
	o.DisableAutomaticCompactions = false
	o.MemTableBytes = 16 << 20
	o.MinFreeBytes = 1
	s, err := OpenStore(n.dir, o)
	require.NoError(t, err)
	n.store = s
}

func (n *testNode) start(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", n.addr)
	require.NoError(t, err)
	n.kv = newKV(n.store.State())
	n.waiters = waiters{m: map[uint64]waiter{}, recent: map[uint64]uint64{}}
	n.kv.onApply = n.waiters.applied
	n.stopped = make(chan error, 1)
	n.leads = make(chan bool, 100)
	n.node, err = StartNode(NodeConfig{
		Core: CoreConfig{
			ID: n.id, ClusterID: 7, Machine: n.kv, Logger: testLogger(),
			OnLeadership: func(is bool, _ uint64) { n.leads <- is },
		},
		Store: n.store, Tick: testTick,
		Transport: NewTCP(TCPConfig{ClusterID: 7, ID: n.id, Listener: l, Addr: n.addr, Logger: testLogger()}),
		OnStop:    func(err error) { n.stopped <- err },
	})
	require.NoError(t, err)
	t.Cleanup(func() { n.stop(t) })
}

func (n *testNode) stop(t *testing.T) {
	t.Helper()
	if n.node == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = n.node.Stop(ctx)
	n.node = nil
	require.NoError(t, n.store.Close())
}

// put proposes and waits until it is applied here; false: lost.
func (n *testNode) put(ctx context.Context, k, v string) (bool, error) {
	index, term, err := n.node.Propose([]byte(k + "=" + v))
	if err != nil {
		return false, err
	}
	ch := make(chan bool, 1)
	n.waiters.wait(index, term, ch)
	select {
	case ok := <-ch:
		return ok, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

func leaderOf(t *testing.T, nodes []*testNode) *testNode {
	t.Helper()
	var lead *testNode
	require.Eventually(t, func() bool {
		lead = nil
		for _, n := range nodes {
			if n.node == nil {
				continue
			}
			st := n.node.Status()
			if st.Ready && (lead == nil || st.Term > lead.node.Status().Term) {
				lead = n
			}
		}
		return lead != nil
	}, 20*time.Second, 5*time.Millisecond, "a leader")
	return lead
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestClusterOverTCP(t *testing.T) {
	nodes := startCluster(t, 1, 2, 3)
	lead := leaderOf(t, nodes)
	ctx := within(t, 60*time.Second)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				ok, err := lead.put(ctx, fmt.Sprintf("k%d-%d", w, i), "v")
				if err != nil || !ok {
					t.Errorf("put: %v %v", ok, err)
					return
				}
			}
		})
	}
	wg.Wait()
	for _, n := range nodes {
		_, err := n.node.ReadIndex(ctx)
		require.NoError(t, err)
		require.Equal(t, 400, n.kv.size(), "member %d after ReadIndex", n.id)
	}
	deadline, err := lead.node.Confirm(ctx)
	require.NoError(t, err)
	require.Greater(t, deadline, boottime())
	for _, n := range nodes {
		if n != lead {
			_, err := n.node.Confirm(ctx)
			var nl *NotLeaderError
			require.ErrorAs(t, err, &nl)
		}
	}

	// A planned stop hands leadership over; the others go on at once.
	lead.stop(t)
	next := leaderOf(t, nodes)
	ok, err := next.put(ctx, "after", "stop")
	require.NoError(t, err)
	require.True(t, ok)
	lead.open(t)
	lead.start(t)
	_, err = lead.node.ReadIndex(ctx)
	require.NoError(t, err)
	require.Equal(t, "stop", lead.kv.get("after"))
	m := lead.node.Metrics()
	require.NotNil(t, m.Store.FsyncLatency)
	require.Len(t, m.Status.Members, 3)
}

func TestMembersJoinAndLeaveOverTCP(t *testing.T) {
	nodes := startCluster(t, 1, 2, 3)
	ctx := within(t, 60*time.Second)
	lead := leaderOf(t, nodes)
	for i := range 100 {
		_, err := lead.put(ctx, fmt.Sprint("k", i), "v")
		require.NoError(t, err)
	}
	j := &testNode{id: NewMemberID(), dir: filepath.Join(t.TempDir(), "j"), addr: freeport.For(t)}
	j.open(t)
	require.NoError(t, j.store.Join(7, j.id))
	j.start(t)
	require.NoError(t, lead.node.AddMember(ctx, Member{ID: j.id, Addr: j.addr, Context: []byte("c")}))
	_, err := j.node.ReadIndex(ctx)
	require.NoError(t, err)
	require.Equal(t, 100, j.kv.size())
	require.Equal(t, uint64(1), lead.node.Metrics().SnapshotsSent)
	st := lead.node.Status()
	require.Len(t, st.Members, 4)
	for _, m := range st.Members {
		require.False(t, m.Learner)
	}

	require.ErrorIs(t, lead.node.AddLearner(ctx, Member{ID: 1, Addr: "x:1"}), ErrIDReused)
	require.ErrorIs(t, lead.node.Promote(ctx, 99), ErrUnknownMember)
	require.NoError(t, lead.node.Remove(ctx, j.id))
	select {
	case err := <-j.stopped:
		require.ErrorIs(t, err, ErrRemoved)
	case <-ctx.Done():
		t.Fatal("the removed member did not stop")
	}
	_, _, err = j.node.Propose([]byte("x"))
	require.Error(t, err)
	require.ErrorIs(t, lead.node.AddLearner(ctx, Member{ID: j.id, Addr: j.addr}), ErrIDReused)
}

func TestTransferOverTCP(t *testing.T) {
	nodes := startCluster(t, 1, 2, 3)
	ctx := within(t, 60*time.Second)
	lead := leaderOf(t, nodes)
	to := nodes[0]
	if to == lead {
		to = nodes[1]
	}
	deadline, err := lead.node.Confirm(ctx)
	require.NoError(t, err)
	require.NoError(t, lead.node.TransferLeadership(ctx, to.id))
	require.GreaterOrEqual(t, boottime(), deadline, "a confirmed read could still have been answered")
	require.Eventually(t, func() bool { return to.node.Status().Ready }, 10*time.Second, time.Millisecond)
	_, err = lead.node.Confirm(ctx)
	var nl *NotLeaderError
	require.ErrorAs(t, err, &nl)
}

func TestSnapshotSaveAndRestore(t *testing.T) {
	nodes := startCluster(t, 1)
	ctx := within(t, 60*time.Second)
	lead := leaderOf(t, nodes)
	for i := range 100 {
		_, err := lead.put(ctx, fmt.Sprint("k", i), strconv.Itoa(i))
		require.NoError(t, err)
	}
	var buf bytes.Buffer
	require.NoError(t, lead.node.Snapshot(ctx, &buf))
	applied := lead.node.Applied()

	r := &testNode{id: 50, dir: filepath.Join(t.TempDir(), "r"), addr: freeport.For(t)}
	o := testStoreOptions(nil)
	for _, cut := range []int{0, 1, buf.Len() / 2, buf.Len() - 1} {
		_, _, err := RestoreSnapshot(r.dir, bytes.NewReader(buf.Bytes()[:cut]), RestoreOptions{
			Store: o, ClusterID: 7, Member: Member{ID: r.id, Addr: r.addr},
		})
		require.Error(t, err, "a stream cut after %d bytes", cut)
	}
	index, _, err := RestoreSnapshot(r.dir, bytes.NewReader(buf.Bytes()), RestoreOptions{
		Store: o, ClusterID: 7, Member: Member{ID: r.id, Addr: r.addr},
	})
	require.NoError(t, err)
	require.Equal(t, applied, index)
	_, _, err = RestoreSnapshot(r.dir, bytes.NewReader(buf.Bytes()), RestoreOptions{
		Store: o, ClusterID: 7, Member: Member{ID: r.id, Addr: r.addr},
	})
	require.ErrorIs(t, err, ErrInitialised)
	r.open(t)
	restored, done, err := r.store.TakeRestoredMarker()
	require.NoError(t, err)
	require.True(t, restored)
	require.NoError(t, done())
	restored, _, err = r.store.TakeRestoredMarker()
	require.NoError(t, err)
	require.False(t, restored)
	r.start(t)
	leaderOf(t, []*testNode{r})
	require.Equal(t, 100, r.kv.size())
	ok, err := r.put(ctx, "new", "1")
	require.NoError(t, err)
	require.True(t, ok)
}
