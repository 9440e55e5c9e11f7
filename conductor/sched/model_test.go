package sched

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func preset(tb testing.TB, name string) *Model {
	tb.Helper()
	c, err := Preset(name)
	require.NoError(tb, err)
	m, err := NewModel(c)
	require.NoError(tb, err)
	return m
}

// FAST'25 works out from which bandwidth on reusing a prefix of 8192 tokens pays, if all FLOPS are reached: 6 GB/s on A800 and
// 19 GB/s on H800. 320 KB a token is its figure, too.
func TestPresetsAreThePapers(t *testing.T) {
	for _, x := range []struct {
		system  System
		atLeast float64
	}{{presets[0].system, 6e9}, {presets[1].system, 19e9}} {
		x.system.MFU, x.system.Overhead = 1, 0
		c := x.system.Costs()
		assert.Equal(t, 320<<10, c.BytesPerToken)
		m, err := NewModel(c)
		require.NoError(t, err)
		saved := m.Prefill(8192, 0)
		assert.InEpsilon(t, x.atLeast, 8192*float64(c.BytesPerToken)/saved.Seconds(), 0.04)
	}
	_, err := Preset("gpt-7")
	require.ErrorIs(t, err, ErrCosts)
	assert.ErrorContains(t, err, DefaultPreset)
}

// The transfer engine's published figure: 40 GB at 87 GB/s over 4x200 Gbps.
func TestPresetTransfersAsThePapers(t *testing.T) {
	assert.InEpsilon(t, 40.0/87, preset(t, DefaultPreset).Transfer(40e9, 100e9).Seconds(), 0.01)
}

func TestCostsThatCannotBe(t *testing.T) {
	for name, break_ := range map[string]func(*Costs){
		"negative":        func(c *Costs) { c.Prefill = -1 },
		"not a number":    func(c *Costs) { c.StepKVToken = math.NaN() },
		"endless":         func(c *Costs) { c.PrefillSquare = math.Inf(1) },
		"a free token":    func(c *Costs) { c.PrefillToken = 0 },
		"a free step":     func(c *Costs) { c.Step = 0 },
		"above all of it": func(c *Costs) { c.TransferShare = 1.1 },
	} {
		c := roundCosts()
		break_(&c)
		_, err := NewModel(c)
		assert.ErrorIs(t, err, ErrCosts, name)
	}
}

// truth is a prefill as it really is, at some distance from the preset, with 5% of noise.
func truth(rng *rand.Rand, n, p int) time.Duration {
	x, y := float64(n), float64(p)
	return seconds((0.030 + 1.4e-4*(x-y) + 1.5e-9*(x*x-y*y)) * (1 + 0.05*rng.NormFloat64()))
}

func lengthsOf(rng *rand.Rand) (n, p int) {
	n = int(math.Exp(6 + 5*rng.Float64())) // 400 to 60,000
	return n, int(float64(n) * 0.9 * rng.Float64())
}

// worst is the greatest relative error of the prediction.
func worst(m *Model) float64 {
	most := 0.0
	for _, x := range [][2]int{{1000, 0}, {1000, 900}, {8000, 0}, {8000, 6000}, {32_000, 0}, {32_000, 30_000}, {100_000, 50_000}} {
		n, p := float64(x[0]), float64(x[1])
		want := 0.030 + 1.4e-4*(n-p) + 1.5e-9*(n*n-p*p)
		most = max(most, math.Abs(m.Prefill(x[0], x[1]).Seconds()/want-1))
	}
	return most
}

func TestPrefillIsLearned(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	m := preset(t, DefaultPreset)
	assert.Greater(t, worst(m), 0.2, "there is something to learn")
	for range 500 {
		n, p := lengthsOf(rng)
		m.LearnPrefill(n, p, truth(rng, n, p))
	}
	assert.Less(t, worst(m), 0.07)

	for i := range 1000 { // one of 20 stalls for a minute, or is not what it seems
		n, p := lengthsOf(rng)
		took := truth(rng, n, p)
		switch i % 40 {
		case 0:
			took = time.Minute
		case 20:
			took = time.Microsecond
		}
		m.LearnPrefill(n, p, took)
	}
	assert.Less(t, worst(m), 0.12, "some wild measurements do little")

	for range 600 { // twice as slow from now on
		n, p := lengthsOf(rng)
		m.LearnPrefill(n, p, 2*truth(rng, n, p))
	}
	assert.InDelta(t, 1, worst(m), 0.25, "a change is followed")
}

// Measurements of only one length say nothing of the others, and must not have them drift.
func TestMonotonyIsNoHarm(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	m := preset(t, DefaultPreset)
	before := m.Prefill(64_000, 0)
	for range 20_000 {
		m.LearnPrefill(1000, 0, time.Duration(float64(m.Prefill(1000, 0))*(1+0.1*rng.NormFloat64())))
	}
	assert.True(t, m.prefill.sane())
	assert.InDelta(t, 1, m.Prefill(64_000, 0).Seconds()/before.Seconds(), 0.7)
}

func TestStepIsLearned(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	m := preset(t, DefaultPreset)
	took := func(batch, kv int) float64 { return 0.025 + 1e-4*float64(batch) + 8e-8*float64(kv) }
	for range 500 {
		batch := 1 + rng.IntN(100)
		kv := batch * (1000 + rng.IntN(20_000))
		m.LearnStep(batch, kv, seconds(took(batch, kv)*(1+0.05*rng.NormFloat64())))
	}
	for _, x := range [][2]int{{1, 1000}, {30, 300_000}, {100, 1_500_000}} {
		assert.InEpsilon(t, took(x[0], x[1]), m.Step(x[0], x[1]).Seconds(), 0.08)
	}
}

