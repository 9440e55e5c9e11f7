package sched

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// happening is the end of a request's prefill, or of its decoding.
type happening struct {
	at     time.Duration
	id     uint64
	decode bool
	tokens int
}

// after adds one to a list that is sorted by time.
func after(h []happening, x happening) []happening {
	i, _ := slices.BinarySearchFunc(h, x, func(a, b happening) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	return slices.Insert(h, i, x)
}

// outcome is what became of the requests.
type outcome struct {
	before, after, served int
	swing                 float64 // the standard deviation of the number that are decoded, over its mean
}

// overloaded serves twice the requests that can be decoded, whose prefills take 5 s, in a world that does what is predicted. It
// tells how long answers are if they are to be learned.
func overloaded(t *testing.T, mode Overload, tell bool) outcome {
	t.Helper()
	m, err := NewModel(Costs{PrefillToken: 1e-3, Step: 10e-3, StepSequence: 1e-3, TransferShare: 1})
	require.NoError(t, err)
	s, err := New(Config{
		Overload: mode, DecodeTime: 8 * time.Second,
		Classes: map[string]Limits{"": {TTFTSLO: 30 * time.Second, TBTSLO: 40 * time.Millisecond}},
	}, m)
	require.NoError(t, err)
	const prefills, decodes, input, last = 75, 2, 5000, 4 * time.Minute
	cluster(t, s, prefills, decodes)
	rng := rand.New(rand.NewPCG(1, 2))
	free := make([]time.Duration, prefills)
	var h []happening
	var o outcome
	var sum, squares, samples float64
	arrival, id := time.Duration(0), uint64(0)
	for sampled := time.Duration(0); arrival < last || len(h) > 0; {
		if arrival < last && (len(h) == 0 || arrival <= h[0].at) {
			now := arrival
			arrival += time.Duration(rng.ExpFloat64() * float64(66*time.Millisecond))
			id++
			d := s.Schedule(now, &Request{ID: id, Input: input})
			if !d.Accepted {
				o.before++
				continue
			}
			free[d.Prefill] = max(now, free[d.Prefill]) + d.Execution
			h = after(h, happening{free[d.Prefill], id, false, 0})
			continue
		}
		x := h[0]
		h = h[1:]
		if x.decode {
			s.DecodeDone(x.at, x.id, x.tokens)
			o.served++
			continue
		}
		s.PrefillDone(x.at, x.id, 0, -1)
		l := s.Load(x.at)
		if x.at > time.Minute && x.at < last && x.at-sampled > time.Second {
			sampled = x.at
			n := float64(l.Decoding)
			sum, squares, samples = sum+n, squares+n*n, samples+1
		}
		if ok, _ := s.AdmitDecode(x.at, x.id); !ok {
			o.after++
			continue
		}
		tokens := 100 + rng.IntN(200)
		told := 0
		if tell {
			told = tokens
		}
		h = after(h, happening{x.at + time.Duration(tokens)*40*time.Millisecond, x.id, true, told})
	}
	empty(t, s)
	mean := sum / samples
	o.swing = math.Sqrt(squares/samples-mean*mean) / mean
	return o
}

// As in the arXiv report's figure 10, early rejection sees the load of now, and what is prefilled meanwhile comes to too much or
// too little: its load swings, and prefills are in vain. The prediction saves most of these, and once it knows how long answers
// are, the load is flat.
func TestOverloadControl(t *testing.T) {
	none, early := overloaded(t, None, false), overloaded(t, Early, false)
	system, request := overloaded(t, Predictive, false), overloaded(t, Predictive, true)
	t.Logf("none %+v, early %+v, predictive %+v, with lengths %+v", none, early, system, request)
	assert.Zero(t, none.before)
	assert.Less(t, early.after, 2*none.after/3)
	assert.Less(t, system.after, early.after/2)
	assert.Less(t, request.after, early.after/2)
	assert.Greater(t, request.served, early.served)
	assert.Less(t, request.swing, 2*early.swing/3)
}
