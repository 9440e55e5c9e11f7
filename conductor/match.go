package conductor

import (
	"slices"

	"larder/conductor/kvevent"
)

// Match is how much of a prompt one engine holds, in tokens.
type Match struct {
	Instance string
	Longest  int                // from the prompt's beginning, on any medium: what need not be computed
	Media    [kvevent.Media]int // of these: on the GPU from the beginning without a gap; on others, what lies there
	Ranks    []RankMatch        // by the engine's ranks of data parallelism: on the GPU of each, from the beginning
}

// RankMatch is what one rank has on its GPU.
type RankMatch struct{ Rank, Tokens int }

// run is the state of one engine while a prompt's blocks are gone through.
type run struct {
	v       *instanceView
	alive   bool  // its groups with full attention have all blocks so far
	recent  []int // per group: how many blocks it has had in a row
	longest int   // blocks
	gpu     bool  // all blocks so far are on its GPU
	ranks   []bool
	media   [kvevent.Media]int
	counted [kvevent.Media]int // media up to longest
	gpus    []int              // per rank
}

// matcher goes through the blocks of a prompt for all engines of a scope.
type matcher struct {
	runs  []run
	alive int
	words []uint64 // scratch: where the next block lies
	last  []uint64 // where the blocks lie that are not counted yet: mostly a prompt's are at the same places
	same  int      // how many those are
	n     int      // blocks up to them
}

func newMatcher(v *view) *matcher {
	m := &matcher{runs: make([]run, len(v.instances)), alive: len(v.instances)}
	m.words, m.last = make([]uint64, len(v.live)), make([]uint64, 0, len(v.live))
	for i := range m.runs {
		x := &v.instances[i]
		m.runs[i] = run{
			v: x, alive: true, gpu: true, recent: make([]int, len(x.groups)),
			ranks: make([]bool, len(x.ranks)), gpus: make([]int, len(x.ranks)),
		}
		for r := range x.ranks {
			m.runs[i].ranks[r] = true
		}
	}
	return m
}

// block takes note of where the next block of the prompt lies. It reports whether another one may matter.
func (m *matcher) block(words []uint64) bool {
	if m.same > 0 && slices.Equal(words, m.last) {
		m.same++
		return true
	}
	m.count()
	m.last, m.same = append(m.last[:0], words...), 1
	return m.alive > 0 && len(words) > 0
}

// count counts the blocks that lie at the same places.
func (m *matcher) count() {
	if m.same == 0 {
		return
	}
	m.n += m.same
	for i := range m.runs {
		if r := &m.runs[i]; r.alive && !r.count(m.n, m.same, m.last) {
			r.alive = false
			m.alive--
		}
	}
	m.same = 0
}

// count takes note of where the last k of n blocks lie, all at the same places. It reports false if no more may matter.
func (r *run) count(n, k int, words []uint64) bool {
	hit := true
	for g := range r.v.groups {
		x := &r.v.groups[g]
		switch {
		case x.any.meets(words):
			r.recent[g] += k
		case x.last == 0:
			return false
		default:
			r.recent[g] = 0
		}
		if x.last > 0 && r.recent[g] < min(x.last, n) {
			hit = false
		}
	}
	r.gpu = r.gpu && r.v.media[kvevent.GPU].meets(words)
	for medium := range r.v.media {
		if (medium != int(kvevent.GPU) || r.gpu) && r.v.media[medium].meets(words) {
			r.media[medium] += k
		}
	}
	for i := range r.ranks {
		if r.ranks[i] = r.ranks[i] && r.v.ranks[i].gpu.meets(words); r.ranks[i] {
			r.gpus[i] = n
		}
	}
	if hit {
		r.longest, r.counted = n, r.media
	}
	return true
}

// matches are the results, in tokens.
func (m *matcher) matches(blockSize int) []Match {
	m.count()
	all := make([]Match, len(m.runs))
	now := nowNanos()
	for i := range m.runs {
		r := &m.runs[i]
		r.v.use.note(r.longest*blockSize, now)
		x := Match{Instance: r.v.id, Longest: r.longest * blockSize}
		for medium, n := range r.counted {
			x.Media[medium] = n * blockSize
		}
		for k, n := range r.gpus {
			x.Ranks = append(x.Ranks, RankMatch{r.v.ranks[k].rank, min(n, r.longest) * blockSize})
		}
		all[i] = x
	}
	return all
}
