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
