package store_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/internal/freeport"
	"larder/pg/store"
	"larder/server"
)

// shm makes a directory in memory that the end of the test removes.
func shm(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-store-")
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, os.RemoveAll(dir)) })
	return dir
}

// masterConfig is that of a master of its own, on free ports.
func masterConfig(tb testing.TB) server.Config {
	tb.Helper()
	dir := shm(tb)
	cfg := server.Default()
	cfg.DataDir = filepath.Join(dir, "data")
	cfg.Listen, cfg.PeerListen, cfg.AdminListen, cfg.Socket = "127.0.0.1:0", "127.0.0.1:0", server.Off, filepath.Join(dir, "s")
	cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: 8 << 20}}
	cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	cfg.MinFreeDisk = 1 << 20
	return cfg
}

func startServer(tb testing.TB, cfg server.Config) *server.Server {
	tb.Helper()
	s, err := server.Start(cfg, nil)
	require.NoError(tb, err)
	tb.Cleanup(func() { stopServer(tb, s) })
	return s
}

func stopServer(tb testing.TB, s *server.Server) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	require.NoError(tb, s.Stop(ctx))
}

func startMaster(tb testing.TB) *server.Server {
	tb.Helper()
	return startServer(tb, masterConfig(tb))
}

// startMasters starts three members of a cluster.
func startMasters(t *testing.T) (members []*server.Server, addrs []string) {
	t.Helper()
	peers := make([]server.PeerConfig, 3)
	for i := range peers {
		peers[i] = server.PeerConfig{ID: uint64(i) + 1, Addr: freeport.For(t), Client: freeport.For(t), Admin: "127.0.0.1:1"}
	}
	base := masterConfig(t)
	for _, p := range peers {
		cfg := base
		cfg.NodeID, cfg.Peers, cfg.DataDir = p.ID, peers, fmt.Sprint(base.DataDir, p.ID)
		cfg.Listen, cfg.PeerListen, cfg.Socket = p.Client, p.Addr, fmt.Sprint(base.Socket, p.ID)
		members = append(members, startServer(t, cfg))
		addrs = append(addrs, p.Client)
	}
	return members, addrs
}

func TestMastersSurviveTheirLeader(t *testing.T) {
	t.Parallel()
	members, addrs := startMasters(t)
	url := "masters://" + addrs[0] + "," + addrs[1] + "," + addrs[2]
	b := &backend{lease: 5 * time.Second} // longer than three new members may take for their first writes
	s, other := b.open(t, url), b.open(t, url)
	lost := s.Lost()
	mine, err := s.Put(t.Context(), "m/mine", []byte("v"), store.Leased())
	require.NoError(t, err)
	w := watch(t, other, "m/")
	w.sees(t, s, "m/", 5*time.Second)

	c, err := client.Open(t.Context(), client.Config{Addrs: addrs})
	require.NoError(t, err)
	leader := c.Leader()
	_ = c.Close(t.Context())
	for i, m := range members {
		if addrs[i] == leader {
			stopServer(t, m)
		}
	}
	_, err = other.Put(t.Context(), "m/other", []byte("v"))
	require.NoError(t, err)
	w.sees(t, s, "m/", 5*time.Second)
	time.Sleep(b.lease)
	got, err := other.Get(t.Context(), "m/mine")
	require.NoError(t, err)
	require.Equal(t, mine, got, "a leased entry is still there")
	select {
	case <-lost:
		require.Fail(t, "the lease is lost")
	default:
	}
	require.NoError(t, s.Close())
	w.sees(t, other, "m/", 5*time.Second)
	require.Equal(t, 1, w.count())
}

// A master that is away for longer than the lease gives it its full time when it is back: nothing is lost.
func TestMastersThatWereAway(t *testing.T) {
	t.Parallel()
	cfg := masterConfig(t)
	m := startServer(t, cfg)
	cfg.Listen = m.Addr()
	b := &backend{lease: time.Second}
	s := b.open(t, "masters://"+m.Addr())
	lost := s.Lost()
	_, err := s.Put(t.Context(), "k", []byte("v"), store.Leased())
	require.NoError(t, err)
	w := watch(t, s, "")
	w.sees(t, s, "", 5*time.Second)
	stopServer(t, m)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Put(ctx, "k", nil)
	var gone *store.UnavailableError
	require.ErrorAs(t, err, &gone)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, "masters://"+m.Addr(), gone.Where)
	require.Eventually(t, func() bool { return s.Confirmed() > b.lease }, 5*time.Second, time.Millisecond)
	startServer(t, cfg)
	_, err = s.Put(t.Context(), "k2", []byte("v"))
	require.NoError(t, err)
	w.sees(t, s, "", 5*time.Second)
	require.Less(t, s.Confirmed(), b.lease)
	select {
	case <-lost:
		require.Fail(t, "the lease is lost")
	default:
	}
	require.NoError(t, s.Close()) // while the master is there
}

func TestMastersOfAnotherTenantOrPrefix(t *testing.T) {
	t.Parallel()
	m := startMaster(t)
	b := &backend{lease: time.Second}
	at := "masters://" + m.Addr()
	s := b.open(t, at)
	_, err := s.Put(t.Context(), "k", nil)
	require.NoError(t, err)
	for url, want := range map[string]int{at: 1, at + "?prefix=pg/": 1, at + "?prefix=": 1, at + "?prefix=x/": 0, at + "?tenant=t": 0} {
		list, _, err := b.open(t, url).List(t.Context(), "")
		require.NoError(t, err)
		require.Len(t, list, want, url)
	}
}
