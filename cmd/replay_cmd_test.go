package cmd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/cmd/replay"
	"larder/protocol"
	"larder/server"
)

// TestReplayLeavesNothingBehind: its server has its data where larder serve would, not among the temporary files, and
// what a killed run has left there goes too. A socket's path may be shorter than the directory's.
func TestReplayLeavesNothingBehind(t *testing.T) {
	state := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	t.Setenv("XDG_STATE_HOME", state)
	t.Setenv("TMPDIR", "/nowhere")
	left := filepath.Join(state, "larder", "larder-replay-killed"+filepath.Base(t.TempDir()))
	require.NoError(t, os.MkdirAll(left, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(left, ".larder-replay"), nil, 0o600)) // it was a run's own
	require.NoError(t, os.WriteFile(poolFile(left, true), nil, 0o600))
	code, _, stderr := larder(t.Context(), "replay", "--requests", "5", "--page", "4KiB", "--pages", "8192", "--quiet", "--json")
	require.Equal(t, exitDone, code, stderr)
	entries, err := os.ReadDir(filepath.Dir(left))
	require.NoError(t, err)
	require.Empty(t, entries)
	require.NoFileExists(t, poolFile(left, true))
}

// TestReplayAsksTheAdminsThatTheMembersName for the evictions of the pool, since it was told none.
func TestReplayAsksTheAdminsThatTheMembersName(t *testing.T) {
	c := startCluster(t)
	addr := c.flags[3]
	args := []string{"replay", "--addr", addr, "--requests", "600", "--page", "4KiB", "--region", "1MiB", "--quiet"}
	code, stdout, stderr := larder(t.Context(), append(args, "--json")...)
	require.Equal(t, exitDone, code, stderr)
	var report replay.Report
	require.NoError(t, json.Unmarshal([]byte(stdout), &report))
	require.Equal(t, "pool", report.EvictionsOf)
	require.NotZero(t, report.Evictions[1])
	require.Equal(t, report.Client.Evicted, report.Evictions[1], "there was no other client")
	code, stdout, stderr = larder(t.Context(), append(args, "--admin", "127.0.0.1:1")...)
	require.Equal(t, exitFailed, code, stdout)
	require.Contains(t, stderr, "no member answers", "what was named must answer")
}

// TestAnAdminOfAnotherClusterIsNotBelieved: the default address of an admin is the same on every host.
func TestAnAdminOfAnotherClusterIsNotBelieved(t *testing.T) {
	members := []protocol.Member{{ID: 1, Addr: "a:7400"}, {ID: 2, Addr: "b:7400"}}
	of := func(all ...server.MemberStatus) *server.StatusReply {
		s := &server.StatusReply{}
		s.Members = all
		return s
	}
	require.True(t, sameMembers(of(server.MemberStatus{ID: 2, Client: "b:7400"}), members))
	require.False(t, sameMembers(of(server.MemberStatus{ID: 1, Client: "c:7400"}), members))
	require.False(t, sameMembers(of(server.MemberStatus{ID: 3, Client: "a:7400"}), members))
	require.False(t, sameMembers(of(), members))
	_, err := (&replayCmd{}).evictions(t.Context(), members)
	require.ErrorIs(t, err, replay.ErrUntold, "these have no admin")
}
