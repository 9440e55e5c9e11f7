package ssd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// random gives n bytes that do not compress.
func random(seed uint64, n int) []byte {
	rng := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, 0, n+8)
	for len(b) < n {
		b = binary.LittleEndian.AppendUint64(b, rng.Uint64())
	}
	return b[:n]
}

func small(f fileSystem) Options {
	return Options{
		Create: true, UUID: [16]byte{7}, Pool: [16]byte{1}, Device: 5, Generation: 9, Size: 1 << 20,
		SegmentBytes: minSegmentBytes, Capacity: 16 * minSegmentBytes, fs: f, clock: hasty{},
	}
}

func open(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open("", o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func requireRead(t *testing.T, s *Store, off int, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	require.NoError(t, s.Read(t.Context(), uint64(off), got))
	require.True(t, bytes.Equal(want, got), "bytes at %d differ", off)
}

// TestRealFiles goes the way that production does: what was written is there after a restart, under the same
// generation, whole or in part; what was replaced or discarded is not.
func TestRealFiles(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "/dev/shm"} {
		for _, buffered := range []bool{false, true} {
			t.Run(fmt.Sprint(filepath.Base(dir), buffered), func(t *testing.T) {
				dir, err := os.MkdirTemp(dir, "ssd")
				require.NoError(t, err)
				defer func() { require.NoError(t, os.RemoveAll(dir)) }()
				o := small(nil)
				o.fs, o.Buffered = nil, buffered
				s, err := Open(dir, o)
				require.NoError(t, err)
				if buffered {
					require.False(t, s.Stats().Direct)
				}
				_, err = Open(dir, o)
				require.ErrorIs(t, err, ErrLocked)
				a, b := random(1, 100_001), bytes.Repeat([]byte("compressible "), 6000)
				require.NoError(t, s.Write(t.Context(), 333, a))
				require.NoError(t, s.Write(t.Context(), 200_000, b))
				require.NoError(t, s.Write(t.Context(), 1000, a[:50]))
				require.NoError(t, s.Discard(t.Context(), Extent{50_000, 10}, Extent{0, 0}))
				check := func(s *Store) {
					requireRead(t, s, 333, a[:1000-333])
					requireRead(t, s, 1000, a[:50])
					requireRead(t, s, 1050, a[1050-333:50_000-333])
					requireRead(t, s, 50_010, a[50_010-333:])
					requireRead(t, s, 200_100, b[100:20_000])
					require.ErrorIs(t, s.Read(t.Context(), 49_999, make([]byte, 2)), ErrNotFound)
					require.ErrorIs(t, s.Read(t.Context(), 332, make([]byte, 2)), ErrNotFound)
				}
				check(s)
				require.Positive(t, s.Stats().Compressed)
				require.NoError(t, s.Close())
				require.NoError(t, s.Close())
				require.ErrorIs(t, s.Write(t.Context(), 0, a), ErrClosed)
				s, err = Open(dir, Options{Buffered: buffered})
				require.NoError(t, err)
				require.EqualValues(t, 9, s.Generation())
				require.Zero(t, s.Stats().RecoveredByScan)
				check(s)
				require.NoError(t, s.Close())
			})
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	disk := newMemFS()
	_, err := Open("", Options{fs: disk})
	require.ErrorIs(t, err, ErrNoStore)
	require.NoError(t, open(t, small(disk)).Close())
	for _, change := range []func(o *Options){
		func(o *Options) { o.UUID[0]++ },
		func(o *Options) { o.Pool[0]++ },
		func(o *Options) { o.Device++ },
		func(o *Options) { o.Size++ },
		func(o *Options) { o.SegmentBytes *= 2 },
		func(o *Options) { o.Capacity /= 2 },
	} {
		o := small(disk)
		change(&o)
		_, err := Open("", o)
		require.ErrorIs(t, err, ErrMismatch)
	}
	for _, o := range []Options{{Size: 1, SegmentBytes: 1}, {}, {Size: 1, Capacity: 1}, {Size: 1, CompactRate: -1}, {Size: 1, ReadBufferBytes: 1}} {
		o.fs, o.Create = newMemFS(), true
		_, err := Open("", o)
		require.ErrorIs(t, err, ErrOptions)
	}
	o := small(disk)
	o.Capacity *= 2
	o.UUID, o.Pool, o.Size = [16]byte{}, [16]byte{}, 0
	s := open(t, o)
	require.Equal(t, 32, s.Stats().Segments, "a store may grow")
	uuid, pool := s.Identity()
	require.Equal(t, [16]byte{7}, uuid)
	require.Equal(t, [16]byte{1}, pool)
	require.EqualValues(t, 1<<20, s.Size())
}

// TestNewGeneration drops everything, durably, however much there is.
func TestNewGeneration(t *testing.T) {
	disk := newMemFS()
	s := open(t, small(disk))
	require.NoError(t, s.Write(t.Context(), 0, random(1, 300_000)))
	require.NoError(t, s.SetGeneration(t.Context(), 10))
	require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, 1)), ErrNotFound)
	require.NoError(t, s.Write(t.Context(), 5000, []byte("new")))
	require.Error(t, s.SetGeneration(t.Context(), 0))
	again := open(t, small(disk.after(rand.New(rand.NewPCG(1, 1)))))
	require.EqualValues(t, 10, again.Generation())
	require.ErrorIs(t, again.Read(t.Context(), 0, make([]byte, 1)), ErrNotFound)
	requireRead(t, again, 5000, []byte("new"))
}

