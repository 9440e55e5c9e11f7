package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// page gives a node a region of its own device for copies.
func (n *testNode) region(pages uint64) protocol.Region {
	n.r.t.Helper()
	a := n.alloc(protocol.AllocRequest{Size: pages * testPage, PageSize: testPage, Device: n.device})
	require.NoError(n.r.t, a.Err())
	return a.Region
}

// copyTo registers a copy of an item in a page of a region, and returns what came of it.
func (n *testNode) copyTo(r protocol.Region, page uint64, item *protocol.TaskItem, from uint64) protocol.RegisterResult {
	n.r.t.Helper()
	req := n.registration(r, page, string(item.Key))
	e := &req.Entries[0]
	e.Copy, e.Of, e.Slot, e.MoveFrom, e.KVLength = true, item.Version, item.Slot, from, item.KVLength
	var reply protocol.RegisterReply
	b := n.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(n.r.t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	require.NoError(n.r.t, reply.Err())
	return reply.Results[0]
}

func (n *testNode) tasks(after uint64) (reply protocol.TasksReply) {
	n.r.t.Helper()
	req := protocol.TasksRequest{Device: n.device, After: after}
	require.NoError(n.r.t, reply.Decode(n.call(protocol.TypeTasks, req.Append(nil))))
	return reply
}

// carryOut does a task and says so.
func (n *testNode) carryOut(r protocol.Region, page uint64, t *protocol.Task) {
	n.r.t.Helper()
	done := protocol.TaskDoneRequest{Task: t.ID, Done: t.Total}
	for i := range t.Items {
		if item := &t.Items[i]; len(item.Key) > 0 && n.copyTo(r, page+uint64(i), item, t.MoveFrom).IsNew {
			done.Copied++
		} else {
			done.Skipped++
		}
	}
	done.Mutation = n.next()
	var reply protocol.SuccessReply
	require.NoError(n.r.t, reply.Decode(n.call(protocol.TypeTaskDone, done.Append(nil))))
	require.NoError(n.r.t, reply.Err())
	require.True(n.r.t, reply.Success)
}

func (c *testClient) copyKeys(req protocol.CopyRequest, keys ...string) (reply protocol.CopyReply) {
	c.r.t.Helper()
	req.Mutation = c.next()
	for _, k := range keys {
		req.Keys = append(req.Keys, []byte(k))
	}
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeCopy, req.Append(nil))))
	return reply
}

func (c *testClient) taskStatus(t protocol.Type, ids ...uint64) (reply protocol.TaskStatusReply) {
	c.r.t.Helper()
	req := protocol.TaskStatusRequest{Mutation: c.next(), Tasks: ids}
	require.NoError(c.r.t, reply.Decode(c.call(t, req.Append(nil))))
	return reply
}

// twoTiers is a pool with memory on one host and an SSD on another.
func twoTiers(t *testing.T) (r *rig, dram, ssd *testNode, c *testClient) {
	t.Helper()
	r = newTierRig(t)
	dram, ssd = r.ready("h1", "dram", "1", 8), r.ready("h2", "ssd", "2", 16)
	return r, dram, ssd, r.remote("c", "h3")
}

