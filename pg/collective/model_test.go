package collective

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"larder/pg/reduce"
)

// problem is an operation of all members: what each is called with, and what it must come to.
type problem struct {
	args []Args     // by member
	want [][][]byte // by member: what is in Dst afterwards; nil where it does not matter
}

// what says which operation a problem is.
type what struct {
	kind    Kind
	dt      reduce.DType
	op      reduce.Op
	n       int
	root    int
	count   int // elements of an operand or part
	inPlace bool
}

func (x what) String() string {
	return fmt.Sprintf("%v %v %v n=%d root=%d count=%d in place %v", x.kind, x.dt, x.op, x.n, x.root, x.count, x.inPlace)
}

// array makes elements whose sums are exact in every dtype, so that the order of operands does not matter.
func array(rng *rand.Rand, dt reduce.DType, count int) []byte {
	b := make([]byte, count*dt.Size())
	for i := range count {
		v := rng.IntN(3)
		at := b[i*dt.Size():]
		switch dt {
		case reduce.F32:
			binary.LittleEndian.PutUint32(at, math.Float32bits(float32(v)))
		case reduce.F64:
			binary.LittleEndian.PutUint64(at, math.Float64bits(float64(v)))
		case reduce.F16:
			binary.LittleEndian.PutUint16(at, []uint16{0, 0x3c00, 0x4000}[v])
		case reduce.BF16:
			binary.LittleEndian.PutUint16(at, uint16(math.Float32bits(float32(v))>>16))
		case reduce.Bool:
			at[0] = byte(v & 1)
		default:
			for j := range dt.Size() {
				at[j] = byte(rng.Uint32())
			}
		}
	}
	return b
}

func parts(rng *rand.Rand, dt reduce.DType, n, count int) [][]byte {
	list := make([][]byte, n)
	for k := range list {
		list[k] = array(rng, dt, count)
	}
	return list
}

func blank(n, bytes int) [][]byte {
	list := make([][]byte, n)
	for k := range list {
		list[k] = make([]byte, bytes)
	}
	return list
}

// total is the reduction of operands.
func (x what) total(operands [][]byte) []byte {
	out := make([]byte, len(operands[0]))
	reduce.Reduce(x.op, x.dt, out, operands...)
	if x.op == reduce.Avg {
		reduce.Divide(x.dt, out, x.n)
	}
	return out
}

func copies(list [][]byte) [][]byte {
	out := make([][]byte, len(list))
	for i, b := range list {
		out[i] = bytes.Clone(b)
	}
	return out
}

// newProblem makes an operation and its outcome, as plainly as possible.
func newProblem(rng *rand.Rand, x what, seq uint64) problem {
	p := problem{args: make([]Args, x.n), want: make([][][]byte, x.n)}
	size := x.count * x.dt.Size()
	operands := parts(rng, x.dt, x.n, x.count)
	grid := make([][][]byte, x.n) // parts that each member has for each
	for i := range grid {
		grid[i] = parts(rng, x.dt, x.n, x.count)
		if x.kind == AllToAll {
			for k := range grid[i] {
				switch {
				case x.inPlace && k < i: // what is exchanged in place is as long
					grid[i][k] = array(rng, x.dt, len(grid[k][i])/x.dt.Size())
				case rng.IntN(3) == 0:
					grid[i][k] = nil
				case k%2 == 0:
					grid[i][k] = array(rng, x.dt, rng.IntN(4*x.count+1))
				}
			}
		}
	}
	column := func(k int) [][]byte { // parts that all have for one
		var list [][]byte
		for i := range grid {
			list = append(list, grid[i][k])
		}
		return list
	}
	for i := range x.n {
		a := Args{Kind: x.kind, DType: x.dt, Op: x.op, Root: x.root, Seq: seq}
		own := bytes.Clone(operands[i])
		switch x.kind {
		case AllReduce, Reduce:
			a.Src, a.Dst = [][]byte{own}, blank(1, size)
			if x.inPlace {
				a.Dst = a.Src
			}
			p.want[i] = [][]byte{x.total(operands)}
			if x.kind == Reduce && i != x.root {
				a.Dst, p.want[i] = nil, nil
			}
		case Broadcast:
			a.Src, a.Dst = [][]byte{own}, [][]byte{own}
			p.want[i] = [][]byte{operands[x.root]}
		case AllGather, Gather:
			a.Src, a.Dst = [][]byte{own}, blank(x.n, size)
			if x.inPlace {
				a.Src = [][]byte{a.Dst[i]}
				copy(a.Dst[i], own)
			}
			p.want[i] = operands
			if x.kind == Gather && i != x.root {
				a.Dst, p.want[i] = nil, nil
			}
		case Scatter:
			a.Src, a.Dst = copies(grid[i]), blank(1, size)
			if x.inPlace {
				a.Dst = [][]byte{a.Src[i]}
			}
			if i != x.root {
				a.Src = nil
			}
			p.want[i] = [][]byte{grid[x.root][i]}
		case ReduceScatter:
			a.Src, a.Dst = copies(grid[i]), blank(1, size)
			if x.inPlace {
				a.Dst = [][]byte{a.Src[i]}
			}
			p.want[i] = [][]byte{x.total(column(i))}
		case AllToAll:
			a.Src, p.want[i] = copies(grid[i]), column(i)
			a.Dst = copies(p.want[i])
			for _, b := range a.Dst {
				clear(b)
			}
			if x.inPlace {
				a.Dst = a.Src
			}
		case Barrier:
			a = Args{Kind: Barrier, Seq: seq}
		}
		p.args[i] = a
	}
	return p
}

// wrong says what a member's memory holds that it should not, "" if it is right.
func (p *problem) wrong(i int) string {
	for k, want := range p.want[i] {
		if got := p.args[i].Dst[k]; !bytes.Equal(got, want) {
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			return fmt.Sprintf("buffer %d of member %d differs at byte %d of %d", k, i, at, len(want))
		}
	}
	return ""
}

// operations are the ops that a dtype has; those that only move have one that is not looked at.
func operations(k Kind, dt reduce.DType) []reduce.Op {
	if !k.Reduces() {
		return []reduce.Op{reduce.Sum}
	}
	list := []reduce.Op{reduce.Sum, reduce.Prod, reduce.Min, reduce.Max, reduce.Avg, reduce.Band, reduce.Bor, reduce.Bxor}
	return slices.DeleteFunc(list, func(op reduce.Op) bool { return reduce.Check(op, dt) != nil })
}

// column gives each member's operations of a row of problems.
func column(list []problem, n int) [][]Args {
	ops := make([][]Args, n)
	for i := range n {
		for _, p := range list {
			ops[i] = append(ops[i], p.args[i])
		}
	}
	return ops
}
