package server

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

const testPage = 4096

// fakeClock stands still until it is moved.
type fakeClock struct{ now int64 }

func (c *fakeClock) Boottime() int64 { return c.now }

// rig drives a Master without goroutines: its log is a list, and entries are applied when the test says so.
type rig struct {
	t       *testing.T
	m       *Master
	clock   *fakeClock
	log     [][]byte
	term    uint64
	index   uint64
	random  uint64
	dead    map[uint64]bool // processes, by pid
	refuse  error           // of Propose
	config  MasterConfig
	store   *raft.Store
	clients []*testClient
}

func newRig(t *testing.T) *rig {
	t.Helper()
	store, err := raft.OpenStore("store", raft.StoreOptions{FS: vfs.NewMem(), MinFreeBytes: 1, BallastBytes: -1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	r := &rig{t: t, clock: &fakeClock{now: 1e9}, dead: map[uint64]bool{}}
	r.store = store
	r.config = MasterConfig{
		Clock: r.clock, Store: store.State(), Logger: slog.New(slog.DiscardHandler), Counters: &Counters{},
		Propose: func(_ uint64, data []byte) (uint64, uint64, error) {
			if r.refuse != nil {
				return 0, 0, r.refuse
			}
			r.log = append(r.log, data)
			return r.index + uint64(len(r.log)), r.term, nil
		},
		Wake:     func() {},
		Leader:   func() (string, uint64) { return "elsewhere:1", 2 },
		Describe: func(h *protocol.HandshakeReply) { h.RMAddress = "here:1" },
		Host: Host{BootID: "boot", PIDNamespace: 1, Dead: func(pid int, _ uint64) bool {
			return r.dead[uint64(pid)]
		}},
		Random:   func() uint64 { r.random += 2; return r.random },
		MaxLease: time.Second, DefaultLease: 500 * time.Millisecond, SessionTTL: 10 * time.Second,
		FlushInterval: time.Second, TouchInterval: 200 * time.Millisecond, TouchBudget: 1_000_000,
		AllocTimeout: 2 * time.Second, AwayTimeout: time.Minute,
	}
	r.m, err = NewMaster(r.config)
	require.NoError(t, err)
	r.elect()
	r.do(&meta.SetSettings{Settings: meta.Settings{
		Version: 1, Policy: "lru", PageSize: testPage, RegionSize: 8 * testPage,
	}})
	return r
}

// elect begins a new term with this member as leader.
func (r *rig) elect() {
	r.term++
	r.index++
	require.NoError(r.t, r.m.Apply(r.index, r.term, nil))
	r.m.OnLeadership(true, r.term)
}

// afterGrace moves the clock past a new leader's grace.
func (r *rig) afterGrace() { r.pass(time.Second + time.Millisecond) }

// device adds a device with room for pages of testPage bytes.
func (r *rig) device(pages uint64) {
	r.do(&meta.AddDevice{
		UUID: "00112233445566778899aabbccddeeff", Path: "/dev/null", Node: "n", Tier: "cxl", Coherence: "hardware",
		Size: (1 + pages) * testPage, DataOffset: testPage, Align: testPage, Generation: 7,
	})
}

func (r *rig) do(cmd meta.Command) {
	r.t.Helper()
	done := false
	require.NoError(r.t, r.m.Do(cmd, func(code protocol.Code, _ []byte) {
		require.Equal(r.t, protocol.CodeOK, code)
		done = true
	}))
	r.settle()
	require.True(r.t, done)
}

// apply applies what has been proposed; it reports whether there was anything.
func (r *rig) apply() bool {
	if len(r.log) == 0 {
		return false
	}
	data := r.log[0]
	r.log = r.log[1:]
	r.index++
	require.NoError(r.t, r.m.Apply(r.index, r.term, data))
	return true
}

// settle proposes and applies until there is nothing to do at this moment.
func (r *rig) settle() {
	r.t.Helper()
	for range 1000 {
		r.m.Pump()
		if !r.apply() {
			return
		}
	}
	r.t.Fatal("it does not come to rest")
}

// pass moves the clock in steps of the background clock's interval.
func (r *rig) pass(d time.Duration) {
	r.t.Helper()
	for end := r.clock.now + int64(d); r.clock.now < end; {
		r.clock.now = min(end, r.clock.now+int64(TickInterval))
		r.m.Tick()
		r.settle()
	}
}

// testClient is a connection that keeps what it is sent.
type testClient struct {
	r      *rig
	c      *Client
	out    []byte
	frames []frame
	closed string
	seq    uint32
	mutSeq uint64
	hello  protocol.HandshakeReply
}

func (c *testClient) Lock() []byte     { return c.out }
func (c *testClient) Unlock(b []byte)  { c.out = b }
func (c *testClient) Close(why string) { c.closed = why }

// Flush splits what was sent into frames.
func (c *testClient) Flush() {
	for len(c.out) > 0 {
		h, b, err := protocol.ParseFrame(c.out)
		require.NoError(c.r.t, err)
		c.frames = append(c.frames, frame{h, append([]byte(nil), b...)})
		c.out = c.out[protocol.HeaderSize+len(b):]
	}
}

func (r *rig) connect() *testClient {
	c := &testClient{r: r}
	c.c = r.m.NewClient(c)
	r.clients = append(r.clients, c)
	return c
}

// client opens a session with a process of its own.
func (r *rig) client(instance string) *testClient {
	r.t.Helper()
	c := r.connect()
	req := protocol.HandshakeRequest{
		InstanceID: instance, Protocol: 1, Features: protocol.FeaturePush, BootID: "boot", PIDNamespace: 1,
		PID: uint64(1000 + len(r.clients)), PIDStart: 5,
	}
	c.hello = c.handshake(req)
	require.NoError(r.t, c.hello.Err())
	return c
}

func (c *testClient) handshake(req protocol.HandshakeRequest) (reply protocol.HandshakeReply) {
	c.r.t.Helper()
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeHandshake, req.Append(nil))))
	return reply
}

