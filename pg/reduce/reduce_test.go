package reduce

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// levels are those that this CPU has.
func levels() []level {
	var list []level
	for l := plainGo; l <= best(); l++ {
		list = append(list, l)
	}
	return list
}

// use has a level used until the test ends.
func use(tb testing.TB, l level) {
	tb.Helper()
	before := current
	current = l
	tb.Cleanup(func() { current = before })
}

// pair is an op with a dtype that has it.
type pair struct {
	op Op
	dt DType
}

func (p pair) String() string { return fmt.Sprintf("%v of %v", p.op, p.dt) }

// pairs are all there are.
func pairs() []pair {
	var list []pair
	for dt := F32; dt.Valid(); dt++ {
		for op := Sum; op.Valid(); op++ {
			if Check(op, dt) == nil {
				list = append(list, pair{op, dt})
			}
		}
	}
	return list
}

// arena is memory of which a test has parts at any address, and sees whether what is beside them is left alone.
type arena struct{ memory, before []byte }

func newArena(rng *rand.Rand, size int) *arena {
	var some [64]byte
	for i := range some {
		some[i] = byte(rng.Uint32())
	}
	a := &arena{memory: bytes.Repeat(some[:], size/len(some)+1)[:size]}
	a.before = bytes.Clone(a.memory)
	return a
}

// take gives the bytes from off on, with a copy of content in them.
func (a *arena) take(off int, content []byte) []byte {
	copy(a.before[off:], content)
	return append(a.memory[off:off:off+len(content)], content...)
}

// expect is that everything is as before but for the bytes from off on.
func (a *arena) expect(t *testing.T, off int, content []byte, msg string, args ...any) {
	t.Helper()
	copy(a.before[off:], content)
	if !bytes.Equal(a.before, a.memory) {
		i := 0
		for a.before[i] == a.memory[i] {
			i++
		}
		require.Failf(t, "wrong bytes", msg+": byte %d of %d, want % x, got % x", append(args, i-off, len(content),
			a.before[max(0, i-8):min(i+8, len(a.before))], a.memory[max(0, i-8):min(i+8, len(a.memory))])...)
	}
}

// TestEveryLengthAtAnyAddress compares every op of every dtype with the reference, at every level, for lengths that fill no
// vector, some, blocks of them, and each rest.
func TestEveryLengthAtAnyAddress(t *testing.T) {
	const most, operands = 300, 17
	for _, p := range pairs() {
		rng := rand.New(rand.NewPCG(uint64(p.op), uint64(p.dt)))
		size := p.dt.Size()
		arrays := make([][]byte, operands)
		for k := range arrays {
			arrays[k] = randomArray(rng, p.dt, most)
		}
		for _, n := range []int{1, 2, 3, 8, operands} {
			want := referenceArray(p.op, p.dt, arrays[:n]...)
			for _, l := range levels() {
				use(t, l)
				for length := range most + 1 {
					if n != 2 && length%7 != 0 && length != most-1 {
						continue
					}
					first := rng.IntN(most-length+1) * size
					bytesLen := length * size
					memory := newArena(rng, bytesLen+128)
					off := rng.IntN(65)
					dst := memory.take(off, make([]byte, bytesLen))
					srcs := make([][]byte, n)
					for k := range srcs {
						shift := rng.IntN(64)
						srcs[k] = append(make([]byte, shift, shift+bytesLen), arrays[k][first:first+bytesLen]...)[shift:]
					}
					Reduce(p.op, p.dt, dst, srcs...)
					memory.expect(t, off, want[first:first+bytesLen], "%v: %v, %d operands", l, p, n)
					for k := range srcs {
						require.True(t, bytes.Equal(arrays[k][first:first+bytesLen], srcs[k]), "%v: operand %d has changed", p, k)
					}
				}
			}
		}
	}
}

