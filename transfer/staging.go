package transfer

import (
	"fmt"
	"math/bits"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// stagingUnit is the smallest staging buffer, and what all are aligned to: what O_DIRECT needs on all common disks.
	stagingUnit = 4 << 10
	// defaultStaging bounds staging memory: some milliseconds of a fast SSD.
	defaultStaging = 64 << 20
)

// stagingClasses is how many sizes of staging buffers there are: powers of two from stagingUnit to maxSlice.
var stagingClasses = bits.Len(maxSlice/stagingUnit-1) + 1

// staging is memory that bytes go through on their way to or from storage: buffers that start at a multiple of stagingUnit
// and never move. All of them together have at most limit bytes. Its methods may be called concurrently.
type staging struct {
	limit int64

	mu      sync.Mutex
	out     int64      // bytes of buffers in use
	idle    int64      // of those that wait to be used
	free    [][][]byte // by class
	waiting []*stagingWaiter
	closed  bool
}

// stagingWaiter waits for so many bytes to be given back, in the order of arrival: long buffers are not starved by short
// ones.
type stagingWaiter struct {
	need  int64
	ready chan struct{}
}

func newStaging(limit int64) *staging {
	return &staging{limit: limit, free: make([][][]byte, stagingClasses)}
}

// stagingClass is the smallest class that holds n bytes.
func stagingClass(n int) int { return bits.Len(uint(max(n-1, 0) / stagingUnit)) }

// get gives a buffer of n bytes, at most maxSlice, when there is room. If stop comes first the error is [ErrTimeout].
func (g *staging) get(n int, stop <-chan struct{}) ([]byte, error) {
	c := stagingClass(n)
	size := int64(stagingUnit) << c
	if !g.reserve(size, stop) {
		return nil, ErrTimeout
	}
	g.mu.Lock()
	if k := len(g.free[c]); k > 0 {
		b := g.free[c][k-1]
		g.free[c] = g.free[c][:k-1]
		g.idle -= size
		g.mu.Unlock()
		return b[:n], nil
	}
	g.trim(g.limit)
	g.mu.Unlock()
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		g.giveBack(size)
		return nil, fmt.Errorf("%w: no memory for %d bytes: %w", ErrStorage, size, err)
	}
	return b[:n], nil
}

// reserve waits until size more bytes may be in use.
func (g *staging) reserve(size int64, stop <-chan struct{}) bool {
	g.mu.Lock()
	if len(g.waiting) == 0 && g.out+size <= g.limit {
		g.out += size
		g.mu.Unlock()
		return true
	}
	w := &stagingWaiter{size, make(chan struct{})}
	g.waiting = append(g.waiting, w)
	g.mu.Unlock()
	select {
	case <-w.ready:
		return true
	case <-stop:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, other := range g.waiting {
		if other == w {
			g.waiting = append(g.waiting[:i], g.waiting[i+1:]...)
			g.serve() // those behind may need less
			return false
		}
	}
	g.out -= size // it came at the same moment
	g.serve()
	return false
}

// serve lets those in who wait and for whom there is room. mu is held.
func (g *staging) serve() {
	for len(g.waiting) > 0 && g.out+g.waiting[0].need <= g.limit {
		g.out += g.waiting[0].need
		close(g.waiting[0].ready)
		g.waiting = g.waiting[1:]
	}
}

func (g *staging) giveBack(size int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.out -= size
	g.serve()
}

// trim unmaps idle buffers, the longest first, until no more than so many bytes are mapped. mu is held.
func (g *staging) trim(most int64) {
	for c := len(g.free) - 1; c >= 0; c-- {
		for k := len(g.free[c]); k > 0 && g.out+g.idle > most; k = len(g.free[c]) {
			b := g.free[c][k-1]
			g.free[c] = g.free[c][:k-1]
			g.idle -= int64(cap(b))
			_ = unix.Munmap(b[:cap(b)]) // it is one
		}
	}
}

// put takes a buffer back. Nobody uses it any more.
func (g *staging) put(b []byte) {
	if b == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	size := int64(cap(b))
	g.out -= size
	g.idle += size
	c := stagingClass(cap(b))
	g.free[c] = append(g.free[c], b)
	g.serve()
	most := g.limit
	if g.closed {
		most = g.out
	}
	g.trim(most)
}

// used is how many bytes are in use.
func (g *staging) used() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.out
}

// close unmaps what nobody uses, and the rest when it is put back.
func (g *staging) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.trim(g.out)
}
