package server

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/internal/freeport"
	"larder/protocol"
	"larder/sock"
)

// followers returns the members that do not lead, once each knows the leader.
func followers(t *testing.T, servers []*Server, leader *Server) []*Server {
	t.Helper()
	rest := slices.DeleteFunc(slices.Clone(servers), func(s *Server) bool { return s == leader })
	require.Eventually(t, func() bool {
		return !slices.ContainsFunc(rest, func(s *Server) bool { addr, _ := s.leaderAddr(); return addr != leader.Addr() })
	}, 10*time.Second, 5*time.Millisecond)
	return rest
}

// stored opens a session with a member, and registers keys there.
func stored(t *testing.T, s *Server, keys ...string) *wire {
	t.Helper()
	w := dial(t, "tcp", s.Addr())
	w.open("owner")
	a := w.alloc(protocol.AllocRequest{InstanceID: "owner", Size: 4 << 20, PageSize: 4096})
	require.NoError(t, a.Err())
	for _, res := range w.register(a.Region, 0, keys...).Results {
		require.True(t, res.IsNew)
	}
	return w
}

// ask sends a lookup in a header of the test's making, and returns the reply's frame.
func (w *wire) ask(h protocol.Header, payload []byte) frame {
	w.tb.Helper()
	w.write(h, payload)
	return w.receive()
}

func (w *wire) write(h protocol.Header, payload []byte) {
	w.tb.Helper()
	h.Length = uint32(len(payload))
	_, err := w.c.Write(append(h.Append(nil), payload...))
	require.NoError(w.tb, err)
}

func lookupOf(t protocol.Type, req protocol.LookupRequest, keys ...string) []byte {
	for _, k := range keys {
		req.Keys = append(req.Keys, []byte(k))
	}
	return req.AppendAs(nil, t)
}

func TestFollowersGiveTheLeadersAnswersToLookups(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	owner := stored(t, leader, "one", "two")
	direct := dial(t, "tcp", leader.Addr())
	for _, s := range followers(t, servers, leader) {
		f := dial(t, "tcp", s.Addr())
		for name, tc := range map[string]struct {
			typ  protocol.Type
			body []byte
		}{
			"one key":      {protocol.TypeLookup, lookupOf(protocol.TypeLookup, protocol.LookupRequest{}, "one")},
			"a miss":       {protocol.TypeLookup, lookupOf(protocol.TypeLookup, protocol.LookupRequest{}, "none")},
			"a batch":      {protocol.TypeBatchLookup, lookupOf(protocol.TypeBatchLookup, protocol.LookupRequest{}, "one", "none", "two")},
			"an empty one": {protocol.TypeBatchLookup, lookupOf(protocol.TypeBatchLookup, protocol.LookupRequest{})},
			"packed":       {protocol.TypeBatchLookup, lookupOf(protocol.TypeBatchLookup, protocol.LookupRequest{Packed: true}, "two", "one")},
			"until a miss": {protocol.TypeBatchLookup, lookupOf(protocol.TypeBatchLookup, protocol.LookupRequest{StopAtMiss: true}, "one", "none", "two")},
		} {
			t.Run(name, func(t *testing.T) {
				// Maru's other flags mean nothing, and come back.
				h := protocol.Header{Type: tc.typ, Flags: 1 | 4, Sequence: 0xfffffff0}
				want, got := direct.ask(h, tc.body), f.ask(h, tc.body)
				require.Equal(t, want, got)
				require.Equal(t, tc.typ.Reply(), got.h.Type)
			})
		}
		require.Equal(t, uint64(6), s.Counters().Forwarded[forwardAnswered].Load())
		require.Equal(t, uint64(4), s.Counters().Requests[protocol.TypeBatchLookup].Load())
	}
	t.Run("leases are released through a follower", func(t *testing.T) {
		f := dial(t, "tcp", followers(t, servers, leader)[0].Addr())
		lease := owner.lookup(0, "one").Results[0].Lease
		require.NotZero(t, lease)
		before := leader.Counters().LeasesReleased.Load()
		req := protocol.LookupRequest{Release: []uint64{lease}}
		f.ask(protocol.Header{Type: protocol.TypeLookup, Sequence: 1}, lookupOf(protocol.TypeLookup, req, "none"))
		require.Equal(t, before+1, leader.Counters().LeasesReleased.Load())
	})
}