// TestLongArrays has kernels called several times, from an address on that is aligned or not, with rests at both ends.
func TestLongArrays(t *testing.T) {
	for _, p := range pairs() {
		rng := rand.New(rand.NewPCG(uint64(p.op), uint64(p.dt)))
		size := p.dt.Size()
		length := (stretch/size + 77) * size
		pattern := randomArray(rng, p.dt, 2*length/size/100)
		srcs := make([][]byte, 3)
		for k := range srcs {
			srcs[k] = bytes.Repeat(pattern[k*size:], 64)[:length]
		}
		use(t, plainGo)
		want := make([]byte, length)
		Reduce(p.op, p.dt, want, srcs...)
		for _, l := range levels()[1:] {
			use(t, l)
			for _, off := range []int{0, 1, 63 &^ (size - 1)} {
				memory := newArena(rng, length+128)
				Reduce(p.op, p.dt, memory.take(off, srcs[0]), srcs...)
				memory.expect(t, off, want, "%v: %v from %d on", l, p, off)
			}
		}
	}
}

func TestTheResultMayTakeAnOperandsPlace(t *testing.T) {
	const n, length = 4, 1000
	for _, p := range pairs() {
		rng := rand.New(rand.NewPCG(uint64(p.op), uint64(p.dt)))
		arrays := make([][]byte, n)
		for k := range arrays {
			arrays[k] = randomArray(rng, p.dt, length)
		}
		want := referenceArray(p.op, p.dt, arrays...)
		for _, l := range levels() {
			use(t, l)
			for place := range n {
				srcs := make([][]byte, n)
				for k := range srcs {
					srcs[k] = bytes.Clone(arrays[k])
				}
				Reduce(p.op, p.dt, srcs[place], srcs...)
				require.True(t, bytes.Equal(want, srcs[place]), "%v: %v in place of operand %d", l, p, place)
			}
			both := bytes.Clone(arrays[0])
			Reduce(p.op, p.dt, both, both, both)
			require.True(t, bytes.Equal(referenceArray(p.op, p.dt, arrays[0], arrays[0]), both), "%v: %v with itself", l, p)
		}
	}
}

// TestEveryHalf has every value of the formats of two bytes widened and rounded, with others of any size.
func TestEveryHalf(t *testing.T) {
	const values = 1 << 16
	all := make([]byte, 2*values)
	for i := range values {
		setBits(all, 2, i, uint64(i))
	}
	for _, dt := range []DType{F16, BF16} {
		rng := rand.New(rand.NewPCG(5, 6))
		for _, op := range []Op{Sum, Prod, Min, Max} {
			other := randomArray(rng, dt, values)
			want := referenceArray(op, dt, all, other)
			got := make([]byte, len(all))
			for _, l := range levels() {
				use(t, l)
				Reduce(op, dt, got, all, other)
				require.True(t, bytes.Equal(want, got), "%v: %v of %v", l, op, dt)
			}
		}
	}
}

// TestHalvesAreRoundedOnce takes sums that come out differently when they are rounded after each operand.
func TestHalvesAreRoundedOnce(t *testing.T) {
	for _, l := range levels() {
		use(t, l)
		for dt, places := range map[DType]int{F16: 11, BF16: 8} {
			f := formats[dt]
			one, tiny := f.bits(1), f.bits(1/float64(int(1)<<places)) // half of one's last place: a tie, which goes to one
			array := func(bits uint64) []byte {
				b := make([]byte, 128)
				for i := range 64 {
					setBits(b, 2, i, bits)
				}
				return b
			}
			got := make([]byte, 128)
			Reduce(Sum, dt, got, array(one), array(tiny), array(tiny))
			require.Equal(t, array(f.bits(1+2/float64(int(1)<<places))), got, "%v: %v", l, dt)
			Reduce(Sum, dt, got, array(one), array(tiny))
			require.Equal(t, array(one), got, "%v: %v", l, dt)
		}
	}
}

