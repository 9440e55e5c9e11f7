package p2p

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
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
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
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

// keptBytes is what a port keeps of messages that nobody has received.
func keptBytes(p *Port) (n int) {
	for _, l := range p.all {
		for _, m := range l.kept {
			n += len(m.buf)
		}
	}
	return n
}

func done(t *testing.T, ops ...*Op) {
	t.Helper()
	for i, o := range ops {
		require.True(t, o.Done(), "operation %d", i)
		require.NoError(t, o.Err(), "operation %d", i)
	}
}

func TestBothSendMuchBeforeTheyReceive(t *testing.T) {
	for name, size := range map[string]int{"small": 64, "eager": eagerBytes, "long": eagerBytes * 4} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 2, 1<<16)
			const each = 100
			var sends, receives []*Op
			var bufs [][]byte
			for i := range each {
				for me, p := range w.ports {
					sends = append(sends, p.Send(1-me, 1, random(size, uint64(2*i+me))))
				}
				w.settle()
			}
			for _, p := range w.ports {
				require.LessOrEqual(t, keptBytes(p), creditBytes)
			}
			for range each {
				for me, p := range w.ports {
					bufs = append(bufs, make([]byte, size))
					receives = append(receives, p.Recv(1-me, 1, bufs[len(bufs)-1]))
				}
			}
			w.settle()
			done(t, append(sends, receives...)...)
			for i := range bufs {
				require.Equal(t, random(size, uint64(i^1)), bufs[i], "order") // the other one's
			}
		})
	}
}

func TestWhatNobodyReceivesHoldsNothingUp(t *testing.T) {
	w := newWorld(t, 2, 1<<16)
	var flood []*Op
	for range 5000 {
		flood = append(flood, w.ports[0].Send(1, 1, make([]byte, 1000)))
	}
	want, got := random(1<<20, 3), make([]byte, 1<<20)
	w.ports[0].Send(1, 2, want)
	r := w.ports[1].Recv(0, 2, got)
	w.settle()
	done(t, r)
	require.Equal(t, want, got)
	require.LessOrEqual(t, keptBytes(w.ports[1]), creditBytes)
	for range 5000 {
		w.ports[1].Recv(0, 1, make([]byte, 1000))
	}
	w.settle()
	done(t, flood...)
	l := w.ports[0].lanes[1]
	require.Greater(t, l.out.credit, creditBytes-2*creditBatch, "all room comes back, but for a batch")
}

func TestAMessageLongerThanTheBuffer(t *testing.T) {
	for _, size := range []int{1, 1000, eagerBytes, eagerBytes + 1, 1 << 20} {
		for _, room := range []int{0, 1, size / 2, size - 1} {
			for _, before := range []bool{false, true} {
				w := newWorld(t, 2, 1<<14)
				want, got := random(size, 1), make([]byte, room)
				var r *Op
				if before {
					r = w.ports[1].Recv(0, 1, got)
				}
				s := w.ports[0].Send(1, 1, want)
				w.settle()
				if !before {
					r = w.ports[1].Recv(0, 1, got)
				}
				next := w.ports[0].Send(1, 1, want)
				w.settle()
				if room == size {
					continue
				}
				done(t, s)
				require.True(t, r.Done())
				var truncated *TruncateError
				require.ErrorAs(t, r.Err(), &truncated)
				require.Equal(t, TruncateError{From: 0, Tag: 1, Bytes: size, Buffer: room}, *truncated)
				require.Equal(t, want[:room], got)
				whole := make([]byte, size)
				r = w.ports[1].Recv(0, 1, whole)
				w.settle()
				done(t, r, next)
				require.Equal(t, want, whole, "the stream goes on")
			}
		}
	}
}

func TestReceivesFromAnybodyWithAnyTag(t *testing.T) {
	w := newWorld(t, 3, 1<<14)
	send := func(from int, tag uint64) {
		w.ports[from].Send(0, tag, []byte{byte(from), byte(tag)})
		w.settle()
	}
	recv := func(from int, tag uint64) *Op { return w.ports[0].Recv(from, tag, make([]byte, 2)) }
	is := func(o *Op, from int, tag uint64) {
		t.Helper()
		w.settle()
		done(t, o)
		require.Equal(t, []any{from, tag, []byte{byte(from), byte(tag)}}, []any{o.From(), o.Tag(), o.buf})
	}
	wait := recv(Any, 9) // opens the lanes
	send(2, 5)
	send(1, 6)
	send(1, 5)
	is(recv(Any, 6), 1, 6)
	is(recv(Any, AnyTag), 2, 5)
	is(recv(1, AnyTag), 1, 5)
	first, second, third := recv(Any, AnyTag), recv(1, 7), recv(Any, 7)
	send(1, 7)
	is(first, 1, 7)
	send(1, 7)
	is(second, 1, 7)
	require.False(t, third.Done())
	send(2, 7)
	is(third, 2, 7)
	send(1, 9)
	is(wait, 1, 9)
}

