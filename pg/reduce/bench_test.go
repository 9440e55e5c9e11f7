package reduce

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// benchSizes are such that three arrays fit into a first-level cache (nearly), a second-level one, none that is a core's own, and
// none at all, on most machines.
var benchSizes = []int{16 << 10, 64 << 10, 1 << 20, 16 << 20}

// operands gives n arrays of a size, with ordinary numbers.
func operands(dt DType, n, size int) [][]byte {
	rng := rand.New(rand.NewPCG(1, 2))
	list := make([][]byte, n)
	for k := range list {
		list[k] = make([]byte, size)
		for i := range size / dt.Size() {
			bits := uint64(rng.IntN(100))
			if f, ok := formats[dt]; ok {
				bits = f.bits(rng.NormFloat64())
			}
			setBits(list[k], dt.Size(), i, bits)
		}
	}
	return list
}

// BenchmarkReduce counts the bytes of one array: what a reduction of n operands reads is n times that.
func BenchmarkReduce(b *testing.B) {
	for _, p := range []pair{{Sum, F32}, {Max, F32}, {Sum, F64}, {Sum, BF16}, {Max, BF16}, {Sum, F16}, {Sum, I64}, {Prod, I8}, {Min, U64}} {
		for _, size := range benchSizes {
			for _, n := range []int{2, 4, 8} {
				srcs := operands(p.dt, n, size)
				dst := make([]byte, size)
				for _, l := range levels() {
					b.Run(fmt.Sprintf("%v-%v/%dKiB/n=%d/%v", p.op, p.dt, size>>10, n, l), func(b *testing.B) {
						use(b, l)
						b.SetBytes(int64(size))
						for b.Loop() {
							Reduce(p.op, p.dt, dst, srcs...)
						}
					})
				}
			}
		}
	}
}

// BenchmarkMove is the bound: the same bytes read and written by memmove.
func BenchmarkMove(b *testing.B) {
	for _, size := range benchSizes {
		src, dst := operands(U8, 1, size)[0], make([]byte, size)
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				copy(dst, src)
			}
		})
	}
}

func BenchmarkDivide(b *testing.B) {
	for _, dt := range []DType{F32, BF16, F16, I32} {
		for _, size := range benchSizes {
			dst := operands(dt, 1, size)[0]
			for _, l := range levels() {
				b.Run(fmt.Sprintf("%v/%dKiB/%v", dt, size>>10, l), func(b *testing.B) {
					use(b, l)
					b.SetBytes(int64(size))
					for b.Loop() {
						Divide(dt, dst, 1)
					}
				})
			}
		}
	}
}
