package server

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
)

func newTouches(perSec float64) *leases {
	l := &leases{}
	l.touches.perSec = perSec
	l.reset(0, 0)
	return l
}

// A group takes a bounded number of uses, the oldest first; what is left follows in the next, and what is used again
// meanwhile moves to the end.
func TestTouchesGoInBoundedGroups(t *testing.T) {
	l := newTouches(1e9)
	n := maxGroupTouches + 100
	for s := range n {
		require.True(t, l.used(meta.Slot(s), 1))
	}
	first := l.takeTouches()
	require.Len(t, first, maxGroupTouches)
	require.Equal(t, meta.Touch{Slot: 0, Count: 1}, first[0])
	g := guard{l: l, now: 1}
	require.True(t, g.Touched(0), "until the group is applied")
	l.settleTouches()
	require.False(t, g.Touched(0))
	require.True(t, g.Touched(meta.Slot(n-1)), "it waits for the next group")

	require.True(t, l.used(maxGroupTouches, 2))
	second := l.takeTouches()
	require.Len(t, second, 100)
	require.Equal(t, meta.Touch{Slot: maxGroupTouches + 1, Count: 1}, second[0])
	require.Equal(t, meta.Touch{Slot: maxGroupTouches, Count: 2}, second[99], "the last use decides the order, and counts add up")
	l.settleTouches()
	require.Empty(t, l.takeTouches())
}

// However many uses come, each costs little: the list is cleaned only when half of it is superseded.
func BenchmarkUsed(b *testing.B) {
	l := newTouches(1e12)
	i := uint32(0)
	for b.Loop() {
		i = i*1664525 + 1013904223
		l.used(i%100_000, int64(i))
	}
}

func TestTouchesBeyondTheBoundAreDropped(t *testing.T) {
	l := newTouches(1e9)
	for s := range maxLiveTouches {
		require.True(t, l.used(meta.Slot(s), 1))
	}
	require.False(t, l.used(maxLiveTouches, 1), "no room for another entry")
	require.True(t, l.used(5, 1), "but for another use of one that waits")
	l = newTouches(10)
	for s := range 10 {
		require.True(t, l.used(meta.Slot(s), 1))
	}
	require.False(t, l.used(11, 1), "over the budget")
	require.True(t, l.used(12, 2e9))
}
