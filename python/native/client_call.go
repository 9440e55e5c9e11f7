//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/client"
)

// call is a call of a client. It runs in the caller's thread, if that can be: see larder_client_try. Otherwise it has a goroutine of its
// own, so that whoever waits for it can look for signals, or wait for many: in the kernel, not in Go, where the thread would be tied
// to a goroutine: see client_wait.c.
type call struct {
	ctx     context.Context //nolint:containedctx // the call's own, which others end
	cancel  context.CancelFunc
	kind    callKind
	timeout time.Duration // 0: as the client was opened
	trying  bool          // see attempt
	target  uint64        // the handle of what it is a call of
	count   int
	keys    [][]byte
	numbers []uint64          // in place of keys
	regions []C.larder_region // memory of the caller's
	results []C.int64_t       // the same
	options callOptions

	handle   uint64
	progress *C.larder_progress     // of the caller's; see tell
	queue    *queue                 // hears of progress; nil if the caller waits for the call
	rooms    chan []C.larder_region // brings memory that is wanted; nil if none is
	wants    atomic.Pointer[want]   // what was asked for, and not brought
}

// States of larder_progress.
const (
	stateUnderWay = 0
	stateWants    = 1
	stateEnded    = 2
)

// want says which of a call's values want memory, from the given one on: their lengths stand in its results.
type want struct{ from, count int }

var (
	calls  = table[*call]{kind: "call"}
	queues = table[*queue]{kind: "queue"}
)

// duration is a time as callers have it, in nanoseconds.
func duration(ns C.int64_t) time.Duration { return time.Duration(ns) }

// newCall takes over what a caller asks for.
func newCall(
	handle C.uint64_t, kind, count C.int32_t, keys *C.char, keysLen C.int64_t, regions *C.larder_region, regionCount C.int64_t,
	results *C.int64_t, resultCount C.int64_t, options *C.char, optionsLen, timeout C.int64_t,
) (*call, error) {
	of, known := kinds[kind]
	if !known {
		return nil, invalid("a call of kind %d: there is none", int32(kind))
	}
	if count < 0 || regionCount < 0 || resultCount < 0 || max(int64(count), int64(regionCount), int64(resultCount)) > maxCallItems {
		return nil, invalid("%d items in a call, %d pieces of memory, %d results: at most %d", int32(count), int64(regionCount),
			int64(resultCount), maxCallItems)
	}
	packed, err := input(keys, keysLen)
	if err != nil {
		return nil, err
	}
	c := &call{
		kind: of, timeout: duration(timeout), target: uint64(handle), count: int(count), results: unsafe.Slice(results, resultCount),
		regions: append([]C.larder_region(nil), unsafe.Slice(regions, regionCount)...),
	}
	switch {
	case kind == kindMatch:
		c.numbers, err = unpackNumbers(packed, c.count)
	case len(packed) > 0:
		c.keys, err = unpackKeys(packed, c.count)
	}
	if err != nil {
		return nil, err
	}
	if optionsLen > 0 {
		text, err := input(options, optionsLen)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(text, &c.options); err != nil {
			return nil, invalid("the options of a call: %v", err)
		}
	}
	return c, nil
}

// maxCallItems bounds the keys, values and results of a call: as many batches of the wire as a caller may want at once.
const maxCallItems = 1 << 20

// unpackKeys reads keys as callers pack them: the length of each in 32 bits, and then all of them, end to end.
func unpackKeys(b []byte, n int) ([][]byte, error) {
	if n > len(b)/4 {
		return nil, invalid("%d keys in %d bytes", n, len(b))
	}
	keys := make([][]byte, n)
	rest := b[4*n:]
	for i := range keys {
		size := binary.LittleEndian.Uint32(b[4*i:])
		if uint64(size) > uint64(len(rest)) {
			return nil, invalid("key %d of %d bytes, of which %d are there", i, size, len(rest))
		}
		keys[i], rest = rest[:size:size], rest[size:]
	}
	if len(rest) > 0 {
		return nil, invalid("%d bytes behind the keys", len(rest))
	}
	return keys, nil
}

