package collective

import (
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

// TestMembersInThreadsOfTheirOwn has members run at once, as processes do: what the race detector sees of it is the memory of rings
// and rooms, which is mapped once for all here.
func TestMembersInThreadsOfTheirOwn(t *testing.T) {
	for name, hosts := range map[string][][]int{"one host": oneHost(4), "hosts": apart(3), "2+2": {{0, 1}, {2, 3}}} {
		t.Run(name, func(t *testing.T) {
			s := tiny
			s.hosts = hosts
			w := newWorld(t, s, 11)
			n := w.size()
			var row []problem
			for i := range uint64(60) {
				x := what{AllReduce + Kind(w.rng.IntN(int(Barrier))), reduce.F32, reduce.Sum, n, w.rng.IntN(n), w.rng.IntN(5000), i%2 == 0}
				row = append(row, newProblem(w.rng, x, i))
			}
			ops, errs := column(row, n), make([]error, n)
			var wg sync.WaitGroup
			for i, c := range w.comms {
				wg.Go(func() {
					for _, a := range ops[i] {
						op, done := c.Start(a), false
						for !done && errs[i] == nil {
							done, errs[i] = op.Poll()
							runtime.Gosched()
						}
					}
				})
			}
			wg.Wait()
			for i := range n {
				require.NoError(t, errs[i])
				for _, p := range row {
					require.Empty(t, p.wrong(i))
				}
			}
		})
	}
}

func TestSmallOperationsAllocateNothing(t *testing.T) {
	for name, hosts := range map[string][][]int{"one host": oneHost(3), "hosts": apart(3), "many hosts": apart(10), "2+2": {{0, 1}, {2, 3}}} {
		for k := AllReduce; k.Valid(); k++ {
			s := tiny
			s.hosts = hosts
			w := newWorld(t, s, 11)
			n := w.size()
			p := newProblem(w.rng, what{k, reduce.F32, reduce.Sum, n, 0, 16, true}, 0)
			seq, ops := uint64(0), make([]Op, n)
			all := func() {
				for i, c := range w.comms {
					p.args[i].Seq = seq
					ops[i] = c.Start(p.args[i])
				}
				seq++
				for left := n; left > 0; {
					for i, op := range ops {
						if op == nil {
							continue
						}
						done, err := op.Poll()
						require.NoError(t, err)
						if done {
							ops[i] = nil
							left--
						}
					}
				}
			}
			all()
			require.Zero(t, testing.AllocsPerRun(10, all), "%v, %s", k, name)
		}
	}
}

// TestWrongArgumentsAreRefused before anything is sent: the members go on.
func TestWrongArgumentsAreRefused(t *testing.T) {
	w := newWorld(t, setting{hosts: oneHost(2), layout: tiny.layout, table: tiny.table}, 1)
	b := make([]byte, 8)
	one := [][]byte{b}
	for _, a := range []Args{
		{},
		{Kind: Barrier + 1},
		{Kind: AllReduce, Src: one, Dst: one},
		{Kind: AllReduce, DType: reduce.F32, Op: reduce.Band, Src: one, Dst: one},
		{Kind: AllReduce, DType: reduce.F8E5M2, Src: one, Dst: one},
		{Kind: AllReduce, DType: reduce.F32, Src: one},
		{Kind: AllReduce, DType: reduce.F32, Src: [][]byte{b[:7]}, Dst: [][]byte{b[:7]}},
		{Kind: AllReduce, DType: reduce.F32, Src: one, Dst: [][]byte{b[:4]}},
		{Kind: Broadcast, DType: reduce.F32, Root: 2, Src: one, Dst: one},
		{Kind: Broadcast, DType: reduce.F32, Root: -1, Src: one, Dst: one},
		{Kind: Broadcast, DType: reduce.F32, Src: one, Dst: [][]byte{b[:4]}},
		{Kind: AllGather, DType: reduce.F32, Src: one, Dst: one},
		{Kind: Scatter, DType: reduce.F32, Src: [][]byte{b, b[:4]}, Dst: one},
		{Kind: AllToAll, DType: reduce.F32, Src: [][]byte{b, b}, Dst: [][]byte{b[:4], b}},
	} {
		_, err := w.comms[0].Start(a).Poll()
		require.ErrorIs(t, err, ErrArgs, "%v", a)
	}
	p := newProblem(w.rng, what{AllReduce, reduce.F32, reduce.Sum, 2, 0, 10, false}, 0)
	op := w.comms[0].Start(p.args[0])
	_, err := w.comms[0].Start(p.args[0]).Poll()
	require.ErrorIs(t, err, ErrComm, "one at a time")
	for done := false; !done; {
		_, err := op.Poll()
		require.NoError(t, err)
		if !done && w.comms[1].progress == 0 {
			op1 := w.comms[1].Start(p.args[1])
			_, err = op1.Poll()
			require.NoError(t, err)
			done, err = op.Poll()
			require.NoError(t, err)
			_, err = op1.Poll()
			require.NoError(t, err)
		}
	}
	require.Empty(t, p.wrong(0))
	require.Empty(t, p.wrong(1))
}

// TestMeshesThatDoNotFitAreRefused before anything is sent.
func TestMeshesThatDoNotFitAreRefused(t *testing.T) {
	w := newWorld(t, setting{hosts: [][]int{{0, 1}, {2}}, layout: tiny.layout, ring: tiny.ring, table: tiny.table}, 1)
	good := *w.comms[0]
	for name, change := range map[string]func(*Comm){
		"no members":         func(c *Comm) { c.N = 0 },
		"not among them":     func(c *Comm) { c.Me = 3 },
		"another's room":     func(c *Comm) { c.Local = []int{1, 0} },
		"no lanes":           func(c *Comm) { c.Lane = nil },
		"another host":       func(c *Comm) { c.Hosts = [][]int{{0, 2}, {1}} },
		"somebody missing":   func(c *Comm) { c.Hosts = [][]int{{0, 1}, {3, 4}} },
		"half a table":       func(c *Comm) { c.Table = Table{Lead: 1} },
		"room of other size": func(c *Comm) { c.Local = []int{0, 1, 2} },
	} {
		c := good
		change(&c)
		_, err := c.Start(Args{Kind: Barrier}).Poll()
		require.ErrorIs(t, err, ErrComm, name)
	}
}
