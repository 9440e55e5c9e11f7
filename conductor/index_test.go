package conductor

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
)

var testScope = Scope{Tenant: "default", Model: "m", BlockSize: 4}

func source(instance string) *Source {
	return &Source{Instance: instance, Scope: testScope, Rank: kvevent.NoRank}
}

// seq is the tokens from a to b.
func seq(a, b int) (list []uint32) {
	for i := a; i < b; i++ {
		list = append(list, uint32(i))
	}
	return list
}

// stored is an event of blocks of tokens that an engine calls hashes, after parent if that is not 0.
func stored(parent uint64, tokens []uint32, hashes ...uint64) *kvevent.Event {
	return &kvevent.Event{
		Kind: kvevent.Stored, Hashes: hashes, Parent: parent, HasParent: parent != 0, Tokens: tokens, BlockSize: 4, Rank: kvevent.NoRank,
		BaseBlock: -1,
	}
}

func removed(hashes ...uint64) *kvevent.Event {
	return &kvevent.Event{Kind: kvevent.Removed, Hashes: hashes, Rank: kvevent.NoRank, BaseBlock: -1}
}

func cleared(m kvevent.Medium) *kvevent.Event {
	return &kvevent.Event{Kind: kvevent.Cleared, Medium: m, Rank: kvevent.NoRank}
}

func apply(t *testing.T, x *Index, instance string, events ...*kvevent.Event) {
	t.Helper()
	for _, e := range events {
		require.NoError(t, x.Apply(source(instance), e, e.Rank))
	}
}

// longest is what each engine has of a prompt.
func longest(x *Index, tokens []uint32) map[string]int {
	found := map[string]int{}
	for _, m := range x.Query(testScope, tokens, nil) {
		if m.Longest > 0 {
			found[m.Instance] = m.Longest
		}
	}
	return found
}

// TestLongestPrefix: what counts are whole blocks from the beginning, without a gap, whatever engines call them.
func TestLongestPrefix(t *testing.T) {
	x := NewIndex(IndexConfig{})
	apply(t, x, "a", stored(0, seq(0, 8), 1, 2), stored(2, seq(8, 12), 3))
	apply(t, x, "b", stored(0, seq(0, 4), 77)) // its seed is another one
	require.Equal(t, map[string]int{"a": 12, "b": 4}, longest(x, seq(0, 15)))
	require.Equal(t, map[string]int{"a": 8, "b": 4}, longest(x, seq(0, 11)))
	require.Empty(t, longest(x, seq(0, 3)))
	require.Empty(t, longest(x, seq(1, 9)))
	apply(t, x, "a", removed(2))
	require.Equal(t, map[string]int{"a": 4, "b": 4}, longest(x, seq(0, 15)), "what comes after a gap is of no use")
	apply(t, x, "a", stored(1, seq(4, 8), 2))
	require.Equal(t, map[string]int{"a": 12, "b": 4}, longest(x, seq(0, 15)))
	require.Nil(t, x.Query(Scope{Tenant: "other", Model: "m", BlockSize: 4}, seq(0, 8), nil))
	found := func(matches []Match) (n []int) {
		for _, m := range matches {
			n = append(n, m.Longest)
		}
		return n
	}
	require.Equal(t, []int{12, 4}, found(x.QueryHashes(testScope, []uint64{1, 2, 3})), "by what engines call them")
	require.Equal(t, []int{4, 4}, found(x.QueryHashes(testScope, []uint64{77, 78})), "one prompt's block has a name for each engine")
	names := Names(nil, 0, seq(0, 15), 4, nil)
	require.Equal(t, []int{12, 4}, found(x.QueryHashes(testScope, names)), "or by the standard's")
	require.Len(t, names, 3)
	require.Equal(t, x.Query(testScope, seq(0, 15), nil), x.QueryNames(testScope, names))
}

