package client

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/transfer"
)

// laid lays n entries of size bytes on a node.
func laid(n *fakeNode, count, size int) (keys [][]byte) {
	for i := range count {
		key := fmt.Sprint("far", i)
		b := value(key, size)
		n.lay(key, b, checksum(b))
		keys = append(keys, []byte(key))
	}
	return keys
}

func TestEntriesOfADeviceThatIsNotMappedAreReadByTransfer(t *testing.T) {
	for _, sums := range []bool{false, true} {
		t.Run(fmt.Sprint("checksums=", sums), func(t *testing.T) {
			f := newFake(t, 16*4096, 1)
			keys := laid(f.addNode(t, "dram", 1<<20), 5, 70_000)
			c := f.open(t, func(cfg *Config) { cfg.Checksums = sums })
			put(t, c, "near", 4096)
			requireValue(t, c, "far0", 70_000)

			got, err := c.GetBatch(t.Context(), append(keys, []byte("near"), []byte("none")), nil)
			require.NoError(t, err)
			for i, k := range keys {
				require.Equal(t, value(string(k), 70_000), got[i])
			}
			require.Equal(t, value("near", 4096), got[5])
			require.Nil(t, got[6])

			v, err := c.ViewBatch(t.Context(), [][]byte{keys[3], []byte("near"), []byte("none"), keys[4]}, true)
			require.NoError(t, err)
			require.Equal(t, 2, v.Len())
			require.Equal(t, value("far3", 70_000), v.Bytes(0))
			require.Equal(t, value("near", 4096), v.Bytes(1))
			require.NoError(t, v.Close())
			require.EqualValues(t, 1+5+1, c.Stats().RemoteReads)
		})
	}
}

func TestAViewOfARemoteEntryIsACopyThatNeedsNoLease(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	laid(n, 1, 5000)
	c := f.open(t, nil)
	v, err := c.View(t.Context(), []byte("far0"))
	require.NoError(t, err)
	n.forget(t)
	require.Equal(t, value("far0", 5000), v.Bytes())
	require.NoError(t, v.Close())
}

func TestRemoteBytesOfAnotherChecksumAreAMiss(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.lay("k", value("k", 4096), 12345)
	c := f.open(t, func(cfg *Config) { cfg.Checksums = true })
	_, err := c.Get(t.Context(), []byte("k"), nil)
	require.ErrorIs(t, err, ErrNotFound)
	require.EqualValues(t, 1, c.Stats().ChecksumFaults)
	require.EqualValues(t, 1, c.Stats().Condemned)
	put(t, c, "k", 4096)
	requireValue(t, c, "k", 4096)
}

// A node's NICs are a part of the way there: who has some, too, can take it.
func TestNICsOfANodeAreToldToTheEngine(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	c := f.open(t, nil)
	e := n.device().Endpoint
	plain, err := c.devices.carrier.open(e)
	require.NoError(t, err)
	defer c.devices.carrier.drop(plain)
	require.Empty(t, plain.Descriptor().NICs)
	d, err := c.devices.carrier.openFar(&protocol.Device{ID: 2, Endpoint: e})
	require.NoError(t, err)
	defer d.drop()
	e.NICs = []string{"mlx5_0"}
	require.False(t, d.far.is(&protocol.Device{ID: 2, Endpoint: e}))
	fast, err := c.devices.carrier.open(e)
	require.NoError(t, err)
	defer c.devices.carrier.drop(fast)
	require.Equal(t, e.NICs, fast.Descriptor().NICs)
}

// What is damaged at one place is dropped there, and read elsewhere; at the last one the key goes with it. Each way to read
// does so.
func TestDamagedLocationsAreDropped(t *testing.T) {
	reads := map[string]func(t *testing.T, c *Client) []byte{
		"Get": func(t *testing.T, c *Client) []byte {
			t.Helper()
			b, _ := c.Get(t.Context(), []byte("k"), nil)
			return b
		},
		"GetBatch": func(t *testing.T, c *Client) []byte {
			t.Helper()
			got, err := c.GetBatch(t.Context(), [][]byte{[]byte("k")}, nil)
			require.NoError(t, err)
			return got[0]
		},
		"View": func(t *testing.T, c *Client) []byte {
			t.Helper()
			v, err := c.View(t.Context(), []byte("k"))
			if err != nil {
				require.ErrorIs(t, err, ErrNotFound)
				return nil
			}
			defer func() { require.NoError(t, v.Close()) }()
			return bytes.Clone(v.Bytes())
		},
	}
	for name, read := range reads {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 16*4096, 1)
			f.features = protocol.FeatureCopies
			first, second := f.addNode(t, "dram", 1<<20), f.addNode(t, "ssd", 1<<20)
			for _, n := range []*fakeNode{first, second} {
				n.lay("k", value("k", 5000), checksum(value("k", 5000)))
			}
			c := f.open(t, func(cfg *Config) { cfg.Checksums = true })
			first.mem[17]++
			require.Equal(t, value("k", 5000), read(t, c))
			require.Equal(t, []uint64{3}, f.locations("k"))
			second.mem[4999]++
			require.Nil(t, read(t, c))
			require.Empty(t, f.locations("k"))
			require.EqualValues(t, 2, c.Stats().Condemned)
		})
	}
}

