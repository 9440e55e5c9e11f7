package server

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// tenantClient opens a session of a tenant that reads pushes if it is to.
func (r *rig) tenantClient(instance, tenant string, features uint64) *testClient {
	r.t.Helper()
	c := r.connect()
	c.hello = c.handshake(protocol.HandshakeRequest{
		InstanceID: instance, Tenant: tenant, Protocol: protocol.Version, Features: features,
	})
	require.NoError(r.t, c.hello.Err())
	return c
}

// clear sends a CLEAR and returns its reply.
func (c *testClient) clear(req protocol.ClearRequest) (reply protocol.SuccessReply) {
	c.r.t.Helper()
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeClear, req.Append(nil))))
	return reply
}

// cleared takes the one CLEARED out of the frames; there must be no other.
func (c *testClient) cleared() *protocol.ClearedPush {
	c.r.t.Helper()
	c.r.m.Tick()
	b := c.pushed(protocol.TypeCleared)
	require.NotNil(c.r.t, b, "it was not told")
	var push protocol.ClearedPush
	require.NoError(c.r.t, push.Decode(b))
	require.Nil(c.r.t, c.pushed(protocol.TypeCleared), "it was told twice")
	return &push
}

func TestClearOfAnotherTenantIsForbidden(t *testing.T) {
	r := newRig(t)
	r.device(8)
	a := r.tenantClient("a", "a", protocol.FeaturePush)
	b := r.tenantClient("b", "b", protocol.FeaturePush)
	a.store("k", 2)
	b.store("k", 2)
	reply := a.clear(protocol.ClearRequest{Mutation: a.next(), Tenant: "b"})
	require.Equal(t, protocol.CodeForbidden, reply.Code)
	require.Contains(t, reply.Message, "larder ctl clear", "it says what to do instead")
	require.True(t, a.lookup("k0")[0].Found, "a refused CLEAR drops nothing")
	require.True(t, b.lookup("k0")[0].Found)
	require.Nil(t, a.pushed(protocol.TypeCleared))

	reply = a.clear(protocol.ClearRequest{Mutation: a.next(), Tenant: "a"})
	require.NoError(t, reply.Err())
	require.False(t, a.lookup("k0")[0].Found)
	require.True(t, b.lookup("k0")[0].Found)
	require.True(t, a.cleared().All)

	d := r.tenantClient("d", "", protocol.FeaturePush)
	reply = d.clear(protocol.ClearRequest{Mutation: d.next(), Tenant: meta.DefaultTenant})
	require.NoError(t, reply.Err(), "who names no tenant at HANDSHAKE is of the default one")
}

func TestClearNeedsASession(t *testing.T) {
	r := newRig(t)
	r.device(8)
	owner := r.tenantClient("a", "a", protocol.FeaturePush)
	owner.store("k", 2)
	stranger := r.connect()
	for _, req := range []protocol.ClearRequest{
		{All: true},
		{Prefix: []byte("k")},
		{Context: &protocol.Context{}},
		{Tenant: meta.DefaultTenant},
		{All: true, Mutation: protocol.Mutation{Seq: 1, Acked: 1}},
	} {
		reply := stranger.clear(req)
		require.Equal(t, protocol.CodeSessionExpired, reply.Code)
		require.Contains(t, reply.Message, "HANDSHAKE")
		require.True(t, owner.lookup("k0")[0].Found, "a refused CLEAR drops nothing")
	}
}

// TestClearOverTheWireNeedsASession is the same with nothing but frames.
func TestClearOverTheWireNeedsASession(t *testing.T) {
	s := startServer(t, testConfig(t))
	w := dial(t, "tcp", s.Addr())
	w.open("a")
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	require.True(t, w.register(a.Region, 0, "k").Results[0].IsNew)
	var reply protocol.SuccessReply
	stranger := dial(t, "tcp", s.Addr())
	require.NoError(t, reply.Decode(stranger.call(protocol.TypeClear, (&protocol.ClearRequest{All: true}).Append(nil))))
	require.Equal(t, protocol.CodeSessionExpired, reply.Code)
	require.True(t, w.lookup(0, "k").Results[0].Found)

	// An operator's is told over the wire, too.
	require.NoError(t, s.Clear(t.Context(), ClearScope{Prefix: []byte("k")}))
	for {
		f := w.receive()
		if f.h.Type == protocol.TypeCleared {
			var push protocol.ClearedPush
			require.NoError(t, push.Decode(f.b))
			require.Equal(t, "k", string(push.Prefix))
			break
		}
	}
	require.False(t, w.lookup(0, "k").Results[0].Found)
}

