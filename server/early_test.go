package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// evictOwn has a client that owns 8 pages store 8 more, over and over: each time its own entries make room.
func evictOwn(t *testing.T, c *testClient, region protocol.Region, prefix string) {
	t.Helper()
	a := c.alloc(protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true, NeedPages: 8})
	require.NoError(t, a.Err())
	require.Equal(t, uint64(1), a.Phase)
	require.Len(t, a.Evicted, 8)
	c.r.pass(600 * time.Millisecond) // the default lease: the pages' quarantine
	for i := range uint64(8) {
		reply := c.register(region, i, prefix+string(rune('a'+i)))
		require.NoError(t, reply.Err())
	}
}

// Nobody's region is taken as long as the requester's own entries make room, unless the operator chose a watermark;
// then one is asked for as soon as the requester evicts more than it holds, and it is there when it asks next.
func TestRegionsAreAskedForEarlyOnlyAtAWatermark(t *testing.T) {
	for _, percent := range []int{0, 90} {
		r := newRig(t)
		r.m.cfg.RevokeWatermark = percent
		r.device(16)
		owner, busy := r.client("owner"), r.client("busy")
		cold := owner.store("cold", 8)
		hot := busy.store("hot", 8)
		r.afterGrace()
		evictOwn(t, busy, hot, "x")
		require.Nil(t, owner.pushed(protocol.TypeRevoke), "once is no trend")
		evictOwn(t, busy, hot, "y")
		push := owner.pushed(protocol.TypeRevoke)
		if percent == 0 {
			require.Nil(t, push)
			require.True(t, owner.lookup("cold0")[0].Found)
			continue
		}
		require.NotNil(t, push)
		require.Equal(t, uint64(1), r.m.n.EarlyRevokes.Load())
		evictOwn(t, busy, hot, "z")
		require.Equal(t, uint64(1), r.m.n.EarlyRevokes.Load(), "one at a time")
		done := protocol.RevokeDoneRequest{Mutation: owner.next(), RegionID: cold.RegionID, Epoch: cold.Epoch}
		owner.call(protocol.TypeRevokeDone, done.Append(nil))
		r.pass(1100 * time.Millisecond)
		a := busy.alloc(protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true, NeedPages: 8})
		require.NoError(t, a.Err())
		require.Equal(t, uint64(8*testPage), a.Region.Length, "room without an eviction")
		require.Empty(t, a.Evicted)
	}
}

// A region that is asked for ahead of need is as old as any that is taken.
func TestAYoungRegionIsNotAskedForEarly(t *testing.T) {
	r := newRig(t)
	r.m.cfg.RevokeWatermark = 90
	set := r.m.machine.Settings()
	set.MinRegionAgeMS = 5000
	r.do(&meta.SetSettings{Settings: set})
	r.device(16)
	owner, busy := r.client("owner"), r.client("busy")
	owner.store("cold", 8)
	hot := busy.store("hot", 8)
	r.afterGrace()
	for _, prefix := range []string{"v", "w", "x"} {
		evictOwn(t, busy, hot, prefix)
		require.Nil(t, owner.pushed(protocol.TypeRevoke))
	}
	r.pass(3 * time.Second)
	evictOwn(t, busy, hot, "y")
	require.NotNil(t, owner.pushed(protocol.TypeRevoke))
}

func TestDemandFades(t *testing.T) {
	var d demand
	require.Equal(t, uint64(100), d.add(100, 0))
	require.Equal(t, uint64(150), d.add(100, int64(demandWindow)/2))
	require.Equal(t, uint64(10), d.add(10, int64(demandWindow)*2))
}