// TestFullStore answers a write that does not fit at once, goes on reading and replacing, and takes writes again once
// something was discarded.
func TestFullStore(t *testing.T) {
	o := small(newMemFS())
	o.Size, o.Compression = 8<<20, CompressOff
	s := open(t, o)
	const n = 8192
	var err error
	written := 0
	for ; err == nil && written < int(o.Size)/n; written++ {
		err = s.Write(t.Context(), uint64(written*n), random(uint64(written), n))
	}
	written--
	require.ErrorIs(t, err, ErrNoSpace)
	require.Greater(t, written*n, int(s.usable)*9/10)
	for i := range 200 {
		require.NoError(t, s.Write(t.Context(), uint64(i%written*n), random(uint64(i%written), n)), "in place of as much")
	}
	for i := range written {
		requireRead(t, s, i*n, random(uint64(i), n))
	}
	for i := 0; i < written; i += 2 {
		require.NoError(t, s.Discard(t.Context(), Extent{uint64(i * n), n}))
	}
	for i := 0; i < written; i += 2 {
		require.NoError(t, s.Write(t.Context(), uint64(i*n), random(uint64(i+7), n)))
	}
	require.Positive(t, s.Stats().Compactions)
}

// TestFaultsStop: after a write or flush has failed, nothing works but Close, and nothing is tried again.
func TestFaultsStop(t *testing.T) {
	for _, what := range []string{"write", "flush", "no space"} {
		t.Run(what, func(t *testing.T) {
			disk := newMemFS()
			s := open(t, small(disk))
			require.NoError(t, s.Write(t.Context(), 0, []byte("before")))
			calls := 0
			fail := func(string) error { calls++; return unix.EIO }
			disk.mu.Lock()
			switch what {
			case "write":
				disk.failWrite = fail
			case "flush":
				disk.failSync = fail
			default:
				disk.failWrite = func(string) error { calls++; return unix.ENOSPC }
			}
			disk.mu.Unlock()
			err := s.Write(t.Context(), 0, []byte("after"))
			require.ErrorIs(t, err, ErrFailed)
			require.True(t, errors.Is(err, unix.EIO) || errors.Is(err, unix.ENOSPC), "it names the cause: %v", err)
			require.ErrorIs(t, s.Write(t.Context(), 0, nil), ErrFailed)
			require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, 6)), ErrFailed)
			require.ErrorIs(t, s.Discard(t.Context(), Extent{0, 1}), ErrFailed)
			require.ErrorIs(t, s.SetGeneration(t.Context(), 3), ErrFailed)
			require.NoError(t, s.Close())
			require.Equal(t, 1, calls, "nothing is written or flushed again")
		})
	}
}

