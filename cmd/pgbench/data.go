package pgbench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"larder/pg"
	"larder/pg/reduce"
)

// data is the memory of one call, and the call.
type data struct {
	b        *bench
	size     int
	dt       pg.DType
	op       pg.Op
	root     int
	src, dst []byte // the same memory, or parts of it, in place
	call     pg.Call
	calls    []pg.Call // instead: a send and a receive
}

// data makes what one rank needs.
func (b *bench) data(size int, dt pg.DType, op pg.Op, root int, in bool) *data {
	d := &data{b: b, size: size, dt: dt, op: op, root: max(root, 0), dst: make([]byte, size)}
	d.src = d.dst
	if !in || b.Collective == "alltoall" || b.Collective == "sendrecv" {
		d.src = make([]byte, size)
	}
	part := size / b.n
	own := func(p []byte) []byte { return p[b.rank*part:][:part] }
	switch b.Collective {
	case "all_reduce":
		d.call = pg.AllReduce(d.dst, d.src, dt, op)
	case "reduce":
		d.call = pg.Reduce(d.dst, d.src, dt, op, d.root)
	case "broadcast":
		if b.rank == d.root {
			d.dst = d.src
		}
		d.call = pg.Broadcast(d.dst, dt, d.root)
	case "all_gather":
		d.src = own(d.src)
		d.call = pg.AllGather(parts(d.dst, b.n), d.src, dt)
	case "gather":
		d.src = own(d.src)
		d.call = pg.Gather(parts(d.dst, b.n), d.src, dt, d.root)
	case "reduce_scatter":
		d.dst = own(d.dst)
		d.call = pg.ReduceScatter(d.dst, parts(d.src, b.n), dt, op)
	case "scatter":
		d.dst = own(d.dst)
		d.call = pg.Scatter(d.dst, parts(d.src, b.n), dt, d.root)
	case "alltoall":
		d.call = pg.AllToAll(parts(d.dst, b.n), parts(d.src, b.n), dt)
	case "sendrecv":
		d.calls = []pg.Call{
			pg.Send(d.src, (b.rank+1)%b.n, 0), pg.Recv(d.dst, (b.rank+b.n-1)%b.n, 0),
		}
	case "barrier":
		d.call = pg.Barrier()
	}
	return d
}

// parts cuts memory into equal parts.
func parts(p []byte, n int) [][]byte {
	all := make([][]byte, n)
	for i := range all {
		all[i] = p[i*(len(p)/n):][:len(p)/n]
	}
	return all
}

// together makes calls at once, and waits for all.
func (d *data) together(g *pg.Group, times int) error {
	var works []*pg.Work
	for range times {
		for _, c := range d.calls {
			works = append(works, g.Start(c))
		}
		if d.calls == nil {
			works = append(works, g.Start(d.call))
		}
	}
	for _, w := range works {
		if _, err := w.Wait(context.Background()); err != nil {
			return err //nolint:wrapcheck // the caller says what it was
		}
	}
	return nil
}

// element is a rank's i-th: a small whole number, so that every dtype has every result, of few enough ranks, as it is.
func (d *data) element(rank, i int) float64 {
	if d.op != reduce.Prod {
		return float64((rank + i) % 3)
	}
	if rank < 3 && (rank+i)%2 == 0 {
		return 2
	}
	return 1
}

// fill sets the operand.
func (d *data) fill() {
	for i := range len(d.src) / d.dt.Size() {
		put(d.src[i*d.dt.Size():], d.dt, d.element(d.b.rank, i))
	}
}

// wrong counts elements of the result that are not what they should be.
func (d *data) wrong() int {
	if d.b.Collective == "barrier" || d.b.rank != d.root && (d.b.Collective == "reduce" || d.b.Collective == "gather") {
		return 0
	}
	n := 0
	buf := make([]byte, d.dt.Size())
	for i := range len(d.dst) / d.dt.Size() {
		put(buf, d.dt, d.expected(i))
		if !slices.Equal(buf, d.dst[i*d.dt.Size():][:d.dt.Size()]) {
			n++
		}
	}
	return n
}