func TestAMessageToOneself(t *testing.T) {
	w := newWorld(t, 1, 4096)
	for _, n := range []int{0, 8, 1 << 20} {
		want, got := random(n, 1), make([]byte, n)
		s := w.ports[0].Send(0, 1, want)
		r := w.ports[0].Recv(Any, 1, got)
		w.settle()
		done(t, s, r)
		require.Equal(t, want, got)
	}
}

func TestCallsThatMakeNoSense(t *testing.T) {
	w := newWorld(t, 2, 4096)
	p := w.ports[0]
	for name, o := range map[string]*Op{
		"to any": p.Send(Any, 1, nil), "any tag": p.Send(1, AnyTag, nil), "to nobody": p.Send(-5, 1, nil), "from nobody": p.Recv(-5, 1, nil),
	} {
		require.True(t, o.Done(), name)
		require.ErrorIs(t, o.Err(), errTarget, name)
	}
	r := p.Recv(1, 1, nil)
	p.Close()
	require.ErrorIs(t, r.Err(), ErrClosed)
	require.ErrorIs(t, p.Send(1, 1, nil).Err(), ErrClosed)
	require.ErrorIs(t, p.Recv(1, 1, nil).Err(), ErrClosed)
	p.Reset(1)
	p.Close()
	require.False(t, p.Poll())
}

var errDead = errors.New("dead")

// isDown requires that an operation has ended since a rank is down.
func isDown(t *testing.T, o *Op, rank int) {
	t.Helper()
	require.True(t, o.Done())
	var down *DownError
	require.ErrorAs(t, o.Err(), &down)
	require.Equal(t, rank, down.Rank)
}

func TestARankThatDies(t *testing.T) {
	w := newWorld(t, 3, 1<<14)
	p, dead := w.ports[0], w.ports[1]
	open := p.Recv(Any, 99, nil)
	w.settle()
	whole := dead.Send(0, 1, []byte("whole"))
	long := dead.Send(0, 2, make([]byte, 1<<20)) // asks
	later := dead.Send(0, 2, []byte("later"))
	w.settle()
	inRing := dead.Send(0, 3, []byte("in the ring"))
	done(t, whole, later, inRing)
	require.False(t, long.Done())
	posted, send := p.Recv(1, 9, nil), p.Send(1, 1, make([]byte, 1<<20))

	p.Fail(1, errDead)
	isDown(t, posted, 1)
	isDown(t, send, 1)
	require.ErrorIs(t, send.Err(), errDead)
	require.False(t, open.Done(), "rank 2 may still send")
	buf := make([]byte, 20)
	for tag, want := range map[uint64]string{1: "whole", 3: "in the ring"} {
		r := p.Recv(1, tag, buf)
		done(t, r)
		require.Equal(t, want, string(buf[:r.Len()]))
	}
	require.False(t, p.Recv(Any, 2, buf).Done(), "what was lost is not skipped, and fails nobody who can do without")
	isDown(t, p.Recv(1, 2, buf), 1)
	done(t, p.Recv(1, 2, buf))
	require.Equal(t, "later", string(buf[:5]))
	isDown(t, p.Recv(1, AnyTag, buf), 1)
	isDown(t, p.Send(1, 1, nil), 1)

	s, r := w.ports[2].Send(0, 5, []byte("x")), p.Recv(2, 5, buf)
	w.settle()
	done(t, s, r)
	p.Fail(2, errDead)
	isDown(t, open, Any)
	isDown(t, p.Recv(Any, 1, nil), Any)
	require.ErrorIs(t, open.Err(), errDead)
}

func TestARankThatDiesInTheMiddleOfAMessage(t *testing.T) {
	for name, size := range map[string]int{"eager": eagerBytes, "long": 1 << 20} {
		for _, posted := range []bool{false, true} {
			w := newWorld(t, 2, 4096)
			p := w.ports[0]
			buf := make([]byte, size)
			p.Recv(1, 99, nil)
			p.Poll()
			var r *Op
			if posted {
				r = p.Recv(1, 1, buf)
			}
			w.ports[1].Send(0, 1, make([]byte, size))
			for range 3 {
				p.Poll()
				w.ports[1].Poll()
			}
			if !posted && name == "eager" { // taken up while it arrives
				other := p.Recv(Any, 1, buf)
				p.Poll()
				p.Fail(1, errDead)
				isDown(t, other, 1)
				continue
			}
			w.ends[[2]int{1, 0}].Fail(nil) // what the peer's process leaves
			w.settle()
			if !posted {
				r = p.Recv(1, 1, buf)
			}
			isDown(t, r, 1)
			require.ErrorIs(t, r.Err(), shm.ErrEnded)
		}
	}
}