// unpackNumbers reads 64-bit numbers.
func unpackNumbers(b []byte, n int) ([]uint64, error) {
	if len(b) != 8*n {
		return nil, invalid("%d numbers in %d bytes", n, len(b))
	}
	numbers := make([]uint64, n)
	for i := range numbers {
		numbers[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return numbers, nil
}

// larder_client_start begins a call; larder_client_wait waits for it, or, if there is a queue, that hears of its progress. What handle
// names, and what keys, regions, results and options are, is for the kind to say: see python/native/client_kinds.go. Memory of regions
// and results, and progress, are used until the call has ended; the rest is read here.
//
//export larder_client_start
func larder_client_start(
	handle C.uint64_t, kind, count C.int32_t, keys *C.char, keysLen C.int64_t, regions *C.larder_region, regionCount C.int64_t,
	results *C.int64_t, resultCount C.int64_t, options *C.char, optionsLen, timeout C.int64_t, queueHandle C.uint64_t,
	progress *C.larder_progress, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		c, err := newCall(handle, kind, count, keys, keysLen, regions, regionCount, results, resultCount, options, optionsLen, timeout)
		if err != nil {
			return err
		}
		if queueHandle != 0 {
			if c.queue, err = queues.of(uint64(queueHandle)); err != nil {
				return err
			}
		}
		return c.start(progress)
	})
}

// larder_client_try is larder_client_start without a queue, for a caller who waits at once: what can be repeated is carried out in the
// caller's own thread, unless it takes long. So is what changes something, however long it takes, if the caller is patient: no
// signal is its business.
//
// To have another thread take up a call, and then to be woken, costs about as much as the call where nothing else
// keeps the processors awake, or too much does: 40 to 100 us.
//
//export larder_client_try
func larder_client_try(
	handle C.uint64_t, kind, count C.int32_t, keys *C.char, keysLen C.int64_t, regions *C.larder_region, regionCount C.int64_t,
	results *C.int64_t, resultCount C.int64_t, options *C.char, optionsLen, timeout C.int64_t, patient C.int32_t,
	progress *C.larder_progress, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		c, err := newCall(handle, kind, count, keys, keysLen, regions, regionCount, results, resultCount, options, optionsLen, timeout)
		if err != nil {
			return err
		}
		if patient != 0 && c.kind.change {
			err := c.whole()
			progress.state = stateEnded
			return err
		}
		if ended, err := c.attempt(); ended {
			progress.state = stateEnded
			return err
		}
		return c.start(progress)
	})
}

// attemptTime bounds an attempt: the caller wants to look for signals, and gives up to a tenth of a second for that.
const attemptTime = 50 * time.Millisecond

// How long calls in their callers' threads look for answers.
var (
	// attemptSpin is for what memory answers. Between processes of a host that takes a fifth of this time, and all of it where the
	// one that answers must be woken on an idle processor of a virtual machine, which takes 30 us each time.
	attemptSpin = client.NewSpin(300 * time.Microsecond)
	// changeSpin is for what is answered when it is on disks: a fast one takes 200 us, and wakes several threads on the way.
	changeSpin = client.NewSpin(time.Millisecond)
)

// attemptBytes bounds the memory that is read into in an attempt: as much as is copied in that time by far.
const attemptBytes = 32 << 20

// errRoom says that an attempt wants memory that the caller has not brought.
var errRoom = errors.New("the caller has to bring memory")

// attempt tries to carry out a call in the caller's thread, and reports whether it has ended.
func (c *call) attempt() (ended bool, err error) {
	bytes := C.uint64_t(0)
	for _, r := range c.regions {
		bytes += r.bytes
	}
	if !c.kind.repeatable || bytes > attemptBytes || c.kind.wants && (c.count != 1 || bytes == 0) {
		return false, nil
	}
	limit := attemptTime
	if c.timeout > 0 {
		limit = min(limit, c.timeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c.ctx, c.trying = client.WithSpin(ctx, attemptSpin), true
	err = c.kind.do(c)
	c.trying = false
	if errors.Is(err, errRoom) || err != nil && ctx.Err() != nil && limit != c.timeout {
		return false, nil
	}
	return true, err
}

// whole carries out a call in the caller's thread.
func (c *call) whole() error {
	c.begin()
	defer c.cancel()
	c.ctx = client.WithSpin(c.ctx, changeSpin)
	return c.kind.do(c)
}

// begin begins the call's time.
func (c *call) begin() {
	if c.timeout > 0 {
		c.ctx, c.cancel = context.WithTimeout(context.Background(), c.timeout)
	} else {
		c.ctx, c.cancel = context.WithCancel(context.Background())
	}
}

// start begins a call in a goroutine of its own.
func (c *call) start(progress *C.larder_progress) (err error) {
	*progress = C.larder_progress{}
	if c.handle, err = calls.add(c); err != nil {
		return err
	}
	c.begin()
	if c.kind.wants {
		c.rooms = make(chan []C.larder_region, 1)
	}
	c.progress, progress.handle = progress, C.uint64_t(c.handle)
	go c.run()
	return nil
}

// run carries the call out.
func (c *call) run() {
	p := c.progress
	p.code = guard(&p.error, func() error { return c.kind.do(c) })
	c.cancel()
	calls.drop(c.handle)
	c.tell(stateEnded)
}

// tell writes a state to the caller's progress, behind all else that was written there, and wakes who waits for it. After the last
// state nothing of the caller's may be touched.
func (c *call) tell(state uint32) {
	queue, handle := c.queue, c.handle
	at := (*uint32)(unsafe.Pointer(&c.progress.state))
	atomic.StoreUint32(at, state)
	if queue != nil {
		queue.push(handle)
		return
	}
	// By address only: if the caller has seen the state already its memory may be something else's by now, which is woken in vain.
	_, _, _ = unix.RawSyscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(at)), futexWakePrivate, 1)
}

