package transfer

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// torn maps a file whose end is then cut off: all but its first page is gone. It touches the memory, so that a fault comes
// from what is gone and not from what was never there.
func torn(t *testing.T, n int) []byte {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "torn")
	require.NoError(t, err)
	require.NoError(t, f.Truncate(int64(n)))
	b, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, unix.Munmap(b))
		require.NoError(t, f.Close())
	})
	copy(b, noise(t, n))
	require.NoError(t, f.Truncate(int64(os.Getpagesize())))
	return b
}

// TestMemoryThatIsGone is behind a buffer, or the caller's own, and was truncated: what needs it fails, with the reason, and
// all else goes on, over the same connections.
func TestMemoryThatIsGone(t *testing.T) {
	for _, sums := range []bool{false, true} {
		ways(t, Config{Checksums: sums, SliceSize: 16 << 10}, func(t *testing.T, here, there *Engine, seg *Segment) {
			t.Helper()
			const size = 1 << 20
			pins := strings.HasSuffix(t.Name(), "/"+TransportRDMA)
			_, good := buffer(t, there, size, BufferOptions{})
			bad := register(t, there, torn(t, size), BufferOptions{})
			t.Cleanup(func() { require.NoError(t, bad.Retire(context.Background())) })
			h, broken, local := good.Info().Handle, bad.Info().Handle, torn(t, size)
			for name, r := range map[string]Request{
				"read it":       {Op: Read, Buffer: broken, Local: make([]byte, size)},
				"write it":      {Op: Write, Buffer: broken, Local: make([]byte, size)},
				"its end":       {Op: Read, Buffer: broken, Offset: size - 10, Local: make([]byte, 10)},
				"write its end": {Op: Write, Buffer: broken, Offset: size - 10, Local: make([]byte, 10)},
				"read to it":    {Op: Read, Buffer: h, Local: local},
				"write from it": {Op: Write, Buffer: h, Local: local},
				"gather":        {Op: Write, Buffer: h, Local: local[:100], More: [][]byte{local[size-10:]}},
			} {
				r.Segment = seg
				if pins && r.Buffer == broken { // no NIC takes it, and there is no other transport here
					require.ErrorIs(t, carry(t, here, r), ErrNoPath, name)
					continue
				}
				require.ErrorIs(t, carry(t, here, r), ErrMemory, name)
				all := Request{Op: Read, Segment: seg, Buffer: h, Local: make([]byte, size)}
				require.NoError(t, carry(t, here, all), "after %s", name)
				there := Request{Op: Read, Segment: seg, Buffer: broken, Local: make([]byte, 4096)}
				require.True(t, pins || carry(t, here, there) == nil, "what is there")
			}
		})
	}
}

// TestSumsOfMemoryThatIsGone fault in no other way than with an error.
func TestSumsOfMemoryThatIsGone(t *testing.T) {
	b := torn(t, 1<<20)
	_, err := sumOf(b)
	require.ErrorIs(t, err, ErrMemory)
	_, err = sumPieces([][]byte{b[:100], b[100:]})
	require.ErrorIs(t, err, ErrMemory)
	require.ErrorIs(t, touch(b), ErrMemory)
	require.NoError(t, touch(b[:os.Getpagesize()]))
	require.NoError(t, touch(nil))
	whole, err := sumOf(b[:100])
	require.NoError(t, err)
	parts, err := sumPieces([][]byte{b[:50], b[50:100]})
	require.NoError(t, err)
	require.Equal(t, whole, parts)
}
