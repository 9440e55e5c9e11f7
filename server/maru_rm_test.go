package server

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/maru/rm"
	"larder/protocol"
)

// withRM makes a member a resource manager.
func withRM(cfg *Config) { cfg.MaruRM = "127.0.0.1:0" }

func dialRM(t *testing.T, s *Server, id string) *rm.Client {
	t.Helper()
	c, err := rm.Dial(t.Context(), s.maruRM.Addr().String(), id)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// requireRefused: a request is answered with a status.
func requireRefused(t *testing.T, want rm.Status, err error) {
	t.Helper()
	var status *rm.StatusError
	require.ErrorAs(t, err, &status)
	require.Equal(t, want, status.Status)
}

func TestRegionsOfTheResourceManager(t *testing.T) {
	cfg := testConfig(t)
	withRM(&cfg)
	s := startServer(t, cfg)
	ctx := t.Context()
	owner, other := dialRM(t, s, "host:1"), dialRM(t, s, "host:2")
	path := cfg.Pool[0].Path

	before, err := owner.Pools(ctx)
	require.NoError(t, err)
	require.Equal(t, []rm.Pool{{Path: path, File: true, Total: 64<<20 - cxl.HeaderSpan, Free: 64<<20 - cxl.HeaderSpan, Align: 2 << 20}}, before)

	r, err := owner.Alloc(ctx, 3_000_000, "")
	require.NoError(t, err)
	require.Equal(t, path, r.Path)
	require.EqualValues(t, 4<<20, r.Length, "sizes are rounded up to 2 MiB")
	require.Zero(t, r.Offset%4096, "it is where the file is mapped")
	require.GreaterOrEqual(t, r.Offset, uint64(cxl.HeaderSpan))
	require.NotZero(t, r.Token)
	seen, err := other.Access(ctx, r.Handle)
	require.NoError(t, err)
	require.Equal(t, r, seen)
	after, err := other.Pools(ctx)
	require.NoError(t, err)
	require.Equal(t, before[0].Free-r.Length, after[0].Free)

	for name, change := range map[string]func(h *rm.Handle){
		"token": func(h *rm.Handle) { h.Token++ }, "no token": func(h *rm.Handle) { h.Token = 0 },
		"offset": func(h *rm.Handle) { h.Offset -= 4096 }, "length": func(h *rm.Handle) { h.Length *= 2 },
	} {
		forged := r.Handle
		change(&forged)
		var refused *rm.Error
		_, err := other.Access(ctx, forged)
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, rm.StatusToken, refused.Status, name)
		require.ErrorAs(t, owner.Free(ctx, forged), &refused, name)
	}

	second, err := other.Alloc(ctx, 1, path)
	require.NoError(t, err)
	requireRefused(t, rm.StatusOwner, owner.Free(ctx, second.Handle))
	_, err = other.Alloc(ctx, 1, "/dev/dax9.9")
	requireRefused(t, rm.StatusNotFound, err)
	_, err = other.Alloc(ctx, 1<<40, "")
	requireRefused(t, rm.StatusNoRoom, err)

	require.NoError(t, owner.Free(ctx, r.Handle))
	requireRefused(t, rm.StatusNotFound, owner.Free(ctx, r.Handle))
	_, err = other.Access(ctx, r.Handle)
	requireRefused(t, rm.StatusNotFound, err)
}

func TestHandlesOutliveTheServer(t *testing.T) {
	cfg := testConfig(t)
	withRM(&cfg)
	s, err := Start(cfg, testLogger(t))
	require.NoError(t, err)
	r, err := dialRM(t, s, "host:1").Alloc(t.Context(), 1, "")
	require.NoError(t, err)
	f, err := os.OpenFile(r.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("kept"), int64(r.Offset))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, s.Stop(t.Context()))

	s = startServer(t, cfg)
	same, err := dialRM(t, s, "host:2").Access(t.Context(), r.Handle)
	require.NoError(t, err)
	require.Equal(t, r, same)
	require.NoError(t, dialRM(t, s, "host:1").Free(t.Context(), r.Handle), "it is still its owner's")
}

// Any member gives regions and knows those of the others, also after the leader has gone.
func TestEveryMemberIsAResourceManager(t *testing.T) {
	servers := startCluster(t, withRM)
	ctx := t.Context()
	var regions []rm.Region
	for _, s := range servers {
		r, err := dialRM(t, s, "host:1").Alloc(ctx, 1, "")
		require.NoError(t, err)
		regions = append(regions, r)
	}
	known := func(servers []*Server) {
		t.Helper()
		for _, s := range servers {
			c := dialRM(t, s, "host:2") //nolint:contextcheck // the test's own
			for _, r := range regions {
				same, err := c.Access(ctx, r.Handle)
				require.NoError(t, err)
				require.Equal(t, r, same)
			}
		}
	}
	known(servers)

	leader := leaderOf(t, servers)
	stop, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	require.NoError(t, leader.Stop(stop))
	var rest []*Server
	for _, s := range servers {
		if s != leader {
			rest = append(rest, s)
		}
	}
	known(rest)
	for i, s := range rest {
		require.NoError(t, dialRM(t, s, "host:1").Free(ctx, regions[i].Handle))
	}
}

func TestHandshakeNamesTheResourceManager(t *testing.T) {
	cfg := testConfig(t)
	cfg.MaruRM, cfg.MaruRMAdvertise = "127.0.0.1:0", "10.0.0.1:9850"
	w := dial(t, "tcp", startServer(t, cfg).Addr())
	var reply protocol.HandshakeReply
	require.NoError(t, reply.Decode(w.call(protocol.TypeHandshake, []byte{0x80})))
	require.Equal(t, "10.0.0.1:9850", reply.RMAddress)
}

func TestMetricsOfTheResourceManager(t *testing.T) {
	s, a := startAdminTest(t, withRM)
	c := dialRM(t, s, "host:1")
	_, err := c.Access(t.Context(), rm.Handle{Region: 99})
	requireRefused(t, rm.StatusNotFound, err)
	_, body := ask(t, a, "GET", "/metrics", "")
	require.Contains(t, string(body), "larder_maru_rm_requests_total{type=\"GET_ACCESS\"} 1\n")
	require.Contains(t, string(body), "larder_maru_rm_clients 1\n")
}
