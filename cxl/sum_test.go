package cxl

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
)

// sumCopies are the copies that take a sum, each with whether it goes past the caches.
var sumCopies = map[string]func(dst, src []byte) (uint64, error){
	"in":          CopyInSum,
	"out":         func(dst, src []byte) (uint64, error) { return CopyOutSum(dst, src, false) },
	"out, stream": func(dst, src []byte) (uint64, error) { return CopyOutSum(dst, src, true) },
}

func TestCopiesWithASumMoveAndSumExactlyTheirBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	src := anonymous(t, 3<<20)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	dst := anonymous(t, 3<<20)
	sizes := make([]int, 0, 300)
	sizes = append(sizes, 0, 1, 63, 240, 241, 1024, sumMin-1, sumMin, sumMin+1, sumMin+63, sumMin+64, sumMin+65, 64<<10)
	sizes = append(sizes, copyChunk, copyChunk+1, copyChunk+sumBlock, copyChunk+sumBlock+1, 2<<20+999)
	for range 200 {
		sizes = append(sizes, rng.IntN(20_000))
	}
	for name, copyFn := range sumCopies {
		for _, size := range sizes {
			into := []int{0, 64, 1, 8}[rng.IntN(4)]
			from := src[len(src)-size:] // it ends at a guard page
			end := len(dst) - 64*1024 + into
			to := dst[max(0, end-size)&^63+into:][:size]
			clear(dst)
			sum, err := copyFn(to, from)
			require.NoError(t, err)
			require.True(t, bytes.Equal(from, to), "%s: %d bytes", name, size)
			require.Equal(t, xxh3.Hash(from), sum, "%s: %d bytes", name, size)
			clear(to)
			require.True(t, allZero(dst), "%s: %d bytes: beside", name, size)
		}
		_, err := copyFn(make([]byte, 3), make([]byte, 4))
		require.ErrorIs(t, err, ErrRange)
	}
}

func TestTruncationUnderACopyWithASum(t *testing.T) {
	path := onTmpFS(t)
	d := create(t, path, testOptions())
	m := mapAll(t, d, MapOptions{Populate: true})
	b, page := make([]byte, 1<<20), m.Bytes()[:1<<20]
	_, err := CopyInSum(page, b)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, HeaderSpan))
	_, err = CopyOutSum(b, page, true)
	require.ErrorIs(t, err, ErrTruncated)
	_, err = CopyInSum(page, b)
	require.ErrorIs(t, err, ErrTruncated)
}

func BenchmarkCopyWithSum(b *testing.B) {
	// Far more than the caches hold, as a pool is.
	src, dst := anonymous(b, 256<<20), anonymous(b, 256<<20)
	clear(src)
	clear(dst)
	for _, size := range []int{64 << 10, 1 << 20} {
		for name, copyFn := range map[string]func(dst, src []byte){
			"one pass":   func(dst, src []byte) { _, _ = CopyOutSum(dst, src, true) },
			"two passes": func(dst, src []byte) { _ = CopyOut(dst, src); xxh3.Hash(dst) },
			"no sum":     func(dst, src []byte) { _ = CopyOutStream(dst, src) },
		} {
			b.Run(name+"/"+strconv.Itoa(size), func(b *testing.B) {
				b.SetBytes(int64(size))
				at := 0
				for b.Loop() {
					copyFn(dst[at:at+size], src[at:at+size])
					at = (at + size) % len(src)
				}
			})
		}
	}
}
