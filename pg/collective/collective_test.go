package collective

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

// meshes are all shapes of meshes that tests go through.
func meshes() map[string][][]int {
	m := map[string][][]int{
		"2+2": {{0, 1}, {2, 3}}, "3+1": {{0, 1, 2}, {3}}, "2+2+1": {{0, 3}, {1, 4}, {2}}, "4+4": {{0, 2, 4, 6}, {1, 3, 5, 7}},
		"2+2+2": {{0, 1}, {2, 3}, {4, 5}}, "1+3+2": {{0}, {1, 2, 3}, {4, 5}},
	}
	for _, n := range []int{1, 2, 3, 4, 5, 8, 16} {
		m[fmt.Sprintf("one host of %d", n)] = oneHost(n)
		if n > 1 {
			m[fmt.Sprintf("%d hosts", n)] = apart(n)
		}
	}
	return m
}

// counts are around every size at which something changes in the tiny setting.
var counts = []int{0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 2048, 3001, 5000}

// TestEveryOperationInEveryMesh runs rows of random operations without a pause between them, so that fast members run ahead.
func TestEveryOperationInEveryMesh(t *testing.T) {
	for name, hosts := range meshes() {
		t.Run(name, func(t *testing.T) {
			s := tiny
			s.hosts = hosts
			w := newWorld(t, s, 42)
			n := len(w.comms)
			seq := uint64(0)
			for range max(1, 16/n) {
				var row []problem
				var names []string
				for range 20 {
					x := what{kind: AllReduce + Kind(w.rng.IntN(int(Barrier))), dt: reduce.F32 + reduce.DType(w.rng.IntN(18)), n: n}
					x.root, x.count, x.inPlace = w.rng.IntN(n), counts[w.rng.IntN(len(counts))], w.rng.IntN(2) == 0
					if x.kind.Reduces() {
						x.dt = reduce.F32 + reduce.DType(w.rng.IntN(int(reduce.Bool)))
					}
					list := operations(x.kind, x.dt)
					x.op = list[w.rng.IntN(len(list))]
					row, names = append(row, newProblem(w.rng, x, seq)), append(names, x.String())
					seq++
				}
				for i, err := range w.run(column(row, n), nil) {
					require.NoError(t, err, "member %d", i)
				}
				for j, p := range row {
					for i := range n {
						require.Empty(t, p.wrong(i), "%s", names[j])
					}
				}
			}
		})
	}
}

// TestEveryKindSizeAndType goes through all of them, at few members of the main shapes.
func TestEveryKindSizeAndType(t *testing.T) {
	for name, hosts := range map[string][][]int{"one host": oneHost(3), "hosts": apart(3), "2+2": {{0, 1}, {2, 3}}} {
		t.Run(name, func(t *testing.T) {
			s := tiny
			s.hosts = hosts
			w := newWorld(t, s, 7)
			n, seq := len(w.comms), uint64(0)
			for k := AllReduce; k.Valid(); k++ {
				for dt := reduce.F32; dt.Valid(); dt++ {
					for _, op := range operations(k, dt) {
						var row []problem
						for i, count := range counts {
							if (i+int(dt)+int(op))%8 != 0 {
								continue // another type has it
							}
							row = append(row, newProblem(w.rng, what{k, dt, op, n, i % n, count, i%2 == 0}, seq))
							seq++
						}
						for i, err := range w.run(column(row, n), nil) {
							require.NoError(t, err, "%v %v %v, member %d", k, dt, op, i)
						}
						for j, p := range row {
							for i := range n {
								require.Empty(t, p.wrong(i), "%v %v %v, number %d", k, dt, op, j)
							}
						}
					}
				}
			}
		})
	}
}

// TestResultsAreTheSameToTheBit: sums of floats depend on their order, which is the same everywhere.
func TestResultsAreTheSameToTheBit(t *testing.T) {
	for name, hosts := range meshes() {
		s := tiny
		s.hosts = hosts
		w := newWorld(t, s, 3)
		n := len(w.comms)
		var row []problem
		for i, count := range counts {
			p := problem{args: make([]Args, n)}
			for k := range n {
				src := make([]byte, 4*count)
				for j := range src {
					src[j] = byte(w.rng.Uint32())
				}
				dt := []reduce.DType{reduce.F32, reduce.BF16, reduce.F16, reduce.F64}[i%4]
				src = src[:len(src)/8*8]
				p.args[k] = Args{Kind: AllReduce, DType: dt, Op: reduce.Avg, Seq: uint64(i), Src: [][]byte{src}, Dst: [][]byte{src}}
			}
			row = append(row, p)
		}
		for _, err := range w.run(column(row, n), nil) {
			require.NoError(t, err)
		}
		for _, p := range row {
			for k := range n {
				require.True(t, slices.Equal(p.args[0].Dst[0], p.args[k].Dst[0]), "%s: members 0 and %d, %d bytes", name, k, len(p.args[0].Dst[0]))
			}
		}
	}
}
