package client

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// farClient is a client whose regions lie on a node.
func farClient(t *testing.T, change func(*Config)) (*fake, *fakeNode, *Client) {
	t.Helper()
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.first = true
	n.behindProxy(t)
	return f, n, f.open(t, change)
}

func TestARegionThatIsNotMappedIsWrittenByTransfer(t *testing.T) {
	for _, sums := range []bool{false, true} {
		t.Run(fmt.Sprint("checksums=", sums), func(t *testing.T) {
			f, n, c := farClient(t, func(cfg *Config) { cfg.Checksums = sums })
			put(t, c, "one", 5000)
			requireValue(t, c, "one", 5000)
			res, err := c.PutBatch(t.Context(), batch("k", 8))
			require.NoError(t, err)
			for i := range res {
				require.True(t, res[i].Stored)
				requireValue(t, c, fmt.Sprint("k", i), 4096)
			}
			require.Equal(t, 1, f.count(protocol.TypeAccess), "a handle does for the region's life")
			l, err := c.Lookup(t.Context(), []byte("one"))
			require.NoError(t, err)
			require.Equal(t, n.id, l.Device)
			require.Equal(t, value("one", 5000), n.mem[l.Offset+l.KVOffset:][:5000])
			if sums {
				require.Equal(t, checksum(value("one", 5000)), l.Checksum)
			}
		})
	}
}

func TestAnAllocOfARemoteRegionIsSentWhenItIsStored(t *testing.T) {
	_, _, c := farClient(t, func(cfg *Config) { cfg.Checksums = true })
	a, err := c.Alloc(t.Context(), []byte("k"), 7000)
	require.NoError(t, err)
	copy(a.Bytes(), value("k", 7000))
	res, err := a.Store(t.Context())
	require.NoError(t, err)
	require.True(t, res.Stored)
	requireValue(t, c, "k", 7000)
	free := c.Stats().FreePages
	b, err := c.Alloc(t.Context(), []byte("l"), 7000)
	require.NoError(t, err)
	b.Abort()
	require.Equal(t, free, c.Stats().FreePages)
}

// A node that was started again has the region under another handle.
func TestAHandleThatIsGoneIsAskedForAnew(t *testing.T) {
	f, n, c := farClient(t, nil)
	put(t, c, "a", 4096)
	n.forget(t)
	put(t, c, "b", 4096)
	requireValue(t, c, "a", 4096)
	requireValue(t, c, "b", 4096)
	require.Equal(t, 2, f.count(protocol.TypeAccess))
	require.Equal(t, 1, c.Stats().Regions)
	require.Zero(t, c.Stats().Revoked)
}

func TestARegionWithoutAWayThereIsGivenBack(t *testing.T) {
	f, n, c := farClient(t, nil)
	put(t, c, "a", 4096)
	require.NoError(t, n.engine.Close())
	put(t, c, "b", 4096) // in the fake's own device: the node is avoided
	requireValue(t, c, "b", 4096)
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.returned) == 1
	}, 5*time.Second, time.Millisecond)
	require.EqualValues(t, 1, c.Stats().Revoked)
}

func TestAStoreThatWasRefusedAHandleGoesElsewhere(t *testing.T) {
	f, _, c := farClient(t, nil)
	f.do(func() {
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeAccess {
				return &protocol.Error{Code: protocol.CodeNotFound}
			}
			return nil
		}
	})
	put(t, c, "a", 4096)
	requireValue(t, c, "a", 4096)
}

// What a transfer may still write to is neither used, nor given up, before it cannot.
func TestPagesOfAWriteThatMayStillLandAreOutOfUse(t *testing.T) {
	f, n, c := farClient(t, nil)
	put(t, c, "a", 4096)
	r := c.pool.list[0]
	n.proxy.freeze()
	put(t, c, "b", 4096) // elsewhere, after the node has not confirmed anything
	requireValue(t, c, "b", 4096)
	require.Empty(t, f.returned, "something may still land there")
	c.pool.mu.Lock()
	require.Equal(t, 1, r.loose)
	require.False(t, r.covered)
	c.pool.mu.Unlock()
	for _, s := range f.sessions {
		s.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.id, Epoch: r.epoch}).Append(nil))
	}
	put(t, c, "c", 4096)
	require.Zero(t, f.count(protocol.TypeRevokeDone))
	n.proxy.thaw()
	require.Eventually(t, func() bool { return f.count(protocol.TypeRevokeDone) == 1 }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return f.count(protocol.TypeReturnAlloc) == 1 }, 10*time.Second, time.Millisecond)
}

func TestARevokeWaitsForTransfers(t *testing.T) {
	f, n, c := farClient(t, nil)
	put(t, c, "a", 4096)
	r := c.pool.list[0]
	var o sending
	v := value("b", 4096)
	run, ok := c.pool.takeRun(1)
	require.True(t, ok)
	n.proxy.freeze()
	require.True(t, o.add(c.pool, run, v))
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		o.run(context.Background(), c)
	}()
	for _, s := range f.sessions {
		s.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.id, Epoch: r.epoch}).Append(nil))
	}
	require.Eventually(t, func() bool { return c.Stats().Regions == 0 }, 5*time.Second, time.Millisecond)
	require.Zero(t, f.count(protocol.TypeRevokeDone))
	n.proxy.thaw()
	<-sent
	o.fate(c, 0)
	require.Eventually(t, func() bool { return f.count(protocol.TypeRevokeDone) == 1 }, 10*time.Second, time.Millisecond)
}

func TestCloseGivesRemoteRegionsBack(t *testing.T) {
	f, _, c := farClient(t, nil)
	put(t, c, "a", 4096)
	require.NoError(t, c.Close(t.Context()))
	require.Equal(t, 1, f.count(protocol.TypeGoodbye))
}
