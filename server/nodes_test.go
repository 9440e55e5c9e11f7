package server

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// newTierRig is newRig in a version that has nodes, copies and tasks.
func newTierRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.do(&meta.SetSettings{Settings: meta.Settings{
		Version: meta.VersionTiers, Policy: "lru", PageSize: testPage, RegionSize: 8 * testPage, TierLow: 70, PromoteAfter: 2,
	}})
	return r
}

// testNode is the home of a device.
type testNode struct {
	*testClient
	attach protocol.AttachRequest
	device uint64
}

// hello is how a client of tiers opens its session.
func tierHello(instance, host string, features uint64) protocol.HandshakeRequest {
	return protocol.HandshakeRequest{
		InstanceID: instance, Protocol: 1, Features: features | protocol.FeaturePush | protocol.FeatureCopies, BootID: host,
		PIDNamespace: 1, PID: 77, PIDStart: 5,
	}
}

// remote opens a session of a process on another host, which reads copies.
func (r *rig) remote(instance, host string) *testClient {
	r.t.Helper()
	c := r.connect()
	c.hello = c.handshake(tierHello(instance, host, 0))
	require.NoError(r.t, c.hello.Err())
	return c
}

// node opens the session of a home of a new device with room for pages, which it has not attached yet.
func (r *rig) node(host, tier, digit string, pages uint64) *testNode {
	r.t.Helper()
	uuid := strings.Repeat(digit, 32)
	n := &testNode{testClient: r.connect(), attach: protocol.AttachRequest{
		UUID: uuid, Path: "/dev/shm/" + digit, Node: host, Tier: tier, Coherence: "hardware", Size: (1 + pages) * testPage,
		DataOffset: testPage, Align: testPage, Volatile: tier != "ssd", BootID: host,
	}}
	if tier == "ssd" {
		n.attach.Path = ""
	}
	n.hello = n.handshake(tierHello("node/"+host+"/"+uuid, host, protocol.FeatureNode))
	require.NoError(r.t, n.hello.Err())
	return n
}

func (n *testNode) doAttach(req protocol.AttachRequest) (reply protocol.AttachReply) {
	n.r.t.Helper()
	req.Mutation = n.next()
	require.NoError(n.r.t, reply.Decode(n.call(protocol.TypeAttach, req.Append(nil))))
	return reply
}

// serve attaches the device until it is ready, as a node does, and returns whether it was told to begin afresh.
func (n *testNode) serve() (fresh bool) {
	n.r.t.Helper()
	first := n.doAttach(n.attach)
	require.NoError(n.r.t, first.Err())
	n.device, n.attach.Generation = first.Device, first.Generation
	ready := n.attach
	ready.Ready = true
	ready.Endpoint = protocol.Endpoint{Engine: "engine of " + n.attach.Node, Rails: []string{"10.0.0.1:1"}, Buffer: 9}
	second := n.doAttach(ready)
	require.NoError(n.r.t, second.Err())
	require.Equal(n.r.t, first.Generation, second.Generation)
	require.False(n.r.t, second.Fresh)
	return first.Fresh
}

// ready makes a node whose device is in service.
func (r *rig) ready(host, tier, digit string, pages uint64) *testNode {
	r.t.Helper()
	n := r.node(host, tier, digit, pages)
	require.True(r.t, n.serve())
	return n
}

// back opens the next session of the node after its last one has ended.
func (n *testNode) back() {
	n.r.t.Helper()
	n.testClient = n.r.connect()
	n.hello = n.handshake(tierHello("node/"+n.attach.Node+"/"+n.attach.UUID, n.attach.Node, protocol.FeatureNode))
	require.NoError(n.r.t, n.hello.Err())
}

