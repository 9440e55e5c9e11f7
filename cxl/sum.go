package cxl

import (
	"encoding/binary"
	"math/bits"
	"runtime/debug"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// XXH3 of inputs longer than 240 bytes, 64 bits, default secret and no seed: 8 accumulators take in stripes of 64 bytes,
// 16 of which are a block. The algorithm is that of the xxHash specification (XXH3, "Long inputs"); the rest of it, for
// short inputs, is a library's.
const (
	sumStripe = 64
	sumBlock  = 1024
	// sumMin is the size in bytes from which a copy takes the sum on its way. Below, the end that is summed by itself
	// weighs too much.
	sumMin = 4 << 10

	prime32a = 0x9E3779B1
	prime32b = 0x85EBCA77
	prime32c = 0xC2B2AE3D
	prime64a = 0x9E3779B185EBCA87
	prime64b = 0xC2B2AE3D27D4EB4F
	prime64c = 0x165667B19E3779F9
	prime64d = 0x85EBCA77C2B2AE63
	prime64e = 0x27D4EB2F165667C5
)

// sumSecret is the specification's default secret.
var sumSecret = [192]byte{
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
	0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
	0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
	0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
	0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
	0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
	0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
	0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
	0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
	0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
	0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
}

// CopyInSum is [CopyIn], and returns the XXH3 of the bytes that were stored, which it takes on the way: a copy by itself
// and a sum by itself would each wait for memory.
func CopyInSum(dst, src []byte) (sum uint64, err error) {
	if len(dst) != len(src) {
		return 0, lengthError(dst, src)
	}
	defer caught(debug.SetPanicOnFault(true), &err)
	if sumCopy == nil || len(src) < sumMin {
		streamInto(dst, src)
		sum = xxh3.Hash(src)
	} else {
		sum = copySum(dst, src, src, true)
	}
	storeFence()
	return sum, nil
}

// CopyOutSum is [CopyOut], or with stream [CopyOutStream], and returns the XXH3 of the bytes that dst now holds: they are
// loaded once for both, so that nothing can change in between.
func CopyOutSum(dst, src []byte, stream bool) (sum uint64, err error) {
	if len(dst) != len(src) {
		return 0, lengthError(dst, src)
	}
	defer caught(debug.SetPanicOnFault(true), &err)
	if sumCopy == nil || len(src) < sumMin {
		plainCopy(dst, src)
		return xxh3.Hash(dst), nil
	}
	stream = stream && streamsOut
	sum = copySum(dst, src, dst, stream)
	if stream {
		storeFence()
	}
	return sum, nil
}

// copySum copies, and sums up whole blocks as they pass and the rest from private, which is dst or src.
func copySum(dst, src, private []byte, stream bool) uint64 {
	acc := [8]uint64{prime32c, prime64a, prime64b, prime64c, prime64d, prime32b, prime64e, prime32a}
	stream = stream && address(dst)%streamAlign == 0
	whole := (len(src) - 1) / sumBlock * sumBlock // the last stripe is summed in a way of its own
	for at := 0; at < whole; at += copyChunk {
		n := min(copyChunk, whole-at)
		//nolint:gosec // both slices hold n bytes from there
		sumCopy(&acc, unsafe.Pointer(&dst[at]), unsafe.Pointer(&src[at]), uintptr(n/sumBlock), &sumSecret, stream)
	}
	copy(dst[whole:], src[whole:])
	for i, at := 0, whole; at+sumStripe < len(private); i, at = i+1, at+sumStripe {
		sumStripeOf(&acc, private[at:], sumSecret[8*i:])
	}
	sumStripeOf(&acc, private[len(private)-sumStripe:], sumSecret[len(sumSecret)-sumStripe-7:])
	return sumMerge(&acc, uint64(len(src)))
}

// sumStripeOf takes one stripe in.
func sumStripeOf(acc *[8]uint64, b, secret []byte) {
	for i := range acc {
		v := binary.LittleEndian.Uint64(b[8*i:])
		k := v ^ binary.LittleEndian.Uint64(secret[8*i:])
		acc[i^1] += v
		acc[i] += k & 0xffffffff * (k >> 32)
	}
}

// sumMerge makes the sum of n bytes of the accumulators.
func sumMerge(acc *[8]uint64, n uint64) uint64 {
	const secretAt = 11
	h := n * prime64a
	for i := 0; i < len(acc); i += 2 {
		secret := sumSecret[secretAt+8*i:]
		hi, lo := bits.Mul64(
			acc[i]^binary.LittleEndian.Uint64(secret), acc[i+1]^binary.LittleEndian.Uint64(secret[8:]))
		h += hi ^ lo
	}
	h ^= h >> 37
	h *= 0x165667919E3779F9
	return h ^ h>>32
}
