//go:build !amd64 && !arm64

package cxl

import (
	"sync/atomic"
	"unsafe"
)

const cacheLine = 64

// canControlCache is false: devices without hardware coherence are refused on this architecture.
const canControlCache = false

// fenceWord is what fences are made of: an atomic read-modify-write orders everything around it in Go's memory model.
var fenceWord atomic.Uint32

func storeFence() { fenceWord.Add(1) }

func fullFence() { fenceWord.Add(1) }

func writeBackLines(unsafe.Pointer, uintptr) { fullFence() }

func invalidateLines(unsafe.Pointer, uintptr) { fullFence() }

var streamCopy func(dst, src unsafe.Pointer, n uintptr)

const streamsOut = false

// sumCopy is nil: copies and sums are made one after the other.
var sumCopy func(acc *[8]uint64, dst, src unsafe.Pointer, blocks uintptr, secret *[192]byte, stream bool)
