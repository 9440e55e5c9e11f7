package cxl

import "unsafe"

// canControlCache says that the architecture has instructions that write back and invalidate cache lines. Linux lets
// user space run DC CVAC and DC CIVAC.
const canControlCache = true

//go:noescape
func linesCVAC(p unsafe.Pointer, n, line uintptr)

//go:noescape
func linesCIVAC(p unsafe.Pointer, n, line uintptr)

func cacheType() uint64

func storeFence()

func fullFence()

// cacheLine is the smallest data cache line of the system in bytes: CTR_EL0.DminLine is the log2 of its 4-byte words.
var cacheLine = uintptr(4) << (cacheType() >> 16 & 15)

// writeBackLines cleans n lines from p to the point of coherency and waits for it; they may stay cached.
func writeBackLines(p unsafe.Pointer, n uintptr) {
	linesCVAC(p, n, cacheLine)
	fullFence()
}

// invalidateLines cleans and drops n lines from p, and keeps later loads from running before that.
func invalidateLines(p unsafe.Pointer, n uintptr) {
	fullFence()
	linesCIVAC(p, n, cacheLine)
	fullFence()
}

// streamCopy is nil: the runtime's copy already runs at memory bandwidth on arm64, whose stores stream by themselves.
var streamCopy func(dst, src unsafe.Pointer, n uintptr)

const streamsOut = false

// sumCopy is nil: copies and sums are made one after the other.
var sumCopy func(acc *[8]uint64, dst, src unsafe.Pointer, blocks uintptr, secret *[192]byte, stream bool)