// A node that was started again has its bytes under another handle, which the leader knows.
func TestABufferThatIsGoneIsAskedFor(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "ssd", 1<<20)
	laid(n, 3, 5000)
	c := f.open(t, nil)
	requireValue(t, c, "far0", 5000)
	n.forget(t)
	requireValue(t, c, "far0", 5000)
	requireValue(t, c, "far1", 5000)
	require.EqualValues(t, 1, c.Stats().RemoteFaults)
}

// Bytes of another generation than the leader has told of are never read.
func TestARemoteGenerationIsCompared(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	x := n.lay("k", value("k", 4096), 0)
	c := f.open(t, nil)
	requireValue(t, c, "k", 4096)
	f.do(func() { x.loc.Generation = 99 }) // of before the node lost its memory
	_, err := c.Get(t.Context(), []byte("k"), nil)
	require.ErrorIs(t, err, ErrNotFound)
	f.do(func() { n.gen, x.loc.Generation = 101, 101 })
	requireValue(t, c, "k", 4096)
}

// Bytes whose device was lost while they were on their way do not count.
func TestARemoteGenerationIsComparedAfterTheRead(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.behindProxy(t)
	n.lay("k", value("k", 4096), 0)
	c := f.open(t, nil)
	requireValue(t, c, "k", 4096)
	n.proxy.freeze()
	read := make(chan error, 1)
	go func() {
		_, err := c.Get(t.Context(), []byte("k"), nil)
		read <- err
	}()
	require.Eventually(t, func() bool { return f.count(protocol.TypeLookup) == 2 }, 5*time.Second, time.Millisecond)
	lost := n.device()
	lost.Generation++
	c.devices.learn("", []protocol.Device{lost})
	f.do(func() { n.gen++ })
	n.proxy.thaw()
	require.ErrorIs(t, <-read, ErrNotFound)
}

func TestADeviceThatNobodyServesIsAMissUntilItIs(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	f.do(func() { n.hidden = true })
	laid(n, 1, 4096)
	c := f.open(t, nil)
	_, err := c.Get(t.Context(), []byte("far0"), nil)
	require.ErrorIs(t, err, ErrNotFound)
	require.NotZero(t, c.Stats().GenerationMisses)
	f.do(func() { n.hidden = false })
	require.Eventually(t, func() bool {
		_, err := c.Get(t.Context(), []byte("far0"), nil)
		return err == nil
	}, 5*time.Second, 10*time.Millisecond)
}

// A read that takes longer than its lease goes on as long as the lease is renewed, and does not count otherwise.
func TestARemoteReadKeepsItsLease(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	laid(f.addNode(t, "dram", 1<<20), 1, 4096)
	c := f.open(t, nil)
	h := &hold{}
	h.begin()
	sentAt := c.cfg.Clock()
	h.add(&protocol.LookupResult{Lease: 7, LeaseMS: 1000}, sentAt)
	f.do(func() { f.leases[7] = &fakeEntry{} })
	c.keep(h)
	require.Eventually(t, func() bool { return f.count(protocol.TypeRenew) >= 3 }, 20*time.Second, time.Millisecond)
	require.False(t, h.over(sentAt+1000e6))
	c.letGo(h)
}

