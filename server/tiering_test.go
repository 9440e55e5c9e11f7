package server

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// work has nodes carry out what they are told to while time passes.
func (r *rig) work(d time.Duration, c *testClient, nodes ...*testNode) {
	r.t.Helper()
	pages := map[*testNode]protocol.Region{}
	next := map[*testNode]uint64{}
	for ; d > 0; d -= 200 * time.Millisecond {
		r.alive(200*time.Millisecond, c)
		for _, n := range nodes {
			n.call(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
			for _, task := range n.tasks(0).Tasks {
				if next[n] == 0 {
					pages[n] = n.region(min(8, n.attach.Size/testPage-1))
				}
				n.carryOut(pages[n], next[n], &task)
				next[n] += task.Total
			}
		}
	}
}

func TestTheColdEndOfAFullTierIsCopiedBelow(t *testing.T) {
	r := newTierRig(t)
	dram, ssd := r.ready("h1", "dram", "1", 16), r.ready("h2", "ssd", "2", 64)
	c := r.remote("c", "h3")
	c.store("a", 8)
	r.work(2*time.Second, c, dram, ssd)
	require.Empty(t, r.m.machine.Tasks(), "half of it is used: nothing is due")

	c.store("b", 8)
	r.work(3*time.Second, c, dram, ssd)
	tasks := r.m.machine.Tasks()
	require.NotEmpty(t, tasks)
	require.Equal(t, meta.TaskDemote, tasks[0].Kind)
	require.Equal(t, meta.DeviceID(ssd.device), tasks[0].Device)
	require.Equal(t, meta.TaskFinished, tasks[0].State)
	require.Len(t, c.lookup("a0")[0].Copies, 1, "the coldest entries")
	require.Empty(t, c.lookup("b7")[0].Copies)

	n := len(r.m.machine.Tasks())
	r.work(3*time.Second, c, dram, ssd)
	require.Len(t, r.m.machine.Tasks(), n, "and that is enough")
}

// A tier has the watermark that is its own, and a device the one that is its own.
func TestWatermarksOfTiersAndDevices(t *testing.T) {
	r := newTierRig(t)
	one, two := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8)
	ssd := r.ready("h3", "ssd", "3", 64)
	a, b := r.remote("a", "h4"), r.remote("b", "h4")
	set := func(lows string) {
		r.settings(func(s *meta.Settings) { s.TierLow, s.TierLows = 0, lows })
		for d := 2 * time.Second; d > 0; d -= time.Second {
			r.work(time.Second, a, one, two, ssd)
			r.alive(time.Millisecond, b)
		}
	}
	a.storeOn(one.device, "a", 4)
	b.storeOn(two.device, "b", 4)
	copies := func() (got [2]int) {
		for i, key := range []string{"a0", "b0"} {
			got[i] = len(b.lookup(key)[0].Copies)
		}
		return got
	}
	set("cxl=0%,dram=60%")
	require.Equal(t, [2]int{0, 0}, copies(), "half of each is used")
	set("dram=60%,#" + strconv.FormatUint(two.device, 10) + "=40%")
	require.Equal(t, [2]int{0, 1}, copies())
	set("dram=40%")
	require.Equal(t, [2]int{1, 1}, copies())
}

func TestADeviceThatCanTakeNothingIsLeftAlone(t *testing.T) {
	r := newTierRig(t)
	dram, ssd := r.ready("h1", "dram", "1", 8), r.ready("h2", "ssd", "2", 64)
	c := r.remote("c", "h3")
	c.store("a", 8)
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	task := ssd.tasks(0).Tasks[0]
	failed := protocol.TaskDoneRequest{Mutation: ssd.next(), Task: task.ID, Done: task.Total, Failed: task.Total}
	require.True(t, success(t, ssd.call(protocol.TypeTaskDone, failed.Append(nil))))
	r.alive(5*time.Second, c, dram.testClient, ssd.testClient)
	require.Empty(t, ssd.tasks(0).Tasks)
	r.alive(10*time.Second, c, dram.testClient, ssd.testClient)
	require.NotEmpty(t, ssd.tasks(0).Tasks, "not for ever")
}

