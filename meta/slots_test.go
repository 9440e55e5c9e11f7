package meta

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The lowest free slot is a function of the set alone, whatever the order in which slots came and went.
func TestSlotSetHandsOutTheLowest(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var s slotSet
	taken := map[Slot]bool{}
	lowest := func() Slot {
		for i := Slot(0); ; i++ {
			if !taken[i] {
				return i
			}
		}
	}
	for range 3000 {
		if r.IntN(3) > 0 || len(taken) == 0 {
			i := s.lowest()
			require.Equal(t, lowest(), i)
			s.take(i)
			taken[i] = true
			continue
		}
		for i := range taken {
			s.free(i)
			delete(taken, i)
			break
		}
	}
}

func TestSlotSetSparseAndLarge(t *testing.T) {
	var s slotSet
	s.take(5000)
	require.Equal(t, Slot(0), s.lowest())
	for i := range Slot(5000) {
		require.Equal(t, i, s.lowest())
		s.take(i)
	}
	require.Equal(t, Slot(5001), s.lowest())
	for i := Slot(5001); i < 300_000; i++ {
		require.Equal(t, i, s.lowest())
		s.take(i)
	}
	s.free(70_000)
	require.Equal(t, Slot(70_000), s.lowest())
}
