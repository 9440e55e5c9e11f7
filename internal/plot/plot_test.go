package plot_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/internal/plot"
)

var update = flag.Bool("update", false, "write the golden files anew; look at them before they are committed")

type figure interface{ SVG() []byte }

// figures has one of each kind, with what makes it hard: gaps, huge and tiny values, names that are markup.
func figures() map[string]figure {
	nan, inf := math.NaN(), math.Inf(1)
	wave := plot.Series{Name: "wave"}
	for i := range 50_000 { // one peak that must not be thinned away
		y := math.Sin(float64(i)/4000) + 1
		if i == 31_234 {
			y = 4
		}
		wave.X, wave.Y = append(wave.X, float64(i)), append(wave.Y, y)
	}
	var times []float64
	for i := range 3000 {
		times = append(times, math.Exp(float64(i%997)/200)/20)
	}
	return map[string]figure{
		"lines": &plot.Lines{
			Title: "Load over time", X: plot.Axis{Label: "time", Unit: plot.Seconds}, Y: plot.Axis{Label: "load"},
			Series: []plot.Series{
				wave,
				{Name: "with a gap", X: []float64{0, 1e4, 2e4, 3e4, 4e4}, Y: []float64{0.5, 1, nan, 2, inf}, Dots: true},
				{Name: "steps", Step: true, X: []float64{0, 1e4, 2e4, 5e4}, Y: []float64{3, 2, 2, 1}},
			},
			Rules: []plot.Rule{{Name: "limit", At: 1.5}},
		},
		"log": &plot.Lines{
			Title: "Store latency", X: plot.Axis{Label: "length, tokens", Unit: plot.Tokens, Log: true},
			Y: plot.Axis{Label: "latency", Unit: plot.Seconds, Log: true},
			Series: []plot.Series{
				{Name: "serial", X: []float64{1024, 8192, 131072}, Y: []float64{0.002, 0.016, 0.27}, Dots: true},
				{Name: "layer-wise", X: []float64{1024, 8192, 131072}, Y: []float64{0, 0.0002, 0.003}, Dots: true},
			},
		},
		"rank": &plot.Lines{
			Title: "Uses by rank", X: plot.Axis{Label: "rank", Log: true}, Y: plot.Axis{Label: "uses", Log: true},
			Series: []plot.Series{{Name: "uses", X: wave.X[1:], Y: inverse(wave.X[1:])}},
		},
		"cdf": &plot.Lines{
			Title: "TTFT", X: plot.Axis{Label: "TTFT", Unit: plot.Seconds, Limit: 5},
			Y:      plot.Axis{Label: "requests", Unit: plot.Share, Max: 1},
			Series: []plot.Series{plot.CDF("ours", times), plot.CDF("one", []float64{2, nan})},
		},
		"bars": &plot.Bars{
			Title: `<script>alert("&")</script>`, X: plot.Axis{Label: "a & b"}, Y: plot.Axis{Label: "TTFT", Unit: plot.Seconds},
			Groups: []string{"random", "load-balance", "cache-aware", "kvcache-centric"},
			Series: []plot.BarSeries{
				{Name: "ours", Values: []float64{19, 5, 3.5, 3.07}}, {Name: "theirs < 2", Values: []float64{19.65, 5.27, nan, 3.07, 99}},
			},
		},
		"bars_log": &plot.Bars{
			Title: "Rejected", Y: plot.Axis{Label: "requests", Log: true}, Groups: []string{"a", "b"},
			Series: []plot.BarSeries{{Name: "one", Values: []float64{4183, 12}}},
		},
		"boxes": &plot.Boxes{
			Title: "TTFT by policy", Y: plot.Axis{Label: "TTFT", Unit: plot.Seconds}, Rules: []plot.Rule{{Name: "TTFT SLO", At: 8}},
			Boxes: []plot.Box{{Name: "random", Values: times}, {Name: "none"}, {Name: "one", Values: []float64{3, inf}}},
		},
		"nothing":       &plot.Lines{Title: "Nothing", Series: []plot.Series{{Name: "empty"}, {Name: "nan", X: []float64{1}, Y: []float64{nan}}}},
		"nothing_bars":  &plot.Bars{Title: "Nothing", Y: plot.Axis{Log: true}, Groups: []string{"a"}},
		"nothing_boxes": &plot.Boxes{Title: "Nothing"},
	}
}