// alive keeps sessions from expiring while time passes.
func (r *rig) alive(d time.Duration, clients ...*testClient) {
	r.t.Helper()
	for ; d > 0; d -= time.Second {
		r.pass(min(d, time.Second))
		for _, c := range clients {
			c.call(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
		}
	}
}

func (r *rig) deviceInfo(id uint64) meta.DeviceInfo {
	r.t.Helper()
	d, ok := r.m.machine.Device(meta.DeviceID(id))
	require.True(r.t, ok)
	return d
}

func TestADeviceIsUsedOnceItsHomeShowsTheGeneration(t *testing.T) {
	r := newTierRig(t)
	n := r.node("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	want := protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage}

	first := n.doAttach(n.attach)
	require.NoError(t, first.Err())
	require.NotZero(t, first.Device)
	require.NotZero(t, first.Generation)
	require.True(t, first.Fresh)
	c.requireNoRegion(want) // its home has not made it ready

	n.attach.Generation = first.Generation
	require.Equal(t, first.Generation, n.doAttach(n.attach).Generation, "a repetition changes nothing")
	n.serve()
	got := c.alloc(want)
	require.NoError(t, got.Err())
	require.Equal(t, first.Device, got.Region.Device)
	require.Equal(t, "h1", got.Device.Node)
	require.Equal(t, "engine of h1", got.Device.Endpoint.Engine, "so that the client can reach it")

	again := c.handshake(protocol.HandshakeRequest{InstanceID: "c", Protocol: 1, Session: c.hello.Session, Secret: c.hello.Secret})
	require.Equal(t, "engine of h1", again.Devices[0].Endpoint.Engine)
}

// requireNoRegion requires that a request finds no device that is ready in its time.
func (c *testClient) requireNoRegion(req protocol.AllocRequest) {
	c.r.t.Helper()
	req.TimeoutMS = 50
	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, req))
	c.r.pass(100 * time.Millisecond)
	require.Equal(c.r.t, protocol.CodePending, allocReply(c.r.t, c.answer(seq)).Code)
}

func TestWhatIsToBeAttachedIsChecked(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	other := r.node("h2", "dram", "1", 8)
	require.Equal(t, protocol.CodeForbidden, other.doAttach(other.attach).Code, "it has another home")

	plain := &testNode{testClient: r.remote("c", "h2"), attach: n.attach}
	require.Equal(t, protocol.CodeForbidden, plain.doAttach(plain.attach).Code, "a client is no home")

	bad := n.attach
	bad.UUID = "short"
	require.Equal(t, protocol.CodeBadRequest, n.doAttach(bad).Code)
	bad = n.attach
	bad.Tier = "tape"
	require.Equal(t, protocol.CodeBadRequest, n.doAttach(bad).Code)
	bad = n.attach
	bad.UUID, bad.DataOffset = strings.Repeat("2", 32), 1
	refused := n.doAttach(bad)
	require.Equal(t, protocol.CodeBadRequest, refused.Code)
	require.Contains(t, refused.Message, "data_offset")
}

func TestNodesNeedTheClusterVersion(t *testing.T) {
	r := newRig(t)
	c := r.connect()
	reply := c.handshake(tierHello("node/h1/x", "h1", protocol.FeatureNode))
	require.Equal(t, protocol.CodeUnsupported, reply.Code)
	require.Contains(t, reply.Message, "larder ctl upgrade")

	r.device(8)
	old := r.remote("c", "h1")
	require.Zero(t, old.hello.Features&protocol.FeatureCopies)
	region := old.store("k", 1)
	copied := old.registration(region, 1, "k0")
	copied.Entries[0].Copy = true
	var refused protocol.RegisterReply
	b := old.call(protocol.TypeBatchRegister, copied.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(t, refused.DecodeAs(b, protocol.TypeBatchRegister))
	require.Equal(t, protocol.CodeUnsupported, refused.Code)
	order := protocol.CopyRequest{Mutation: old.next(), Keys: [][]byte{[]byte("k0")}, Tier: "ssd"}
	var copies protocol.CopyReply
	require.NoError(t, copies.Decode(old.call(protocol.TypeCopy, order.Append(nil))))
	require.Equal(t, protocol.CodeUnsupported, copies.Code)
}

func TestMemoryIsLostWithItsHome(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	region := c.store("k", 4)
	require.Equal(t, n.device, region.Device)
	require.True(t, c.lookup("k0")[0].Found)
	shown := r.deviceInfo(n.device).Generation

	r.alive(12*time.Second, c) // nothing is heard of the node
	require.False(t, c.lookup("k0")[0].Found)
	lost := r.deviceInfo(n.device)
	require.NotEqual(t, shown, lost.Generation)
	require.Equal(t, meta.DeviceAway, lost.Mode)
	require.Zero(t, lost.UntilMS, "there is nothing to wait for")
	require.Zero(t, lost.Regions, "its regions are free without anybody's word")
	require.NotZero(t, c.register(region, 0, "late").Results[0].Code)

	index := r.index
	r.alive(3*time.Second, c)
	require.Equal(t, index, r.index, "that is all there is to log")

	n.back()
	n.attach.Generation = 0 // its memory is new
	require.True(t, n.serve())
	require.Equal(t, meta.DeviceServing, r.deviceInfo(n.device).Mode)
	require.Zero(t, c.alloc(protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage}).Code)
}