func TestWhatAFollowerDoesNotForward(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	stored(t, leader, "k")
	s := followers(t, servers, leader)[0]
	code := func(f frame) protocol.Code {
		var reply protocol.HeartbeatReply
		require.NoError(t, reply.Decode(f.b))
		return reply.Code
	}
	body := lookupOf(protocol.TypeLookup, protocol.LookupRequest{}, "k")
	h := protocol.Header{Type: protocol.TypeLookup, Sequence: 7}

	forwarded := h
	forwarded.Flags = protocol.FlagForwarded
	require.Equal(t, protocol.CodeNotLeader, code(dial(t, "tcp", s.Addr()).ask(forwarded, body)), "what has been forwarded before")
	require.Equal(t, protocol.CodeOK, code(dial(t, "tcp", leader.Addr()).ask(forwarded, body)))

	native := dial(t, "tcp", s.Addr())
	require.Equal(t, protocol.CodeNotLeader, native.handshake(protocol.HandshakeRequest{InstanceID: "n", Tenant: "other"}).Code)
	require.Equal(t, protocol.CodeNotLeader, code(native.ask(h, body)), "what a client with a session of its own asks")

	bad := dial(t, "tcp", s.Addr())
	require.Equal(t, protocol.CodeBadRequest, code(bad.ask(h, []byte{0xc1})), "what is malformed")
	require.Equal(t, protocol.CodeOK, code(bad.ask(h, body)), "and that costs only itself")
	require.Equal(t, protocol.CodeNotLeader, code(bad.ask(protocol.Header{Type: protocol.TypeDelete, Sequence: 8},
		(&protocol.KeysRequest{Keys: [][]byte{[]byte("k")}}).AppendAs(nil, protocol.TypeDelete))), "what changes state")
	require.Equal(t, uint64(1), s.Counters().Forwarded[forwardAnswered].Load())
}

func TestForwardedLookupsSurviveLeaders(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	stored(t, leader, "k")
	rest := followers(t, servers, leader)
	conns := []*wire{dial(t, "tcp", rest[0].Addr()), dial(t, "tcp", rest[1].Addr())}
	for _, f := range conns {
		require.True(t, f.lookup(0, "k").Results[0].Found)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, leader.Stop(ctx))
	for _, f := range conns { // the same connections: one of them leads to the new leader now
		require.Eventually(t, func() bool {
			reply := f.lookup(0, "k")
			require.True(t, reply.Code == protocol.CodeOK || reply.Code.Retryable(), "%v", reply.Error)
			return reply.Code == protocol.CodeOK && reply.Results[0].Found
		}, 20*time.Second, 5*time.Millisecond)
	}
	next := leaderOf(t, rest)
	last := followers(t, rest, next)[0]
	require.NoError(t, next.Stop(ctx))
	f := conns[slices.Index(rest, last)]
	require.Eventually(t, func() bool { // a member alone knows no leader, and says so at once
		reply := f.lookup(0, "k")
		require.NotEqual(t, protocol.CodeOK, reply.Code)
		require.True(t, reply.Code.Retryable(), "%v", reply.Error)
		return last.Counters().Forwarded[forwardNoLeader].Load() > 0
	}, 20*time.Second, 5*time.Millisecond)
}

func TestAClientOfAFollowerThatDoesNotReadCostsOnlyItself(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	stored(t, leader, "k")
	s := followers(t, servers, leader)[0]
	s.net.forwarder.timeout = 20 * time.Second // not what is tested: a busy host takes its time
	// More replies than may wait for a connection: they can only all arrive if requests were left in the socket.
	const requests, keys = 400, 1000
	require.Greater(t, requests*keys*protocol.PackedSize, hardOutput)
	body := lookupOf(protocol.TypeBatchLookup, protocol.LookupRequest{Packed: true}, slices.Repeat([]string{"k"}, keys)...)
	slow := dial(t, "tcp", s.Addr())
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for seq := range uint32(requests) {
			h := protocol.Header{Type: protocol.TypeBatchLookup, Sequence: seq + 1, Length: uint32(len(body))}
			if _, err := slow.c.Write(append(h.Append(nil), body...)); err != nil {
				return
			}
		}
	})
	answered := &s.Counters().Forwarded[forwardAnswered]
	for was := uint64(0); ; was = answered.Load() { // until it comes to rest
		time.Sleep(200 * time.Millisecond)
		if n := answered.Load(); n > 0 && n == was {
			break
		}
	}
	require.Less(t, answered.Load(), uint64(requests))
	other := dial(t, "tcp", s.Addr())
	for range 10 {
		require.True(t, other.lookup(0, "k").Results[0].Found)
	}
	for seq := range uint32(requests) {
		f := slow.receive()
		var reply protocol.LookupReply
		require.NoError(t, reply.DecodeAs(f.b, protocol.TypeBatchLookup))
		require.NoError(t, reply.Err())
		require.Equal(t, seq+1, f.h.Sequence)
		require.Len(t, reply.Results, keys)
	}
	require.Zero(t, s.Counters().ConnectionsDropped.Load())
}

