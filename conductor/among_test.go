package conductor

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
)

// TestEventsThatNameNoAdapter: what is gone, or lies on another medium too, is found in the scope where it was stored.
func TestEventsThatNameNoAdapter(t *testing.T) {
	x := NewIndex(IndexConfig{})
	src := source("a")
	sql := testScope
	sql.LoRA = "sql"
	src.Also = []Scope{{Tenant: "default", Model: "m", LoRA: "never seen", BlockSize: 4}, sql}
	of := func(scope Scope) int {
		m := x.Query(scope, seq(0, 8), nil)
		if len(m) == 0 {
			return 0
		}
		return m[0].Longest
	}
	with := stored(0, seq(0, 8), 1, 2)
	with.LoRA = []byte("sql")
	for _, e := range []*kvevent.Event{with, stored(0, seq(0, 8), 11, 12)} {
		require.NoError(t, x.Apply(src, e, kvevent.NoRank))
	}
	copied := &kvevent.Event{Kind: kvevent.Stored, Hashes: []uint64{1, 12}, Medium: kvevent.CPU, Rank: kvevent.NoRank}
	require.NoError(t, x.Apply(src, copied, kvevent.NoRank))
	require.Equal(t, 4, x.Query(sql, seq(0, 8), nil)[0].Media[kvevent.CPU])
	require.NoError(t, x.Apply(src, removed(2, 11, 77), kvevent.NoRank))
	require.Equal(t, 4, of(sql))
	require.Zero(t, of(testScope), "its first block is gone")
	require.EqualValues(t, 1, x.counts.unknown.Load())
	require.NoError(t, x.Apply(src, removed(1), kvevent.NoRank))
	require.Equal(t, 4, of(sql), "it is on the CPU still")
	gone := removed(1)
	gone.Medium = kvevent.CPU
	require.NoError(t, x.Apply(src, gone, kvevent.NoRank))
	require.Zero(t, of(sql))
}

// TestTenantsWithTheSameInstance: an engine that clears has cleared its own tenant's blocks.
func TestTenantsWithTheSameInstance(t *testing.T) {
	x := NewIndex(IndexConfig{})
	other := &Source{Instance: "a", Scope: Scope{Tenant: "other", Model: "m", BlockSize: 4}}
	require.NoError(t, x.Apply(other, stored(0, seq(0, 8), 1, 2), 0))
	apply(t, x, "a", stored(0, seq(0, 8), 1, 2), cleared(kvevent.Media))
	require.Empty(t, longest(x, seq(0, 8)))
	require.Equal(t, 8, x.Query(other.Scope, seq(0, 8), nil)[0].Longest)
}

// TestQueryHashes: blocks are found by what their engine calls them, and by the standard's names.
func TestQueryHashes(t *testing.T) {
	x := NewIndex(IndexConfig{})
	apply(t, x, "a", stored(0, seq(0, 12), 1, 2, 3))
	apply(t, x, "b", stored(0, seq(0, 8), 0x100, 0x200))
	want := x.Query(testScope, seq(0, 12), nil)
	require.Equal(t, want, x.QueryHashes(testScope, []uint64{1, 2, 3}))
	require.Equal(t, want, x.QueryHashes(testScope, []uint64{0x100, 0x200, 3}), "engines with other seeds")
	require.Equal(t, want, x.QueryHashes(testScope, Names(nil, 0, seq(0, 12), 4, nil)))
	require.Equal(t, 4, x.QueryHashes(testScope, []uint64{1, 99, 3})[0].Longest)
	require.Nil(t, x.QueryHashes(Scope{Tenant: "other"}, []uint64{1}))
}
