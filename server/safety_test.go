package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// A lease names a slot. Its entry may go with its region, which tells nobody of the page, and another entry may take
// the slot while the lease still runs: that must not be mistaken for the entry that was leased.
func TestALeaseOnAnEntryThatWentWithItsRegionIsNotRenewed(t *testing.T) {
	r := newRig(t)
	r.device(8)
	a, b, reader := r.client("a"), r.client("b"), r.client("r")
	region := a.store("old", 1)
	r.afterGrace()
	held := reader.lookup("old0")[0]
	require.NotZero(t, held.Lease)

	r.do(&meta.Mark{Region: meta.RegionID(region.RegionID)}) // as an operator's drain does
	b.store("new", 1)                                        // takes the slot
	var renewed protocol.LeasesReply
	req := protocol.LeasesRequest{Leases: []uint64{held.Lease}, LeaseMS: 1000}
	require.NoError(t, renewed.Decode(reader.call(protocol.TypeRenew, req.Append(nil))))
	require.Equal(t, []bool{false}, renewed.Results, "its bytes stay put only until its first lease ends")
}

// What belongs to a session is its own to give back, whatever names strangers know.
func TestAStrangerCannotReturnTheRegionOfASession(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, stranger := r.client("owner"), r.connect()
	region := owner.store("k", 1)
	req := protocol.ReturnAllocRequest{InstanceID: "owner", RegionID: region.RegionID}
	req.Seq, req.Acked = owner.mutSeq+1, owner.mutSeq+1
	var reply protocol.SuccessReply
	require.NoError(t, reply.Decode(stranger.call(protocol.TypeReturnAlloc, req.Append(nil))))
	require.False(t, reply.Success)
	info, ok := r.m.machine.Region(meta.RegionID(region.RegionID))
	require.True(t, ok)
	require.Equal(t, meta.RegionOwned, info.State)
	require.True(t, owner.register(region, 0, "k0").Success, "its seq was not used up")
}

// A connection whose reader was held up must not take back what another one noted meanwhile.
func TestASessionIsAsFreshAsItsFreshestConnection(t *testing.T) {
	r := newRig(t)
	c := r.client("a")
	r.clock.now += int64(time.Second)
	c.call(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
	seen := c.c.sess.Load().seen.Load()
	c.c.Touch(seen - int64(time.Second))
	require.Equal(t, seen, c.c.sess.Load().seen.Load())
}

// Replies of a burst that began before this member led are sent without asking whether it leads.
func TestABurstThatBeganBeforeTheElectionIsNotServedAsByALeader(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	c.store("k", 1)
	c.c.follows = true
	req := protocol.LookupRequest{Keys: [][]byte{[]byte("k0")}}
	for _, typ := range []protocol.Type{protocol.TypeLookup, protocol.TypeHeartbeat, protocol.TypeHandshake} {
		body := req.AppendAs(nil, protocol.TypeLookup)
		if typ == protocol.TypeHandshake {
			body = (&protocol.HandshakeRequest{InstanceID: "b", Protocol: 1}).Append(nil)
		}
		var reply protocol.HeartbeatReply
		require.NoError(t, reply.Decode(c.answer(c.send(typ, body))))
		require.Equal(t, protocol.CodeNotLeader, reply.Code, typ)
	}
}