// send serves a request. The reply, if there is one at once, is among the frames then.
func (c *testClient) send(t protocol.Type, body []byte) uint32 {
	c.r.t.Helper()
	c.seq++
	h := protocol.Header{Type: t, Sequence: c.seq, Length: uint32(len(body))}
	out, outcome := c.r.m.Serve(c.c, h, body, nil, c.r.clock.now)
	if outcome == Blocked { // as a connection does
		settled := c.r.m.Settled()
		c.r.settle()
		requireClosed(c.r.t, settled)
		out, outcome = c.r.m.Serve(c.c, h, body, out, c.r.clock.now)
	}
	require.Equal(c.r.t, Served, outcome)
	c.out = append(c.out, out...)
	c.Flush()
	return c.seq
}

func requireClosed(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	default:
		require.Fail(t, "what is waited for has not come")
	}
}

// answer takes the reply to seq out of the frames, nil if it has not come.
func (c *testClient) answer(seq uint32) []byte {
	for i, f := range c.frames {
		if f.h.Sequence == seq {
			c.frames = append(c.frames[:i:i], c.frames[i+1:]...)
			return f.b
		}
	}
	return nil
}

// pushed takes the first push of a type out of the frames, nil if there is none.
func (c *testClient) pushed(t protocol.Type) []byte {
	for i, f := range c.frames {
		if f.h.Sequence == 0 && f.h.Type == t {
			c.frames = append(c.frames[:i:i], c.frames[i+1:]...)
			return f.b
		}
	}
	return nil
}

// call serves a request and lets the log run until it is answered.
func (c *testClient) call(t protocol.Type, body []byte) []byte {
	c.r.t.Helper()
	seq := c.send(t, body)
	c.r.settle()
	b := c.answer(seq)
	require.NotNil(c.r.t, b, "%v is not answered", t)
	return b
}

func (c *testClient) next() protocol.Mutation {
	c.mutSeq++
	return protocol.Mutation{Seq: c.mutSeq, Acked: c.mutSeq}
}

func allocReply(t *testing.T, b []byte) (a protocol.AllocReply) {
	t.Helper()
	require.NotNil(t, b, "not answered")
	require.NoError(t, a.Decode(b))
	return a
}

func (c *testClient) alloc(req protocol.AllocRequest) protocol.AllocReply {
	c.r.t.Helper()
	if req.Seq == 0 {
		req.Mutation = c.next()
	}
	req.InstanceID = "x"
	return allocReply(c.r.t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
}

func (c *testClient) register(r protocol.Region, page uint64, keys ...string) protocol.RegisterReply {
	c.r.t.Helper()
	b := c.call(protocol.TypeBatchRegister, c.registration(r, page, keys...).AppendAs(nil, protocol.TypeBatchRegister))
	var reply protocol.RegisterReply
	require.NoError(c.r.t, reply.DecodeAs(b, protocol.TypeBatchRegister))
	return reply
}

func (c *testClient) registration(r protocol.Region, page uint64, keys ...string) *protocol.RegisterRequest {
	req := &protocol.RegisterRequest{Mutation: c.next()}
	for i, k := range keys {
		req.Entries = append(req.Entries, protocol.RegisterEntry{
			Key: []byte(k), RegionID: r.RegionID, Epoch: r.Epoch, KVOffset: (page + uint64(i)) * r.PageSize,
			KVLength: r.PageSize,
		})
	}
	return req
}

func (c *testClient) lookup(keys ...string) []protocol.LookupResult {
	c.r.t.Helper()
	req := protocol.LookupRequest{}
	for _, k := range keys {
		req.Keys = append(req.Keys, []byte(k))
	}
	seq := c.send(protocol.TypeBatchLookup, req.AppendAs(nil, protocol.TypeBatchLookup))
	var reply protocol.LookupReply
	require.NoError(c.r.t, reply.DecodeAs(c.answer(seq), protocol.TypeBatchLookup))
	require.NoError(c.r.t, reply.Err())
	return reply.Results
}

func (c *testClient) release(leases ...uint64) []bool {
	c.r.t.Helper()
	req := protocol.LeasesRequest{Leases: leases}
	var reply protocol.LeasesReply
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeRelease, req.Append(nil))))
	return reply.Results
}

