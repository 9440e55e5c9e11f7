package conductor

import (
	"cmp"
	"maps"
	"slices"

	"larder/conductor/kvevent"
)

// place is where a copy of a block may lie: one bit in the words of each block. Hybrid models keep several groups of blocks
// for the same tokens, each of which is a place of its own.
type place struct {
	instance string
	rank     int // of data parallelism; kvevent.NoRank if the engine has none
	medium   kvevent.Medium
	group    int
	once     bool   // see Source
	epoch    uint32 // see Source
}

// within reports whether a place is an instance's: of a rank, if that is not kvevent.NoRank, and of a medium, if that is not
// kvevent.Media.
func (p *place) within(instance string, rank int, medium kvevent.Medium) bool {
	return p.instance == instance && (rank == kvevent.NoRank || p.rank == rank) && (medium == kvevent.Media || p.medium == medium)
}

// places are those of one scope. The owner's lock guards them.
type places struct {
	most    int
	bits    map[place]int
	held    []int // by bit: the blocks that lie there
	uses    map[string]*use
	windows map[int]int // tokens of the sliding windows of groups, for those that have one
	free    []int       // bits that nobody has, and that no block has set
	retired []int       // bits that nobody has, and that blocks may still have set
	next    int         // the first bit that was never given
}

func newPlaces(most int) places {
	return places{most: most, bits: map[place]int{}, uses: map[string]*use{}, windows: map[int]int{}}
}

// bit is a place's, which is given now if it has none. It reports false if there are too many.
func (p *places) bit(at place) (bit int, fresh, ok bool) {
	if bit, ok := p.bits[at]; ok {
		return bit, false, true
	}
	switch {
	case len(p.free) > 0:
		bit = p.free[len(p.free)-1]
		p.free = p.free[:len(p.free)-1]
	case p.next < p.most:
		bit = p.next
		p.next++
		p.held = append(p.held, 0)
	default:
		return 0, false, false
	}
	p.bits[at], p.held[bit] = bit, 0
	if p.uses[at.instance] == nil {
		p.uses[at.instance] = new(use)
	}
	return bit, true, true
}

// retire takes the bits of places back. A sweep has to clear them in all blocks before they are given anew.
func (p *places) retire(which func(*place) bool) (n int) {
	for at, bit := range p.bits {
		if which(&at) {
			delete(p.bits, at)
			p.retired = append(p.retired, bit)
			n++
		}
	}
	if n > 0 {
		p.forgetUses()
	}
	slices.Sort(p.retired)
	return n
}

// forgetUses drops what was counted of instances that have no place any more.
func (p *places) forgetUses() {
	here := map[string]bool{}
	for at := range p.bits {
		here[at.instance] = true
	}
	maps.DeleteFunc(p.uses, func(id string, _ *use) bool { return !here[id] })
}

// width is how many words a block's places need.
func (p *places) width() int { return (p.next + 63) / 64 }

// mask is a set of places, as words.
type mask []uint64

func (m mask) set(bit int) { m[bit/64] |= 1 << (bit % 64) }

// meets reports whether a block lies at a place of the set. Blocks may have fewer words, or more.
func (m mask) meets(words []uint64) bool {
	for i, w := range words[:min(len(words), len(m))] {
		if w&m[i] != 0 {
			return true
		}
	}
	return false
}

// view is the places of a scope as those see them who match prompts: it does not change.
type view struct {
	instances []instanceView
	live      mask // all places that somebody has
}

// instanceView is one engine's places.
type instanceView struct {
	id     string
	use    *use
	groups []groupView
	media  [kvevent.Media]mask
	ranks  []rankView // in the order of their numbers
}

// groupView is what a group needs for a hit: all blocks of the prompt, or with a sliding window only the last ones.
type groupView struct {
	any  mask
	last int // blocks that a window covers; 0 for all
}

type rankView struct {
	rank int
	gpu  mask
}

// view makes one of the present places.
func (p *places) view(blockSize int) *view {
	v := &view{live: make(mask, p.width())}
	byID := map[string]*instanceView{}
	for at, bit := range p.bits {
		v.live.set(bit)
		i := byID[at.instance]
		if i == nil {
			i = &instanceView{id: at.instance, use: p.uses[at.instance]}
			for m := range i.media {
				i.media[m] = make(mask, p.width())
			}
			byID[at.instance] = i
		}
		i.media[at.medium].set(bit)
	}
	for at, bit := range p.bits {
		i := byID[at.instance]
		i.group(at.group, p, blockSize).set(bit)
		if at.rank != kvevent.NoRank {
			m := i.rank(at.rank, p)
			if at.medium == kvevent.GPU {
				m.set(bit)
			}
		}
	}
	for _, i := range byID {
		slices.SortFunc(i.ranks, func(a, b rankView) int { return cmp.Compare(a.rank, b.rank) })
		v.instances = append(v.instances, *i)
	}
	slices.SortFunc(v.instances, func(a, b instanceView) int { return cmp.Compare(a.id, b.id) })
	return v
}

// group is the mask of a group, which is added if it is new.
func (i *instanceView) group(n int, p *places, blockSize int) mask {
	for len(i.groups) <= n {
		last := 0
		if window := p.windows[len(i.groups)]; window > 0 {
			last = (window + blockSize - 1) / blockSize
		}
		i.groups = append(i.groups, groupView{any: make(mask, p.width()), last: last})
	}
	return i.groups[n].any
}

func (i *instanceView) rank(n int, p *places) mask {
	for _, r := range i.ranks {
		if r.rank == n {
			return r.gpu
		}
	}
	i.ranks = append(i.ranks, rankView{n, make(mask, p.width())})
	return i.ranks[len(i.ranks)-1].gpu
}