func TestANewProcessInTheOldPlace(t *testing.T) {
	w := newWorld(t, 2, 1<<14)
	p := w.ports[0]
	w.ports[1].Send(0, 1, []byte("old"))
	waits := p.Recv(1, 2, nil)
	w.settle()
	p.Fail(1, errDead)
	isDown(t, waits, 1)
	w.ports[1].Close()
	w.ends, w.in = map[[2]int]*shm.Producer{}, map[[2]int]*shm.Consumer{}
	w.ports[1] = NewPort(w.ports[1].cfg)
	p.Reset(1)
	buf := make([]byte, 10)
	r := p.Recv(1, 1, buf)
	w.settle()
	require.False(t, r.Done(), "the old one's message is gone")
	w.ports[1].Send(0, 1, []byte("new"))
	w.settle()
	done(t, r)
	require.Equal(t, "new", string(buf[:3]))
	waits = p.Recv(1, 1, buf)
	p.Reset(1)
	require.ErrorIs(t, waits.Err(), ErrReplaced)
}

func TestALaneThatIsNotThereYet(t *testing.T) {
	w := newWorld(t, 2, 4096)
	lane := w.ports[0].cfg.Lane
	says := ErrPending
	w.ports[0].cfg.Lane = func(rank int) (*shm.Producer, *shm.Consumer, error) {
		if says != nil {
			return nil, nil, says
		}
		return lane(rank)
	}
	s := w.ports[0].Send(1, 1, []byte("x"))
	w.settle()
	require.False(t, s.Done())
	says = errDead
	w.settle()
	isDown(t, s, 1)
	says = nil
	s, r := w.ports[0].Send(1, 1, []byte("x")), w.ports[1].Recv(0, 1, make([]byte, 1))
	w.settle()
	done(t, s, r)
}

func TestTheBellRingsWhenOperationsHaveEnded(t *testing.T) {
	w := newWorld(t, 2, 4096)
	rung := 0
	w.ports[0].cfg.Bell = ring(func() { rung++ })
	w.ports[0].Recv(1, 1, nil)
	w.ports[0].Poll()
	require.Zero(t, rung)
	w.ports[1].Send(0, 1, nil)
	w.ports[0].Poll()
	require.Equal(t, 1, rung)
	w.ports[0].Recv(1, 1, nil)
	w.ports[0].Fail(1, errDead)
	require.Equal(t, 2, rung)
}

type ring func()

func (r ring) Ring() { r() }

// intruder is a world of ranks 0 and 2, and a rank 1 of which the test has the ends.
func intruder(tb testing.TB) (w *world, out *shm.Producer) {
	tb.Helper()
	w = newWorld(tb, 3, 1<<16)
	w.ports[0].Recv(1, 77, make([]byte, 100))
	w.ports[0].Send(1, 78, make([]byte, 1<<20)) // asks, with id 1
	w.ports[0].Poll()
	return w, w.ends[[2]int{1, 0}]
}

func write(p *shm.Producer, b []byte) {
	p.Commit(copy(p.Free(), b))
}

func encode(f frame) []byte {
	b := make([]byte, frameAlign)
	f.put(b)
	return b
}

func TestFramesThatMakeNoSense(t *testing.T) {
	long := func(f frame) []byte { return append(encode(f), make([]byte, span(f.body())-frameAlign)...) }
	for name, b := range map[string][]byte{
		"noise":                 random(64, 9),
		"no kind":               encode(frame{}),
		"unknown kind":          encode(frame{kind: kind(kinds)}),
		"eager and long":        encode(frame{kind: eager, size: eagerBytes + 1}),
		"eager with an id":      encode(frame{kind: eager, id: 1}),
		"ask for the world":     encode(frame{kind: ask, size: maxMessage + 1, id: 1}),
		"negative length":       encode(frame{kind: ask, size: -1, id: 1}),
		"ask out of turn":       encode(frame{kind: ask, size: 1, id: 2}),
		"grant of nothing sent": encode(frame{kind: grant, size: 1, id: 2}),
		"grant of too much":     encode(frame{kind: grant, size: 1<<20 + 1, id: 1}),
		"grant with a tag":      encode(frame{kind: grant, size: 1, id: 1, tag: 5}),
		"grant twice":           append(encode(frame{kind: grant, size: 1, id: 1}), encode(frame{kind: grant, size: 1, id: 1})...),
		"data without ask":      encode(frame{kind: data, size: 1, id: 1}),
		"more data than asked":  append(encode(frame{kind: ask, size: 10, id: 1, tag: 77}), encode(frame{kind: data, size: 11, id: 1})...),
		"data of no bytes":      encode(frame{kind: data, id: 1}),
		"credit of no bytes":    encode(frame{kind: credit}),
		"credit never given":    encode(frame{kind: credit, size: 1}),
		"credit beyond bounds":  encode(frame{kind: credit, size: creditBytes + 1}),
	} {
		t.Run(name, func(t *testing.T) {
			w, out := intruder(t)
			waits := w.ports[0].Recv(1, 5, nil)
			write(out, b)
			w.settle()
			isDown(t, waits, 1)
			var protocol *ProtocolError
			require.ErrorAs(t, waits.Err(), &protocol)
			require.Equal(t, 1, protocol.Rank)
			s, r := w.ports[2].Send(0, 5, nil), w.ports[0].Recv(2, 5, nil)
			w.settle()
			done(t, s, r)
		})
	}
	t.Run("more than there is room for", func(t *testing.T) {
		w, out := intruder(t)
		for range creditBytes/span(eagerBytes/2) + 1 {
			require.NoError(t, w.ports[0].Recv(1, 6, nil).Err())
			write(out, long(frame{kind: eager, size: eagerBytes / 2}))
			w.settle()
		}
		require.LessOrEqual(t, keptBytes(w.ports[0]), creditBytes)
		var protocol *ProtocolError
		require.ErrorAs(t, w.ports[0].Recv(1, 6, nil).Err(), &protocol)
	})
}

