package shm

import (
	"crypto/subtle"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// p50 reports the median and the least of the rounds' times: a busy machine's mean tells little.
func p50(b *testing.B, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[0].Nanoseconds()), "min-ns")
}

// BenchmarkRoundTrip is 8 bytes to another process and back.
func BenchmarkRoundTrip(b *testing.B) {
	for _, spin := range []time.Duration{0, 50 * time.Microsecond} {
		b.Run(fmt.Sprintf("spin=%v", spin), func(b *testing.B) {
			bell, p, c := echo(b, 1<<16, spin)
			var times []time.Duration
			ready := func() bool { return len(c.Ready()) >= 8 }
			for b.Loop() {
				start := time.Now()
				p.Free()[0] = 1
				p.Commit(8)
				for !bell.Wait(ready, spin, time.Second) {
					continue
				}
				c.Consume(8)
				times = append(times, time.Since(start))
			}
			p50(b, times)
		})
	}
}

// BenchmarkRing is a stream of messages of one size between two threads.
func BenchmarkRing(b *testing.B) {
	for _, size := range []int{64, 1 << 10, 16 << 10, 64 << 10, 256 << 10} {
		b.Run(fmt.Sprintf("%d", size), func(b *testing.B) {
			pb, producer := twins(b)
			cb, consumer := twins(b)
			p, f, err := CreateRing(1<<20, consumer)
			require.NoError(b, err)
			c, err := OpenRing(f, producer)
			require.NoError(b, err)
			src, dst := make([]byte, size), make([]byte, size)
			b.SetBytes(int64(size))
			var wg sync.WaitGroup
			wg.Go(func() {
				for p.Err() == nil {
					pb.Wait(func() bool { return len(p.Free()) >= size || p.Err() != nil }, 50*time.Microsecond, time.Second)
					if free := p.Free(); len(free) >= size {
						p.Commit(copy(free, src))
					}
				}
			})
			for b.Loop() {
				for !cb.Wait(func() bool { return len(c.Ready()) >= size }, 50*time.Microsecond, time.Second) {
					continue
				}
				copy(dst, c.Ready())
				c.Consume(size)
			}
			c.Fail(nil)
			wg.Wait()
			for _, x := range []io.Closer{p, c, f} {
				require.NoError(b, x.Close())
			}
		})
	}
}

// sum is what an all-reduce of two ranks does with a room: each publishes the half of its input that the other reduces, reduces its own half
// as that of the other arrives, publishes the results, and copies those of the other. Exclusive or stands for the reduction.
type sum struct {
	s                     *seat
	src, dst              []byte
	sent, reduced, copied int // bytes of a half
}

func (x *sum) poll() (moved bool) {
	r := x.s.room
	me := r.Me()
	half := len(x.src) / 2
	mine, theirs := me*half, (1-me)*half
	if x.sent < half {
		if p := r.TryReserve(0); p != nil {
			n := copy(p, x.src[theirs+x.sent:theirs+half])
			r.Publish(0, Header{}, n)
			x.sent += n
			moved = true
		}
	}
	if _, p, ok := r.TryRead(0, 1-me); ok && x.reduced < half {
		if out := r.TryReserve(1); out != nil {
			n := subtle.XORBytes(out, x.src[mine+x.reduced:], p)
			copy(x.dst[mine+x.reduced:], out[:n])
			r.Publish(1, Header{}, n)
			r.Release(0, 1-me)
			x.reduced += n
			moved = true
		}
	}
	if _, p, ok := r.TryRead(1, 1-me); ok && x.copied < half {
		x.copied += copy(x.dst[theirs+x.copied:], p)
		r.Release(1, 1-me)
		moved = true
	}
	return moved
}

func (x *sum) run(limit time.Duration) bool {
	x.sent, x.reduced, x.copied = 0, 0, 0
	half := len(x.src) / 2
	return x.s.bell.Wait(func() bool {
		for x.poll() {
			continue
		}
		return x.sent == half && x.reduced == half && x.copied == half
	}, 50*time.Microsecond, limit)
}

// sumChild is the other rank of BenchmarkSum.
func sumChild(args []string, _ func(i int) *os.File) error {
	var n [5]int
	for i := range n {
		n[i], _ = strconv.Atoi(args[i])
	}
	s, in, err := joinParent(Layout{Tracks: 2, Slots: n[2], SlotBytes: n[3]}, n[0], n[1])
	if err != nil {
		return err
	}
	go func() {
		_, _ = in.ReadByte() // the parent has closed it
		os.Exit(0)
	}()
	x := &sum{s: s, src: make([]byte, n[4]), dst: make([]byte, n[4])}
	for {
		x.run(time.Hour)
	}
}

// BenchmarkSum is an all-reduce of two processes, by the layout of their room.
func BenchmarkSum(b *testing.B) {
	for _, size := range []int{64, 64 << 10, 1 << 20, 16 << 20} {
		for _, l := range []Layout{DefaultLayout, {2, 4, 64 << 10}, {2, 8, 64 << 10}, {2, 8, 32 << 10}, {2, 4, 256 << 10}, {2, 4, 512 << 10}} {
			b.Run(fmt.Sprintf("%d/%dx%dKiB", size, l.Slots, l.SlotBytes>>10), func(b *testing.B) {
				s, cmds, ins := seats(b, l, 2, fmt.Sprintf("sum %%d %%d %d %d %d", l.Slots, l.SlotBytes, size))
				x := &sum{s: s, src: make([]byte, size), dst: make([]byte, size)}
				var times []time.Duration
				b.SetBytes(int64(size))
				for b.Loop() {
					start := time.Now()
					require.True(b, x.run(10*time.Second))
					times = append(times, time.Since(start))
				}
				p50(b, times)
				require.NoError(b, ins[1].Close())
				require.NoError(b, cmds[1].Wait())
			})
		}
	}
}
