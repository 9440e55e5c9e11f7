package policy

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNumbersAgainstMap compares a numbers table with a map, at every load up to its fullest.
func TestNumbersAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for _, keys := range []uint64{3, 6, 7, 100, 3000} {
		var m numbers[uint64]
		want := map[uint64]uint64{}
		for step := range 40_000 {
			key := rng.Uint64N(keys) << (rng.Uint64N(3) * 16)
			v, got := uint64(0), m.find(key)
			if got != nil {
				v = *got
			}
			before, in := want[key]
			if in != (got != nil) || v != before {
				t.Fatalf("step %d: %d at %d, want %d", step, v, key, before)
			}
			switch {
			case !in:
				*m.add(key) = uint64(step)
				want[key] = uint64(step)
			case rng.IntN(2) == 0:
				m.drop(key)
				delete(want, key)
			default:
				*got = uint64(step)
				want[key] = uint64(step)
			}
		}
		require.Equal(t, len(want), m.n)
		for key, v := range want {
			require.Equal(t, v, *m.find(key))
		}
	}
}

// linksTable is a table of links alone.
type linksTable struct {
	Table

	links []Links
}

func (l *linksTable) Links(s Slot) *Links { return &l.links[s] }

// TestBucketsAgainstSort compares the order of victims with a sort by number and time, over random calls and numbers of
// every width, dense and sparse.
func TestBucketsAgainstSort(t *testing.T) {
	const slots = 60
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 9))
		width := 1 + rng.IntN(secondBits)
		table := &linksTable{links: make([]Links, slots)}
		b := newBuckets(table, width)
		queues := map[uint64][]Slot{}
		at := map[Slot]uint64{}
		for step := range 400 {
			s := rng.Uint32N(slots)
			if key, in := at[s]; in {
				if !b.removeInner(s) {
					b.removeEnd(key, s)
				}
				queues[key] = slices.DeleteFunc(queues[key], func(x Slot) bool { return x == s })
				delete(at, s)
			} else {
				key := rng.Uint64N(1<<width) >> rng.IntN(width)
				b.pushHot(key, s)
				queues[key] = append(queues[key], s)
				at[s] = key
			}
			var want, got []Slot
			for _, key := range slices.Sorted(maps.Keys(queues)) {
				want = append(want, queues[key]...)
			}
			b.victims(func(s Slot) Verdict { got = append(got, s); return Take })
			require.True(t, slices.Equal(want, got), "seed %d, step %d: want %v, got %v", seed, step, want, got)
			require.Equal(t, len(want), b.n)
		}
	}
}
