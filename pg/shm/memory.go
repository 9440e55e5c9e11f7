package shm

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"
)

// apart is the distance in bytes between words that different processes write: two cache lines, since CPUs fetch the other
// line of an aligned pair along with the one that is asked for.
const apart = 128

// word64 is a shared number. It lies in mapped memory, which its users hold on to.
func word64(b []byte, at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[at : at+8][0])) //nolint:gosec // callers align
}

// word32 is a shared number of half that width, as the kernel's futexes are.
func word32(b []byte, at int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b[at : at+4][0])) //nolint:gosec // callers align
}

// wide is a size as shared counters count, narrow the reverse for what has been compared with a size.

func wide(n int) uint64   { return uint64(n) } //nolint:gosec // sizes are not negative
func narrow(n uint64) int { return int(n) }    //nolint:gosec // see above

// wholePages rounds n up to the pages of this host.
func wholePages(n int) int {
	page := os.Getpagesize()
	return (n + page - 1) &^ (page - 1)
}

// expect opens the way for a peer's file of a known size.
func expect(f *os.File, size int, what string) error {
	n, err := admit(f)
	if err == nil && n != size {
		err = fmt.Errorf("%w: a %s of this version and layout has %d bytes, the peer's has %d", ErrFile, what, size, n)
	}
	return err
}
