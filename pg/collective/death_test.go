package collective

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

// mortal is a fabric that works so many times, and then like one of a process that does nothing any more.
type mortal struct {
	fabric
	left *int
}

func (m mortal) send(o *flow, t, b int) bool {
	if *m.left <= 0 || !m.fabric.send(o, t, b) {
		return false
	}
	*m.left--
	return true
}

func (m mortal) peek(o *flow, t, from int) ([]byte, int, bool) {
	if *m.left <= 0 {
		return nil, 0, false
	}
	return m.fabric.peek(o, t, from)
}

func (m mortal) next(t, from int) {
	*m.left--
	m.fabric.next(t, from)
}

func (m mortal) look(o *flow) {
	if *m.left > 0 {
		m.fabric.look(o)
	}
}

func (m mortal) notify(notice) {}

func (m mortal) dead(*flow, int) error { return nil }

// doomed has a member of a world die after so many sends and receptions. What it returns is how many are left.
func (w *world) doom(member, after int) *int {
	c := w.comms[member]
	require.NoError(w.tb, c.setUp())
	c.ready, c.table = true, c.Table
	c.flat = mortal{c.flat, &after}
	return &after
}

// TestAllSurvivorsOfAHostOrNone kills a member after each of its steps in turn, in two operations in a row: the survivors
// complete the same ones, with the right result, and fail in the same one because of the one that died.
func TestAllSurvivorsOfAHostOrNone(t *testing.T) {
	for k := AllReduce; k.Valid(); k++ {
		for _, root := range []int{0, 1} { // the one that dies, and another
			if root > 0 && !k.Rooted() {
				continue
			}
			for n := 2; n <= 4; n++ {
				t.Run(fmt.Sprintf("%v of %d to %d", k, n, root), func(t *testing.T) {
					for _, count := range []int{5, 700} {
						after := 0
						for dieAfter(t, what{k, reduce.I32, reduce.Sum, n, root, count, count%2 == 0}, after) {
							after++
						}
						require.Greater(t, after, 1) // it has died in many places
					}
				})
			}
		}
	}
}

// dieAfter reports whether the member died before it was through.
func dieAfter(t *testing.T, x what, after int) bool {
	t.Helper()
	s := tiny
	s.hosts = oneHost(x.n)
	w := newWorld(t, s, uint64(after))
	row := []problem{newProblem(w.rng, x, 0), newProblem(w.rng, x, 1)}
	left, known := w.doom(0, after), w.rng.IntN(50)
	errs := w.run(column(row, x.n), func(int) {
		if known--; *left <= 0 && known < 0 && !w.dead[0] {
			w.kill(0)
		}
	})
	for i := 1; i < x.n; i++ {
		require.Equal(t, w.at[1], w.at[i], "%v, dead after %d: survivors 1 and %d", x, after, i)
		require.Equal(t, errs[1] == nil, errs[i] == nil, "%v, dead after %d: survivors 1 and %d: %v, %v", x, after, i, errs[1], errs[i])
		if errs[i] != nil {
			var down *DownError
			require.ErrorAs(t, errs[i], &down)
			require.Zero(t, down.Member)
		}
		for j, p := range row[:w.at[i]] {
			if j < w.at[i]-1 || errs[i] == nil {
				require.Empty(t, p.wrong(i), "%v, dead after %d", x, after)
			}
		}
	}
	return w.dead[0]
}

// TestNobodyHangsWhenAMemberDies: over lanes some survivors may complete what others do not, but what they complete is right,
// and the others know who died.
func TestNobodyHangsWhenAMemberDies(t *testing.T) {
	for name, hosts := range meshes() {
		s := tiny
		s.hosts = hosts
		n := newWorld(t, s, 0).size()
		if n < 3 || n > 6 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(15) {
				w := newWorld(t, s, seed)
				x := what{AllReduce + Kind(w.rng.IntN(int(Barrier))), reduce.I32, reduce.Sum, n, w.rng.IntN(n), counts[w.rng.IntN(len(counts))], false}
				var row []problem
				for i := range uint64(6) {
					row = append(row, newProblem(w.rng, x, i))
				}
				dead, at := w.rng.IntN(n), w.rng.IntN(300)
				errs := w.run(column(row, n), func(int) {
					if at--; at == 0 {
						w.kill(dead)
					}
				})
				for i := range n {
					if i == dead && w.dead[i] {
						continue
					}
					if errs[i] != nil {
						var down *DownError
						require.ErrorAs(t, errs[i], &down, "seed %d: %v", seed, x)
						require.Equal(t, dead, down.Member)
					}
					for j, p := range row[:w.at[i]] {
						if j < w.at[i]-1 || errs[i] == nil {
							require.Empty(t, p.wrong(i), "seed %d: %v", seed, x)
						}
					}
				}
			}
		})
	}
}

func (w *world) size() int { return len(w.comms) }
