package policy_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// benchWorkingSet is the number of entries that "touch" uses again and again.
// Being the same at every size it shows the cost of the algorithm; "touch_all"
// and "remove_add" go over all entries and show that of cache misses as well.
const benchWorkingSet = 1000

// benchSizes show that the cost does not depend on the number of entries.
var benchSizes = []int{10_000, 100_000, 1_000_000, 10_000_000}

func filled(b *testing.B, name string, n int) (policy.Policy, *policytest.Table) {
	b.Helper()
	t := &policytest.Table{}
	p, err := policy.New(name, policy.Config{TTLMS: 3_600_000}, t)
	require.NoError(b, err)
	for i := range n {
		p.Add(t.Insert(benchInfo(uint64(i))))
	}
	for i := range n / 4 { // some were used
		p.Touch(scatter(i, n), 1)
	}
	return p, t
}

func benchInfo(i uint64) known {
	return known{Info: policy.Info{AddedMS: i / 100, Index: uint32(i % 64)}, KeyHash: i*0x9e3779b97f4a7c15 + 1, Parent: policy.None}
}

// scatter names entries all over the table.
func scatter(i, n int) policy.Slot { return policy.Slot(uint64(i) * 2_654_435_761 % uint64(n)) }

// BenchmarkPolicy measures a use, and the full cycle of a store into a full
// pool: first victim, its eviction, the new entry.
func BenchmarkPolicy(b *testing.B) {
	for _, name := range policy.Names() {
		for _, n := range benchSizes {
			if testing.Short() && n > 1_000_000 {
				continue
			}
			b.Run(fmt.Sprintf("%s/entries=%d", name, n), func(b *testing.B) { benchOne(b, name, n) })
		}
	}
}

func benchOne(b *testing.B, name string, n int) {
	b.Helper()
	p, t := filled(b, name, n)
	i := 0
	b.Run("touch", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p.Touch(scatter(i%benchWorkingSet, n), 1)
			i++
		}
	})
	b.Run("touch_all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p.Touch(scatter(i, n), 1)
			i++
		}
	})
	next := uint64(n)
	b.Run("evict_add", func(b *testing.B) {
		b.ReportAllocs()
		var victim policy.Slot
		yield := func(s policy.Slot) policy.Verdict { victim = s; return policy.Stop }
		for b.Loop() {
			p.Victims(0, yield)
			p.Evict(victim)
			t.Delete(victim)
			p.Add(t.Insert(benchInfo(next)))
			next++
		}
	})
	b.Run("remove_add", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s := scatter(i, n)
			p.Remove(s)
			p.Add(s)
			i++
		}
	})
}

// longestRounds is how often BenchmarkLongestCall makes the same calls, to tell
// what a call costs from what happened beside it.
const longestRounds = 7

// BenchmarkLongestCall is the longest single call while a pool fills up, turns
// over and is used: it is what everybody waits for. Every call takes its least
// time of some rounds.
func BenchmarkLongestCall(b *testing.B) {
	const calls = 3 << 20
	for _, name := range []string{"lru", "s3fifo", "larder"} {
		for _, n := range []int{1000, 100_000} {
			b.Run(fmt.Sprintf("%s/entries=%d", name, n), func(b *testing.B) {
				least := make([]time.Duration, calls)
				for b.Loop() {
					for round := range longestRounds {
						timeCalls(b, name, n, least, round == 0)
					}
				}
				slices.Sort(least)
				b.ReportMetric(float64(least[calls-1]), "max-ns/call")
				b.ReportMetric(float64(least[calls-1-calls/100_000]), "p99999-ns/call")
				b.ReportMetric(float64(least[calls/2]), "p50-ns/call")
			})
		}
	}
}

// timeCalls makes one call for each of least, and notes the time it took if that
// is less.
func timeCalls(b *testing.B, name string, n int, least []time.Duration, first bool) {
	b.Helper()
	t := &policytest.Table{}
	p, err := policy.New(name, policy.Config{}, t)
	require.NoError(b, err)
	rng := rand.New(rand.NewPCG(1, 1))
	var victim policy.Slot
	yield := func(s policy.Slot) policy.Verdict { victim = s; return policy.Stop }
	next := uint64(0)
	for i := range least {
		use := i > n && rng.IntN(3) == 0
		if !use && p.Len() == n {
			p.Victims(0, yield)
			p.Evict(victim)
			t.Delete(victim)
		}
		s := scatter(rng.IntN(n), n)
		if !use {
			next++
			s = t.Insert(benchInfo(next))
		}
		start := time.Now()
		if use {
			p.Touch(s, 1)
		} else {
			p.Add(s)
		}
		if d := time.Since(start); first || d < least[i] {
			least[i] = d
		}
	}
}
