package reduce

import "fmt"

// Reduce sets dst to srcs[0] op srcs[1] op ..., element by element. All have len(dst) bytes, a multiple of the dtype's size, at
// any address. dst may be the same memory as one of srcs; otherwise it must overlap none of them. One operand is copied.
//
// It panics if [Check] refuses op and dtype, if lengths differ, or if there are no operands: whoever calls it has checked that.
// It may be called concurrently and allocates nothing.
func Reduce(op Op, dt DType, dst []byte, srcs ...[]byte) {
	mustHave(op, dt, dst)
	if len(srcs) == 0 {
		panic("reduce: no operands")
	}
	for i, src := range srcs {
		if len(src) != len(dst) {
			panic(fmt.Sprintf("reduce: operand %d has %d bytes, the result %d", i, len(src), len(dst)))
		}
	}
	if len(srcs) == 1 {
		if dt != Bool {
			copy(dst, srcs[0])
			return
		}
		op, srcs = Bor, [][]byte{srcs[0], srcs[0]}
	}
	op = resolve(op, dt)
	first, end := foldLines(op, dt, dst, srcs)
	if first > 0 {
		fold(op, dt, dst, srcs, 0, first)
	}
	if end < len(dst) {
		fold(op, dt, dst, srcs, end, len(dst))
	}
}

// Divide ends an average over n operands: it divides every element of dst by n. Integers are truncated towards zero, floats
// divided truly, float16 and bfloat16 in float32. It panics if [Check] refuses Avg for the dtype, if the length is not a
// multiple of its size, or if n is not positive.
func Divide(dt DType, dst []byte, n int) {
	mustHave(Avg, dt, dst)
	if n <= 0 {
		panic(fmt.Sprintf("reduce: an average over %d operands", n))
	}
	first, end := divideLines(dt, dst, n)
	if first > 0 {
		divide(dt, dst[:first], n)
	}
	if end < len(dst) {
		divide(dt, dst[end:], n)
	}
}

// resolve gives the op as which another is done: Avg is a sum until it is divided, and of bool there are just the bitwise ops.
func resolve(op Op, dt DType) Op {
	if op == Avg {
		op = Sum
	}
	if dt == Bool {
		switch op {
		case Sum, Max:
			op = Bor
		case Prod, Min:
			op = Band
		default:
		}
	}
	return op
}

func mustHave(op Op, dt DType, dst []byte) {
	if err := Check(op, dt); err != nil {
		panic(err)
	}
	if len(dst)%dt.Size() != 0 {
		panic(fmt.Sprintf("reduce: %d bytes are no array of %v", len(dst), dt))
	}
}
