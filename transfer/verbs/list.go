//go:build rdma && cgo && linux

package verbs

// #cgo noescape larder_post
// #cgo nocallback larder_post
// #include "shim.h"
import "C"

import (
	"fmt"
	"math"
	"syscall"
	"unsafe"
)

// Op is what a work request does.
type Op uint32

// The operations of one-sided work.
const (
	Read  Op = C.IBV_WR_RDMA_READ  // from the peer's memory to here
	Write Op = C.IBV_WR_RDMA_WRITE // from here to the peer's memory
)

// Flags change how a work request is carried out.
type Flags uint32

// The flags of work requests.
const (
	// Signaled has a request complete with a completion of its own. One without has ended when a later one has; but a queue
	// of requests without any is never emptied, so the last of each list should have it. What fails has a completion always.
	Signaled Flags = C.IBV_SEND_SIGNALED
	// Fence has a request wait for the READs that were posted before it.
	Fence Flags = C.IBV_SEND_FENCE
)

// Piece is a part of a region: local memory of a work request.
type Piece struct {
	Region *Region
	Offset int // bytes
	Length int // bytes
}

// List is work requests that are posted together. It lives in memory of C, so that posting allocates and copies nothing,
// and is used again after [List.Reset]: the device has its own copy once the list is posted. One goroutine at a time may
// use it.
type List struct {
	memory  unsafe.Pointer
	wrs     []C.struct_ibv_send_wr
	sges    []C.struct_ibv_sge
	refused *C.int64_t
	n, used int // of wrs, of sges
	binds   []binding
}

// binding is a request that binds a window, of which, and of the region, the library reads what a Close would free.
type binding struct {
	request int // its place in the list
	w       *Window
	r       *Region
	rkey    uint32
}

// maxList bounds the memory of a list: no device known holds more requests in a queue.
const maxList = 1 << 16

// NewList makes a list for as many requests with as many pieces, all of them together. It is freed by Close only.
func NewList(requests, pieces int) (*List, error) {
	if requests < 1 || requests > maxList || pieces < 0 || pieces > maxList {
		return nil, fmt.Errorf("verbs: a list of %d requests and %d pieces: at most %d of each", requests, pieces, maxList)
	}
	wr, sge := C.size_t(C.sizeof_struct_ibv_send_wr), C.size_t(C.sizeof_struct_ibv_sge)
	word := C.size_t(unsafe.Sizeof(C.int64_t(0)))
	memory, err := C.calloc(1, C.size_t(requests)*wr+C.size_t(pieces)*sge+word)
	if memory == nil {
		return nil, fmt.Errorf("verbs: no memory for a list: %w", err)
	}
	l := &List{memory: memory}
	l.wrs = unsafe.Slice((*C.struct_ibv_send_wr)(memory), requests)
	at := unsafe.Add(memory, C.size_t(requests)*wr)
	l.sges = unsafe.Slice((*C.struct_ibv_sge)(at), pieces)
	l.refused = (*C.int64_t)(unsafe.Add(at, C.size_t(pieces)*sge))
	return l, nil
}

// Close frees the list.
func (l *List) Close() {
	C.free(l.memory)
	*l = List{}
}

// Len is how many requests are in the list.
func (l *List) Len() int { return l.n }

// Reset empties the list.
func (l *List) Reset() { l.n, l.used, l.binds = 0, 0, l.binds[:0] }

// next is the next request, empty.
func (l *List) next(id uint64, opcode uint32, flags Flags) (*C.struct_ibv_send_wr, error) {
	if l.n == len(l.wrs) {
		return nil, ErrFull
	}
	wr := &l.wrs[l.n]
	*wr = C.struct_ibv_send_wr{wr_id: C.uint64_t(id), opcode: opcode, send_flags: C.uint(flags)}
	return wr, nil
}

// link makes the request that next gave a part of the list.
func (l *List) link() {
	if l.n > 0 {
		l.wrs[l.n-1].next = &l.wrs[l.n]
	}
	l.n++
}

// Add appends a READ or a WRITE between local pieces, in their order, and one range of the peer's memory, which begins at
// remote and is as long as all pieces together. id is for its completion. The device checks rkey and range.
func (l *List) Add(op Op, id uint64, flags Flags, remote uint64, rkey uint32, local ...Piece) error {
	if op != Read && op != Write {
		return fmt.Errorf("verbs: operation %d is neither READ nor WRITE: %w", uint32(op), syscall.EINVAL)
	}
	if len(local) > len(l.sges)-l.used {
		return ErrFull
	}
	wr, err := l.next(id, uint32(op), flags)
	if err != nil {
		return err
	}
	for i := range local {
		p := &local[i]
		if p.Offset < 0 || p.Length < 0 || p.Offset > len(p.Region.memory)-p.Length || uint64(p.Length) > math.MaxUint32 {
			return fmt.Errorf("%w: %d bytes at %d of %d", ErrBounds, p.Length, p.Offset, len(p.Region.memory))
		}
		l.sges[l.used+i] = C.struct_ibv_sge{
			addr: C.uint64_t(p.Region.addr + uint64(p.Offset)), length: C.uint32_t(p.Length), lkey: C.uint32_t(p.Region.lkey),
		}
	}
	if len(local) > 0 {
		wr.sg_list, wr.num_sge = &l.sges[l.used], C.int(len(local))
	}
	// struct { uint64_t remote_addr; uint32_t rkey; } rdma, in a union: written here since a call of C would cost more.
	*(*uint64)(unsafe.Pointer(&wr.wr[0])) = remote
	*(*uint32)(unsafe.Pointer(&wr.wr[8])) = rkey
	l.used += len(local)
	l.link()
	return nil
}

