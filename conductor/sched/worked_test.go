package sched

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// round figures: a prefill takes 1 ms a token, a transfer 0.2 ms, a decode step 10 ms, 1 ms a sequence and 1 us a token of KV.
func roundCosts() Costs {
	return Costs{PrefillToken: 1e-3, Step: 10e-3, StepSequence: 1e-3, StepKVToken: 1e-6, TransferShare: 1, BytesPerToken: 1000}
}

const roundBandwidth = 5e6 // of 1000 bytes a token: 0.2 ms each

func newScheduler(tb testing.TB, cfg Config) *Scheduler {
	tb.Helper()
	m, err := NewModel(roundCosts())
	require.NoError(tb, err)
	s, err := New(cfg, m)
	require.NoError(tb, err)
	return s
}

func add(tb testing.TB, s *Scheduler, x Instance) InstanceID {
	tb.Helper()
	id, err := s.Add(x)
	require.NoError(tb, err)
	return id
}

// cluster adds p prefill and d decode instances; the ids of the former come first.
func cluster(tb testing.TB, s *Scheduler, p, d int) {
	tb.Helper()
	for range p {
		add(tb, s, Instance{Role: Prefill, Bandwidth: roundBandwidth})
	}
	for range d {
		add(tb, s, Instance{Role: Decode, Bandwidth: roundBandwidth})
	}
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// TestWorkedExample is Algorithm 1 by hand: a prompt of 4000 tokens, three prefill instances of which A holds 3000, B 2000 and
// C none, and the threshold 1.5. T_prefill is 1 ms a token that is not there, T_transfer 0.2 ms a token.
//
//	      own   best/own            T_queue  local: T_prefill       fetched: T_transfer + T_prefill
//	A     3000  1                   q_A      4000-3000 = 1000 ms    -
//	B     2000  1.5, the threshold  q_B      4000-2000 = 2000 ms    0.2 (3000-2000) = 200 ms + 1000 ms = 1200 ms
//	C     0     infinite            q_C      4000 ms                0.2 (3000-0)    = 600 ms + 1000 ms = 1600 ms
//
// At the threshold itself FAST'25 computes, its condition being best/own > threshold, and the arXiv report fetches, its
// condition for not doing so being best/own < threshold.
func TestWorkedExample(t *testing.T) {
	type want struct {
		prefill                    InstanceID
		ttft, queue, transfer, run int // ms
		prefix, fetched            int
		from                       InstanceID
		replicate                  Replication
	}
	const a, b, c = InstanceID(0), InstanceID(1), InstanceID(2)
	none := Replication{From: NoInstance, To: NoInstance}
	for _, x := range []struct {
		name    string
		variant Variant
		queues  [3]int // ms
		migrate int    // MigrateTokens
		network int    // ms that A is still sending for
		want    want
	}{
		// All idle: A 1000, B 2000, C 1600.
		{"idle", FAST25, [3]int{0, 0, 0}, 0, 0, want{a, 1000, 0, 0, 1000, 3000, 0, NoInstance, none}},
		// A 1000, B 1200, C 1600.
		{"idle", ArXiv, [3]int{0, 0, 0}, 0, 0, want{a, 1000, 0, 0, 1000, 3000, 0, NoInstance, none}},

		// A 1500+1000 = 2500, B 0+2000 = 2000, C 300+1600 = 1900.
		{"A is busy", FAST25, [3]int{1500, 0, 300}, 0, 0, want{c, 1900, 300, 600, 1000, 3000, 3000, a, Replication{a, c, 3000}}},
		// A 2500, B 0+1200 = 1200, C 1900. The copy to B is of what it lacks: 1000 tokens.
		{"A is busy", ArXiv, [3]int{1500, 0, 300}, 0, 0, want{b, 1200, 0, 200, 1000, 3000, 1000, a, Replication{a, b, 1000}}},

		// A 3500, B 2000, C 600+1600 = 2200: B wins with its own 2000, and lacks the longer prefix by no more than the threshold.
		{"A and C are busy", FAST25, [3]int{2500, 0, 600}, 0, 0, want{b, 2000, 0, 0, 2000, 2000, 0, NoInstance, none}},
		// A 3500, B 1200, C 2200. Of the last step's threshold in tokens, 3000 is not above 3000.
		{"A and C are busy", ArXiv, [3]int{2500, 0, 600}, 3000, 0, want{b, 1200, 0, 200, 1000, 3000, 1000, a, none}},

		// A's NIC is busy for 4000 ms more: C fetches in 4000+600+1000 = 5600 or computes in 4000. A 9000+1000, B 9000+2000.
		{"A and its NIC are busy", FAST25, [3]int{9000, 9000, 0}, 0, 4000, want{c, 4000, 0, 0, 4000, 0, 0, NoInstance, none}},
		// A 6000, B 9000+4200+1000, C 0+4600+1000 = 5600, which wins. By 4.2.5.2 C computes the 3000 tokens in 3000 ms, sooner than
		// they would come in 4600, so that it takes 4000 ms, and the copy is made beside it.
		{"A and its NIC are busy", ArXiv, [3]int{5000, 9000, 0}, 0, 4000, want{c, 4000, 0, 0, 4000, 0, 0, NoInstance, Replication{a, c, 3000}}},
	} {
		t.Run(string(x.variant)+"/"+x.name, func(t *testing.T) {
			s := newScheduler(t, Config{Variant: x.variant, MigrateTokens: x.migrate, Overload: None})
			cluster(t, s, 3, 1)
			for i, q := range x.queues {
				s.Report(0, InstanceID(i), Report{Queue: ms(q), Batch: -1})
			}
			s.instances[a].out.free = ms(x.network)
			d := s.Schedule(0, &Request{ID: 1, Input: 4000, Matches: []Match{{Instance: b, Tokens: 2000}, {Instance: a, Tokens: 3000}}})
			require.True(t, d.Accepted)
			got := want{
				d.Prefill, int(d.TTFT.Milliseconds()), int(d.Queue.Milliseconds()), int(d.Transfer.Milliseconds()),
				int(d.Execution.Milliseconds()), d.PrefixLen, d.TransferLen, d.TransferFrom, d.Replicate,
			}
			assert.Equal(t, x.want, got)
			assert.Equal(t, InstanceID(3), d.Decode)
		})
	}
}

// With no prefix anywhere both forms choose the shortest queue and transfer nothing.
func TestNoPrefixAnywhere(t *testing.T) {
	for _, v := range []Variant{FAST25, ArXiv} {
		s := newScheduler(t, Config{Variant: v})
		cluster(t, s, 3, 1)
		for i, q := range []int{300, 100, 200} {
			s.Report(0, InstanceID(i), Report{Queue: ms(q), Batch: -1})
		}
		d := s.Schedule(0, &Request{ID: 1, Input: 1000})
		assert.Equal(t, InstanceID(1), d.Prefill, v)
		assert.Equal(t, ms(1100), d.TTFT, v)
		assert.Equal(t, NoInstance, d.TransferFrom, v)
		assert.Zero(t, d.Replicate.Tokens, v)
	}
}

// The arXiv form to the letter compares the longest prefix, in tokens, with the threshold, a ratio: an instance that uses its
// own prefix is sent the rest of the longest as well.
func TestArXivMigratesWhatIsNotFetched(t *testing.T) {
	s := newScheduler(t, Config{Variant: ArXiv})
	cluster(t, s, 2, 1)
	s.Report(0, 0, Report{Queue: ms(5000), Batch: -1})
	d := s.Schedule(0, &Request{ID: 1, Input: 4000, Matches: []Match{{Instance: 0, Tokens: 2500}, {Instance: 1, Tokens: 2000}}})
	assert.Equal(t, InstanceID(1), d.Prefill)
	assert.Equal(t, 2000, d.PrefixLen, "2500/2000 is below the threshold: it computes the rest")
	assert.Equal(t, NoInstance, d.TransferFrom)
	assert.Equal(t, Replication{From: 0, To: 1, Tokens: 500}, d.Replicate, "which is copied beside it")
}