// TestMediaAndRanks: the GPU counts from the beginning, in all and for each rank; other media where they are.
func TestMediaAndRanks(t *testing.T) {
	x := NewIndex(IndexConfig{})
	on := func(e *kvevent.Event, m kvevent.Medium, rank int) *kvevent.Event {
		e.Medium, e.Rank = m, rank
		return e
	}
	apply(t, x, "a",
		on(stored(0, seq(0, 16), 1, 2, 3, 4), kvevent.CPU, kvevent.NoRank),
		on(stored(0, seq(0, 8), 1, 2), kvevent.GPU, 0),
		on(stored(0, seq(0, 4), 1), kvevent.GPU, 1),
		on(stored(4, seq(16, 20), 5), kvevent.Disk, kvevent.NoRank),
		on(stored(4, seq(16, 20), 5), kvevent.GPU, 1))
	m := x.Query(testScope, seq(0, 24), nil)
	require.Equal(t, []Match{{
		Instance: "a", Longest: 20, Media: [kvevent.Media]int{kvevent.GPU: 8, kvevent.CPU: 16, kvevent.Disk: 4},
		Ranks: []RankMatch{{0, 8}, {1, 4}},
	}}, m)
	apply(t, x, "a", cleared(kvevent.CPU))
	require.Equal(t, 8, x.Query(testScope, seq(0, 24), nil)[0].Longest)
	apply(t, x, "a", on(cleared(kvevent.Media), kvevent.Media, 0))
	require.Equal(t, 4, x.Query(testScope, seq(0, 24), nil)[0].Longest, "rank 1 has its own")
}

// TestRankOfASource: events that name no rank are of their source's.
func TestRankOfASource(t *testing.T) {
	x := NewIndex(IndexConfig{})
	src := source("a")
	src.Rank = 2
	require.NoError(t, x.Apply(src, stored(0, seq(0, 8), 1, 2), kvevent.NoRank))
	require.Equal(t, []RankMatch{{2, 8}}, x.Query(testScope, seq(0, 8), nil)[0].Ranks)
}

// TestSaltAndImages: the same tokens with another salt, or another image, are another prompt.
func TestSaltAndImages(t *testing.T) {
	x := NewIndex(IndexConfig{})
	salted := stored(0, seq(0, 8), 1, 2)
	salted.Salt = []byte("pepper")
	image := stored(0, seq(0, 8), 3, 4)
	image.Extras = []uint64{0, 9}
	apply(t, x, "a", salted, stored(2, seq(8, 12), 5))
	apply(t, x, "b", image)
	require.Equal(t, map[string]int{"b": 4}, longest(x, seq(0, 12)))
	m := x.Query(testScope, seq(0, 12), []byte("pepper"))
	require.Equal(t, 12, m[0].Longest, "what follows has the salt of its beginning")
	require.Zero(t, m[1].Longest)
}

// TestGroups: a hit needs all blocks of groups with full attention, and the last ones of those with a sliding window.
func TestGroups(t *testing.T) {
	x := NewIndex(IndexConfig{})
	in := func(e *kvevent.Event, group, window int) *kvevent.Event {
		e.Group, e.Window = group, window
		return e
	}
	apply(t, x, "a", in(stored(0, seq(0, 24), 1, 2, 3, 4, 5, 6), 0, 0), in(stored(0, seq(0, 24), 1, 2, 3, 4, 5, 6), 1, 8))
	require.Equal(t, map[string]int{"a": 24}, longest(x, seq(0, 24)))
	apply(t, x, "a", in(removed(1, 2, 6), 1, 0))
	require.Equal(t, map[string]int{"a": 20}, longest(x, seq(0, 24)), "the window's last blocks are there up to the fifth")
	apply(t, x, "a", in(removed(4), 1, 0))
	require.Empty(t, longest(x, seq(0, 24)), "nowhere are two of them in a row, from the third on")
	apply(t, x, "a", in(stored(0, seq(0, 4), 1), 1, 8))
	require.Equal(t, map[string]int{"a": 4}, longest(x, seq(0, 24)), "a prompt of one block needs one")
	apply(t, x, "a", in(removed(1), 0, 0))
	require.Empty(t, longest(x, seq(0, 24)))
}

// TestCopies: a block is there until its last copy is gone.
func TestCopies(t *testing.T) {
	x := NewIndex(IndexConfig{})
	apply(t, x, "a", stored(0, seq(0, 4), 1), stored(0, seq(0, 4), 1), stored(0, seq(0, 4), 1))
	for range 2 {
		apply(t, x, "a", removed(1))
		require.Equal(t, map[string]int{"a": 4}, longest(x, seq(0, 4)))
	}
	apply(t, x, "a", removed(1))
	require.Empty(t, longest(x, seq(0, 4)))
	apply(t, x, "a", removed(1, 2))
	require.Zero(t, x.blocks.Load())
	require.EqualValues(t, 2, x.counts.unknown.Load())
}

