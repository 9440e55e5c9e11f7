package meta

import (
	"math/bits"
	"slices"
)

// slotSet hands out the lowest free slot. Which one that is depends only on which are taken, so that replicas agree
// however they got there: by the log, by a rebuild or by a snapshot. Finding, taking and freeing are O(log64 n).
type slotSet struct {
	// levels[0] has a bit per slot, set when taken; a bit of levels[k+1] is set when the word of levels[k] is full.
	levels [][]uint64
}

// lowest returns the lowest free slot, without taking it.
func (s *slotSet) lowest() Slot {
	i := uint64(0)
	for _, v := range slices.Backward(s.levels) {
		if i >= uint64(len(v)) {
			i *= 64
			continue
		}
		i = i*64 + uint64(bits.TrailingZeros64(^v[i])) //nolint:gosec // 0..63: the level above says that the word is not full
	}
	return Slot(i)
}

// take marks slot i as taken, growing as needed.
func (s *slotSet) take(i Slot) {
	s.grow(uint64(i) + 1)
	pos := uint64(i)
	for k := range s.levels {
		w := &s.levels[k][pos/64]
		*w |= 1 << (pos % 64)
		if *w != ^uint64(0) {
			return
		}
		pos /= 64
	}
	// The top word is full: there has to be a level above it, so that lowest finds the next one.
	s.grow(uint64(len(s.levels[0]))*64 + 1)
}

// free marks slot i as free.
func (s *slotSet) free(i Slot) {
	pos := uint64(i)
	for k := range s.levels {
		w := &s.levels[k][pos/64]
		full := *w == ^uint64(0)
		*w &^= 1 << (pos % 64)
		if !full {
			return
		}
		pos /= 64
	}
}

// grow makes room for n slots, keeping one top word.
func (s *slotSet) grow(n uint64) {
	if len(s.levels) == 0 {
		s.levels = [][]uint64{make([]uint64, 1)}
	}
	for k := 0; ; k++ {
		words := (n + 63) / 64
		for uint64(len(s.levels[k])) < words {
			s.levels[k] = append(s.levels[k], 0)
		}
		if len(s.levels[k]) == 1 {
			return
		}
		if k+1 == len(s.levels) {
			s.levels = append(s.levels, nil)
			for i, w := range s.levels[k] {
				if i%64 == 0 {
					s.levels[k+1] = append(s.levels[k+1], 0)
				}
				if w == ^uint64(0) {
					s.levels[k+1][i/64] |= 1 << (i % 64)
				}
			}
		}
		n = words
	}
}