func TestADeviceIsDrainedByMovingWhatLiesThere(t *testing.T) {
	r := newTierRig(t)
	old, other := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 16)
	c := r.remote("c", "h3")
	region := c.storeOn(old.device, "k", 4)
	unused := c.alloc(protocol.AllocRequest{Size: 2 * testPage, PageSize: testPage, Device: old.device})
	require.NoError(t, unused.Err())

	r.do(&meta.SetDevice{Device: meta.DeviceID(old.device), Mark: true, Draining: true})
	r.alive(time.Second, c, old.testClient, other.testClient)
	push := c.revoked()
	require.Equal(t, unused.Region.RegionID, push.RegionID, "nothing lies there: its owner is asked at once")
	c.revokeDone(push)

	r.work(2*time.Second, c, old, other)
	for _, hit := range c.lookup("k0", "k1", "k2", "k3") {
		require.Equal(t, other.device, hit.Device)
		require.Empty(t, hit.Copies)
	}
	push = c.revoked()
	require.Equal(t, region.RegionID, push.RegionID)
	c.revokeDone(push)
	r.alive(3*time.Second, c, old.testClient, other.testClient)
	require.Zero(t, r.deviceInfo(old.device).Regions)
	for _, task := range r.m.machine.Tasks() {
		require.Equal(t, meta.TaskDrain, task.Kind)
		require.Equal(t, meta.TaskFinished, task.State)
	}
}

// revoked is the last REVOKE that has come: they are repeated.
func (c *testClient) revoked() (p protocol.RevokePush) {
	c.r.t.Helper()
	b := c.pushed(protocol.TypeRevoke)
	for last := b; last != nil; last = c.pushed(protocol.TypeRevoke) {
		b = last
	}
	require.NoError(c.r.t, p.Decode(b))
	return p
}

func (c *testClient) revokeDone(p protocol.RevokePush) {
	c.r.t.Helper()
	req := protocol.RevokeDoneRequest{Mutation: c.next(), RegionID: p.RegionID, Epoch: p.Epoch}
	require.True(c.r.t, success(c.r.t, c.call(protocol.TypeRevokeDone, req.Append(nil))))
}

func TestWhatLiesElsewhereNeedNotBeMoved(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 2)
	c.copyKeys(protocol.CopyRequest{Device: ssd.device}, "k0", "k1")
	ssd.carryOut(ssd.region(4), 0, &ssd.tasks(0).Tasks[0])
	before := len(r.m.machine.Tasks())
	r.do(&meta.SetDevice{Device: meta.DeviceID(dram.device), Mark: true, Draining: true})
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	require.Len(t, r.m.machine.Tasks(), before)
	require.NotNil(t, c.pushed(protocol.TypeRevoke))
	require.Equal(t, ssd.device, c.lookup("k0")[0].Device)
}

// drains gives a device up, and has its owner let go of its regions when it is asked.
func (r *rig) drains(d time.Duration, c *testClient, old *testNode, nodes ...*testNode) {
	r.t.Helper()
	r.do(&meta.SetDevice{Device: meta.DeviceID(old.device), Mark: true, Draining: true})
	for ; d > 0; d -= time.Second {
		r.work(time.Second, c, append(nodes, old)...)
		for b := c.pushed(protocol.TypeRevoke); b != nil; b = c.pushed(protocol.TypeRevoke) {
			var p protocol.RevokePush
			require.NoError(r.t, p.Decode(b))
			req := protocol.RevokeDoneRequest{Mutation: c.next(), RegionID: p.RegionID, Epoch: p.Epoch}
			c.call(protocol.TypeRevokeDone, req.Append(nil)) // repeated ones are over
		}
	}
}