// futexWakePrivate is FUTEX_WAKE_PRIVATE.
const futexWakePrivate = 1 | 128

// ask has the caller bring memory for values whose lengths are these.
func (c *call) ask(from int, sizes []int) ([]C.larder_region, error) {
	if c.trying {
		return nil, errRoom
	}
	for i, n := range sizes {
		c.results[from+i] = C.int64_t(n)
	}
	c.wants.Store(&want{from, len(sizes)})
	c.progress.from, c.progress.count = C.int64_t(from), C.int64_t(len(sizes))
	c.tell(stateWants)
	select {
	case rooms := <-c.rooms:
		return rooms, nil
	case <-c.ctx.Done():
		return nil, c.ctx.Err() //nolint:wrapcheck // says all
	}
}

// larder_client_room brings the memory that a call wants: a region for each of its values, of the value's length, or of no bytes
// where that is 0. It is used until the call has ended. By one thread at a time.
//
//export larder_client_room
func larder_client_room(handle C.uint64_t, regions *C.larder_region, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		c, err := calls.of(uint64(handle))
		if err != nil {
			return err
		}
		w := c.wants.Swap(nil)
		if w == nil {
			return invalid("the call wants no memory")
		}
		atomic.CompareAndSwapUint32((*uint32)(unsafe.Pointer(&c.progress.state)), stateWants, stateUnderWay)
		c.rooms <- append([]C.larder_region(nil), unsafe.Slice(regions, w.count)...) // there is room: it was asked for once
		return nil
	})
}

// larder_client_cancel has a call end soon: wait for it, since it uses memory until then.
//
//export larder_client_cancel
func larder_client_cancel(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		c, err := calls.of(uint64(handle))
		if err != nil {
			return err
		}
		c.cancel()
		return nil
	})
}

// queue tells of calls that have ended, or want memory: their handles, and an eventfd that can be read while there are any.
type queue struct {
	fd int

	mu    sync.Mutex
	ready []uint64 // at most two for each call
}

// push adds a call.
func (q *queue) push(handle uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ready = append(q.ready, handle); len(q.ready) == 1 {
		q.ring()
	}
}

// ring makes the eventfd readable. A counter that is full is readable already.
func (q *queue) ring() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(q.fd, one[:])
}

// larder_queue_open makes a queue for calls. fd is an eventfd, which does not block; it stays the caller's.
//
//export larder_queue_open
func larder_queue_open(fd C.int32_t, opened *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return invalid("a queue needs an eventfd, not file descriptor %d: %v", int32(fd), err)
		}
		h, err := queues.add(&queue{fd: own})
		if err != nil {
			return errors.Join(err, unix.Close(own))
		}
		*opened = C.uint64_t(h)
		return nil
	})
}

// larder_queue_take takes handles of calls for which to wait, at most capacity of them. It does not block: count tells how many.
//
//export larder_queue_take
func larder_queue_take(handle C.uint64_t, out *C.uint64_t, capacity C.int64_t, count *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		q, err := queues.of(uint64(handle))
		if err != nil {
			return err
		}
		if capacity <= 0 || capacity > maxCallItems {
			return invalid("room for %d handles, of 1 to %d", int64(capacity), maxCallItems)
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		var counter [8]byte
		_, _ = unix.Read(q.fd, counter[:]) // it does not block
		n := copy(unsafe.Slice((*uint64)(unsafe.Pointer(out)), capacity), q.ready)
		if q.ready = q.ready[n:]; len(q.ready) > 0 {
			q.ring()
		} else {
			q.ready = nil
		}
		*count = C.int64_t(n)
		return nil
	})
}

// larder_queue_close closes a queue. None of its calls may be under way.
//
//export larder_queue_close
func larder_queue_close(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		q, err := queues.take(uint64(handle))
		if err != nil {
			return err
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		fd := q.fd
		q.fd = -1 // a call that should not be there harms nobody
		return unix.Close(fd)
	})
}