// leadElsewhere makes a member believe that somebody at addr leads.
func leadElsewhere(s *Server, addr string) {
	s.master.OnLeadership(false, 0)
	f := s.net.forwarder
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leader = func() (uint64, bool) { return 99, false }
	f.address = func() (string, uint64) { return addr, 99 }
}

func TestALeaderThatMisbehavesCostsALookupAnElectionTimeoutAtMost(t *testing.T) {
	for name, tc := range map[string]struct {
		does    func(c net.Conn, r *protocol.Reader)
		outcome int
	}{
		"never answers": {func(_ net.Conn, r *protocol.Reader) { _, _, _ = r.Next(); _, _, _ = r.Next() }, forwardTimeout},
		"hangs up":      {func(_ net.Conn, r *protocol.Reader) { _, _, _ = r.Next() }, forwardLost},
		"answers what it was not asked": {func(c net.Conn, r *protocol.Reader) {
			h, _, _ := r.Next()
			b, mark := protocol.BeginReply(nil, protocol.Header{Type: h.Type, Sequence: h.Sequence + 1})
			_, _ = c.Write(protocol.EndFrame(protocol.AppendEmpty(b), mark))
			_, _, _ = r.Next()
		}, forwardLost},
		"answers something else": {func(c net.Conn, r *protocol.Reader) {
			h, _, _ := r.Next()
			b, mark := protocol.BeginReply(nil, protocol.Header{Type: protocol.TypeExists, Sequence: h.Sequence})
			_, _ = c.Write(protocol.EndFrame(protocol.AppendEmpty(b), mark))
			_, _, _ = r.Next()
		}, forwardLost},
		"is full": {func(c net.Conn, _ *protocol.Reader) {
			b, mark := protocol.BeginFrame(nil, protocol.ReplyBit, 0)
			_, _ = c.Write(protocol.EndFrame(protocol.AppendErrorReply(b, &protocol.Error{Code: protocol.CodeBusy}), mark))
		}, forwardLost},
		"does not lead either": {func(c net.Conn, r *protocol.Reader) {
			for h, _, err := r.Next(); err == nil; h, _, err = r.Next() {
				b, mark := protocol.BeginReply(nil, h)
				e := protocol.Error{Code: protocol.CodeNotLeader, Message: "no", Leader: "other:1"}
				_, _ = c.Write(protocol.EndFrame(protocol.AppendErrorReply(b, &e), mark))
			}
		}, forwardRefused},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, testConfig(t))
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					wg.Go(func() {
						tc.does(c, protocol.NewReader(c))
						_ = c.Close()
					})
				}
			})
			defer wg.Wait()
			defer func() { _ = l.Close() }()
			leadElsewhere(s, l.Addr().String())
			w := dial(t, "tcp", s.Addr())
			for n := range uint64(3) { // each time over a new connection where the old one broke
				reply := w.lookup(0, "k")
				require.True(t, reply.Code.Retryable(), "%v", reply.Error)
				require.Equal(t, n+1, s.Counters().Forwarded[tc.outcome].Load())
			}
			require.Equal(t, uint64(3), s.Counters().Errors[protocol.TypeBatchLookup].Load())
			s.net.forwarder.stop()
		})
	}
}

