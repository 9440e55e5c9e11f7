package sched

import (
	"slices"
	"time"
)

// TBT is the time between a request's tokens by both of the papers' measures.
type TBT struct {
	MeanLongest10 time.Duration // the mean of the longest 10% of the gaps
	P90           time.Duration // the gap that 90% of them do not exceed
}

// Of is the time by one measure.
func (t TBT) Of(m Measure) time.Duration {
	if m == P90 {
		return t.P90
	}
	return t.MeanLongest10
}

// MeasureTBT measures the gaps between a request's tokens, which it sorts. The longest tenth are at least one gap, and the
// percentile is by nearest rank: the smallest gap that at least 90% do not exceed.
func MeasureTBT(gaps []time.Duration) TBT {
	n := len(gaps)
	if n == 0 {
		return TBT{}
	}
	slices.Sort(gaps)
	tenth := (n + 9) / 10
	sum := 0.0 // of a million gaps of an hour, too
	for _, g := range gaps[n-tenth:] {
		sum += float64(g)
	}
	return TBT{MeanLongest10: time.Duration(sum / float64(tenth)), P90: gaps[(9*n+9)/10-1]}
}
