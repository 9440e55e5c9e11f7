package raft

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"testing/cryptotest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// sim is a cluster of Cores in one goroutine, on crashable disks, with a network
// that loses what the test wants lost.
type sim struct {
	t       *testing.T
	rng     *rand.Rand
	nodes   map[uint64]*simNode
	msgs    []simMsg
	cut     func(from, to uint64) bool // true: lost
	drop    float64
	keep    uint64 // log entries kept
	cluster uint64
	acked   map[string]string // key -> value, seen applied on a leader that proposed it
	pending map[string]string
	logger  *slog.Logger
}

type simMsg struct {
	m    *pb.Message
	snap []byte
}

type simNode struct {
	id     uint64
	fs     *vfs.MemFS
	store  *Store
	kv     *kvMachine
	core   *Core
	paused bool
	reads  map[uint64]uint64
	leads  uint64 // term announced, 0 if none
	failed error
}

func testLogger() *slog.Logger {
	if os.Getenv("RAFT_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func testStoreOptions(fs vfs.FS) StoreOptions {
	return StoreOptions{
		FS: fs, CacheBytes: 1 << 20, MemTableBytes: 1 << 20, BallastBytes: -1, Logger: testLogger(),
		DisableAutomaticCompactions: true, FailStop: func(error) {},
	}
}

func newSim(t *testing.T, ids ...uint64) *sim {
	t.Helper()
	return newSeededSim(t, 1, ids...)
}

// newSeededSim repeats exactly for the same seed: raft's own randomness is seeded
// too.
func newSeededSim(t *testing.T, seed uint64, ids ...uint64) *sim {
	t.Helper()
	cryptotest.SetGlobalRandom(t, seed)
	s := &sim{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), nodes: map[uint64]*simNode{}, cluster: 7,
		cut: func(_, _ uint64) bool { return false }, keep: 1000,
		acked: map[string]string{}, pending: map[string]string{}, logger: testLogger(),
	}
	members := simMembers(ids...)
	for _, id := range ids {
		n := &simNode{id: id, fs: vfs.NewCrashableMem()}
		s.nodes[id] = n
		store, err := OpenStore("/data", testStoreOptions(n.fs))
		require.NoError(t, err)
		require.NoError(t, store.Bootstrap(s.cluster, id, members))
		s.boot(n, store)
	}
	t.Cleanup(s.close)
	return s
}

func simMembers(ids ...uint64) (m []Member) {
	for _, id := range ids {
		m = append(m, Member{ID: id, Addr: fmt.Sprintf("node%d:1", id), Context: []byte{byte(id)}})
	}
	return m
}

// join adds an empty node that waits for the leader.
func (s *sim) join(id uint64) *simNode {
	n := &simNode{id: id, fs: vfs.NewCrashableMem()}
	s.nodes[id] = n
	store, err := OpenStore("/data", testStoreOptions(n.fs))
	require.NoError(s.t, err)
	require.NoError(s.t, store.Join(s.cluster, id))
	s.boot(n, store)
	return n
}

func (s *sim) close() {
	for _, n := range s.nodes {
		if n.store != nil {
			_ = n.store.Close()
		}
	}
}

func (s *sim) boot(n *simNode, store *Store) {
	n.store, n.kv = store, newKV(store.State())
	n.reads, n.leads, n.failed = map[uint64]uint64{}, 0, nil
	n.kv.onApply = func(_, _ uint64, data []byte) {
		k, v, ok := bytes.Cut(data, []byte("="))
		if ok && s.pending[string(k)] == string(v) && n.leads != 0 {
			delete(s.pending, string(k))
			s.acked[string(k)] = string(v)
		}
	}
	var err error
	n.core, err = NewCore(CoreConfig{
		ID: n.id, ClusterID: s.cluster, Machine: n.kv, LogKeepEntries: s.keep, Logger: s.logger,
		Send:   func(m []*pb.Message) { s.send(n, m) },
		OnRead: func(ctx, index uint64) { n.reads[ctx] = index },
		OnLeadership: func(is bool, term uint64) {
			n.leads = 0
			if is {
				n.leads = term
			}
		},
	}, store)
	require.NoError(s.t, err)
}

