package workload

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
)

// Generator makes workloads from a seed: the same for the same seed.
type Generator struct {
	rng  *rand.Rand
	next uint32 // block that was not used yet
}

// NewGenerator starts from a seed.
func NewGenerator(seed uint64) *Generator {
	return &Generator{rng: newRand(seed, 0x6c617264)}
}

func (g *Generator) fresh(n int) []uint32 {
	blocks := make([]uint32, n)
	for i := range blocks {
		blocks[i] = g.next
		g.next++
	}
	return blocks
}

func (g *Generator) exp(mean float64) float64 { return g.rng.ExpFloat64() * mean }

// logNormal has a median and a spread: two thirds lie between a median by e to
// the spread and as much above.
func (g *Generator) logNormal(median, spread float64) float64 {
	return median * math.Exp(g.rng.NormFloat64()*spread)
}

// Shared is requests of length blocks that come by chance, with the first half
// shared among those of one of prefixes kinds and the second half their own;
// repeat is the chance that a whole earlier request comes again.
func (g *Generator) Shared(requests, length, prefixes int, repeat float64) Trace {
	heads := make([][]uint32, prefixes)
	for i := range heads {
		heads[i] = g.fresh(length / 2)
	}
	t := make(Trace, 0, requests)
	now := 0.0
	for range requests {
		now += g.exp(300)
		if len(t) > 0 && g.rng.Float64() < repeat {
			t = append(t, Request{TimeMS: uint64(now), Blocks: t[g.rng.IntN(len(t))].Blocks})
			continue
		}
		blocks := append([]uint32(nil), heads[g.rng.IntN(prefixes)]...)
		t = append(t, Request{TimeMS: uint64(now), Blocks: append(blocks, g.fresh(length-len(blocks))...)})
	}
	return t
}

// Talk says how conversations go.
type Talk struct {
	Requests int
	ThinkMS  float64 // median time between a request and the next of the same conversation
	Spread   float64 // of that time, see logNormal
	Goes     float64 // chance that a conversation goes on after a request
	First    float64 // median blocks of a first request
	Turn     float64 // mean blocks that each further one adds
	Systems  int     // kinds of system prompts, the first the most frequent; 0: none
	System   float64 // median blocks of those
	Tail     bool    // the last block of a request is partial: the next has another in its place
	DayMS    float64 // period in which more and fewer of them begin, nine times as many at the best hour; 0: always as many
	Burst    int     // so many begin at once; 0: each for itself
}

type turn struct {
	at     float64
	blocks []uint32
}

type turns []turn

