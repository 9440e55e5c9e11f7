package raft

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

// filled makes a single member with n entries, closed cleanly.
func filled(t *testing.T, n int, flush bool) *vfs.MemFS {
	t.Helper()
	s := newSim(t, 1)
	s.settle()
	for i := range n {
		require.NoError(t, s.put(fmt.Sprint("k", i), strings.Repeat("v", 100)))
		s.settle()
	}
	node := s.nodes[1]
	if flush {
		require.NoError(t, node.core.Flush())
		require.NoError(t, node.store.db.Flush())
	}
	require.NoError(t, node.store.Close())
	node.store, node.core = nil, nil
	return node.fs
}

func mustClose(t *testing.T, s *Store) {
	t.Helper()
	if s != nil {
		require.NoError(t, s.Close())
	}
}

func TestStateStore(t *testing.T) {
	store, err := OpenStore("/data", testStoreOptions(vfs.NewCrashableMem()))
	require.NoError(t, err)
	defer mustClose(t, store)
	st := store.State()
	b := st.NewBatch()
	for _, k := range []string{"a1", "a2", "a\xff", "a\xff\xff", "b", "\xff", "\xff\xff"} {
		b.Set([]byte(k), []byte("v"+k))
	}
	b.Delete([]byte("a2"))
	require.Equal(t, 8, b.Len())
	require.NoError(t, b.Commit())
	scan := func(prefix string) (keys []string) {
		require.NoError(t, st.Scan([]byte(prefix), func(k, v []byte) error {
			require.Equal(t, "v"+string(k), string(v))
			keys = append(keys, string(k))
			return nil
		}))
		return keys
	}
	require.Equal(t, []string{"a1", "a\xff", "a\xff\xff", "b", "\xff", "\xff\xff"}, scan(""))
	require.Equal(t, []string{"a1", "a\xff", "a\xff\xff"}, scan("a"))
	require.Equal(t, []string{"a\xff", "a\xff\xff"}, scan("a\xff"))
	require.Equal(t, []string{"\xff", "\xff\xff"}, scan("\xff"))
	b = st.NewBatch()
	b.DeleteRange([]byte("a1"), []byte("b"))
	require.NoError(t, b.Commit())
	require.Equal(t, []string{"b", "\xff", "\xff\xff"}, scan(""))
	_, ok, err := st.Get([]byte("a1"))
	require.NoError(t, err)
	require.False(t, ok)
	stop := errors.New("stop")
	require.ErrorIs(t, st.Scan(nil, func(_, _ []byte) error { return stop }), stop)
}

// TestRotIsNoticed flips one bit anywhere in any file of a store, or cuts it short,
// and requires that opening either fails or gives every entry that was acknowledged.
func TestRotIsNoticed(t *testing.T) {
	const entries = 60
	rng := rand.New(rand.NewPCG(1, 1))
	for _, flushed := range []bool{false, true} {
		fs := filled(t, entries, flushed)
		refused, harmless := 0, 0
		for _, name := range dataFiles(t, fs, "/data") {
			size := fileSize(t, fs, name)
			for i := range int64(24) {
				at := size * i / 24
				clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rng})
				flipBit(t, clone, name, at)
				if err := opensWhole(clone, entries); err != nil {
					refused++
					require.NotContains(t, err.Error(), "SILENT", "%s at %d of %d", name, at, size)
				} else {
					harmless++
				}
			}
		}
		require.Greater(t, refused, 10)
		require.Greater(t, harmless, 1, "preallocated and padded space may rot")
	}
}

// opensWhole opens a store and counts what it has.
func opensWhole(fs *vfs.MemFS, entries int) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	store, err := OpenStore("/data", testStoreOptions(fs))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	kv := &kvMachine{st: store.State()}
	if err := kv.load(); err != nil {
		return err
	}
	if err := store.CheckIdentity(7, 1); err != nil {
		return err
	}
	core, err := NewCore(CoreConfig{ID: 1, ClusterID: 7, Machine: kv, Send: func([]*pb.Message) {}}, store)
	if err != nil {
		return err
	}
	for {
		more, err := core.Process()
		if err != nil {
			return err
		}
		if !more {
			break
		}
	}
	if len(kv.kv) != entries {
		return fmt.Errorf("SILENT loss: %d of %d", len(kv.kv), entries)
	}
	return nil
}

func dataFiles(t *testing.T, fs vfs.FS, dir string) (files []string) {
	t.Helper()
	names, err := fs.List(dir)
	require.NoError(t, err)
	for _, n := range names {
		p := fs.PathJoin(dir, n)
		info, err := fs.Stat(p)
		require.NoError(t, err)
		if info.IsDir() {
			files = append(files, dataFiles(t, fs, p)...)
		} else if info.Size() > 0 && n != "LOCK" {
			files = append(files, p)
		}
	}
	return files
}

