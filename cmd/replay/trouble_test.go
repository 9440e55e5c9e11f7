package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/internal/freeport"
	"larder/protocol"
	"larder/server"
)

// startCluster starts three members, and returns them once one of them leads.
func startCluster(t *testing.T, pages int) []*server.Server {
	t.Helper()
	base := poolConfig(t, pages, nil)
	for id := range uint64(3) {
		base.Peers = append(base.Peers, server.PeerConfig{ID: id + 1, Addr: freeport.For(t), Client: freeport.For(t), Admin: "127.0.0.1:1"})
	}
	members := make([]*server.Server, 0, len(base.Peers))
	for i, p := range base.Peers {
		cfg := base
		cfg.NodeID, cfg.DataDir, cfg.Socket = p.ID, t.TempDir(), base.Socket+strconv.Itoa(i)
		cfg.Listen, cfg.PeerListen = p.Client, p.Addr
		members = append(members, startMember(t, cfg))
	}
	leading(t, members)
	return members
}

// leading waits for a member that leads with its device in service.
func leading(t *testing.T, members []*server.Server) (leader *server.Server) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, m := range members {
			if m.Status().Serving && m.Ready() == nil {
				leader = m
				return true
			}
		}
		return false
	}, 20*time.Second, 5*time.Millisecond)
	return leader
}

func TestWhatTheClientsMendIsReported(t *testing.T) {
	members := startCluster(t, 512)
	leader := leading(t, members)
	const requests = 400 // for longer than a leader change takes
	trace := make([]Request, 0, requests)
	for i := range requests {
		id := uint64(i)
		trace = append(trace, Request{Timestamp: float64(i) * 10, HashIDs: []uint64{id, id % 64}})
	}
	addrs := make([]string, 0, len(members))
	for _, m := range members {
		addrs = append(addrs, m.Addr())
	}
	cfg := config("", trace)
	cfg.Addrs, cfg.Speed, cfg.Clients = addrs, 1, 2
	var progress bytes.Buffer
	cfg.Progress, cfg.Terminal = &progress, true
	var rep *Report
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { rep, err = Run(t.Context(), cfg) })
	lookups := &leader.Counters().Requests[protocol.TypeBatchLookup]
	require.Eventually(t, func() bool { return lookups.Load() > 20 }, 20*time.Second, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	moved := leader.TransferLeadership(ctx, 0)
	wg.Wait()
	require.NoError(t, moved)
	require.NoError(t, err)
	require.Zero(t, rep.Failures)
	require.Equal(t, len(trace), rep.Requests)
	require.NotZero(t, rep.Retries, "the former leader has refused something")
	require.GreaterOrEqual(t, rep.Retries, rep.Client.Retries+rep.Client.Restarts)
	require.NotZero(t, rep.LeaderChanges)
	require.LessOrEqual(t, rep.LeaderChanges, rep.Reconnects, "two clients have lost each of them")

	var table, raw bytes.Buffer
	require.NoError(t, rep.WriteTable(&table))
	require.Regexp(t, `(?m)^retries +`+strconv.FormatUint(rep.Retries, 10)+`$`, table.String())
	require.Regexp(t, `(?m)^leader changes survived +`+strconv.FormatUint(rep.LeaderChanges, 10)+
		`, connections lost `+strconv.FormatUint(rep.Reconnects, 10)+`$`, table.String())
	require.NoError(t, rep.WriteJSON(&raw))
	var fields map[string]any
	require.NoError(t, json.Unmarshal(raw.Bytes(), &fields))
	for name, want := range map[string]uint64{
		"retries": rep.Retries, "reconnects": rep.Reconnects, "leader_changes": rep.LeaderChanges,
	} {
		require.EqualValues(t, want, fields[name], name)
	}
	require.Regexp(t, `retries [1-9]\d*  leader changes [1-9]`, progress.String(), "the line says so while it runs")
}