// TestOrphans: what came too early is found once what was before it is known, in whatever order.
func TestOrphans(t *testing.T) {
	x := NewIndex(IndexConfig{MaxOrphans: 6})
	bare := stored(0, nil, 4)
	bare.Medium = kvevent.CPU
	apply(t, x, "a", stored(3, seq(12, 16), 4), bare, stored(2, seq(8, 12), 3))
	require.Empty(t, longest(x, seq(0, 16)))
	apply(t, x, "a", stored(0, seq(0, 8), 1, 2))
	require.Equal(t, map[string]int{"a": 16}, longest(x, seq(0, 16)))
	require.Equal(t, 4, x.Query(testScope, seq(0, 16), nil)[0].Media[kvevent.CPU])
	require.EqualValues(t, 3, x.counts.stitched.Load())

	apply(t, x, "b", stored(11, seq(4, 12), 12, 13), bare)
	bare.Hashes = []uint64{21}
	apply(t, x, "b", bare, removed(21))
	apply(t, x, "b", stored(30, seq(0, 16), 31, 32, 33, 34), stored(40, seq(0, 4), 41))
	require.EqualValues(t, 2, x.counts.lost.Load(), "the oldest make room")
	apply(t, x, "b", cleared(kvevent.Media))
	require.Zero(t, x.scopes[testScope].orphans.n)
}

// TestStandardNames: events without tokens that have RFC 1527's names are known by these.
func TestStandardNames(t *testing.T) {
	x := NewIndex(IndexConfig{Seed: 7})
	names := Names(nil, 7, seq(0, 12), 4, nil)
	e := &kvevent.Event{Kind: kvevent.Stored, Hashes: names, Standard: true, Medium: kvevent.External, Rank: kvevent.NoRank}
	apply(t, x, "pool", e)
	require.Equal(t, map[string]int{"pool": 12}, longest(x, seq(0, 12)))
	gone := &kvevent.Event{Kind: kvevent.Removed, Hashes: names[1:], Standard: true, Medium: kvevent.External, Rank: kvevent.NoRank}
	apply(t, x, "pool", gone)
	require.Equal(t, map[string]int{"pool": 4}, longest(x, seq(0, 12)))
}

// TestBounds: cold scopes make room, and what has no place is refused.
func TestBounds(t *testing.T) {
	x := NewIndex(IndexConfig{MaxBlocks: 4, MaxScopes: 2, MaxPlaces: 70})
	at := func(model string) *Source {
		return &Source{Instance: "a", Scope: Scope{Model: model, BlockSize: 4}, Rank: kvevent.NoRank}
	}
	for _, model := range []string{"m1", "m2"} {
		require.NoError(t, x.Apply(at(model), stored(0, seq(0, 8), 1, 2), kvevent.NoRank))
	}
	require.NotEmpty(t, x.Query(at("m1").Scope, seq(0, 8), nil))
	require.NoError(t, x.Apply(at("m3"), stored(0, seq(0, 4), 1), kvevent.NoRank))
	require.Nil(t, x.Query(at("m2").Scope, seq(0, 8), nil), "it was used least lately")
	require.EqualValues(t, 3, x.blocks.Load())
	require.NoError(t, x.Apply(at("m3"), stored(0, seq(0, 20), 1, 2, 3, 4, 5), kvevent.NoRank))
	require.EqualValues(t, 5, x.counts.refused.Load(), "it would not fit alone")
	require.NoError(t, x.Apply(&Source{}, stored(0, nil, 1), kvevent.NoRank))
	require.ErrorIs(t, x.Apply(&Source{}, removed(1), kvevent.NoRank), ErrScope)
	for i := range 71 {
		err := x.Apply(&Source{Instance: fmt.Sprint(i), Scope: testScope}, stored(0, seq(0, 4), 1), 0)
		require.Equal(t, i == 70, err != nil)
	}
	require.Len(t, x.Query(testScope, seq(0, 4), nil), 70)
}

// model is what an index should know: for each engine and place, how often each block is there.
type model struct {
	lies map[string]map[[2]int]int // instance -> prompt, block
}

