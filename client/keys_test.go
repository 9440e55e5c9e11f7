package client

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestLookupBatchStopsAtTheFirstMissOfAllParts: more keys than one request carries are asked for in parts, of which none
// is asked for once a miss is known, wherever in its part that was.
func TestLookupBatchStopsAtTheFirstMissOfAllParts(t *testing.T) {
	const n = 2*protocol.MaxBatch + 10
	f := newFake(t, 64<<20, 1)
	c := f.open(t, func(cfg *Config) { cfg.RegionSize = 1024 * 4096 })
	items := make([]Item, n)
	keys := make([][]byte, n)
	for i := range items {
		keys[i] = fmt.Appendf(nil, "k%d", i)
		items[i] = Item{Key: keys[i], Value: []byte{byte(i)}}
	}
	_, err := c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	for _, miss := range []int{0, 1, protocol.MaxBatch - 1, protocol.MaxBatch, protocol.MaxBatch + 1, n - 1} {
		t.Run(fmt.Sprint("miss at ", miss), func(t *testing.T) {
			held := keys[miss]
			keys[miss] = []byte("none")
			defer func() { keys[miss] = held }()
			before := f.count(protocol.TypeBatchLookup)
			found, err := c.LookupBatch(t.Context(), keys, true)
			require.NoError(t, err)
			require.Equal(t, miss, found)
			require.Equal(t, miss/protocol.MaxBatch+1, f.count(protocol.TypeBatchLookup)-before, "no part behind the miss is asked for")
			found, err = c.LookupBatch(t.Context(), keys, false)
			require.NoError(t, err)
			require.Equal(t, n-1, found)
		})
	}
	found, err := c.LookupBatch(t.Context(), keys, true)
	require.NoError(t, err)
	require.Equal(t, n, found)
}
