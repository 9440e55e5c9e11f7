package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/raft"
)

// storeFor stores one entry, a block of a prefix, that lives for ttl.
func (c *testClient) storeFor(r protocol.Region, key string, ttl time.Duration) protocol.RegisterReply {
	c.r.t.Helper()
	req := c.registration(r, 0, key)
	req.Context = &protocol.Context{Model: "m"}
	e := &req.Entries[0]
	e.TTLMS, e.HasPrefix, e.Hash = uint64(ttl.Milliseconds()), true, 7
	var reply protocol.RegisterReply
	b := c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.NoError(c.r.t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	require.NoError(c.r.t, reply.Err())
	return reply
}

// seen says which kinds of read find the only entry of the index.
func (c *testClient) seen(key string, lease uint64) map[string]bool {
	c.r.t.Helper()
	t := c.r.t
	var exists protocol.KeysReply
	keys := protocol.KeysRequest{Keys: [][]byte{[]byte(key)}}
	require.NoError(t, exists.DecodeAs(c.call(protocol.TypeExists, keys.AppendAs(nil, protocol.TypeExists)), protocol.TypeExists))
	var prefix protocol.PrefixMatchReply
	match := protocol.PrefixMatchRequest{Context: protocol.Context{Model: "m"}, Hashes: []uint64{7}}
	require.NoError(t, prefix.Decode(c.call(protocol.TypePrefixMatch, match.Append(nil))))
	var list protocol.ListKeysReply
	require.NoError(t, list.Decode(c.call(protocol.TypeListKeys, (&protocol.ListKeysRequest{}).Append(nil))))
	var renewed protocol.LeasesReply
	renew := protocol.LeasesRequest{Leases: []uint64{lease}}
	require.NoError(t, renewed.Decode(c.call(protocol.TypeRenew, renew.Append(nil))))
	return map[string]bool{
		"LOOKUP": c.lookup(key)[0].Found, "EXISTS": exists.Results[0], "PREFIX_MATCH": prefix.Matched == 1,
		"LIST_KEYS": len(list.Keys) == 1, "RENEW": renewed.Results[0],
	}
}

// all is what seen says when all kinds of read agree.
func all(found bool) map[string]bool {
	return map[string]bool{
		"LOOKUP": found, "EXISTS": found, "PREFIX_MATCH": found, "LIST_KEYS": found, "RENEW": found,
	}
}

// When the time of an entry is over in an idle pool, the first who asks for it has that logged, once: a leader that
// comes later goes by the log, and must not serve it again.
func TestAnEntryIsGoneWhenItsTimeIsOverAndStaysSo(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage}).Region
	require.True(t, c.storeFor(region, "k", 300*time.Millisecond).Results[0].IsNew)
	lease := c.lookup("k")[0].Lease

	r.clock.now += int64(299 * time.Millisecond)
	require.Equal(t, all(true), c.seen("k", lease))
	logged := r.m.Applied() // from here on the pool is idle: nothing stamps a log time
	r.clock.now += int64(time.Millisecond)
	require.Equal(t, all(false), c.seen("k", lease))
	require.Equal(t, logged+1, r.m.Applied())

	r.m.OnLeadership(false, 0) // the next leader's clock is another, and its log time goes on from the last stamped one
	r.elect()
	require.Equal(t, all(false), c.seen("k", lease))
	require.True(t, c.storeFor(region, "k", time.Second).Results[0].IsNew, "what is logged next agrees")
	require.True(t, c.lookup("k")[0].Found)
}

func TestABatchThatStoresAnExpiredKeyAgainGetsAPageForIt(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage}).Region
	c.storeFor(region, "k", 300*time.Millisecond)
	need := protocol.AllocRequest{Size: testPage, PageSize: testPage, RunPages: 1, Evict: true, Keys: [][]byte{[]byte("k")}}
	held := c.alloc(need)
	require.NoError(t, held.Err())
	require.Zero(t, held.Region.Length, "it is held: there is nothing to store")
	r.clock.now += int64(300 * time.Millisecond)
	gone := c.alloc(need)
	require.NoError(t, gone.Err())
	require.Equal(t, uint64(testPage), gone.Region.Length)
}

// What is asked while the answer of another is on its way waits for the same entry, and what is over meanwhile keeps
// nobody waiting again.
func TestReadsWaitForOneStamp(t *testing.T) {
	r := newRig(t)
	r.device(8)
	a, b := r.client("a"), r.client("b")
	region := a.alloc(protocol.AllocRequest{Size: 2 * testPage, PageSize: testPage}).Region
	a.storeFor(region, "k", 300*time.Millisecond)
	r.clock.now += int64(300 * time.Millisecond)
	req := (&protocol.LookupRequest{Keys: [][]byte{[]byte("k")}}).AppendAs(nil, protocol.TypeLookup)
	h := protocol.Header{Type: protocol.TypeLookup, Sequence: 1, Length: uint32(len(req))}
	logged := r.m.Applied()
	for _, c := range []*testClient{a, b} {
		out, outcome := r.m.Serve(c.c, h, req, nil, r.clock.now)
		require.Equal(t, Blocked, outcome)
		require.Empty(t, out, "it may be served yet: by the next leader, if nothing is logged")
	}
	settled := r.m.Settled()
	r.m.Pump()
	require.Len(t, r.log, 1)
	select {
	case <-settled:
		require.Fail(t, "nothing is logged yet")
	default:
	}
	r.settle()
	requireClosed(t, settled)
	require.Equal(t, logged+1, r.m.Applied())
	r.clock.now += int64(time.Second)
	for _, c := range []*testClient{a, b} {
		out, outcome := r.m.Serve(c.c, h, req, nil, r.clock.now)
		require.Equal(t, Served, outcome)
		require.NotEmpty(t, out)
	}
	require.Equal(t, logged+1, r.m.Applied())
}

// Reads go on though the log takes nothing: an entry is served a little longer then, and not again once it was over.
func TestAnEntryIsServedOnIfItsEndCannotBeLogged(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage}).Region
	c.storeFor(region, "k", 300*time.Millisecond)
	r.clock.now += int64(300 * time.Millisecond)
	r.refuse = raft.ErrDiskFull
	for range 5 {
		require.True(t, c.lookup("k")[0].Found)
		r.clock.now += int64(time.Second)
	}
	r.refuse = nil
	require.False(t, c.lookup("k")[0].Found)
	r.refuse = raft.ErrDiskFull
	require.False(t, c.lookup("k")[0].Found)
}

func TestAFollowerReadsAtTheLastStampedTime(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.alloc(protocol.AllocRequest{Size: testPage, PageSize: testPage}).Region
	c.storeFor(region, "k", 300*time.Millisecond)
	r.clock.now += int64(time.Second)
	r.m.OnLeadership(false, 0)
	var exists protocol.KeysReply
	keys := protocol.KeysRequest{Keys: [][]byte{[]byte("k")}}
	require.NoError(t, exists.DecodeAs(c.call(protocol.TypeExists, keys.AppendAs(nil, protocol.TypeExists)), protocol.TypeExists))
	require.True(t, exists.Results[0], "it has no clock that the others would agree on")
}
