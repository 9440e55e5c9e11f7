package raft

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

// benchMachine tells each caller when its entry was applied, as a server does.
type benchMachine struct {
	applied uint64
	slots   [benchCallers]chan struct{}
}

const benchCallers = 64

func (m *benchMachine) Apply(index, _ uint64, data []byte) error {
	m.applied = index
	if len(data) >= 8 {
		m.slots[binary.BigEndian.Uint64(data)] <- struct{}{}
	}
	return nil
}
func (m *benchMachine) Flush() (uint64, error) { return 0, nil }
func (m *benchMachine) Restored(uint64) error  { return nil }
func (m *benchMachine) Applied() uint64        { return 0 }

// closedLoop runs fn from 64 goroutines until total calls were made.
func closedLoop(total int, fn func(worker int)) time.Duration {
	var left atomic.Int64
	left.Store(int64(total))
	var wg sync.WaitGroup
	start := time.Now()
	for w := range benchCallers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				fn(w)
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

// BenchmarkProposeVersusBareSet compares proposals awaited until they are applied,
// 64 at a time, with the same callers doing synced sets on a bare Pebble. The
// ratio is what raft, chaining, the witness and applying cost; the target is 0.8.
func BenchmarkProposeVersusBareSet(b *testing.B) {
	m := &benchMachine{}
	for i := range m.slots {
		m.slots[i] = make(chan struct{}, 1)
	}
	node, store := benchNode(b, m)
	db := store.db
	const round = 8000
	value := make([]byte, 64)
	propose := func(w int) {
		data := make([]byte, 64)
		binary.BigEndian.PutUint64(data, uint64(w))
		if _, _, err := node.Propose(data); err != nil {
			b.Error(err)
			return
		}
		<-m.slots[w]
	}
	var key atomic.Uint64
	set := func(int) {
		k := binary.BigEndian.AppendUint64([]byte{prefixState, stateData}, key.Add(1))
		if err := db.Set(k, value, pebble.Sync); err != nil {
			b.Error(err)
		}
	}
	var raftTime, bareTime time.Duration
	closedLoop(round, propose)
	closedLoop(round, set)
	rounds := 0
	for b.Loop() {
		raftTime += closedLoop(round, propose) // alternating, so that both see the same machine
		bareTime += closedLoop(round, set)
		rounds++
	}
	b.ReportMetric(float64(bareTime)/float64(raftTime), "ratio")
	b.ReportMetric(float64(rounds*round)/raftTime.Seconds(), "proposals/s")
	b.ReportMetric(float64(rounds*round)/bareTime.Seconds(), "bare-sets/s")
	h := node.Metrics().LogSync
	n := uint64(0)
	for _, c := range h.Counts {
		n += c
	}
	b.ReportMetric(float64(h.SumNanos)/float64(n)/1000, "µs/sync")
	b.ReportMetric(float64((rounds+1)*round)/float64(n), "proposals/sync")
	b.ReportMetric(0, "ns/op")
}

func benchNode(b *testing.B, m Machine) (*Node, *Store) {
	b.Helper()
	o := testStoreOptions(nil)
	o.MemTableBytes, o.DisableAutomaticCompactions, o.MinFreeBytes = 64<<20, false, 1
	store, err := OpenStore(filepath.Join(b.TempDir(), "d"), o)
	require.NoError(b, err)
	require.NoError(b, store.Bootstrap(7, 1, []Member{{ID: 1, Addr: "x:1"}}))
	ready := make(chan struct{}, 1)
	node, err := StartNode(NodeConfig{
		Core: CoreConfig{
			ID: 1, ClusterID: 7, Machine: m, OnLeadership: func(is bool, _ uint64) {
				if is {
					ready <- struct{}{}
				}
			},
		},
		Store: store,
	})
	require.NoError(b, err)
	<-ready
	b.Cleanup(func() {
		require.NoError(b, node.Stop(b.Context()))
		require.NoError(b, store.Close())
	})
	return node, store
}

// BenchmarkAppendWitness shows why the witness is not synced with every append.
func BenchmarkAppendWitness(b *testing.B) {
	for _, every := range []bool{false, true} {
		b.Run(fmt.Sprintf("every=%v", every), func(b *testing.B) {
			o := testStoreOptions(nil)
			store, err := OpenStore(filepath.Join(b.TempDir(), "d"), o)
			require.NoError(b, err)
			defer func() { require.NoError(b, store.Close()) }()
			require.NoError(b, store.Bootstrap(7, 1, []Member{{ID: 1}}))
			index := uint64(bootIndex)
			for b.Loop() {
				index++
				e := &pb.Entry{Index: new(index), Term: new(uint64(1)), Data: make([]byte, 4096)}
				done := make(chan error, 1)
				if every {
					prev := index - 1
					go func() { done <- store.wit.write(witnessRecord{term: 1, index: prev, indexTerm: 1}) }()
				} else {
					done <- nil
				}
				require.NoError(b, store.log.append([]*pb.Entry{e}, nil, true))
				require.NoError(b, <-done)
			}
		})
	}
}

// BenchmarkConfirmSolo is a confirmation by a sole voter: no round, no allocation.
func BenchmarkConfirmSolo(b *testing.B) {
	m := &benchMachine{}
	node, _ := benchNode(b, m)
	for !node.solo.Load() {
		runtime.Gosched()
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := node.Confirm(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkScan reads state records, as a restart does.
func BenchmarkScan(b *testing.B) {
	o := testStoreOptions(nil)
	o.MemTableBytes, o.CacheBytes, o.DisableAutomaticCompactions = 64<<20, 256<<20, false
	store, err := OpenStore(filepath.Join(b.TempDir(), "d"), o)
	require.NoError(b, err)
	defer func() { require.NoError(b, store.Close()) }()
	const records = 500_000
	st := store.State()
	for i := 0; i < records; {
		batch := st.NewBatch()
		for range 10_000 {
			batch.Set(binary.BigEndian.AppendUint64(nil, uint64(i)), make([]byte, 100))
			i++
		}
		require.NoError(b, batch.Commit())
	}
	require.NoError(b, store.db.Flush())
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		require.NoError(b, st.Scan(nil, func(_, _ []byte) error { n++; return nil }))
		require.Equal(b, records, n)
	}
	b.ReportMetric(float64(b.N)*records/b.Elapsed().Seconds(), "records/s")
}
