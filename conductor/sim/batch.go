package sim

import (
	"math"
	"slices"
	"time"
)

// batch is the sequences that an engine decodes together, and the steps that it has done. While nobody joins or leaves the
// steps grow by the same time each, so that any number of them is worked out at once.
type batch struct {
	cost   *Cost
	active []sequence // a heap, the one that ends first on top
	steps  int64      // done
	tokens int        // of KV that the next step reads

	running  bool
	start    time.Duration // of the run of steps under way
	planned  int64         // steps of it
	base     float64       // seconds of its first step
	grow     float64       // seconds by which each is longer than the one before
	lastStep time.Duration // when the step before the run ended

	log  []run // of those steps that sequences now active have seen, and some before
	gaps []float64
	busy time.Duration
}

// sequence is a request in a batch.
type sequence struct {
	request int32
	first   int64         // its first step
	end     int64         // the step before which it has left
	waited  time.Duration // from its first token to the beginning of its first step
	finalKV int           // tokens of KV when it leaves
}

// run is steps between two changes of a batch.
type run struct {
	first, n   int64
	base, grow float64
	extra      float64 // seconds that the first step came late for those that were there before
}

// span is the seconds of the first k steps of the run under way.
func (b *batch) span(k int64) float64 {
	x := float64(k)
	return b.base*x + b.grow*x*(x-1)/2
}

// join adds a sequence before the next step. firstToken is when its first token came.
func (b *batch) join(request int32, input, output int, firstToken, now time.Duration) {
	s := sequence{
		request: request, first: b.steps, end: b.steps + int64(output) - 1,
		waited: now - firstToken, finalKV: input + output - 1,
	}
	b.tokens += input
	b.active = append(b.active, s)
	h := b.active
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if h[up].end <= h[i].end {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

// run begins steps until the first sequence has all its tokens, at most so many, and returns when they end. There has to be
// a sequence.
func (b *batch) run(now time.Duration, most int64) time.Duration {
	n := len(b.active)
	b.running, b.start = true, now
	b.planned = min(b.active[0].end-b.steps, most)
	b.base, b.grow = b.cost.step(n, b.tokens), b.cost.kv*float64(n)
	return b.ends()
}

func (b *batch) ends() time.Duration { return b.start + seconds(b.span(b.planned)) }

// cut ends the run under way with the step under way. It reports false if that is what was planned already.
func (b *batch) cut(now time.Duration) bool {
	t := max(0, (now - b.start).Seconds())
	k := int64(t / b.base)
	if b.grow > 0 {
		p := b.base - b.grow/2
		k = int64((math.Sqrt(p*p+2*b.grow*t) - p) / b.grow)
	}
	k = max(1, k)
	for k > 1 && b.start+seconds(b.span(k-1)) >= now {
		k--
	}
	for b.start+seconds(b.span(k)) < now {
		k++
	}
	if k >= b.planned {
		return false
	}
	b.planned = k
	return true
}

// ran takes note of the steps of a run that has ended now. Time after until does not count as busy.
func (b *batch) ran(now, until time.Duration) {
	r := run{first: b.steps, n: b.planned, base: b.base, grow: b.grow, extra: (b.start - b.lastStep).Seconds()}
	b.running = false
	b.trim()
	b.log = append(b.log, r)
	b.steps += b.planned
	b.tokens += int(b.planned) * len(b.active)
	b.busy += max(0, min(now, until)-b.start)
	b.lastStep = now
}

// trimAfter is how long the log may grow before those runs are dropped that nobody is interested in any more: their number
// is that of changes while the slowest sequence is there, a few hundred, and looking costs one pass over the batch.
const trimAfter = 256

func (b *batch) trim() {
	if len(b.log) < trimAfter || len(b.log) < cap(b.log) {
		return
	}
	oldest := b.steps
	for i := range b.active {
		oldest = min(oldest, b.active[i].first)
	}
	b.log = append(b.log[:0], b.log[b.find(oldest):]...)
}

// find is the run of a step.
func (b *batch) find(step int64) int {
	i, _ := slices.BinarySearchFunc(b.log, step, func(r run, s int64) int {
		if r.first+r.n <= s {
			return -1
		}
		return 1
	})
	return i
}

// leave takes out a sequence that has all its tokens, if there is one.
func (b *batch) leave() (s sequence, ok bool) {
	if len(b.active) == 0 || b.active[0].end > b.steps {
		return s, false
	}
	h := b.active
	s = h[0]
	last := len(h) - 1
	h[0] = h[last]
	h = h[:last]
	b.active = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			break
		}
		if down+1 < last && h[down+1].end < h[down].end {
			down++
		}
		if h[i].end <= h[down].end {
			break
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
	b.tokens -= s.finalKV
	return s, true
}

// tbt is what a sequence that has left waited for its tokens: the mean of the longest 10% of the gaps between them, and their
// 90th percentile. The first gap begins with the first token, which prefill made.
func (b *batch) tbt(s *sequence) (longest, p90 time.Duration) {
	g := b.gaps[:0]
	for i := b.find(s.first); i < len(b.log) && b.log[i].first < s.end; i++ {
		r := &b.log[i]
		from, to := max(r.first, s.first), min(r.first+r.n, s.end)
		for step := from; step < to; step++ {
			g = append(g, r.base+r.grow*float64(step-r.first))
		}
		if from == r.first {
			g[len(g)-int(to-from)] += r.extra
		}
		if from == s.first {
			g[0] = r.base + r.grow*float64(from-r.first) + s.waited.Seconds()
		}
	}
	b.gaps = g
	if len(g) == 0 {
		return 0, 0
	}
	k := (len(g) + 9) / 10
	selectLargest(g, k)
	sum := 0.0
	for _, x := range g[:k] {
		sum += x
	}
	// By nearest rank 90% are at or below: it is the largest of those that are not among the longest floor(10%).
	selectLargest(g, len(g)/10+1)
	return seconds(sum / float64(k)), seconds(slices.Min(g[:len(g)/10+1]))
}

// selectLargest moves the k largest to the front, in any order.
func selectLargest(x []float64, k int) {
	for lo, hi := 0, len(x)-1; lo < hi; {
		pivot := x[lo+(hi-lo)/2]
		i, j := lo, hi
		for i <= j {
			for x[i] > pivot {
				i++
			}
			for x[j] < pivot {
				j--
			}
			if i <= j {
				x[i], x[j] = x[j], x[i]
				i++
				j--
			}
		}
		switch {
		case k-1 <= j:
			hi = j
		case k-1 >= i:
			lo = i
		default:
			return
		}
	}
}
