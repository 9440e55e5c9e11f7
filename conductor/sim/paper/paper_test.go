package paper

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// conversations stand for the trace where it is not at hand.
func conversations(tb testing.TB) workload.Trace {
	tb.Helper()
	w := workloadOf("conversation")
	w.Requests = quickRequests
	t, err := sim.Generate(w)
	require.NoError(tb, err)
	return t
}

// TestEveryExperimentReports: the whole of it, quickly. Each experiment draws what it found, sets something beside theirs or
// says what theirs say, and explains the difference; and all of it is in the report.
func TestEveryExperimentReports(t *testing.T) {
	var mu sync.Mutex
	seen := make(map[string]bool)
	cfg := Config{Trace: conversations(t), TraceName: "a|trace", Quick: true, Progress: func(name string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		seen[name] = true
	}}
	r, err := Run(t.Context(), &cfg)
	require.NoError(t, err)
	require.Len(t, r.Findings, len(Names()))
	require.Len(t, seen, len(Names()))
	dir := filepath.Join(t.TempDir(), "new")
	require.NoError(t, r.Write(dir))
	text, err := os.ReadFile(filepath.Join(dir, "report.md"))
	require.NoError(t, err)
	drawn := make(map[string]bool)
	for i := range r.Findings {
		f := &r.Findings[i]
		require.NotEmpty(t, f.Figures, f.Name)
		require.NotEmpty(t, f.Checks, f.Name)
		require.NotEmpty(t, f.Difference, f.Name)
		require.NotEmpty(t, f.Rows, f.Name)
		require.Contains(t, string(text), f.Difference)
		for _, g := range f.Figures {
			require.False(t, drawn[g.Name], "two figures are called %s", g.Name)
			drawn[g.Name] = true
			require.Contains(t, string(text), "plots/"+g.Name+".svg")
			svg, err := os.ReadFile(filepath.Join(dir, "plots", g.Name+".svg"))
			require.NoError(t, err)
			require.NotContains(t, string(svg), "no data", g.Name)
		}
	}
	var back map[string]any
	data, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &back))
	require.Len(t, back["findings"], len(Names()))
}

// TestSameReport: the same configuration gives the same report, however the processors take turns.
func TestSameReport(t *testing.T) {
	cfg := Config{Quick: true, Only: regexp.MustCompile("^(hot-keys|global-pool|pd-ratio)$")}
	var reports [2]bytes.Buffer
	for i := range reports {
		r, err := Run(t.Context(), &cfg)
		require.NoError(t, err)
		require.Len(t, r.Findings, 3)
		require.NoError(t, json.NewEncoder(&reports[i]).Encode(r))
		reports[i].WriteString(r.Markdown())
	}
	require.Equal(t, reports[0].String(), reports[1].String())
}

// TestWithoutTrace: what needs the trace is left out and named, and nothing else.
func TestWithoutTrace(t *testing.T) {
	r, err := Run(t.Context(), &Config{Quick: true, Only: regexp.MustCompile("prefill-time|effective-capacity|prefill-policies$|reuse")})
	require.NoError(t, err)
	require.Len(t, r.Findings, 1)
	require.Equal(t, "reuse-bound", r.Findings[0].Name)
	require.Len(t, r.Left, 3)
	for _, left := range r.Left {
		require.Contains(t, left.Why, "trace")
		require.Contains(t, r.Markdown(), left.Title)
	}
}

func TestErrors(t *testing.T) {
	_, err := Run(t.Context(), &Config{Only: regexp.MustCompile("no such")})
	require.ErrorIs(t, err, ErrNoneChosen)
	require.ErrorContains(t, err, "policy-grid", "it names what there is")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Run(ended, &Config{Quick: true, Only: regexp.MustCompile("bandwidth")})
	require.ErrorIs(t, err, context.Canceled)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.ErrorContains(t, new(Report).Write(file), "write the report")
}