// inverse is a hundred thousand by each value.
func inverse(values []float64) []float64 {
	all := make([]float64, len(values))
	for i, v := range values {
		all[i] = 1e5 / v
	}
	return all
}

// TestGolden: a figure is the same bytes for the same data, everywhere.
func TestGolden(t *testing.T) {
	for name, f := range figures() {
		t.Run(name, func(t *testing.T) {
			got := f.SVG()
			wellFormed(t, got)
			require.Less(t, len(got), 64<<10, "its size is bounded")
			path := filepath.Join("testdata", name+".svg")
			if *update {
				require.NoError(t, os.WriteFile(path, got, 0o600))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "run go test ./internal/plot -update and look at what has changed")
			require.Equal(t, got, f.SVG())
		})
	}
}

func wellFormed(tb testing.TB, svg []byte) {
	tb.Helper()
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			tb.Fatalf("%v in %s", err, svg)
		}
	}
}

// TestThinKeepsPeaks: a peak of one point of fifty thousand is drawn at the height it has.
func TestThinKeepsPeaks(t *testing.T) {
	spike := plot.Series{X: make([]float64, 50_000), Y: make([]float64, 50_000)}
	for i := range spike.X {
		spike.X[i] = float64(i)
	}
	flat := plot.Lines{Y: plot.Axis{Max: 10}, Series: []plot.Series{spike}}
	before := flat.SVG()
	spike.Y[12_345] = 10
	after := flat.SVG()
	require.NotEqual(t, before, after)
	require.Less(t, len(after), 32<<10)
	require.Contains(t, string(after), " 54L", "up to the top edge")
}

func TestCDF(t *testing.T) {
	s := plot.CDF("", []float64{3, 1, math.NaN(), 2, 2})
	require.Equal(t, []float64{1, 1, 2, 2, 3}, s.X)
	require.Equal(t, []float64{0, 0.25, 0.5, 0.75, 1}, s.Y)
	require.Empty(t, plot.CDF("", nil).X)
	many := make([]float64, 123_457)
	for i := range many {
		many[i] = float64(i)
	}
	s = plot.CDF("", many)
	require.Less(t, len(s.X), 2500)
	require.InDelta(t, 1, s.Y[len(s.Y)-1], 0)
	require.InDelta(t, 123_456, s.X[len(s.X)-1], 0)
}

// FuzzFigures: whatever the values, the names and the axes, the figure is XML and of bounded size.
func FuzzFigures(f *testing.F) {
	f.Add("a<b>&", 1.0, 2.0, -3.0, false, uint8(0))
	f.Add("\x00\xff", 1e308, -1e308, math.Inf(-1), true, uint8(1))
	f.Add("", 5e-324, 1e-300, math.NaN(), true, uint8(3))
	f.Fuzz(func(t *testing.T, name string, a, b, c float64, log bool, unit uint8) {
		axis := plot.Axis{Label: name, Unit: plot.Unit(unit % 4), Log: log}
		values := []float64{a, b, c}
		for _, fig := range []figure{
			&plot.Lines{Title: name, X: axis, Y: axis, Series: []plot.Series{{Name: name, X: values, Y: values}, plot.CDF(name, values)}},
			&plot.Bars{Title: name, Y: axis, Groups: []string{name, name}, Series: []plot.BarSeries{{Name: name, Values: values}}},
			&plot.Boxes{Title: name, Y: axis, Boxes: []plot.Box{{Name: name, Values: values}}, Rules: []plot.Rule{{Name: name, At: c}}},
		} {
			svg := fig.SVG()
			wellFormed(t, svg)
			require.NotContains(t, string(svg), "NaN")
			require.NotContains(t, string(svg), `"+Inf`)
			require.Less(t, len(svg), 32<<10+60*len(name))
		}
	})
}

func BenchmarkLines(b *testing.B) {
	f := figures()["lines"]
	for b.Loop() {
		f.SVG()
	}
}