func (s *sim) send(n *simNode, msgs []*pb.Message) {
	for _, m := range msgs {
		if m.GetType() == pb.MsgSnap {
			var buf bytes.Buffer
			_, err := n.core.WriteSnapshot(&buf)
			require.NoError(s.t, err)
			s.msgs = append(s.msgs, simMsg{m, buf.Bytes()})
			continue
		}
		s.msgs = append(s.msgs, simMsg{m: m})
	}
}

// deliver moves all messages that are under way, each through the wire format.
func (s *sim) deliver() {
	msgs := s.msgs
	s.msgs = nil
	for _, x := range msgs {
		n := s.nodes[x.m.GetTo()]
		lost := n == nil || n.core == nil || n.failed != nil || s.cut(x.m.GetFrom(), x.m.GetTo()) || s.rng.Float64() < s.drop
		if from := s.nodes[x.m.GetFrom()]; x.snap != nil && from.core != nil {
			from.core.ReportSnapshot(x.m.GetTo(), !lost)
		}
		if lost {
			continue
		}
		b, err := proto.Marshal(x.m)
		require.NoError(s.t, err)
		m, err := decodeMessage(b)
		require.NoError(s.t, err)
		if x.snap != nil {
			err = n.core.StepSnapshot(m, bytes.NewReader(x.snap))
		} else {
			err = n.core.Step(m)
		}
		s.noteErr(n, err)
	}
}

func (s *sim) noteErr(n *simNode, err error) {
	var bad *BadMessageError
	if err != nil && !errors.As(err, &bad) {
		n.failed = err
	}
}

// process lets every node work until none has more.
func (s *sim) process() {
	for _, id := range s.ids() {
		n := s.nodes[id]
		for n.core != nil && !n.paused && n.failed == nil {
			more, err := n.core.Process()
			s.noteErr(n, err)
			if !more {
				break
			}
		}
	}
}

func (s *sim) ids() (ids []uint64) {
	for id := uint64(1); id < 100 && len(ids) < len(s.nodes); id++ {
		if s.nodes[id] != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// settle moves messages until nobody has any.
func (s *sim) settle() {
	s.process()
	for range 200 {
		if len(s.msgs) == 0 {
			return
		}
		s.deliver()
		s.process()
	}
}

func (s *sim) tick(times int) {
	for range times {
		for _, id := range s.ids() {
			if n := s.nodes[id]; n.core != nil && !n.paused {
				n.core.Tick()
			}
		}
		s.settle()
	}
}

// leader ticks until some node leads and is ready, and no older one thinks so.
func (s *sim) leader() *simNode {
	for range 200 {
		var best *simNode
		for _, n := range s.nodes {
			if n.core != nil && !n.paused && n.failed == nil && n.leads != 0 && (best == nil || n.leads > best.leads) {
				best = n
			}
		}
		if best != nil {
			return best
		}
		s.tick(1)
	}
	s.t.Fatal("no leader within 200 ticks")
	return nil
}

// put proposes on the leader; it is acknowledged when applied there.
func (s *sim) put(k, v string) error {
	n := s.leader()
	_, _, err := n.core.Propose([]byte(k + "=" + v))
	if err == nil {
		s.pending[k] = v
	}
	return err
}

// crash takes power from a node: what was not synced is kept with the given
// probability in percent.
func (s *sim) crash(n *simNode, unsynced int) {
	clone := n.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsynced, RNG: s.rng})
	_ = n.store.Close()
	n.fs, n.core, n.store, n.leads = clone, nil, nil, 0
}

func (s *sim) restart(n *simNode) error {
	store, err := OpenStore("/data", testStoreOptions(n.fs))
	if err != nil {
		return err
	}
	s.boot(n, store)
	return nil
}

// agree checks that every live node has the same state, and all that was acked.
func (s *sim) agree() {
	s.tick(30)
	lead := s.leader()
	s.tick(5)
	for _, n := range s.nodes {
		if _, member := lead.core.log.confs.newest().find(n.id); !member || n.core == nil || n.failed != nil {
			continue
		}
		require.Equal(s.t, lead.kv.applied, n.kv.applied, "node %d", n.id)
		require.Equal(s.t, lead.kv.kv, n.kv.kv, "node %d", n.id)
	}
	for k, v := range s.acked {
		require.Equal(s.t, v, lead.kv.kv[k], "acknowledged key %s", k)
	}
}
