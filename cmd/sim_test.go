package cmd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
)

// TestSimDefaults: the flags' are the simulator's.
func TestSimDefaults(t *testing.T) {
	var c simRunCmd
	parser, err := kong.New(&c)
	require.NoError(t, err)
	_, err = parser.Parse(nil)
	require.NoError(t, err)
	s, err := c.scenario(nil)
	require.NoError(t, err)
	want := sim.Default()
	require.Equal(t, &want, s)
}

// TestSim: from a generated workload, and from a file of the published format, as a table and as JSON.
func TestSim(t *testing.T) {
	args := []string{"sim", "--requests", "60", "--rate", "2", "--prefill", "2", "--decode", "2"}
	plots := t.TempDir()
	code, stdout, stderr := larder(t.Context(), append(args, "--plot", plots)...)
	require.Equal(t, exitDone, code, stderr)
	require.Contains(t, stdout, "2 prefill and 2 decode nodes")
	require.FileExists(t, filepath.Join(plots, "ttft.svg"))
	code, stdout, stderr = larder(t.Context(), append(args, "--json", "--relative-slo")...)
	require.Equal(t, exitDone, code, stderr)
	var r sim.Result
	require.NoError(t, json.Unmarshal([]byte(stdout), &r))
	require.Equal(t, 60, r.Requests)
	require.Equal(t, 60, r.Completed+r.Rejected())
	require.NotEqual(t, sim.Default().TTFTSLO, r.Scenario.TTFTSLO)

	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(`{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
{"timestamp": 9000, "input_length": 600, "output_length": 9, "hash_ids": [1, 3]}
`), 0o600))
	code, stdout, stderr = larder(t.Context(), "sim", "run", "--trace", trace, "--coupled", "1", "--coupled-prefix")
	require.Equal(t, exitDone, code, stderr)
	require.Contains(t, stdout, "1 coupled instances")
	require.Contains(t, stdout, "2 (100.0%)")
	code, stdout, stderr = larder(t.Context(), "sim", "--trace", trace, "--capacity-blocks", "3,0", "--eviction-policy", "lru,optimum")
	require.Equal(t, exitDone, code, stderr)
	require.Regexp(t, `(?m)^optimum +0.2500 +0.2500$`, stdout)

	code, stdout, stderr = larder(t.Context(), "sim", "--coupled", "1", "--generate", "arxiv", "--requests", "100", "--attain", "0.9",
		"--tbt-slo", "5s", "--precision", "0.1", "--json")
	require.Equal(t, exitDone, code, stderr)
	var found struct {
		Load float64 `json:"largest_load"`
	}
	require.NoError(t, json.Unmarshal([]byte(stdout), &found))
	require.InDelta(t, 0.6, found.Load, 0.4, "of the order of what a node computes")
}

// TestSimRefuses what it cannot simulate, with the exit code of wrong flags and what to do.
func TestSimRefuses(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.jsonl")
	require.NoError(t, os.WriteFile(bad, []byte("{}\n{\n"), 0o600))
	empty := filepath.Join(t.TempDir(), "empty.jsonl")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	for want, args := range map[string][]string{
		"choose one of arxiv":        {"--generate", "no such"},
		"either --trace":             {"--trace", bad, "--generate", "arxiv"},
		"divided into groups":        {"--pipeline-group-size", "3"},
		"at least one of each":       {"--decode", "0"},
		"choose one of fifo":         {"--eviction-policy", "no such"},
		"are compared with":          {"--eviction-policy", "lru,sieve"},
		"choose one of llama2-70b":   {"--model", "gpt"},
		"choose one of a800":         {"--hardware", "b200"},
		"must be one of":             {"--policy", "best"},
		"at most 1":                  {"--mfu", "3"},
		"the trace is empty":         {"--trace", empty},
		"--rate is of generated":     {"--trace", bad, "--rate", "3"},
		"are shares, from 0 to 1":    {"--attain", "2"},
		"--requests is not negative": {"--requests=-1"},
	} {
		code, _, stderr := larder(t.Context(), append([]string{"sim", "--requests", "10"}, args...)...)
		require.Equal(t, exitUsage, code, stderr)
		require.Contains(t, stderr, want)
	}
	code, _, stderr := larder(t.Context(), "sim", "--trace", bad)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "line 2")
}
