package policy_test

import (
	"fmt"
	"testing"

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