// TestReadFault: a block that cannot be read is a miss.
func TestReadFault(t *testing.T) {
	disk := newMemFS()
	s := open(t, small(disk))
	require.NoError(t, s.Write(t.Context(), 0, random(1, 8192)))
	disk.mu.Lock()
	disk.failRead = func(string, int64) error { return unix.EIO }
	disk.mu.Unlock()
	require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, 8192)), ErrDamaged)
	require.EqualValues(t, 1, s.Stats().Damaged)
}

// TestGroups: writes that come while one is under way share the next one, and its flush.
func TestGroups(t *testing.T) {
	disk := newMemFS()
	disk.failSync = func(string) error { time.Sleep(2 * time.Millisecond); return nil }
	s := open(t, small(disk))
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			for j := range 4 {
				require.NoError(t, s.Write(t.Context(), uint64(i*4+j)*100, random(uint64(i), 100)))
			}
		})
	}
	all.Wait()
	st := s.Stats()
	require.EqualValues(t, 256, st.GroupRecords)
	require.Less(t, st.Groups, int64(64))
	require.LessOrEqual(t, st.Syncs, 2*st.Groups, "one each, and one for the end of a segment")
}

// TestContextEnds: a call whose context is over changes nothing.
func TestContextEnds(t *testing.T) {
	s := open(t, small(newMemFS()))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.Write(ctx, 0, []byte("x")), context.Canceled)
	require.ErrorIs(t, s.Read(ctx, 0, []byte("x")), context.Canceled)
	require.ErrorIs(t, s.Discard(ctx, Extent{0, 1}), context.Canceled)
	require.ErrorIs(t, s.Write(t.Context(), 1<<20, []byte("x")), ErrRange)
	require.ErrorIs(t, s.Read(t.Context(), 1<<63, []byte("x")), ErrRange)
	require.ErrorIs(t, s.Discard(t.Context(), Extent{1, 1 << 20}), ErrRange)
}

// TestTornTail cuts the last write short, at every byte of its headers and at ends of sectors and blocks: what was acknowledged before is there, and of the last one
// all or nothing.
func TestTornTail(t *testing.T) {
	disk := newMemFS()
	o := small(disk)
	o.Compression = CompressOff
	s := open(t, o)
	first, second := random(1, 5000), random(2, 3000)
	require.NoError(t, s.Write(t.Context(), 0, first))
	require.NoError(t, s.Discard(t.Context(), Extent{100, 50}))
	before := disk.clone()
	require.NoError(t, s.Write(t.Context(), 9000, second))
	after := disk.clone()
	const name = "0000.segment"
	from := 4 * block // two blocks of payload, three headers less the last
	require.NotEqual(t, before.files[name].now[from:from+block], after.files[name].now[from:from+block])
	for cut := 0; cut <= 2*block; cut++ {
		if at := cut % headerCopy; at > 100 && at < headerCopy-10 && cut%31 != 0 {
			continue // payload and padding: there one byte is like another
		}
		torn := before.clone()
		copy(torn.files[name].now, after.files[name].now[:from+cut])
		s, err := Open("", func() Options { o := o; o.fs = torn; return o }())
		require.NoError(t, err)
		require.EqualValues(t, 9, s.Generation(), "nothing is missing that was acknowledged")
		requireRead(t, s, 0, first[:100])
		requireRead(t, s, 150, first[150:])
		require.ErrorIs(t, s.Read(t.Context(), 120, make([]byte, 1)), ErrNotFound)
		got := make([]byte, len(second))
		if err := s.Read(t.Context(), 9000, got); err == nil {
			require.Equal(t, second, got)
			require.GreaterOrEqual(t, cut, block+len(second)-8)
		} else {
			require.ErrorIs(t, err, ErrNotFound)
			require.Less(t, cut, 2*block)
		}
		require.NoError(t, s.Write(t.Context(), 9000, second), "the log goes on")
		require.NoError(t, s.Close())
	}
}

