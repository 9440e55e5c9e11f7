package main

import (
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// shape is how elements get from memory into registers, as what they are combined, and back.
type shape struct {
	// parts is how many registers the elements of span(e) bytes of memory take.
	parts int
	// halved: a register's elements take half as many bytes of memory.
	halved bool
	// patterns are the constants that it needs.
	patterns func(e *emitter) []uint64
	// get loads parts registers. Without it memory is combined as it is.
	get func(e *emitter, m operand.Mem) []reg.VecVirtual
	// put stores them, and may change them.
	put func(e *emitter, parts []reg.VecVirtual, m operand.Mem)
}

// span is how many bytes of memory get and put take.
func (s shape) span(e *emitter) int {
	if s.halved {
		return e.width / 2
	}
	return e.width
}

// block is how many bytes of memory fill the accumulators.
func (s shape) block(e *emitter) int { return accumulators / s.parts * s.span(e) }

func (s shape) constants(e *emitter) []uint64 {
	if s.patterns == nil {
		return nil
	}
	return s.patterns(e)
}

// load gives accumulators with step bytes of memory.
func (s shape) load(e *emitter, step int, base, at reg.GPVirtual) []reg.VecVirtual {
	var acc []reg.VecVirtual
	for off := 0; off < step; off += s.span(e) {
		m := operand.Mem{Base: base, Index: at, Scale: 1, Disp: off}
		if s.get != nil {
			acc = append(acc, s.get(e, m)...)
			continue
		}
		v := e.vec()
		e.VMOVUPS(m, v)
		acc = append(acc, v)
	}
	return acc
}

// combine combines accumulators with as much memory.
func (s shape) combine(e *emitter, method method, acc []reg.VecVirtual, base, at reg.GPVirtual) {
	for i := 0; i < len(acc); i += s.parts {
		m := operand.Mem{Base: base, Index: at, Scale: 1, Disp: i / s.parts * s.span(e)}
		if s.get == nil {
			method.apply(e, m, acc[i])
			continue
		}
		for j, part := range s.get(e, m) {
			method.apply(e, part, acc[i+j])
		}
	}
}

// store stores the accumulators.
func (s shape) store(e *emitter, acc []reg.VecVirtual, base, at reg.GPVirtual) {
	for i := 0; i < len(acc); i += s.parts {
		m := operand.Mem{Base: base, Index: at, Scale: 1, Disp: i / s.parts * s.span(e)}
		if s.put != nil {
			s.put(e, acc[i:i+s.parts], m)
		} else {
			e.VMOVUPS(acc[i], m)
		}
	}
}

// plain elements are combined as they lie in memory.
var plain = shape{parts: 1}

// boolean is bytes of which any but zero is true: the lesser of the byte and 1.
var boolean = shape{
	parts:    1,
	patterns: func(*emitter) []uint64 { return []uint64{repeat8(1)} },
	get: func(e *emitter, m operand.Mem) []reg.VecVirtual {
		v := e.vec()
		e.VPMINUB(m, e.constant(repeat8(1)), v)
		return []reg.VecVirtual{v}
	},
}

// biased is uint64 with the upper bit inverted, which compares as int64 does: AVX2 compares nothing else. AVX-512 has no need.
var biased = shape{
	parts: 1,
	patterns: func(e *emitter) []uint64 {
		if e.wide() {
			return nil
		}
		return []uint64{1 << 63}
	},
	get: func(e *emitter, m operand.Mem) []reg.VecVirtual {
		v := e.vec()
		if e.wide() {
			e.VMOVUPS(m, v)
		} else {
			e.VXORPS(m, e.constant(1<<63), v)
		}
		return []reg.VecVirtual{v}
	},
	put: func(e *emitter, parts []reg.VecVirtual, m operand.Mem) {
		if !e.wide() {
			e.VXORPS(e.constant(1<<63), parts[0], parts[0])
		}
		e.VMOVUPS(parts[0], m)
	},
}

// float16 is widened by F16C's instructions.
var float16 = shape{
	parts:  1,
	halved: true,
	get: func(e *emitter, m operand.Mem) []reg.VecVirtual {
		v := e.vec()
		e.VCVTPH2PS(m, v)
		return []reg.VecVirtual{v}
	},
	put: func(e *emitter, parts []reg.VecVirtual, m operand.Mem) {
		const nearestEven = 0
		e.VCVTPS2PH(operand.U8(nearestEven), parts[0], m)
	},
}

// bfloat16 is the upper half of float32. Of each pair of them one is widened by clearing the other and one by a shift, into
// two registers, so none need be moved across a register. AVX512_BF16 is of no use: it takes denormal numbers for zero.
var bfloat16 = shape{
	parts: 2,
	patterns: func(e *emitter) []uint64 {
		if e.wide() {
			return []uint64{upperHalf, lowerHalf, repeat32(0x8000), repeat32(0xfffeffff)}
		}
		return []uint64{upperHalf, repeat32(1), repeat32(0x7fff)}
	},
	get: func(e *emitter, m operand.Mem) []reg.VecVirtual {
		odd, even := e.vec(), e.vec()
		if e.wide() {
			e.VPSLLD(operand.U8(16), m, even)
			e.VANDPS(m, e.constant(upperHalf), odd)
		} else {
			e.VMOVUPS(m, odd)
			e.VPSLLD(operand.U8(16), odd, even)
			e.VANDPS(odd, e.constant(upperHalf), odd)
		}
		return []reg.VecVirtual{even, odd}
	},
	put: func(e *emitter, parts []reg.VecVirtual, m operand.Mem) {
		even, odd := parts[0], parts[1]
		roundUpper(e, even)
		roundUpper(e, odd)
		e.VPSRLD(operand.U8(16), even, even)
		if e.wide() {
			const evenOrOddAndMask = 0xf8
			e.VPTERNLOGD(operand.U8(evenOrOddAndMask), e.constant(upperHalf), odd, even)
		} else {
			const oddWords = 0xaa
			e.VPBLENDW(operand.U8(oddWords), odd, even, even)
		}
		e.VMOVUPS(even, m)
	},
}

// roundUpper rounds to the upper half of each float32, to nearest even, and leaves anything in the lower one. A NaN has a
// lower half of zero here (it was a bfloat16, or is the one that the CPU makes) and stays as it is.
func roundUpper(e *emitter, v reg.VecVirtual) {
	if e.wide() {
		// Half of the last place is added; where that leaves nothing below, it was a tie, and the even one has the last bit clear.
		tie := e.K()
		e.VPADDD(e.constant(repeat32(0x8000)), v, v)
		e.VPTESTNMD(e.constant(lowerHalf), v, tie)
		e.VPANDD(e.constant(repeat32(0xfffeffff)), v, tie, v)
		return
	}
	last := e.vec()
	e.VPSRLD(operand.U8(16), v, last)
	e.VANDPS(e.constant(repeat32(1)), last, last)
	e.VPADDD(e.constant(repeat32(0x7fff)), last, last)
	e.VPADDD(last, v, v)
}

const (
	upperHalf = 0xffff0000_ffff0000
	lowerHalf = 0x0000ffff_0000ffff
)

func repeat8(x uint64) uint64  { return x * 0x01010101_01010101 }
func repeat16(x uint64) uint64 { return x * 0x00010001_00010001 }
func repeat32(x uint64) uint64 { return x * 0x00000001_00000001 }
