package shm

import (
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// counter is a bell that nobody sleeps on.
type counter struct{ n atomic.Int64 }

func (c *counter) Ring() { c.n.Add(1) }

// newRing is a ring whose ends have mappings of their own, as two processes have.
func newRing(tb testing.TB, bytes int) (*Producer, *Consumer, *counter, *counter) {
	tb.Helper()
	pb, cb := &counter{}, &counter{}
	p, f, err := CreateRing(bytes, cb)
	require.NoError(tb, err)
	c, err := OpenRing(f, pb)
	require.NoError(tb, err)
	require.NoError(tb, f.Close())
	tb.Cleanup(func() {
		require.NoError(tb, p.Close())
		require.NoError(tb, c.Close())
	})
	return p, c, pb, cb
}

// pass sends n random bytes through a ring in pieces of all sizes, and requires that they arrive.
func pass(t *testing.T, p *Producer, c *Consumer, n int) {
	t.Helper()
	var wg sync.WaitGroup
	sum := crc32.NewIEEE()
	wg.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		src := rand.NewChaCha8([32]byte{})
		for left := n; left > 0; {
			free := p.Free()
			k := min(len(free), left, 1+r.IntN(p.Size()))
			_, _ = src.Read(free[:k])
			_, _ = sum.Write(free[:k])
			p.Commit(k)
			left -= k
			if k == 0 {
				time.Sleep(time.Microsecond)
			}
		}
	})
	got := crc32.NewIEEE()
	r := rand.New(rand.NewPCG(3, 4))
	for left := n; left > 0; {
		ready := c.Ready()
		k := min(len(ready), 1+r.IntN(c.Size()))
		_, _ = got.Write(ready[:k])
		c.Consume(k)
		left -= k
		if k == 0 {
			time.Sleep(time.Microsecond)
		}
	}
	wg.Wait()
	require.Equal(t, sum.Sum32(), got.Sum32())
	require.Empty(t, c.Ready())
	require.NoError(t, c.Err())
	require.GreaterOrEqual(t, len(p.Free()), p.Size()/2)
}

func TestAStreamArrives(t *testing.T) {
	for _, size := range []int{1, 4096, 5000, 1 << 16, 1 << 20} {
		p, c, _, _ := newRing(t, size)
		require.GreaterOrEqual(t, p.Size(), size)
		pass(t, p, c, 4<<20)
	}
	p, c, err := NewRing(4096, &counter{}, &counter{})
	require.NoError(t, err)
	pass(t, p, c, 1<<20)
	require.NoError(t, p.Close())
	require.ErrorIs(t, c.Err(), ErrEnded)
	require.NoError(t, c.Close())
}

// Both ends sleep whenever they have to wait, until they are woken.
func TestBothEndsAreWoken(t *testing.T) {
	pb, producer := twins(t)
	cb, consumer := twins(t)
	pb.longest, cb.longest = time.Hour, time.Hour
	p, f, err := CreateRing(4096, consumer)
	require.NoError(t, err)
	c, err := OpenRing(f, producer)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	const total = 8 << 20
	var wg sync.WaitGroup
	wg.Go(func() {
		for left := total; left > 0; {
			if !pb.Wait(func() bool { return len(p.Free()) >= 2048 }, 0, 10*time.Second) {
				t.Error("the producer was not woken")
				return
			}
			n := min(left, len(p.Free()))
			p.Commit(n)
			left -= n
		}
	})
	for left := total; left > 0; {
		require.True(t, cb.Wait(func() bool { return len(c.Ready()) > 0 }, 0, 10*time.Second), "the consumer was not woken")
		n := min(len(c.Ready()), 700)
		c.Consume(n)
		left -= n
	}
	wg.Wait()
	require.NoError(t, p.Close())
	require.NoError(t, c.Close())
}

func TestCountersMayWrap(t *testing.T) {
	p, c, _, _ := newRing(t, 4096)
	const start = ^uint64(0) - 4095 // a multiple of the size: where both are empty
	p.head, p.tail, c.tail = start, start, start
	p.r.word(ringHead).Store(start)
	p.r.word(ringTail).Store(start)
	pass(t, p, c, 1<<20)
}