func TestEntriesAreCopiedByTheHomeOfTheirTarget(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 3)
	reply := c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k0", "nothing", "k2")
	require.NoError(t, reply.Err())
	require.Equal(t, []bool{true, false, true}, reply.Found)
	require.Len(t, reply.Tasks, 1)
	require.NotNil(t, ssd.pushed(protocol.TypeTasksPush), "its home is told")
	require.Nil(t, dram.pushed(protocol.TypeTasksPush))
	st := c.taskStatus(protocol.TypeTaskStatus, reply.Tasks[0], 999).Tasks
	require.Equal(t, protocol.TaskStatus{
		ID: reply.Tasks[0], Kind: "copy", Device: ssd.device, Total: 2, State: "waiting",
	}, st[0])
	require.Equal(t, "unknown", st[1].State)

	work := ssd.tasks(0)
	require.Len(t, work.Tasks, 1)
	task := work.Tasks[0]
	require.Equal(t, "copy", task.Kind)
	require.Zero(t, task.MoveFrom)
	require.Equal(t, "k0", string(task.Items[0].Key))
	require.Equal(t, dram.device, task.Items[0].Device, "where its bytes are")
	require.Empty(t, ssd.tasks(task.ID).Tasks, "it has that already")

	pages := ssd.region(4)
	ssd.carryOut(pages, 0, &task)
	st = c.taskStatus(protocol.TypeTaskStatus).Tasks
	require.Equal(t, "done", st[0].State)
	require.Equal(t, uint64(2), st[0].Copied)
	require.Empty(t, ssd.tasks(0).Tasks)

	found := c.lookup("k0", "k1")
	require.Equal(t, dram.device, found[0].Device, "the faster one first")
	require.Len(t, found[0].Copies, 1)
	require.Equal(t, ssd.device, found[0].Copies[0].Device)
	require.Equal(t, pages.RegionID, found[0].Copies[0].RegionID)
	require.Equal(t, task.Items[0].Version, found[0].Version)
	require.Empty(t, found[1].Copies)
	require.Zero(t, found[1].Version)
	plain := r.client("plain")
	require.Empty(t, plain.lookup("k0")[0].Copies, "it has not asked for copies")

	again := c.copyKeys(protocol.CopyRequest{Device: ssd.device}, "k0")
	require.Empty(t, again.Tasks, "it is there")
	require.Equal(t, []bool{true}, again.Found)
}

// TestItemsThatAreCopiedAreLeased: an entry that leaves a place lives on in another, and what takes its place must not be
// copied under its name.
func TestItemsThatAreCopiedAreLeased(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 3)
	r.alive(3*time.Second, c, dram.testClient, ssd.testClient) // a new leader takes all for leased
	c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k0", "k1", "k2")
	req := protocol.TasksRequest{Device: ssd.device, Items: 2}
	var reply protocol.TasksReply
	require.NoError(t, reply.Decode(ssd.call(protocol.TypeTasks, req.Append(nil))))
	require.NoError(t, reply.Err())
	require.NotZero(t, reply.LeaseMS)
	require.Len(t, reply.Tasks[0].Items, 2, "those that are leased alone")
	require.EqualValues(t, 3, reply.Tasks[0].Total)
	for i := range reply.Tasks[0].Items {
		require.NotZero(t, reply.Tasks[0].Items[i].Lease)
	}
	rest := func(key string) uint64 {
		req := protocol.KeysRequest{Mutation: c.next(), Keys: [][]byte{[]byte(key)}}
		var reply protocol.KeysReply
		require.NoError(t, reply.DecodeAs(c.call(protocol.TypeDelete, req.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
		require.NoError(t, reply.Err())
		return reply.FreeAfterMS
	}
	require.NotZero(t, rest("k0"), "its page rests")
	require.Zero(t, rest("k2"), "which is not copied yet")
}

func TestACopyTakesOverWhenThePrimaryIsLost(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 2)
	c.copyKeys(protocol.CopyRequest{Node: "h2"}, "k0")
	ssd.carryOut(ssd.region(4), 0, &ssd.tasks(0).Tasks[0])
	r.alive(12*time.Second, c, ssd.testClient) // the DRAM's home is gone
	found := c.lookup("k0", "k1")
	require.Equal(t, ssd.device, found[0].Device)
	require.Empty(t, found[0].Copies)
	require.False(t, found[1].Found)
	require.Equal(t, meta.DeviceAway, r.deviceInfo(dram.device).Mode)
}

func TestAnEntryThatIsWantedInAFasterTierIsPromoted(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	ssd.storeOn(ssd.device, "k", 1)
	for range 3 {
		require.True(t, c.lookup("k0")[0].Found)
		r.alive(time.Second, c, dram.testClient, ssd.testClient) // uses go into the log
	}
	hit := c.lookup("k0")[0]
	require.True(t, hit.Promote)
	require.NotZero(t, hit.Version)
	a := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage})
	require.NoError(t, a.Err())
	req := c.registration(a.Region, 0, "k0")
	req.Entries[0].Copy, req.Entries[0].Of = true, hit.Version
	var reply protocol.RegisterReply
	b := c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	require.True(t, reply.Results[0].IsNew)
	hit = c.lookup("k0")[0]
	require.False(t, hit.Promote)
	require.Equal(t, dram.device, hit.Device)
	require.Equal(t, ssd.device, hit.Copies[0].Device)
}

