package cmd

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

func TestTransferEndpoints(t *testing.T) {
	at := target(t, "--size", "1MiB", "--token", "t", "--nics", "none")
	var out, failed bytes.Buffer
	require.Equal(t, exitDone, run(t.Context(), []string{"transfer", "endpoints", at, "--token", "t"}, &out, &failed), failed.String())
	require.Equal(t, "The engine uses no NIC.\n", out.String())
	out.Reset()
	require.Equal(t, exitDone, run(t.Context(), []string{"transfer", "endpoints", at, "--token", "t", "--json"}, &out, &failed))
	var all []transfer.EndpointStats
	require.NoError(t, json.Unmarshal(out.Bytes(), &all))
	require.Empty(t, all)
	require.Equal(t, exitFailed, run(t.Context(), []string{"transfer", "endpoints", "127.0.0.1:1"}, io.Discard, &failed))
	require.Contains(t, failed.String(), "connection refused")
}

// TestEndpointsTable: a NIC that leaks, or is down, is told in words.
func TestEndpointsTable(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, printEndpoints(&out, []transfer.EndpointStats{
		{
			NIC: "mlx5_0", State: "active", QPs: 20, QPBudget: 96, QPLimit: 96, QPsPerEP: 2, Endpoints: 7, MaxEndpoints: 16, Served: 3,
			MaxServed: 16, Connecting: 1, Evictions: 5, Yields: 4, Recalls: 9, Deletions: 2, CreationsFailed: 1, LastReclaimSeconds: 0.25,
		},
		{
			NIC: "mlx5_1", State: "fenced", Why: "a retired queue pair does not drain", QPs: 22000, QPBudget: 24000, QPLimit: 22000, Waiting: 80,
			Parked: 1, Outstanding: 44, WaitingOldestSeconds: 61, LastReclaimSeconds: 9, Blocked: 3,
		},
	}))
	text := out.String()
	require.Regexp(t, `(?m)^NIC +STATE +QUEUE PAIRS +LIMIT +ENDPOINTS +SERVED +CONNECTING +EVICTED +YIELDED +RECALLED +DELETED +FAILED +WAITING +OLDEST +LAST RECLAIM$`, text)
	require.Regexp(t, `(?m)^mlx5_0 +active +20 +96 +7/16 +3/16 +1 +5 +4 +9 +2 +1 +0 +0.0 s +0.2 s$`, text)
	require.Regexp(t, `(?m)^mlx5_1 +fenced +22000 +22000 .* 81 +61.0 s +9.0 s$`, text)
	for _, note := range []string{
		"it is fenced: a retired queue pair does not drain", "81 retired endpoints are not destroyed, with 44 work requests",
		"its monitor hangs", "22000 queue pairs of the 24000", "3 peers wait for room",
	} {
		require.Contains(t, text, note)
	}
	require.NotContains(t, text, "\nmlx5_0: ")
}

// TestTransferMetrics: a target's NICs are scraped; without RDMA in the program one that is named is an error.
func TestTransferMetrics(t *testing.T) {
	engine, err := transfer.New(transfer.Config{})
	require.NoError(t, err)
	defer func() { require.NoError(t, engine.Close()) }()
	at, stop, err := serveMetrics("127.0.0.1:0", engine)
	require.NoError(t, err)
	for path, want := range map[string]int{"/metrics": http.StatusOK, "/": http.StatusNotFound} {
		r, err := http.Get("http://" + at + path)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		require.Equal(t, want, r.StatusCode)
	}
	http.DefaultClient.CloseIdleConnections()
	require.NoError(t, stop())
	_, _, err = serveMetrics("256.0.0.1:0", engine)
	require.Error(t, err)
	var failed bytes.Buffer
	require.NotEqual(t, exitDone, run(t.Context(), []string{"transfer", "target", "--nics", "no-such"}, io.Discard, &failed))
	require.Contains(t, failed.String(), "no-such")
}