// expected is the i-th element of the result.
func (d *data) expected(i int) float64 {
	count := d.size / d.dt.Size()
	part := max(count/d.b.n, 1)
	switch d.b.Collective {
	case "all_reduce", "reduce":
		return d.reduced(i)
	case "reduce_scatter":
		return d.reduced(d.b.rank*part + i)
	case "broadcast":
		return d.element(d.root, i)
	case "scatter":
		return d.element(d.root, d.b.rank*part+i)
	case "all_gather", "gather":
		return d.element(i/part, i%part)
	case "alltoall":
		return d.element(i/part, d.b.rank*part+i%part)
	default: // sendrecv
		return d.element((d.b.rank+d.b.n-1)%d.b.n, i)
	}
}

func (d *data) reduced(i int) float64 {
	x := d.element(0, i)
	for r := 1; r < d.b.n; r++ {
		y := d.element(r, i)
		switch d.op {
		case reduce.Sum, reduce.Avg:
			x += y
		case reduce.Prod:
			x *= y
		case reduce.Min:
			x = min(x, y)
		case reduce.Max:
			x = max(x, y)
		case reduce.Band:
			x = float64(int(x) & int(y))
		case reduce.Bor:
			x = float64(int(x) | int(y))
		case reduce.Bxor:
			x = float64(int(x) ^ int(y))
		}
	}
	if d.op == reduce.Avg {
		return x / float64(d.b.n)
	}
	return x
}

// put writes a number as an element. What is not a float is cut to a whole number, and a bool is whether it is not 0.
func put(b []byte, dt pg.DType, x float64) {
	switch dt {
	case reduce.F64:
		binary.NativeEndian.PutUint64(b, math.Float64bits(x))
	case reduce.F32:
		binary.NativeEndian.PutUint32(b, math.Float32bits(float32(x)))
	case reduce.BF16:
		bits := math.Float32bits(float32(x))
		binary.NativeEndian.PutUint16(b, uint16((bits+0x7fff+bits>>16&1)>>16))
	case reduce.F16:
		binary.NativeEndian.PutUint16(b, half(x))
	case reduce.Bool:
		b[0] = 0
		if x != 0 {
			b[0] = 1
		}
	default:
		v := uint64(int64(x)) //nolint:gosec // two's complement
		switch dt.Size() {
		case 1:
			b[0] = byte(v) //nolint:gosec // cut to size
		case 2:
			binary.NativeEndian.PutUint16(b, uint16(v)) //nolint:gosec // cut to size
		case 4:
			binary.NativeEndian.PutUint32(b, uint32(v)) //nolint:gosec // cut to size
		default:
			binary.NativeEndian.PutUint64(b, v)
		}
	}
}

// half is a float16, for 0 and what is neither too large nor too small for 11 bits.
func half(x float64) uint16 {
	if x == 0 {
		return 0
	}
	bits := math.Float32bits(float32(x))
	const bias = (127 - 15) << 10
	return uint16((bits&^(1<<31)+0xfff+bits>>13&1)>>13-bias) | uint16(bits>>16&0x8000)
}

func appendFloat(b []byte, x float64) []byte {
	return binary.NativeEndian.AppendUint64(b, math.Float64bits(x))
}

func float(b []byte) float64 { return math.Float64frombits(binary.NativeEndian.Uint64(b)) }

// ParseDTypes reads a list of dtypes; all stands for those that can be reduced.
func ParseDTypes(s string) ([]pg.DType, error) {
	if s != "all" {
		dt, err := reduce.ParseDType(s)
		if err != nil {
			return nil, fmt.Errorf("pgbench: %w", err)
		}
		return []pg.DType{dt}, nil
	}
	return []pg.DType{
		reduce.I8, reduce.U8, reduce.I32, reduce.U32, reduce.I64, reduce.U64, reduce.F16, reduce.F32, reduce.F64, reduce.BF16,
	}, nil
}