func TestTransferIsLearned(t *testing.T) {
	m := preset(t, DefaultPreset)
	for range 300 {
		for _, bytes := range []float64{1e7, 1e9, 1e10} {
			m.LearnTransfer(bytes, 25e9, seconds(0.005+bytes/10e9))
		}
	}
	assert.InEpsilon(t, 0.005+0.5, m.Transfer(5e9, 25e9).Seconds(), 0.02)
	assert.Zero(t, m.Transfer(5e9, 0), "a bandwidth of 0 is no bound")
}

// Whatever is measured, predictions are never negative, and what cannot be is not learned.
func FuzzRegression(f *testing.F) {
	f.Add(1000, 0, int64(1e9), 3)
	f.Add(1<<30, -1, int64(-1), 10)
	f.Add(0, 1<<40, int64(math.MaxInt64), 200)
	f.Fuzz(func(t *testing.T, n, p int, took int64, times int) {
		m := preset(t, DefaultPreset)
		for i := range min(times, 300) {
			m.LearnPrefill(n, p, time.Duration(took))
			m.LearnStep(n, p, time.Duration(took))
			m.LearnPrefill(1+i*100, i*50, time.Duration(took))
		}
		assert.True(t, m.prefill.sane() && m.decode.sane(), "%+v", m.prefill)
		for _, x := range [][2]int{{n, p}, {1, 0}, {100_000, 0}} {
			got := m.Prefill(x[0], x[1])
			assert.True(t, got >= 0 && got <= longest, got)
		}
	})
}

func TestModelIsKept(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	m := preset(t, DefaultPreset)
	for i := range 200 {
		n, p := lengthsOf(rng)
		m.LearnPrefill(n, p, truth(rng, n, p))
		m.LearnStep(i, i*1000, ms(30))
		m.LearnTransfer(1e9, 25e9, ms(90))
		m.learnTail(TBT{ms(60), ms(40)}, 0.03)
		m.lengthsOf("chat").add(i)
	}
	data, err := json.Marshal(m)
	require.NoError(t, err)
	var again Model
	require.NoError(t, json.Unmarshal(data, &again))
	assert.Equal(t, m, &again)
}

func TestModelThatIsBroken(t *testing.T) {
	good, err := json.Marshal(preset(t, DefaultPreset))
	require.NoError(t, err)
	for name, change := range map[string]func(map[string]any){
		"another version": func(m map[string]any) { m["version"] = 2 },
		"costs":           func(m map[string]any) { m["costs"] = map[string]any{"step": -1} },
		"factors":         func(m map[string]any) { m["prefill"].(map[string]any)["factors"] = []float64{-1, 1, 1} },
		"covariance":      func(m map[string]any) { m["decode"].(map[string]any)["covariance"] = [][]float64{{900, 0, 0}} },
		"tail":            func(m map[string]any) { m["tail"] = []float64{0, 1} },
		"lengths":         func(m map[string]any) { m["outputs"] = map[string]any{"": map[string]any{"over": []int{1, 2}}} },
		"no lengths":      func(m map[string]any) { m["outputs"] = map[string]any{"": nil} },
	} {
		var all map[string]any
		require.NoError(t, json.Unmarshal(good, &all))
		change(all)
		data, err := json.Marshal(all)
		require.NoError(t, err)
		m := preset(t, DefaultPreset)
		require.ErrorIs(t, json.Unmarshal(data, m), ErrModel, name)
		assert.Equal(t, preset(t, DefaultPreset), m, "%s: unchanged", name)
	}
}

// Any model that is read can be written, and predicts.
func FuzzModel(f *testing.F) {
	good, err := json.Marshal(preset(f, DefaultPreset))
	require.NoError(f, err)
	f.Add(good)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var m Model
		if json.Unmarshal(data, &m) != nil || m.outputs == nil { // null is read as nothing
			return
		}
		for _, n := range []int{1, 1000, maxInput} {
			assert.GreaterOrEqual(t, m.Prefill(n, n/2), time.Duration(0))
			assert.GreaterOrEqual(t, m.Step(n, n), time.Duration(0))
		}
		again, err := json.Marshal(&m)
		require.NoError(t, err)
		var second Model
		require.NoError(t, json.Unmarshal(again, &second))
		assert.Equal(t, m, second)
	})
}

func TestLengths(t *testing.T) {
	for n := range 1 << 12 {
		b := bin(n)
		assert.True(t, binStart(b) <= n && n < binStart(b+1), n)
	}
	assert.Equal(t, lengthBins-1, bin(mostLength))

	var l lengths
	assert.False(t, l.known())
	for i := range 1000 {
		l.add(i)
	}
	assert.True(t, l.known())
	assert.InDelta(t, 500, l.mean, 5)
	assert.InDelta(t, 500, l.beyond(500), 10)
	assert.InDelta(t, 0.5, l.stays(800, 900), 0.02, "of those that got 800, half get 900")
	assert.Zero(t, l.stays(800, 2000))
	assert.Zero(t, l.stays(1<<40, 1<<41))
	for range 10_000 {
		l.add(10)
	}
	assert.Less(t, l.mean, 40.0, "the old ones fade")
	assert.True(t, l.sane())
	l.add(1 << 40)
	assert.True(t, l.sane())
}
