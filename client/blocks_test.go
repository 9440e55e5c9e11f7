package client_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// TestListBlocks: prefix blocks of the tenant are listed with what they were stored with, in pages.
func TestListBlocks(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	c := open(t, s, client.Config{})
	other := open(t, s, client.Config{Tenant: "other"})
	models := []client.PrefixContext{{Model: "m", BlockSize: 4}, {Model: "n", LoRA: "sql", Salt: "s", BlockSize: 8, Seed: 3}}
	want := map[client.PrefixContext]map[uint64]bool{}
	for i := range 20 {
		model := &models[i%2]
		put := c
		if i >= 16 {
			put = other
		} else if want[*model] == nil {
			want[*model] = map[uint64]bool{}
		}
		_, err := put.Put(t.Context(), fmt.Appendf(nil, "k%d", i), []byte("v"), client.WithPrefix(model, uint64(100+i), uint64(98+i), uint64(i/2)))
		require.NoError(t, err)
		if i < 16 {
			want[*model][uint64(100+i)] = true
		}
	}
	_, err := c.Put(t.Context(), []byte("plain"), []byte("v"))
	require.NoError(t, err)
	got := map[client.PrefixContext]map[uint64]bool{}
	for cursor, first := uint64(0), true; first || cursor != 0; first = false {
		var blocks []client.BlockInfo
		var contexts []client.PrefixContext
		blocks, contexts, cursor, err = c.ListBlocks(t.Context(), cursor, 3)
		require.NoError(t, err)
		require.LessOrEqual(t, len(blocks), 3)
		for _, b := range blocks {
			x := contexts[b.Context]
			if got[x] == nil {
				got[x] = map[uint64]bool{}
			}
			got[x][b.Hash] = true
			require.True(t, b.InMemory && !b.OnDisk)
			require.Equal(t, b.Index > 0, b.HasParent)
			if b.HasParent {
				require.Equal(t, b.Hash-2, b.Parent)
			}
		}
	}
	require.Equal(t, want, got)
}