func TestOperatorsClearReachesAllTenantsUnlessItNamesOne(t *testing.T) {
	for name, tc := range map[string]struct {
		scope ClearScope
		left  [2]bool // of p0 of tenants a and default
	}{
		"all":                {ClearScope{All: true}, [2]bool{}},
		"prefix":             {ClearScope{Prefix: []byte("p")}, [2]bool{}},
		"prefix of a tenant": {ClearScope{Prefix: []byte("p"), Tenant: "a"}, [2]bool{false, true}},
		"other prefix":       {ClearScope{Prefix: []byte("q")}, [2]bool{true, true}},
		"tenant":             {ClearScope{Context: &meta.Context{Tenant: "a"}}, [2]bool{false, true}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.device(8)
			a := r.tenantClient("a", "a", protocol.FeaturePush)
			b := r.tenantClient("b", "", protocol.FeaturePush)
			a.store("p", 1)
			b.store("p", 1)
			r.do(tc.scope.command())
			require.Equal(t, tc.left[0], a.lookup("p0")[0].Found)
			require.Equal(t, tc.left[1], b.lookup("p0")[0].Found)
			require.NotNil(t, a.cleared())
			require.Equal(t, name == "prefix of a tenant" || name == "tenant", b.pushed(protocol.TypeCleared) == nil,
				"only tenants that are concerned are told")
		})
	}
}

func TestClearIsToldToTheSessionsThatItConcerns(t *testing.T) {
	context := &protocol.Context{Model: "m", BlockSize: 16}
	for name, tc := range map[string]struct {
		req  protocol.ClearRequest
		want protocol.ClearedPush
	}{
		"all":     {protocol.ClearRequest{All: true}, protocol.ClearedPush{All: true}},
		"tenant":  {protocol.ClearRequest{Tenant: "a"}, protocol.ClearedPush{All: true}},
		"prefix":  {protocol.ClearRequest{Prefix: []byte("p/")}, protocol.ClearedPush{Prefix: []byte("p/")}},
		"context": {protocol.ClearRequest{Context: context}, protocol.ClearedPush{Context: context}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.device(8)
			sender, fellow := r.tenantClient("1", "a", protocol.FeaturePush), r.tenantClient("2", "a", protocol.FeaturePush)
			deaf, other := r.tenantClient("3", "a", 0), r.tenantClient("4", "b", protocol.FeaturePush)
			sender.store("k", 1)
			tc.req.Mutation = sender.next()
			body := tc.req.Append(nil)
			var reply protocol.SuccessReply
			seq := sender.send(protocol.TypeClear, body)
			again := sender.send(protocol.TypeClear, body) // the same seq, before it is answered
			clear(body)                                    // the connection reads its next frame into it
			r.m.Tick()
			require.Nil(t, fellow.pushed(protocol.TypeCleared), "not before it is applied")
			r.settle()
			for _, s := range []uint32{seq, again} {
				require.NoError(t, reply.Decode(sender.answer(s)))
				require.NoError(t, reply.Err())
			}
			tc.want.Index = r.index
			require.Equal(t, &tc.want, sender.cleared())
			require.Equal(t, &tc.want, fellow.cleared())
			require.Nil(t, deaf.pushed(protocol.TypeCleared), "it does not read pushes")
			require.Nil(t, other.pushed(protocol.TypeCleared), "it does not concern it")
		})
	}
}

