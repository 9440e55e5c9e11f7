package cxl

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHostIdentity(t *testing.T) {
	boot, err := BootID()
	require.NoError(t, err)
	require.NotZero(t, boot)
	require.NotZero(t, PIDNamespace())
	path := filepath.Join(t.TempDir(), "id")
	for text, ok := range map[string]bool{
		"6f1c0d2e-3b4a-4c5d-8e9f-001122334455\n": true, "6f1c0d2e3b4a4c5d8e9f001122334455": true,
		"": false, "uninitialized\n": false, "6f1c": false,
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		id, err := readID(path)
		require.Equal(t, ok, err == nil, text)
		require.Equal(t, ok, id[0] == 0x6f, text)
	}
}

func TestParseStat(t *testing.T) {
	tail := " S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2 3"
	for _, comm := range []string{"larder", "a b", "a) Z 1 2", "((", ") S 1", ""} {
		start, state, err := parseStat("42 (" + comm + ")" + tail)
		require.NoError(t, err, comm)
		require.EqualValues(t, 987654, start, comm)
		require.Equal(t, byte('S'), state, comm)
	}
	for _, bad := range []string{"", "42", "42 (x) S 1", "42 x" + tail, strings.Replace("42 (x)"+tail, "987654", "x", 1)} {
		_, _, err := parseStat(bad)
		require.Error(t, err, bad)
	}
}

// sleeper starts a process that lives until it is killed.
func sleeper(t *testing.T) (*exec.Cmd, uint64) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	start, state, err := ProcessStart(cmd.Process.Pid)
	require.NoError(t, err)
	require.NotZero(t, state)
	return cmd, start
}

func TestProcessDead(t *testing.T) {
	cmd, start := sleeper(t)
	pid := cmd.Process.Pid
	require.False(t, ProcessDead(pid, start))
	require.True(t, ProcessDead(pid, start+1), "the pid was reused")
	ended, stop, err := WatchProcess(pid, start)
	require.NoError(t, err)
	defer stop()
	require.NoError(t, cmd.Process.Kill())
	<-ended
	require.True(t, ProcessDead(pid, start), "a zombie has no memory left")
	_, _, err = WatchProcess(pid, start)
	require.ErrorIs(t, err, ErrNoProcess)
	_ = cmd.Wait() // reports the kill
	require.True(t, ProcessDead(pid, start), "nothing has the pid")
	_, _, err = ProcessStart(pid)
	require.ErrorIs(t, err, ErrNoProcess)
	_, _, err = WatchProcess(pid, start)
	require.ErrorIs(t, err, ErrNoProcess)
}

func TestWatchProcessStops(t *testing.T) {
	cmd, start := sleeper(t)
	ended, stop, err := WatchProcess(cmd.Process.Pid, start)
	require.NoError(t, err)
	stop()
	stop()
	select {
	case <-ended:
		t.Fatal("it lives")
	default:
	}
	_, _, err = WatchProcess(cmd.Process.Pid, start+1)
	require.ErrorIs(t, err, ErrNoProcess, "another process has the pid")
}

func TestBoottimeRunsForward(t *testing.T) {
	last := Boottime()
	require.Positive(t, last)
	for range 1000 {
		now := Boottime()
		require.GreaterOrEqual(t, now, last)
		last = now
	}
	require.Greater(t, wallNanos(), time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano())
}

func BenchmarkBoottime(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Boottime()
	}
}
