package conductor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
)

// exported is an index as it is written.
func exported(tb testing.TB, x *Index) []byte {
	tb.Helper()
	var b bytes.Buffer
	require.NoError(tb, x.Export(&b))
	return b.Bytes()
}

// worn is an index that has seen something: places that were cleared, copies, groups, several words of places.
func worn(tb testing.TB) *Index {
	tb.Helper()
	x := NewIndex(IndexConfig{Seed: 3})
	do := func(src *Source, events ...*kvevent.Event) {
		for _, e := range events {
			require.NoError(tb, x.Apply(src, e, e.Rank))
		}
	}
	for i := range 70 {
		do(source(fmt.Sprintf("e%02d", i)), stored(0, seq(0, 4*(1+i%5)), []uint64{1, 2, 3, 4, 5}[:1+i%5]...))
	}
	for i := range 10 {
		x.Clear(fmt.Sprintf("e%02d", i*3), kvevent.NoRank, kvevent.Media)
	}
	x.Sweep()
	x.Clear("e01", kvevent.NoRank, kvevent.Media) // and is not swept
	window := stored(0, seq(0, 8), 1, 2)
	window.Group, window.Window = 1, 8
	again := stored(0, seq(0, 4), 1)
	again.Medium, again.Rank = kvevent.CPU, 2
	do(source("e02"), window, again, again, again, stored(99, seq(40, 44), 98))
	pool := source("pool")
	pool.Once = true
	do(pool, stored(0, seq(0, 4), 1), stored(0, seq(60, 64), 61))
	x.Supersede(&Source{Instance: "pool", Epoch: 1}) // it says again what is there, so that it need not be kept
	other := &Source{Instance: "e02", Scope: Scope{Tenant: "t", Model: "\xff", LoRA: "l", Salt: "s", BlockSize: 4}}
	do(other, stored(0, seq(0, 8), 1, 2))
	return x
}

// TestExport: what is imported is what was exported, for queries and for events that come then.
func TestExport(t *testing.T) {
	x, y := worn(t), NewIndex(IndexConfig{Seed: 3})
	apply(t, y, "gone", stored(0, seq(0, 8), 1, 2))
	b := exported(t, x)
	r := bytes.NewReader(append(slices.Clone(b), "and more"...))
	require.NoError(t, y.Import(iotest.HalfReader(r)))
	require.Equal(t, len("and more"), r.Len())
	x.Sweep()
	require.Equal(t, x.blocks.Load(), y.blocks.Load())
	other := Scope{Tenant: "t", Model: "\xff", LoRA: "l", Salt: "s", BlockSize: 4}
	same := func() {
		t.Helper()
		for _, key := range []Scope{testScope, other} {
			want := x.Query(key, seq(0, 24), nil)
			require.NotEmpty(t, want)
			require.Equal(t, want, y.Query(key, seq(0, 24), nil))
			require.Equal(t, x.QueryHashes(key, []uint64{1, 2, 3}), y.QueryHashes(key, []uint64{1, 2, 3}))
		}
	}
	same()
	for range 4 {
		gone := removed(1)
		gone.Medium, gone.Rank = kvevent.CPU, 2
		for _, z := range []*Index{x, y} {
			apply(t, z, "e02", gone, removed(2))
			apply(t, z, "new", stored(0, seq(0, 12), 7, 8, 9))
		}
		same()
	}
}

// TestExportLeavesOutWhatIsSaidAgain: a pool lists what it has, so that it is not kept. What is counted of places is right again.
func TestExportLeavesOutWhatIsSaidAgain(t *testing.T) {
	x, y := worn(t), NewIndex(IndexConfig{Seed: 3})
	x.Sweep()
	before := x.View("")
	pool := source("pool")
	pool.Once, pool.Epoch = true, 2
	apply(t, x, "late", stored(0, seq(0, 4), 1))
	x.Clear("late", kvevent.NoRank, kvevent.Media)
	require.NoError(t, x.Apply(pool, stored(0, seq(0, 4), 1), kvevent.NoRank))
	require.NoError(t, x.Apply(pool, stored(0, seq(60, 64), 61), kvevent.NoRank))
	require.NoError(t, y.Import(bytes.NewReader(exported(t, x))))
	after := y.View("")
	for _, list := range [][]ScopeView{before, after} { // they are not kept
		for i := range list {
			list[i].Orphans = 0
		}
	}
	require.Equal(t, before, after)
}

