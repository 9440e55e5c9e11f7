package sched

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// driver makes random calls, and checks what must hold of every answer.
type driver struct {
	t    testing.TB
	s    *Scheduler
	rng  *rand.Rand
	now  time.Duration
	ids  []uint64 // accepted
	next uint64
	log  []string // of decisions
}

func newDriver(tb testing.TB, cfg Config, seed uint64) *driver {
	tb.Helper()
	d := &driver{t: tb, s: newScheduler(tb, cfg), rng: rand.New(rand.NewPCG(seed, 1))}
	for range 8 {
		d.add()
	}
	return d
}

func (d *driver) add() {
	_, _ = d.s.Add(Instance{
		Role: Role(1 + d.rng.IntN(3)), Bandwidth: float64(d.rng.IntN(3)) * roundBandwidth, KVCapacity: d.rng.IntN(2) * 50_000, MaxBatch: d.rng.IntN(20),
	})
}

func (d *driver) instance() InstanceID { return InstanceID(d.rng.IntN(len(d.s.instances)+2) - 1) }

func (d *driver) request() Request {
	d.next++
	r := Request{
		ID: d.next, Class: []string{"", "chat", "batch"}[d.rng.IntN(3)], Priority: d.rng.IntN(4), Input: d.rng.IntN(6000) - 10,
		Output: d.rng.IntN(2) * d.rng.IntN(500), Pool: d.rng.IntN(2) * d.rng.IntN(7000), BytesPerToken: d.rng.IntN(2) * 2000,
	}
	for range d.rng.IntN(6) {
		r.Matches = append(r.Matches, Match{d.instance(), d.rng.IntN(8000) - 10, time.Duration(d.rng.IntN(2) * d.rng.IntN(1e10))})
	}
	return r
}

func (d *driver) schedule() {
	r := d.request()
	x := d.s.Schedule(d.now, &r)
	d.log = append(d.log, fmt.Sprintf("%+v", x))
	s := d.s
	for _, t := range []time.Duration{x.TTFT, x.Queue, x.Transfer, x.Execution, x.TBT, x.TBTs.P90, x.TBTs.MeanLongest10} {
		require.GreaterOrEqual(d.t, t, time.Duration(0))
	}
	require.GreaterOrEqual(d.t, x.Load, 0.0)
	require.Equal(d.t, x.TTFT, x.Queue+x.Transfer+x.Execution)
	require.Equal(d.t, x.Accepted, x.Reason == Accepted)
	if !x.Accepted {
		require.NotEmpty(d.t, x.Explain())
		require.Zero(d.t, x.Replicate.Tokens)
		return
	}
	d.ids = append(d.ids, r.ID)
	require.True(d.t, s.is(x.Prefill, Prefill) && s.is(x.Decode, Decode), "%+v", x)
	require.True(d.t, x.PrefixLen >= 0 && x.PrefixLen <= r.Input)
	require.True(d.t, x.TransferLen >= 0 && x.TransferLen <= x.PrefixLen)
	require.Equal(d.t, x.TransferFrom == NoInstance, x.TransferLen == 0)
	require.NotEqual(d.t, x.Prefill, x.TransferFrom)
	require.True(d.t, x.TransferFrom < 0 || s.is(x.TransferFrom, Prefill))
	if c := x.Replicate; c.Tokens > 0 {
		require.True(d.t, c.To == x.Prefill && c.From != c.To && s.is(c.From, Prefill), "%+v", x)
	}
	if limit := s.limits[s.byClass[r.Class]].TTFTSLO; limit > 0 {
		require.LessOrEqual(d.t, x.TTFT, limit)
	}
}