// Free and ready memory is one slice, wherever the ring's end is.
func TestMemoryIsContiguous(t *testing.T) {
	p, c, _, _ := newRing(t, 4096)
	p.Commit(4000)
	c.Consume(4000)
	free := p.Free()
	require.Len(t, free, 4096)
	for i := range free {
		free[i] = byte(i)
	}
	p.Commit(4096)
	require.Empty(t, p.Free())
	ready := c.Ready()
	require.Len(t, ready, 4096)
	for i := range ready {
		require.Equal(t, byte(i), ready[i])
	}
}

func TestBellsRingWhenThereIsSomethingToDo(t *testing.T) {
	p, c, pb, cb := newRing(t, 4096)
	p.Commit(10)
	require.Equal(t, int64(1), cb.n.Load(), "something to read")
	c.Consume(5)
	require.Zero(t, pb.n.Load(), "nobody waits for room")
	p.Free()
	p.Commit(4000)
	p.Free()
	c.Consume(1)
	require.Equal(t, int64(1), pb.n.Load(), "less than half was free")
	c.Consume(4004)
	p.Free()
	p.Commit(10)
	rung := pb.n.Load()
	c.Consume(10)
	require.Equal(t, rung, pb.n.Load(), "it has room again")
}

func TestAnEndThatIsGivenUp(t *testing.T) {
	dead := errors.New("dead")
	t.Run("producer", func(t *testing.T) {
		p, c, _, cb := newRing(t, 4096)
		p.Commit(100)
		rung := cb.n.Load()
		p.Fail(dead)
		p.Fail(errors.New("later"))
		require.Greater(t, cb.n.Load(), rung)
		require.ErrorIs(t, p.Err(), dead)
		require.Empty(t, p.Free())
		require.NoError(t, c.Err(), "there is something to read")
		require.ErrorIs(t, c.Ended(), ErrEnded)
		c.Consume(len(c.Ready()))
		require.ErrorIs(t, c.Err(), ErrEnded)
	})
	t.Run("consumer", func(t *testing.T) {
		p, c, pb, _ := newRing(t, 4096)
		p.Commit(100)
		c.Fail(dead)
		require.Positive(t, pb.n.Load())
		require.ErrorIs(t, p.Err(), ErrEnded)
		require.NoError(t, c.Err(), "what was there can be read")
		require.Len(t, c.Ready(), 100)
		c.Consume(100)
		require.ErrorIs(t, c.Err(), dead)
	})
	t.Run("both in one process", func(t *testing.T) {
		p, c, err := NewRing(4096, &counter{}, &counter{})
		require.NoError(t, err)
		p.Fail(dead)
		require.ErrorIs(t, c.Err(), dead)
		require.NoError(t, c.Close())
		require.NoError(t, p.Close())
		require.NoError(t, p.Close())
		p.Fail(dead)
		require.Empty(t, p.Free())
		require.Empty(t, c.Ready())
	})
}

// A peer that goes mad costs an error.
func TestCountersThatMakeNoSense(t *testing.T) {
	for name, n := range map[string]uint64{"too many": 4097, "far too many": 1 << 63, "fewer than before": ^uint64(0)} {
		t.Run(name, func(t *testing.T) {
			p, c, _, _ := newRing(t, 4096)
			p.r.word(ringHead).Store(n)
			require.Empty(t, c.Ready())
			require.ErrorIs(t, c.Err(), ErrCorrupt)
			require.ErrorIs(t, p.Err(), ErrEnded)
		})
	}
	for name, n := range map[string]uint64{"unwritten": 4097, "far too many": 1 << 63, "negative": ^uint64(0)} {
		t.Run("read "+name, func(t *testing.T) {
			p, c, _, _ := newRing(t, 4096)
			p.Commit(4096)
			c.r.word(ringTail).Store(n)
			require.Nil(t, p.Free())
			require.ErrorIs(t, p.Err(), ErrCorrupt)
		})
	}
}