func TestDivide(t *testing.T) {
	const length = 999
	for dt := F32; dt.Valid(); dt++ {
		if Check(Avg, dt) != nil {
			continue
		}
		rng := rand.New(rand.NewPCG(7, uint64(dt)))
		size := dt.Size()
		for _, n := range []int{1, 2, 3, 7, 64, 127, 128, 129, 200, 255, 256, 1000, 40_000, 70_000} {
			array := randomArray(rng, dt, length)
			want := make([]byte, len(array))
			for i := range length {
				setBits(want, size, i, average(dt, bitsAt(array, size, i), n))
			}
			for _, l := range levels() {
				use(t, l)
				for _, count := range []int{length, length - 1, 31, 1, 0} {
					memory := newArena(rng, len(array)+64)
					off := rng.IntN(64)
					Divide(dt, memory.take(off, array[:count*size]), n)
					memory.expect(t, off, want[:count*size], "%v: %v by %d", l, dt, n)
				}
			}
		}
	}
}

func TestAverageIsASumAndADivision(t *testing.T) {
	dst := []byte{200, 100, 3, 0}
	Reduce(Avg, U8, dst, dst, []byte{10, 100, 4, 1}, []byte{0, 55, 1, 1})
	require.Equal(t, []byte{210, 255, 8, 2}, dst)
	Divide(U8, dst, 3)
	require.Equal(t, []byte{70, 85, 2, 0}, dst)
	negative := []byte{0xf9, 0xff} // -7, -1
	Divide(I8, negative, 2)
	require.Equal(t, []byte{0xfd, 0}, negative, "towards zero")
}

func TestNothingIsAllocated(t *testing.T) {
	a, b, c := make([]byte, 1<<10+8), make([]byte, 1<<10+8), make([]byte, 1<<10+8)
	for _, l := range levels() {
		use(t, l)
		for _, p := range pairs() {
			require.Zero(t, testing.AllocsPerRun(10, func() {
				Reduce(p.op, p.dt, a, a, b, c)
				Reduce(p.op, p.dt, a, b)
				if p.op == Avg {
					Divide(p.dt, a, 3)
				}
			}), "%v: %v", l, p)
		}
	}
}

func TestMisuse(t *testing.T) {
	two, four := make([]byte, 2), make([]byte, 4)
	require.PanicsWithError(t, (&UnsupportedError{Bxor, F32}).Error(), func() { Reduce(Bxor, F32, four, four, four) })
	require.PanicsWithValue(t, "reduce: 2 bytes are no array of float32", func() { Reduce(Sum, F32, two, two) })
	require.PanicsWithValue(t, "reduce: operand 1 has 2 bytes, the result 4", func() { Reduce(Sum, F32, four, four, two) })
	require.PanicsWithValue(t, "reduce: no operands", func() { Reduce(Sum, F32, four) })
	require.PanicsWithValue(t, "reduce: an average over 0 operands", func() { Divide(F32, four, 0) })
	require.PanicsWithError(t, (&UnsupportedError{Avg, Bool}).Error(), func() { Divide(Bool, four, 2) })
}

// FuzzReduce takes operands of any bits, at any address, and compares every level with the reference.
func FuzzReduce(f *testing.F) {
	for i, p := range pairs() {
		rng := rand.New(rand.NewPCG(9, uint64(i)))
		f.Add(uint8(p.op), uint8(p.dt), uint8(2+i%3), uint8(i), randomArray(rng, p.dt, 40*(2+i%3)+i))
	}
	f.Fuzz(func(t *testing.T, rawOp, rawType, rawN, off uint8, content []byte) {
		op, dt, n := Op(rawOp), DType(rawType), int(rawN%6)+1
		if Check(op, dt) != nil {
			t.Skip()
		}
		length := len(content) / n / dt.Size() * dt.Size()
		srcs := make([][]byte, n)
		for k := range srcs {
			srcs[k] = content[k*length:][:length]
		}
		want := referenceArray(op, dt, srcs...)
		rng := rand.New(rand.NewPCG(1, 1))
		for _, l := range levels() {
			use(t, l)
			memory := newArena(rng, length+256)
			Reduce(op, dt, memory.take(int(off), make([]byte, length)), srcs...)
			memory.expect(t, int(off), want, "%v: %v of %v, %d operands", l, op, dt, n)
		}
	})
}
