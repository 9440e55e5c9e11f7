package paper

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
)

func TestStatistics(t *testing.T) {
	require.InDelta(t, 1, correlation([]float64{1, 2, 3}, []float64{2, 4, 6}), 1e-12)
	require.InDelta(t, -1, correlation([]float64{1, 2, 3}, []float64{3, 2, 1}), 1e-12)
	require.Zero(t, correlation([]float64{1, 2, 3}, []float64{1, 1, 1}))
	require.Zero(t, correlation(nil, nil))
	require.InDelta(t, 2, deviation([]float64{2, 4, 4, 4, 5, 5, 7, 9}), 1e-12)
	require.Equal(t, []float64{1.5, 2, 3, 3.5}, movingMean([]float64{1, 2, 3, 4}, 2))
	require.Equal(t, []float64{1, 2}, movingMean([]float64{1, 2}, 0))
	require.True(t, falling(3, 2, 1))
	require.False(t, falling(3, 3, 1))
	require.Equal(t, 1, greatest([]float64{1, 3, 2}))
}

// TestSwing: loads that swing against each other are told from those that do not, and what comes before the cluster has filled up and after the last arrival does not count.
func TestSwing(t *testing.T) {
	run := func(phase, size float64) *sim.Result {
		r := &sim.Result{Outcomes: []sim.Outcome{{Arrival: time.Hour}}}
		r.Scenario.Sample = 10 * time.Second
		for i := range 500 {
			at := float64(i) * 10
			wave := 2 * math.Pi * at / 240
			s := sim.Sample{At: at, PrefillLoad: 1 + size*math.Sin(wave), DecodeLoad: 1 + size*math.Sin(wave+phase)}
			if at < 100 || at > 3600 {
				s.PrefillLoad, s.DecodeLoad = 100, 100
			}
			r.Series = append(r.Series, s)
		}
		return r
	}
	anti, same := swingOf(run(math.Pi, 0.5)), swingOf(run(0, 0.5))
	require.Less(t, anti.correlation, -0.95)
	require.Greater(t, same.correlation, 0.95)
	small := swingOf(run(math.Pi, 0.1))
	require.InEpsilon(t, anti.swingP/5, small.swingP, 0.1)
	require.InEpsilon(t, 1, anti.prefill, 0.05)
	require.InEpsilon(t, 0.5/math.Sqrt2, anti.swingD, 0.05, "a sine's deviation")
	require.Zero(t, swingOf(new(sim.Result)).correlation)
}