// TestTornDiscard loses power during a discard, or after it, and writes to the same places then: what was discarded may come
// back if the discard was not acknowledged, and never in the place of what was written later.
func TestTornDiscard(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 9))
		disk := newMemFS()
		o := small(disk)
		s := open(t, o)
		old, later, next := random(1, 3*block), random(2, block), random(3, block)
		require.NoError(t, s.Write(t.Context(), 0, old))
		require.NoError(t, s.Write(t.Context(), 64<<10, old))
		torn := seed%2 == 0
		if torn {
			disk.mu.Lock()
			disk.failSync = func(string) error { return errors.New("the power is gone") }
			disk.mu.Unlock()
			require.ErrorIs(t, s.Discard(t.Context(), Extent{0, block}, Extent{64 << 10, 3 * block}), ErrFailed)
		} else {
			require.NoError(t, s.Discard(t.Context(), Extent{0, block}, Extent{64 << 10, 3 * block}))
			require.EqualValues(t, 4*block, s.Stats().DiscardedBytes)
			require.NoError(t, s.Write(t.Context(), 0, later))
		}
		disk = disk.after(rng)
		for range 3 { // and again, after what was written since is durable
			o.fs = disk
			s, err := Open("", o)
			require.NoError(t, err)
			require.EqualValues(t, 9, s.Generation())
			requireRead(t, s, block, old[block:])
			got := make([]byte, block)
			if err := s.Read(t.Context(), 64<<10, got); err == nil {
				require.True(t, torn)
				require.Equal(t, old[:block], got)
			} else {
				require.ErrorIs(t, err, ErrNotFound)
			}
			if !torn {
				requireRead(t, s, 0, later)
			}
			torn, later = false, next
			require.NoError(t, s.Write(t.Context(), 0, next))
			require.NoError(t, s.Discard(t.Context(), Extent{64 << 10, 3 * block}))
			require.ErrorIs(t, s.Read(t.Context(), 64<<10, got), ErrNotFound)
			disk = disk.after(rng) // before Close, which ends the log
			require.NoError(t, s.Close())
		}
	}
}

// TestDiscardsFreeSpace: what was discarded is not carried on by compaction, and counts for nothing.
func TestDiscardsFreeSpace(t *testing.T) {
	o := small(newMemFS())
	o.Compression = CompressOff
	s := open(t, o)
	const n, size = 40, 8192
	for i := range n {
		require.NoError(t, s.Write(t.Context(), uint64(i*size), random(uint64(i), size)))
	}
	full := s.Stats().LiveBytes
	require.NoError(t, s.Discard(t.Context(), Extent{0, n / 2 * size}, Extent{0, size}, Extent{n * size, size}))
	require.Less(t, s.Stats().LiveBytes, full*11/20)
	require.EqualValues(t, n/2*size, s.Stats().DiscardedBytes, "what was there, once")
	require.NoError(t, s.Discard(t.Context(), Extent{0, o.Size}))
	require.Zero(t, s.Stats().LiveBytes)
	require.Zero(t, s.Stats().Extents)
	require.EqualValues(t, n*size, s.Stats().DiscardedBytes)
	groups := s.Stats().Groups
	require.NoError(t, s.Discard(t.Context(), Extent{0, o.Size}))
	require.Equal(t, groups, s.Stats().Groups, "what is not there costs nothing")
}

// TestBitFlips turns bits in all files, by one and by sectors, with and without a clean end. What comes back is what
// was written last, or a miss, or the store does not open; but it is never anything older, and nothing panics.
func TestBitFlips(t *testing.T) {
	const flips = 300
	for _, clean := range []bool{true, false} {
		disk := newMemFS()
		want := flippable(t, disk, clean)
		rng := rand.New(rand.NewPCG(1, 2))
		lost, kept := 0, 0
		for range flips {
			d := disk.clone()
			f := d.files[pick(rng)]
			at := rng.IntN(len(f.now))
			if rng.IntN(2) == 0 {
				at = rng.IntN(min(len(f.now), 30_000)) // what is not long has much of it there
			}
			if rng.IntN(3) > 0 {
				at = at / block * block // headers
				at += rng.IntN(200)
			}
			at = min(at, len(f.now)-sector)
			if rng.IntN(3) == 0 {
				clear(f.now[at/sector*sector:][:sector])
			} else {
				f.now[at] ^= 1 << rng.IntN(8)
			}
			s, err := Open("", small(d))
			if err != nil {
				require.True(t, errors.Is(err, ErrCorrupt) || errors.Is(err, ErrNoStore) || errors.Is(err, ErrVersion), "%v", err)
				continue
			}
			for i := range 24 {
				got := make([]byte, len(want[i*8192])+1)[:max(1, len(want[i*8192]))]
				switch err := s.Read(t.Context(), uint64(i*8192), got); {
				case err == nil:
					require.Equal(t, want[i*8192], got, "extent %d after a flip at %d", i, at)
					kept++
				case want[i*8192] != nil:
					require.True(t, errors.Is(err, ErrNotFound) || errors.Is(err, ErrDamaged), "%v", err)
					lost++
				}
			}
			require.NoError(t, s.Close())
		}
		t.Logf("clean %v: %d extents kept, %d missed", clean, kept, lost)
		require.Positive(t, lost)
		require.Less(t, lost, flips, "a flip costs an extent at most")
	}
}

