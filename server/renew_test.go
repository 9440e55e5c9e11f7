package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// renew asks for more time for leases, and returns what is said of each.
func (c *testClient) renew(ms uint64, leases ...uint64) []bool {
	c.r.t.Helper()
	var reply protocol.LeasesReply
	req := protocol.LeasesRequest{Leases: leases, LeaseMS: ms}
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeRenew, req.Append(nil))))
	require.True(c.r.t, reply.Success)
	return reply.Results
}

// freeAfter deletes a key and returns for how long its page must not be used again.
func (c *testClient) freeAfter(key string) uint64 {
	c.r.t.Helper()
	del := protocol.KeysRequest{Mutation: c.next(), Keys: [][]byte{[]byte(key)}}
	var reply protocol.KeysReply
	require.NoError(c.r.t, reply.DecodeAs(c.call(protocol.TypeDelete, del.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	return reply.FreeAfterMS
}

// TestARenewedLeaseLastsUntilItsNewEnd: what was answered as held is neither evicted nor used again before.
func TestARenewedLeaseLastsUntilItsNewEnd(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	c.store("k", 2)
	r.afterGrace()
	held := c.lookup("k0", "k1")
	r.pass(400 * time.Millisecond)
	require.Equal(t, []bool{true, true}, c.renew(600, held[0].Lease, held[1].Lease))
	require.Equal(t, uint64(600), c.freeAfter("k1"))

	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(2)))
	r.pass(590 * time.Millisecond)
	require.Nil(t, c.answer(seq), "the first lease is over, the renewed one is not")
	r.pass(20 * time.Millisecond)
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
}

// TestARenewalOfManyLeasesAnswersEach: some of the entries may have gone.
func TestARenewalOfManyLeasesAnswersEach(t *testing.T) {
	r := newRig(t)
	r.device(3)
	c := r.client("a")
	c.store("k", 3)
	r.afterGrace()
	held := c.lookup("k0", "k1", "k2")
	require.Equal(t, uint64(500), c.freeAfter("k1"))
	c.release(held[2].Lease)
	require.Equal(t, []bool{true, false, false, false, true},
		c.renew(1000, held[0].Lease, held[1].Lease, held[2].Lease, 0, held[0].Lease))
	r.pass(600 * time.Millisecond)
	require.Equal(t, []bool{true}, c.renew(1000, held[0].Lease))
	r.pass(1100 * time.Millisecond)
	require.Equal(t, []bool{false}, c.renew(1000, held[0].Lease), "it has ended, and who reads must look the key up again")
}

// TestARenewedLeaseKeepsItsRegion: a region is given away whole when no lease in it is left.
func TestARenewedLeaseKeepsItsRegion(t *testing.T) {
	l := &leases{}
	l.reset(5, 0)
	lease := l.grant(3, 1, 100, 200)
	require.True(t, l.renew(lease, 1, 150, 300))
	for now, busy := range map[int64]bool{250: true, 299: true, 300: false} {
		l.sweepExpired(now - 1)
		g := guard{l: l, now: now}
		require.Equal(t, busy, g.RegionBusy(1), now)
		require.Equal(t, busy, g.Leased(3), now)
	}
}

// TestANewLeaderDoesNotRenewWhatItsPredecessorLeased: it does not know the lease, and says so. Until that ends, the
// bytes stay put all the same.
func TestANewLeaderDoesNotRenewWhatItsPredecessorLeased(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	c.store("k", 2)
	r.afterGrace()
	held := c.lookup("k0")[0]
	require.Equal(t, []bool{true}, c.renew(1000, held.Lease))
	r.m.OnLeadership(false, 0)
	r.elect()
	c.lookup("k0") // by somebody else, so that the slot is leased
	require.Equal(t, []bool{false}, c.renew(1000, held.Lease))
	require.Equal(t, uint64(1000), c.freeAfter("k0"), "as long as a lease can last that was renewed before the election")
}

// TestARenewalOfWhatIsAboutToGoIsRefused: a burst of requests goes by the time at which it began. By that a lease may be
// held which was over when an eviction was planned.
func TestARenewalOfWhatIsAboutToGoIsRefused(t *testing.T) {
	r := newRig(t)
	r.device(1)
	c := r.client("a")
	c.store("k", 1)
	r.afterGrace()
	held := c.lookup("k0")[0]
	slot := meta.Slot(held.Lease & 0xffffffff)
	r.m.leases.mu.Lock()
	r.m.leases.condemn(slot)
	r.m.leases.mu.Unlock()
	require.Equal(t, []bool{false}, c.renew(1000, held.Lease))
	r.m.leases.mu.Lock()
	r.m.leases.spare(slot)
	r.m.leases.mu.Unlock()
	require.Equal(t, []bool{true}, c.renew(1000, held.Lease))
}

// TestAnEntryThatManyReadIsRenewedForAll: those beyond the holders that have a name of their own share one. They cannot
// end the lease early, for they would end each other's; but they can renew it, or no view of a hot entry could be held
// for longer than one lease.
func TestAnEntryThatManyReadIsRenewedForAll(t *testing.T) {
	r := newRig(t)
	r.device(1)
	c := r.client("a")
	c.store("k", 1)
	r.afterGrace()
	var named, shared []uint64
	for range maxHolders {
		named = append(named, c.lookup("k0")[0].Lease)
	}
	for range 3 {
		shared = append(shared, c.lookup("k0")[0].Lease)
	}
	r.pass(400 * time.Millisecond)
	require.Equal(t, []bool{true, true, true}, c.renew(1000, shared...))
	c.release(append(named, shared[:2]...)...)
	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(1)))
	r.pass(900 * time.Millisecond)
	require.Nil(t, c.answer(seq), "the third reads on")
	require.Equal(t, []bool{true}, c.renew(1000, shared[2]))
	r.pass(900 * time.Millisecond)
	require.Nil(t, c.answer(seq))
	r.pass(110 * time.Millisecond)
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
	require.Equal(t, []bool{false}, c.renew(1000, shared[2]))
}

// TestALeaseOnALocationThatWentIsNotRenewed: its holder may be reading there, where the page rests until the lease ends and
// no longer. Who came later reads what is left.
func TestALeaseOnALocationThatWentIsNotRenewed(t *testing.T) {
	l := &leases{}
	l.reset(5, 0)
	before := l.grant(3, 1, 100, 200)
	l.part(3, 110)
	after := l.grant(3, 1, 120, 220)
	require.False(t, l.renew(before, 1, 150, 300))
	require.True(t, l.renew(after, 1, 150, 300))
	l.sweepExpired(160)
	require.False(t, l.renew(before, 1, 170, 300), "as long as it lasts")
	l.release(before, 180)
	l.release(after, 180)
	again := l.grant(3, 1, 190, 290)
	require.True(t, l.renew(again, 1, 195, 310))
	l.part(3, 311)
	require.True(t, l.renew(l.grant(3, 1, 320, 400), 1, 330, 500), "it had ended before")
}