func TestMemoryThatIsGoneIsForgotten(t *testing.T) {
	r := newTierRig(t)
	c := r.remote("c", "h2")
	before := len(r.m.machine.Devices())
	for i := range keepGone + 10 {
		n := r.ready("h1", "dram", string(rune('a'+i)), 8)
		c.storeOn(n.device, "k"+string(rune('a'+i)), 1)
		r.alive(12*time.Second, c)
	}
	r.alive(10*time.Second, c)
	require.Len(t, r.m.machine.Devices(), before+keepGone)
}

func TestAnSSDWaitsForItsHome(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "ssd", "1", 8)
	c := r.remote("c", "h2")
	region := n.storeOn(n.device, "k", 4)
	require.True(t, c.lookup("k0")[0].Found)

	r.alive(12*time.Second, c)
	away := r.deviceInfo(n.device)
	require.Equal(t, meta.DeviceAway, away.Mode)
	require.NotZero(t, away.UntilMS)
	require.False(t, c.lookup("k0")[0].Found, "what lies there cannot be read now")

	n.back()
	require.False(t, n.serve(), "what it holds is known")
	require.True(t, c.lookup("k0")[0].Found)
	require.Len(t, n.hello.Regions, 1, "its regions are its own again")
	require.Equal(t, region.RegionID, n.hello.Regions[0].RegionID)
	require.NotEqual(t, region.Epoch, n.hello.Regions[0].Epoch)
	require.Equal(t, []uint64{0, 4 * testPage}, n.hello.Regions[0].Occupied)
}

// storeOn is store in a region of a device.
func (c *testClient) storeOn(device uint64, prefix string, n int) protocol.Region {
	c.r.t.Helper()
	a := c.alloc(protocol.AllocRequest{Size: uint64(n) * testPage, PageSize: testPage, Device: device})
	require.NoError(c.r.t, a.Err())
	require.Equal(c.r.t, device, a.Region.Device)
	keys := make([]string, 0, n)
	for i := range n {
		keys = append(keys, prefix+string(rune('0'+i)))
	}
	for _, res := range c.register(a.Region, 0, keys...).Results {
		require.True(c.r.t, res.IsNew)
	}
	return a.Region
}

func TestAnSSDIsGivenUpWhenItsHomeStaysAway(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "ssd", "1", 8)
	c := r.remote("c", "h2")
	n.storeOn(n.device, "k", 4)
	r.alive(11*time.Second, c)
	deadline := r.deviceInfo(n.device).UntilMS

	// The deadline is in the log, not in a leader's memory.
	r.m.OnLeadership(false, 0)
	r.elect()
	r.alive(30*time.Second, c)
	require.Equal(t, deadline, r.deviceInfo(n.device).UntilMS)
	require.NotZero(t, r.m.machine.Stats().Entries)

	r.alive(time.Minute, c)
	lost := r.deviceInfo(n.device)
	require.Zero(t, lost.UntilMS)
	require.Equal(t, meta.DeviceAway, lost.Mode)
	require.Zero(t, r.m.machine.Stats().Entries)

	n.back()
	require.True(t, n.serve(), "what it holds is not known any more")
	require.Equal(t, meta.DeviceServing, r.deviceInfo(n.device).Mode)
}

