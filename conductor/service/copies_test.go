package service

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/conductor"
	"larder/node"
)

// TestHotPrefix: a prefix that lies in the pool, and is to be copied to an instance, is copied to the node beside it: its bytes move.
func TestHotPrefix(t *testing.T) {
	m := newPool(t)
	n, err := node.New(node.Config{
		Masters: []string{m.Addr()}, Host: "beside-b", Listen: []string{"127.0.0.1:0"}, DRAM: 8 << 20, PageSize: 4096, RegionSize: 1 << 20,
		Bandwidth: 1 << 30, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, n.Close())
	}()
	require.Eventually(t, func() bool { s := n.Status(); return s.Ready() }, soon, 10*time.Millisecond)

	c := openPool(t, m)
	scope := client.PrefixContext{Model: "m", BlockSize: 4}
	tokens := make([]uint32, 64)
	names := conductor.Names(nil, 0, tokens, 4, nil)
	parent := uint64(0)
	for i, name := range names {
		_, err := c.Put(ctx, fmt.Appendf(nil, "hot-%d", i), make([]byte, 4096), client.WithPrefix(&scope, name, parent, uint64(i)))
		require.NoError(t, err)
		parent = name
	}
	s, err := Start(Config{Listen: "127.0.0.1:0", Pool: map[string]*client.Client{DefaultTenant: c}})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	hot := &copyOf{scope: conductor.Scope{Tenant: DefaultTenant, Model: "m", BlockSize: 4}, names: names, host: "beside-b"}
	other := *hot
	other.scope.Tenant = "other"
	s.copies.add(&other) // nobody has a session for it
	s.copies.add(hot)
	s.copies.add(hot) // not again so soon
	require.Eventually(t, func() bool {
		copied := uint64(0)
		for _, d := range n.Status().Devices {
			copied += d.Copied
		}
		return copied == uint64(len(names))
	}, soon, 10*time.Millisecond)
	require.EqualValues(t, len(names), s.copies.blocks.Load())
	require.Zero(t, s.copies.failed.Load())
}

// TestPrefix: the blocks that are copied are called as they are looked up, with the request's salt, by tokens and by hashes alike.
func TestPrefix(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7}
	names := conductor.Names(nil, 9, tokens, 2, []byte("s"))
	byTokens := &wanted{scoped: scoped{Scope: conductor.Scope{BlockSize: 2}, salt: "s"}, tokens: tokens}
	byHashes := &wanted{scoped: scoped{Scope: conductor.Scope{BlockSize: 2}}, names: names}
	for _, w := range []*wanted{byTokens, byHashes} {
		require.Empty(t, w.prefix(0, 9))
		require.Equal(t, names[:2], w.prefix(2, 9))
		require.Equal(t, names, w.prefix(5, 9), "what follows the last whole block is none")
	}
}
