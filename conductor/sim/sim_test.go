package sim_test

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// quiet is a scenario of one prefill and one decode node without limits.
func quiet(t workload.Trace) sim.Scenario {
	s := sim.Default()
	s.Trace, s.Prefill, s.Decode, s.TTFTSLO, s.TBTSLO = t, 1, 1, 0, 0
	return s
}

// one is a request without a cached prefix.
func one(atMS uint64, input, output int, first uint32) workload.Request {
	q := workload.Request{TimeMS: atMS, Input: input, Output: output}
	for i := range uint32((input + 511) / 512) {
		q.Blocks = append(q.Blocks, first+i)
	}
	return q
}

func run(t *testing.T, s *sim.Scenario) *sim.Result {
	t.Helper()
	r, err := sim.Run(t.Context(), s)
	require.NoError(t, err)
	return r
}

// TestCost: FAST'25's worked example of when the reuse of a prefix pays, its 320 KB a token, and LLaMA's 2 FLOPs a parameter.
func TestCost(t *testing.T) {
	m, err := sim.FindModel("llama3-70b")
	require.NoError(t, err)
	for name, gbps := range map[string]float64{"a800": 6, "h800": 19} {
		h, err := sim.FindHardware(name)
		require.NoError(t, err)
		h.MFU, h.LinkShare, h.StepOverhead = 1, 1, 0
		// A load at that bandwidth takes as long as the computation that it saves.
		c := sim.NewCost(&m, &h)
		saved := c.Prefill(100_000, 0) - c.Prefill(100_000, 8192)
		bandwidth := 8192 * float64(c.BytesPerToken()) / saved.Seconds() / 1e9
		require.InDelta(t, gbps, bandwidth, 0.5, name)
		require.Equal(t, 327_680, c.BytesPerToken())
	}
	h, err := sim.FindHardware("a800")
	require.NoError(t, err)
	c := sim.NewCost(&m, &h)
	step := func(batch, tokens int) float64 { return c.Step(batch, tokens).Seconds() }
	require.InDelta(t, step(1, 1000)+step(1, 3000), 2*step(1, 2000), 1e-8)
	require.Less(t, step(64, 64*4000), 64*step(1, 4000), "a step grows by less than its batch")
	require.Equal(t, c.Step(2, 8000), c.Step(1, 8000), "the weights are read once")
	require.Greater(t, c.Step(1000, 8000), c.Step(1, 8000), "until computation takes longer")
	require.Greater(t, c.Capacity(), 1_000_000)
}

// TestOneRequest alone: each part of its time by hand.
func TestOneRequest(t *testing.T) {
	s := quiet(workload.Trace{one(1000, 1500, 101, 0)})
	c := sim.NewCost(&s.Model, &s.Hardware)
	r := run(t, &s)
	o := r.Outcomes[0]
	require.Equal(t, sim.Completed, o.End)
	store := float64(c.BytesPerToken()) * 1500 / (s.Hardware.HostToDevice * s.Hardware.LinkShare)
	ttft := c.Prefill(1500, 0).Seconds() + store/80 // the store of the last layer is waited for
	require.InDelta(t, ttft, o.TTFT.Seconds(), 1e-6)
	require.InDelta(t, ttft, o.Prefilled.Seconds(), 1e-6)
	require.Zero(t, o.Queue)

	// The KV cache streams while it is computed; then it is loaded, and 100 steps follow.
	decode := store
	for k := range 100 {
		decode += c.Step(1, 1500+k).Seconds()
	}
	require.InDelta(t, 1+ttft+decode, o.Ended.Seconds(), 1e-6)
	longest := store + c.Step(1, 1500).Seconds()
	for k := 91; k < 100; k++ {
		longest += c.Step(1, 1500+k).Seconds()
	}
	require.InDelta(t, longest/10, o.TBT.Seconds(), 1e-6)
	require.InDelta(t, c.Step(1, 1500+90).Seconds(), o.TBTP90.Seconds(), 1e-6)

	ttftAlone, tbtAlone := sim.Unloaded(&s, 1500, 101)
	require.InDelta(t, o.TTFT.Seconds(), ttftAlone.Seconds(), 0.01)
	require.InDelta(t, o.TBTP90.Seconds(), tbtAlone.Seconds(), 0.001)

	s.Serial = true
	serial := run(t, &s).Outcomes[0]
	require.InDelta(t, c.Prefill(1500, 0).Seconds()+store, serial.TTFT.Seconds(), 1e-6)
	transfer := 1500 * float64(c.BytesPerToken()) / (s.Hardware.NIC * s.Hardware.LinkShare)
	require.InDelta(t, 1+serial.TTFT.Seconds()+transfer+decode, serial.Ended.Seconds(), 1e-6)
}

