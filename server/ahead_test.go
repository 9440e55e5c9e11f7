package server

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/raft"
)

// ahead is a leader with one group on its way, and the registration of another client queued behind it.
type ahead struct {
	*rig
	a, b     *testClient
	one, two uint32 // their registrations
}

func newAhead(t *testing.T) *ahead {
	t.Helper()
	r := newRig(t)
	r.device(16)
	x := &ahead{rig: r, a: r.client("a"), b: r.client("b")}
	mine, theirs := x.a.store("a", 2), x.b.store("b", 2)
	first, second := x.a.registration(mine, 0, "a0"), x.b.registration(theirs, 0, "b0")
	x.one = x.a.send(protocol.TypeBatchRegister, first.AppendAs(nil, protocol.TypeBatchRegister))
	r.m.Pump()
	require.Len(t, r.log, 1)
	x.two = x.b.send(protocol.TypeBatchRegister, second.AppendAs(nil, protocol.TypeBatchRegister))
	return x
}

func answerTo(t *testing.T, c *testClient, seq uint32) protocol.RegisterReply {
	t.Helper()
	var reply protocol.RegisterReply
	require.NoError(t, reply.DecodeAs(c.answer(seq), protocol.TypeBatchRegister))
	return reply
}

func TestASecondGroupFollowsWhileTheFirstIsOnItsWay(t *testing.T) {
	x := newAhead(t)
	x.m.Pump()
	require.Len(t, x.log, 1, "the shell says when the log can take more")
	x.m.PumpAhead()
	require.Len(t, x.log, 2)
	third := x.a.registration(protocol.Region{}, 0, "c")
	x.a.send(protocol.TypeBatchRegister, third.AppendAs(nil, protocol.TypeBatchRegister))
	x.m.PumpAhead()
	require.Len(t, x.log, 2, "at most two")
	x.apply()
	require.NotNil(t, x.a.answer(x.one))
	require.Nil(t, x.b.answer(x.two), "its own group is not applied")
	x.apply()
	reply := answerTo(t, x.b, x.two)
	require.NoError(t, reply.Err())
	require.True(t, x.b.lookup("b0")[0].Found)
}

// What needs a plan is planned on the state that its group finds, and so are the uses of entries.
func TestAPlanWaitsUntilItsGroupIsAlone(t *testing.T) {
	x := newAhead(t)
	x.b.lookup("b1") // a use
	seq := x.a.send(protocol.TypeRequestAlloc, allocBody(x.a, protocol.AllocRequest{Size: 2 * testPage, PageSize: testPage}))
	last := x.b.registration(protocol.Region{}, 0, "late")
	behind := x.b.send(protocol.TypeBatchRegister, last.AppendAs(nil, protocol.TypeBatchRegister))
	x.m.PumpAhead()
	require.Len(t, x.log, 2)
	require.Empty(t, x.m.leases.touches.logged)
	x.apply()
	x.m.PumpAhead()
	require.Len(t, x.log, 1, "the next in the queue needs a plan, and nothing overtakes it")
	x.apply()
	require.Nil(t, x.a.answer(seq))
	x.settle()
	require.NotNil(t, x.a.answer(seq))
	require.NotNil(t, x.b.answer(behind))
}

// Under a load that always has a next group ready, uses of entries and requests that wait for a victim still get their
// turn: no second group is made while they are due.
func TestSecondGroupsDoNotStarveUsesAndWaitingRequests(t *testing.T) {
	x := newAhead(t)
	x.b.lookup("b1")
	x.clock.now += int64(x.m.cfg.TouchInterval)
	x.m.PumpAhead()
	require.Len(t, x.log, 1, "the use is due")
	x.settle()
	require.Zero(t, x.m.leases.touches.live)

	x = newAhead(t)
	x.m.parked = append(x.m.parked, &request{})
	x.m.PumpAhead()
	require.Len(t, x.log, 1)
	x.m.parked = nil
	x.m.PumpAhead()
	require.Len(t, x.log, 2)
}

func TestALostTermEndsBothGroups(t *testing.T) {
	x := newAhead(t)
	x.m.PumpAhead()
	x.m.OnLeadership(false, 0)
	for _, reply := range []protocol.RegisterReply{answerTo(t, x.a, x.one), answerTo(t, x.b, x.two)} {
		require.Equal(t, protocol.CodeNotLeader, reply.Code)
	}
	require.True(t, x.a.c.Idle() && x.b.c.Idle())
}

func TestASecondGroupThatIsRefusedLeavesTheFirstAlone(t *testing.T) {
	x := newAhead(t)
	x.refuse = raft.ErrBusy
	x.m.PumpAhead()
	reply := answerTo(t, x.b, x.two)
	require.Equal(t, protocol.CodeBusy, reply.Code)
	x.refuse = nil
	x.apply()
	reply = answerTo(t, x.a, x.one)
	require.NoError(t, reply.Err())
	x.settle()
}

// With less queued than half of what is about to be answered, waiting for those makes fewer syncs.
func TestASmallSecondGroupIsNotWorthASync(t *testing.T) {
	r := newRig(t)
	r.device(16)
	clients := make([]*testClient, 0, 3)
	for _, name := range []string{"a", "b", "c"} {
		clients = append(clients, r.client(name))
	}
	send := func(c *testClient) {
		req := c.registration(protocol.Region{}, 0, "k")
		c.send(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	}
	late, later := r.client("d"), r.client("e")
	for _, c := range clients {
		send(c)
	}
	r.m.Pump()
	send(late)
	r.m.PumpAhead()
	require.Len(t, r.log, 1)
	send(later)
	r.m.PumpAhead()
	require.Len(t, r.log, 2)
}