func pick(rng *rand.Rand) string {
	if rng.IntN(5) == 0 {
		return superblockName
	}
	return fmt.Sprintf("%04d.segment", rng.IntN(12))
}

// flippable writes in a way that leaves every kind of record, some replaced and some discarded, in several segments.
func flippable(t *testing.T, disk *memFS, clean bool) map[int][]byte {
	t.Helper()
	s, err := Open("", small(disk))
	require.NoError(t, err)
	want := map[int][]byte{}
	for round := range 4 {
		for i := range 24 {
			b := random(uint64(round*100+i), 4000+i*100)
			if i%3 == 0 {
				b = bytes.Repeat(b[:100], 60)
			}
			require.NoError(t, s.Write(t.Context(), uint64(i*8192), b))
			want[i*8192] = b
		}
		for i := round; i < 24; i += 5 {
			require.NoError(t, s.Discard(t.Context(), Extent{uint64(i * 8192), 8192}))
			delete(want, i*8192)
		}
	}
	if clean {
		require.NoError(t, s.Close())
		return want
	}
	d := disk.clone()
	require.NoError(t, s.Close())
	disk.files = d.files
	for _, f := range disk.files {
		f.fs = disk
	}
	return want
}

// TestLostHeader: if a header and the footer are gone, what lies before is not trusted, what lies behind is served, and
// that stays so.
func TestLostHeader(t *testing.T) {
	disk := newMemFS()
	o := small(disk)
	o.Compression = CompressOff
	s := open(t, o)
	require.NoError(t, s.Write(t.Context(), 0, random(1, 4096)))
	require.NoError(t, s.Discard(t.Context(), Extent{0, 4096}))
	require.NoError(t, s.Write(t.Context(), 8192, random(2, 4096)))
	require.NoError(t, s.Close())
	clear(disk.files["0000.segment"].now[2*block : 3*block])
	clear(disk.files["0000.segment"].now[5*block : 6*block])
	for range 3 {
		s = open(t, o)
		require.Zero(t, s.Generation(), "whoever has an index of this store is told")
		require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, 1)), ErrNotFound, "its discard is what was lost")
		requireRead(t, s, 8192, random(2, 4096))
		require.NoError(t, s.Close())
	}
}

// TestNoSync: what was acknowledged before it was durable may be lost with the power, but what is served is something
// that was written there, and a clean end keeps all.
func TestNoSync(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 5))
		disk := newMemFS()
		for round := range 4 {
			o := small(disk)
			o.NoSync, o.Compression = true, CompressOff
			s := open(t, o)
			for i := range 100 {
				b := random(uint64(i), 6000) // always the same at the same place
				require.NoError(t, s.Write(t.Context(), uint64(i*8192), b))
				if i%9 == round {
					require.NoError(t, s.Discard(t.Context(), Extent{uint64(i * 8192), 8192}))
				}
			}
			next := disk.after(rng)
			require.NoError(t, s.Close())
			if round == 2 {
				next = disk.clone()
			}
			disk = next
			o.fs = disk
			s = open(t, o)
			for i := range 100 {
				got := make([]byte, 6000)
				err := s.Read(t.Context(), uint64(i*8192), got)
				switch {
				case err == nil:
					require.Equal(t, random(uint64(i), 6000), got)
					require.False(t, round == 2 && i%9 == 2, "it was discarded")
				case round == 2:
					require.ErrorIs(t, err, ErrNotFound)
					require.Equal(t, 2, i%9)
				default:
					require.True(t, errors.Is(err, ErrNotFound) || errors.Is(err, ErrDamaged), "%v", err)
				}
			}
			require.NoError(t, s.Close())
		}
	}
}