func (h *turns) Len() int           { return len(*h) }
func (h *turns) Less(i, j int) bool { return (*h)[i].at < (*h)[j].at }
func (h *turns) Swap(i, j int)      { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

// Push implements heap.Interface.
func (h *turns) Push(x any) { *h = append(*h, x.(turn)) } //nolint:forcetypeassert // it holds nothing else

// Pop implements heap.Interface.
func (h *turns) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// hour is how many conversations begin at a time, by how many do on average.
func (k Talk) hour(ms float64) float64 {
	if k.DayMS == 0 {
		return 1
	}
	return 1 + 0.8*math.Sin(2*math.Pi*ms/k.DayMS)
}

// Conversations begin by chance, three requests a second in all.
func (g *Generator) Conversations(k Talk) Trace {
	systems := make([][]uint32, k.Systems)
	for i := range systems {
		systems[i] = g.fresh(1 + int(g.logNormal(k.System, 0.8)))
	}
	var zipf *rand.Zipf
	if k.Systems > 0 {
		zipf = rand.NewZipf(g.rng, 1.2, 2, uint64(k.Systems-1))
	}
	var t Trace
	var open turns
	start, begun := 0.0, 0
	for len(t) < k.Requests {
		if len(open) == 0 || start < open[0].at {
			var blocks []uint32
			if zipf != nil {
				blocks = append(blocks, systems[zipf.Uint64()]...)
			}
			heap.Push(&open, turn{start, append(blocks, g.fresh(1+int(g.logNormal(k.First, 1)))...)})
			if begun++; begun%max(1, k.Burst) == 0 {
				start += g.exp(333/(1-k.Goes)) * float64(max(1, k.Burst)) / k.hour(start)
			}
			continue
		}
		x := heap.Pop(&open).(turn) //nolint:forcetypeassert // it holds nothing else
		t = append(t, Request{TimeMS: uint64(x.at), Blocks: x.blocks})
		if g.rng.Float64() < k.Goes {
			kept := len(x.blocks)
			if k.Tail {
				kept--
			}
			blocks := append([]uint32(nil), x.blocks[:kept]...)
			blocks = append(blocks, g.fresh(1+int(g.exp(k.Turn)))...)
			heap.Push(&open, turn{x.at + g.logNormal(k.ThinkMS, k.Spread), blocks})
		}
	}
	return t
}

// Questions is requests about documents: each document of a length of about so
// many blocks is asked asks questions of one to three blocks, with those about
// some others in between.
func (g *Generator) Questions(requests int, length float64, asks, between int) Trace {
	type document struct {
		blocks []uint32
		left   int
	}
	t := make(Trace, 0, requests)
	open := make([]document, between)
	now := 0.0
	for range requests {
		now += g.exp(300)
		d := &open[g.rng.IntN(between)]
		if d.left == 0 {
			*d = document{g.fresh(1 + int(g.logNormal(length, 0.5))), 1 + g.rng.IntN(2*asks-1)}
		}
		d.left--
		t = append(t, Request{TimeMS: uint64(now), Blocks: append(slices.Clone(d.blocks), g.fresh(1+g.rng.IntN(3))...)})
	}
	return t
}

// Retrieval is requests with a system prompt, some documents of a collection, a
// few of which are wanted often, and a question. The documents come in any order,
// and blocks are shared only by requests that begin with the same ones.
func (g *Generator) Retrieval(requests, documents int, skew float64) Trace {
	const system, most = 4, 4
	type prefix struct {
		last     uint32
		document uint64
	}
	head := g.fresh(system)
	after := map[prefix][]uint32{}
	zipf := rand.NewZipf(g.rng, skew, 2, uint64(documents-1)) //nolint:gosec // not negative
	t := make(Trace, 0, requests)
	now := 0.0
	for range requests {
		now += g.exp(300)
		blocks := slices.Clone(head)
		for range 1 + g.rng.IntN(most) {
			at := prefix{blocks[len(blocks)-1], zipf.Uint64()}
			if after[at] == nil {
				after[at] = g.fresh(2 + int(at.document%5))
			}
			blocks = append(blocks, after[at]...)
		}
		t = append(t, Request{TimeMS: uint64(now), Blocks: append(blocks, g.fresh(1)...)})
	}
	return t
}

// Scan is documents that are read once.
func (g *Generator) Scan(requests, length int) Trace {
	t := make(Trace, 0, requests)
	now := 0.0
	for range requests {
		now += g.exp(300)
		t = append(t, Request{TimeMS: uint64(now), Blocks: g.fresh(length)})
	}
	return t
}

// Loop is the same documents again and again.
func (g *Generator) Loop(requests, documents, length int) Trace {
	docs := make([][]uint32, documents)
	for i := range docs {
		docs[i] = g.fresh(length)
	}
	t := make(Trace, 0, requests)
	now := 0.0
	for i := range requests {
		now += g.exp(300)
		t = append(t, Request{TimeMS: uint64(now), Blocks: docs[i%documents]})
	}
	return t
}

// Zipf is documents of which a few are read often.
func (g *Generator) Zipf(requests, documents, length int, skew float64) Trace {
	docs := make([][]uint32, documents)
	for i := range docs {
		docs[i] = g.fresh(length)
	}
	zipf := rand.NewZipf(g.rng, skew, 4, uint64(documents-1)) //nolint:gosec // not negative
	t := make(Trace, 0, requests)
	now := 0.0
	for range requests {
		now += g.exp(300)
		t = append(t, Request{TimeMS: uint64(now), Blocks: docs[zipf.Uint64()]})
	}
	return t
}

// Walk is single blocks of which those used lately are used again, and ever new
// ones: what least recently used is made for. Each is at the depth of an
// exponential with a mean in the order of use.
func (g *Generator) Walk(requests int, mean, fresh float64) Trace {
	t := make(Trace, 0, requests)
	var order []uint32 // latest last
	for i := range requests {
		if len(order) == 0 || g.rng.Float64() < fresh {
			order = append(order, g.fresh(1)...)
		} else {
			k := len(order) - 1 - int(g.exp(mean))%len(order)
			b := order[k]
			order = append(append(order[:k], order[k+1:]...), b)
		}
		t = append(t, Request{TimeMS: uint64(i) * 10, Blocks: []uint32{order[len(order)-1]}})
	}
	return t
}

// Named is a generated workload, and a cache of interesting size for it.
type Named struct {
	Name       string
	Trace      Trace
	Capacities []int
}

// Suite is workloads of many kinds from one seed. size is 1 for about 100,000
// accesses each.
func Suite(seed uint64, size int) []Named {
	each := func(g func(*Generator) Trace) Trace { return g(NewGenerator(seed)) }
	talk := func(k Talk) Trace { return each(func(g *Generator) Trace { return g.Conversations(k) }) }
	short := Talk{Requests: 4000 * size, ThinkMS: 20_000, Spread: 1, Goes: 0.7, First: 12, Turn: 3, Systems: 5, System: 4, Tail: true}
	long := Talk{Requests: 4000 * size, ThinkMS: 300_000, Spread: 0.5, Goes: 0.7, First: 12, Turn: 3, Systems: 1, System: 1, Tail: true}
	agent := Talk{Requests: 3000 * size, ThinkMS: 3_000, Spread: 0.7, Goes: 0.93, First: 20, Turn: 2}
	heavy := Talk{Requests: 4000 * size, ThinkMS: 60_000, Spread: 1, Goes: 0.3, First: 4, Turn: 2, Systems: 400, System: 12, Tail: true}
	tools := Talk{Requests: 6000 * size, ThinkMS: 5_000, Spread: 1.5, Goes: 0.25, First: 4, Turn: 2, Systems: 60, System: 4, Tail: true}
	mixed := Talk{Requests: 3500 * size, ThinkMS: 40_000, Spread: 1.2, Goes: 0.55, First: 11, Turn: 4, Systems: 20, System: 5, Tail: true}
	day, burst := short, short
	day.DayMS, burst.Burst = 400_000, 50
	zipf := func(g *Generator) Trace { return g.Zipf(8000*size, 2000, 12, 1.1) }
	scan := func(g *Generator) Trace { return g.Scan(1500*size, 32) }
	loop := func(g *Generator) Trace { return g.Loop(3000*size, 100, 32) }
	caps := []int{500, 2000, 8000}
	return []Named{
		{"shared 16k", each(func(g *Generator) Trace { return g.Shared(3000*size, 32, 40, 0) }), caps},
		{"shared 32k", each(func(g *Generator) Trace { return g.Shared(1500*size, 64, 40, 0) }), caps},
		{"shared 64k", each(func(g *Generator) Trace { return g.Shared(800*size, 128, 40, 0.1) }), caps},
		{"shared 128k", each(func(g *Generator) Trace { return g.Shared(400*size, 256, 40, 0.2) }), caps},
		{"talk, 20 s", talk(short), caps},
		{"talk, 5 min", talk(long), caps},
		{"agents, 3 s", talk(agent), caps},
		{"system prompts", talk(heavy), caps},
		{"tools and agents", talk(tools), caps},
		{"synthetic mix", talk(mixed), caps},
		{"talk by day", talk(day), caps},
		{"talk in bursts", talk(burst), caps},
		{"questions", each(func(g *Generator) Trace { return g.Questions(2700*size, 30, 8, 60) }), caps},
		{"retrieval", each(func(g *Generator) Trace { return g.Retrieval(7000*size, 300, 1.3) }), caps},
		{"zipf", each(zipf), caps},
		{"zipf, flat", each(func(g *Generator) Trace { return g.Zipf(8000*size, 4000, 12, 1.01) }), caps},
		{"recency", each(func(g *Generator) Trace { return g.Walk(60_000*size, 700, 0.1) }), []int{200, 500, 1000, 2000}},
		{"loop", each(loop), []int{1600, 2900, 3100, 3300}},
		{"loop of blocks", each(func(g *Generator) Trace { return g.Loop(60_000*size, 3000, 1) }), []int{1500, 2900, 3100}},
		{"scan in zipf", Merge(each(zipf), each(scan)), caps},
		{"scan in talk", Merge(talk(short), each(scan)), caps},
		{"loop in talk", Merge(talk(short), each(loop)), caps},
		{"talk, then zipf", Chain(talk(short), each(zipf)), caps},
		{"zipf, loop, talk", Chain(each(zipf), each(loop), talk(short), talk(long)), caps},
		{"zipf, zipf, zipf", Chain(each(zipf), each(zipf), each(zipf)), caps},
	}
}
