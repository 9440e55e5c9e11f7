package cxl

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"
)

// anonymous is memory outside Go's heap with a page after it that faults, so that a copy too long is found.
func anonymous(tb testing.TB, size int) []byte {
	tb.Helper()
	page := int(pageSize)
	whole := (size + page - 1) &^ (page - 1)
	m, err := unix.Mmap(-1, 0, whole+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, unix.Munmap(m)) })
	require.NoError(tb, unix.Mprotect(m[whole:], unix.PROT_NONE))
	return m[whole-size : whole : whole]
}

func TestCopyMovesExactlyItsBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	sizes := []int{
		0, 1, 63, 64, 255, 256, streamMin - 1, streamMin, streamMin + 1, 5000, 65536, 100_001,
		copyChunk - 1, copyChunk, copyChunk + 300, 3*copyChunk + 17,
	}
	src := anonymous(t, 4<<20)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	dst := anonymous(t, 4<<20)
	for _, copyFn := range []func(dst, src []byte) error{CopyIn, CopyOut, CopyOutStream} {
		for _, size := range sizes {
			for _, into := range []int{0, 1, 32, 63} {
				clear(dst)
				// The source ends at a guard page: a read past it would fault.
				from := src[len(src)-size:]
				to := dst[len(dst)-size-into-64:][:size]
				require.NoError(t, copyFn(to, from))
				require.True(t, bytes.Equal(from, to), "%d bytes at %d", size, into)
				end := len(dst) - into - 64
				require.True(t, allZero(dst[:end-size]), "%d bytes: before", size)
				require.True(t, allZero(dst[end:]), "%d bytes: after", size)
			}
		}
	}
}

func TestStreamCopiesOfThisCPU(t *testing.T) {
	if streamCopy == nil {
		t.Skip("this CPU has no stream copy")
	}
	src, dst := anonymous(t, 64<<10), anonymous(t, 64<<10)
	for i := range src {
		src[i] = byte(i * 31)
	}
	for n := streamBlock; n <= len(src); n += 5 * streamBlock {
		clear(dst)
		streamCopy(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[len(src)-n]), uintptr(n))
		require.True(t, bytes.Equal(src[len(src)-n:], dst[:n]))
		require.True(t, allZero(dst[n:]))
	}
	t.Logf("AVX2 %v, AVX-512F %v", cpu.X86.HasAVX2, cpu.X86.HasAVX512F)
}

func TestCopyRefusesUnequalLengths(t *testing.T) {
	require.ErrorIs(t, CopyIn(make([]byte, 3), make([]byte, 4)), ErrRange)
	require.ErrorIs(t, CopyOut(make([]byte, 4), make([]byte, 3)), ErrRange)
	require.ErrorIs(t, CopyOutStream(make([]byte, 4), make([]byte, 3)), ErrRange)
}

func TestTruncationUnderMapping(t *testing.T) {
	for _, size := range []int{1, 100, 4096, 64 << 10, 2 << 20} {
		t.Run(strconv.Itoa(size), func(t *testing.T) {
			path := onTmpFS(t)
			opts := testOptions()
			opts.Coherence = CoherenceNone
			d := create(t, path, opts)
			m := mapAll(t, d, MapOptions{Populate: true})
			b, page := make([]byte, size), m.Bytes()[1<<20:][:size]
			require.NoError(t, CopyIn(page, b))
			require.NoError(t, os.Truncate(path, HeaderSpan))

			require.ErrorIs(t, CopyIn(page, b), ErrTruncated)
			require.ErrorIs(t, CopyOut(b, page), ErrTruncated)
			require.ErrorIs(t, m.Publish(page), ErrTruncated)
			require.ErrorIs(t, m.Refresh(page), ErrTruncated)
			require.ErrorIs(t, m.Surrender(page), ErrTruncated)
			require.ErrorIs(t, Guard(func() { page[0]++ }), ErrTruncated)
			require.ErrorIs(t, touchPages(m.Bytes(), true), ErrTruncated)
			require.ErrorIs(t, populate(m.Bytes(), true), ErrTruncated)
			require.EqualValues(t, 41, m.Generation(), "the header is still there")

			require.NoError(t, os.Truncate(path, 0))
			require.Zero(t, m.Generation())
			require.ErrorIs(t, d.SetGeneration(42, 1), ErrTruncated)
			require.NoError(t, os.Truncate(path, testSize))
			require.Zero(t, m.Generation(), "nor is it back when the file has grown again")
		})
	}
}

func TestGuardLetsOtherPanicsThrough(t *testing.T) {
	require.PanicsWithValue(t, "mine", func() { _ = Guard(func() { panic("mine") }) })
	var nobody *[16]byte
	require.Panics(t, func() { _ = Guard(func() { nobody[3] = 1 }) }, "a nil dereference is a bug, not a lost file")
	require.Panics(t, func() { _ = Guard(func() { _ = make([]byte, 1)[len(os.Args)+5] }) })
}