// TestReuseBound: the bound is one formula, whose value is known exactly: at 8,192 tokens a p d + b d^2 is 26 d^2.
func TestReuseBound(t *testing.T) {
	m, err := sim.FindModel("llama3-70b")
	require.NoError(t, err)
	for name, flops := range map[string]float64{"a800": 8 * 312e12, "h800": 8 * 989e12} {
		h, err := sim.FindHardware(name)
		require.NoError(t, err)
		require.InEpsilon(t, flops*2*2/(8*26*8192), reusePays(&m, h.FLOPS, 8192), 1e-12)
	}
	r, err := Run(t.Context(), &Config{Only: regexp.MustCompile("reuse-bound|store-latency")})
	require.NoError(t, err)
	for i := range r.Findings {
		for _, c := range r.Findings[i].Checks {
			require.True(t, c.Holds, c.What)
		}
	}
}

// TestStoreLatency: serially 128k tokens of 320 KiB take what the link between host and device needs for them.
func TestStoreLatency(t *testing.T) {
	r, err := Run(t.Context(), &Config{Only: regexp.MustCompile("store-latency")})
	require.NoError(t, err)
	h, err := sim.FindHardware("a800")
	require.NoError(t, err)
	seconds := 128 * 1024 * 327_680 / (h.HostToDevice * h.LinkShare)
	for _, row := range r.Findings[0].Rows {
		if row.What == "128k tokens, serial" {
			require.InEpsilon(t, seconds, float64(row.Ours), 1e-3)
			return
		}
	}
	t.Fatal("it has no such row")
}

// TestPublishedTrace: hit ratios that are known exactly, on the published trace.
func TestPublishedTrace(t *testing.T) {
	path := os.Getenv("LARDER_TRACE")
	if path == "" {
		t.Skip("set LARDER_TRACE to the published conversation trace (JSON lines) to check the ratios that are known on it")
	}
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	trace, err := sim.ReadTrace(bytes.NewReader(data))
	require.NoError(t, err)
	require.True(t, isPublished(trace))
	r, err := Run(t.Context(), &Config{Trace: trace, TraceName: "conversation", Only: regexp.MustCompile("policy-grid")})
	require.NoError(t, err)
	exactRows := 0
	for _, row := range r.Findings[0].Rows {
		if row.Unit == Ratio {
			exactRows++
			require.InDelta(t, float64(row.Theirs.Low), float64(row.Ours), 0.00005, row.What)
		}
	}
	require.Equal(t, 20, exactRows)
	require.True(t, r.Findings[0].Checks[0].Holds)
}

func TestValues(t *testing.T) {
	for _, c := range []struct {
		value float64
		unit  Unit
		want  string
	}{
		{0.366, Ratio, "0.3660"},
		{0.366, Share, "36.6%"},
		{0.0123, Seconds, "12.3 ms"},
		{19.65, Seconds, "19.6 s"},
		{4904, Seconds, "4,904 s"},
		{4183, Requests, "4,183"},
		{1234567, Requests, "1,234,567"},
		{-12, Requests, "-12"},
		{2.36, Times, "2.36x"},
		{5.86, Bandwidth, "5.86 GB/s"},
		{0, Plain, "0"},
		{250, Plain, "250"},
	} {
		require.Equal(t, c.want, Value(c.value).text(c.unit))
	}
	nan := Value(0) / Value(zero())
	require.Equal(t, "none", nan.text(Share))
	data, err := json.Marshal(Row{Ours: nan})
	require.NoError(t, err)
	require.Contains(t, string(data), `"ours":null`)
}

func zero() float64 { return 0 }

// TestBeside: a measurement is set beside a figure as its multiple, and beside a range as where it lies.
func TestBeside(t *testing.T) {
	var f Finding
	f.beside("figure", Seconds, 3, 2)
	f.between("range", Seconds, 3, 4, 5)
	f.between("range", Seconds, 4.5, 4, 5)
	f.between("range", Seconds, 6, 4, 5)
	f.row("alone", Seconds, 1)
	var got []string
	for i := range f.Rows {
		got = append(got, f.Rows[i].by())
	}
	require.Equal(t, "1.50x below within above -", strings.Join(got, " "))
}
