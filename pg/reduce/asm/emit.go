package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// level is a set of instructions.
type level struct {
	name  string
	width int      // of its registers, in bytes
	isa   []string // what it may take, by the names of CPUID's flags
}

// String gives the end of the names of its functions.
func (l level) String() string { return l.name }

const (
	line      = 64 // bytes: kernels take whole lines
	sliceSize = 24 // bytes: a Go slice's header, which starts with the address
)

// Accumulators of the loop over blocks: enough to hide an instruction's latency and what surrounds the loads.
const accumulators = 8

// emitter writes kernels of one level.
type emitter struct {
	*build.Context
	level

	constants map[uint64]reg.VecVirtual // of the function at hand, by the pattern that they repeat
	labels    int
}

// vec gives a register as wide as the level has them.
func (e *emitter) vec() reg.VecVirtual {
	if e.width == 64 {
		return e.ZMM()
	}
	return e.YMM()
}

// wide reports whether the level has mask registers, 32 vector registers, and what else came with AVX-512.
func (e *emitter) wide() bool { return e.width == 64 }

func (e *emitter) label(name string) string {
	e.labels++
	return fmt.Sprintf("%s%d", name, e.labels)
}

// begin starts a function.
func (e *emitter) begin(name, signature string) {
	e.Function(name + e.name)
	e.Attributes(attr.NOSPLIT)
	e.SignatureExpr(signature)
	e.constants, e.labels = map[uint64]reg.VecVirtual{}, 0
}

// constant gives a register that repeats a pattern of 64 bits. It must have been asked for before the loops, by prepare.
func (e *emitter) constant(pattern uint64) reg.VecVirtual {
	if v, ok := e.constants[pattern]; ok {
		return v
	}
	bits, low, v := e.GP64(), e.XMM(), e.vec()
	e.MOVQ(operand.U64(pattern), bits)
	e.VMOVQ(bits, low)
	e.VPBROADCASTQ(low, v)
	e.constants[pattern] = v
	return v
}

func (e *emitter) prepare(patterns []uint64) {
	for _, p := range patterns {
		e.constant(p)
	}
}

// fold writes the kernel that combines bytes from to to of n operands:
//
//	for each block of those bytes, then for each line of what is left
//		load it from the first operand
//		for each other operand: combine with what is there
//		store it
//
// so each byte is read and written once whatever n is, and dst may be an operand. The stores are ordinary ones: results are read
// soon. The CPU's own prefetching keeps up with that many streams.
func (e *emitter) fold(k kernel) {
	e.begin(k.Name(), "func(dst *byte, srcs *[]byte, n, from, to int)")
	dst := e.Load(e.Param("dst"), e.GP64()).(reg.GPVirtual)
	first := e.Load(e.Param("srcs"), e.GP64()).(reg.GPVirtual)
	end := e.Load(e.Param("n"), e.GP64()).(reg.GPVirtual)
	at := e.Load(e.Param("from"), e.GP64()).(reg.GPVirtual)
	to := e.Load(e.Param("to"), e.GP64()).(reg.GPVirtual)
	e.IMUL3Q(operand.U8(sliceSize), end, end)
	e.ADDQ(first, end)
	e.prepare(k.shape.constants(e))
	e.prepare(k.method.constants(e))

	src, next := e.GP64(), e.GP64()
	body := func(step int) {
		e.MOVQ(operand.Mem{Base: first}, src)
		e.LEAQ(operand.Mem{Base: first, Disp: sliceSize}, next)
		acc := k.shape.load(e, step, src, at)
		others := e.label("operand")
		e.Label(others)
		e.MOVQ(operand.Mem{Base: next}, src)
		e.ADDQ(operand.U8(sliceSize), next)
		k.shape.combine(e, k.method, acc, src, at)
		e.CMPQ(next, end)
		e.JB(operand.LabelRef(others))
		k.shape.store(e, acc, dst, at)
	}
	e.loops(at, to, k.shape.block(e), body)
	e.VZEROUPPER()
	e.RET()
}

// divide writes the kernel that divides bytes from to to.
func (e *emitter) divide(q quotient) {
	e.begin(q.Name(), "func(dst *byte, by "+q.Wide+", from, to int)")
	dst := e.Load(e.Param("dst"), e.GP64()).(reg.GPVirtual)
	at := e.Load(e.Param("from"), e.GP64()).(reg.GPVirtual)
	to := e.Load(e.Param("to"), e.GP64()).(reg.GPVirtual)
	by, err := e.Param("by").Resolve()
	if err != nil {
		panic(err)
	}
	d := e.vec()
	if q.Wide == "float64" {
		e.VBROADCASTSD(by.Addr, d)
	} else {
		e.VBROADCASTSS(by.Addr, d)
	}
	e.prepare(q.shape.constants(e))
	e.loops(at, to, line, func(step int) {
		acc := q.shape.load(e, step, dst, at)
		for _, a := range acc {
			q.method(e, d, a)
		}
		q.shape.store(e, acc, dst, at)
	})
	e.VZEROUPPER()
	e.RET()
}

// loops repeats body for whole blocks from at to to, then for lines.
func (e *emitter) loops(at, to reg.GPVirtual, block int, body func(step int)) {
	steps := []int{block, line}
	if block == line {
		steps = steps[:1]
	}
	limit := e.GP64()
	for _, step := range steps {
		top, done := e.label("bytes"), e.label("done")
		e.Label(top)
		e.LEAQ(operand.Mem{Base: at, Disp: step}, limit)
		e.CMPQ(limit, to)
		e.JG(operand.LabelRef(done))
		body(step)
		e.ADDQ(operand.U32(step), at) //nolint:gosec // a few lines
		e.JMP(operand.LabelRef(top))
		e.Label(done)
	}
}
