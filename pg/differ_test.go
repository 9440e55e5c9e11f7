package pg

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/collective"
	"larder/pg/reduce"
)

// plain is a call of a kind by one of n ranks: count elements, or parts of so many, and root 0.
func plain(k Kind, n, count int, dt DType, op Op, root int) Call {
	parts := func() [][]byte {
		p := make([][]byte, n)
		for i := range p {
			p[i] = make([]byte, count*dt.Size())
		}
		return p
	}
	one := func() []byte { return make([]byte, count*dt.Size()) }
	switch k {
	case collective.AllReduce:
		return AllReduce(one(), one(), dt, op)
	case collective.Broadcast:
		return Broadcast(one(), dt, root)
	case collective.Reduce:
		return Reduce(one(), one(), dt, op, root)
	case collective.AllGather:
		return AllGather(parts(), one(), dt)
	case collective.ReduceScatter:
		return ReduceScatter(one(), parts(), dt, op)
	case collective.AllToAll:
		return AllToAll(parts(), parts(), dt)
	case collective.Gather:
		return Gather(parts(), one(), dt, root)
	case collective.Scatter:
		return Scatter(one(), parts(), dt, root)
	default:
		return Barrier()
	}
}

const lastKind = collective.Barrier

// TestRanksThatDiffer has rank 1 of three call something else than the others, in every way in which calls of each kind may differ.
// Somebody is told what two ranks have called; nobody hangs; and the group goes on.
func TestRanksThatDiffer(t *testing.T) {
	const n, odd = 3, 1
	for name, shape := range map[string]func(*Config){"one host": nil, "a host each": shapes["a host each"]} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			groups := newJob(t, n, shape).groups(GroupConfig{}, upTo(n)...)
			differ := func(name string, usual, other func() Call) {
				t.Run(name, func(t *testing.T) { differOnce(t, groups, odd, usual, other) })
			}
			for k := collective.AllReduce; k <= lastKind; k++ {
				as := func(k Kind, count int, dt DType, op Op, root int) func() Call {
					return func() Call { return plain(k, n, count, dt, op, root) }
				}
				usual := as(k, 100, reduce.F32, reduce.Sum, 0)
				for other := collective.AllReduce; other <= lastKind; other++ {
					if other != k {
						differ(fmt.Sprint(k, " and ", other), usual, as(other, 100, reduce.F32, reduce.Sum, 0))
					}
				}
				if k == collective.Barrier {
					continue
				}
				differ(fmt.Sprint("dtypes of ", k), usual, as(k, 100, reduce.I32, reduce.Sum, 0))
				differ(fmt.Sprint("counts of ", k), usual, as(k, 101, reduce.F32, reduce.Sum, 0))
				differ(fmt.Sprint("counts, by far, of ", k), usual, as(k, 200_000, reduce.F32, reduce.Sum, 0))
				if k.Reduces() {
					differ(fmt.Sprint("operations of ", k), usual, as(k, 100, reduce.F32, reduce.Max, 0))
				}
				if k.Rooted() {
					differ(fmt.Sprint("roots of ", k), usual, as(k, 100, reduce.F32, reduce.Sum, odd))
				}
			}
		})
	}
}

// differOnce has one rank call something else, and then all the same thing until it is carried out.
func differOnce(t *testing.T, groups []*Group, odd int, usual, other func() Call) {
	t.Helper()
	told := make(chan *MismatchError, 100)
	each(t, groups, func(g *Group) error {
		c := usual
		if g.Rank() == odd {
			c = other
		}
		_, err := g.Do(c()) // with memory of its own
		var sum float32
		for range 4 { // a root, say, has done what it had to before it learns: it does so with a later call, and others with it
			var mismatch *MismatchError
			var lost *PeerError
			switch {
			case errors.As(err, &mismatch):
				told <- mismatch
			case err != nil && !errors.As(err, &lost): // those have gone on
				return err
			}
			sum, err = sums(g)
		}
		if err != nil || sum != 7 {
			return fmt.Errorf("the sum is %v, not 7: %w", sum, err)
		}
		return nil
	})
	close(told)
	require.NotEmpty(t, told)
	named := false
	for e := range told {
		require.NotEqual(t, e.Mine, e.Theirs)
		calls := e.Mine + ", " + e.Theirs
		named = named || strings.Contains(calls, usual().Kind.String()+"(") || strings.Contains(calls, other().Kind.String()+"(")
	}
	require.True(t, named, "somebody is told what was called")
}
