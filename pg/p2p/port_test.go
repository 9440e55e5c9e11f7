package p2p

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// world is ports that are connected to each other by rings in this process.
type world struct {
	tb    testing.TB
	ports []*Port
	ends  map[[2]int]*shm.Producer // [from, to]
	in    map[[2]int]*shm.Consumer // [to, from]
}

func newWorld(tb testing.TB, n, ringBytes int) *world {
	tb.Helper()
	w := &world{tb: tb, ends: map[[2]int]*shm.Producer{}, in: map[[2]int]*shm.Consumer{}}
	var ranks []int
	for i := range n {
		ranks = append(ranks, i)
	}
	for me := range n {
		w.ports = append(w.ports, NewPort(Config{Me: me, Ranks: func() []int { return ranks }, Lane: func(rank int) (*shm.Producer, *shm.Consumer, error) {
			w.connect(me, rank, ringBytes)
			return w.ends[[2]int{me, rank}], w.in[[2]int{me, rank}], nil
		}}))
	}
	tb.Cleanup(func() {
		for _, p := range w.ports {
			p.Close()
		}
		for _, p := range w.ends { // those that nobody has asked for
			_ = p.Close()
		}
		for _, c := range w.in {
			_ = c.Close()
		}
	})
	return w
}

// connect makes the rings between two ranks if they are not there.
func (w *world) connect(a, b, ringBytes int) {
	for _, k := range [][2]int{{a, b}, {b, a}} {
		if w.ends[k] == nil {
			p, c, err := shm.NewRing(ringBytes, silent{}, silent{})
			require.NoError(w.tb, err)
			w.ends[k], w.in[[2]int{k[1], k[0]}] = p, c
		}
	}
}

// settle polls all ports until nothing moves.
func (w *world) settle() {
	for moved := true; moved; {
		moved = false
		for _, p := range w.ports {
			if p.Poll() {
				moved = true
			}
		}
	}
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestMessagesOfAllSizesArrive(t *testing.T) {
	for _, before := range []bool{false, true} {
		w := newWorld(t, 2, 4096)
		for i, n := range []int{0, 1, 31, 32, 33, 4096, eagerBytes - 1, eagerBytes, eagerBytes + 1, partBytes, partBytes + 1, 3 << 20} {
			want, got := random(n, uint64(i)), make([]byte, n)
			var r, s *Op
			if before {
				r = w.ports[1].Recv(0, 5, got)
				s = w.ports[0].Send(1, 5, want)
			} else {
				s = w.ports[0].Send(1, 5, want)
				w.settle()
				r = w.ports[1].Recv(0, 5, got)
			}
			w.settle()
			require.True(t, s.Done() && r.Done(), "%d bytes", n)
			require.NoError(t, s.Err())
			require.NoError(t, r.Err())
			require.Equal(t, want, got)
			require.Equal(t, []any{0, uint64(5), n}, []any{r.From(), r.Tag(), r.Len()})
		}
	}
}