// TestImportThatFails leaves the index as it was.
func TestImportThatFails(t *testing.T) {
	b := exported(t, worn(t))
	x := NewIndex(IndexConfig{Seed: 3})
	apply(t, x, "a", stored(0, seq(0, 8), 1, 2))
	refuse := func(r io.Reader, what ...any) {
		t.Helper()
		require.ErrorIs(t, x.Import(r), ErrImport, what...)
	}
	for i := range b {
		refuse(bytes.NewReader(b[:i]), "%d bytes of it", i)
		bad := slices.Clone(b)
		bad[i] ^= 0x10
		refuse(bytes.NewReader(bad), "byte %d", i)
	}
	for name, cfg := range map[string]IndexConfig{
		"a seed": {Seed: 4}, "blocks": {Seed: 3, MaxBlocks: 2}, "scopes": {Seed: 3, MaxScopes: 1}, "places": {Seed: 3, MaxPlaces: 5},
	} {
		require.ErrorIs(t, NewIndex(cfg).Import(bytes.NewReader(b)), ErrImport, name)
	}
	broken := errors.New("the disk is gone")
	require.ErrorIs(t, x.Import(io.MultiReader(bytes.NewReader(b[:50]), iotest.ErrReader(broken))), broken)
	require.ErrorIs(t, x.Export(failing{broken}), broken)
	require.Equal(t, map[string]int{"a": 8}, longest(x, seq(0, 8)))
	require.EqualValues(t, 2, x.blocks.Load())
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// TestImportWhileOthersLook: queries, sweeps and exports go on.
func TestImportWhileOthersLook(t *testing.T) {
	x := worn(t)
	b := exported(t, x)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, do := range []func(){
		func() { x.Query(testScope, seq(0, 24), nil) }, x.Sweep, func() { _ = x.Export(io.Discard) },
	} {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					do()
				}
			}
		})
	}
	for range 50 {
		require.NoError(t, x.Import(bytes.NewReader(b)))
	}
	close(stop)
	wg.Wait()
	require.Equal(t, worn(t).Query(testScope, seq(0, 24), nil), x.Query(testScope, seq(0, 24), nil))
	require.Len(t, exported(t, x), len(b))
}

// open takes the checksums out of what was exported, and sealed puts them in again: whoever changes something at random would
// get no further than to these.
func open(b []byte) (bare []byte) {
	bare, b = slices.Clone(b[:len(exportMark)]), b[len(exportMark):]
	for len(b) > 0 {
		n := frameHeader + int(binary.LittleEndian.Uint32(b[1:]))
		bare, b = append(bare, b[:n]...), b[n+frameSum:]
	}
	return bare
}

func sealed(bare []byte) (b []byte) {
	n := min(len(exportMark), len(bare))
	b, bare = slices.Clone(bare[:n]), bare[n:]
	for len(bare) >= frameHeader {
		n := min(uint64(frameHeader)+uint64(binary.LittleEndian.Uint32(bare[1:])), uint64(len(bare)))
		b = append(b, bare[:n]...)
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(bare[:n], castagnoli))
		bare = bare[n:]
	}
	return b
}

// FuzzImport: whatever is read, an index that takes it holds together.
func FuzzImport(f *testing.F) {
	b := exported(f, worn(f))
	require.Equal(f, b, sealed(open(b)))
	f.Add(open(b))
	f.Add(open(exported(f, NewIndex(IndexConfig{Seed: 3}))))
	f.Fuzz(func(t *testing.T, bare []byte) {
		x := NewIndex(IndexConfig{Seed: 3, MaxBlocks: 1000, MaxScopes: 4, MaxPlaces: 100})
		if x.Import(bytes.NewReader(sealed(bare))) != nil {
			require.Empty(t, x.scopes)
			return
		}
		for key := range x.scopes {
			_ = x.Query(key, seq(0, 24), nil)
		}
		apply(t, x, "a", stored(0, seq(0, 8), 1, 2), removed(1))
		x.Clear("e02", kvevent.NoRank, kvevent.Media)
		x.Sweep()
		first := exported(t, x)
		require.NoError(t, x.Import(bytes.NewReader(first)))
		require.Len(t, exported(t, x), len(first))
	})
}

// BenchmarkExport exports and imports a million blocks.
func BenchmarkExport(b *testing.B) {
	x, _, _ := filled(b, 1<<20, 1)
	var buf bytes.Buffer
	b.Run("export", func(b *testing.B) {
		for b.Loop() {
			buf.Reset()
			if err := x.Export(&buf); err != nil {
				b.Fatal(err)
			}
		}
		b.SetBytes(int64(buf.Len()))
	})
	y := NewIndex(IndexConfig{})
	b.Run("import", func(b *testing.B) {
		for b.Loop() {
			if err := y.Import(bytes.NewReader(buf.Bytes())); err != nil {
				b.Fatal(err)
			}
		}
		b.SetBytes(int64(buf.Len()))
	})
}