func TestAnOlderStateOfADiskIsNotServed(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "ssd", "1", 8)
	older := n.attach
	older.Generation-- // as it was before, when somebody puts a copy of the disk in its place
	c := r.remote("c", "h2")
	n.storeOn(n.device, "k", 4)
	require.True(t, c.lookup("k0")[0].Found)
	reply := n.doAttach(older)
	require.NoError(t, reply.Err())
	require.True(t, reply.Fresh)
	require.NotEqual(t, n.attach.Generation, reply.Generation, "that one was shown by what is not there any more")
	require.False(t, c.lookup("k0")[0].Found)
}

func TestANewLeaderEndsWhatTheOldOneLeftUndone(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	c.store("k", 4)
	shown := r.deviceInfo(n.device).Generation

	var bye protocol.SuccessReply
	goodbye := protocol.GoodbyeRequest{Mutation: n.next()}
	require.NoError(t, bye.Decode(n.call(protocol.TypeGoodbye, goodbye.Append(nil))))
	require.Equal(t, shown, r.deviceInfo(n.device).Generation, "the old leader has not come to it")
	r.m.OnLeadership(false, 0)
	r.elect()
	r.pass(time.Second)
	lost := r.deviceInfo(n.device)
	require.NotEqual(t, shown, lost.Generation)
	require.Equal(t, meta.DeviceAway, lost.Mode)
	require.False(t, c.lookup("k0")[0].Found)
}

func TestANewLeaderIsToldAnewWhereDevicesAre(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	c.store("k", 4)

	r.m.OnLeadership(false, 0)
	r.elect()
	r.afterGrace()
	want := protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage}
	c.requireNoRegion(want)
	require.True(t, c.lookup("k0")[0].Found, "reading needs no home")
	require.Nil(t, c.resume().Devices[0].Endpoint)

	require.False(t, n.serve())
	require.Zero(t, c.alloc(want).Code)
	require.Equal(t, "engine of h1", c.resume().Devices[0].Endpoint.Engine)
}

// resume repeats the HANDSHAKE of a session.
func (c *testClient) resume() protocol.HandshakeReply {
	c.r.t.Helper()
	req := tierHello("", "", 0)
	req.Session, req.Secret = c.hello.Session, c.hello.Secret
	reply := c.handshake(req)
	require.NoError(c.r.t, reply.Err())
	return reply
}

// Who asks for the devices alone is told of nothing else, nor asked again to give a region up.
func TestDevicesAloneAreTold(t *testing.T) {
	r := newTierRig(t)
	r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	c.store("k", 4)
	waits := &revoke{owner: meta.SessionID(c.hello.Session), sent: 5}
	r.m.revokes[99] = waits
	req := tierHello("", "", 0)
	req.Session, req.Secret, req.DevicesOnly = c.hello.Session, c.hello.Secret, true
	reply := c.handshake(req)
	require.NoError(t, reply.Err())
	require.Equal(t, "engine of h1", reply.Devices[0].Endpoint.Engine)
	require.Empty(t, reply.Regions)
	require.NotZero(t, waits.sent)
	require.Len(t, c.resume().Regions, 1)
	require.Zero(t, waits.sent)
}

func TestAHomeWhoseDeviceWasGivenUpAttachesItAgain(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	r.do(&meta.Retire{Device: meta.DeviceID(n.device), Generation: 12345, Fenced: true})
	require.NotEmpty(t, n.closed, "its connections are cut, so that it comes back")
	c := r.remote("c", "h2")
	c.requireNoRegion(protocol.AllocRequest{Size: testPage, PageSize: testPage})
}

