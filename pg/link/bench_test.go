package link

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// spin is how long a waiter looks before it sleeps.
const spin = 20 * time.Microsecond

func exchange(b *testing.B, bell *shm.Bell, p *shm.Producer, c *shm.Consumer, n int, first bool) {
	b.Helper()
	if first {
		p.Commit(len(p.Free()[:n]))
	}
	for got := 0; got < n; {
		if !bell.Wait(func() bool { return len(c.Ready()) > 0 || c.Err() != nil }, spin, wait) || c.Err() != nil {
			b.Error("nothing comes", c.Err())
			return
		}
		k := min(len(c.Ready()), n-got)
		c.Consume(k)
		got += k
	}
	if !first {
		p.Commit(len(p.Free()[:n]))
	}
}

// BenchmarkRoundTrip is there and back, between two nodes of this process.
func BenchmarkRoundTrip(b *testing.B) {
	for _, kind := range transportKinds {
		for _, n := range []int{64, 4 << 10} {
			b.Run(fmt.Sprintf("%s/%d", kind.name, n), func(b *testing.B) {
				nodes := nodesOver(b, kind, 2)
				ms := meshOf(b, "g", 1, nodes...)
				done := make(chan struct{})
				stop := make(chan struct{})
				p, c := ms[1].Lane(0)
				go func() {
					defer close(done)
					for {
						select {
						case <-stop:
							return
						default:
						}
						if nodes[1].Bell().Wait(func() bool { return len(c.Ready()) >= n }, spin, 10*time.Millisecond) {
							c.Consume(n)
							p.Commit(len(p.Free()[:n]))
						}
					}
				}()
				q, d := ms[0].Lane(1)
				for b.Loop() {
					exchange(b, nodes[0].Bell(), q, d, n, true)
				}
				close(stop)
				<-done
				closeAll(b, ms...)
			})
		}
	}
}

// BenchmarkThroughput is one way, where the writer copies into the ring and the reader out of it.
func BenchmarkThroughput(b *testing.B) {
	for _, kind := range transportKinds {
		b.Run(kind.name, func(b *testing.B) {
			nodes := nodesOver(b, kind, 2)
			ms := meshOf(b, "g", 1, nodes...)
			const block = 1 << 20
			_, c := ms[1].Lane(0)
			p, _ := ms[0].Lane(1)
			done := make(chan error, 1)
			go func() {
				into := make([]byte, block)
				for {
					if err := receive(nodes[1].Bell(), c, into); err != nil || into[0] == 1 {
						done <- err
						return
					}
				}
			}()
			out := make([]byte, block)
			b.SetBytes(block)
			for b.Loop() {
				require.NoError(b, send(nodes[0].Bell(), p, out))
			}
			out[0] = 1
			require.NoError(b, send(nodes[0].Bell(), p, out))
			require.NoError(b, <-done)
			closeAll(b, ms...)
		})
	}
}

// BenchmarkMesh is how long it takes to build and close a mesh of nodes that are connected.
func BenchmarkMesh(b *testing.B) {
	for _, kind := range transportKinds {
		for _, count := range []int{4, 16} {
			b.Run(fmt.Sprintf("%s/%d", kind.name, count), func(b *testing.B) {
				nodes := nodesOver(b, kind, count)
				epoch := uint64(0)
				for b.Loop() {
					epoch++
					closeAll(b, meshOf(b, "g", epoch, nodes...)...)
				}
			})
		}
	}
}
