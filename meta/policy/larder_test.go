package policy

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// pastUse is the last use of a key.
type pastUse struct {
	key    uint64
	stamp  int64
	class  int
	number uint64
}

// TestHistoryAgainstNaive: random uses, with the limit reached, keys thinned out
// by sweeps and the history flushed and restored on the way, against a slice.
func TestHistoryAgainstNaive(t *testing.T) {
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 9))
		limit := 200 + rng.Uint64N(2000)
		h, disk := newHistory(limit), pages{}
		var want []pastUse // the last use of each key, oldest first
		held, stamp, lessons := 20+rng.Uint64N(100), int64(0), 0
		for step := range 20_000 {
			key := mix64(rng.Uint64N(40 + rng.Uint64N(900)))
			stamp += 1 + rng.Int64N(3)
			if !h.samples(key) {
				continue
			}
			at := slices.IndexFunc(want, func(u pastUse) bool { return u.key == key })
			number, found := h.find(key)
			require.Equal(t, at >= 0, found, "seed %d, step %d", seed, step)
			if found {
				r := h.cell(number)
				got := pastUse{key, r.stamp(), r.class(), number}
				require.Equal(t, want[at], got)
				if h.shift == 0 {
					require.Equal(t, len(want)-at <= int(held), number >= h.lru, "seed %d, step %d", seed, step)
				}
				want = slices.Delete(want, at, at+1)
			}
			class := rng.IntN(larderClasses)
			want = append(want, pastUse{key, stamp, class, h.next})
			h.push(key, packRecord(stamp, class, 3))
			for h.next-h.first > h.span(held>>h.shift) {
				gone, last := h.forget()
				if last {
					require.Equal(t, want[0].key, gone.key)
					want = want[1:]
				}
			}
			h.follow(held >> h.shift)
			if rng.IntN(10) == 0 {
				at := max(0, len(want)-1-rng.IntN(20))
				want[at].class = rng.IntN(larderClasses)
				h.reclass(want[at].key, want[at].class)
			}
			if h.swept < h.lesson {
				from, seen := h.swept, []pastUse(nil)
				h.sweep(func(r *record) { seen = append(seen, pastUse{r.key, r.stamp(), r.class(), 0}) })
				var due []pastUse
				for _, u := range want {
					if u.number >= from && u.number < h.swept {
						due = append(due, pastUse{u.key, u.stamp, u.class, 0})
					}
				}
				require.Equal(t, due, seen, "seed %d, step %d", seed, step)
			} else if h.due() {
				lessons++
				h.begin(held >> h.shift)
				want = slices.DeleteFunc(want, func(u pastUse) bool { return !h.samples(u.key) })
			}
			if rng.IntN(200) > 0 {
				continue
			}
			h.flush(false, disk.put)
			got := newHistory(limit)
			got.reserve(h.first, h.next)
			got.shift, got.lru, got.lesson, got.swept, got.thinning = h.shift, h.lru, h.lesson, h.swept, h.thinning
			for _, page := range slices.Sorted(maps.Keys(disk)) {
				require.NoError(t, got.restore(page, disk[page]))
			}
			require.Equal(t, h.hash, got.hash, "seed %d, step %d", seed, step)
			require.Equal(t, h.inLRU, got.inLRU)
			require.LessOrEqual(t, len(disk), int(limit)/historyPage+3)
			h = got
		}
		require.Greater(t, lessons, 5)
		require.LessOrEqual(t, len(h.pages), max(2, 2*int(limit)/historyPage+2))
	}
}

// TestPlacesAgainstMap: keys come and go, through buckets that are split.
func TestPlacesAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	p, want := newPlaces(), map[uint64]uint64{} // number by tag
	var tags []uint64
	for step := range uint64(60_000) {
		if len(tags) > 0 && rng.Uint64N(60_000) < step/2 {
			i := rng.IntN(len(tags))
			tag := tags[i]
			tags[i] = tags[len(tags)-1]
			tags = tags[:len(tags)-1]
			p.drop(tag, want[tag])
			delete(want, tag)
		} else if tag := tagOf(rng.Uint64()); want[tag] == 0 {
			want[tag] = step + 1
			tags = append(tags, tag)
			p.add(tag, step+1)
		}
	}
	got := map[uint64]uint64{}
	seen := map[*bucket]bool{}
	for i, b := range p.buckets {
		if seen[b] {
			continue
		}
		seen[b] = true
		n := 0
		for _, c := range b.cells {
			if c != 0 {
				got[c>>numberBits] = c & numberMask
				require.Equal(t, uint64(i)&(1<<b.depth-1), c>>(numberBits+homeBits)&(1<<b.depth-1))
				n++
			}
		}
		require.Equal(t, n, b.n)
		require.LessOrEqual(t, len(b.cells), placesMost)
	}
	require.Equal(t, want, got)
	require.Greater(t, len(seen), 16)
	for _, tag := range tags {
		p.drop(tag, want[tag]) // panics or never ends if it cannot be found
	}
}

// TestAges: steps cover all ages without a gap, in order.
func TestAges(t *testing.T) {
	for step := range ages {
		require.Equal(t, step, ageOf(int64(ageAt(step))))
		if step > 0 {
			require.Equal(t, step-1, ageOf(int64(ageAt(step))-1))
		}
	}
	require.Equal(t, ages-1, ageOf(1<<62))
	require.Equal(t, 0, ageOf(-1))
}