// TestRandomEvents compares the index with a model, while it is swept.
func TestRandomEvents(t *testing.T) {
	const prompts, blocks = 20, 12
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 1))
		x, m := NewIndex(IndexConfig{}), model{map[string]map[[2]int]int{}}
		engines := []string{"a", "b", "c"}
		for _, e := range engines {
			m.lies[e] = map[[2]int]int{}
		}
		hash := func(engine, p, i int) uint64 { return uint64(engine)<<32 + uint64(p*blocks+i) + 1 }
		for step := range 4000 {
			engine := rng.IntN(3)
			name, p, from := engines[engine], rng.IntN(prompts), rng.IntN(blocks)
			lies := m.lies[name]
			switch op := rng.IntN(100); {
			case op < 60:
				parent := uint64(0)
				if from > 0 {
					if lies[[2]int{p, from - 1}] == 0 {
						continue
					}
					parent = hash(engine, p, from-1)
				}
				var hashes []uint64
				to := from + 1 + rng.IntN(blocks-from)
				for i := from; i < to; i++ {
					hashes = append(hashes, hash(engine, p, i))
					lies[[2]int{p, i}]++
				}
				apply(t, x, name, stored(parent, seq(p*1000+from*4, p*1000+to*4), hashes...))
			case op < 98:
				apply(t, x, name, removed(hash(engine, p, from)))
				if lies[[2]int{p, from}] > 0 {
					lies[[2]int{p, from}]--
				}
			case op < 99:
				apply(t, x, name, cleared(kvevent.Media))
				clear(lies)
			default:
				x.Sweep()
			}
			if step%20 == 0 {
				m.compare(t, x, p, blocks)
			}
		}
		for p := range prompts {
			m.compare(t, x, p, blocks)
		}
		for _, e := range engines {
			apply(t, x, e, cleared(kvevent.Media))
		}
		x.Sweep()
		require.Zero(t, x.blocks.Load())
		require.Zero(t, x.scopes[testScope].blocks.len())
		require.Empty(t, x.scopes[testScope].copies)
	}
}

func (m *model) compare(t *testing.T, x *Index, p, blocks int) {
	t.Helper()
	want := map[string]int{}
	for e, lies := range m.lies {
		n := 0
		for n < blocks && lies[[2]int{p, n}] > 0 {
			n++
		}
		if n > 0 {
			want[e] = 4 * n
		}
	}
	require.Equal(t, want, longest(x, seq(p*1000, p*1000+4*blocks)))
}

