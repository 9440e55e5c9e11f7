package conductor

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
)

// TestView: it tells what lies where, through stores, second copies, removals, clears and sweeps, and who was asked for.
func TestView(t *testing.T) {
	x := NewIndex(IndexConfig{})
	onDisk := stored(0, seq(0, 4), 1)
	onDisk.Medium = kvevent.Disk
	ranked := stored(0, seq(0, 8), 1, 2)
	ranked.Rank = 1
	apply(t, x, "a", stored(0, seq(0, 8), 1, 2), stored(0, seq(0, 8), 1, 2), onDisk)
	apply(t, x, "b", ranked)
	require.Len(t, longest(x, seq(0, 8)), 2)
	view := func() ScopeView {
		list := x.View("default")
		require.Len(t, list, 1)
		return list[0]
	}
	v := view()
	require.Equal(t, testScope, v.Scope)
	require.Equal(t, 2, v.Blocks)
	require.Equal(t, 5, v.Replicas, "a second copy at one place is one of its")
	require.Equal(t, [kvevent.Media]int{kvevent.GPU: 4, kvevent.Disk: 1}, v.Media)
	require.Len(t, v.Instances, 2)
	require.NotZero(t, v.Instances[0].LastAccess)
	v.Instances[0].LastAccess = 0
	require.Equal(t, InstanceView{
		Instance: "a", Blocks: 3, Media: [kvevent.Media]int{kvevent.GPU: 2, kvevent.Disk: 1}, Queries: 1, HitTokens: 8,
	}, v.Instances[0])
	require.Equal(t, []int{1}, v.Instances[1].Ranks)

	apply(t, x, "a", removed(2))
	require.Equal(t, 5, view().Replicas, "the second copy is still there")
	apply(t, x, "a", removed(2))
	require.Equal(t, 4, view().Replicas)
	apply(t, x, "b", cleared(kvevent.Media))
	v = view()
	require.Equal(t, 2, v.Replicas)
	require.Len(t, v.Instances, 1)
	require.EqualValues(t, 2, v.Instances[0].Removed)
	x.Sweep()
	apply(t, x, "c", stored(0, seq(0, 4), 1)) // takes a place that was swept
	v = view()
	require.Equal(t, 3, v.Replicas)
	require.Equal(t, 1, v.Instances[1].Blocks)
	require.Zero(t, v.Instances[1].Queries)

	require.Empty(t, x.View("other"))
	require.Len(t, x.View(""), 1)
	require.Equal(t, Counts{Stored: 8, Removed: 2, Cleared: 1, Blocks: 1, Scopes: 1}, x.Counts())
}
