package policy

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// pastUse is a use in naivePast.
type pastUse struct {
	key    uint64
	stamp  int64
	class  int
	number uint64
}

// TestHistoryAgainstNaive: random uses, with the limit reached, keys thinned out
// and the history flushed and restored on the way, against a slice.
func TestHistoryAgainstNaive(t *testing.T) {
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 9))
		limit := 200 + rng.Uint64N(2000)
		h, disk := newHistory(limit), pages{}
		var want []pastUse // the last use of each key, oldest first
		held, stamp := 20+rng.Uint64N(100), int64(0)
		cut := func() {
			want = slices.DeleteFunc(want, func(u pastUse) bool { return u.number < h.first || !h.samples(u.key) })
		}
		for step := range 20_000 {
			key := mix64(rng.Uint64N(40 + rng.Uint64N(900)))
			stamp += 1 + rng.Int64N(3)
			at := slices.IndexFunc(want, func(u pastUse) bool { return u.key == key })
			r := h.find(key)
			require.Equal(t, at >= 0, r != nil, "seed %d, step %d", seed, step)
			if at >= 0 {
				require.Equal(t, want[at].stamp, r.stamp)
				require.Equal(t, want[at].class, int(r.class))
				if h.shift == 0 {
					require.Equal(t, len(want)-at <= int(held), h.recent(r), "seed %d, step %d", seed, step)
				}
			}
			if !h.samples(key) {
				continue
			}
			class := rng.IntN(larderClasses)
			now := held >> h.shift
			for h.crowded(now) {
				h.forget()
			}
			cut()
			want = slices.DeleteFunc(want, func(u pastUse) bool { return u.key == key })
			want = append(want, pastUse{key, stamp, class, h.next})
			h.push(key, stamp, class, 3, now)
			cut()
			if rng.IntN(10) == 0 {
				at := max(0, len(want)-1-rng.IntN(20))
				want[at].class = rng.IntN(larderClasses)
				h.reclass(want[at].key, want[at].class)
			}
			if rng.IntN(200) > 0 {
				continue
			}
			h.flush(false, disk.put)
			got := newHistory(limit)
			got.reserve(h.first, h.next, uint64(len(h.ring)))
			got.shift, got.lru = h.shift, h.lru
			for _, page := range slices.Sorted(maps.Keys(disk)) {
				require.NoError(t, got.restore(page, disk[page]))
			}
			require.Equal(t, h.hash, got.hash, "seed %d, step %d", seed, step)
			require.Equal(t, h.inLRU, got.inLRU)
			require.Equal(t, h.at.n, got.at.n)
			require.LessOrEqual(t, len(disk), int(limit)/historyPage+3)
			h = got
		}
		require.LessOrEqual(t, uint64(len(h.ring)), max(historyPage, 2*limit))
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
	h := newHistory(1000)
	m.learn(&h, 1)
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
	m.learn(&h, 1)
	require.Greater(t, m.rate(1, 900), 5*m.rate(1, 10), "soon")
	require.Greater(t, m.rate(1, 900), 5*m.rate(1, 2000), "too late")
	require.Greater(t, m.rate(2, 10), m.rate(1, 10), "a half after 100 is more than one after 1000")
	require.Less(t, m.rate(2, 500), m.rate(1, 500))
	require.Less(t, m.rate(3, 10), m.rate(2, 10)/4, "never")
	was := m.hash
	m.rehash()
	require.Equal(t, was, m.hash)
	for range 100_000 {
		m.end(1, 1000, true)
	}
	was = m.hash
	m.rehash()
	require.Equal(t, was, m.hash, "kept up to date by each event")
}

// TestModelBounds: counts as high as a store may hold overflow nothing.
func TestModelBounds(t *testing.T) {
	var m model
	for c := range m.classes {
		for i := range ages {
			m.classes[c].returns[i], m.classes[c].ends[i] = maxCount/larderClasses, maxCount/larderClasses
		}
	}
	h := newHistory(1000)
	m.learn(&h, 1)
	for c := range m.classes {
		require.Positive(t, m.rate(c, 0))
		require.LessOrEqual(t, m.rate(c, 0), uint64(1)<<rateBits)
	}
}

// TestDuel: LRU takes over when it leads by enough, for longer each time, and
// gives way.
func TestDuel(t *testing.T) {
	d := duel{patience: patienceLeast}
	d.lrus = 50
	d.judge(1600)
	require.Zero(t, d.yielding)
	d.ours = 30
	d.judge(1600)
	require.Equal(t, uint64(20), d.deficit)
	d.lrus = 100
	d.judge(1600)
	require.Equal(t, uint64(patienceLeast), d.yielding)
	for range patienceLeast {
		d.lrus = 1000
		d.judge(1600)
	}
	require.Zero(t, d.yielding, "what LRU leads by while it decides does not count")
	require.Equal(t, uint64(2*patienceLeast), d.patience)
	d.ours = 10
	d.judge(1600)
	require.Equal(t, uint64(2*patienceLeast-1), d.patience)
}

// FuzzRestoreLarder: no page makes larder panic, and what it accepts it writes
// again such that it is accepted with the same hash.
func FuzzRestoreLarder(f *testing.F) {
	seed := &larder{past: newHistory(2000)}
	seed.past.reserve(700, 800, historyPage)
	seed.past.lru, seed.patience = 750, 8
	seed.past.set(705, record{key: 5, stamp: 7, class: 1, uses: 2})
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

// BenchmarkLesson is the longest there is: it is held once for an eighth of the history.
func BenchmarkLesson(b *testing.B) {
	h := newHistory(DefaultMaxGhosts)
	for i := range int64(DefaultMaxGhosts) {
		h.push(mix64(uint64(i)), i, int(i)%larderClasses, 0, 100_000)
	}
	m := new(model)
	for b.Loop() {
		m.learn(&h, DefaultMaxGhosts)
	}
}
