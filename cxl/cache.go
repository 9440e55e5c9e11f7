package cxl

import "unsafe"

// WriteBack writes every cache line that b touches back to memory and waits until that is ordered before later
// stores. The lines may stay cached. It may fault like any access to b: see [Guard].
func WriteBack(b []byte) {
	if p, n := lines(b); n != 0 {
		writeBackLines(p, n)
	}
}

// Invalidate drops every cache line that b touches, writing it back first if it is dirty; later loads read memory.
// Neighbours of b in its first and last line are written back and dropped too, which harms nobody on this host. It may
// fault like any access to b: see [Guard].
func Invalidate(b []byte) {
	if p, n := lines(b); n != 0 {
		invalidateLines(p, n)
	}
}

// Fence makes earlier stores of this goroutine, non-temporal ones included, visible before its later ones.
func Fence() { storeFence() }

// address is where b lies in memory. It does not keep b there: only for memory that Go does not move.
func address(b []byte) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b))) //nolint:gosec // read as a number only
}

// lines gives the address of the first cache line that b touches and how many it touches.
func lines(b []byte) (unsafe.Pointer, uintptr) {
	if len(b) == 0 {
		return nil, 0
	}
	p := unsafe.Pointer(unsafe.SliceData(b)) //nolint:gosec // cache instructions take addresses
	into := uintptr(p) & (uintptr(cacheLine) - 1)
	return unsafe.Add(p, -int(into)), (into + uintptr(len(b)) + uintptr(cacheLine) - 1) / uintptr(cacheLine)
}