// TestModelLearns: an entry of a class used again after a certain time is worth
// most shortly before, and nothing much after; without knowledge all are alike
// and age alone counts.
func TestModelLearns(t *testing.T) {
	var m model
	learn := func() {
		for c := range larderClasses {
			m.weigh(c)
		}
	}
	learn()
	for c := range larderClasses {
		require.Equal(t, m.classes[0].rates, m.classes[c].rates)
		for i := 1; i < ages; i++ {
			require.LessOrEqual(t, m.classes[c].rates[i], m.classes[c].rates[i-1], "class %d, step %d", c, i)
		}
	}
	for range 500 {
		m.end(1, 1000, true) // a loop
		m.end(2, 100, true)  // half of them soon, the others never
		m.end(2, 9000, false)
		m.end(3, 9000, false) // never
	}
	learn()
	require.Greater(t, m.rate(1, 900), 5*m.rate(1, 10), "soon")
	require.Greater(t, m.rate(1, 900), 5*m.rate(1, 2000), "too late")
	require.Greater(t, m.rate(2, 10), m.rate(1, 10), "a half after 100 is more than one after 1000")
	require.Less(t, m.rate(2, 500), m.rate(1, 500))
	require.Less(t, m.rate(3, 10), m.rate(2, 10)/4, "never")
	for range 100_000 {
		m.end(1, 1000, true)
		m.wait(3, 5)
	}
	m.halve()
	for c := range larderClasses {
		m.fade(c)
	}
	var sum model
	for c := range m.classes {
		for kind, cells := range m.classes[c].cells() {
			for i, v := range cells {
				sum.set(c, kind, i, &sum.classes[c].cells()[kind][i], v)
			}
		}
	}
	require.Equal(t, m.hash, sum.hash, "kept up to date by each event")
	require.Zero(t, m.classes[3].waits)
}

// TestIndices: the best rate over all spans, each tried.
func TestIndices(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for range 100 {
		var chances, rates [ages]uint64
		for i := range chances {
			chances[i] = rng.Uint64N(whole >> rng.IntN(24))
		}
		indices(&rates, &chances)
		for from := range rates {
			alive, hits, spent, best := 1.0, 0.0, 0.0, 0.0
			for i := from; i < ages; i++ {
				hit := alive * float64(chances[i]) / whole
				hits += hit
				spent += (alive - hit/2) * float64(ageWidth(i))
				alive -= hit
				best = max(best, hits/spent)
			}
			best *= 1 << rateBits
			require.InDelta(t, best, float64(rates[from]), 2+best/1000, "from step %d: %v", from, chances)
		}
	}
}

// TestModelBounds: counts as high as a store may hold overflow nothing.
func TestModelBounds(t *testing.T) {
	var m model
	for c := range m.classes {
		for i := range ages {
			m.classes[c].returns[i], m.classes[c].ends[i] = maxCount/larderClasses, maxCount/larderClasses
		}
	}
	for c := range m.classes {
		m.weigh(c)
	}
	for c := range m.classes {
		require.Positive(t, m.rate(c, 0))
		require.LessOrEqual(t, m.rate(c, 0), uint64(1)<<rateBits)
	}
}

// TestDuel: LRU takes over when it leads by enough, again and again, for longer
// each time, and gives way.
func TestDuel(t *testing.T) {
	d := duel{patience: patienceLeast}
	round := func(ours, lrus uint64) {
		d.ours, d.lrus = ours, lrus
		d.judge(1600)
	}
	round(0, 50)
	require.Zero(t, d.yielding, "less than a thirty-second of the entries")
	round(30, 0)
	require.Equal(t, uint64(20), d.deficit)
	round(0, 500)
	require.Zero(t, d.yielding, "one burst may be chance")
	round(510, 0)
	require.Equal(t, uint64(10), d.deficit)
	round(10, 0)
	require.Zero(t, d.noise, "forgotten with the deficit")
	for range deficitNoise {
		round(0, 40)
		require.Zero(t, d.yielding)
	}
	round(0, 40)
	require.Equal(t, uint64(patienceLeast), d.yielding, "the fourth of a kind")
	for range patienceLeast {
		round(0, 1000)
	}
	require.Zero(t, d.yielding)
	require.Zero(t, d.deficit, "what LRU leads by while it decides does not count")
	require.Equal(t, uint64(2*patienceLeast), d.patience)
	round(10, 0)
	require.Equal(t, uint64(2*patienceLeast-1), d.patience)
}

// FuzzRestoreLarder: no page makes larder panic, and what it accepts it writes
// again such that it is accepted with the same hash.
func FuzzRestoreLarder(f *testing.F) {
	seed := &larder{past: newHistory(2000)}
	seed.past.reserve(700, 800)
	seed.past.lru, seed.past.lesson, seed.past.swept, seed.patience = 750, 720, 710, 8
	seed.past.set(705, record{5, packRecord(7, 1, 2)})
	var written [][]byte
	seed.FlushState(true, func(_ uint32, data []byte) { written = append(written, slices.Clone(data)) })
	f.Add(written[0], uint32(3), written[1])
	f.Add(written[0], uint32(historyPages+2), written[len(written)-2])
	f.Add(written[0], uint32(historyPages+3), written[len(written)-1])
	f.Fuzz(func(t *testing.T, header []byte, page uint32, data []byte) {
		cfg := Config{MaxGhosts: 2000}
		p, err := New("larder", cfg, nil)
		require.NoError(t, err)
		if p.RestoreState(0, header) != nil || page != 0 && p.RestoreState(page, data) != nil {
			return
		}
		store := pages{}
		p.FlushState(true, store.put)
		again, err := New("larder", cfg, nil)
		require.NoError(t, err)
		for _, n := range slices.Sorted(maps.Keys(store)) {
			require.NoError(t, again.RestoreState(n, store[n]))
		}
		require.Equal(t, p.StateHash(), again.StateHash())
	})
}