// Whatever comes, nothing panics, memory is bounded, and other lanes work.
func FuzzFrames(f *testing.F) {
	for _, fr := range []frame{
		{kind: eager, tag: 77, size: 20},
		{kind: eager, tag: 1, size: 30},
		{kind: ask, tag: 77, size: 100, id: 1},
		{kind: ask, tag: 3, size: 1 << 30, id: 1},
		{kind: grant, size: 100, id: 1},
		{kind: data, size: 10, id: 1},
		{kind: credit, size: 64},
	} {
		b := encode(fr)
		f.Add(b, uint16(40))
		f.Add(append(b, encode(frame{kind: data, size: 20, id: 1})...), uint16(64))
		f.Add(append(b, b...), uint16(7))
	}
	f.Fuzz(func(t *testing.T, b []byte, step uint16) {
		w, out := intruder(t)
		for len(b) > 0 {
			n := min(len(b), int(step)+1, len(out.Free()))
			write(out, b[:n])
			b = b[n:]
			w.settle()
			if out.Err() != nil {
				break
			}
		}
		require.LessOrEqual(t, keptBytes(w.ports[0]), creditBytes)
		w.ports[0].Recv(1, AnyTag, make([]byte, 10))
		w.ports[0].Fail(1, errDead)
		s, r := w.ports[2].Send(0, 5, nil), w.ports[0].Recv(2, 5, nil)
		w.settle()
		done(t, s, r)
	})
}

// A buffer is its owner's again when an operation was canceled, in whatever state, and the stream goes on.
func TestAnOperationThatIsCanceled(t *testing.T) {
	for _, size := range []int{10, eagerBytes, 1 << 20} {
		for polls := range 12 {
			for _, sender := range []bool{false, true} {
				w := newWorld(t, 2, 1<<14)
				want, buf := random(size, 1), make([]byte, size)
				out := slices.Clone(want)
				s, r := w.ports[0].Send(1, 1, out), w.ports[1].Recv(0, 1, buf)
				for range polls {
					w.ports[0].Poll()
					w.ports[1].Poll()
				}
				was := slices.Clone(buf)
				if sender {
					wasDone := s.Done()
					w.ports[0].Cancel(s, errDead)
					require.True(t, s.Done())
					require.Equal(t, !wasDone, errors.Is(s.Err(), errDead))
					clear(out)
				} else {
					wasDone := r.Done()
					w.ports[1].Cancel(r, errDead)
					require.True(t, r.Done())
					require.Equal(t, !wasDone, errors.Is(r.Err(), errDead))
				}
				w.settle()
				if sender {
					done(t, r)
					require.True(t, bytes.Equal(want, buf))
				} else {
					require.True(t, bytes.Equal(was, buf), "nothing is written any more")
				}
				next := make([]byte, size)
				w.ports[0].Send(1, 2, want)
				r = w.ports[1].Recv(0, 2, next)
				w.settle()
				done(t, r)
				require.True(t, bytes.Equal(want, next))
			}
		}
	}
	w := newWorld(t, 2, 1<<14)
	p := w.ports[0]
	p.cfg.Lane = func(int) (*shm.Producer, *shm.Consumer, error) { return nil, nil, ErrPending }
	s, r, anybody := p.Send(1, 1, nil), p.Recv(1, 1, nil), p.Recv(Any, 1, nil)
	for _, o := range []*Op{s, r, anybody} {
		p.Cancel(o, errDead)
		require.ErrorIs(t, o.Err(), errDead)
	}
	l := p.lanes[1]
	require.True(t, l.out.queue.empty())
	require.Empty(t, l.posted)
	require.Empty(t, p.any)
}
