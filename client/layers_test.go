package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// layersOf cuts a value into layers of these sizes.
func layersOf(b []byte, sizes []int) (list [][]byte) {
	for _, n := range sizes {
		list, b = append(list, b[:n]), b[n:]
	}
	return list
}

var layerSizes = []int{5000, 1, 9000, 4096, 70_000}

const layerTotal = 5000 + 1 + 9000 + 4096 + 70_000

// layered runs a test with regions that are mapped, and with such as are not.
func layered(t *testing.T, change func(*Config), test func(t *testing.T, f *fake, c *Client)) {
	t.Helper()
	for name, first := range map[string]bool{"mapped": false, "by transfer": true} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			n := f.addNode(t, "dram", 1<<20)
			n.first = first
			n.behindProxy(t)
			test(t, f, f.open(t, func(cfg *Config) {
				cfg.RegionSize = 32 * 4096
				if change != nil {
					change(cfg)
				}
			}))
		})
	}
}

func TestAValueIsStoredAndReadLayerByLayer(t *testing.T) {
	sums := func(cfg *Config) { cfg.Checksums = true }
	layered(t, sums, func(t *testing.T, f *fake, c *Client) {
		t.Helper()
		w, err := c.PutLayers(t.Context(), []byte("k"), layerSizes)
		require.NoError(t, err)
		parts := layersOf(value("k", layerTotal), layerSizes)
		for i := range parts {
			_, err := c.Get(t.Context(), []byte("k"), nil)
			require.ErrorIs(t, err, ErrNotFound, "nothing is visible before it is finished")
			require.NoError(t, w.Launch(i, parts[i]))
		}
		require.NoError(t, w.Wait(t.Context(), 2))
		res, err := w.Finish(t.Context())
		require.NoError(t, err)
		require.True(t, res.Stored)
		require.Equal(t, 1, f.count(protocol.TypeBatchRegister))
		requireValue(t, c, "k", layerTotal)
		l, err := c.Lookup(t.Context(), []byte("k"))
		require.NoError(t, err)
		require.Equal(t, checksum(value("k", layerTotal)), l.Checksum)

		g, err := c.GetLayers(t.Context(), []byte("k"), layerSizes)
		require.NoError(t, err)
		got := layersOf(make([]byte, layerTotal), layerSizes)
		for i := range got {
			require.NoError(t, g.Launch(i, got[i]))
		}
		for i := range got {
			require.NoError(t, g.Wait(t.Context(), i))
			require.Equal(t, parts[i], got[i])
		}
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
	})
}

func TestAnAbortedLayerWriterLeavesNothing(t *testing.T) {
	layered(t, nil, func(t *testing.T, f *fake, c *Client) {
		t.Helper()
		put(t, c, "a", 4096)
		free := c.Stats().FreePages
		w, err := c.PutLayers(t.Context(), []byte("k"), layerSizes)
		require.NoError(t, err)
		require.NoError(t, w.Launch(0, make([]byte, 5000)))
		w.Abort()
		w.Abort()
		require.Equal(t, free, c.Stats().FreePages)
		require.Equal(t, 1, f.count(protocol.TypeBatchRegister))
		_, err = w.Finish(t.Context())
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorIs(t, w.Launch(1, make([]byte, 1)), ErrConfig)
	})
}

func TestAllLayersAreNeeded(t *testing.T) {
	layered(t, nil, func(t *testing.T, _ *fake, c *Client) {
		t.Helper()
		w, err := c.PutLayers(t.Context(), []byte("k"), []int{100, 100})
		require.NoError(t, err)
		require.ErrorIs(t, w.Launch(0, make([]byte, 99)), ErrConfig)
		require.ErrorIs(t, w.Launch(2, make([]byte, 100)), ErrConfig)
		require.NoError(t, w.Launch(0, make([]byte, 100)))
		require.ErrorIs(t, w.Launch(0, make([]byte, 100)), ErrConfig)
		_, err = w.Finish(t.Context())
		require.ErrorContains(t, err, "layer 1 was not launched")
		require.Equal(t, 32, c.Stats().FreePages)
		_, err = c.PutLayers(t.Context(), []byte("k"), []int{1, 0})
		require.ErrorIs(t, err, ErrConfig)
	})
}

