package client

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

func TestReplicasLieOnDistinctNodes(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	f.features = protocol.FeatureCopies
	a, b := f.addNode(t, "dram", 1<<20), f.addNode(t, "dram", 1<<20)
	c := f.open(t, func(cfg *Config) { cfg.Replicas, cfg.Checksums = 2, true })
	put(t, c, "two", 5000)
	require.Equal(t, []uint64{1, a.id}, f.locations("two"))
	_, err := c.Put(t.Context(), []byte("three"), value("three", 5000), WithReplicas(3))
	require.NoError(t, err)
	require.Equal(t, []uint64{1, a.id, b.id}, f.locations("three"))
	_, err = c.Put(t.Context(), []byte("one"), value("one", 5000), WithReplicas(1))
	require.NoError(t, err)
	require.Equal(t, []uint64{1}, f.locations("one"))
	require.EqualValues(t, 3, c.Stats().Replicas)
	require.Equal(t, 3, f.count(protocol.TypeBatchRegister), "an entry and its replicas are registered at once")

	for _, n := range []*fakeNode{a, b} { // each replica has the bytes
		var l protocol.Location
		f.do(func() {
			for _, x := range f.entries["three"].Value.(*fakeEntry).copies {
				if x.Device == n.id {
					l = x
				}
			}
		})
		require.Equal(t, value("three", 5000), n.mem[l.Offset+l.KVOffset:][:5000])
		require.Equal(t, checksum(value("three", 5000)), l.Checksum)
	}
}

func TestABatchHasReplicas(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	c := f.open(t, func(cfg *Config) { cfg.Replicas = 2 })
	put(t, c, "k3", 4096)
	items := batch("k", 8)
	res, err := c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	for i := range items {
		require.Equal(t, i != 3, res[i].Stored)
		require.Equal(t, []uint64{1, n.id}, f.locations(fmt.Sprint("k", i)))
	}
	require.EqualValues(t, 8, c.Stats().Replicas)
	require.Equal(t, 16-8, c.pool.seconds[0].free.count, "what is held already takes no page")
}

func TestAValueIsStoredWithoutReplicasWhereThereIsNoOtherNode(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.Replicas = 2 })
	for i := range 5 {
		put(t, c, fmt.Sprint("k", i), 4096)
		require.Equal(t, []uint64{1}, f.locations(fmt.Sprint("k", i)))
	}
	require.Equal(t, 2, f.count(protocol.TypeRequestAlloc), "another node is not asked for with every store")
	require.Equal(t, 1, c.Stats().Regions, "a region where no replica may lie is given back")
}

func TestAReplicaThatCannotBeWrittenIsDoneWithout(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	c := f.open(t, func(cfg *Config) { cfg.Replicas = 2 })
	put(t, c, "a", 4096)
	require.NoError(t, n.engine.Close())
	put(t, c, "b", 4096)
	require.Equal(t, []uint64{1}, f.locations("b"))
	requireValue(t, c, "b", 4096)
}

func TestWritingThroughToATier(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	f.features = protocol.FeatureCopies
	f.addNode(t, "dram", 1<<20)
	ssd := f.addNode(t, "ssd", 1<<20)
	c := f.open(t, func(cfg *Config) { cfg.WriteThrough = "ssd" })
	put(t, c, "a", 4096)
	require.Equal(t, []uint64{1, ssd.id}, f.locations("a"))
	_, err := c.Put(t.Context(), []byte("b"), value("b", 4096), WithReplicas(3))
	require.NoError(t, err)
	require.Equal(t, []uint64{1, ssd.id, 2}, f.locations("b"))
}

// What an eviction frees is free for replicas again where they lay, and the pages of replicas hold nothing else.
func TestPagesOfReplicasComeBack(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	f.addNode(t, "dram", 1<<20)
	c := f.open(t, func(cfg *Config) { cfg.Replicas = 2 })
	put(t, c, "a", 4096)
	require.Equal(t, 15, c.Stats().FreePages)
	second := c.pool.seconds[0]
	var pages []protocol.Page
	f.do(func() {
		x := f.entries["a"].Value.(*fakeEntry)
		l := x.copies[0]
		pages = append(pages, f.drop(f.entries["a"]), protocol.Page{Key: []byte("a"), RegionID: l.RegionID, KVOffset: l.KVOffset, KVLength: l.KVLength})
	})
	c.reclaim(pages)
	c.pool.mu.Lock()
	require.Equal(t, 16, second.free.count)
	require.Equal(t, 16, c.pool.nfree)
	c.pool.mu.Unlock()
}

