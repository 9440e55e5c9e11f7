package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// long is for how long a peer may say nothing in tests of calls that have less time: whoever waits for that is late.
const long = 10 * time.Second

func TestAReadIsBackWhenItsTimeIsOver(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	keys := laid(n, 3, 4096)
	p := n.behindProxy(t)
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout = long })
	requireValue(t, c, "far0", 4096)
	p.freeze()
	defer p.thaw()
	for name, read := range map[string]func(ctx context.Context) error{
		"get":       func(ctx context.Context) error { _, err := c.Get(ctx, keys[0], nil); return err },
		"get batch": func(ctx context.Context) error { _, err := c.GetBatch(ctx, keys, nil); return err },
		"view":      func(ctx context.Context) error { _, err := c.View(ctx, keys[0]); return err },
	} {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		require.ErrorIs(t, read(ctx), context.DeadlineExceeded, name)
		cancel()
		require.Less(t, time.Since(began), long/2, name)
	}
	require.Greater(t, (*c.devices.table.Load())[n.id].avoid.Load(), c.cfg.Clock(), "it was given long enough: others are preferred")
}

// A write that did not end in time is left to the engine. Its page is nobody's until nothing can land there any more.
func TestAWriteIsBackWhenItsTimeIsOver(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.first = true
	p := n.behindProxy(t)
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout = long })
	put(t, c, "first", 4096)
	free := c.Stats().FreePages
	p.freeze()
	defer p.thaw()
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := c.Put(ctx, []byte("k"), value("k", 4096))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), long/2)
	require.Equal(t, 1, c.Stats().Regions, "the caller's time was short: that is not the region's fault")
	require.Equal(t, free-1, c.Stats().FreePages)
	p.thaw()
	require.Eventually(t, func() bool { return c.Stats().FreePages == free }, 2*long, 5*time.Millisecond)
	put(t, c, "k", 4096)
	requireValue(t, c, "k", 4096)
}

// Half of a store's time is enough for a replica that does not come.
func TestAReplicaOfANodeThatHangsCostsAStoreHalfOfItsTime(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	p := n.behindProxy(t)
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout, cfg.Replicas = long, 2 })
	put(t, c, "first", 4096)
	require.Equal(t, []uint64{1, n.id}, f.locations("first"))
	p.freeze()
	defer p.thaw()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	_, err := c.Put(ctx, []byte("k"), value("k", 4096))
	require.NoError(t, err)
	require.Equal(t, []uint64{1}, f.locations("k"))
	require.Equal(t, 1, f.count(protocol.TypeAccess), "the region of the node that hangs is still there")
	_, err = c.Put(ctx, []byte("l"), value("l", 4096))
	require.NoError(t, err, "it is passed over for a while")
}

// stuck has a store hang in the middle of a write to a region of n, whose end comes when the test ends.
func stuck(t *testing.T, n *fakeNode, c *Client) {
	t.Helper()
	put(t, c, "first", 4096)
	n.proxy.freeze()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = c.Put(ctx, []byte("k"), value("k", 4096))
	}()
	t.Cleanup(func() {
		n.proxy.thaw()
		cancel()
		<-done
	})
	require.Eventually(t, func() bool { return n.proxy.held.Load() > 0 }, long, time.Millisecond)
}

// A write that hangs keeps nobody from the next session, and the master from being told that nothing of the last one writes.
func TestASessionThatEndsDoesNotWaitForWrites(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.first = true
	n.behindProxy(t)
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout = long })
	old := c.Session()
	stuck(t, n, c)
	began := time.Now()
	f.do(func() { f.sessions[old].ended = true })
	f.masters[0].cut()
	require.Eventually(t, func() bool { return c.Session() != old }, 2*long, time.Millisecond)
	require.Less(t, time.Since(began), long/2)
	var last protocol.HandshakeRequest
	f.do(func() {
		for _, s := range f.seen {
			if s.typ == protocol.TypeHandshake {
				last = protocol.HandshakeRequest{}
				require.NoError(t, last.Decode(s.payload))
			}
		}
	})
	require.Zero(t, last.Replaces, "bytes may still land")
}

func TestCloseDoesNotWaitForWrites(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	n.first = true
	n.behindProxy(t)
	c := f.open(t, func(cfg *Config) { cfg.CallTimeout = long })
	stuck(t, n, c)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_ = c.Close(ctx)
	require.Less(t, time.Since(began), long/2)
	require.Zero(t, f.count(protocol.TypeGoodbye), "bytes may still land")
}
