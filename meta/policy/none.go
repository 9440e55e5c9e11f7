package policy

import "math/bits"

func init() {
	Register("none", func(_ Config, _ Table) (Policy, error) { return &none{}, nil })
}

const (
	noneChunkBits = 12 // slots per chunk: 4,096, that is 512 bytes
	noneWords     = 1 << noneChunkBits / 64
)

// none keeps no order at all: it knows which slots it holds and evicts the
// lowest. It writes nothing to the table and is the baseline against which the
// cost of the other policies is measured, not a choice for production.
type none struct {
	Stateless

	chunks []*noneChunk // by slot >> noneChunkBits, nil until used
	lowest int          // no chunk below holds a slot
	n      int
}

type noneChunk struct {
	n     int
	words [noneWords]uint64
}

// Add marks s as held.
func (p *none) Add(s Slot) {
	i := int(s >> noneChunkBits)
	for len(p.chunks) <= i {
		p.chunks = append(p.chunks, nil)
	}
	if p.chunks[i] == nil {
		p.chunks[i] = new(noneChunk)
	}
	c := p.chunks[i]
	c.words[s>>6%noneWords] |= 1 << (s & 63)
	c.n++
	p.n++
	p.lowest = min(p.lowest, i)
}

// Touch does nothing.
func (*none) Touch(Slot, uint32) {}

// Remove marks s as not held.
func (p *none) Remove(s Slot) {
	c := p.chunks[s>>noneChunkBits]
	c.words[s>>6%noneWords] &^= 1 << (s & 63)
	c.n--
	p.n--
	for p.lowest < len(p.chunks) && (p.chunks[p.lowest] == nil || p.chunks[p.lowest].n == 0) {
		p.lowest++
	}
}

// Evict takes s out.
func (p *none) Evict(s Slot) { p.Remove(s) }

// Victims offers the entries by rising slot.
func (p *none) Victims(_ uint64, yield func(Slot) Verdict) {
	for i := p.lowest; i < len(p.chunks); i++ {
		if p.chunks[i] == nil {
			continue
		}
		for w, word := range p.chunks[i].words {
			for ; word != 0; word &= word - 1 {
				s := i<<noneChunkBits | w<<6 | bits.TrailingZeros64(word)
				if yield(Slot(s)) == Stop { //nolint:gosec // made of the bits of a Slot
					return
				}
			}
		}
	}
}

// Restore marks s as held.
func (p *none) Restore(s Slot) { p.Add(s) }

// Len is the number of entries held.
func (p *none) Len() int { return p.n }