// promotable has an entry on the SSD used so often that it is wanted in a faster tier.
func promotable(r *rig, ssd *testNode, c *testClient, key string) {
	r.t.Helper()
	ssd.storeOn(ssd.device, key, 1)
	for range 2 {
		require.True(r.t, c.lookup(key + "0")[0].Found)
		r.alive(time.Second, c, ssd.testClient) // uses go into the log
	}
}

// promoteTo registers a copy of what a lookup found.
func (c *testClient) promoteTo(region protocol.Region, page uint64, key string, found *protocol.LookupResult) {
	c.r.t.Helper()
	req := c.registration(region, page, key)
	req.Entries[0].Copy, req.Entries[0].Of = true, found.Version
	var reply protocol.RegisterReply
	b := c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(c.r.t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	require.True(c.r.t, reply.Results[0].IsNew)
}

// settings changes those of a rig in the newest version.
func (r *rig) settings(change func(s *meta.Settings)) {
	r.t.Helper()
	s := r.m.machine.Settings()
	s.Version = meta.ClusterVersion
	change(&s)
	r.do(&meta.SetSettings{Settings: s})
}

func TestWhatIsTooLargeIsNotPromoted(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	promotable(r, ssd, c, "k")
	require.True(t, c.lookup("k0")[0].Promote)
	r.alive(time.Second, c, dram.testClient, ssd.testClient)
	r.settings(func(s *meta.Settings) { s.PromoteMost = testPage - 1 })
	require.False(t, c.lookup("k0")[0].Promote)
	r.settings(func(s *meta.Settings) { s.PromoteMost = testPage })
	require.True(t, c.lookup("k0")[0].Promote)
	r.settings(func(s *meta.Settings) { s.PromoteMost = 0 })
	require.True(t, c.lookup("k0")[0].Promote)
}

// A client that copies to faster tiers in excess of its rate is not asked for more until that has passed; others are.
func TestPromotionsArePaced(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	other := r.remote("other", "h3")
	all := []*testClient{c, other, dram.testClient, ssd.testClient}
	r.settings(func(s *meta.Settings) { s.PromoteRate = testPage / 4 })
	for _, key := range []string{"k", "l"} {
		promotable(r, ssd, c, key)
		r.alive(time.Second, all...)
	}
	a := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage})
	require.NoError(t, a.Err())
	for range 3 { // to be asked costs nothing
		require.True(t, c.lookup("l0")[0].Promote)
	}
	hit := c.lookup("k0")[0]
	require.True(t, hit.Promote)
	c.promoteTo(a.Region, 0, "k0", &hit)
	require.EqualValues(t, 1, r.m.machine.Stats().Promoted)
	require.EqualValues(t, testPage, r.m.machine.Stats().PromotedSize)

	require.False(t, c.lookup("l0")[0].Promote, "4 seconds' worth")
	require.EqualValues(t, 1, r.m.n.PromotionsPaced.Load())
	require.True(t, other.lookup("l0")[0].Promote)
	r.alive(2*time.Second, all...)
	require.False(t, c.lookup("l0")[0].Promote)
	r.alive(time.Second+time.Millisecond, all...)
	require.True(t, c.lookup("l0")[0].Promote, "it may be a second ahead")
	r.settings(func(s *meta.Settings) { s.PromoteRate = 0 })
	require.True(t, c.lookup("l0")[0].Promote)
}

