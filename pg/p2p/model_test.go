package p2p

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// sending and receiving are an operation as the model has it. They are listed in the order of the calls.
type sending struct {
	op       *Op
	from, to int
	tag      uint64
	size     int
	taker    *receiving
}

type receiving struct {
	op       *Op
	me, from int
	tag      uint64
	n        int // order of posting at me
	message  *sending
}

// takes is MPI's rule for a receive and a message.
func (r *receiving) takes(s *sending) bool {
	return s.to == r.me && (r.from == Any || r.from == s.from) && (r.tag == AnyTag || r.tag == s.tag)
}

// TestMatchingIsMPIs runs operations in random order, and has then each match checked against the rules of MPI (3.5, "Semantics of
// point-to-point communication"), by trying all pairs: messages of one sender do not overtake each other, receives do not either, and no
// receive and message are left that match.
func TestMatchingIsMPIs(t *testing.T) {
	runs := uint64(100)
	if testing.Short() {
		runs = 20
	}
	for seed := range runs {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			w := newWorld(t, 3, 4096<<r.IntN(5))
			sends, receives := play(w, r)
			w.settle()
			for i, s := range sends {
				require.False(t, s.op.Done() && s.op.Err() != nil, "send %d", i)
			}
			bind(t, sends, receives)
			checkOrder(t, sends, receives)
		})
	}
}

// play does random calls. Every message begins with its number.
func play(w *world, r *rand.Rand) (sends []*sending, receives []*receiving) {
	sizes := []int{9, 40, 5000, eagerBytes, eagerBytes + 1, 3 * eagerBytes}
	for range 120 {
		me, tag := r.IntN(3), uint64(r.IntN(2))
		switch r.IntN(5) {
		case 0, 1:
			s := &sending{from: me, to: r.IntN(3), tag: tag, size: sizes[r.IntN(len(sizes))]}
			buf := make([]byte, s.size)
			binary.NativeEndian.PutUint64(buf, uint64(len(sends)))
			buf[s.size-1] = byte(len(sends))
			s.op = w.ports[me].Send(s.to, tag, buf)
			sends = append(sends, s)
		case 2, 3:
			q := &receiving{me: me, from: r.IntN(4) - 1, tag: tag, n: len(receives)}
			if r.IntN(3) == 0 {
				q.tag = AnyTag
			}
			q.op = w.ports[me].Recv(q.from, q.tag, make([]byte, sizes[len(sizes)-1-r.IntN(2)*r.IntN(len(sizes))]))
			receives = append(receives, q)
		default:
			for range r.IntN(4) {
				w.ports[r.IntN(3)].Poll()
			}
		}
	}
	return sends, receives
}

// bind finds out which message each receive has taken, from what is in its buffer.
func bind(t *testing.T, sends []*sending, receives []*receiving) {
	t.Helper()
	for _, q := range receives {
		if !q.op.Done() {
			continue
		}
		s := sends[binary.NativeEndian.Uint64(q.op.buf)]
		require.Nil(t, s.taker, "a message was received twice")
		s.taker, q.message = q, s
		require.True(t, q.takes(s))
		require.Equal(t, []any{s.from, s.tag, min(s.size, len(q.op.buf))}, []any{q.op.From(), q.op.Tag(), q.op.Len()})
		require.True(t, s.op.Done())
		var truncated *TruncateError
		require.Equal(t, s.size > len(q.op.buf), errors.As(q.op.Err(), &truncated))
		if truncated == nil {
			require.NoError(t, q.op.Err())
			require.Equal(t, s.op.buf, q.op.buf[:s.size])
		}
	}
}

func checkOrder(t *testing.T, sends []*sending, receives []*receiving) {
	t.Helper()
	for i, s := range sends {
		if s.taker == nil {
			for _, q := range receives {
				if q.message == nil && q.takes(s) {
					t.Fatal("a receive and a message are left that match")
				}
			}
			continue
		}
		for _, earlier := range sends[:i] {
			if earlier.from == s.from && s.taker.takes(earlier) && (earlier.taker == nil || earlier.taker.n > s.taker.n) {
				t.Fatal("a message was overtaken")
			}
		}
		for _, earlier := range receives[:s.taker.n] {
			if earlier.takes(s) && earlier.message == nil {
				t.Fatal("a receive was overtaken")
			}
		}
	}
}