func fileSize(t *testing.T, fs vfs.FS, name string) int64 {
	t.Helper()
	info, err := fs.Stat(name)
	require.NoError(t, err)
	return info.Size()
}

func flipBit(t *testing.T, fs *vfs.MemFS, name string, at int64) {
	t.Helper()
	b, err := fs.UnsafeGetFileDataBuffer(name)
	require.NoError(t, err)
	b[at] ^= 0x10
}

func TestWitnessRefusesAShorterLog(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	n := s.nodes[1]
	require.NoError(t, s.put("a", "1"))
	s.settle()
	old := n.fs.CrashClone(vfs.CrashCloneCfg{}) // the database as of now
	for i := range 10 {
		require.NoError(t, s.put(fmt.Sprint("k", i), "v"))
	}
	s.settle()
	n.core.Tick()
	_, err := n.core.Process()
	require.NoError(t, err)
	witness := readFile(t, n.fs, "/data/witness")
	writeFile(t, old, "/data/witness", witness)
	_, err = OpenStore("/data", testStoreOptions(old))
	var lost *LostDataError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, uint64(10), lost.Want-lost.Have)
	require.ErrorContains(t, err, "new id")

	// The whole database gone, the witness still there.
	clone := n.fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, clone.RemoveAll("/data/db"))
	_, err = OpenStore("/data", testStoreOptions(clone))
	require.ErrorAs(t, err, &lost)

	// The witness gone, the database still there.
	clone = n.fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, clone.Remove("/data/witness"))
	_, err = OpenStore("/data", testStoreOptions(clone))
	require.ErrorAs(t, err, &lost)
}

func readFile(t *testing.T, fs vfs.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(name)
	require.NoError(t, err)
	b := make([]byte, fileSize(t, fs, name))
	_, err = f.ReadAt(b, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	return b
}

func writeFile(t *testing.T, fs vfs.FS, name string, b []byte) {
	t.Helper()
	f, err := fs.Create(name, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write(b)
	require.NoError(t, err)
	require.NoError(t, errors.Join(f.Sync(), f.Close()))
}

// TestVoteSurvivesALostTail takes the last records of the log away, and with them
// the vote; the witness still has it.
func TestVoteSurvivesALostTail(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	n := s.nodes[1]
	old := n.fs.CrashClone(vfs.CrashCloneCfg{})
	vote := &pb.Message{
		Type: pb.MsgVote.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(9)),
		Index: new(uint64(1)), LogTerm: new(uint64(1)),
	}
	require.NoError(t, n.core.Step(vote))
	s.process()
	writeFile(t, old, "/data/witness", readFile(t, n.fs, "/data/witness"))
	store, err := OpenStore("/data", testStoreOptions(old))
	require.NoError(t, err)
	defer mustClose(t, store)
	require.Equal(t, hardState{term: 9, vote: 2, commit: 1}, store.log.hardState())
}

func TestTornWitnessSlot(t *testing.T) {
	fs := vfs.NewCrashableMem()
	w, found, err := openWitness(fs, "/witness")
	require.NoError(t, err)
	require.False(t, found)
	for i := range uint64(5) {
		require.NoError(t, w.write(witnessRecord{term: i, index: 10 * i}))
	}
	require.NoError(t, w.close())
	slot := int64(w.cur.seq % 2 * witnessSlot)
	flipBit(t, fs, "/witness", slot+20)
	w, found, err = openWitness(fs, "/witness")
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, uint64(30), w.last().index, "the older slot counts")
	require.NoError(t, w.close())
	flipBit(t, fs, "/witness", (witnessSlot-slot)+20)
	_, _, err = openWitness(fs, "/witness")
	var corrupt *CorruptionError
	require.ErrorAs(t, err, &corrupt)
}

func TestLogEntryChain(t *testing.T) {
	fs := filled(t, 20, false)
	store, err := OpenStore("/data", testStoreOptions(fs))
	require.NoError(t, err)
	v, ok, err := store.get(logKey(10))
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, store.db.Set(logKey(11), v, pebble.Sync)) // an entry in another's place
	require.NoError(t, store.Close())
	_, err = OpenStore("/data", testStoreOptions(fs))
	var corrupt *CorruptionError
	require.ErrorAs(t, err, &corrupt)
	require.Equal(t, uint64(11), corrupt.Index)
	require.ErrorContains(t, err, "restore a snapshot")
}