func TestALeaderThatCannotBeReachedIsAskedAgain(t *testing.T) {
	s := startServer(t, testConfig(t))
	leadElsewhere(s, freeport.For(t))
	w := dial(t, "tcp", s.Addr())
	for n := range uint64(3) {
		reply := w.lookup(0, "k")
		require.Equal(t, protocol.CodeUnavailable, reply.Code)
		require.NotZero(t, reply.RetryAfterMS)
		require.Equal(t, n+1, s.Counters().Forwarded[forwardLost].Load())
	}
}

func TestLookupsBeyondTheBoundsAreTurnedAway(t *testing.T) {
	s := startServer(t, testConfig(t))
	leadElsewhere(s, "192.0.2.1:1") // answers nobody
	c := newConn(s.net, nil)
	c.closed = true
	l := &leaderLink{f: s.net.forwarder, wake: make(chan struct{}, 1), first: ^uint32(0) - 5}
	p := forwarded{c: c, h: protocol.Header{Type: protocol.TypeLookup}}
	for range maxForwarded {
		fault, ok := l.add(p, nil)
		require.True(t, ok)
		require.Nil(t, fault)
	}
	fault, ok := l.add(p, nil)
	require.True(t, ok)
	require.Equal(t, protocol.CodeBusy, fault.Code)

	// Replies in another order, across the end of the sequence numbers.
	reply := func(i uint32) bool {
		_, ok := l.take(protocol.Header{Type: p.h.Type.Reply(), Sequence: ^uint32(0) - 5 + i})
		return ok
	}
	for i := range uint32(10) {
		require.True(t, reply(i^1))
		require.False(t, reply(i^1), "it is answered once")
	}
	require.Len(t, l.pending, maxForwarded-10)

	l = &leaderLink{f: s.net.forwarder, wake: make(chan struct{}, 1)}
	for range maxForwardBytes / protocol.MaxPayload {
		fault, ok = l.add(p, make([]byte, protocol.MaxPayload-protocol.HeaderSize))
		require.True(t, ok)
		require.Nil(t, fault)
	}
	fault, _ = l.add(p, make([]byte, 1))
	require.Equal(t, protocol.CodeBusy, fault.Code)
	l.dead = true
	_, ok = l.add(p, nil)
	require.False(t, ok)
}

// TestAReaderThatWaitsIsWokenWhenTheSocketTakesEverything: answers of the leader are appended by another goroutine than
// the client's own, which may see how many wait just before all of them are sent at once.
func TestAReaderThatWaitsIsWokenWhenTheSocketTakesEverything(t *testing.T) {
	s := startServer(t, testConfig(t))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	w := dial(t, "tcp", l.Addr().String())
	nc, err := l.Accept()
	require.NoError(t, err)
	sc, err := sock.New(nc)
	require.NoError(t, err)
	c := newConn(s.net, sc)
	defer c.shut()
	c.Unlock(append(c.Lock(), make([]byte, softOutput+1)...))
	wait := c.backlog()
	require.NotNil(t, wait)
	c.mu.Lock()
	c.out = c.out[:1] // as if the socket had room for the rest
	c.mu.Unlock()
	c.Flush()
	select {
	case <-wait:
	default:
		require.Fail(t, "the client would never be served again")
	}
	require.NoError(t, w.c.Close())
}

// BenchmarkForward measures lookups through a follower, one by one and pipelined.
func BenchmarkForward(b *testing.B) {
	s := startServer(b, testConfig(b))
	fill(b, s, 1000)
	front := startServer(b, testConfig(b))
	leadElsewhere(front, s.Addr())
	asked := uint64(0)
	for _, window := range []int{1, 64} {
		b.Run(fmt.Sprintf("window=%d", window), func(b *testing.B) {
			w := dial(b, "tcp", front.Addr())
			h := protocol.Header{Type: protocol.TypeLookup}
			body := lookupOf(h.Type, protocol.LookupRequest{}, benchKey(7))
			h.Length = uint32(len(body))
			frames := slices.Repeat(append(h.Append(nil), body...), window)
			b.ReportAllocs()
			for b.Loop() {
				asked += uint64(window)
				_, err := w.c.Write(frames)
				require.NoError(b, err)
				for range window {
					_, _, err := w.r.Next()
					require.NoError(b, err)
				}
			}
			answered := front.Counters().Forwarded[forwardAnswered].Load()
			require.Equal(b, asked, answered, "nothing is given up")
			b.ReportMetric(float64(b.N*window)/b.Elapsed().Seconds(), "lookups/s")
		})
	}
}
