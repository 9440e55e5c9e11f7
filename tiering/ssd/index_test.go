package ssd

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestIndex compares random replacements with a plain array.
func TestIndex(t *testing.T) {
	const size = 6000
	rng := rand.New(rand.NewPCG(3, 4))
	x := index{used: make([]usage, 8)}
	var want [size]uint32 // 0, or which record
	var skip [size]uint32
	for v := uint32(1); v < 20_000; v++ {
		n := 1 + rng.IntN(1+rng.IntN(60))
		off := rng.IntN(size - n)
		var p *piece
		if v%5 != 0 {
			p = &piece{off: uint64(off), length: uint32(n), raw: uint32(n), stored: uint32(n), crc: v, pos: v, slot: uint16(v % 8), zstd: v%2 == 0}
		}
		x.replace(uint64(off), uint64(off+n), p)
		for i := range n {
			want[off+i], skip[off+i] = 0, uint32(i)
			if p != nil {
				want[off+i] = v
			}
		}
		if v%500 != 0 {
			continue
		}
		at, pieces, live := 0, int64(0), int64(0)
		for _, p := range x.overlapping(nil, 0, size) {
			for ; at < int(p.off); at++ {
				require.Zero(t, want[at])
			}
			require.Equal(t, p, (&[]entry{pack(&p)}[0]).unpack())
			for i := range p.length {
				require.Equal(t, p.crc, want[at])
				require.Equal(t, p.skip+i, skip[at])
				at++
			}
			pieces++
			live += p.cost()
		}
		require.Equal(t, x.pieces, pieces)
		require.Equal(t, x.live, live)
		for off := range uint64(size) {
			from, to, empty := x.gap(off, size)
			require.Equal(t, want[off] == 0, empty)
			require.True(t, !empty || from <= off && off < to && (from == 0 || want[from-1] != 0) && (to == size || want[to] != 0))
		}
	}
}

// TestIndexMemory: 64 bytes an extent at most, in whatever order extents come.
func TestIndexMemory(t *testing.T) {
	const n = 200_000
	for name, order := range map[string][]int{"in order": nil, "at random": rand.New(rand.NewPCG(1, 1)).Perm(n)} {
		x := index{used: make([]usage, 1)}
		for i := range n {
			if order != nil {
				i = order[i]
			}
			off := uint64(i) << 16
			x.replace(off, off+1<<16, &piece{off: off, length: 1 << 16, raw: 1 << 16, stored: 1 << 16, pos: 1})
		}
		per := float64(x.bytes()) / n
		t.Logf("%s: %.1f bytes an extent", name, per)
		require.Less(t, per, 64.0)
		for _, i := range rand.Perm(n) {
			x.replace(uint64(i)<<16, uint64(i+1)<<16, nil)
		}
		require.Zero(t, x.pieces)
		require.Empty(t, x.leaves)
	}
}

// TestPool: buffers are bounded, and who waits for one is served in turn or ends with its context.
func TestPool(t *testing.T) {
	p := newPool(maxBuffer)
	a, err := p.get(t.Context(), maxBuffer/2+1)
	require.NoError(t, err)
	require.True(t, aligned(a[:block]))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = p.get(ctx, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	got := make(chan []byte)
	go func() {
		b, _ := p.get(context.Background(), maxBuffer)
		got <- b
	}()
	p.put(a)
	p.put(<-got)
	require.EqualValues(t, maxBuffer, p.left)
	require.Empty(t, p.waiting)
}
