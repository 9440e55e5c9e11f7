package sim

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// naive is a batch that does one step after the other and remembers every gap.
type naive struct {
	cost   Cost
	now    time.Duration
	tokens int
	active []*naiveSequence
}

type naiveSequence struct {
	left    int
	last    time.Duration
	gaps    []float64
	ended   time.Duration
	request int32
}

func (n *naive) join(request int32, input, output int, firstToken time.Duration) *naiveSequence {
	s := &naiveSequence{left: output - 1, last: firstToken, request: request}
	n.tokens += input
	n.active = append(n.active, s)
	return s
}

func (n *naive) step(kv map[int32]int) {
	t := n.cost.step(len(n.active), n.tokens)
	n.tokens += len(n.active)
	n.now += time.Duration(t * 1e9)
	n.active = slices.DeleteFunc(n.active, func(s *naiveSequence) bool {
		s.gaps = append(s.gaps, (n.now - s.last).Seconds())
		s.last = n.now
		s.left--
		if s.left == 0 {
			s.ended = n.now
			n.tokens -= kv[s.request]
		}
		return s.left == 0
	})
}

// TestBatchIsStepByStep: many steps at once end when the same steps end one by one, with the same gaps, while sequences
// join at any time and leave.
func TestBatchIsStepByStep(t *testing.T) {
	s := Default()
	cost := NewCost(&s.Model, &s.Hardware)
	rng := rand.New(rand.NewPCG(1, 2))
	fast, slow := batch{cost: &cost}, naive{cost: cost}
	seen, kv := map[int32]*naiveSequence{}, map[int32]int{}
	var now time.Duration
	ended := 0
	for r := range int32(400) {
		now += time.Duration(rng.ExpFloat64() * float64(200*time.Millisecond))
		input, output := 1+rng.IntN(30_000), 2+rng.IntN(300)
		if fast.running && fast.ends() < now {
			// Runs that end before it comes are gone through first.
			for len(fast.active) > 0 && fast.ends() < now {
				ended += turnBatch(t, &fast, seen)
			}
		}
		at := now
		if fast.running {
			fast.cut(now)
			at = fast.ends()
			ended += turnBatchAt(t, &fast, seen)
		}
		kv[r] = input + output - 1
		for slow.now < at && len(slow.active) > 0 && at-slow.now > time.Microsecond {
			slow.step(kv)
		}
		slow.now = at
		require.Equal(t, slow.tokens, fast.tokens)
		fast.join(r, input, output, at-time.Millisecond, at)
		seen[r] = slow.join(r, input, output, at-time.Millisecond)
		for len(slow.active) > 0 && slow.now < at {
			slow.step(kv)
		}
		fast.run(at, math.MaxInt64)
		require.Len(t, slow.active, len(fast.active))
	}
	for len(slow.active) > 0 {
		slow.step(kv)
	}
	for len(fast.active) > 0 {
		ended += turnBatch(t, &fast, seen)
	}
	require.Equal(t, 400, ended)
}

// turnBatch ends a run and begins the next.
func turnBatch(t *testing.T, b *batch, seen map[int32]*naiveSequence) int {
	t.Helper()
	n := turnBatchAt(t, b, seen)
	if len(b.active) > 0 {
		b.run(b.lastStep, math.MaxInt64)
	}
	return n
}

func turnBatchAt(t *testing.T, b *batch, seen map[int32]*naiveSequence) (ended int) {
	t.Helper()
	b.ran(b.ends(), math.MaxInt64)
	for {
		s, ok := b.leave()
		if !ok {
			return ended
		}
		ended++
		longest, p90 := b.tbt(&s)
		t.Cleanup(func() {
			gaps := seen[s.request].gaps
			slices.Sort(gaps)
			slices.Reverse(gaps)
			require.EqualValues(t, len(gaps), s.end-s.first)
			k := (len(gaps) + 9) / 10
			sum := 0.0
			for _, g := range gaps[:k] {
				sum += g
			}
			require.InDelta(t, sum/float64(k), longest.Seconds(), 1e-6)
			require.InDelta(t, gaps[len(gaps)/10], p90.Seconds(), 1e-6)
		})
	}
}

// TestCut: a run is cut at the end of the step under way, whenever that is.
func TestCut(t *testing.T) {
	s := Default()
	cost := NewCost(&s.Model, &s.Hardware)
	for _, c := range []struct {
		after float64 // steps
		want  int64
	}{{0, 1}, {0.5, 1}, {1.5, 2}, {10.99, 11}, {98.5, 99}} {
		b := batch{cost: &cost}
		b.join(0, 1000, 101, 0, time.Second)
		b.run(time.Second, math.MaxInt64)
		require.EqualValues(t, 100, b.planned)
		k := int64(c.after)
		at := time.Second + seconds(b.span(k)+(c.after-float64(k))*(b.span(k+1)-b.span(k)))
		require.True(t, b.cut(at))
		require.Equal(t, c.want, b.planned)
		require.False(t, b.cut(at))
	}
}

func TestSelectLargest(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		x := make([]float64, 1+rng.IntN(60))
		for i := range x {
			x[i] = float64(rng.IntN(20))
		}
		k := 1 + rng.IntN(len(x))
		want := slices.Sorted(slices.Values(x))
		slices.Reverse(want)
		selectLargest(x, k)
		got := slices.Sorted(slices.Values(x[:k]))
		slices.Reverse(got)
		require.Equal(t, want[:k], got)
	}
}

// TestEvents: in the order of time, and of planning at the same time.
func TestEvents(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var q events
	for i := range int32(1000) {
		q.add(time.Duration(rng.IntN(50)), sampleDue, i, 0)
	}
	last := q.next()
	for range 999 {
		e := q.next()
		require.True(t, last.at < e.at || last.at == e.at && last.who < e.who)
		last = e
	}
}

// TestShare: transfers share a NIC fairly, and what is limited elsewhere leaves the rest.
func TestShare(t *testing.T) {
	inf := math.Inf(1)
	for _, c := range []struct {
		limits []float64
		want   float64 // of the unlimited
	}{
		{[]float64{inf}, 100},
		{[]float64{inf, inf}, 50},
		{[]float64{10, inf}, 90},
		{[]float64{10, 45, inf, inf}, 30},
		{[]float64{10, 40, inf}, 50},
		{[]float64{10, 20}, inf},
	} {
		s := side{bandwidth: 100}
		flows := make([]flow, len(c.limits))
		for i, l := range c.limits {
			flows[i].limit = l
			s.flows = append(s.flows, int32(i))
		}
		require.InDelta(t, 1/c.want, 1/s.share(flows), 1e-9, "%v", c.limits)
	}
}