// An entry lies on as many nodes when a device is drained as before, all the time, where another node has room: also one of
// which that device has the copy that is read.
func TestADrainKeepsReplicas(t *testing.T) {
	for _, first := range []bool{true, false} {
		r := newTierRig(t)
		old, b, other := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8), r.ready("h3", "dram", "3", 32)
		c := r.remote("c", "h4")
		if first {
			c.storeReplicated("k", 4, 2, old, b)
		} else {
			c.storeReplicated("k", 4, 2, b, old)
		}
		c.storeReplicated("one", 2, 1, b, old) // a copy that nobody asked for
		r.do(&meta.SetDevice{Device: meta.DeviceID(old.device), Mark: true, Draining: true})
		r.alive(2*time.Second, c, old.testClient, b.testClient, other.testClient)
		require.EqualValues(t, 4, r.waits(old.device).Moving, "what the drain waits for")
		for range 10 {
			r.drains(time.Second, c, old, b, other)
			for _, key := range []string{"k0", "k1", "k2", "k3"} {
				require.Len(t, c.liesOn(key), 2)
			}
		}
		require.ElementsMatch(t, []uint64{b.device, other.device}, c.liesOn("k3"))
		require.Equal(t, []uint64{b.device}, c.liesOn("one1"))
		require.Zero(t, r.deviceInfo(old.device).Regions, "it is empty")
		require.Zero(t, r.m.machine.LackingCount())
		require.Equal(t, 1, r.tasksOf(meta.TaskDrain))
		require.Zero(t, r.tasksOf(meta.TaskRepair))
	}
}

// Where no other node has room replicas are dropped, and made again when one has.
func TestADrainDoesNotWaitForRoomThatIsNot(t *testing.T) {
	r := newTierRig(t)
	old, b := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8)
	same := r.ready("h2", "dram", "3", 32)
	small := r.ready("h3", "dram", "4", 3)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 4, 2, old, b)
	r.drains(8*time.Second, c, old, b, same, small)
	require.Zero(t, r.deviceInfo(old.device).Regions)
	two := 0
	for _, key := range []string{"k0", "k1", "k2", "k3"} {
		on := c.liesOn(key)
		require.NotContains(t, on, old.device)
		require.NotContains(t, on, same.device, "it is on the same node")
		two += len(on) - 1
	}
	require.Equal(t, 3, two, "as many as there was room for")
	require.EqualValues(t, 1, r.m.machine.LackingCount())
	big := r.ready("h5", "dram", "5", 32)
	r.work(4*time.Second, c, old, b, same, small, big)
	require.Zero(t, r.m.machine.LackingCount())
}

// A device that can take nothing is not waited for.
func TestADrainDoesNotWaitForWhoFails(t *testing.T) {
	r := newTierRig(t)
	old, b, ill := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 8), r.ready("h3", "dram", "3", 32)
	c := r.remote("c", "h4")
	c.storeReplicated("k", 4, 2, old, b)
	r.do(&meta.SetDevice{Device: meta.DeviceID(old.device), Mark: true, Draining: true})
	r.alive(time.Second, c, old.testClient, b.testClient, ill.testClient)
	task := ill.tasks(0).Tasks[0]
	failed := protocol.TaskDoneRequest{Mutation: ill.next(), Task: task.ID, Done: task.Total, Failed: task.Total}
	require.True(t, success(t, ill.call(protocol.TypeTaskDone, failed.Append(nil))))
	r.drains(5*time.Second, c, old, b)
	require.Equal(t, []uint64{b.device}, c.liesOn("k0"))
	require.Zero(t, r.deviceInfo(old.device).Regions)
}

func TestADrainThatIsCalledOffEnds(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 2)
	r.do(&meta.SetDevice{Device: meta.DeviceID(dram.device), Mark: true, Draining: true})
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	require.Len(t, ssd.tasks(0).Tasks, 1)
	r.do(&meta.SetDevice{Device: meta.DeviceID(dram.device), Mark: true})
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	require.Empty(t, ssd.tasks(0).Tasks, "what is planned is not to be done any more")
}

