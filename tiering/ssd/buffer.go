package ssd

import (
	"context"
	"math/bits"
	"sync"
	"unsafe"
)

const (
	// block is the unit of everything on disk: what O_DIRECT needs on all common disks.
	block = 4096
	// maxBuffer is the longest pooled buffer.
	maxBuffer = maxRecordBytes
)

// roundUp gives the bytes of the whole blocks that n bytes take.
func roundUp(n int) int { return (n + block - 1) &^ (block - 1) }

// aligned reports whether b can be handed to O_DIRECT.
func aligned(b []byte) bool {
	return len(b)%block == 0 && uintptr(unsafe.Pointer(unsafe.SliceData(b)))%block == 0 //nolint:gosec // only looked at
}

// alignedBytes allocates n bytes that start at a multiple of a block.
func alignedBytes(n int) []byte {
	b := make([]byte, n+block)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (block - 1)) //nolint:gosec // below a block
	return b[skip : skip+n : skip+n]
}

// classes is how many sizes of buffers there are: powers of two from block to maxBuffer.
var classes = bits.Len(maxBuffer/block-1) + 1

// shelf keeps buffers between uses, for all pools.
var shelf = make([]sync.Pool, classes)

// pool bounds the bytes of buffers that are out. Whoever finds it empty waits.
type pool struct {
	mu      sync.Mutex
	left    int64
	waiting []*waiter // in order of arrival, so that a large buffer is not starved by small ones
}

type waiter struct {
	need  int64
	ready chan struct{}
}

func newPool(limit int64) *pool { return &pool{left: limit} }

// sizeClass gives the smallest class that holds n bytes.
func sizeClass(n int) int { return bits.Len(uint((n - 1) / block)) }

// get gives a buffer of n bytes, at most maxBuffer, when there is room.
func (p *pool) get(ctx context.Context, n int) ([]byte, error) {
	c := sizeClass(n)
	size := int64(block) << c
	if err := p.take(ctx, size); err != nil {
		return nil, err
	}
	if b, ok := shelf[c].Get().(*[]byte); ok {
		return (*b)[:n], nil
	}
	return alignedBytes(int(size))[:n], nil
}

func (p *pool) take(ctx context.Context, size int64) error {
	p.mu.Lock()
	if len(p.waiting) == 0 && p.left >= size {
		p.left -= size
		p.mu.Unlock()
		return nil
	}
	w := &waiter{size, make(chan struct{})}
	p.waiting = append(p.waiting, w)
	p.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.waiting {
		if other == w {
			p.waiting = append(p.waiting[:i], p.waiting[i+1:]...)
			p.serve() // those behind may need less
			return context.Cause(ctx)
		}
	}
	p.left += size // it came at the same moment
	p.serve()
	return context.Cause(ctx)
}

// serve hands out what is left to those who wait.
func (p *pool) serve() {
	for len(p.waiting) > 0 && p.left >= p.waiting[0].need {
		p.left -= p.waiting[0].need
		close(p.waiting[0].ready)
		p.waiting = p.waiting[1:]
	}
}

// put takes a buffer back; nil is none.
func (p *pool) put(b []byte) {
	if b == nil {
		return
	}
	b = b[:cap(b)]
	shelf[sizeClass(len(b))].Put(&b)
	p.mu.Lock()
	p.left += int64(len(b))
	p.serve()
	p.mu.Unlock()
}
