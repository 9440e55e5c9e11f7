package reduce

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"
)

// The reference: what doc.go says, one element at a time, in other ways than the package's own. Floats are numbers of float64
// or big.Float that are rounded by arithmetic on them, not on their bits; integers are big.

// format is a binary floating-point format.
type format struct {
	size     int // bytes
	exponent int // bits
	mantissa int // bits, without the hidden one
}

var formats = map[DType]format{F32: {4, 8, 23}, F64: {8, 11, 52}, F16: {2, 5, 10}, BF16: {2, 8, 7}}

func (f format) bias() int        { return 1<<(f.exponent-1) - 1 }
func (f format) infinity() uint64 { return (1<<f.exponent - 1) << f.mantissa }
func (f format) sign() uint64     { return 1 << (f.exponent + f.mantissa) }
func (f format) quiet() uint64    { return 1 << (f.mantissa - 1) }

func (f format) isNaN(bits uint64) bool { return bits&^f.sign() > f.infinity() }

// value is what the bits of a number stand for.
func (f format) value(bits uint64) float64 {
	exponent := int(bits &^ f.sign() >> f.mantissa)
	mantissa := float64(bits & (1<<f.mantissa - 1))
	v := math.Ldexp(mantissa+float64(uint64(1)<<f.mantissa), exponent-f.bias()-f.mantissa)
	switch {
	case bits&^f.sign() == f.infinity():
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(mantissa, 1-f.bias()-f.mantissa)
	}
	if bits&f.sign() != 0 {
		v = -v
	}
	return v
}

// bits are those of the number nearest to v, of two the even one.
func (f format) bits(v float64) uint64 {
	var sign uint64
	if math.Signbit(v) {
		sign, v = f.sign(), -v
	}
	if v == 0 || math.IsInf(v, 0) {
		if v != 0 {
			sign |= f.infinity()
		}
		return sign
	}
	_, e := math.Frexp(v)                     // v is in [2^(e-1), 2^e)
	unit := max(e-1, 1-f.bias()) - f.mantissa // the last place is worth 2^unit
	places := math.RoundToEven(math.Ldexp(v, -unit))
	// As an integer the bits count last places from zero on, through all exponents.
	return sign | min(f.infinity(), uint64(unit+f.mantissa+f.bias()-1)<<f.mantissa+uint64(places))
}

// widen gives the bits of a half as a float32.
func (f format) widen(dt DType, bits uint64) uint64 {
	wide := formats[F32]
	if !f.isNaN(bits) {
		return wide.bits(f.value(bits))
	}
	bits = bits&f.sign()<<(wide.exponent+wide.mantissa-f.exponent-f.mantissa) | wide.infinity() |
		bits&(1<<f.mantissa-1)<<(wide.mantissa-f.mantissa)
	if dt == F16 {
		bits |= wide.quiet()
	}
	return bits
}

// narrow rounds the bits of a float32 to a half.
func (f format) narrow(bits uint64) uint64 {
	wide := formats[F32]
	if !wide.isNaN(bits) {
		return f.bits(wide.value(bits))
	}
	return bits&wide.sign()>>(wide.exponent+wide.mantissa-f.exponent-f.mantissa) | f.infinity() |
		bits&(1<<wide.mantissa-1)>>(wide.mantissa-f.mantissa)
}

// two combines the bits of two numbers of the format.
func (f format) two(op Op, a, b uint64) uint64 {
	switch op {
	case Min, Max:
		x, y := f.value(a), f.value(b)
		if f.isNaN(a) || !f.isNaN(b) && (op == Min && x < y || op == Max && x > y) {
			return a
		}
		return b
	default:
	}
	switch {
	case f.isNaN(a):
		return a | f.quiet()
	case f.isNaN(b):
		return b | f.quiet()
	}
	x, y := f.value(a), f.value(b)
	special := math.IsInf(x, 0) || math.IsInf(y, 0)
	if special && (op == Sum && x == -y || op == Prod && (x == 0 || y == 0)) {
		return f.sign() | f.infinity() | f.quiet()
	}
	switch {
	case special && op == Sum:
		return f.bits(x + y)
	case special:
		return f.bits(x * y)
	}
	const exact = 4400 // bits: more than a sum or product of two float64 can take
	r := new(big.Float).SetPrec(exact)
	if op == Sum {
		r.Add(big.NewFloat(x), big.NewFloat(y))
	} else {
		r.Mul(big.NewFloat(x), big.NewFloat(y))
	}
	if f.size == 8 {
		v, _ := r.Float64()
		return math.Float64bits(v)
	}
	v, _ := r.Float64() // exact, or with so many bits that it is rounded again as if it were
	return f.bits(v)
}

