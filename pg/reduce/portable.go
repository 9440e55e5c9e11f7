package reduce

import (
	"encoding/binary"
	"math"
	"unsafe"
)

// Plain Go, for CPUs without kernels and for what fills no vector. It works on aligned blocks on the stack, so memory may lie
// at any address, and dst may be an operand's.

// blockBytes is the size of a block: enough that its loops outweigh what is around them, and little to clear for a short array.
const blockBytes = 512

// block holds elements as they are combined: float16 and bfloat16 as float32, bools as 0 or 1, all others as they are.
type block [blockBytes / 8]uint64

// fold reduces bytes from to to by an op that resolve gave. It has no operands passed on to functions that are not
// known when it is compiled, which keeps them, and the blocks, off the heap.
func fold(op Op, dt DType, dst []byte, srcs [][]byte, from, to int) {
	var acc, next block
	size, wide := dt.Size(), widened(dt)
	step := blockBytes / wide.Size()
	for at := from; at < to; at += step * size {
		n := min(step, (to-at)/size)
		load(dt, &acc, srcs[0][at:], n)
		for _, src := range srcs[1:] {
			load(dt, &next, src[at:], n)
			combine(op, wide, &acc, &next, n)
		}
		store(dt, dst[at:], &acc, n)
	}
}

// divide is [Divide].
func divide(dt DType, dst []byte, by int) {
	var acc block
	size, wide := dt.Size(), widened(dt)
	step := blockBytes / wide.Size()
	for at := 0; at < len(dst); at += step * size {
		n := min(step, (len(dst)-at)/size)
		load(dt, &acc, dst[at:], n)
		quotient(wide, &acc, by, n)
		store(dt, dst[at:], &acc, n)
	}
}

// widened is the dtype as which elements are combined.
func widened(dt DType) DType {
	if dt == F16 || dt == BF16 {
		return F32
	}
	return dt
}

// elements are the first n elements of a block.
func elements[T any](b *block, n int) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(b)), n) //nolint:gosec // a block is aligned for any T, and as long as its callers know
}

// load sets the first n elements of a block.
func load(dt DType, to *block, from []byte, n int) {
	switch dt {
	case F16:
		for i, w := 0, elements[uint32](to, n); i < len(w); i++ {
			w[i] = f16ToF32(binary.NativeEndian.Uint16(from[2*i:]))
		}
	case BF16:
		for i, w := 0, elements[uint32](to, n); i < len(w); i++ {
			w[i] = uint32(binary.NativeEndian.Uint16(from[2*i:])) << 16
		}
	case Bool:
		for i, w := 0, elements[uint8](to, n); i < len(w); i++ {
			w[i] = min(from[i], 1)
		}
	default:
		copy(elements[byte](to, n*dt.Size()), from)
	}
}

// store is the way back.
func store(dt DType, to []byte, from *block, n int) {
	switch dt {
	case F16:
		for i, w := range elements[uint32](from, n) {
			binary.NativeEndian.PutUint16(to[2*i:], f32ToF16(w))
		}
	case BF16:
		for i, w := range elements[uint32](from, n) {
			binary.NativeEndian.PutUint16(to[2*i:], f32ToBF16(w))
		}
	default:
		copy(to, elements[byte](from, n*dt.Size()))
	}
}

// combine sets the first n elements of acc to acc op next.
func combine(op Op, dt DType, acc, next *block, n int) {
	switch dt {
	case F32:
		combineFloats[float32, uint32](op, acc, next, n)
	case F64:
		combineFloats[float64, uint64](op, acc, next, n)
	case I8:
		combineIntegers[int8](op, acc, next, n)
	case I16:
		combineIntegers[int16](op, acc, next, n)
	case I32:
		combineIntegers[int32](op, acc, next, n)
	case I64:
		combineIntegers[int64](op, acc, next, n)
	case U8, Bool:
		combineIntegers[uint8](op, acc, next, n)
	case U16:
		combineIntegers[uint16](op, acc, next, n)
	case U32:
		combineIntegers[uint32](op, acc, next, n)
	case U64:
		combineIntegers[uint64](op, acc, next, n)
	default:
		panic(&UnsupportedError{Op: op, DType: dt})
	}
}

func combineFloats[F float32 | float64, U uint32 | uint64](op Op, acc, next *block, n int) {
	switch op {
	case Sum:
		x, y := elements[F](acc, n), elements[F](next, n)
		for i, a := range x {
			if x[i] += y[i]; isNaN(x[i]) {
				x[i] = nanOf(a, y[i])
			}
		}
	case Prod:
		x, y := elements[F](acc, n), elements[F](next, n)
		for i, a := range x {
			if x[i] *= y[i]; isNaN(x[i]) {
				x[i] = nanOf(a, y[i])
			}
		}
	case Min:
		extremes[F, U](-1, acc, next, n)
	case Max:
		extremes[F, U](1, acc, next, n)
	default:
		panic(&UnsupportedError{Op: op, DType: F32})
	}
}

// extremes sets acc to the greater elements, or the lesser ones if sign is -1. It chooses among their bits, which takes no
// branch: of random numbers a CPU guesses every other one wrong.
func extremes[F float32 | float64, U uint32 | uint64](sign F, acc, next *block, n int) {
	x, y := elements[F](acc, n), elements[F](next, n)
	a, b := elements[U](acc, n), elements[U](next, n)
	for i, kept := range a {
		u, v, r := x[i], y[i], b[i]
		if sign*u > sign*v {
			r = kept
		}
		if isNaN(u) {
			r = kept
		}
		a[i] = r
	}
}