func TestBadReplicasAreRefused(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	_, err := c.Put(t.Context(), []byte("k"), []byte{1}, WithReplicas(protocol.MaxCopies+2))
	require.ErrorIs(t, err, ErrConfig)
	_, err = Open(t.Context(), Config{Addrs: []string{"a:1"}, Replicas: -1, WriteThrough: "tape"})
	require.ErrorContains(t, err, "Replicas")
	require.ErrorContains(t, err, "WriteThrough")
}

func TestWhatAnAllocStoresHasReplicas(t *testing.T) {
	for name, first := range map[string]bool{"mapped": false, "by transfer": true} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			f.addNode(t, "dram", 1<<20).first = first
			c := f.open(t, func(cfg *Config) { cfg.Replicas, cfg.Checksums = 2, true })
			m, err := c.Alloc(t.Context(), []byte("k"), 5000)
			require.NoError(t, err)
			copy(m.Bytes(), value("k", 5000))
			res, err := m.Store(t.Context())
			require.NoError(t, err)
			require.True(t, res.Stored)
			where := f.locations("k")
			require.Len(t, where, 2)
			require.EqualValues(t, 1, c.Stats().Replicas)
			requireValue(t, c, "k", 5000)
			f.do(func() { // the replica alone
				x := f.entries["k"].Value.(*fakeEntry)
				x.loc, x.copies = x.copies[0], nil
			})
			requireValue(t, c, "k", 5000)
			w, err := c.PutLayers(t.Context(), []byte("l"), []int{100, 4000})
			require.NoError(t, err)
			b := value("l", 4100)
			require.NoError(t, w.Launch(1, b[100:]))
			require.NoError(t, w.Launch(0, b[:100]))
			_, err = w.Finish(t.Context())
			require.NoError(t, err)
			require.Len(t, f.locations("l"), 2)
			require.EqualValues(t, 2, c.Stats().Replicas)
			require.Equal(t, 16-4, c.Stats().FreePages)
			f.do(func() {
				x := f.entries["l"].Value.(*fakeEntry)
				require.Equal(t, x.loc.Checksum, x.copies[0].Checksum)
				x.loc, x.copies = x.copies[0], nil
			})
			requireValue(t, c, "l", 4100)
		})
	}
}

// A node that is asked for memory for replicas and cannot be reached costs stores a moment, and none of them fails for it.
func TestStoresDoNotWaitForTheMemoryOfReplicas(t *testing.T) {
	f := newFake(t, 256*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	f.do(func() { n.hidden = true })
	c := f.open(t, func(cfg *Config) { cfg.Replicas, cfg.RegionSize = 2, 64*4096 })
	ctx, cancel := context.WithTimeout(t.Context(), deviceWait-time.Second)
	defer cancel()
	for i := range 30 {
		key := fmt.Sprint("k", i)
		_, err := c.Put(ctx, []byte(key), value(key, 4096))
		require.NoError(t, err)
		require.Equal(t, []uint64{1}, f.locations(key))
	}
	f.do(func() { n.hidden = false })
	require.Eventually(t, func() bool {
		c.pool.mu.Lock()
		defer c.pool.mu.Unlock()
		return len(c.pool.seconds) == 1
	}, 20*time.Second, 5*time.Millisecond, "what came late is of use later")
	put(t, c, "late", 4096)
	require.Equal(t, []uint64{1, n.id}, f.locations("late"))
}

// A store keeps half of its time for itself.
func TestAStoreWithLittleTimeDoesWithoutReplicas(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.Replicas = 2 })
	put(t, c, "first", 4096)
	c.seconds.mu.Lock() // somebody asks, and is not answered
	c.seconds.none[0], c.seconds.begun[0], c.seconds.ended[0] = 0, c.cfg.Clock(), make(chan struct{})
	c.seconds.mu.Unlock()
	op := c.newStore()
	defer c.freeStore(op)
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	op.todo, op.items, op.pages = []int{0}, []Item{{Key: []byte("k")}}, []int{1}
	op.want.init([][]byte{[]byte("k")}, op.pages)
	op.replicate(ctx, c.sess.Load())
	require.NoError(t, ctx.Err())
}
