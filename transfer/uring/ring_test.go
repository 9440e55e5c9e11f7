package uring

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eachRing runs a test without a ring, and with one, where there is one.
func eachRing(t *testing.T, run func(t *testing.T, r *Ring)) {
	t.Helper()
	t.Run("none", func(t *testing.T) { run(t, nil) })
	t.Run("one", func(t *testing.T) {
		r, err := New()
		if err != nil {
			t.Skip(err)
		}
		run(t, r)
		require.NoError(t, r.Close())
	})
}

func open(t *testing.T, size int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	require.NoError(t, f.Truncate(size))
	return f
}

// More goroutines than a ring has room for write and read, each its own part.
func TestConcurrent(t *testing.T) {
	const workers, size, rounds = 2 * entries, 1 << 10, 5
	eachRing(t, func(t *testing.T, r *Ring) {
		t.Helper()
		f := open(t, workers*size)
		var wg sync.WaitGroup
		bad := make(chan error, 2*workers*rounds)
		for w := range int64(workers) {
			wg.Go(func() {
				b, got := make([]byte, size), make([]byte, size)
				for range rounds {
					for i := range b {
						b[i] = byte(rand.Uint32())
					}
					_, err := r.WriteAt(f, b, w*size)
					if err == nil {
						_, err = r.ReadAt(f, got, w*size)
					}
					if err == nil && !bytes.Equal(b, got) {
						err = io.ErrUnexpectedEOF
					}
					if err != nil {
						bad <- err
					}
				}
			})
		}
		wg.Wait()
		require.Empty(t, bad)
	})
}

// What fails, and what is short, is as without a ring.
func TestErrors(t *testing.T) {
	eachRing(t, func(t *testing.T, r *Ring) {
		t.Helper()
		f := open(t, 100)
		n, err := r.ReadAt(f, make([]byte, 60), 70)
		require.Equal(t, 30, n)
		require.ErrorIs(t, err, io.EOF)
		_, err = r.ReadAt(f, make([]byte, 1), -1)
		require.Error(t, err)
		n, err = r.ReadAt(f, nil, 0)
		require.Zero(t, n)
		require.NoError(t, err)
		readOnly, err := os.Open(f.Name())
		require.NoError(t, err)
		_, err = r.WriteAt(readOnly, make([]byte, 1), 0)
		var path *os.PathError
		require.ErrorAs(t, err, &path)
		require.NoError(t, readOnly.Close())
		_, err = r.ReadAt(readOnly, make([]byte, 1), 0)
		require.ErrorIs(t, err, os.ErrClosed)
	})
}

// A call allocates nothing.
func TestAllocations(t *testing.T) {
	eachRing(t, func(t *testing.T, r *Ring) {
		t.Helper()
		f := open(t, 100)
		b := make([]byte, 100)
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if _, err := r.ReadAt(f, b, 0); err != nil {
				t.Error(err)
			}
		}))
	})
}
