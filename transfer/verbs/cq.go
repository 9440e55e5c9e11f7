//go:build rdma && cgo && linux

package verbs

// #cgo noescape larder_poll
// #cgo nocallback larder_poll
// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"
)

// Completion is what has become of one work request. It has the layout of struct larder_completion.
type Completion struct {
	ID     uint64 // of the request
	QPN    uint32 // number of the queue pair
	Length uint32 // bytes; only after success, and not of every device for a WRITE
	Status Status
	opcode uint32 // not valid unless Success
	Vendor uint32 // the device's own code of an error, for its manual
	_      uint32
}

// The two layouts must have the same size: the length of the array is negative otherwise.
var _ [unsafe.Sizeof(Completion{}) - C.sizeof_struct_larder_completion]struct{}

var _ [C.sizeof_struct_larder_completion - unsafe.Sizeof(Completion{})]struct{}

// CompletionQueue is where completions of many queue pairs come. Poll may be called concurrently; Wait by one goroutine at
// a time.
type CompletionQueue struct {
	object
	x      *Context
	c      *C.struct_ibv_cq
	comp   *C.struct_ibv_comp_channel
	events *channel
	depth  int
	take   func() error
}

// spinPolls is how often [CompletionQueue.Wait] looks before it sleeps: sleeping and waking cost two system calls and a
// turn of the scheduler, about as much as 4 KiB take on a fast network.
const spinPolls = 32

// NewCompletionQueue makes a queue that holds at least depth completions. It must hold those of all that is outstanding on
// its queue pairs, of which each request can have one when it is flushed: a queue that overflows is lost, with all of them.
func (x *Context) NewCompletionQueue(depth int) (*CompletionQueue, error) {
	if depth < 1 || depth > x.attr.MaxCQE {
		return nil, fmt.Errorf("verbs: a queue of %d completions: the device has 1 to %d", depth, x.attr.MaxCQE)
	}
	if err := x.adopt(); err != nil {
		return nil, err
	}
	q := &CompletionQueue{x: x}
	if err := q.make(depth); err != nil {
		q.destroy() //nolint:errcheck // the first error is the one to tell
		x.release()
		return nil, err
	}
	return q, nil
}

func (q *CompletionQueue) make(depth int) (err error) {
	if q.comp, err = C.ibv_create_comp_channel(q.x.c); q.comp == nil {
		return failedWith("ibv_create_comp_channel", err)
	}
	if q.events, err = newChannel(int(q.comp.fd), q.x.name+" completions"); err != nil {
		return err
	}
	if q.c, err = C.ibv_create_cq(q.x.c, C.int(depth), nil, q.comp, 0); q.c == nil {
		return failedWith("ibv_create_cq", err)
	}
	q.depth = int(q.c.cqe)
	q.take = q.takeEvent
	return nil
}

func (q *CompletionQueue) destroy() error {
	if q.events != nil {
		q.events.close()
	}
	if q.c != nil {
		if rc, err := C.ibv_destroy_cq(q.c); rc != 0 {
			return returned("ibv_destroy_cq", rc, err)
		}
		q.c = nil
	}
	if q.comp != nil {
		if rc, err := C.ibv_destroy_comp_channel(q.comp); rc != 0 {
			return returned("ibv_destroy_comp_channel", rc, err)
		}
		q.comp = nil
	}
	return nil
}

// Depth is how many completions the queue holds.
func (q *CompletionQueue) Depth() int { return q.depth }

// Close destroys the queue. It fails with [ErrInUse] while a queue pair uses it. A Wait ends with [ErrClosed].
func (q *CompletionQueue) Close() error {
	if first, err := q.shut(); !first {
		return err
	}
	defer q.x.release()
	return q.destroy()
}

// Poll takes completions out of the queue, as many as there are, at most len(out), in one call of C. It allocates nothing
// and does not wait.
func (q *CompletionQueue) Poll(out []Completion) (int, error) {
	if len(out) == 0 {
		return 0, nil
	}
	if err := q.enter(); err != nil {
		return 0, err
	}
	n := C.larder_poll(q.c, C.int(len(out)), (*C.struct_larder_completion)(unsafe.Pointer(unsafe.SliceData(out))))
	q.leave()
	if n < 0 {
		return 0, failed("ibv_poll_cq", syscall.Errno(-n))
	}
	return int(n), nil
}

// Wait takes at least one completion out of the queue: it looks a few times, and then sleeps until one comes. It ends with
// ctx's error when ctx ends.
func (q *CompletionQueue) Wait(ctx context.Context, out []Completion) (int, error) {
	for {
		for range spinPolls {
			if n, err := q.Poll(out); n > 0 || err != nil {
				return n, err
			}
			runtime.Gosched()
		}
		if err := q.arm(); err != nil {
			return 0, err
		}
		// What came before it was armed wakes nobody.
		if n, err := q.Poll(out); n > 0 || err != nil {
			return n, err
		}
		if err := q.events.wait(ctx, q.take); err != nil {
			return 0, err
		}
	}
}

func (q *CompletionQueue) arm() error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.leave()
	if rc, err := C.larder_arm(q.c); rc != 0 {
		return returned("ibv_req_notify_cq", rc, err)
	}
	return nil
}

// takeEvent takes an event out of the channel. There can be one that was asked for by an earlier Wait, which polled before
// it came: then Wait only looks once more.
func (q *CompletionQueue) takeEvent() error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.leave()
	switch rc := C.larder_take_event(q.comp); rc {
	case 0:
		return nil
	case C.EAGAIN:
		return syscall.EAGAIN
	default:
		return failed("ibv_get_cq_event", syscall.Errno(rc))
	}
}
