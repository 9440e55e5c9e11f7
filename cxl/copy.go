package cxl

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"unsafe"
)

const (
	// streamBlock is what the assembly copies at a time, in bytes.
	streamBlock = 256
	// streamAlign is the alignment that non-temporal stores need, in bytes.
	streamAlign = 64
	// copyChunk bounds one uninterruptible copy, in bytes: assembly cannot be preempted, and at 10 GB/s this much
	// holds up a garbage collection by 0.1 ms.
	copyChunk = 1 << 20
	// plainChunk is as much, in bytes, as the runtime's copy stores into the caches at a time: from 1 MiB on it goes past them.
	plainChunk = 512 << 10
	// streamMin is the size in bytes from which CopyIn stores past the caches. Into a pool larger than the caches, on
	// one core of an EPYC 7003: 4 KiB 12.4 GB/s as the runtime's copy, 16 KiB 18 against 12, 64 KiB 19 against 12,
	// 256 KiB 21 against 12; from 1 MiB on the runtime streams too and both reach the 20 GB/s of the machine. CopyOut
	// leaves it to the runtime: a destination that fits the caches is read next, and there cached stores win (64 KiB:
	// 17.5 GB/s against 12.5).
	streamMin = 8 << 10
)

// CopyIn copies src into dst, a part of a mapping as long as src, and fences, so that whoever is told afterwards on
// this host or a coherent one reads the bytes. If memory behind dst or src is gone it returns [ErrTruncated], with dst
// partly written. It does not write caches back: see [Mapping.Publish]. It does not allocate.
func CopyIn(dst, src []byte) (err error) {
	if len(dst) != len(src) {
		return lengthError(dst, src)
	}
	defer caught(debug.SetPanicOnFault(true), &err)
	streamInto(dst, src)
	storeFence()
	return nil
}

// CopyOut copies src, a part of a mapping, into dst, as long as src. If memory behind either is gone it returns
// [ErrTruncated], with dst partly written. It does not drop stale cache lines: see [Mapping.Refresh]. It does not
// allocate.
func CopyOut(dst, src []byte) (err error) {
	if len(dst) != len(src) {
		return lengthError(dst, src)
	}
	defer caught(debug.SetPanicOnFault(true), &err)
	plainCopy(dst, src)
	return nil
}

// CopyOutStream is CopyOut for destinations that are together larger than the caches. It stores past these on processors that
// gain by it: on two cores of an EPYC 7003, 64 values of 64 KiB each come at 0.75 of the machine's copy rate instead of 0.55.
func CopyOutStream(dst, src []byte) (err error) {
	if len(dst) != len(src) {
		return lengthError(dst, src)
	}
	defer caught(debug.SetPanicOnFault(true), &err)
	if !streamsOut {
		plainCopy(dst, src)
		return nil
	}
	streamInto(dst, src)
	storeFence()
	return nil
}

// Guard runs f, which touches mapped memory, and returns [ErrTruncated] if that memory is gone. Other panics go
// through, and goroutines that f starts are not guarded. f must leave nothing locked behind it when it faults.
func Guard(f func()) (err error) {
	defer caught(debug.SetPanicOnFault(true), &err)
	f()
	return nil
}

// lengthError refuses a copy between unequal slices.
func lengthError(dst, src []byte) error {
	return fmt.Errorf("cxl: copy of %d bytes into %d: %w", len(src), len(dst), ErrRange)
}

// caught is deferred by everything that touches mapped memory. It puts the goroutine's old setting back, and turns a
// memory fault into ErrTruncated.
func caught(old bool, err *error) {
	debug.SetPanicOnFault(old)
	if r := recover(); r != nil {
		if !isFault(r) {
			panic(r)
		}
		*err = ErrTruncated
	}
}

// isFault tells a fault at an address from other panics. A nil dereference has no address and is a bug of ours.
func isFault(r any) bool {
	err, ok := r.(runtime.Error)
	if !ok {
		return false
	}
	var fault interface{ Addr() uintptr }
	return errors.As(err, &fault)
}

// streamInto copies in chunks past the caches where that is faster.
func streamInto(dst, src []byte) {
	if streamCopy == nil || len(src) < streamMin {
		plainCopy(dst, src)
		return
	}
	head := int(-address(dst) & (streamAlign - 1))
	copy(dst[:head], src[:head])
	dst, src = dst[head:], src[head:]
	for len(src) >= streamBlock {
		n := min(len(src), copyChunk) &^ (streamBlock - 1)
		//nolint:gosec // both slices hold n bytes
		streamCopy(unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(src)), uintptr(n))
		dst, src = dst[n:], src[n:]
	}
	copy(dst, src)
}

// plainCopy copies in chunks with the runtime's copy.
func plainCopy(dst, src []byte) {
	for len(src) > plainChunk {
		copy(dst[:plainChunk], src[:plainChunk])
		dst, src = dst[plainChunk:], src[plainChunk:]
	}
	copy(dst, src)
}
