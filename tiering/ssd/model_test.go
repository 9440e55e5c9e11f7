package ssd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var modelSeeds = flag.Int("seeds", 3, "how many random histories TestModel goes through")

const (
	cell  = 1024 // bytes of the model's unit: records of a long write end between units, and each appears as a whole
	cells = 2400
)

// model is what may be read: of each cell the versions that it may hold, 0 being none.
type model struct {
	mu      sync.Mutex
	may     [cells][]uint32
	version uint32
}

// content is what a version of a cell looks like. Odd versions compress.
func content(at int, v uint32) []byte {
	b := make([]byte, cell)
	binary.LittleEndian.PutUint32(b, v)
	binary.LittleEndian.PutUint32(b[4:], uint32(at))
	if v%2 == 0 {
		rng := rand.New(rand.NewPCG(uint64(v), uint64(at)))
		for i := 8; i+8 <= cell; i += 8 {
			binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
		}
	}
	return b
}

func (m *model) draw(at, n int) (versions []uint32, b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version++
	v := m.version // one for all, so that long runs compress or not
	for i := range n {
		versions = append(versions, v)
		b = append(b, content(at+i, v)...)
		m.may[at+i] = append(m.may[at+i], v)
	}
	return versions, b
}

// settle says that a change was acknowledged.
func (m *model) settle(at, n int, v uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range n {
		m.may[at+i] = []uint32{v}
	}
}

func (m *model) doubt(at, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range n {
		m.may[at+i] = append(m.may[at+i], 0)
	}
}

// check reads cells and compares.
func (m *model) check(t *testing.T, s *Store, at, n int, damageAllowed bool) {
	t.Helper()
	b := make([]byte, n*cell)
	err := s.Read(context.Background(), uint64(at*cell), b)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		if errors.Is(err, ErrFailed) {
			return
		}
		if damageAllowed {
			require.True(t, errors.Is(err, ErrNotFound) || errors.Is(err, ErrDamaged), "%v", err)
			return
		}
		require.ErrorIs(t, err, ErrNotFound)
		for i := range n {
			if may := m.may[at+i]; len(may) == 0 || slices.Contains(may, 0) {
				return
			}
		}
		require.Fail(t, "acknowledged bytes are gone", "cells %d to %d: %v", at, at+n, m.may[at:at+n])
	}
	for i := range n {
		got := b[i*cell:][:cell]
		v := binary.LittleEndian.Uint32(got)
		require.Contains(t, m.may[at+i], v, "cell %d", at+i)
		require.NotZero(t, v, "cell %d is not there", at+i)
		require.True(t, bytes.Equal(got, content(at+i, v)), "cell %d of version %d is not what was written", at+i, v)
	}
}

func (m *model) checkAll(t *testing.T, s *Store, damageAllowed bool) {
	t.Helper()
	for at := range cells {
		m.check(t, s, at, 1, damageAllowed)
	}
}

// observe settles what is doubtful after a loss of power to what is there.
func (m *model) observe(t *testing.T, s *Store) {
	t.Helper()
	m.checkDoubtful(t, s)
	b := make([]byte, cell)
	for at := range cells {
		m.may[at] = []uint32{0}
		if s.Read(context.Background(), uint64(at*cell), b) == nil {
			m.may[at] = []uint32{binary.LittleEndian.Uint32(b)}
		}
	}
}

// checkDoubtful is checkAll, but what was under way may also be gone or damaged.
func (m *model) checkDoubtful(t *testing.T, s *Store) {
	t.Helper()
	for at := range cells {
		m.check(t, s, at, 1, len(m.may[at]) > 1)
	}
}

// step makes one change or read.
func (m *model) step(t *testing.T, s *Store, rng *rand.Rand, at, span int) {
	t.Helper()
	ctx := context.Background()
	n := 1 + rng.IntN(min(span, 24))
	at += rng.IntN(span - n + 1)
	switch rng.IntN(8) {
	case 0, 1:
		m.check(t, s, at, n, s.failure() != nil)
	case 2:
		m.doubt(at, n)
		err := s.Discard(ctx, Extent{uint64(at * cell), uint64(n * cell)})
		if err == nil {
			m.settle(at, n, 0)
		} else {
			require.ErrorIs(t, err, ErrFailed)
		}
	default:
		v, b := m.draw(at, n)
		switch err := s.Write(ctx, uint64(at*cell), b); {
		case err == nil:
			m.settle(at, n, v[0])
		case errors.Is(err, ErrFailed):
			m.doubt(at, n)
		default:
			require.NoError(t, err)
		}
	}
}

func modelOptions(f *memFS) Options {
	return Options{
		Create: true, Size: cell * cells, SegmentBytes: minSegmentBytes, Capacity: 48 * minSegmentBytes,
		Generation: 7, fs: f, clock: hasty{}, CompactRate: 1 << 40,
	}
}

// TestModel goes through random histories of writes, overlapping writes, discards, reads, restarts and losses of
// power, with several writers at once, compaction under way, and compares everything with a plain model.
func TestModel(t *testing.T) {
	for seed := range *modelSeeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(uint64(seed), 1))
			m, disk := &model{}, newMemFS()
			var compactions int64
			for range 12 {
				o := modelOptions(disk)
				o.Compression = Compression(rng.IntN(3))
				s, err := Open("", o)
				require.NoError(t, err)
				require.EqualValues(t, 7, s.Generation())
				m.observe(t, s)
				power := rng.IntN(3) > 0
				var next *memFS
				if power {
					left := rng.IntN(400)
					disk.mu.Lock()
					disk.failSync = func(string) error {
						if left--; left < 0 {
							return errors.New("the power is gone")
						}
						return nil
					}
					disk.mu.Unlock()
				}
				var writers sync.WaitGroup
				const parts = 4
				for part := range parts {
					mine := rand.New(rand.NewPCG(rng.Uint64(), uint64(part)))
					writers.Go(func() {
						for range 150 {
							if s.failure() != nil {
								return
							}
							m.step(t, s, mine, part*cells/parts, cells/parts)
						}
					})
				}
				writers.Wait()
				compactions += s.Stats().Compactions
				if s.failure() == nil && rng.IntN(2) == 0 {
					m.checkAll(t, s, false)
				}
				if s.failure() != nil || power {
					next = disk.after(rng) // before Close, which would end the log
				}
				require.NoError(t, s.Close())
				if next == nil {
					next = disk.clone()
				}
				disk = next
			}
			require.NotZero(t, compactions)
		})
	}
}