func TestLayersOfARevokedRegionAreNotRegistered(t *testing.T) {
	layered(t, nil, func(t *testing.T, f *fake, c *Client) {
		t.Helper()
		w, err := c.PutLayers(t.Context(), []byte("k"), []int{100, 100})
		require.NoError(t, err)
		require.NoError(t, w.Launch(0, make([]byte, 100)))
		require.NoError(t, w.Wait(t.Context(), 0))
		r := c.pool.list[0]
		for _, s := range f.sessions {
			s.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.id, Epoch: r.epoch}).Append(nil))
		}
		require.Eventually(t, func() bool { return f.count(protocol.TypeRevokeDone) == 1 }, 5*time.Second, time.Millisecond)
		_ = w.Launch(1, make([]byte, 100))
		_, err = w.Finish(t.Context())
		require.ErrorIs(t, err, ErrRevoked)
		require.Zero(t, f.count(protocol.TypeBatchRegister))
	})
}

// Where a layer may still land nothing else is stored, and the region is not given up.
func TestPagesOfALayerThatMayStillLandAreOutOfUse(t *testing.T) {
	f, n, c := farClient(t, nil)
	put(t, c, "a", 4096)
	r := c.pool.list[0]
	w, err := c.PutLayers(t.Context(), []byte("k"), []int{100, 5000})
	require.NoError(t, err)
	n.proxy.freeze()
	require.NoError(t, w.Launch(0, make([]byte, 100)))
	require.NoError(t, w.Launch(1, make([]byte, 5000)))
	require.Error(t, w.Wait(t.Context(), 1))
	_, err = w.Finish(t.Context())
	require.Error(t, err)
	c.pool.mu.Lock()
	require.NotZero(t, r.loose)
	c.pool.mu.Unlock()
	for i := range w.all {
		if b := w.all[i].batch; b != nil {
			<-b.Done() // which says no more than that nobody knows
		}
	}
	require.Never(t, func() bool { return f.count(protocol.TypeReturnAlloc) > 0 }, 300*time.Millisecond, 5*time.Millisecond)
	n.proxy.thaw()
	require.Eventually(t, func() bool { return f.count(protocol.TypeReturnAlloc) == 1 }, 10*time.Second, time.Millisecond)
}

func TestLayersThatAreNotThoseThatWereStoredAreRefused(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, nil)
	_, err := c.GetLayers(t.Context(), []byte("k"), []int{1})
	require.ErrorIs(t, err, ErrNotFound)
	put(t, c, "k", 4096)
	_, err = c.GetLayers(t.Context(), []byte("k"), []int{4096, 1})
	require.ErrorIs(t, err, ErrConfig)
}

func TestALayerReaderTellsOfAWrongChecksumAndOfALostLease(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.lay("k", value("k", 200), 12345)
	c := f.open(t, func(cfg *Config) { cfg.Checksums = true })
	read := func() (*LayerReader, error) {
		g, err := c.GetLayers(t.Context(), []byte("k"), []int{100, 100})
		require.NoError(t, err)
		dst := make([]byte, 200)
		require.NoError(t, g.Launch(0, dst[:100]))
		require.NoError(t, g.Launch(1, dst[100:]))
		require.NoError(t, g.Wait(t.Context(), 0))
		return g, g.Wait(t.Context(), 1)
	}
	g, err := read()
	require.NoError(t, err)
	require.ErrorIs(t, g.Close(), ErrNotFound)
	n.lay("k", value("k", 200), 12345) // the leader has dropped it
	g, err = read()
	require.NoError(t, err)
	g.broken.Store(true)
	require.ErrorIs(t, g.Close(), ErrLease)
}

// What a node that hangs is about to be sent, or asked for, is left when everything ends.
func TestTheEndOfLayersDoesNotWaitForANodeThatHangs(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.first = true
	p := n.behindProxy(t)
	sizes := make([]int, 40)
	for i := range sizes {
		sizes[i] = 1000
	}
	n.lay("held", value("held", 40_000), 0)
	const call = 2 * time.Second
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout, cfg.RegionSize = call, 32*4096 })
	put(t, c, "first", 4096)
	g, err := c.GetLayers(t.Context(), []byte("held"), sizes)
	require.NoError(t, err)
	w, err := c.PutLayers(t.Context(), []byte("k"), sizes)
	require.NoError(t, err)
	x, err := c.PutLayers(t.Context(), []byte("l"), sizes)
	require.NoError(t, err)
	p.freeze()
	defer p.thaw()
	for i := range sizes {
		require.NoError(t, g.Launch(i, make([]byte, 1000)))
		require.NoError(t, w.Launch(i, make([]byte, 1000)))
		require.NoError(t, x.Launch(i, make([]byte, 1000)))
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = w.Finish(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	x.Abort()
	require.Error(t, x.Wait(t.Context(), 39), "whoever waits hears of it")
	_ = g.Close()
	require.Less(t, time.Since(began), 4*call, "ten rounds of four took ten times as long as one")
	require.Equal(t, 1, c.Stats().Regions, "nothing is wrong with the region")
}