// store gives a client one region of n pages, full of entries p0, p1, ...
func (c *testClient) store(prefix string, n int) protocol.Region {
	c.r.t.Helper()
	a := c.alloc(protocol.AllocRequest{Size: uint64(n) * testPage, PageSize: testPage})
	require.NoError(c.r.t, a.Err())
	require.Equal(c.r.t, uint64(n)*testPage, a.Region.Length)
	keys := make([]string, 0, n)
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	reply := c.register(a.Region, 0, keys...)
	require.NoError(c.r.t, reply.Err())
	for _, res := range reply.Results {
		require.True(c.r.t, res.IsNew)
	}
	return a.Region
}

// evict is a request for n pages in the place of own entries.
func evict(n uint64) protocol.AllocRequest {
	return protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, NeedPages: n, Evict: true}
}

func victims(a protocol.AllocReply) (keys []string) {
	for _, p := range a.Evicted {
		keys = append(keys, string(p.Key))
	}
	return keys
}

func TestEvictionTakesTheColdestThatNobodyHolds(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	c.store("k", 8)
	r.afterGrace()

	held := c.lookup("k0")[0]
	require.True(t, held.Found)
	require.NotZero(t, held.Lease)
	r.settle()
	c.lookup("k1") // used, and the lease ends below
	r.pass(600 * time.Millisecond)

	// k0's lease and k1's have run out: both are used, k0 first. The coldest is k2.
	a := c.alloc(evict(1))
	require.Equal(t, []string{"k2"}, victims(a))
	require.Equal(t, uint64(1), a.Phase)
	require.Zero(t, a.Evicted[0].FreeAfterMS)

	holder := r.client("reader")
	lease := holder.lookup("k3")[0].Lease
	a = c.alloc(evict(1))
	require.Equal(t, []string{"k4"}, victims(a), "a leased page is never a victim")

	require.Equal(t, []bool{true}, holder.release(lease))
	require.Equal(t, []bool{false}, holder.release(lease), "a lease ends once")
	a = c.alloc(evict(6))
	require.Equal(t, []string{"k5", "k6", "k7", "k0", "k1", "k3"}, victims(a), "a released page is evictable at once, in LRU order")
}

func TestReleasingTwiceEndsNobodyElsesLease(t *testing.T) {
	r := newRig(t)
	r.device(1)
	c := r.client("a")
	c.store("k", 1)
	r.afterGrace()
	one, two := c.lookup("k0")[0].Lease, c.lookup("k0")[0].Lease
	require.NotEqual(t, one, two)
	c.release(one, one, one)
	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(1)))
	r.settle()
	require.Nil(t, c.answer(seq), "the second holder's lease stands")
	c.release(two)
	r.settle()
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
}

func allocBody(c *testClient, req protocol.AllocRequest) []byte {
	req.InstanceID, req.Mutation = "x", c.next()
	return req.Append(nil)
}

func TestARequestWaitsForTheLastLease(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	c.store("k", 2)
	r.afterGrace()
	c.lookup("k0", "k1")
	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(1)))
	r.pass(400 * time.Millisecond)
	require.Nil(t, c.answer(seq))
	r.pass(150 * time.Millisecond)
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
	require.Equal(t, uint64(1), r.m.n.AllocWaits.Load())
}

