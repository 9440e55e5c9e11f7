package sched

import "time"

// ages counts the sequences that are being decoded, and the tokens of their prompts, by when they began, in buckets of an
// eighth of t_d. What began longer ago than the buckets go back counts as their first.
type ages struct {
	n           [ageBuckets]int32
	inputs      [ageBuckets]int64
	first       int64 // bucket that comes first; it is at first % ageBuckets
	total       int32
	totalInputs int64
}

const (
	bucketsPerTime = 8  // in t_d
	ageBuckets     = 64 // four t_d back, and as far ahead: see Scheduler.began
)

// advance has the buckets end as far ahead of now as they go back.
func (a *ages) advance(bucket int64) {
	want := bucket - ageBuckets/2
	if a.total == 0 {
		a.first = max(a.first, want)
		return
	}
	for range min(ageBuckets, max(0, want-a.first)) {
		old, next := a.first%ageBuckets, (a.first+1)%ageBuckets
		a.n[next] += a.n[old]
		a.inputs[next] += a.inputs[old]
		a.n[old], a.inputs[old] = 0, 0
		a.first++
	}
	if a.first < want { // all are in the last one now
		from, to := a.first%ageBuckets, want%ageBuckets
		if from != to {
			a.n[to], a.inputs[to], a.n[from], a.inputs[from] = a.n[from], a.inputs[from], 0, 0
		}
		a.first = want
	}
}

// change adds sequences to a bucket, or takes them from it. It returns the bucket that they are counted in.
func (a *ages) change(bucket int64, n int32, inputs int64) int64 {
	bucket = max(a.first, min(bucket, a.first+ageBuckets-1))
	i := bucket % ageBuckets
	a.n[i] += n
	a.inputs[i] += inputs
	a.total += n
	a.totalInputs += inputs
	return bucket
}

// bucket is the number of the one that a time is nearest to, which may come before the clock's origin.
func (s *Scheduler) bucket(at time.Duration) int64 {
	return max(0, int64(at/s.bucketWidth())+ageBuckets)
}

// bucketWidth is that of the buckets of ages.
func (s *Scheduler) bucketWidth() time.Duration { return max(1, s.cfg.DecodeTime/bucketsPerTime) }

// remaining is how many of the sequences will still be decoded at a time, and the tokens of their prompts: those that will
// have run for less than t_d then, or, if the distribution of their answers' lengths is known, the share of those of each
// age that is so long.
func (s *Scheduler) remaining(a *ages, l *lengths, now, by time.Duration, step float64) (n, inputs float64) {
	if a.total == 0 {
		return 0, 0
	}
	width := s.bucketWidth()
	for b := a.first; b < a.first+ageBuckets; b++ {
		i := b % ageBuckets
		if a.n[i] == 0 {
			continue
		}
		began := time.Duration(b-ageBuckets) * width
		stay := 1.0
		switch {
		case l != nil && step > 0:
			stay = l.stays(max(0, now-began).Seconds()/step, (by-began).Seconds()/step)
		case by-began >= s.cfg.DecodeTime:
			continue
		}
		n += stay * float64(a.n[i])
		inputs += stay * float64(a.inputs[i])
	}
	return n, inputs
}