// integer combines two integers of size bytes.
func integer(op Op, size int, signed bool, a, b uint64) uint64 {
	number := func(bits uint64) *big.Int {
		n := new(big.Int).SetUint64(bits)
		if signed && bits>>(8*size-1) != 0 {
			n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(8*size)))
		}
		return n
	}
	x, y, r := number(a), number(b), new(big.Int)
	switch op {
	case Sum:
		r.Add(x, y)
	case Prod:
		r.Mul(x, y)
	case Min, Max:
		r = x
		if c := x.Cmp(y); op == Min && c > 0 || op == Max && c < 0 {
			r = y
		}
	case Band:
		r.And(x, y)
	case Bor:
		r.Or(x, y)
	case Bxor:
		r.Xor(x, y)
	default:
		panic(op)
	}
	modulus := new(big.Int).Lsh(big.NewInt(1), uint(8*size))
	return r.Mod(r, modulus).Uint64()
}

// truth combines two bools.
func truth(op Op, a, b bool) bool {
	switch op {
	case Sum, Max, Bor:
		return a || b
	case Bxor:
		return a != b
	default:
		return a && b
	}
}

func isSigned(dt DType) bool { return dt >= I8 && dt <= I64 }

// reference is one element of Reduce's result, from the operands' elements as bits.
func reference(op Op, dt DType, operands []uint64) uint64 {
	if op == Avg {
		op = Sum
	}
	acc := operands[0]
	f, float := formats[dt]
	switch {
	case dt == Bool:
		result := acc != 0
		for _, x := range operands[1:] {
			result = truth(op, result, x != 0)
		}
		if result {
			return 1
		}
		return 0
	case len(operands) == 1:
		return acc
	case float && f.size == 2:
		acc = f.widen(dt, acc)
		for _, x := range operands[1:] {
			acc = formats[F32].two(op, acc, f.widen(dt, x))
		}
		return f.narrow(acc)
	case float:
		for _, x := range operands[1:] {
			acc = f.two(op, acc, x)
		}
	default:
		for _, x := range operands[1:] {
			acc = integer(op, dt.Size(), isSigned(dt), acc, x)
		}
	}
	return acc
}

// average is one element divided by n.
func average(dt DType, bits uint64, n int) uint64 {
	size := dt.Size()
	f, float := formats[dt]
	switch {
	case float && size == 2:
		wide := f.widen(dt, bits)
		if formats[F32].isNaN(wide) {
			return f.narrow(wide | formats[F32].quiet())
		}
		return f.narrow(formats[F32].bits(formats[F32].value(wide) / float64(n)))
	case float && f.isNaN(bits):
		return bits | f.quiet()
	case float:
		return f.bits(f.value(bits) / float64(n))
	case isSigned(dt):
		shift := 64 - 8*size
		return uint64(int64(bits<<shift)>>shift/int64(n)) << shift >> shift
	}
	return bits / uint64(n)
}

// bitsAt is element i of an array.
func bitsAt(b []byte, size, i int) uint64 {
	var word [8]byte
	copy(word[:], b[i*size:(i+1)*size])
	return binary.LittleEndian.Uint64(word[:])
}

func setBits(b []byte, size, i int, bits uint64) {
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], bits)
	copy(b[i*size:(i+1)*size], word[:])
}

// referenceArray is Reduce's result.
func referenceArray(op Op, dt DType, srcs ...[]byte) []byte {
	size := dt.Size()
	dst := make([]byte, len(srcs[0]))
	operands := make([]uint64, len(srcs))
	for i := range len(dst) / size {
		for k, src := range srcs {
			operands[k] = bitsAt(src, size, i)
		}
		setBits(dst, size, i, reference(op, dt, operands))
	}
	return dst
}

// randomArray gives n elements: any bits, numbers near one another, small ones, and what is special.
func randomArray(rng *rand.Rand, dt DType, n int) []byte {
	size := dt.Size()
	b := make([]byte, n*size)
	for i := range n {
		bits := rng.Uint64()
		f, float := formats[dt]
		switch kind := rng.IntN(6); {
		case dt == Bool:
			bits &= bits >> 8 & bits >> 16 & bits >> 24
		case kind == 0:
		case float && kind == 1:
			special := []uint64{
				0, 1, f.infinity(), f.infinity() - 1, f.infinity() + 1, f.infinity() | f.quiet(), 1 << f.mantissa,
				1<<f.mantissa - 1, f.sign() - 1, f.bits(1),
			}
			bits = special[rng.IntN(len(special))] | bits&f.sign()
		case float && kind == 2: // integers, whose sums have ties
			bits = f.bits(float64(rng.IntN(1<<12) - 1<<11))
		case float:
			bits = f.bits(rng.NormFloat64())
		case kind == 1:
			bits = []uint64{0, 1, ^uint64(0), 1 << (8*size - 1), 1<<(8*size-1) - 1}[rng.IntN(5)]
		case kind == 2:
			bits = uint64(rng.IntN(7) - 3)
		}
		setBits(b, size, i, bits)
	}
	return b
}
