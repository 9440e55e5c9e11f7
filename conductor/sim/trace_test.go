package sim_test

import (
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// conversation reads the published conversation trace, which LARDER_TRACE names.
func conversation(t *testing.T) workload.Trace {
	t.Helper()
	path := os.Getenv("LARDER_TRACE")
	if path == "" {
		t.Skip("set LARDER_TRACE to the published conversation trace (JSON lines) to compare with the papers on it")
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	trace, err := sim.ReadTrace(strings.NewReader(string(text)))
	require.NoError(t, err)
	return trace
}

// TestTraceHitRatios: those of an independent computation.
func TestTraceHitRatios(t *testing.T) {
	capacities := []int{1000, 5859, 10_000, 30_000, 50_000, 100_000, 0}
	all, err := sim.HitRatios(conversation(t), []string{"lru", "sieve", sim.Optimum}, capacities)
	require.NoError(t, err)
	want := []float64{
		0.0445, 0.1355, 0.2112, 0.3257, 0.3546, 0.3637, 0.3664,
		0.0481, 0.0966, 0.1318, 0.2759, 0.3438, 0.3631, 0.3664,
		0.1906, 0.3531, 0.3664, 0.3664, 0.3664, 0.3664, 0.3664,
	}
	for i, r := range all {
		require.InDelta(t, want[i], r.Ratio, 0.00005, "%s at %d", r.Policy, r.Blocks)
	}
}

// TestTracePolicies: the mean TTFT of the four prefill policies on 16 nodes is in FAST'25's order, and in its ratios to the
// best within a quarter.
func TestTracePolicies(t *testing.T) {
	trace := conversation(t)
	theirs := []float64{19.65, 5.27, 3.58, 3.07}
	ours := make([]float64, len(theirs))
	for i, policy := range []string{"random", "load-balance", "cache-aware", "kvcache-centric"} {
		s := sim.Default()
		s.Trace, s.Policy, s.Prefill, s.TTFTSLO, s.TBTSLO = trace, policy, 16, 0, 0
		r := run(t, &s)
		ours[i] = r.TTFT.Mean
		t.Logf("%-16s %.2f s; hit ratio %.3f, %.2f s of a node", policy, r.TTFT.Mean, r.HitRatio, r.PrefillSeconds)
	}
	for i := range theirs {
		require.InEpsilon(t, theirs[i]/theirs[3], ours[i]/ours[3], 0.25)
	}
	require.IsDecreasing(t, ours)
}

// TestTraceOverload: at twice the trace's speed early rejection rejects fewer than none does and prediction fewer still, both
// waste less prefill, and early rejection has the loads of prefill and decode swing against each other more.
func TestTraceOverload(t *testing.T) {
	trace := conversation(t)
	rejected, wasted, together := map[string]int{}, map[string]float64{}, map[string]float64{}
	for _, overload := range []string{"none", "early", "predictive"} {
		s := sim.Default()
		s.Trace, s.Overload, s.Speed = trace, overload, 2
		r := run(t, &s)
		rejected[overload], wasted[overload], together[overload] = r.Rejected(), r.WastedSeconds, correlation(r.Series)
		t.Logf("%-10s %d rejected before prefill, %d at decode; %.0f s wasted; %.1f%% within the limits; correlation %.2f",
			overload, r.RejectedBefore, r.RejectedAtDecode, r.WastedSeconds, 100*r.Attainment, together[overload])
	}
	require.Less(t, rejected["early"], rejected["none"])
	require.Less(t, rejected["predictive"], rejected["early"])
	require.Less(t, wasted["early"], wasted["none"])
	require.Less(t, wasted["predictive"], wasted["none"])
	require.Less(t, together["early"], together["none"])
}

// correlation is that of the loads of prefill and decode.
func correlation(series []sim.Sample) float64 {
	var p, d, pp, dd, pd float64
	for _, s := range series {
		p += s.PrefillLoad
		d += s.DecodeLoad
		pp += s.PrefillLoad * s.PrefillLoad
		dd += s.DecodeLoad * s.DecodeLoad
		pd += s.PrefillLoad * s.DecodeLoad
	}
	n := float64(len(series))
	return (pd - p*d/n) / math.Sqrt((pp-p*p/n)*(dd-d*d/n))
}