func TestTheCostOfACopy(t *testing.T) {
	require.EqualValues(t, time.Second, costOf(5, 5))
	require.EqualValues(t, 250*time.Millisecond, costOf(1<<20, 4<<20))
	require.EqualValues(t, time.Minute, costOf(1<<32, 1), "at most")
	require.EqualValues(t, time.Minute, costOf(1<<63, 2))
	require.Zero(t, costOf(1<<32, 0))
}

// A client whose fast tier is full is given a page of a cold entry that lies below, too, and never another's, nor one that
// would be lost.
func TestAPromotionEvictsWhatLiesBelow(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	r.settings(func(s *meta.Settings) { s.TierLow = 100 })
	region := c.store("k", 8)
	r.alive(3*time.Second, c, dram.testClient, ssd.testClient) // a new leader takes all for leased
	ask := func(pages uint64) protocol.AllocReply {
		return c.alloc(protocol.AllocRequest{PageSize: testPage, NeedPages: pages, RunPages: pages, Promote: true})
	}
	require.Equal(t, protocol.CodeNoSpace, ask(1).Code)
	c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k4")
	ssd.carryOut(ssd.region(4), 0, &ssd.tasks(0).Tasks[0])
	r.alive(3*time.Second, c, dram.testClient, ssd.testClient)
	require.Equal(t, protocol.CodeNoSpace, ask(2).Code, "it takes up one page")
	got := ask(1)
	require.NoError(t, got.Err())
	require.Len(t, got.Evicted, 1)
	require.Equal(t, region.RegionID, got.Evicted[0].RegionID)
	require.Equal(t, "k4", string(got.Evicted[0].Key))
	found := c.lookup("k4", "k0", "k7")
	require.Equal(t, ssd.device, found[0].Device)
	require.Equal(t, []bool{true, true}, []bool{found[1].Found, found[2].Found})
	require.Equal(t, protocol.CodeNoSpace, ask(1).Code)
}

func TestAMovedEntryLeavesWhereItWas(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	region := c.store("k", 2)
	r.afterGrace()
	c.copyKeys(protocol.CopyRequest{Device: ssd.device, Move: true}, "k0")
	require.True(t, c.lookup("k0")[0].Found) // somebody reads it while it is moved
	task := ssd.tasks(0).Tasks[0]
	require.Equal(t, ^uint64(0), task.MoveFrom)
	ssd.carryOut(ssd.region(4), 0, &task)
	hit := c.lookup("k0")[0]
	require.Equal(t, ssd.device, hit.Device)
	require.Empty(t, hit.Copies)

	var freed protocol.FreedPush
	require.NoError(t, freed.Decode(c.pushed(protocol.TypeFreed)))
	require.Len(t, freed.Pages, 1)
	require.Equal(t, region.RegionID, freed.Pages[0].RegionID)
	require.NotZero(t, freed.Pages[0].FreeAfterMS, "the page waits for its reader, though the entry lives on")
	require.Equal(t, dram.device, region.Device)
}

func TestALeaseHoldsForAllLocations(t *testing.T) {
	r, _, ssd, c := twoTiers(t)
	c.store("k", 1)
	c.copyKeys(protocol.CopyRequest{Device: ssd.device}, "k0")
	pages := ssd.region(4)
	ssd.carryOut(pages, 0, &ssd.tasks(0).Tasks[0])
	r.afterGrace()
	hit := c.lookup("k0")[0]
	require.NotZero(t, hit.Lease)
	removed := c.remove("k0")
	require.NoError(t, removed.Err())
	require.NotZero(t, removed.FreeAfterMS)
	var freed protocol.FreedPush
	require.NoError(t, freed.Decode(ssd.pushed(protocol.TypeFreed)))
	require.Equal(t, pages.RegionID, freed.Pages[0].RegionID)
	require.NotZero(t, freed.Pages[0].FreeAfterMS, "the copy's page waits, too")

	r.m.leases.mu.Lock()
	until := r.m.leases.regions[meta.RegionID(pages.RegionID)].until
	r.m.leases.mu.Unlock()
	require.Greater(t, until, r.clock.now, "and so does the copy's region")
}