func TestEntriesBehindTheCache(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	n := s.nodes[1]
	n.store.log.cacheLimit = 2000
	for i := range 100 {
		require.NoError(t, s.put(fmt.Sprint("k", i), strings.Repeat("x", 50)))
		s.settle()
	}
	l := n.store.log
	require.Less(t, len(l.cache), 20)
	ents, err := l.Entries(2, 102, 1<<30)
	require.NoError(t, err)
	require.Len(t, ents, 100)
	for i, e := range ents {
		require.Equal(t, uint64(2+i), e.GetIndex())
	}
	ents, err = l.Entries(2, 102, 0)
	require.NoError(t, err)
	require.Len(t, ents, 1, "at least one")
	ents, err = l.Entries(50, 102, 500)
	require.NoError(t, err)
	require.Less(t, len(ents), 10)
}

func TestDiskFullGate(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	n := s.nodes[1]
	n.fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 10 << 30, TotalBytes: 100 << 30})
	n.store.PollSpace()
	require.NoError(t, n.store.Healthy())
	require.NoError(t, s.put("a", "1"))
	n.fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: defaultMinFreeBytes - 1})
	n.store.PollSpace()
	require.ErrorIs(t, n.store.Healthy(), ErrDiskFull)
	require.ErrorIs(t, s.put("b", "1"), ErrDiskFull)
	n.fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: defaultMinFreeBytes + 1})
	n.store.PollSpace()
	require.ErrorIs(t, s.put("b", "1"), ErrDiskFull, "the gate must not flutter")
	n.fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 2 * defaultMinFreeBytes})
	n.store.PollSpace()
	require.NoError(t, s.put("b", "1"))
}

func TestBallastIsGivenUp(t *testing.T) {
	fs := vfs.NewCrashableMem()
	fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 100 << 30})
	o := testStoreOptions(fs)
	o.BallastBytes = 1 << 20
	store, err := OpenStore("/data", o)
	require.NoError(t, err)
	defer mustClose(t, store)
	store.PollSpace()
	_, err = fs.Stat("/data/ballast")
	require.NoError(t, err)
	store.health.diskFull()
	_, err = fs.Stat("/data/ballast")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorIs(t, store.Healthy(), ErrDiskFull)
}

// TestSyncFailureStopsTheMember makes the log's sync fail: nothing of that round is
// acknowledged, the reason is reported once, and what was acknowledged is there
// after a restart.
func TestSyncFailureStopsTheMember(t *testing.T) {
	mem := vfs.NewCrashableMem()
	var broken atomic.Bool
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData) {
			return errors.New("EIO")
		}
		return nil
	}))
	failures := make(chan error, 10)
	o := testStoreOptions(fs)
	o.FailStop = func(err error) { failures <- err }
	store, err := OpenStore("/data", o)
	require.NoError(t, err)
	require.NoError(t, store.Bootstrap(7, 1, simMembers(1)))
	kv := newKV(store.State())
	core, err := NewCore(CoreConfig{ID: 1, ClusterID: 7, Machine: kv, Send: func([]*pb.Message) {}}, store)
	require.NoError(t, err)
	run := func() (err error) {
		done := make(chan struct{})
		err = ErrStopped
		go func() { // Pebble ends the goroutine
			defer close(done)
			for more := true; more; {
				if more, err = core.Process(); err != nil {
					return
				}
			}
		}()
		<-done
		return err
	}
	require.NoError(t, run())
	_, _, err = core.Propose([]byte("good=1"))
	require.NoError(t, err)
	require.NoError(t, run())
	broken.Store(true)
	_, _, err = core.Propose([]byte("bad=1"))
	require.NoError(t, err)
	_ = run()
	require.Empty(t, kv.get("bad"), "applied without being durable")
	require.Error(t, <-failures)
	require.Empty(t, failures, "reported once")
	require.Error(t, store.Healthy())
	clone := mem.CrashClone(vfs.CrashCloneCfg{})
	again, err := OpenStore("/data", testStoreOptions(clone))
	require.NoError(t, err)
	defer mustClose(t, again)
	require.Equal(t, store.log.last, again.log.last)
	broken.Store(false)
	_ = store.Close() // it has failed; only its goroutines matter here
}

// TestAFailedFlushIsNotTriedForEver makes every table fail in a simulator: the store gives up, says so once, and Pebble,
// which would try again as fast as it can, is ended where FailStop returned. It cannot be closed then, so a process of its
// own does it.
func TestAFailedFlushIsNotTriedForEver(t *testing.T) {
	const inChild = "LARDER_TEST_FAILED_FLUSH"
	if os.Getenv(inChild) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inChild+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "tried no more")
		return
	}
	var broken atomic.Bool
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind == errorfs.OpCreate && strings.HasSuffix(op.Path, ".sst") {
			return errors.New("EIO")
		}
		return nil
	}))
	failures := make(chan error, 10)
	o := testStoreOptions(fs)
	o.FailStop = func(err error) { failures <- err }
	o.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	store, err := OpenStore("/data", o)
	require.NoError(t, err)
	require.NoError(t, store.Bootstrap(7, 1, simMembers(1)))
	broken.Store(true)
	require.NoError(t, store.Flush())
	require.ErrorContains(t, <-failures, "EIO")
	require.Error(t, store.Healthy())
	more := func() bool { return store.health.backgroundErrors.Load() > maxBackgroundErrors }
	require.Never(t, more, 50*time.Millisecond, time.Millisecond)
	require.Empty(t, failures, "reported once")
	fmt.Println("tried no more")
	os.Exit(0)
}

