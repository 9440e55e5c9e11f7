package sim

import (
	"context"
	"time"
)

// Unloaded is what a request of so many tokens without a cached prefix gets from an idle cluster: the baseline that the arXiv
// report's limits are multiples of. The first gap between tokens, in which the KV cache moves, does not count.
func Unloaded(s *Scenario, input, output int) (ttft, tbt time.Duration) {
	c := NewCost(&s.Model, &s.Hardware)
	return c.Prefill(input, 0), c.Step(1, input+output/2)
}

// Search looks for the largest load at which something holds.
type Search struct {
	Low, High float64                            // Low holds, or the answer is 0
	Precision float64                            // relative, as 0.02
	At        func(x float64) (*Scenario, error) // the scenario under a load: an arrival rate or a replay speed
	Holds     func(r *Result) bool               // the criterion
}

// Capacity bisects. It returns the largest load that was seen to hold and its result, which is nil if there is none.
func Capacity(ctx context.Context, q *Search) (float64, *Result, error) {
	best, result := 0.0, (*Result)(nil)
	try := func(x float64) (bool, error) {
		s, err := q.At(x)
		if err != nil {
			return false, err
		}
		r, err := Run(ctx, s)
		if err != nil || !q.Holds(r) {
			return false, err
		}
		best, result = x, r
		return true, nil
	}
	low, high := q.Low, q.High
	for _, x := range []float64{low, high} {
		if ok, err := try(x); err != nil || ok != (x == low) {
			return best, result, err
		}
	}
	for high-low > q.Precision*low {
		x := (low + high) / 2
		ok, err := try(x)
		if err != nil {
			return best, result, err
		}
		if ok {
			low = x
		} else {
			high = x
		}
	}
	return best, result, nil
}

// RelativeLimits sets the limits of a scenario to so many times what a request of its trace's mean lengths gets from an idle
// cluster: the arXiv report has 10 times the TTFT and 5 times the TBT.
func (s *Scenario) RelativeLimits(ttft, tbt float64) {
	in, out := 0, 0
	for i := range s.Trace {
		in += s.Trace[i].Input
		out += s.Trace[i].Output
	}
	n := max(1, len(s.Trace))
	first, between := Unloaded(s, in/n, out/n)
	s.TTFTSLO, s.TBTSLO = time.Duration(ttft*float64(first)), time.Duration(tbt*float64(between))
}
