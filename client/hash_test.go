package client

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The vectors were computed with the reference implementation of XXH3 (python-xxhash over xxHash 0.8) by the formula
// in the comment of PrefixHashes.
func TestPrefixHashesAgreeWithAnotherImplementation(t *testing.T) {
	count := func(from, n uint32) (tokens []uint32) {
		for i := range n {
			tokens = append(tokens, from+i)
		}
		return tokens
	}
	mixed := make([]uint32, 0, 300)
	for range 100 {
		mixed = append(mixed, 1<<32-1, 0, 7)
	}
	for name, c := range map[string]struct {
		tokens []uint32
		block  int
		seed   uint64
		first  []uint64
		last   uint64
		n      int
	}{
		"seed 0, partial block left out": {
			count(1, 13), 4, 0, []uint64{0x6fc1ebd4f4d6ea31, 0x3a14937fd5340c7a, 0x829711b6d52f08eb}, 0x829711b6d52f08eb, 3,
		},
		"seed": {
			count(1, 13), 4, 1234567890123,
			[]uint64{0x6fae5af67bb2e435, 0x32c31f60cae1328a, 0x631473a2f518349d},
			0x631473a2f518349d, 3,
		},
		"wide tokens": {
			mixed, 16, 42, []uint64{0xb8d4ea48f3587116, 0x9f7179da5c687070, 0x53e00108bc588071}, 0x1b838b7c463509a2, 18,
		},
		"large blocks": {
			count(0, 6000), 2000, 7,
			[]uint64{0x9e99f1e25861d8ef, 0xbdd0c1e6ae519dab, 0xc45a2418201e503a},
			0xc45a2418201e503a, 3,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := PrefixHashes(c.tokens, c.block, PrefixContext{Seed: c.seed})
			require.Len(t, got, c.n)
			require.Equal(t, c.first, got[:len(c.first)])
			require.Equal(t, c.last, got[c.n-1])
			require.Equal(t, got, PrefixHashes(c.tokens, 0, PrefixContext{Seed: c.seed, BlockSize: uint64(c.block)}))
		})
	}
	require.Nil(t, PrefixHashes(count(0, 3), 4, PrefixContext{}))
	require.Nil(t, PrefixHashes(count(0, 3), 0, PrefixContext{}))
	require.Nil(t, PrefixHashes(nil, 4, PrefixContext{}))
}

func BenchmarkPrefixHashes(b *testing.B) {
	tokens := make([]uint32, 512*16)
	dst := make([]uint64, 0, 512)
	b.ReportAllocs()
	for b.Loop() {
		dst = AppendPrefixHashes(dst[:0], tokens, 16, PrefixContext{})
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/block")
}