func TestARequestThatWaitsTooLongIsPending(t *testing.T) {
	r := newRig(t)
	r.device(1)
	c := r.client("a")
	c.store("k", 1)
	r.afterGrace()
	req := evict(1)
	req.TimeoutMS = 100
	req.Mutation, req.InstanceID = c.next(), "x"
	c.lookup("k0")
	seq := c.send(protocol.TypeRequestAlloc, req.Append(nil))
	r.pass(120 * time.Millisecond)
	a := allocReply(t, c.answer(seq))
	require.Equal(t, protocol.CodePending, a.Code)
	require.True(t, a.Code.Retryable())
	r.pass(500 * time.Millisecond)
	a = allocReply(t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
	require.Equal(t, []string{"k0"}, victims(a), "the same seq succeeds later")
}

func TestANewLeaderEvictsNothingForOneLease(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	region := c.store("k", 2)
	r.afterGrace()
	r.m.OnLeadership(false, 0)
	require.False(t, r.m.Serving())
	r.elect()

	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(1)))
	r.pass(900 * time.Millisecond)
	require.Nil(t, c.answer(seq), "what was leased before is not known")

	var reply protocol.KeysReply
	mut := c.next()
	mut.Acked-- // the other one is not answered
	del := protocol.KeysRequest{Mutation: mut, Keys: [][]byte{[]byte("k1")}}
	require.NoError(t, reply.DecodeAs(c.call(protocol.TypeDelete, del.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	require.InDelta(t, 100, float64(reply.FreeAfterMS), 1, "the rest of the grace")

	r.pass(110 * time.Millisecond)
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
	require.Equal(t, uint64(2*testPage), region.Length)
}

func TestAFreedPageStaysInQuarantineWhileItIsRead(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	c.store("k", 2)
	r.afterGrace()
	c.lookup("k0")
	r.clock.now += int64(200 * time.Millisecond)
	del := protocol.KeysRequest{Mutation: c.next(), Keys: [][]byte{[]byte("k0"), []byte("k1")}}
	body := del.AppendAs(nil, protocol.TypeBatchDelete)
	var reply protocol.KeysReply
	require.NoError(t, reply.DecodeAs(c.call(protocol.TypeBatchDelete, body), protocol.TypeBatchDelete))
	require.Equal(t, uint64(300), reply.Freed[0].FreeAfterMS)
	require.Zero(t, reply.Freed[1].FreeAfterMS)

	// The same request again is answered from memory, with what is left by now.
	r.clock.now += int64(100 * time.Millisecond)
	require.NoError(t, reply.DecodeAs(c.call(protocol.TypeBatchDelete, body), protocol.TypeBatchDelete))
	require.Equal(t, uint64(200), reply.Freed[0].FreeAfterMS)
}

func TestTheSameSeqIsAppliedOnce(t *testing.T) {
	r := newRig(t)
	r.device(64)
	c := r.client("a")
	body := allocBody(c, protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage})
	one := c.send(protocol.TypeRequestAlloc, body)
	two := c.send(protocol.TypeRequestAlloc, body) // while the first is on its way
	other := r.connect()
	again := protocol.HandshakeRequest{
		InstanceID: "a", Protocol: 1, Session: c.hello.Session, Secret: c.hello.Secret, Features: protocol.FeaturePush,
	}
	require.True(t, other.handshake(again).Resumed)
	three := other.send(protocol.TypeRequestAlloc, body) // over another connection
	r.settle()
	a := allocReply(t, c.answer(one))
	require.NoError(t, a.Err())
	require.Equal(t, a.Region, allocReply(t, c.answer(two)).Region)
	require.Equal(t, a.Region, allocReply(t, other.answer(three)).Region)
	four := c.send(protocol.TypeRequestAlloc, body) // when it has been answered: from memory, without the log
	require.Equal(t, a.Region, allocReply(t, c.answer(four)).Region)
	require.Len(t, r.m.machine.Regions(), 1)
}

func TestACanceledSeqIsRefused(t *testing.T) {
	r := newRig(t)
	r.device(64)
	c := r.client("a")
	lost := c.next()
	cancel := protocol.CancelRequest{Mutation: protocol.Mutation{Seq: lost.Seq + 1, Acked: lost.Seq}, Seqs: []uint64{lost.Seq}}
	var reply protocol.CancelReply
	require.NoError(t, reply.Decode(c.call(protocol.TypeCancel, cancel.Append(nil))))
	require.Equal(t, []bool{false}, reply.Applied)
	req := protocol.AllocRequest{Mutation: lost, InstanceID: "x", Size: 8 * testPage, PageSize: testPage}
	a := allocReply(t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
	require.Equal(t, protocol.CodeCanceled, a.Code)
	require.Empty(t, r.m.machine.Regions())
}

func TestALookupWaitsForTheOutcomeOfAnEviction(t *testing.T) {
	r := newRig(t)
	r.device(2)
	c := r.client("a")
	c.store("k", 2)
	r.afterGrace()
	seq := c.send(protocol.TypeRequestAlloc, allocBody(c, evict(1)))
	r.m.Pump() // k0 is condemned, and the group on its way
	req := protocol.LookupRequest{Keys: [][]byte{[]byte("k1"), []byte("k0")}}
	body := req.AppendAs(nil, protocol.TypeBatchLookup)
	h := protocol.Header{Type: protocol.TypeBatchLookup, Sequence: 99, Length: uint32(len(body))}
	out, outcome := r.m.Serve(c.c, h, body, nil, r.clock.now)
	require.Equal(t, Blocked, outcome)
	require.Empty(t, out)
	settled := r.m.Settled()
	r.settle()
	<-settled
	require.Equal(t, []string{"k0"}, victims(allocReply(t, c.answer(seq))))
	res := c.lookup("k1", "k0")
	require.True(t, res[0].Found)
	require.False(t, res[1].Found)
}

func TestAGroupThatCannotBeProposedIsAnsweredAndForgotten(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want protocol.Code
	}{
		"disk full":  {raft.ErrDiskFull, protocol.CodeDiskFull},
		"busy":       {raft.ErrBusy, protocol.CodeBusy},
		"transfer":   {raft.ErrTransferring, protocol.CodeUnavailable},
		"not leader": {&raft.NotLeaderError{Leader: 2}, protocol.CodeNotLeader},
		"other":      {errors.New("?"), protocol.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.device(2)
			c := r.client("a")
			c.store("k", 2)
			r.afterGrace()
			r.refuse = tc.err
			req := evict(1)
			req.Mutation, req.InstanceID = c.next(), "x"
			a := allocReply(t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
			require.Equal(t, tc.want, a.Code)
			require.True(t, a.Code.Retryable())
			require.Zero(t, r.m.leases.condemned)
			r.refuse = nil
			a = allocReply(t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
			require.Equal(t, []string{"k0"}, victims(a))
		})
	}
}

func TestRequestsOnTheirWayAreToldThatLeadershipIsLost(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.store("k", 1)
	queuedBehind := c.registration(region, 0, "q")
	body := c.registration(region, 0, "p").AppendAs(nil, protocol.TypeBatchRegister)
	one := c.send(protocol.TypeBatchRegister, body)
	r.m.Pump()
	two := c.send(protocol.TypeBatchRegister, queuedBehind.AppendAs(nil, protocol.TypeBatchRegister))
	r.m.OnLeadership(false, 0)
	for _, seq := range []uint32{one, two} {
		var reply protocol.RegisterReply
		require.NoError(t, reply.DecodeAs(c.answer(seq), protocol.TypeBatchRegister))
		require.Equal(t, protocol.CodeNotLeader, reply.Code)
		require.Equal(t, "elsewhere:1", reply.Leader)
	}
	require.True(t, c.c.Idle())
	// The entry is committed all the same: the retry finds it applied.
	r.apply()
	r.elect()
	var reply protocol.RegisterReply
	require.NoError(t, reply.DecodeAs(c.call(protocol.TypeBatchRegister, body), protocol.TypeBatchRegister))
	require.NoError(t, reply.Err())
}

func TestRegionsOfOthersAreTakenAfterTheirOwnersAgree(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, taker := r.client("owner"), r.client("taker")
	region := owner.store("k", 8)
	r.afterGrace()
	seq := taker.send(protocol.TypeRequestAlloc, allocBody(taker, protocol.AllocRequest{
		Size: 8 * testPage, PageSize: testPage, Evict: true, TimeoutMS: 20_000,
	}))
	r.settle()
	var push protocol.RevokePush
	require.NoError(t, push.Decode(owner.pushed(protocol.TypeRevoke)))
	require.Equal(t, region.RegionID, push.RegionID)
	require.False(t, owner.lookup("k0")[0].Found)
	r.pass(600 * time.Millisecond)
	require.NotNil(t, owner.pushed(protocol.TypeRevoke), "it is asked again")
	require.Nil(t, taker.answer(seq))

	// A new leader asks again, too.
	r.m.OnLeadership(false, 0)
	require.NotNil(t, taker.answer(seq), "it is told to retry")
	r.elect()
	r.pass(50 * time.Millisecond)
	require.NotNil(t, owner.pushed(protocol.TypeRevoke))

	body := allocBody(taker, protocol.AllocRequest{
		Size: 8 * testPage, PageSize: testPage, Evict: true, TimeoutMS: 20_000,
	})
	seq = taker.send(protocol.TypeRequestAlloc, body)
	done := protocol.RevokeDoneRequest{Mutation: owner.next(), RegionID: push.RegionID, Epoch: push.Epoch}
	var ok protocol.SuccessReply
	require.NoError(t, ok.Decode(owner.call(protocol.TypeRevokeDone, done.Append(nil))))
	require.NoError(t, ok.Err())
	r.pass(1100 * time.Millisecond)
	a := allocReply(t, taker.answer(seq))
	require.NoError(t, a.Err())
	require.Equal(t, region.RegionID, a.Region.RegionID)
	require.NotEqual(t, region.Epoch, a.Region.Epoch)
	refused := owner.register(region, 0, "late")
	require.NotZero(t, refused.Results[0].Code, "the old owner's epoch is refused")
}

func TestARegionWhoseTakerIsGoneBecomesFree(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, taker := r.client("owner"), r.client("taker")
	region := owner.store("k", 8)
	r.afterGrace()
	taker.send(protocol.TypeRequestAlloc, allocBody(taker, protocol.AllocRequest{
		Size: 8 * testPage, PageSize: testPage, Evict: true, TimeoutMS: 100,
	}))
	r.settle()
	require.NotNil(t, owner.pushed(protocol.TypeRevoke))
	r.pass(200 * time.Millisecond)
	var bye protocol.SuccessReply
	goodbye := protocol.GoodbyeRequest{}
	require.NoError(t, bye.Decode(taker.call(protocol.TypeGoodbye, goodbye.Append(nil))))
	done := protocol.RevokeDoneRequest{Mutation: owner.next(), RegionID: region.RegionID, Epoch: region.Epoch}
	owner.call(protocol.TypeRevokeDone, done.Append(nil))
	r.pass(1500 * time.Millisecond)
	require.Empty(t, r.m.machine.Regions(), "its extent is free after the last lease")
}

func TestADeadOwnersRegionsAreTakenWithoutAsking(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, taker := r.client("owner"), r.client("taker")
	owner.store("k", 8)
	r.afterGrace()
	r.dead[1001] = true
	r.m.ProcessDied(meta.SessionID(owner.hello.Session))
	r.settle()
	a := taker.alloc(protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true})
	require.NoError(t, a.Err())
	require.Equal(t, uint64(2), a.Phase)
	require.Equal(t, uint64(1), r.m.n.SessionsFenced.Load())
}

func TestARegionOfAProcessThatMayStillWriteStaysFenced(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner := r.client("owner")
	owner.store("k", 8)
	r.pass(11 * time.Second) // the owner's session expires, its process may live
	taker := r.client("taker")
	require.Equal(t, int64(1), r.m.n.RegionsFenced.Load())
	req := protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true, TimeoutMS: 300}
	seq := taker.send(protocol.TypeRequestAlloc, allocBody(taker, req))
	r.pass(400 * time.Millisecond)
	require.Equal(t, protocol.CodePending, allocReply(t, taker.answer(seq)).Code)
	require.True(t, taker.lookup("k0")[0].Found, "what lies there is still served")

	r.dead[1001] = true // the housekeeping finds out
	r.pass(1100 * time.Millisecond)
	a := taker.alloc(protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true})
	require.NoError(t, a.Err())
	require.Zero(t, r.m.n.RegionsFenced.Load())
}