// TestPipeline: k equal chunks pass through x stages in the time of k + x - 1 of their parts.
func TestPipeline(t *testing.T) {
	for _, stages := range []int{1, 2, 4} {
		s := quiet(workload.Trace{one(0, 16384, 1, 0)})
		s.Prefill, s.PipelineGroupSize, s.PrefillChunk = stages, stages, 2048
		s.Model.Quadratic = 1e-9 // so that chunks are equal
		s.Hardware.HostToDevice, s.Hardware.NIC = 1e18, 1e18
		c := sim.NewCost(&s.Model, &s.Hardware)
		want := c.Prefill(2048, 0).Seconds() / float64(stages) * float64(8+stages-1)
		require.InDelta(t, want, run(t, &s).Outcomes[0].TTFT.Seconds(), 1e-4, "%d stages", stages)
	}
}

// TestReuse: what was computed once is loaded, and the last token is computed always.
func TestReuse(t *testing.T) {
	long := one(0, 20480, 1, 0)
	again := long
	again.TimeMS = 60_000
	s := quiet(workload.Trace{long, again})
	r := run(t, &s)
	require.EqualValues(t, 20479, r.Outcomes[1].Prefix)
	require.Less(t, r.Outcomes[1].TTFT, r.Outcomes[0].TTFT/4)
	require.InDelta(t, 0.5, r.HitRatio, 0.001)

	s.CacheTokens = 0
	require.Zero(t, run(t, &s).Outcomes[1].Prefix)
	s.CacheTokens, s.SSDTokens = 5120, 40960 // most comes from disk
	fromDisk := run(t, &s)
	require.Positive(t, fromDisk.Outcomes[1].Prefix)
	require.Greater(t, fromDisk.Outcomes[1].TTFT, r.Outcomes[1].TTFT)
	s.CacheTokens, s.SSDTokens, s.Pool = 1_000_000, 0, true
	require.EqualValues(t, 20479, run(t, &s).Outcomes[1].Prefix)
}

// TestCoupled: a prompt stops the decode steps of others, unless it is computed in pieces beside them.
func TestCoupled(t *testing.T) {
	trace := workload.Trace{one(0, 1000, 400, 0), one(2000, 30_000, 2, 100)}
	s := sim.Default()
	s.Trace, s.Prefill, s.Decode, s.Coupled = trace, 0, 0, 1
	c := sim.NewCost(&s.Model, &s.Hardware)
	r := run(t, &s)
	require.InDelta(t, c.Prefill(1000, 0).Seconds(), r.Outcomes[0].TTFT.Seconds(), 1e-6)
	stop := c.Prefill(30_000, 0).Seconds()
	require.Greater(t, r.Outcomes[0].TBT.Seconds()*40, stop)
	require.InDelta(t, stop, r.Outcomes[1].TTFT.Seconds(), 0.05)

	s.CoupledChunk = 512
	chunked := run(t, &s)
	require.Less(t, chunked.Outcomes[0].TBTP90.Seconds(), 0.5)
	require.Greater(t, chunked.Outcomes[1].TTFT, r.Outcomes[1].TTFT)

	s.CoupledChunk, s.CoupledPrefix = 0, true
	s.Trace = workload.Trace{one(0, 20_000, 2, 0), one(60_000, 20_000, 2, 0)}
	prefix := run(t, &s)
	require.EqualValues(t, 19_999, prefix.Outcomes[1].Prefix)
}