// TestAClearThatIsNotAppliedIsToldToNobody: who sent it gets the same answer as to any other request.
func TestAClearThatIsNotAppliedIsToldToNobody(t *testing.T) {
	r := newRig(t)
	r.device(8)
	a := r.tenantClient("a", "a", protocol.FeaturePush)
	var reply protocol.SuccessReply
	ask := func() uint32 {
		return a.send(protocol.TypeClear, (&protocol.ClearRequest{Mutation: a.next(), All: true}).Append(nil))
	}

	for _, tc := range []struct {
		refuse error
		want   protocol.Code
	}{
		{raft.ErrDiskFull, protocol.CodeDiskFull},
		{raft.ErrBusy, protocol.CodeBusy},
		{&raft.NotLeaderError{}, protocol.CodeNotLeader},
		{raft.ErrTransferring, protocol.CodeUnavailable},
	} {
		r.refuse = tc.refuse
		seq := ask()
		r.settle()
		r.refuse = nil
		require.NoError(t, reply.Decode(a.answer(seq)))
		require.Equal(t, tc.want, reply.Code)
		other := a.send(protocol.TypeDelete, (&protocol.KeysRequest{Mutation: a.next(), Keys: [][]byte{{'k'}}}).AppendAs(nil, protocol.TypeDelete))
		r.refuse = tc.refuse
		r.settle()
		r.refuse = nil
		var deleted protocol.KeysReply
		require.NoError(t, deleted.DecodeAs(a.answer(other), protocol.TypeDelete))
		require.Equal(t, deleted.Error, reply.Error, "what is refused is refused as anything else is")
	}

	seq := ask()
	r.m.Pump()
	r.m.OnLeadership(false, 0)
	require.NoError(t, reply.Decode(a.answer(seq)))
	require.Equal(t, protocol.CodeNotLeader, reply.Code)
	r.m.Tick()
	require.Nil(t, a.pushed(protocol.TypeCleared))
}

// TestManyClearsAreToldAsOne: who does nothing but clear does not fill the connections of its fellows, or of others.
func TestManyClearsAreToldAsOne(t *testing.T) {
	r := newRig(t)
	r.device(8)
	a, fellow := r.tenantClient("1", "a", protocol.FeaturePush), r.tenantClient("2", "a", protocol.FeaturePush)
	b := r.tenantClient("3", "b", protocol.FeaturePush)
	drop := func(c *testClient, prefix byte) {
		require.NoError(t, new(c.clear(protocol.ClearRequest{Mutation: c.next(), Prefix: []byte{prefix}})).Err())
	}
	for i := range byte(maxUntold) {
		drop(a, i)
	}
	drop(b, 'x')
	drop(a, 'y')
	drop(a, 'z')
	r.m.Tick()
	told := 0
	for fellow.pushed(protocol.TypeCleared) != nil {
		told++
	}
	require.Equal(t, 2, told, "all, and the one after that")
	require.Equal(t, []byte("x"), b.cleared().Prefix)
}

func TestAdminClearsAPrefixOfAllTenantsUnlessOneIsNamed(t *testing.T) {
	s, a := startAdminTest(t, func(cfg *Config) { cfg.Listen = "127.0.0.1:0" })
	held := map[string]*wire{"": nil, "b": nil}
	for tenant := range held {
		w := dial(t, "tcp", s.Addr())
		hello := w.handshake(protocol.HandshakeRequest{InstanceID: "of " + tenant, Tenant: tenant})
		require.NoError(t, hello.Err())
		r := w.alloc(protocol.AllocRequest{InstanceID: "of " + tenant, Size: 1 << 20, PageSize: 64 << 10})
		require.NoError(t, r.Err())
		require.True(t, w.register(r.Region, 0, "p/1", "q/1").Results[0].IsNew)
		held[tenant] = w
	}
	holds := func(tenant, key string) bool { return held[tenant].lookup(0, key).Results[0].Found }
	clears := func(body string) {
		code, reply := ask(t, a, "POST", "/clear", body)
		require.Equal(t, http.StatusOK, code, "%s", reply)
	}
	clears(`{"prefix":"p/","tenant":"b"}`)
	require.False(t, holds("b", "p/1"))
	require.True(t, holds("b", "q/1"))
	require.True(t, holds("", "p/1"))
	clears(`{"prefix":"q/"}`)
	require.False(t, holds("b", "q/1"))
	require.False(t, holds("", "q/1"))
	require.True(t, holds("", "p/1"))

	for body, says := range map[string]string{
		`{"tenant":"b"}`:                                              "exactly one",
		`{"all":true,"tenant":"b"}`:                                   "goes with a prefix",
		`{"tenant":"b","context":{"model":"m"}}`:                      "goes with a prefix",
		`{"prefix":"` + strings.Repeat("k", 2000) + `"}`:              "at most 1024",
		`{"prefix":"k","tenant":"` + strings.Repeat("n", 2000) + `"}`: "256 bytes",
	} {
		code, reply := ask(t, a, "POST", "/clear", body)
		require.Equal(t, http.StatusBadRequest, code, body)
		require.Contains(t, string(reply), says)
	}
	require.True(t, holds("", "p/1"), "what is refused drops nothing")
}