// A device that was taken out of service by a new incarnation comes back under another generation, also if its home has
// lost it and shows none.
func TestADeviceComesBackAfterANewIncarnation(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("a", "dram", "1", 8)
	r.do(&meta.NewIncarnation{Incarnation: 1})
	n.back()
	n.attach.Generation = 0
	require.True(t, n.serve())
	require.NotZero(t, n.attach.Generation)
	require.Equal(t, n.attach.Generation, r.deviceInfo(n.device).Generation)
}

func TestMastersOwnDevicesCanBeExposed(t *testing.T) {
	r := newTierRig(t)
	r.device(8)
	n := r.node("n", "cxl", "9", 8)
	expose := protocol.AttachRequest{
		UUID: "00112233445566778899aabbccddeeff", Expose: true, Ready: true, Generation: 7,
		Endpoint: protocol.Endpoint{Engine: "e"},
	}
	reply := n.doAttach(expose)
	require.NoError(t, reply.Err())
	require.False(t, reply.Fresh)
	c := r.remote("c", "h2")
	require.Equal(t, "e", c.hello.Devices[0].Endpoint.Engine)

	expose.Generation = 8
	require.Equal(t, uint64(7), n.doAttach(expose).Generation, "another generation is not the one that is served")
	expose.UUID = strings.Repeat("9", 32)
	require.Equal(t, protocol.CodeNotFound, n.doAttach(expose).Code)

	r.alive(12*time.Second, c)
	require.Nil(t, c.resume().Devices[0].Endpoint, "it ends with the session")
	require.Equal(t, meta.DeviceServing, r.deviceInfo(1).Mode, "the device does not")
}

// TestANewLeaderDoesNotRefuseWhoHasYetToAttach: who serves a device of the masters' own is in the leader's memory alone.
func TestANewLeaderDoesNotRefuseWhoHasYetToAttach(t *testing.T) {
	r := newTierRig(t)
	r.device(8)
	n := r.node("n", "cxl", "9", 8)
	n.attach = protocol.AttachRequest{
		UUID: "00112233445566778899aabbccddeeff", Expose: true, Generation: 7, Endpoint: protocol.Endpoint{Engine: "e"},
	}
	n.serve()
	c := r.remote("c", "h2")
	r.do(&meta.AddTask{TaskKind: meta.TaskCopy, Device: 1, Items: []meta.Victim{{}}})
	task := n.tasks(0).Tasks[0]
	r.m.OnLeadership(false, 0)
	r.elect()
	calls := func(by *testClient) (codes []protocol.Code) {
		done := protocol.TaskDoneRequest{Mutation: by.next(), Task: task.ID, Done: 1, Skipped: 1}
		var tasks protocol.TasksReply
		require.NoError(t, tasks.Decode(by.call(protocol.TypeTasks, (&protocol.TasksRequest{Device: 1}).Append(nil))))
		codes = append(codes, tasks.Code)
		for _, b := range [][]byte{
			by.call(protocol.TypeFenced, (&protocol.FencedRequest{Device: 1, RegionID: 9}).Append(nil)),
			by.call(protocol.TypeTaskDone, done.Append(nil)),
		} {
			var reply protocol.SuccessReply
			require.NoError(t, reply.Decode(b))
			codes = append(codes, reply.Code)
		}
		return codes
	}
	for _, code := range calls(n.testClient) {
		require.True(t, code.Retryable(), "%v", code)
	}
	n.serve()
	require.Equal(t, []protocol.Code{0, 0, 0}, calls(n.testClient))
	for _, code := range calls(c) {
		require.Equal(t, protocol.CodeForbidden, code)
	}
}

func (c *testClient) access(r protocol.Region) uint32 {
	req := protocol.AccessRequest{RegionID: r.RegionID, Epoch: r.Epoch}
	return c.send(protocol.TypeAccess, req.Append(nil))
}

func accessReply(t *testing.T, b []byte) (a protocol.AccessReply) {
	t.Helper()
	require.NotNil(t, b, "not answered")
	require.NoError(t, a.Decode(b))
	return a
}

