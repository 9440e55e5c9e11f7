package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/cxl"
	"larder/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testPage = 4096

// startPool starts a cluster of one with room for so many pages.
func startPool(tb testing.TB, pages int, change func(*server.Config)) (addr string) {
	tb.Helper()
	return "unix:" + startMember(tb, poolConfig(tb, pages, change)).Config().Socket
}

// poolConfig configures a cluster of one.
func poolConfig(tb testing.TB, pages int, change func(*server.Config)) server.Config {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-replay-")
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, os.RemoveAll(dir)) })
	cfg := server.Default()
	cfg.DataDir = tb.TempDir()
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0", server.Off
	cfg.Socket = filepath.Join(dir, "s")
	cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: server.Size(cxl.HeaderSpan + pages*testPage)}}
	cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	cfg.MinRegionAge, cfg.MinFreeDisk = 0, 1<<20
	if change != nil {
		change(&cfg)
	}
	return cfg
}

// startMember starts a server that stops with the test.
func startMember(tb testing.TB, cfg server.Config) *server.Server {
	tb.Helper()
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("LARDER_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(tb.Output(), nil))
	}
	s, err := server.Start(cfg, log)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(tb, s.Stop(ctx))
	})
	return s
}

func config(addr string, trace []Request) Config {
	return Config{Addrs: []string{addr}, Requests: trace, PageSize: testPage, RegionSize: 16 * testPage}
}

func TestOneClientUnderLRUIsExactLRU(t *testing.T) {
	for name, c := range map[string]struct {
		pages  int
		sample Sample
	}{
		"small pool":    {256, Sample{Seed: 1, Requests: 400}},
		"medium pool":   {1024, Sample{Seed: 2, Requests: 500}},
		"nothing fits":  {64, Sample{Seed: 3, Requests: 200, Turns: 2}},
		"all that fits": {8192, Sample{Seed: 4, Requests: 200}},
	} {
		t.Run(name, func(t *testing.T) {
			trace := c.sample.Generate()
			addr := startPool(t, c.pages, nil)
			cfg := config(addr, trace)
			cfg.Compare = true
			rep, err := Run(t.Context(), cfg)
			require.NoError(t, err)
			require.Zero(t, rep.Failures)
			require.Equal(t, c.pages, rep.Pages, "the pool says how large it is")
			hits := LRUHits(Accesses(trace), c.pages)
			require.EqualValues(t, hits, rep.PrefixHits+rep.StoreHits)
			require.InDelta(t, rep.Reference.LRU, rep.BlockRatio, 1e-9)
		})
	}
}

func TestManyClientsReadNoWrongByte(t *testing.T) {
	addr := startPool(t, 1024, nil)
	cfg := config(addr, Sample{Seed: 5, Requests: 800}.Generate())
	cfg.Clients, cfg.Checksums, cfg.Instance = 4, true, "worker"
	var progress bytes.Buffer
	cfg.Progress, cfg.Terminal = &progress, true
	rep, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	require.Zero(t, rep.Failures)
	require.Equal(t, 800, rep.Requests)
	require.NotZero(t, rep.PrefixHits)
	require.Equal(t, rep.Blocks, rep.PrefixHits+rep.StoreHits+rep.Stored)
	require.Contains(t, progress.String(), "800/800 requests")

	var table, raw bytes.Buffer
	require.NoError(t, rep.WriteTable(&table))
	require.Regexp(t, `verification failures +0\n`, table.String())
	require.Contains(t, table.String(), "p99.9")
	require.NoError(t, rep.WriteJSON(&raw))
	var back Report
	require.NoError(t, json.Unmarshal(raw.Bytes(), &back))
	require.InDelta(t, rep.BlockRatio, back.BlockRatio, 1e-12)
}

func TestEveryByteOfABlockIsChecked(t *testing.T) {
	b := make([]byte, 4096)
	FillBlock(b, 42)
	require.NoError(t, CheckBlock(b, 42, len(b)))
	require.ErrorContains(t, CheckBlock(b, 43, len(b)), "holds block 42")
	require.ErrorContains(t, CheckBlock(b[:2048], 42, len(b)), "2048 bytes")
	for i := range b {
		b[i] ^= 0x10
		require.Error(t, CheckBlock(b, 42, len(b)), "byte %d", i)
		b[i] ^= 0x10
	}
}

func TestTraceIsReadAndWritten(t *testing.T) {
	trace := Sample{Seed: 9, Requests: 20}.Generate()
	require.Equal(t, trace, Sample{Seed: 9, Requests: 20}.Generate(), "the same seed gives the same trace")
	var b bytes.Buffer
	require.NoError(t, WriteTrace(&b, trace))
	back, err := ReadTrace(&b)
	require.NoError(t, err)
	require.Equal(t, trace, back)
	for text, want := range map[string]string{
		"":                             "no requests",
		"{":                            "line 1",
		"{}\n\n{\"timestamp\": \"x\"}": "line 3",
		"{\"timestamp\": -1}":          "line 1",
	} {
		_, err := ReadTrace(strings.NewReader(text))
		require.ErrorContains(t, err, want)
	}
	_, err = Run(t.Context(), Config{Trace: filepath.Join(t.TempDir(), "none")})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [4, 5]}`))
	f.Add([]byte("{}\n[]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		trace, err := ReadTrace(bytes.NewReader(b))
		if err == nil {
			var out bytes.Buffer
			require.NoError(t, WriteTrace(&out, trace))
			back, err := ReadTrace(&out)
			require.NoError(t, err)
			require.Len(t, back, len(trace))
		}
	})
}

func TestHistogramKeepsQuantiles(t *testing.T) {
	var h, all Histogram
	for i := 1; i <= 100_000; i++ {
		h.Add(time.Duration(i) * time.Microsecond)
	}
	all.Merge(&h)
	require.EqualValues(t, 100_000, all.Count())
	for q, want := range map[float64]float64{0.5: 50_000, 0.9: 90_000, 0.99: 99_000, 0.999: 99_900, 1: 100_000} {
		require.InEpsilon(t, want, all.Quantile(q).Microseconds(), 0.02, q)
	}
	for v := uint64(1); v < 1<<50; v = v*3 + 1 {
		i := bucket(v)
		require.LessOrEqual(t, floor(i), int64(v))
		require.Greater(t, floor(i+1), int64(v))
	}
	require.Zero(t, new(Histogram).Quantile(0.5))
}

func TestReferencePolicies(t *testing.T) {
	// a b c a b d a b c with two pages, by hand.
	trace := []Request{{HashIDs: []uint64{1, 2, 3, 1, 2}}, {HashIDs: []uint64{4, 1, 2, 3}}}
	a := Accesses(trace)
	require.Equal(t, 0, LRUHits(a, 2))
	require.Equal(t, 5, LRUHits(a, 4))
	require.Equal(t, 2, OptimumHits(a, 2))
	require.Equal(t, Reference{Pages: 4, LRU: 5. / 9, Optimum: 5. / 9}, Compare(trace, 4))
}

func BenchmarkCheckBlock(b *testing.B) {
	block := make([]byte, 64<<10)
	FillBlock(block, 7)
	b.SetBytes(int64(len(block)))
	b.ReportAllocs()
	for b.Loop() {
		if err := CheckBlock(block, 7, len(block)); err != nil {
			b.Fatal(err)
		}
	}
}