// variety is scenarios of all kinds on a small workload under load.
func variety(t *testing.T) map[string]sim.Scenario {
	t.Helper()
	trace, err := sim.Generate(sim.Workload{Name: "conversation", Requests: 400, Rate: 4, BlockSize: 512, Seed: 3})
	require.NoError(t, err)
	all := map[string]sim.Scenario{}
	add := func(name string, change func(s *sim.Scenario)) {
		s := sim.Default()
		s.Trace, s.Prefill, s.Decode = trace, 4, 2
		change(&s)
		all[name] = s
	}
	for _, policy := range []string{"random", "load-balance", "cache-aware", "kvcache-centric"} {
		add(policy, func(s *sim.Scenario) { s.Policy = policy })
	}
	for _, overload := range []string{"none", "early", "predictive"} {
		add(overload, func(s *sim.Scenario) { s.Overload, s.Speed = overload, 3 })
	}
	add("arxiv", func(s *sim.Scenario) { s.Variant = "arxiv" })
	add("groups", func(s *sim.Scenario) { s.PipelineGroupSize = 2 })
	add("serial", func(s *sim.Scenario) { s.Serial = true })
	add("pool", func(s *sim.Scenario) { s.Pool = true })
	add("disks", func(s *sim.Scenario) { s.CacheTokens, s.SSDTokens = 100_000, 500_000 })
	add("small memory", func(s *sim.Scenario) { s.Hardware.KVMemory = 0.05 })
	add("slow network", func(s *sim.Scenario) { s.Hardware.NIC = 3e9 })
	add("dynamic roles", func(s *sim.Scenario) { s.DynamicRoles = true })
	add("hints", func(s *sim.Scenario) { s.Overload, s.LengthHints = "predictive", true })
	add("coupled", func(s *sim.Scenario) { s.Prefill, s.Decode, s.Coupled = 0, 0, 6 })
	add("coupled, prefix", func(s *sim.Scenario) { s.Prefill, s.Decode, s.Coupled, s.CoupledPrefix = 0, 0, 6, true })
	add("coupled, chunks", func(s *sim.Scenario) { s.Prefill, s.Decode, s.Coupled, s.CoupledChunk = 0, 0, 6, 512 })
	add("coupled, small memory", func(s *sim.Scenario) {
		s.Prefill, s.Decode, s.Coupled, s.CoupledPrefix, s.Hardware.KVMemory = 0, 0, 6, true, 0.05
	})
	return all
}

// TestConservation: every request ends exactly once, in the order of cause and effect, whatever the scenario; and the same
// scenario gives the same bytes.
func TestConservation(t *testing.T) {
	for name, s := range variety(t) {
		t.Run(name, func(t *testing.T) {
			r := run(t, &s)
			require.Len(t, r.Outcomes, len(s.Trace))
			require.Equal(t, len(s.Trace), r.Completed+r.RejectedBefore+r.RejectedAtDecode)
			reasons := 0
			for _, n := range r.Reasons {
				reasons += n
			}
			require.Equal(t, r.Rejected(), reasons)
			for i, o := range r.Outcomes {
				switch o.End {
				case sim.Completed:
					require.Positive(t, o.TTFT)
					require.GreaterOrEqual(t, o.TTFT, o.Queue)
					require.GreaterOrEqual(t, o.Ended, o.Arrival+o.TTFT)
					require.GreaterOrEqual(t, o.TBT, o.TBTP90)
					require.Equal(t, o.Output > 1, o.TBT > 0)
					require.Less(t, o.Prefix, o.Input)
				case sim.RejectedBefore:
					require.Equal(t, o.Arrival, o.Ended)
					require.Zero(t, o.Prefilled)
				case sim.RejectedAtDecode:
					require.Greater(t, o.Ended, o.Arrival)
					require.Positive(t, o.Prefilled)
				case sim.Pending:
					t.Fatalf("request %d has not ended", i)
				}
			}
			require.LessOrEqual(t, r.PrefillBusy, 1.0)
			require.LessOrEqual(t, r.DecodeBusy, 1.0)
			require.NotEmpty(t, r.Series)
			first, err := json.Marshal(r)
			require.NoError(t, err)
			second, err := json.Marshal(run(t, &s))
			require.NoError(t, err)
			require.Equal(t, string(first), string(second))
		})
	}
}

