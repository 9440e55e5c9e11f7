package main

import (
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// method is how accumulators are combined: it sets acc to acc op next, which is memory or a register.
type method struct {
	patterns func(e *emitter) []uint64 // the constants that it needs
	apply    func(e *emitter, next operand.Op, acc reg.VecVirtual)
}

func (m method) constants(e *emitter) []uint64 {
	if m.patterns == nil {
		return nil
	}
	return m.patterns(e)
}

// direct is one instruction. The accumulator is the instruction's first operand, whose NaN goes before the second's.
func direct(instruction func(*emitter, ...operand.Op)) method {
	return method{apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) { instruction(e, next, acc, acc) }}
}

// register loads an operand that is memory.
func (e *emitter) register(x operand.Op) reg.VecVirtual {
	if v, ok := x.(reg.VecVirtual); ok {
		return v
	}
	v := e.vec()
	e.VMOVUPS(x, v)
	return v
}

// Predicates of VCMPPS and VCMPPD: whether there is a NaN among the operands.
const (
	unordered = 3
	ordered   = 7
)

// extreme32 is the least or greatest of float32. The instruction gives the second operand if there is a NaN or if both
// are equal; so it is left out where the accumulator is a NaN.
func extreme32(instruction func(*emitter, ...operand.Op)) method {
	return method{apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		if e.wide() {
			number := e.K()
			e.VCMPPS(operand.U8(ordered), acc, acc, number)
			instruction(e, next, acc, number, acc)
			return
		}
		nan, extreme := e.vec(), e.vec()
		e.VCMPPS(operand.U8(unordered), acc, acc, nan)
		instruction(e, next, acc, extreme)
		e.VBLENDVPS(nan, acc, extreme, acc)
	}}
}

// extreme64 is the same for float64.
func extreme64(instruction func(*emitter, ...operand.Op)) method {
	return method{apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		if e.wide() {
			number := e.K()
			e.VCMPPD(operand.U8(ordered), acc, acc, number)
			instruction(e, next, acc, number, acc)
			return
		}
		nan, extreme := e.vec(), e.vec()
		e.VCMPPD(operand.U8(unordered), acc, acc, nan)
		instruction(e, next, acc, extreme)
		e.VBLENDVPD(nan, acc, extreme, acc)
	}}
}

// least64 is the lesser of int64: AVX-512's instruction, or a comparison.
func least64(wide method) method {
	return method{apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		if e.wide() {
			wide.apply(e, next, acc)
			return
		}
		x, greater := e.register(next), e.vec()
		e.VPCMPGTQ(x, acc, greater)
		e.VBLENDVPD(greater, x, acc, acc)
	}}
}

// greatest64 is the greater.
func greatest64(wide method) method {
	return method{apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		if e.wide() {
			wide.apply(e, next, acc)
			return
		}
		x, greater := e.register(next), e.vec()
		e.VPCMPGTQ(x, acc, greater)
		e.VBLENDVPD(greater, acc, x, acc)
	}}
}

// multiply8 multiplies bytes as words: those at even places as they are, which leaves the product's low byte in its place, those
// at odd places with one of them shifted down.
var multiply8 = method{
	patterns: func(*emitter) []uint64 { return []uint64{repeat16(0xff00), repeat16(0x00ff)} },
	apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		x, odd := e.register(next), e.vec()
		e.VPSRLW(operand.U8(8), acc, odd)
		e.VPMULLW(x, acc, acc)
		e.VANDPS(e.constant(repeat16(0x00ff)), acc, acc)
		upper := e.vec()
		e.VANDPS(e.constant(repeat16(0xff00)), x, upper)
		e.VPMULLW(upper, odd, odd)
		e.VORPS(odd, acc, acc)
	},
}

// multiply64 is AVX-512's instruction, or three products of 32 bits: the two that cross are worth 2^32.
var multiply64 = method{
	apply: func(e *emitter, next operand.Op, acc reg.VecVirtual) {
		if e.wide() {
			e.VPMULLQ(next, acc, acc)
			return
		}
		x, crossed, upper := e.register(next), e.vec(), e.vec()
		e.VPSRLQ(operand.U8(32), acc, crossed)
		e.VPMULUDQ(x, crossed, crossed)
		e.VPSRLQ(operand.U8(32), x, upper)
		e.VPMULUDQ(upper, acc, upper)
		e.VPADDQ(upper, crossed, crossed)
		e.VPSLLQ(operand.U8(32), crossed, crossed)
		e.VPMULUDQ(x, acc, acc)
		e.VPADDQ(crossed, acc, acc)
	},
}
