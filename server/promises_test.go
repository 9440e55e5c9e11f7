package server

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/protocol"
	"larder/sock"
)

// connOf returns the server's end of a client's connection.
func connOf(t *testing.T, s *Server) *conn {
	t.Helper()
	var found *conn
	require.Eventually(t, func() bool {
		s.net.mu.Lock()
		defer s.net.mu.Unlock()
		for c := range s.net.conns {
			found = c
		}
		return found != nil
	}, 10*time.Second, time.Millisecond)
	return found
}

// TestRepliesFromBeforeAPauseAreThrownAway: a leader that was stopped between reading its state and answering looks at
// the clock again, and tells its clients to retry.
func TestRepliesFromBeforeAPauseAreThrownAway(t *testing.T) {
	for name, c := range map[string]struct {
		clock int64 // of the reader, beside a confirmation of now
		code  protocol.Code
	}{
		"in time":     {0, protocol.CodeOK},
		"after pause": {1 << 62, protocol.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, testConfig(t))
			w := dial(t, "unix", s.Config().Socket)
			w.open("a")
			other := connOf(t, s)
			r := newRig(t) // a leader whose clock the test moves, over the node of a other one
			net := &network{cfg: other.s.cfg, master: r.m, node: other.s.node, counters: other.s.counters, logger: other.s.logger, ctx: other.ctx}
			own, err := sock.New(other.c.Conn) // what is written into is one goroutine's, and other may not be done with its last reply
			require.NoError(t, err)
			x := newConn(net, own)
			r.clock.now = c.clock
			h := protocol.Header{Type: protocol.TypeHeartbeat, Sequence: 77}
			b, mark := protocol.BeginReply(nil, h)
			x.settle(protocol.EndFrame(protocol.AppendEmpty(b), mark), r.m.Term())
			net.wg.Wait()
			f := w.receive()
			require.EqualValues(t, 77, f.h.Sequence)
			var reply protocol.HeartbeatReply
			require.NoError(t, reply.Decode(f.b))
			require.Equal(t, c.code, reply.Code)
		})
	}
}

// TestALateReleaseEndsNobodyElsesLease: a lease is named by its era too, so that the release of one that has run out
// does not end that of who came after.
func TestALateReleaseEndsNobodyElsesLease(t *testing.T) {
	l := &leases{}
	l.reset(5, 0)
	early := l.grant(3, 1, 100, 200)
	late := l.grant(3, 1, 300, 400)
	require.NotEqual(t, early, late)
	require.False(t, l.release(early, 310))
	g := guard{l: l, now: 310}
	require.True(t, g.Leased(3), "the later holder still reads")
	require.False(t, l.renew(early, 1, 310, 500))
	require.True(t, l.release(late, 310))
	require.False(t, g.Leased(3))
}

// TestADeviceThatIsNotWhatItWasIsRetired: while no server ran somebody gave the device another generation. Its bytes may
// be gone, so that nothing of them is served.
func TestADeviceThatIsNotWhatItWasIsRetired(t *testing.T) {
	cfg := testConfig(t)
	run := func(use func(w *wire)) {
		s, err := Start(cfg, testLogger(t))
		require.NoError(t, err)
		use(dial(t, "unix", s.Config().Socket))
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, s.Stop(ctx))
	}
	run(func(w *wire) {
		w.open("a")
		a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
		require.NoError(t, a.Err())
		require.True(t, w.register(a.Region, 0, "k").Results[0].IsNew)
	})
	found := func(want bool) func(w *wire) {
		return func(w *wire) {
			w.open(fmt.Sprint("reader ", want))
			require.Equal(t, want, w.lookup(0, "k").Results[0].Found)
		}
	}
	run(found(true))
	dev, err := cxl.Open(cfg.Pool[0].Path, cxl.Expect{Claim: true})
	require.NoError(t, err)
	require.NoError(t, dev.SetGeneration(dev.Generation()+2, dev.Header().Incarnation))
	require.NoError(t, dev.Close())
	run(found(false))
}