func TestFilesThatAreNoRings(t *testing.T) {
	sized := func(n int) *os.File {
		f, err := create("test", n)
		require.NoError(t, err)
		return f
	}
	unsealed, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	loose := os.NewFile(uintptr(unsealed), "loose")
	require.NoError(t, loose.Truncate(8192))
	ordinary, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, w.Close())
	for name, f := range map[string]*os.File{
		"not sealed": loose, "ordinary": ordinary, "pipe": r, "empty": sized(0), "a header": sized(os.Getpagesize()),
		"no power of two": sized(os.Getpagesize() * 4),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := OpenRing(f, &counter{})
			require.ErrorIs(t, err, ErrFile)
			if name != "a header" {
				_, err = OpenBell(f)
				require.ErrorIs(t, err, ErrFile)
			}
			require.NoError(t, f.Close())
		})
	}
	for _, n := range []int{0, -1, maxRing + 1} {
		_, _, err := CreateRing(n, &counter{})
		require.ErrorIs(t, err, ErrConfig)
	}
}

func TestAStreamThroughAnotherProcess(t *testing.T) {
	bell, p, c := echo(t, 1<<16, 20*time.Microsecond)
	const total = 8 << 20
	r := rand.New(rand.NewPCG(5, 6))
	for sent, got := 0, 0; got < total; {
		require.True(t, bell.Wait(func() bool {
			free, ready := p.Free(), c.Ready()
			n := min(len(free), 1+r.IntN(8192), total-sent)
			for i := range n {
				free[i] = numbered(sent + i)
			}
			p.Commit(n)
			sent += n
			for i := range ready {
				if ready[i] != numbered(got+i) {
					t.Fatalf("byte %d is %d", got+i, ready[i])
				}
			}
			c.Consume(len(ready))
			got += len(ready)
			return n+len(ready) > 0
		}, 20*time.Microsecond, 10*time.Second))
	}
}

// What a process has published before it was killed can be read, and is whole.
func TestAWriterThatIsKilled(t *testing.T) {
	for round := range 5 {
		p, f, err := CreateRing(floodRing, &counter{})
		require.NoError(t, err)
		c, err := OpenRing(f, &counter{})
		require.NoError(t, err)
		cmd := startChild(t, "flood", f)
		require.NoError(t, f.Close())
		at := 0
		read := func() {
			ready := c.Ready()
			for i := range ready {
				if ready[i] != numbered(at+i) {
					t.Fatalf("byte %d is %d", at+i, ready[i])
				}
			}
			c.Consume(len(ready))
			at += len(ready)
		}
		for at < 1<<20+round*54321 {
			read()
		}
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
		dead := errors.New("dead")
		c.Fail(dead)
		for c.Err() == nil {
			read()
		}
		require.ErrorIs(t, c.Err(), dead)
		require.Empty(t, c.Ready())
		require.NoError(t, c.Close())
		require.NoError(t, p.Close())
	}
}

func TestAReaderThatIsKilled(t *testing.T) {
	own, p, c := echoKilled(t)
	require.False(t, own.Wait(func() bool { return p.Free() == nil }, 0, 20*time.Millisecond))
	for n := len(p.Free()); n > 0; n = len(p.Free()) {
		p.Commit(n)
	}
	require.NoError(t, p.Err(), "nobody has said so yet")
	p.Fail(os.ErrDeadlineExceeded)
	require.ErrorIs(t, p.Err(), os.ErrDeadlineExceeded)
	c.Fail(os.ErrDeadlineExceeded)
	require.ErrorIs(t, c.Err(), os.ErrDeadlineExceeded)
}

// echoKilled is an echo whose process is dead already.
func echoKilled(t *testing.T) (*Bell, *Producer, *Consumer) {
	t.Helper()
	own, theirs := twins(t)
	p, there, err := CreateRing(1<<16, theirs)
	require.NoError(t, err)
	back, bf, err := CreateRing(1<<16, own)
	require.NoError(t, err)
	c, err := OpenRing(bf, theirs)
	require.NoError(t, err)
	cmd := startChild(t, "echo 0", own.File(), own.File(), there, bf)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	t.Cleanup(func() {
		for _, x := range []interface{ Close() error }{p, c, back, there, bf} {
			require.NoError(t, x.Close())
		}
	})
	return own, p, c
}