// isNaN reports whether x is a NaN, which equals nothing.
func isNaN[T float32 | float64](x T) bool {
	return x != x //nolint:gocritic // as it says
}

// nanOf is the NaN that comes of an operation on a and b: the first that is one, quieted, or x86's own. Go does not say which: it
// depends on the CPU, and on which operand the compiler has put first.
func nanOf[T float32 | float64](a, b T) T {
	const own32, quiet32, own64, quiet64 = 0xffc00000, 1 << 22, 0xfff8 << 48, 1 << 51
	if !isNaN(a) {
		a = b
	}
	switch single := unsafe.Sizeof(a) == 4; {
	case single && isNaN(a):
		return T(math.Float32frombits(math.Float32bits(float32(a)) | quiet32))
	case single:
		return T(math.Float32frombits(own32))
	case isNaN(a):
		return T(math.Float64frombits(math.Float64bits(float64(a)) | quiet64))
	}
	return T(math.Float64frombits(own64))
}

func combineIntegers[T int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64](op Op, to, from *block, n int) {
	acc, next := elements[T](to, n), elements[T](from, n)
	switch op {
	case Sum:
		for i := range acc {
			acc[i] += next[i]
		}
	case Prod:
		for i := range acc {
			acc[i] *= next[i]
		}
	case Min:
		for i := range acc {
			acc[i] = min(acc[i], next[i])
		}
	case Max:
		for i := range acc {
			acc[i] = max(acc[i], next[i])
		}
	case Band:
		for i := range acc {
			acc[i] &= next[i]
		}
	case Bor:
		for i := range acc {
			acc[i] |= next[i]
		}
	case Bxor:
		for i := range acc {
			acc[i] ^= next[i]
		}
	default:
		panic("reduce: an average is a sum here")
	}
}

// quotient divides the first n elements of acc.
func quotient(dt DType, acc *block, by, n int) {
	switch dt {
	case F32:
		divideFloats[float32](acc, by, n)
	case F64:
		divideFloats[float64](acc, by, n)
	case I8:
		divideSigned[int8](acc, by, n)
	case I16:
		divideSigned[int16](acc, by, n)
	case I32:
		divideSigned[int32](acc, by, n)
	case I64:
		divideSigned[int64](acc, by, n)
	case U8:
		divideUnsigned[uint8](acc, by, n)
	case U16:
		divideUnsigned[uint16](acc, by, n)
	case U32:
		divideUnsigned[uint32](acc, by, n)
	case U64:
		divideUnsigned[uint64](acc, by, n)
	default:
		panic(&UnsupportedError{Op: Avg, DType: dt})
	}
}

func divideFloats[T float32 | float64](b *block, by, n int) {
	acc := elements[T](b, n)
	for i, a := range acc {
		if acc[i] /= T(by); isNaN(acc[i]) {
			acc[i] = nanOf(a, a)
		}
	}
}

// divideSigned truncates towards zero.
func divideSigned[T int8 | int16 | int32 | int64](b *block, by, n int) {
	acc := elements[T](b, n)
	for i := range acc {
		acc[i] = T(int64(acc[i]) / int64(by))
	}
}

func divideUnsigned[T uint8 | uint16 | uint32 | uint64](b *block, by, n int) {
	acc := elements[T](b, n)
	d := uint64(by) //nolint:gosec // positive
	for i := range acc {
		acc[i] = T(uint64(acc[i]) / d)
	}
}

// f16ToF32 widens the bits of a float16, exactly. A NaN is quieted, as VCVTPH2PS does.
func f16ToF32(h uint16) uint32 {
	sign, exponent, mantissa := uint32(h&0x8000)<<16, uint32(h>>10)&0x1f, uint32(h&0x3ff)
	switch {
	case exponent == 0: // zero, or mantissa * 2^-24
		return sign | math.Float32bits(float32(mantissa)*(1.0/(1<<24)))
	case exponent == 0x1f && mantissa != 0:
		return sign | 0x7fc00000 | mantissa<<13
	case exponent == 0x1f:
		return sign | 0x7f800000
	}
	return sign | (exponent+127-15)<<23 | mantissa<<13
}

// f32ToF16 rounds to nearest even, as VCVTPS2PH does. A NaN is quieted and keeps the payload's upper bits.
func f32ToF16(f uint32) uint16 {
	sign, f := uint16(f>>16)&0x8000, f&0x7fffffff
	switch {
	case f > 0x7f800000:
		return sign | 0x7e00 | uint16(f>>13)&0x1ff //nolint:gosec // masked
	case f >= 0x47800000: // 65536 and above; what is between 65520 and that carries into infinity below
		return sign | 0x7c00
	case f >= 0x38800000: // 2^-14, the least normal number
		f -= (127 - 15) << 23
		return sign | uint16((f+0xfff+f>>13&1)>>13)
	}
	// In units of 2^-24. Adding 2^23 leaves an integer in the mantissa, which the CPU has rounded to nearest even.
	units := math.Float32frombits(f)*(1<<24) + 1<<23
	return sign | uint16(math.Float32bits(units)&0x7ff)
}

// f32ToBF16 rounds to nearest even. A NaN here has come from a bfloat16 or is the one that x86 makes: its lower half is zero, and
// it stays as it is.
func f32ToBF16(f uint32) uint16 {
	return uint16((f + 0x7fff + f>>16&1) >> 16)
}
