package cmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSimPaper: a report is written where it is asked for, what needs the trace is left out without one, and wrong flags
// are told.
func TestSimPaper(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "report")
	code, out, errs := larder(t.Context(), "sim", "paper", "--quick", "--out", dir, "--only", "reuse|store|prefill-time")
	require.Zero(t, code, errs)
	require.Contains(t, out, "reuse-bound")
	require.Contains(t, out, "left out: it needs the published conversation trace")
	require.Contains(t, out, filepath.Join(dir, "report.md"))
	require.Contains(t, errs, "store-latency: 15 runs in ")
	for _, name := range []string{"report.md", "report.json", "plots/store-latency.svg", "plots/reuse-bound.svg"} {
		info, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Positive(t, info.Size())
	}

	trace := filepath.Join(t.TempDir(), "trace")
	line := `{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}` + "\n"
	require.NoError(t, os.WriteFile(trace, []byte(strings.Repeat(line, 3)), 0o600))
	code, out, errs = larder(t.Context(), "sim", "paper", "--quick", "--out", dir, "--only", "^policy-grid$", "--trace", trace, "--json")
	require.Zero(t, code, errs)
	require.Contains(t, out, `"published": false`)

	for _, wrong := range [][]string{{"--only", "("}, {"--only", "no such"}, {"--trace", filepath.Join(dir, "none")}} {
		code, _, errs = larder(t.Context(), append([]string{"sim", "paper", "--out", dir}, wrong...)...)
		require.Equal(t, exitUsage, code, errs)
	}
	code, _, errs = larder(t.Context(), "sim", "paper")
	require.Equal(t, exitUsage, code)
	require.Contains(t, errs, "--out")
}