func (c *testClient) remove(key string) (reply protocol.KeysReply) {
	c.r.t.Helper()
	req := protocol.KeysRequest{Mutation: c.next(), Keys: [][]byte{[]byte(key)}}
	require.NoError(c.r.t, reply.DecodeAs(c.call(protocol.TypeDelete, req.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	return reply
}

func TestTasksOutliveLeadersAndAreCountedOnce(t *testing.T) {
	r, _, ssd, c := twoTiers(t)
	c.store("k", 4)
	id := c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k0", "k1", "k2", "k3").Tasks[0]
	pages := ssd.region(4)
	task := ssd.tasks(0).Tasks[0]
	for i := range 2 {
		require.True(t, ssd.copyTo(pages, uint64(i), &task.Items[i], 0).IsNew)
	}
	half := protocol.TaskDoneRequest{Mutation: ssd.next(), Task: id, Done: 2, Copied: 2, Bytes: 2 * testPage}
	require.True(t, success(t, ssd.call(protocol.TypeTaskDone, half.Append(nil))))

	r.m.OnLeadership(false, 0)
	r.elect()
	ssd.serve()
	require.True(t, success(t, ssd.call(protocol.TypeTaskDone, half.Append(nil))), "a repetition of the same seq")
	st := c.taskStatus(protocol.TypeTaskStatus, id).Tasks[0]
	require.Equal(t, protocol.TaskStatus{
		ID: id, Kind: "copy", Device: ssd.device, Total: 4, Done: 2, Copied: 2, Bytes: 2 * testPage, State: "running",
	}, st)

	c.remove("k3")
	rest := ssd.tasks(0).Tasks[0]
	require.Equal(t, uint64(2), rest.Done)
	require.Len(t, rest.Items, 2)
	require.Equal(t, "k2", string(rest.Items[0].Key))
	require.Empty(t, rest.Items[1].Key, "it is gone, and keeps its place")
	require.Equal(t, protocol.CodeNotFound, ssd.copyTo(pages, 3, &task.Items[3], 0).Code)
	require.Equal(t, protocol.CodeDuplicate, ssd.copyTo(pages, 3, &task.Items[0], 0).Code, "once is enough")
	ssd.carryOut(pages, 2, &rest)
	st = c.taskStatus(protocol.TypeTaskStatus, id).Tasks[0]
	require.Equal(t, "done", st.State)
	require.Equal(t, uint64(3), st.Copied)
	require.Equal(t, uint64(1), st.Skipped)
}

func TestTasksEndEarlyWhenTheyAreCanceled(t *testing.T) {
	r, dram, ssd, c := twoTiers(t)
	c.store("k", 2)
	id := c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k0", "k1").Tasks[0]
	require.Len(t, ssd.tasks(0).Tasks, 1)
	ssd.pushed(protocol.TypeTasksPush)
	reply := c.taskStatus(protocol.TypeCancelTask, id)
	require.NoError(t, reply.Err())
	require.Equal(t, "canceled", reply.Tasks[0].State)
	require.NotNil(t, ssd.pushed(protocol.TypeTasksPush))
	work := ssd.tasks(id)
	require.Equal(t, []uint64{id}, work.Canceled)
	require.Empty(t, work.Tasks)
	done := protocol.TaskDoneRequest{Mutation: ssd.next(), Task: id, Done: 1, Copied: 1}
	require.False(t, success(t, ssd.call(protocol.TypeTaskDone, done.Append(nil))))
	reply = c.taskStatus(protocol.TypeCancelTask, id)
	require.NoError(t, reply.Err(), "what is over is not ended again")
	require.Equal(t, protocol.CodeBadRequest, c.taskStatus(protocol.TypeCancelTask).Code)

	r.do(&meta.AddTask{TaskKind: meta.TaskDrain, Device: meta.DeviceID(ssd.device), Items: []meta.Victim{{}}})
	all := c.taskStatus(protocol.TypeTaskStatus).Tasks
	refused := c.taskStatus(protocol.TypeCancelTask, all[len(all)-1].ID)
	require.Equal(t, protocol.CodeForbidden, refused.Code, "the leader's own are not a client's to end")
	require.NotNil(t, dram)
}

func TestTasksAreForTheHomeAlone(t *testing.T) {
	_, dram, ssd, c := twoTiers(t)
	c.store("k", 1)
	id := c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, "k0").Tasks[0]
	dram.device = ssd.device
	require.Equal(t, protocol.CodeForbidden, dram.tasks(0).Code)
	var refused protocol.SuccessReply
	done := protocol.TaskDoneRequest{Mutation: c.next(), Task: id, Done: 1, Copied: 1}
	require.NoError(t, refused.Decode(c.call(protocol.TypeTaskDone, done.Append(nil))))
	require.Equal(t, protocol.CodeForbidden, refused.Code)
}

func TestACopyNamesOnePlaceThatIsServed(t *testing.T) {
	_, _, _, c := twoTiers(t)
	c.store("k", 1)
	require.Equal(t, protocol.CodeBadRequest, c.copyKeys(protocol.CopyRequest{}, "k0").Code)
	require.Equal(t, protocol.CodeBadRequest, c.copyKeys(protocol.CopyRequest{Tier: "ssd", Node: "h2"}, "k0").Code)
	require.Equal(t, protocol.CodeNotFound, c.copyKeys(protocol.CopyRequest{Tier: "cxl"}, "k0").Code)
	require.Equal(t, protocol.CodeNotFound, c.copyKeys(protocol.CopyRequest{Node: "h9"}, "k0").Code)
}

func TestACopyOfManyKeysMakesSeveralTasks(t *testing.T) {
	r := newTierRig(t)
	r.ready("h1", "dram", "1", 3000)
	ssd := r.ready("h2", "ssd", "2", 3000)
	c := r.remote("c", "h3")
	const n = meta.MaxTaskItems + 7
	a := c.alloc(protocol.AllocRequest{Size: n * testPage, PageSize: testPage})
	require.NoError(t, a.Err())
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprint("k", i)
	}
	c.register(a.Region, 0, keys...)
	reply := c.copyKeys(protocol.CopyRequest{Tier: "ssd"}, keys...)
	require.NoError(t, reply.Err())
	require.Len(t, reply.Tasks, 2)
	work := ssd.tasks(0).Tasks
	require.Len(t, work[0].Items, meta.MaxTaskItems)
	require.Len(t, work[1].Items, 7)
}

// TestAMoveToWhereAnEntryLies: it need not come there to leave the other places. One that lies nowhere else stays.
func TestAMoveToWhereAnEntryLies(t *testing.T) {
	r, _, ssd, c := twoTiers(t)
	c.store("k", 2)
	r.afterGrace()
	c.copyKeys(protocol.CopyRequest{Device: ssd.device}, "k0")
	task := ssd.tasks(0).Tasks[0]
	region := ssd.region(4)
	ssd.carryOut(region, 0, &task)
	require.Len(t, c.lookup("k0")[0].Copies, 1)
	c.copyKeys(protocol.CopyRequest{Device: ssd.device, Move: true}, "k0")
	tasks := ssd.tasks(task.ID).Tasks
	require.Len(t, tasks, 1)
	require.Len(t, tasks[0].Items, 1)
	c.copyKeys(protocol.CopyRequest{Tier: "dram", Move: true}, "k1")
	require.Empty(t, ssd.tasks(tasks[0].ID).Tasks)
}
