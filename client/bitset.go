package client

import (
	"math/bits"
	"slices"
)

// bitset is a set of small integers that finds its least member in a few steps: each level has a bit for every word
// of the one below that is not zero.
type bitset struct {
	levels [][]uint64 // the first holds the members
	count  int
}

// newBitset returns a set that can hold the integers below n, empty or full.
func newBitset(n int, full bool) *bitset {
	b := new(bitset)
	for words := n; ; {
		words = (words + 63) / 64
		b.levels = append(b.levels, make([]uint64, max(words, 1)))
		if words <= 1 {
			break
		}
	}
	if full {
		for i := range n {
			b.add(i)
		}
	}
	return b
}

func (b *bitset) has(i int) bool { return b.levels[0][i>>6]&(1<<(i&63)) != 0 }

func (b *bitset) add(i int) {
	if b.has(i) {
		return
	}
	b.count++
	for _, level := range b.levels {
		old := level[i>>6]
		level[i>>6] = old | 1<<(i&63)
		if old != 0 {
			return
		}
		i >>= 6
	}
}

func (b *bitset) remove(i int) {
	if !b.has(i) {
		return
	}
	b.count--
	for _, level := range b.levels {
		level[i>>6] &^= 1 << (i & 63)
		if level[i>>6] != 0 {
			return
		}
		i >>= 6
	}
}

// first returns the least member, or -1.
func (b *bitset) first() int {
	if b.count == 0 {
		return -1
	}
	i := 0
	for _, v := range slices.Backward(b.levels) {
		i = i<<6 | bits.TrailingZeros64(v[i])
	}
	return i
}

// next returns the least member from i on, or -1.
func (b *bitset) next(i int) int {
	words := b.levels[0]
	for w := i >> 6; w < len(words); w++ {
		v := words[w]
		if w == i>>6 {
			v &= ^uint64(0) << (i & 63)
		}
		if v != 0 {
			return w<<6 | bits.TrailingZeros64(v)
		}
	}
	return -1
}

// end returns the end of the run of members that begins at i.
func (b *bitset) end(i int) int {
	words := b.levels[0]
	for w := i >> 6; w < len(words); w++ {
		v := ^words[w]
		if w == i>>6 {
			v &= ^uint64(0) << (i & 63)
		}
		if v != 0 {
			return w<<6 | bits.TrailingZeros64(v)
		}
	}
	return len(words) << 6
}

// run returns the start of the first run of n members, or -1.
func (b *bitset) run(n int) int {
	if n == 1 || b.count < n {
		if b.count < n {
			return -1
		}
		return b.first()
	}
	for i := b.next(0); i >= 0; {
		e := b.end(i)
		if e-i >= n {
			return i
		}
		i = b.next(e)
	}
	return -1
}

// runs counts how many disjoint runs of n members there are.
func (b *bitset) runs(n int) int {
	if n == 1 {
		return b.count
	}
	total := 0
	for i := b.next(0); i >= 0; {
		e := b.end(i)
		total += (e - i) / n
		i = b.next(e)
	}
	return total
}
