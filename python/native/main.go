//go:build cgo

// Command native is liblarder.so, the project's one library for programs that are not written in Go: its packages behind a C
// ABI, which larder.h describes. There is one, since each Go library in a process brings a runtime of its own: more threads,
// another heap, and slower. It is built by
//
//	go build -buildmode=c-shared -o liblarder.so ./python/native
//
// Nothing of Go's memory is kept by C: objects are named by handles. A panic is the error of the call that it came up in.
package main

// #include "larder.h"
import "C"

import "unsafe"

// abi is the number of the C ABI. It grows with each change that a caller must know of; python/larder/_lib.py has the same.
const abi = 5

// main is never called: the library is loaded, not run.
func main() {}

//export larder_abi
func larder_abi() C.int32_t { return abi }

// maxInput bounds what a caller may hand over besides memory to transfer, in bytes: a descriptor with all its buffers is the
// longest.
const maxInput = 16 << 20

// input copies bytes of the caller's.
func input(p *C.char, n C.int64_t) ([]byte, error) {
	if n < 0 || n > maxInput || p == nil && n > 0 {
		return nil, invalid("%d bytes of input, at most %d", int64(n), maxInput)
	}
	return C.GoBytes(unsafe.Pointer(p), C.int(n)), nil
}

// output copies bytes to a caller's memory of n bytes, and says how many there are. If that is more than n nothing is copied.
func output(p *C.char, n C.int64_t, length *C.int64_t, b []byte) {
	*length = C.int64_t(len(b))
	if int64(n) >= int64(len(b)) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(p)), len(b)), b)
	}
}

// guard runs a call, and reports how it ended.
func guard(e *C.larder_error, call func() error) C.int32_t {
	err := protect(call)
	if err == nil {
		return 0
	}
	code := codeOf(err)
	if code == codeAgain {
		return C.int32_t(code) // comes often, and needs no words
	}
	text := clip(err.Error(), len(e.text))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&e.text[0])), len(text)), text)
	e.length = C.int32_t(len(text))
	return C.int32_t(code)
}
