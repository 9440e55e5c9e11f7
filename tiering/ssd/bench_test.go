package ssd

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

var benchDir = flag.String("dir", "", "where benchmarks put their store, instead of the directory for temporary files")

// benchStore makes a store on real files.
func benchStore(b *testing.B, size uint64, change func(o *Options)) (*Store, string, Options) {
	b.Helper()
	dir, err := os.MkdirTemp(*benchDir, "ssd")
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, os.RemoveAll(dir)) })
	o := Options{Create: true, Size: size}
	if change != nil {
		change(&o)
	}
	s, err := Open(dir, o)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close()) })
	return s, dir, o
}

const benchSize = 1 << 30

func eachPattern(b *testing.B, run func(b *testing.B, n int, next func() uint64)) {
	b.Helper()
	for _, n := range []int{64 << 10, 1 << 20} {
		for _, random := range []bool{false, true} {
			name := "sequential"
			if random {
				name = "random"
			}
			b.Run(fmt.Sprintf("%s/%dKiB", name, n>>10), func(b *testing.B) {
				count := uint64(benchSize / n)
				var at atomic.Uint64
				run(b, n, func() uint64 {
					if random {
						return rand.Uint64N(count) * uint64(n)
					}
					return at.Add(1) % count * uint64(n)
				})
			})
		}
	}
}

// BenchmarkWrite is one writer: each write waits for its flush.
func BenchmarkWrite(b *testing.B) {
	eachPattern(b, func(b *testing.B, n int, next func() uint64) {
		b.Helper()
		s, _, _ := benchStore(b, benchSize, nil)
		data := alignedBytes(n)
		copy(data, random(1, n))
		b.SetBytes(int64(n))
		for b.Loop() {
			require.NoError(b, s.Write(b.Context(), next(), data))
		}
	})
}

// BenchmarkWriteParallel is 32 writers for each core, who share flushes.
func BenchmarkWriteParallel(b *testing.B) {
	eachPattern(b, func(b *testing.B, n int, next func() uint64) {
		b.Helper()
		s, _, _ := benchStore(b, benchSize, nil)
		data := alignedBytes(n)
		copy(data, random(1, n))
		b.SetBytes(int64(n))
		b.SetParallelism(32)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				require.NoError(b, s.Write(b.Context(), next(), data))
			}
		})
	})
}

// BenchmarkRead is 16 readers for each core.
func BenchmarkRead(b *testing.B) {
	eachPattern(b, func(b *testing.B, n int, next func() uint64) {
		b.Helper()
		s, _, _ := benchStore(b, benchSize, func(o *Options) { o.NoSync = true })
		data := alignedBytes(n)
		copy(data, random(1, n))
		for off := 0; off < benchSize; off += n {
			require.NoError(b, s.Write(b.Context(), uint64(off), data))
		}
		b.SetBytes(int64(n))
		b.SetParallelism(16)
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			buf := alignedBytes(n)
			for pb.Next() {
				require.NoError(b, s.Read(b.Context(), next(), buf))
			}
		})
	})
}

// BenchmarkIndex puts an extent in and finds it, at random among a million.
func BenchmarkIndex(b *testing.B) {
	const n = 1 << 20
	x := index{used: make([]usage, 1)}
	set := func(i uint64) {
		x.replace(i<<16, (i+1)<<16, &piece{off: i << 16, length: 1 << 16, raw: 1 << 16, stored: 1 << 16, pos: 1})
	}
	for _, i := range rand.Perm(n) {
		set(uint64(i))
	}
	for b.Loop() {
		set(rand.Uint64N(n))
	}
	b.ReportMetric(float64(x.bytes())/n, "B/extent")
}

// BenchmarkOpen starts a store of 200,000 extents from its footers, and after a crash from its headers.
func BenchmarkOpen(b *testing.B) {
	const n = 200_000
	s, dir, o := benchStore(b, n*block, func(o *Options) { o.NoSync, o.Compression = true, CompressOff })
	data := alignedBytes(block)
	write := make(chan uint64)
	done := make(chan error)
	for range 64 {
		go func() {
			var err error
			for i := range write {
				err = errors.Join(err, s.Write(b.Context(), i*block, data))
			}
			done <- err
		}()
	}
	for i := range uint64(n) {
		write <- i
	}
	close(write)
	for range 64 {
		require.NoError(b, <-done)
	}
	require.NoError(b, s.Close())
	for b.Loop() {
		s, err := Open(dir, o)
		require.NoError(b, err)
		require.EqualValues(b, n, s.Stats().Extents)
		require.Zero(b, s.Stats().RecoveredByScan)
		require.NoError(b, s.Close())
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/n*1e3, "ns/extent")
}