func TestACanceledRemoteReadIsNoMiss(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	laid(n, 1, 4096)
	n.behindProxy(t).freeze()
	c := f.open(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	f.do(func() {
		f.after = func(_ *fakeConn, h protocol.Header) bool {
			if h.Type == protocol.TypeLookup || h.Type == protocol.TypeBatchLookup {
				cancel()
			}
			return true
		}
	})
	_, err := c.Get(ctx, []byte("far0"), nil)
	require.ErrorIs(t, err, context.Canceled)
}

func TestReadersTakeTheCheapestCopyAndFallOver(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.features = protocol.FeatureCopies
	slow, fast := f.addNode(t, "ssd", 1<<20), f.addNode(t, "dram", 1<<20)
	keys := laid(slow, 4, 4096)
	laid(fast, 4, 4096)
	c := f.open(t, nil)
	clear(slow.mem) // nobody looks there while the other can be had
	requireValue(t, c, "far0", 4096)
	_, err := c.GetBatch(t.Context(), keys, nil)
	require.NoError(t, err)

	for i, k := range keys {
		copy(slow.mem[i*4096:], value(string(k), 4096))
	}
	require.NoError(t, fast.engine.Close())
	requireValue(t, c, "far0", 4096)
	require.NotZero(t, c.Stats().Fallovers)
	fallen := c.Stats().Fallovers
	got, err := c.GetBatch(t.Context(), keys, nil)
	require.NoError(t, err)
	for i, k := range keys {
		require.Equal(t, value(string(k), 4096), got[i])
	}
	require.Equal(t, fallen, c.Stats().Fallovers, "what has failed is avoided for a while")
	v, err := c.ViewBatch(t.Context(), keys, true)
	require.NoError(t, err)
	require.Equal(t, 4, v.Len())
	require.NoError(t, v.Close())
}

// holed is a disk that has lost the record at an offset.
type holed struct {
	mem  []byte
	hole uint64
}

func (h *holed) ReadAt(_ context.Context, p []byte, off uint64) error {
	if off == h.hole {
		return transfer.ErrMissing
	}
	copy(p, h.mem[off:])
	return nil
}

func (*holed) WriteAt(context.Context, []byte, uint64) error { return nil }

// A record that a disk has lost says nothing of the others there.
func TestALostRecordIsAMissOfThatRecordAlone(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "ssd", 1<<20)
	keys := laid(n, 3, 4096)
	disk, err := n.engine.RegisterStorage(&holed{n.mem, 4096}, uint64(len(n.mem)), transfer.BufferOptions{ReadOnly: true})
	require.NoError(t, err)
	n.read = disk
	c := f.open(t, nil)
	requireValue(t, c, "far0", 4096)
	_, err = c.Get(t.Context(), keys[1], nil)
	require.ErrorIs(t, err, ErrNotFound)
	requireValue(t, c, "far2", 4096)
	require.Zero(t, (*c.devices.table.Load())[n.id].avoid.Load())
	require.Zero(t, asks(t, f))
	require.EqualValues(t, 1, c.Stats().RemoteFaults)
}

func TestOfLocationsThatCostTheSameAnyIsTaken(t *testing.T) {
	const r = rankRemote
	for name, x := range map[string]struct {
		costs []cost
		want  []int // how many of lookAgain times 60 reads take each
	}{
		"alone":              {[]cost{{r, 9}}, []int{960}},
		"not measured":       {[]cost{{r, 0}, {r, 0}}, []int{480, 480}},
		"as fast":            {[]cost{{r, 199}, {r, 100}, {r, 0}}, []int{320, 320, 320}},
		"slower":             {[]cost{{r, 201}, {r, 100}, {r, 100}}, []int{20, 470, 470}},
		"another rank":       {[]cost{{rankStorage, 1}, {r, 500}, {rankNone, 0}, {rankAvoided, 1}}, []int{0, 960, 0, 0}},
		"nothing to be read": {[]cost{{rankNone, 0}, {rankNone, 0}}, []int{480, 480}},
	} {
		got := make([]int, len(x.costs))
		for chance := range uint64(lookAgain * 60) {
			got[cheapest(x.costs, chance)]++
		}
		require.Equal(t, x.want, got, name)
	}
}

func TestReadersAreSpreadOverTheNodesThatHaveAnEntry(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.features = protocol.FeatureCopies
	a, b := f.addNode(t, "dram", 1<<20), f.addNode(t, "dram", 1<<20)
	a.lay("k", value("a", 4096), 0)
	b.lay("k", value("b", 4096), 0)
	c := f.open(t, nil)
	var dst []byte
	from := map[byte]int{}
	for range 1000 {
		var err error
		dst, err = c.Get(t.Context(), []byte("k"), dst)
		require.NoError(t, err)
		from[dst[0]]++
	}
	require.Len(t, from, 2, "both have been read from")
	require.NotZero(t, (*c.devices.table.Load())[a.id].far.latency(c.cfg.Clock()+latencyEvery), "the engine has measured it")
}
