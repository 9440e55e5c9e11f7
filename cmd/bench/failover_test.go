package bench_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/cmd"
	"larder/cmd/bench"
)

// TestMain lets the members that a benchmark starts from its own program be larder serve.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		cmd.Main()
		return
	}
	goleak.VerifyTestMain(m)
}

// TestFailoverKillsRealLeaders: twice, with keys that are all there afterwards.
func TestFailoverKillsRealLeaders(t *testing.T) {
	if testing.Short() {
		t.Skip("starts three processes")
	}
	rows, err := bench.Failover(t.Context(), t.TempDir(), 2, 1000)
	require.NoError(t, err)
	require.Len(t, rows, 4)
	for _, row := range rows[:3] {
		require.Greater(t, row.Value, 0.1, "%s: the others wait before they elect", row.Name)
	}
	require.InDelta(t, 1000, rows[3].Value, 0)
	require.True(t, *rows[3].Met)
}

// TestAMemberThatCannotBeStartedAgainCanBeEnded: the run fails then, or was interrupted, and ends all its members.
func TestAMemberThatCannotBeStartedAgainCanBeEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	again, end := bench.StartKilled(ctx, filepath.Join(t.TempDir(), "log"), cancel)
	require.ErrorIs(t, again, context.Canceled)
	require.NoError(t, end)
}

// TestFailoverAims: 19 of 20 changes within two election timeouts, every one within four, every key found.
func TestFailoverAims(t *testing.T) {
	times := func(fast, slow, worst time.Duration) (took []time.Duration) {
		for range 18 {
			took = append(took, fast)
		}
		return append(took, worst, slow)
	}
	for name, c := range map[string]struct {
		took  []time.Duration
		found int
		met   [3]bool
	}{
		"as it should be": {times(time.Second, 2*time.Second, 4*time.Second), 10, [3]bool{true, true, true}},
		"two are slow":    {times(time.Second, 2100*time.Millisecond, 3*time.Second), 10, [3]bool{false, true, true}},
		"one is far slow": {times(time.Second, time.Second, 5*time.Second), 10, [3]bool{true, false, true}},
		"a key is lost":   {times(time.Second, time.Second, time.Second), 9, [3]bool{true, true, false}},
	} {
		t.Run(name, func(t *testing.T) {
			rows := bench.FailoverRows(c.took, c.found, 10)
			require.Nil(t, rows[0].Met)
			require.InDelta(t, 1, rows[0].Value, 1e-9)
			met := [3]bool{*rows[1].Met, *rows[2].Met, *rows[3].Met}
			require.Equal(t, c.met, met)
		})
	}
}

// TestPolicyAims: both the rate and the p99 of stores are held against those of the policy that does nothing.
func TestPolicyAims(t *testing.T) {
	met := func(rate, tail float64) [2]bool {
		rows := bench.PolicyRows(rate, tail, 100, 10)
		return [2]bool{*rows[0].Met, *rows[1].Met}
	}
	require.Equal(t, [2]bool{true, true}, met(97, 10.3))
	require.Equal(t, [2]bool{false, true}, met(96, 9))
	require.Equal(t, [2]bool{true, false}, met(110, 10.4))
}
