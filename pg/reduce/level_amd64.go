package reduce

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

//go:generate go -C asm run . ..

// best is the highest level of this CPU. AVX-512 is taken from CPUs on, Intel's Ice Lake and AMD's Zen 4, that have VBMI2: earlier
// ones slow down when they run it, and memory leaves them little to gain.
func best() level {
	x := &cpu.X86
	switch {
	case x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VBMI2:
		return avx512
	case x.HasAVX2 && x.HasF16C:
		return avx2
	}
	return plainGo
}

const (
	// line is the bytes that kernels take at a time, and a cache line. Any rest is left to plain Go.
	line = 64
	// alignFrom is the bytes from which on it pays to have the kernel start at an address that is a multiple of a line, and plain Go
	// take what is before it: a store across two cache lines costs two.
	alignFrom = 16 << 10
)

// lines gives the part of dst that kernels take: whole lines, from the first byte on or from the first aligned one.
func lines(dt DType, dst []byte) (from, to int) {
	if len(dst) >= alignFrom {
		//nolint:gosec // the address is just looked at
		from = int(-uintptr(unsafe.Pointer(&dst[0])) % line)
		if from%dt.Size() != 0 {
			from = 0
		}
	}
	return from, from + (len(dst)-from)&^(line-1)
}

// foldLines combines whole lines of at least two operands and says which bytes those are.
func foldLines(op Op, dt DType, dst []byte, srcs [][]byte) (first, end int) {
	if current == plainGo || len(dst) < line {
		return 0, 0
	}
	first, end = lines(dt, dst)
	for from := first; from < end; from += stretch {
		to := min(from+stretch, end)
		if current == avx512 {
			foldAVX512(op, dt, &dst[0], &srcs[0], len(srcs), from, to)
		} else {
			foldAVX2(op, dt, &dst[0], &srcs[0], len(srcs), from, to)
		}
	}
	return first, end
}

// divideLines divides whole lines and says which bytes those are: none of integers, which no instruction divides.
func divideLines(dt DType, dst []byte, by int) (first, end int) {
	if current == plainGo || len(dst) < line || dtypes[dt].family != floats {
		return 0, 0
	}
	first, end = lines(dt, dst)
	for from := first; from < end; from += stretch {
		to := min(from+stretch, end)
		if current == avx512 {
			divideAVX512(dt, &dst[0], by, from, to)
		} else {
			divideAVX2(dt, &dst[0], by, from, to)
		}
	}
	return first, end
}