// step makes one call of a kind.
func (d *driver) step(kind int) {
	s, id := d.s, uint64(0)
	if len(d.ids) > 0 {
		id = d.ids[d.rng.IntN(len(d.ids))]
	}
	switch kind % 16 {
	case 0, 1, 2, 3, 4:
		d.schedule()
	case 5, 6, 7:
		s.PrefillDone(d.now, id, time.Duration(d.rng.IntN(5e9)), d.rng.IntN(100)-1)
	case 8:
		ok, why := s.AdmitDecode(d.now, id)
		d.log = append(d.log, fmt.Sprint(ok, why))
	case 9, 10:
		s.DecodeDone(d.now, id, d.rng.IntN(500))
	case 11:
		s.Forget(d.now, id)
	case 12:
		s.Report(d.now, d.instance(), Report{
			Queue: time.Duration(d.rng.IntN(5e9) - 1e9), Batch: d.rng.IntN(30) - 3, KVTokens: d.rng.IntN(50_000) - 1000,
			Step: time.Duration(d.rng.IntN(1e8)), TBT: TBT{time.Duration(d.rng.IntN(1e8)), time.Duration(d.rng.IntN(1e8))},
		})
	case 13:
		s.TransferDone(d.now, id, time.Duration(d.rng.IntN(1e9)))
	case 14:
		l := s.Load(d.now)
		require.True(d.t, l.Prefill >= 0 && l.Decode >= 0 && l.Batch >= 0 && l.KVTokens >= 0, "%+v", l)
		if who, role, ok := s.Rebalance(d.now); ok {
			require.NotZero(d.t, s.instances[who].Role&^role)
		}
	case 15:
		switch d.rng.IntN(8) {
		case 0:
			s.Remove(d.now, d.instance())
		case 1, 2:
			d.add()
		default:
			s.SetRole(d.now, d.instance(), Role(d.rng.IntN(5)))
		}
	}
	d.now += time.Duration(d.rng.IntN(3e8))
}

// end ends all requests.
func (d *driver) end() {
	for _, id := range d.ids {
		d.s.DecodeDone(d.now, id, 1)
	}
	empty(d.t, d.s)
}

// configs are one of each policy, variant and mode.
func configs() []Config {
	var all []Config
	for _, p := range []Policy{Random, LoadBalance, CacheAware, KVCacheCentric} {
		for _, v := range []Variant{FAST25, ArXiv} {
			for _, o := range []Overload{None, Early, Predictive} {
				n := len(all)
				all = append(all, Config{
					Policy: p, Variant: v, Overload: o, LayerWise: n%2 == 0, PipelineGroupSize: 1 + n%3, Presume: n%5 == 0, MaxRequests: 40 + n, Seed: uint64(n),
					RequestTTL: time.Minute, PoolBandwidth: float64(n%2) * roundBandwidth, BlockSize: 16, MaxInstances: 12,
					Classes: map[string]Limits{"": {TTFTSLO: 20 * time.Second, TBTSLO: ms(50)}, "chat": {TBTSLO: ms(30), Priority: 2}},
				})
			}
		}
	}
	return all
}

// The same calls get the same answers, all answers can be, and nothing is left when all requests have ended.
func TestRandomCalls(t *testing.T) {
	for i, cfg := range configs() {
		var logs [2][]string
		for k := range logs {
			d := newDriver(t, cfg, uint64(i))
			for range 400 {
				d.step(d.rng.IntN(16))
			}
			d.end()
			logs[k] = d.log
		}
		require.Equal(t, logs[0], logs[1])
		assert.True(t, slices.ContainsFunc(logs[0], func(l string) bool { return strings.HasPrefix(l, "{Accepted:true") }))
	}
}

func FuzzCalls(f *testing.F) {
	f.Add(uint64(1), []byte("0123456789abcdef"))
	f.Add(uint64(23), []byte{0, 5, 8, 9, 0, 0, 12, 15, 14, 15, 0, 11, 13})
	all := configs()
	f.Fuzz(func(t *testing.T, seed uint64, calls []byte) {
		d := newDriver(t, all[seed%uint64(len(all))], seed)
		for _, c := range calls[:min(len(calls), 500)] {
			d.step(int(c))
		}
		d.end()
	})
}