// TestCrashDuringInstall takes power at every write of a member that installs a
// snapshot, and requires that it comes back whole.
func TestCrashDuringInstall(t *testing.T) {
	points := 0
	for at := int64(0); ; at++ {
		crashed := crashDuringInstall(t, at)
		if !crashed {
			break
		}
		points++
	}
	require.Greater(t, points, 5)
}

func crashDuringInstall(t *testing.T, at int64) (crashed bool) {
	t.Helper()
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	lead.core.cfg.LogKeepEntries = 5
	slow := s.nodes[1+lead.id%3]
	require.NoError(t, s.put("before", "1"))
	s.settle()
	s.cut = func(from, to uint64) bool { return from == slow.id || to == slow.id }
	for i := range 100 {
		require.NoError(t, s.put(fmt.Sprint("k", i), strconv.Itoa(i)))
		s.settle()
	}
	require.NoError(t, lead.core.Flush())

	// Restart the slow one on a disk that takes a picture before its at-th sync.
	require.NoError(t, slow.store.Close())
	mem := slow.fs
	var armed atomic.Bool
	var count atomic.Int64
	var picture atomic.Pointer[vfs.MemFS]
	o := testStoreOptions(errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		switch op.Kind {
		case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo, errorfs.OpLink, errorfs.OpRename, errorfs.OpRemove:
			if armed.Load() && count.Add(1) == at+1 {
				picture.Store(mem.CrashClone(vfs.CrashCloneCfg{}))
			}
		default:
		}
		return nil
	})))
	store, err := OpenStore("/data", o)
	require.NoError(t, err)
	s.boot(slow, store)
	armed.Store(true)
	s.cut = func(_, _ uint64) bool { return false }
	for range 40 {
		if s.tick(1); slow.core.log.base.index > 90 {
			break
		}
	}
	require.Greater(t, slow.core.log.base.index, uint64(90))
	armed.Store(false)
	s.settle()
	fs := picture.Load()
	if fs == nil {
		return false
	}
	require.NoError(t, slow.store.Close())
	slow.fs = fs
	require.NoError(t, s.restart(slow), "crash point %d", at)
	s.agree()
	return true
}

// TestTwoRoundsOneSync: of two rounds that are written together the last that writes anything must sync, also if the
// second only has messages to answer.
func TestTwoRoundsOneSync(t *testing.T) {
	core, r, mem := roundToSync(t)
	answer := &pb.Message{Type: pb.MsgPreVoteResp.Enum(), From: new(uint64(1)), To: new(uint64(2)), Reject: new(true)}
	next := &round{append: &pb.Message{Responses: []*pb.Message{answer}}}
	requireDurable(t, core, r, next, mem)
}

// roundToSync is a member of a cluster of one with a round begun that has an entry to sync.
func roundToSync(t *testing.T) (*Core, *round, *vfs.MemFS) {
	t.Helper()
	mem := vfs.NewCrashableMem()
	store, err := OpenStore("/data", testStoreOptions(mem))
	require.NoError(t, err)
	t.Cleanup(func() { mustClose(t, store) })
	require.NoError(t, store.Bootstrap(7, 1, simMembers(1)))
	core, err := NewCore(CoreConfig{
		ID: 1, ClusterID: 7, Machine: newKV(store.State()), Send: func([]*pb.Message) {},
	}, store)
	require.NoError(t, err)
	for more := true; more; {
		more, err = core.Process()
		require.NoError(t, err)
	}
	_, _, err = core.Propose([]byte("a=1"))
	require.NoError(t, err)
	r, err := core.begin()
	require.NoError(t, err)
	require.True(t, r.sync)
	return core, r, mem
}

// requireDurable writes two rounds with one sync, and requires that a loss of power right afterwards loses nothing.
func requireDurable(t *testing.T, core *Core, r, next *round, mem *vfs.MemFS) {
	t.Helper()
	n := &Node{cfg: NodeConfig{Boottime: func() int64 { return 0 }}, core: core}
	require.NoError(t, n.write(r, next))
	again, err := OpenStore("/data", testStoreOptions(mem.CrashClone(vfs.CrashCloneCfg{})))
	require.NoError(t, err)
	defer mustClose(t, again)
	require.Equal(t, core.store.log.last, again.log.last, "acknowledged, and lost")
}
