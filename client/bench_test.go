package client

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func BenchmarkGet(b *testing.B) {
	for _, size := range []int{4096, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size>>10, "KiB"), func(b *testing.B) {
			f := newFake(b, 64<<20, 1)
			c := f.open(b, func(cfg *Config) { cfg.RegionSize = 16 << 20; cfg.Prefault = true; cfg.PageSize = 64 << 10 })
			put(b, c, "k", size)
			dst := make([]byte, size)
			key := []byte("k")
			f.do(func() { f.seen = nil })
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				_, err := c.Get(b.Context(), key, dst)
				require.NoError(b, err)
			}
		})
	}
}

// Reads from and writes to a node of this process over loopback TCP: what the client and transfer cost together.
func BenchmarkRemote(b *testing.B) {
	const size, many = 64 << 10, 32
	open := func(b *testing.B) (*fakeNode, *Client) {
		b.Helper()
		f := newFake(b, 16*4096, 1)
		n := f.addNode(b, "dram", 64<<20)
		n.first = true
		return n, f.open(b, func(cfg *Config) { cfg.RegionSize, cfg.PageSize, cfg.Device = 32<<20, size, 2 })
	}
	keys, items := make([][]byte, many), make([]Item, many)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "k%d", i)
		items[i] = Item{Key: keys[i], Value: make([]byte, size)}
	}
	b.Run("Get", func(b *testing.B) {
		_, c := open(b)
		put(b, c, "k", size)
		dst, key := make([]byte, size), []byte("k")
		b.SetBytes(size)
		b.ReportAllocs()
		for b.Loop() {
			_, err := c.Get(b.Context(), key, dst)
			require.NoError(b, err)
		}
	})
	b.Run("GetBatch", func(b *testing.B) {
		_, c := open(b)
		_, err := c.PutBatch(b.Context(), items)
		require.NoError(b, err)
		var dst [][]byte
		b.SetBytes(size * many)
		b.ReportAllocs()
		for b.Loop() {
			dst, err = c.GetBatch(b.Context(), keys, dst)
			require.NoError(b, err)
		}
	})
	b.Run("PutBatch", func(b *testing.B) {
		_, c := open(b)
		b.SetBytes(size * many)
		b.ReportAllocs()
		for b.Loop() {
			_, err := c.PutBatch(b.Context(), items)
			require.NoError(b, err)
			_, err = c.Delete(b.Context(), keys...)
			require.NoError(b, err)
		}
	})
}
