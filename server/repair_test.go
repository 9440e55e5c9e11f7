package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// storeReplicated stores values that are to lie on so many nodes in new regions, the first on the first device.
func (c *testClient) storeReplicated(prefix string, n int, replicas uint64, nodes ...*testNode) {
	c.r.t.Helper()
	for i, node := range nodes {
		a := c.alloc(protocol.AllocRequest{Size: uint64(n) * testPage, PageSize: testPage, Device: node.device})
		require.NoError(c.r.t, a.Err())
		for k := range n {
			req := c.registration(a.Region, uint64(k), prefix+string(rune('0'+k)))
			if e := &req.Entries[0]; i == 0 {
				e.Replicas = replicas
			} else {
				slot, _ := c.r.m.machine.Find(meta.TenantID{}, e.Key)
				e.Copy, e.Of = true, c.r.m.machine.Birth(slot)
			}
			var reply protocol.RegisterReply
			b := c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
			require.NoError(c.r.t, reply.DecodeAs(b, protocol.TypeBatchRegister))
			require.True(c.r.t, reply.Results[0].IsNew, "%+v", reply)
		}
	}
}

// liesOn are the devices that a key is served from.
func (c *testClient) liesOn(key string) (devices []uint64) {
	c.r.t.Helper()
	hit := c.lookup(key)[0]
	if !hit.Found {
		return nil
	}
	devices = append(devices, hit.Device)
	for _, l := range hit.Copies {
		devices = append(devices, l.Device)
	}
	return devices
}

func (r *rig) tasksOf(kind meta.TaskKind) (n int) {
	for _, t := range r.m.machine.Tasks() {
		if t.Kind == kind {
			n++
		}
	}
	return n
}

func TestCopiesThatAreLostAreMadeAgain(t *testing.T) {
	r := newTierRig(t)
	a, b, other := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8), r.ready("h3", "dram", "3", 32)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 4, 2, a, b)
	c.storeReplicated("one", 2, 1, a)
	r.work(2*time.Second, c, a, b, other)
	require.Zero(t, r.tasksOf(meta.TaskRepair), "nothing is missing")

	r.work(12*time.Second, c, a, other) // b does not answer any more
	require.Zero(t, r.m.machine.LackingCount())
	for _, key := range []string{"k0", "k1", "k2", "k3"} {
		require.Equal(t, []uint64{a.device, other.device}, c.liesOn(key))
	}
	require.Equal(t, []uint64{a.device}, c.liesOn("one0"))
	require.Equal(t, 1, r.tasksOf(meta.TaskRepair), "and once is enough")
}

// A new leader goes by what the index says, and there may be nobody at first who has room.
func TestCopiesAreMadeWhenThereIsRoom(t *testing.T) {
	r := newTierRig(t)
	a, same := r.ready("h1", "dram", "1", 8), r.ready("h1", "dram", "2", 32)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 4, 3, a)
	small := r.ready("h2", "ssd", "3", 2)
	r.work(2*time.Second, c, a, same, small)
	require.Equal(t, []uint64{a.device, small.device}, c.liesOn("k0"), "as far as there is room, not on the same node")
	require.Equal(t, []uint64{a.device, small.device}, c.liesOn("k1"))
	require.Equal(t, []uint64{a.device}, c.liesOn("k2"))

	r.m.OnLeadership(false, 0)
	r.elect()
	for _, n := range []*testNode{a, same, small} {
		n.serve()
	}
	b := r.ready("h3", "dram", "4", 32)
	r.work(4*time.Second, c, a, same, small, b)
	require.Equal(t, []uint64{a.device, b.device, small.device}, c.liesOn("k0"))
	require.Equal(t, []uint64{a.device, b.device}, c.liesOn("k3"))
	require.EqualValues(t, 2, r.m.machine.LackingCount())
	planned := r.tasksOf(meta.TaskRepair)
	r.work(4*time.Second, c, a, same, small, b)
	require.Equal(t, planned, r.tasksOf(meta.TaskRepair), "what cannot be helped is left alone")
}

// An SSD comes back with what it has. Only if it does not is that copied again.
func TestCopiesThatAreAwayAreMissedOnlyWhenTheyAreGivenUp(t *testing.T) {
	r := newTierRig(t)
	a, disk, other := r.ready("h1", "dram", "1", 8), r.ready("h2", "ssd", "2", 8), r.ready("h3", "dram", "3", 32)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 4, 2, a, disk)
	r.work(12*time.Second, c, a, other)
	require.Equal(t, meta.DeviceAway, r.deviceInfo(disk.device).Mode)
	require.Equal(t, []uint64{a.device}, c.liesOn("k0"))
	require.Zero(t, r.tasksOf(meta.TaskRepair))
	r.work(time.Minute+5*time.Second, c, a, other)
	require.Equal(t, []uint64{a.device, other.device}, c.liesOn("k0"))
}

// A copy that was evicted is not made again: it would be evicted again.
func TestWhatIsEvictedIsNotCopiedAgain(t *testing.T) {
	r := newTierRig(t)
	a, b := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 8, 2, a, b)
	r.work(2*time.Second, c, a, b)
	require.NotEmpty(t, c.alloc(protocol.AllocRequest{
		Size: testPage, PageSize: testPage, NeedPages: 4, Evict: true,
	}).Evicted)
	r.work(3*time.Second, c, a, b)
	require.Zero(t, r.m.machine.LackingCount())
	require.Zero(t, r.tasksOf(meta.TaskRepair))
}

// Before the cluster version has copies, nothing of them is logged, and stores are none the worse.
func TestReplicasNeedTheClusterVersion(t *testing.T) {
	r := newRig(t)
	r.device(16)
	c := r.client("c")
	a := c.alloc(protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage})
	req := c.registration(a.Region, 0, "k")
	req.Entries[0].Replicas = 2
	var reply protocol.RegisterReply
	b := c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	require.True(t, reply.Results[0].IsNew)
	slot, ok := r.m.machine.Find(meta.TenantID{}, []byte("k"))
	require.True(t, ok)
	require.Equal(t, 1, r.m.machine.Replicas(slot))
}

// TestRegionsThatNobodyOwnsAreDrained: there is no owner to ask, and what lies there lives on elsewhere.
func TestRegionsThatNobodyOwnsAreDrained(t *testing.T) {
	r := newTierRig(t)
	a, b := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8)
	c := r.remote("c", "h3")
	c.storeReplicated("k", 4, 2, a, b)
	region := r.m.machine.Regions()[0]
	req := protocol.ReturnAllocRequest{Mutation: c.next(), RegionID: uint64(region.ID), Epoch: region.Epoch}
	require.True(t, success(t, c.call(protocol.TypeReturnAlloc, req.Append(nil))))
	r.do(&meta.SetDevice{Device: region.Device, Mark: true, Draining: true})
	r.alive(5*time.Second, c, a.testClient, b.testClient)
	require.Zero(t, r.deviceInfo(a.device).Regions)
	require.Equal(t, []uint64{b.device}, c.liesOn("k0"))
}