func TestOwnersGetHandlesFromHomes(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	region := c.store("k", 4)

	seq := c.access(region)
	require.Nil(t, c.answer(seq), "the home is asked")
	var push protocol.GrantPush
	require.NoError(t, push.Decode(n.pushed(protocol.TypeGrant)))
	require.Equal(t, protocol.GrantPush{
		ID: push.ID, RegionID: region.RegionID, Epoch: region.Epoch, Device: n.device, Offset: region.Offset, Length: region.Length,
	}, push)
	grant := protocol.GrantedRequest{ID: push.ID, Endpoint: protocol.Endpoint{Engine: "e", Buffer: 5}}
	thief := (&protocol.GrantedRequest{ID: push.ID, Endpoint: protocol.Endpoint{Engine: "thief"}}).Append(nil)
	require.False(t, success(t, c.call(protocol.TypeGranted, thief)), "only the home answers")
	require.True(t, success(t, n.call(protocol.TypeGranted, grant.Append(nil))))
	a := accessReply(t, c.answer(seq))
	require.NoError(t, a.Err())
	require.Equal(t, grant.Endpoint, a.Endpoint)
	require.False(t, success(t, n.call(protocol.TypeGranted, grant.Append(nil))), "once")

	seq = c.access(region)
	require.NoError(t, push.Decode(n.pushed(protocol.TypeGrant)))
	n.call(protocol.TypeGranted, (&protocol.GrantedRequest{ID: push.ID, Fault: "no memory"}).Append(nil))
	a = accessReply(t, c.answer(seq))
	require.True(t, a.Code.Retryable())
	require.Contains(t, a.Message, "no memory")
}

func success(t *testing.T, b []byte) bool {
	t.Helper()
	var s protocol.SuccessReply
	require.NoError(t, s.Decode(b))
	return s.Success
}

func TestNobodyElseGetsHandles(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c, other := r.remote("c", "h2"), r.remote("other", "h2")
	region := c.store("k", 4)
	require.Equal(t, protocol.CodeNotOwner, accessReply(t, other.answer(other.access(region))).Code)
	stale := region
	stale.Epoch--
	require.Equal(t, protocol.CodeStaleEpoch, accessReply(t, c.answer(c.access(stale))).Code)
	unknown := region
	unknown.RegionID = 999
	require.Equal(t, protocol.CodeNotFound, accessReply(t, c.answer(c.access(unknown))).Code)
	require.Nil(t, n.pushed(protocol.TypeGrant))

	// A region that is taken while its home makes the handle is not written to any more.
	seq := c.access(region)
	var push protocol.GrantPush
	require.NoError(t, push.Decode(n.pushed(protocol.TypeGrant)))
	r.do(&meta.Mark{Region: meta.RegionID(region.RegionID)})
	n.call(protocol.TypeGranted, (&protocol.GrantedRequest{ID: push.ID, Endpoint: protocol.Endpoint{Engine: "e"}}).Append(nil))
	require.Equal(t, protocol.CodeRevoking, accessReply(t, c.answer(seq)).Code)
}

func TestAHomeThatDoesNotAnswerKeepsNobodyWaiting(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 8)
	c := r.remote("c", "h2")
	region := c.store("k", 4)
	seq := c.access(region)
	r.pass(2100 * time.Millisecond)
	require.True(t, accessReply(t, c.answer(seq)).Code.Retryable())

	seq = c.access(region)
	r.m.OnLeadership(false, 0)
	require.Equal(t, protocol.CodeNotLeader, accessReply(t, c.answer(seq)).Code)
	r.elect()
	require.True(t, accessReply(t, c.answer(c.access(region))).Code.Retryable(), "the new leader does not know the home yet")
	n.serve()
	require.Nil(t, c.answer(c.access(region)))
}