func TestADeviceIsGivenAFewTasksAtATime(t *testing.T) {
	r := newTierRig(t)
	dram, ssd := r.ready("h1", "dram", "1", 64), r.ready("h2", "ssd", "2", 128)
	c := r.remote("c", "h3")
	for range maxTasksPerTarget {
		r.do(&meta.AddTask{TaskKind: meta.TaskDemote, Device: meta.DeviceID(ssd.device), Items: []meta.Victim{{}}})
	}
	c.store("k", 64)
	r.alive(2*time.Second, c, dram.testClient, ssd.testClient)
	require.Len(t, r.m.machine.Tasks(), maxTasksPerTarget, "though much is to be copied")
	first := r.m.machine.Tasks()[0]
	done := protocol.TaskDoneRequest{Mutation: ssd.next(), Task: uint64(first.ID), Done: 1, Skipped: 1}
	require.True(t, success(t, ssd.call(protocol.TypeTaskDone, done.Append(nil))))
	r.alive(2*time.Second, c, dram.testClient, ssd.testClient)
	require.Len(t, r.m.machine.Tasks(), maxTasksPerTarget+1)
}

func TestANewLeaderPlansNothingBeforeItKnowsWhatIsLeased(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 8)
	r.m.OnLeadership(false, 0)
	r.elect()
	dram.serve()
	ssd.serve()
	r.pass(900 * time.Millisecond)
	require.Empty(t, r.m.machine.Tasks())
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	require.NotEmpty(t, r.m.machine.Tasks())
}

// waits is what a device that is given up waits for.
func (r *rig) waits(id uint64) DeviceHeld {
	r.t.Helper()
	infos := r.m.machine.Devices()
	h := r.m.waitsOf(infos, r.m.now())[meta.DeviceID(id)]
	require.NotNil(r.t, h)
	return *h
}

// TestWhatADrainWaitsFor pins an entry, leases another, and leaves the REVOKE of its region unanswered.
func TestWhatADrainWaitsFor(t *testing.T) {
	r := newTierRig(t)
	old, other := r.ready("h1", "dram", "1", 8), r.ready("h2", "dram", "2", 16)
	c := r.remote("c", "h3")
	first := c.storeOn(old.device, "k", 2)
	c.storeOn(old.device, "p", 2)
	pin := protocol.KeysRequest{Mutation: c.next(), Keys: [][]byte{[]byte("p1")}}
	var reply protocol.KeysReply
	require.NoError(t, reply.DecodeAs(c.call(protocol.TypePin, pin.AppendAs(nil, protocol.TypePin)), protocol.TypePin))
	require.NoError(t, reply.Err())
	r.do(&meta.SetDevice{Device: meta.DeviceID(old.device), Mark: true, Draining: true})
	r.alive(time.Second, c, old.testClient, other.testClient)
	require.Equal(t, DeviceHeld{Moving: 3, Pinned: 1, PinnedKey: "p1", Tenant: meta.DefaultTenant, Owners: []OwnerQuiet{}},
		r.waits(old.device))

	r.work(2*time.Second, c, old, other)
	require.Equal(t, first.RegionID, c.revoked().RegionID)
	r.alive(2*time.Second, c, old.testClient, other.testClient)
	require.NotZero(t, c.lookup("p1")[0].LeaseMS)
	held := r.waits(old.device)
	require.Zero(t, held.Moving)
	require.EqualValues(t, 1, held.Pinned)
	require.NotZero(t, held.LeasedMS)
	require.Len(t, held.Owners, 1)
	require.Equal(t, "c", held.Owners[0].Instance)
	require.Equal(t, 1, held.Owners[0].Regions)
	require.False(t, held.Owners[0].Ended)
	require.Greater(t, held.Owners[0].AskedMS, int64(1000))
}
