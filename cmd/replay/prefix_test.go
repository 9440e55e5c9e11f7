package replay

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/server"
)

// under configures the policy of a new pool.
func under(policy string) func(*server.Config) {
	return func(cfg *server.Config) { cfg.EvictionPolicy = policy }
}

// TestBlocksAreStoredAsPrefixes: what a replay has stored is found by prefix, block by block from the first on, whose id
// is 0 here as it is in published traces.
func TestBlocksAreStoredAsPrefixes(t *testing.T) {
	addr := startPool(t, 256, nil)
	cfg := config(addr, []Request{{HashIDs: []uint64{0, 1, 2}}, {HashIDs: []uint64{0, 1, 7, 8}}})
	_, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	c, err := client.Open(t.Context(), client.Config{Addrs: []string{addr}})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close(t.Context())) }()
	of := client.PrefixContext{Model: "replay", Salt: "replay/"}
	for _, q := range []struct {
		ids  []uint64
		want int
	}{{[]uint64{0, 1, 2}, 3}, {[]uint64{0, 1, 7, 8, 9}, 4}, {[]uint64{3}, 0}} {
		hashes := make([]uint64, len(q.ids))
		for i, id := range q.ids {
			hashes[i] = prefixHash(id)
		}
		n, _, err := c.PrefixMatch(t.Context(), of, hashes, 0, false)
		require.NoError(t, err)
		require.Equal(t, q.want, n, "%v", q.ids)
	}
}

// TestPrefixPoliciesGoByPrefixes: two requests fill the pool, and a third needs as many pages as one has. Which pages
// it gets tells the policies apart.
func TestPrefixPoliciesGoByPrefixes(t *testing.T) {
	const pages = 32
	chain := func(from, n uint64) (ids []uint64) {
		for id := from; id < from+n; id++ {
			ids = append(ids, id)
		}
		return ids
	}
	for policy, want := range map[string]struct{ first, second int }{
		"lru":          {0, 16},  // the one that was used first is gone
		"prefix-lru":   {8, 16},  // its later half is
		"lfu":          {0, 16},  // all were used once
		"length-aware": {12, 12}, // the later blocks of both are
	} {
		t.Run(policy, func(t *testing.T) {
			addr := startPool(t, pages, under(policy))
			cfg := config(addr, []Request{{HashIDs: chain(0, 16)}, {HashIDs: chain(100, 16)}, {HashIDs: chain(200, 8)}})
			cfg.RegionSize = pages * testPage
			rep, err := Run(t.Context(), cfg)
			require.NoError(t, err)
			require.Zero(t, rep.Failures)
			c, err := client.Open(t.Context(), client.Config{Addrs: []string{addr}})
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close(t.Context())) }()
			held := func(ids []uint64) int {
				keys := make([][]byte, len(ids))
				for i, id := range ids {
					keys[i] = fmt.Appendf(nil, "replay/%x", id)
				}
				n, err := c.LookupBatch(t.Context(), keys, true)
				require.NoError(t, err)
				return n
			}
			require.Equal(t, want.first, held(chain(0, 16)), "blocks of the first request from its first on")
			require.Equal(t, want.second, held(chain(100, 16)), "of the second")
			require.Equal(t, 8, held(chain(200, 8)))
		})
	}
}

// TestRunsUnderOtherKeysAreKeptApart: two replays of one trace with different prefixes of keys share nothing, though
// their blocks have the same ids.
func TestRunsUnderOtherKeysAreKeptApart(t *testing.T) {
	addr := startPool(t, 1024, nil)
	for _, prefix := range []string{"a/", "b/"} {
		cfg := config(addr, []Request{{HashIDs: []uint64{1, 2, 3}}})
		cfg.KeyPrefix = prefix
		rep, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.EqualValues(t, 3, rep.Stored, prefix)
		require.Zero(t, rep.Client.Deduplicated)
	}
}