func TestCacheMaintenanceKeepsBytes(t *testing.T) {
	b := anonymous(t, 1<<16)
	for i := range b {
		b[i] = byte(i)
	}
	want := bytes.Clone(b)
	for _, r := range [][2]int{{0, 0}, {0, 1}, {63, 65}, {1, 1 << 16}, {0, 1 << 16}, {4095, 4097}} {
		WriteBack(b[r[0]:r[1]])
		Invalidate(b[r[0]:r[1]])
		Fence()
		require.True(t, bytes.Equal(want, b))
	}
}

func TestLinesCoversEveryByte(t *testing.T) {
	b := anonymous(t, 4096)
	line := uintptr(cacheLine)
	for _, c := range []struct{ from, to, first, count uintptr }{
		{0, 1, 0, 1},
		{0, line, 0, 1},
		{0, line + 1, 0, 2},
		{line - 1, line + 1, 0, 2},
		{line, 2 * line, line, 1},
		{line + 1, 3*line + 1, line, 3},
	} {
		p, n := lines(b[c.from:c.to])
		require.Equal(t, uintptr(unsafe.Pointer(&b[0]))+c.first, uintptr(p))
		require.Equal(t, c.count, n)
	}
	_, n := lines(nil)
	require.Zero(t, n)
}

func TestHotCallsDoNotAllocate(t *testing.T) {
	d := create(t, onTmpFS(t), testOptions())
	m := mapAll(t, d, MapOptions{Populate: true})
	b, page := make([]byte, 64<<10), m.Bytes()[:64<<10]
	require.Zero(t, testing.AllocsPerRun(100, func() {
		_ = CopyIn(page, b)
		_ = m.Publish(page)
		_ = m.Generation()
		_ = m.Refresh(page)
		_ = CopyOut(b, page)
		_ = Boottime()
	}))
}

// BenchmarkCopy copies between a pool far larger than the caches and a buffer that is reused. memmove is the machine's
// bound: the runtime's copy of the same bytes at 16 MiB is where it streams.
func BenchmarkCopy(b *testing.B) {
	const poolSize = 256 << 20
	opts := testOptions()
	opts.Size = HeaderSpan + poolSize
	pool := mapAll(b, create(b, onTmpFS(b), opts), MapOptions{Populate: true}).Bytes()
	plain := func(dst, src []byte) error { copy(dst, src); return nil }
	for _, size := range []int{4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20} {
		buf := make([]byte, size)
		for i := range buf {
			buf[i] = byte(i)
		}
		for _, c := range []struct {
			name string
			in   bool
			f    func(dst, src []byte) error
		}{{"in/CopyIn", true, CopyIn}, {"in/memmove", true, plain}, {"out/CopyOut", false, CopyOut}, {"out/memmove", false, plain}} {
			b.Run(fmt.Sprintf("%s/%dKiB", c.name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				at := 0
				for b.Loop() {
					dst, src := pool[at:at+size], buf
					if !c.in {
						dst, src = src, dst
					}
					if err := c.f(dst, src); err != nil {
						b.Fatal(err)
					}
					if at += size; at == poolSize {
						at = 0
					}
				}
			})
		}
	}
}

func BenchmarkCache(b *testing.B) {
	opts := testOptions()
	opts.Size, opts.Coherence = HeaderSpan+64<<20, CoherenceNone
	m := mapAll(b, create(b, onTmpFS(b), opts), MapOptions{Populate: true})
	for _, size := range []int{64, 4 << 10, 64 << 10, 1 << 20} {
		page := m.Bytes()[:size]
		for name, f := range map[string]func([]byte) error{
			"Publish/dirty": func(p []byte) error { clear(p); return m.Publish(p) }, "Publish/clean": m.Publish,
			"Refresh/cold": m.Refresh,
		} {
			b.Run(fmt.Sprintf("%s/%dB", name, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if err := f(page); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkGeneration(b *testing.B) {
	for _, c := range []Coherence{CoherenceHardware, CoherenceNone} {
		b.Run(c.String(), func(b *testing.B) {
			opts := testOptions()
			opts.Coherence = c
			m := mapAll(b, create(b, onTmpFS(b), opts), MapOptions{ReadOnly: true})
			b.ReportAllocs()
			for b.Loop() {
				if m.Generation() != 41 {
					b.Fatal("wrong generation")
				}
			}
		})
	}
}

func BenchmarkPopulate(b *testing.B) {
	const size = 256 << 20
	opts := testOptions()
	opts.Size = HeaderSpan + size
	d := create(b, onTmpFS(b), opts)
	b.SetBytes(size)
	for b.Loop() {
		m, err := d.Map(HeaderSpan, size, MapOptions{Populate: true})
		if err != nil {
			b.Fatal(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