// TestCompactionOfDamage: a piece that compaction cannot read is dropped, for good: what it had replaced stays away.
func TestCompactionOfDamage(t *testing.T) {
	disk := newMemFS()
	o := small(disk)
	o.Compression = CompressOff
	s := open(t, o)
	const n = 8192
	require.NoError(t, s.Write(t.Context(), 0, random(1, n)))
	require.NoError(t, s.Write(t.Context(), 100*n, random(9, n))) // keeps the oldest segment in use
	for i := range 12 {
		require.NoError(t, s.Write(t.Context(), uint64((i+1)*n), random(uint64(i), n)))
	}
	require.NoError(t, s.Write(t.Context(), 0, random(2, n)))
	var few [1]piece
	held, err := s.hold(few[:0], 0, n)
	require.NoError(t, err)
	s.letGo(held[0].slot)
	disk.mu.Lock()
	disk.files[fmt.Sprintf("%04d.segment", held[0].slot)].now[int(held[0].pos)*block] ^= 1
	disk.mu.Unlock()
	require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, n)), ErrDamaged)
	require.NoError(t, s.Discard(t.Context(), Extent{n, 12 * n})) // leaves it alone in its segment
	for i := 0; s.Stats().DroppedPieces == 0 && i < 4000; i++ {
		at := 20 + rand.Uint64N(80) // others stay live in part
		require.NoError(t, s.Write(t.Context(), at*n, random(at, n)))
	}
	require.EqualValues(t, 1, s.Stats().DroppedPieces)
	require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, n)), ErrNotFound)
	require.NoError(t, s.Close())
	s = open(t, o)
	require.ErrorIs(t, s.Read(t.Context(), 0, make([]byte, n)), ErrNotFound)
	requireRead(t, s, 100*n, random(9, n))
}

// TestReadersUnderCompaction: a reader gets the bytes that it found, however often their segment is emptied meanwhile.
func TestReadersUnderCompaction(t *testing.T) {
	o := small(newMemFS())
	o.CompactRate = 1 << 40
	s := open(t, o)
	const n, count = 5000, 60
	for i := range count {
		require.NoError(t, s.Write(t.Context(), uint64(i*n), random(uint64(i), n)))
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for r := range 3 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 9))
			b := make([]byte, n)
			for {
				select {
				case <-stop:
					return
				default:
				}
				i := rng.IntN(count)
				require.NoError(t, s.Read(t.Context(), uint64(i*n), b))
				require.Equal(t, random(uint64(i), n), b)
			}
		})
	}
	for round := range 40 {
		for i := round % 3; i < count; i += 3 {
			require.NoError(t, s.Write(t.Context(), uint64(i*n), random(uint64(i), n)))
		}
	}
	close(stop)
	readers.Wait()
	require.Greater(t, s.Stats().Compactions, int64(5))
}

// TestWholeAddressSpace: a store of the default capacity takes all of its size in the smallest pages, however often they are
// replaced, also with many segments, of which a share is compaction's.
func TestWholeAddressSpace(t *testing.T) {
	disk := newMemFS()
	o := small(disk)
	o.Size, o.Capacity, o.Compression = 200*minSegmentBytes, 0, CompressOff
	s := open(t, o)
	page := random(1, block)
	for round := range 2 {
		var writers sync.WaitGroup
		for w := range uint64(32) {
			writers.Go(func() {
				for i := w * block; i < o.Size; i += 32 * block {
					if err := s.Write(t.Context(), i, page); err != nil {
						t.Errorf("round %d, at %d of %d: %v", round, i, o.Size, err)
						return
					}
				}
			})
		}
		writers.Wait()
	}
	require.Less(t, s.Stats().Capacity, int64(o.Size)*13/10)
}