// TestBadScenarios are refused with what is wrong.
func TestBadScenarios(t *testing.T) {
	for want, change := range map[string]func(s *sim.Scenario){
		"no requests":                 func(s *sim.Scenario) { s.Trace = nil },
		"a factor above 0":            func(s *sim.Scenario) { s.Speed = 0 },
		"speed NaN":                   func(s *sim.Scenario) { s.Speed = math.NaN() },
		"at least one of each":        func(s *sim.Scenario) { s.Decode = 0 },
		"is either of":                func(s *sim.Scenario) { s.Coupled = 1 },
		"nodes are from 0":            func(s *sim.Scenario) { s.Prefill = 1 << 20 },
		"coupled_chunk":               func(s *sim.Scenario) { s.CoupledChunk = -1 },
		"divided into groups":         func(s *sim.Scenario) { s.PipelineGroupSize = 3 },
		"single nodes":                func(s *sim.Scenario) { s.PipelineGroupSize, s.DynamicRoles = 2, true },
		"are tokens, 1 or more":       func(s *sim.Scenario) { s.PrefillChunk = 0 },
		"caches of -1":                func(s *sim.Scenario) { s.CacheTokens = -1 },
		"disks are behind":            func(s *sim.Scenario) { s.CacheTokens, s.SSDTokens = 0, 1 },
		"eviction policy \"no such\"": func(s *sim.Scenario) { s.EvictionPolicy = "no such" },
		"limits and decode_time":      func(s *sim.Scenario) { s.TTFTSLO = -1 },
		"tbt_limit":                   func(s *sim.Scenario) { s.TBTLimit = "" },
		"does not fit":                func(s *sim.Scenario) { s.Hardware.HBMBytes = 1e11 },
		"more than a year":            func(s *sim.Scenario) { s.Speed, s.Trace = 1e-9, workload.Trace{one(1000, 9, 1, 0)} },
		"between two points":          func(s *sim.Scenario) { s.Sample = 0 },
		"at most 1":                   func(s *sim.Scenario) { s.Hardware.MFU = 1.5 },
		"figures are above 0":         func(s *sim.Scenario) { s.Hardware.NIC = 0 },
		"model":                       func(s *sim.Scenario) { s.Model.Layers = 0 },
		"policy is \"no such\"":       func(s *sim.Scenario) { s.Policy = "no such" },
		"order of their timestamps":   func(s *sim.Scenario) { s.Trace = workload.Trace{one(5, 9, 1, 0), one(4, 9, 1, 0)} },
		"0 tokens in and 1 out":       func(s *sim.Scenario) { s.Trace = workload.Trace{one(5, 0, 1, 0)} },
		"is the block size another":   func(s *sim.Scenario) { s.BlockSize = 1024 },
	} {
		s := quiet(workload.Trace{one(0, 2000, 10, 0)})
		change(&s)
		_, err := sim.Run(t.Context(), &s)
		require.ErrorIs(t, err, sim.ErrScenario, want)
		require.ErrorContains(t, err, want)
	}
	_, err := sim.FindModel("no such")
	require.ErrorContains(t, err, "llama2-70b, llama3-70b")
	_, err = sim.FindHardware("no such")
	require.ErrorContains(t, err, "a800, h800")
}

// TestHitRatios: as the policies' own harness has them.
func TestHitRatios(t *testing.T) {
	trace := workload.Trace{{Blocks: []uint32{1, 2, 3, 1, 2, 4, 1, 2, 3}}}
	all, err := sim.HitRatios(trace, []string{"lru", sim.Optimum}, []int{3, 0})
	require.NoError(t, err)
	require.Equal(t, []int{4, 5, 4, 5}, []int{all[0].Hits, all[1].Hits, all[2].Hits, all[3].Hits})
	_, err = sim.HitRatios(trace, []string{"no such"}, []int{3})
	require.Error(t, err)
}

// TestCapacity: bisection finds the load at which the only node is too slow.
func TestCapacity(t *testing.T) {
	q := sim.Search{
		Low: 0.01, High: 10, Precision: 0.02,
		At: func(rate float64) (*sim.Scenario, error) {
			s := quiet(nil)
			for i := range 60 {
				s.Trace = append(s.Trace, one(uint64(float64(i)*1000/rate), 8192, 2, uint32(16*i)))
			}
			return &s, nil
		},
		Holds: func(r *sim.Result) bool { return r.TTFT.Max < 2*r.TTFT.P50+1 && r.TTFT.Max < 3 },
	}
	rate, r, err := sim.Capacity(t.Context(), &q)
	require.NoError(t, err)
	require.NotNil(t, r)
	alone, _ := sim.Unloaded(&r.Scenario, 8192, 2)
	require.InEpsilon(t, 1/alone.Seconds(), rate, 0.1)
	q.Holds = func(*sim.Result) bool { return false }
	rate, r, err = sim.Capacity(t.Context(), &q)
	require.NoError(t, err)
	require.Zero(t, rate)
	require.Nil(t, r)
}

// BenchmarkServe simulates a cluster of 8 and 8 nodes: aim 20,000 requests a second.
func BenchmarkServe(b *testing.B) {
	trace, err := sim.Generate(sim.Workload{Name: "conversation", BlockSize: 512, Seed: 1})
	require.NoError(b, err)
	s := sim.Default()
	s.Trace = trace
	start, n := time.Now(), 0
	for b.Loop() {
		_, err := sim.Run(b.Context(), &s)
		require.NoError(b, err)
		n += len(trace)
	}
	b.ReportMetric(float64(n)/time.Since(start).Seconds(), "requests/s")
}

// BenchmarkHitRatios plays the same trace through one cache: aim 100,000 requests a second.
func BenchmarkHitRatios(b *testing.B) {
	trace, err := sim.Generate(sim.Workload{Name: "conversation", BlockSize: 512, Seed: 1})
	require.NoError(b, err)
	start, n := time.Now(), 0
	for b.Loop() {
		_, err := sim.HitRatios(trace, []string{"lru"}, []int{10_000})
		require.NoError(b, err)
		n += len(trace)
	}
	b.ReportMetric(float64(n)/time.Since(start).Seconds(), "requests/s")
}
