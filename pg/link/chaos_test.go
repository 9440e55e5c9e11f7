package link

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// TestMeshesAreBuiltInTheEnd though members had given up at any moment, some of them again and again, with the same epoch.
func TestMeshesAreBuiltInTheEnd(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 4)
		for round := range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			var wg sync.WaitGroup
			for i, n := range nodes {
				wg.Go(func() {
					cfg := MeshConfig{Group: "g", Epoch: uint64(round), Me: i, Members: members(nodes...), Layout: small}
					for range rand.IntN(5) {
						soon, stop := context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
						m, err := n.Mesh(soon, cfg)
						stop()
						if err == nil { // the others may have theirs, too: then it is the one
							time.Sleep(5 * time.Millisecond)
							errOf(t, m.Close())
							cancel() // those who wait for somebody that has had his, as below
							return
						}
					}
					m, err := n.Mesh(ctx, cfg)
					if err != nil { // somebody has had his, and is gone
						var missing *MissingError
						if !errors.As(err, &missing) && ctx.Err() == nil {
							t.Error(err)
						}
						return
					}
					cancel()
					errOf(t, m.Close())
				})
			}
			wg.Wait()
			cancel()
			closeAll(t, meshOf(t, "g", uint64(round), nodes...)...)
		}
	})
}

// TestIncarnationsComeAndGo while the others go on to build meshes and pairs with whoever is there.
func TestIncarnationsComeAndGo(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 3)
		for life := range uint64(12) {
			which := int(life % 3)
			go func(old *Node) { errOf(t, old.Close()) }(nodes[which])
			cfg := kind.cfg(t, which)
			cfg.Rank, cfg.Incarnation = which, 1000+life
			nodes[which], _ = node(t, cfg)
			connect(t, nodes...)
			ms := meshOf(t, "g", life, nodes...)
			for i, m := range ms {
				p, _ := m.Lane((i + 1) % 3)
				require.NoError(t, send(nodes[i].Bell(), p, fmt.Appendf(nil, "%04d", life)))
			}
			got := make([]byte, 4)
			for i, m := range ms {
				_, c := m.Lane((i + 2) % 3)
				require.NoError(t, receive(nodes[i].Bell(), c, got))
				require.Equal(t, fmt.Sprintf("%04d", life), string(got))
			}
			next := nodes[(which+1)%3]
			p, _, err := next.Pair(within(t, wait), "g", which, 1000+life)
			require.NoError(t, err)
			_, c, err := nodes[which].Pair(within(t, wait), "g", next.cfg.Rank, next.cfg.Incarnation)
			require.NoError(t, err)
			require.NoError(t, send(next.Bell(), p, []byte("pair")))
			require.NoError(t, receive(nodes[which].Bell(), c, got))
			require.Equal(t, "pair", string(got))
			closeAll(t, ms...)
		}
	})
}

// TestNodesShareAnEngine with each other and with whoever else uses it, and leave it open.
func TestNodesShareAnEngine(t *testing.T) {
	e, err := transfer.New(transfer.Config{Listen: []string{loopback}, Topology: &transfer.Topology{}})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	before := len(e.Describe().Buffers)
	var nodes []*Node
	for rank := range 3 {
		n, err := New(Config{Job: "j", Rank: rank, Incarnation: uint64(rank) + 1, Transports: []string{TransportEngine}, Engine: e})
		require.NoError(t, err)
		nodes = append(nodes, n)
	}
	connect(t, nodes...)
	ms := meshOf(t, "g", 1, nodes...)
	for i, m := range ms {
		p, _ := m.Lane((i + 1) % 3)
		require.NoError(t, send(nodes[i].Bell(), p, []byte{byte(i)}))
	}
	for i, m := range ms {
		got := make([]byte, 1)
		_, c := m.Lane((i + 2) % 3)
		require.NoError(t, receive(nodes[i].Bell(), c, got))
		require.Equal(t, byte((i+2)%3), got[0])
	}
	seg, err := e.Open(t.Context(), e.Addresses()...)
	require.NoError(t, err)
	require.NoError(t, seg.Notify(t.Context(), "pg", []byte("somebody else's")))
	require.Equal(t, "somebody else's", string((<-e.Notifications()).Body))
	for _, n := range nodes {
		require.NoError(t, n.Close())
	}
	require.Len(t, e.Describe().Buffers, before)
	require.NoError(t, seg.Notify(t.Context(), "still", nil))
	require.Equal(t, "still", (<-e.Notifications()).Name)
	require.NoError(t, seg.Close())
}