// TestConcurrently: engines, routers and sweeps at once.
func TestConcurrently(t *testing.T) {
	x := NewIndex(IndexConfig{})
	var wg sync.WaitGroup
	for e := range 4 {
		wg.Go(func() {
			src := source(fmt.Sprint(e))
			for i := range 300 {
				_ = x.Apply(src, stored(0, seq(i, i+40), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10), kvevent.NoRank)
				_ = x.Apply(src, removed(3, 4), kvevent.NoRank)
				if i%50 == 49 {
					x.Clear(src.Instance, kvevent.NoRank, kvevent.Media)
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			for i := range 300 {
				for _, m := range x.Query(testScope, seq(i, i+40), nil) {
					if m.Longest > 40 {
						t.Error(m)
					}
				}
				if i%100 == 0 {
					x.Sweep()
				}
			}
		})
	}
	wg.Wait()
}

// TestTable: keys come and go, and those that are left are found, also by who looks meanwhile.
func TestTable(t *testing.T) {
	var s shard
	const always = 5000 // a key that stays
	s.set(always, 0, 1)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for words := make([]uint64, 4); ; {
			select {
			case <-stop:
				return
			default:
			}
			if s.read(always, words) == 0 || words[0] != 1 {
				t.Error("a key that is there is not found")
				return
			}
		}
	}()
	have, rng := map[uint64]uint64{always: 1}, rand.New(rand.NewPCG(1, 2))
	for i := range 30000 {
		key := rng.Uint64N(3000) + 1
		bit := rng.IntN(64 * (1 + i/10000))
		if i > 20000 || rng.IntN(3) == 0 {
			s.drop(key)
			delete(have, key)
			continue
		}
		was, fresh := s.set(key, bit/64, 1<<(bit%64))
		_, there := have[key]
		require.Equal(t, !there, fresh)
		if bit/64 == 0 {
			require.Equal(t, have[key], was)
			have[key] |= 1 << bit
		} else if !there {
			have[key] = 0
		}
	}
	close(stop)
	<-stopped
	require.Len(t, have, int(s.n.Load()))
	for _, key := range slices.Sorted(maps.Keys(have)) {
		value, there := s.get(key)
		require.True(t, there)
		require.Equal(t, have[key], value)
	}
	for key := range have {
		s.drop(key)
	}
	require.Zero(t, s.n.Load())
	require.LessOrEqual(t, len(s.slab.Load().keys), shardLeast)
	require.Zero(t, s.read(1, make([]uint64, 1)))
}

// The benchmarks are those of the field: 16-token blocks in prompts of 512, held by 8 engines.
const (
	benchBlock = 16
	benchDepth = 512
)

// filled is an index with so many blocks, each at so many engines, and the prompts that they are of.
func filled(b *testing.B, blocks, engines int) (x *Index, prompts [][]uint32, sources []*Source) {
	b.Helper()
	x = NewIndex(IndexConfig{})
	rng := rand.New(rand.NewPCG(1, 2))
	for range blocks / benchDepth {
		p := make([]uint32, benchDepth*benchBlock)
		for i := range p {
			p[i] = rng.Uint32N(128_000)
		}
		prompts = append(prompts, p)
	}
	for e := range engines {
		sources = append(sources, &Source{Instance: fmt.Sprintf("engine-%d", e), Scope: Scope{Model: "m", BlockSize: benchBlock}, Rank: kvevent.NoRank})
		for i := range prompts {
			for _, ev := range benchEvents(prompts[i], i) {
				if err := x.Apply(sources[e], &ev, kvevent.NoRank); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	return x, prompts, sources
}

// benchEvents are the events of a prompt, 64 blocks each.
func benchEvents(p []uint32, prompt int) (list []kvevent.Event) {
	for from := 0; from < benchDepth; from += 64 {
		e := kvevent.Event{Kind: kvevent.Stored, BlockSize: benchBlock, Tokens: p[from*benchBlock : (from+64)*benchBlock], Rank: kvevent.NoRank}
		for i := range 64 {
			e.Hashes = append(e.Hashes, uint64(prompt*benchDepth+from+i+1))
		}
		if from > 0 {
			e.Parent, e.HasParent = e.Hashes[0]-1, true
		}
		list = append(list, e)
	}
	return list
}

func BenchmarkQuery(b *testing.B) {
	x, prompts, sources := filled(b, 262_144, 8)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if m := x.Query(sources[0].Scope, prompts[i%len(prompts)], nil); m[7].Longest != benchDepth*benchBlock {
			b.Fatal(m)
		}
	}
}

func BenchmarkStore(b *testing.B) {
	x, prompts, sources := filled(b, 262_144, 1)
	all := make([][]kvevent.Event, len(prompts))
	for i := range prompts {
		all[i] = benchEvents(prompts[i], i)
	}
	b.ReportAllocs()
	n := 0
	sources[0].Instance += "+"
	for b.Loop() { // each time another engine
		for i := range all {
			for k := range all[i] {
				if err := x.Apply(sources[0], &all[i][k], kvevent.NoRank); err != nil {
					b.Fatal(err)
				}
			}
		}
		n += len(all) * benchDepth
		b.StopTimer()
		sources[0].Instance += "+"
		if len(sources[0].Instance) > 40 {
			x, _, sources = filled(b, 262_144, 1)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/block")
}

func BenchmarkRemove(b *testing.B) {
	x, prompts, sources := filled(b, 262_144, 8)
	var all []kvevent.Event
	for i := range prompts {
		for _, e := range benchEvents(prompts[i], i) {
			all = append(all, kvevent.Event{Kind: kvevent.Removed, Hashes: e.Hashes, BlockSize: benchBlock, Rank: kvevent.NoRank})
		}
	}
	n := 0
	for e := 0; b.Loop(); e++ { // by one engine after the other
		for i := range all {
			if err := x.Apply(sources[e%8], &all[i], kvevent.NoRank); err != nil {
				b.Fatal(err)
			}
		}
		n += len(all)
		if e%8 == 7 {
			b.StopTimer()
			x, _, sources = filled(b, 262_144, 8)
			b.StartTimer()
		}
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkClear clears one of 8 engines with a million blocks each.
func BenchmarkClear(b *testing.B) {
	x, prompts, sources := filled(b, 1<<20, 8)
	first := &benchEvents(prompts[0], 0)[0]
	for i := 0; b.Loop(); i++ {
		x.Clear(sources[i%8].Instance, kvevent.NoRank, kvevent.Media)
		b.StopTimer()
		if err := x.Apply(sources[i%8], first, kvevent.NoRank); err != nil { // it is there again
			b.Fatal(err)
		}
		if i%512 == 0 {
			x.Sweep()
		}
		b.StartTimer()
	}
}

// TestEngineKeys: whatever engines call their blocks, tables have no places where many of them come together.
func TestEngineKeys(t *testing.T) {
	for name, engine := range map[string]func(i uint64) uint64{
		"counted":            func(i uint64) uint64 { return i },
		"counted at the top": func(i uint64) uint64 { return i << 48 },
		"by prompt":          func(i uint64) uint64 { return (i/512+1)<<20 + i%512 },
		"by multiples":       func(i uint64) uint64 { return i << 6 },
	} {
		low, high := map[uint64]int{}, map[uint64]int{}
		for i := range uint64(1 << 16) {
			key := engineKey(engine(i), 0)
			low[key&1023]++
			high[key>>shardShift]++
		}
		for _, n := range low { // 64 in the mean
			require.Less(t, n, 128, name)
		}
		for _, n := range high { // 1024
			require.Less(t, n, 1280, name)
		}
	}
}

// TestOnce: of a source that says what is there, and not what comes and goes, blocks are stored once however often they are
// told, by their standard names, by names that wait to be known, and with tokens.
func TestOnce(t *testing.T) {
	for _, once := range []bool{false, true} {
		x := NewIndex(IndexConfig{})
		src := source("pool")
		src.Once = once
		names := Names(nil, 0, seq(0, 8), 4, nil)
		standard := &kvevent.Event{Kind: kvevent.Stored, Medium: kvevent.CPU, Hashes: names, Standard: true, Rank: kvevent.NoRank, BaseBlock: -1}
		gone := *standard
		gone.Kind = kvevent.Removed
		other := stored(0, seq(20, 24), 21)
		waiting := &kvevent.Event{Kind: kvevent.Stored, Hashes: []uint64{31}, Rank: kvevent.NoRank, BaseBlock: -1}
		for range 2 {
			for _, e := range []*kvevent.Event{standard, other, waiting} {
				require.NoError(t, x.Apply(src, e, kvevent.NoRank))
			}
		}
		apply(t, x, "engine", stored(0, seq(30, 34), 31), removed(31))
		require.Equal(t, map[string]int{"pool": 8}, longest(x, seq(0, 8)))
		require.Equal(t, map[string]int{"pool": 4}, longest(x, seq(20, 24)))
		require.Equal(t, map[string]int{"pool": 4}, longest(x, seq(30, 34)))
		for _, e := range []*kvevent.Event{&gone, removed(21), removed(31)} {
			require.NoError(t, x.Apply(src, e, kvevent.NoRank))
		}
		for _, prompt := range [][]uint32{seq(0, 8), seq(20, 24), seq(30, 34)} {
			require.Equal(t, once, len(longest(x, prompt)) == 0)
		}
	}
}

// TestSupersede: while a source lists anew what it has, what it said before counts, and after it does not.
func TestSupersede(t *testing.T) {
	x := NewIndex(IndexConfig{})
	old, now := source("pool"), source("pool")
	old.Once, now.Once, now.Epoch = true, true, 1
	apply(t, x, "engine", stored(0, seq(0, 4), 1), stored(1, seq(4, 8), 2))
	for _, e := range []*kvevent.Event{stored(0, seq(0, 4), 1), stored(1, seq(4, 8), 2), stored(0, seq(50, 54), 9)} {
		require.NoError(t, x.Apply(old, e, kvevent.NoRank))
	}
	require.NoError(t, x.Apply(now, stored(0, seq(0, 4), 1), kvevent.NoRank))
	require.Equal(t, map[string]int{"engine": 8, "pool": 8}, longest(x, seq(0, 8)))
	x.Supersede(now)
	require.Equal(t, map[string]int{"engine": 8, "pool": 4}, longest(x, seq(0, 8)))
	require.Empty(t, longest(x, seq(50, 54)))
	x.Sweep()
	require.Equal(t, map[string]int{"engine": 8, "pool": 4}, longest(x, seq(0, 8)))
	require.EqualValues(t, 2, x.blocks.Load())
}

func BenchmarkSweep(b *testing.B) {
	x, _, sources := filled(b, 1<<20, 8)
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		x.Clear(sources[i%8].Instance, kvevent.NoRank, kvevent.Media)
		b.StartTimer()
		x.Sweep()
	}
}

// BenchmarkHeap is what a block takes, with 1 and 8 engines.
func BenchmarkHeap(b *testing.B) {
	for _, engines := range []int{1, 8} {
		b.Run(fmt.Sprint(engines), func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			x, _, _ := filled(b, 1<<20, engines)
			runtime.GC()
			runtime.ReadMemStats(&after)
			for b.Loop() {
				_ = x.blocks.Load()
			}
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(x.blocks.Load()), "B/block")
			runtime.KeepAlive(x)
		})
	}
}
