package sim_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// hitRatio is what one unbounded cache hits of a trace's blocks.
func hitRatio(t workload.Trace) float64 {
	return 1 - float64(t.Distinct())/float64(t.Accesses())
}

// TestGenerate: means and hit ratios are those of the papers' tables.
func TestGenerate(t *testing.T) {
	for _, c := range []struct {
		name          string
		input, output float64
		cached        float64
		requests      int
	}{
		{"arxiv", 8088, 229, 0, 2000},
		{"l-eval", 19019, 72, 0.82, 2000},
		{"real", 7955, 194, 0.50, 23608},
		{"simulated-16k", 16384, 512, 0.5, 1000},
		{"simulated-32k", 32768, 512, 0.5, 1000},
		{"simulated-64k", 65536, 512, 0.5, 1000},
		{"simulated-128k", 131072, 512, 0.5, 1000},
		{"conversation", 12035, 343, 0.37, 12031},
		{"tool-agent", 8596, 182, 0.59, 23608},
		{"synthetic", 15325, 149, 0.66, 3993},
	} {
		for seed := range uint64(2) {
			trace, err := sim.Generate(sim.Workload{Name: c.name, BlockSize: 512, Seed: seed})
			require.NoError(t, err)
			in, out := 0, 0
			for _, q := range trace {
				in += q.Input
				out += q.Output
				require.Len(t, q.Blocks, (q.Input+511)/512)
			}
			n := float64(len(trace))
			require.Len(t, trace, c.requests)
			require.InEpsilon(t, c.input, float64(in)/n, 0.01, c.name)
			require.InEpsilon(t, c.output, float64(out)/n, 0.02, c.name)
			require.InDelta(t, c.cached, hitRatio(trace), 0.01, c.name)
			again, err := sim.Generate(sim.Workload{Name: c.name, BlockSize: 512, Seed: seed})
			require.NoError(t, err)
			require.Equal(t, trace, again)
		}
	}
}

// TestGenerateRate: arrivals come at the rate that was asked for, and sorted.
func TestGenerateRate(t *testing.T) {
	for _, name := range sim.WorkloadNames() {
		trace, err := sim.Generate(sim.Workload{Name: name, Requests: 1000, Rate: 4, BlockSize: 512, Seed: 1})
		require.NoError(t, err)
		require.Len(t, trace, 1000)
		require.InEpsilon(t, 250_000, float64(trace[999].TimeMS), 0.1, name)
		for i := 1; i < len(trace); i++ {
			require.GreaterOrEqual(t, trace[i].TimeMS, trace[i-1].TimeMS)
		}
		require.Greater(t, hitRatio(trace), -0.001)
	}
}

func TestGenerateRefuses(t *testing.T) {
	for _, w := range []sim.Workload{
		{Name: "no such", BlockSize: 512},
		{Name: "arxiv"},
		{Name: "arxiv", BlockSize: 512, Requests: -1},
		{Name: "arxiv", BlockSize: 512, Rate: -1},
	} {
		_, err := sim.Generate(w)
		require.ErrorIs(t, err, sim.ErrScenario, "%+v", w)
	}
}

func TestReadTrace(t *testing.T) {
	trace, err := sim.ReadTrace(strings.NewReader(`{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [4000000000, 7]}
{"timestamp": 1000, "input_length": 500, "output_length": 8, "hash_ids": [7]}
`))
	require.NoError(t, err)
	require.Equal(t, workload.Trace{
		{TimeMS: 1000, Input: 500, Output: 8, Blocks: []uint32{0}},
		{TimeMS: 3000, Input: 700, Output: 9, Blocks: []uint32{1, 0}},
	}, trace)
	_, err = sim.ReadTrace(strings.NewReader("\n"))
	require.Error(t, err)
	_, err = sim.ReadTrace(strings.NewReader(""))
	require.ErrorIs(t, err, sim.ErrScenario)
	_, err = sim.ReadTrace(strings.NewReader(`{"timestamp": 1, "hash_ids": [-1]}`))
	require.ErrorContains(t, err, "line 1")
}

// FuzzReadTrace: whatever is read, its blocks are small and dense, its requests in order, and it is simulated or refused.
func FuzzReadTrace(f *testing.F) {
	f.Add(`{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [4000000000, 7]}` + "\n" +
		`{"timestamp": 1000, "input_length": 500, "output_length": 8, "hash_ids": [7]}`)
	f.Add(`{"timestamp": 18446744073709551615, "input_length": -1, "output_length": 99999999999, "hash_ids": []}`)
	f.Add(`{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 1, 1]}`)
	f.Add("{}\n[]\nnull")
	f.Fuzz(func(t *testing.T, text string) {
		trace, err := sim.ReadTrace(strings.NewReader(text))
		if err != nil || len(trace) > 100 {
			return
		}
		distinct := uint32(trace.Distinct())
		for i, q := range trace {
			require.True(t, i == 0 || trace[i-1].TimeMS <= q.TimeMS)
			for _, b := range q.Blocks {
				require.Less(t, b, distinct)
			}
			if q.Input > 100_000 || q.Output > 1000 || q.TimeMS > 1_000_000 {
				return // it would take long
			}
		}
		s := sim.Default()
		s.Trace = trace
		r, err := sim.Run(t.Context(), &s)
		if err != nil {
			require.ErrorIs(t, err, sim.ErrScenario)
			return
		}
		require.Equal(t, len(trace), r.Completed+r.Rejected())
	})
}