func TestSessionsExpireAndSaySo(t *testing.T) {
	r := newRig(t)
	c := r.client("a")
	for range 5 {
		r.pass(9 * time.Second)
		seq := c.send(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
		var reply protocol.HeartbeatReply
		require.NoError(t, reply.Decode(c.answer(seq)))
		require.NoError(t, reply.Err(), "a heartbeat keeps it")
	}
	r.pass(10300 * time.Millisecond)
	seq := c.send(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
	var reply protocol.HeartbeatReply
	require.NoError(t, reply.Decode(c.answer(seq)))
	require.Equal(t, protocol.CodeSessionExpired, reply.Code)
	again := c.handshake(protocol.HandshakeRequest{
		InstanceID: "a", Protocol: 1, Session: c.hello.Session, Secret: c.hello.Secret,
	})
	require.Equal(t, protocol.CodeSessionExpired, again.Code)
	require.NotEqual(t, c.hello.Session, r.client("a").hello.Session)
}

func TestAnElectionGivesSessionsTheirFullTime(t *testing.T) {
	r := newRig(t)
	c := r.client("a")
	r.pass(9 * time.Second)
	r.m.OnLeadership(false, 0)
	r.clock.now += int64(time.Minute) // no leader: deadlines stand still
	r.elect()
	r.pass(9 * time.Second)
	seq := c.send(protocol.TypeHeartbeat, protocol.AppendEmpty(nil))
	var reply protocol.HeartbeatReply
	require.NoError(t, reply.Decode(c.answer(seq)))
	require.NoError(t, reply.Err())
}

func TestOneSessionPerInstance(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.client("a")
	region := c.store("k", 2)

	intruder := r.connect()
	req := protocol.HandshakeRequest{InstanceID: "a", Protocol: 1, BootID: "boot", PIDNamespace: 1, PID: 77, PIDStart: 9}
	reply := intruder.handshake(req)
	require.Equal(t, protocol.CodeBusy, reply.Code)
	require.Contains(t, reply.Message, "process 1001")
	require.NotZero(t, reply.RetryAfterMS)

	// Another client of the same process is in the way, too: the two would share sequence numbers.
	req.PID, req.PIDStart = 1001, 5
	require.Equal(t, protocol.CodeBusy, intruder.handshake(req).Code)

	// The opening repeated, whose reply was lost, gets its session.
	same := r.connect()
	req.Secret = c.hello.Secret
	reply = same.handshake(req)
	require.NoError(t, reply.Err())
	require.Equal(t, c.hello.Session, reply.Session)
	require.Len(t, reply.Regions, 1)
	require.Equal(t, region.RegionID, reply.Regions[0].RegionID)
	require.Equal(t, []uint64{0, 2 * testPage}, reply.Regions[0].Occupied)

	wrong := intruder.handshake(protocol.HandshakeRequest{InstanceID: "a", Protocol: 1, Session: c.hello.Session, Secret: 1})
	require.Equal(t, protocol.CodeForbidden, wrong.Code)

	// A dead process is in nobody's way.
	r.dead[1001] = true
	req.PID, req.Secret = 78, 0
	reply = intruder.handshake(req)
	require.NoError(t, reply.Err())
	require.NotEqual(t, c.hello.Session, reply.Session)
}

func TestPagesFreedByOthersArePushedToTheirOwner(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, other := r.client("owner"), r.client("other")
	region := owner.store("k", 2)
	r.afterGrace()
	other.lookup("k0")
	del := protocol.KeysRequest{Mutation: other.next(), Keys: [][]byte{[]byte("k0")}}
	var reply protocol.KeysReply
	require.NoError(t, reply.DecodeAs(other.call(protocol.TypeDelete, del.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	require.Empty(t, reply.Freed, "it is not its to reuse")
	var push protocol.FreedPush
	require.NoError(t, push.Decode(owner.pushed(protocol.TypeFreed)))
	require.Len(t, push.Pages, 1)
	require.Equal(t, region.RegionID, push.Pages[0].RegionID)
	require.Equal(t, uint64(500), push.Pages[0].FreeAfterMS)
}

// Another member leads for a while, and an owner has nothing to ask meanwhile: its connection is to the old leader still
// when that leads again, and all that is said to it goes over it.
func TestOwnersLearnOfPagesThatWereFreedWhileAnotherLed(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, other := r.client("owner"), r.client("other")
	region := owner.store("k", 2)
	r.afterGrace()
	r.m.OnLeadership(false, 0)
	mut := other.next()
	h := meta.Header{Session: meta.SessionID(other.hello.Session), Seq: mut.Seq, Acked: mut.Acked}
	r.log = append(r.log, meta.AppendCommand(meta.BeginGroup(nil, 1, nil), h, &meta.Delete{Keys: [][]byte{[]byte("k0")}}))
	r.term++
	require.True(t, r.apply())
	require.Empty(t, owner.closed, "it finds the leader as soon as it asks for anything")
	r.elect()
	require.NotEmpty(t, owner.closed, "it must come back to be told")
	require.Empty(t, other.closed, "it has missed nothing")

	r.m.CloseClient(owner.c)
	again := r.connect()
	hello := again.handshake(protocol.HandshakeRequest{
		InstanceID: "owner", Protocol: 1, Features: protocol.FeaturePush, Session: owner.hello.Session, Secret: owner.hello.Secret,
	})
	require.NoError(t, hello.Err())
	require.Equal(t, region.RegionID, hello.Regions[0].RegionID)
	require.Equal(t, []uint64{testPage, testPage}, hello.Regions[0].Occupied)
	r.m.OnLeadership(false, 0)
	r.elect()
	require.Empty(t, again.closed, "it was told")
}

// A snapshot does not say what was freed.
func TestOwnersComeBackToALeaderThatTookASnapshot(t *testing.T) {
	r := newRig(t)
	owner := r.client("owner")
	_, err := r.m.Flush()
	require.NoError(t, err)
	r.m.OnLeadership(false, 0)
	require.NoError(t, r.m.Restored(r.index))
	require.Empty(t, owner.closed)
	r.elect()
	require.NotEmpty(t, owner.closed)
}

func TestClearedEntriesAreSweptAndPushed(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner, other := r.client("owner"), r.client("other")
	owner.store("k", 8)
	r.afterGrace()
	clr := protocol.ClearRequest{Mutation: other.next(), All: true}
	var reply protocol.SuccessReply
	require.NoError(t, reply.Decode(other.call(protocol.TypeClear, clr.Append(nil))))
	require.NoError(t, reply.Err())
	require.False(t, owner.lookup("k0")[0].Found, "nothing of it is served after the acknowledgement")
	r.pass(100 * time.Millisecond)
	require.Zero(t, r.m.machine.SweepPending())
	require.Zero(t, r.m.machine.Stats().Entries)
	var push protocol.FreedPush
	require.NoError(t, push.Decode(owner.pushed(protocol.TypeFreed)))
	require.Len(t, push.Pages, 8)
}

func TestABatchEvictsWhatItsStoresWouldHave(t *testing.T) {
	r := newRig(t)
	r.device(4)
	c := r.client("a")
	c.store("k", 4)
	r.afterGrace()
	req := evict(0)
	for _, k := range []string{"k0", "new1", "k2", "new2"} {
		req.Keys = append(req.Keys, []byte(k))
	}
	a := c.alloc(req)
	require.NoError(t, a.Err())
	require.Equal(t, []bool{true, false, true, false}, a.Found)
	require.Equal(t, []string{"k1", "k3"}, victims(a))

	// With pages to spare nothing happens, and it says what exists.
	req.Keys, req.FreePages = [][]byte{[]byte("k0"), []byte("new3")}, 2
	req.Mutation = protocol.Mutation{}
	a = c.alloc(req)
	require.NoError(t, a.Err())
	require.Equal(t, []bool{true, false}, a.Found)
	require.Empty(t, a.Evicted)
	require.Zero(t, a.Region.Length)
}

func TestMaruClientsGetAnImplicitSession(t *testing.T) {
	r := newRig(t)
	r.device(8)
	c := r.connect()
	hello := c.handshake(protocol.HandshakeRequest{})
	require.True(t, hello.Success)
	require.Equal(t, "here:1", hello.RMAddress)
	require.Zero(t, hello.Session)
	req := protocol.AllocRequest{InstanceID: "inst-A", Size: 2 * testPage}
	a := allocReply(t, c.call(protocol.TypeRequestAlloc, req.Append(nil)))
	require.NoError(t, a.Err())
	require.NotZero(t, a.Region.RegionID)
	reg := protocol.RegisterRequest{Entries: []protocol.RegisterEntry{{Key: []byte("k"), RegionID: a.Region.RegionID, KVLength: 100}}}
	var ok protocol.RegisterReply
	require.NoError(t, ok.DecodeAs(c.call(protocol.TypeRegister, reg.AppendAs(nil, protocol.TypeRegister)), protocol.TypeRegister))
	require.True(t, ok.Results[0].IsNew)
	require.NoError(t, ok.DecodeAs(c.call(protocol.TypeRegister, reg.AppendAs(nil, protocol.TypeRegister)), protocol.TypeRegister))
	require.False(t, ok.Results[0].IsNew)
	pin := protocol.KeysRequest{Keys: [][]byte{[]byte("k")}}
	var keys protocol.KeysReply
	require.NoError(t, keys.DecodeAs(c.call(protocol.TypePin, pin.AppendAs(nil, protocol.TypePin)), protocol.TypePin))
	require.True(t, keys.Results[0])
	require.NoError(t, keys.DecodeAs(c.call(protocol.TypeDelete, pin.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	require.False(t, keys.Results[0], "pinned")
	require.NoError(t, keys.DecodeAs(c.call(protocol.TypeUnpin, pin.AppendAs(nil, protocol.TypeUnpin)), protocol.TypeUnpin))
	require.True(t, keys.Results[0])
	r.pass(time.Minute)
	require.True(t, c.lookup("k")[0].Found, "it never expires")
	ret := protocol.ReturnAllocRequest{InstanceID: "inst-A", RegionID: a.Region.RegionID}
	var done protocol.SuccessReply
	require.NoError(t, done.Decode(c.call(protocol.TypeReturnAlloc, ret.Append(nil))))
	require.True(t, done.Success)
}

func TestFollowersSayWhoLeads(t *testing.T) {
	r := newRig(t)
	c := r.client("a")
	r.m.OnLeadership(false, 0)
	for _, typ := range []protocol.Type{
		protocol.TypeLookup, protocol.TypeRegister, protocol.TypeRequestAlloc, protocol.TypeHeartbeat, protocol.TypeRenew,
	} {
		seq := c.send(typ, protocol.AppendEmpty(nil))
		var reply protocol.HeartbeatReply
		require.NoError(t, reply.Decode(c.answer(seq)), typ)
		require.Equal(t, protocol.CodeNotLeader, reply.Code, typ)
		require.Equal(t, "elsewhere:1", reply.Leader)
	}
	hello := c.handshake(protocol.HandshakeRequest{InstanceID: "b", Protocol: 1})
	require.Equal(t, protocol.CodeNotLeader, hello.Code)
}