func TestRegionsOfOwnersThatEndedAreFenced(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 4)
	owner := r.remote("owner", "h2")
	region := owner.store("k", 4)
	r.alive(12*time.Second, n.testClient) // the owner's session expires; its process may still write
	var push protocol.FencePush
	require.NoError(t, push.Decode(n.pushed(protocol.TypeFence)))
	require.Equal(t, protocol.FencePush{RegionID: region.RegionID, Epoch: region.Epoch, Device: n.device}, push)
	r.alive(time.Second, n.testClient)
	require.NotNil(t, n.pushed(protocol.TypeFence), "it is repeated until answered")

	taker := r.remote("taker", "h3")
	want := protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage, Evict: true, TimeoutMS: 100}
	seq := taker.send(protocol.TypeRequestAlloc, allocBody(taker, want))
	r.pass(200 * time.Millisecond)
	require.Equal(t, protocol.CodePending, allocReply(t, taker.answer(seq)).Code)
	require.True(t, taker.lookup("k0")[0].Found, "what lies there is still served")

	done := (&protocol.FencedRequest{RegionID: push.RegionID, Epoch: push.Epoch, Device: push.Device}).Append(nil)
	var refused protocol.SuccessReply
	require.NoError(t, refused.Decode(taker.call(protocol.TypeFenced, done)))
	require.Equal(t, protocol.CodeForbidden, refused.Code, "only the home can say so")
	require.True(t, success(t, n.call(protocol.TypeFenced, done)))
	r.pass(1100 * time.Millisecond) // the taker's own lease
	got := taker.alloc(protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage, Evict: true})
	require.NoError(t, got.Err())
	require.Equal(t, region.RegionID, got.Region.RegionID)
	require.False(t, success(t, n.call(protocol.TypeFenced, done)), "late repetitions concern nobody")
}

func TestRegionsOfOwnersThatDoNotAnswerAreFencedInTime(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 4)
	owner := r.remote("owner", "h2")
	region := owner.store("k", 4)
	r.do(&meta.Mark{Region: meta.RegionID(region.RegionID)})
	r.alive(9*time.Second, n.testClient, owner)
	require.NotNil(t, owner.pushed(protocol.TypeRevoke))
	require.Nil(t, n.pushed(protocol.TypeFence), "the owner has a session's time to answer")
	r.alive(2*time.Second, n.testClient, owner)
	var push protocol.FencePush
	require.NoError(t, push.Decode(n.pushed(protocol.TypeFence)))
	done := (&protocol.FencedRequest{RegionID: push.RegionID, Epoch: push.Epoch, Device: push.Device}).Append(nil)
	require.True(t, success(t, n.call(protocol.TypeFenced, done)))
	r.alive(2*time.Second, n.testClient, owner)
	require.Zero(t, r.deviceInfo(n.device).Regions, "nobody waits for it: its extent is free")
}

func TestAnOwnerThatHasMappedItsRegionIsNotFencedByTransfer(t *testing.T) {
	r := newTierRig(t)
	n := r.ready("h1", "dram", "1", 4)
	owner := r.remote("owner", "h1") // on the device's own host
	owner.store("k", 4)
	r.alive(15*time.Second, n.testClient)
	require.Equal(t, int64(1), r.m.n.RegionsFenced.Load())
	require.Nil(t, n.pushed(protocol.TypeFence))
}

// Memory of a host is told apart by its NUMA node, if its home says which that is.
func TestDRAMIsPlacedByItsNUMANode(t *testing.T) {
	r := newTierRig(t)
	var nodes []*testNode
	for i, digit := range []string{"1", "2"} {
		n := r.node("h1", "dram", digit, 8)
		n.attach.NUMA = uint64(i) + 1
		require.True(t, n.serve())
		nodes = append(nodes, n)
	}
	c := r.remote("c", "h2")
	at := func(req protocol.AllocRequest) uint64 {
		req.Size, req.PageSize = testPage, testPage
		a := c.alloc(req)
		require.NoError(t, a.Err())
		return a.Region.Device
	}
	require.Equal(t, nodes[1].device, at(protocol.AllocRequest{Near: []string{"h1/1"}}))
	require.Equal(t, nodes[0].device, at(protocol.AllocRequest{Near: []string{"h1/0"}}))
	require.Equal(t, nodes[1].device, at(protocol.AllocRequest{Near: []string{"h1"}, Avoid: []string{"h1/0"}}))
}