// AddMarker appends a WRITE of no bytes, which touches no memory, with a completion. What was posted before it on the same
// queue pair has ended when that completion comes, whatever its status: after [QueuePair.Fail] it is [Flushed], and the
// queue pair is drained.
func (l *List) AddMarker(id uint64) error {
	return l.Add(Write, id, Signaled, 0, 0)
}

// AddBind appends the binding of a window to a part of a region, which must have been registered with AllowWindows; the
// window must not be bound. It gives the key by which the peer reaches that part from then on. access can be RemoteRead and
// RemoteWrite. Requests that come later in the queue see the window bound. A list has at most one binding of a window, and
// is refused as a whole if the window or the region has been closed since.
//
// The software device rxe, as of Linux 6.1, checks the key, the access and the queue pair, but lets the peer reach all of
// the region, not of the part only.
func (l *List) AddBind(id uint64, flags Flags, w *Window, p Piece, access Access) (rkey uint32, err error) {
	if p.Offset < 0 || p.Length < 1 || p.Offset > len(p.Region.memory)-p.Length {
		return 0, fmt.Errorf("%w: %d bytes at %d of %d", ErrBounds, p.Length, p.Offset, len(p.Region.memory))
	}
	wr, err := l.next(id, C.IBV_WR_BIND_MW, flags)
	if err != nil {
		return 0, err
	}
	b := binding{request: l.n, w: w, r: p.Region}
	if err := b.enter(); err != nil {
		return 0, err
	}
	defer b.leave()
	b.rkey = nextRKey(uint32(w.c.rkey))
	C.larder_set_bind(wr, w.c, C.uint32_t(b.rkey), p.Region.c, C.uint64_t(p.Region.addr+uint64(p.Offset)), C.uint64_t(p.Length),
		C.uint(access))
	l.binds = append(l.binds, b)
	l.link()
	return b.rkey, nil
}

// nextRKey is the key of a window's next binding: its low 8 bits are the owner's to choose.
func nextRKey(rkey uint32) uint32 { return rkey&^0xff | (rkey+1)&0xff }

func (b *binding) enter() error {
	if err := b.w.enter(); err != nil {
		return err
	}
	if err := b.r.enter(); err != nil {
		b.w.leave()
		return err
	}
	return nil
}

func (b *binding) leave() {
	b.r.leave()
	b.w.leave()
}

// AddInvalidate appends the end of a window's binding. When its completion has come with success, no work that names rkey
// begins any more.
func (l *List) AddInvalidate(id uint64, flags Flags, rkey uint32) error {
	wr, err := l.next(id, C.IBV_WR_LOCAL_INV, flags)
	if err != nil {
		return err
	}
	C.larder_set_invalidate(wr, C.uint32_t(rkey))
	l.link()
	return nil
}

// Post hands all requests of the list to the device, in their order, by one call of C, and allocates nothing. After an error
// the first posted ones are under way, and the others are not. Work posted in the state ERR is flushed at once.
func (q *QueuePair) Post(l *List) (posted int, err error) {
	if l.n == 0 {
		return 0, nil
	}
	if err := q.enter(); err != nil {
		return 0, err
	}
	defer q.leave()
	for i := range l.binds {
		if err := l.binds[i].enter(); err != nil {
			leaveAll(l.binds[:i])
			return 0, err
		}
	}
	defer leaveAll(l.binds)
	l.wrs[l.n-1].next = nil
	rc := C.larder_post(q.c, &l.wrs[0], l.refused)
	posted = l.n
	if rc != 0 {
		posted = int(*l.refused)
	}
	for _, b := range l.binds {
		if b.request < posted { // the library does not: rxe refuses a binding that does not know the key before it
			b.w.c.rkey = C.uint32_t(b.rkey)
		}
	}
	if rc < 0 {
		rc = -rc
	}
	if rc != 0 {
		err = failed("ibv_post_send", syscall.Errno(rc))
	}
	return posted, err
}

func leaveAll(binds []binding) {
	for i := range binds {
		binds[i].leave()
	}
}
