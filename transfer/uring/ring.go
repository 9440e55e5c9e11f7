package uring

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// entries is how many requests a ring has under way at most: as many as a disk takes.
const entries = 256

// maxBytes bounds a request: the kernel completes what is longer in part.
const maxBytes = 1 << 30

// Of the kernel's interface what is used: see io_uring(7).
const (
	opNop         = 0
	opRead        = 22
	opWrite       = 23
	featSingleMap = 1 << 0
	featFastPoll  = 1 << 5 // it is of Linux 5.7 or later: reads and writes without vectors, from any thread
	mapEntries    = 0x10000000
)

// setup is struct io_uring_params.
type setup struct {
	entries, completions, flags, cpu, idle, features, workers uint32
	_                                                         [3]uint32
	submission                                                struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	completion struct {
		head, tail, mask, entries, overflow, list, flags, _ uint32
		_                                                   uint64
	}
}

// submission is struct io_uring_sqe.
type submission struct {
	op, flags uint8
	priority  uint16
	fd        int32
	off, addr uint64
	length    uint32
	how       uint32
	user      uint64
	_         [3]uint64
}

// completion is struct io_uring_cqe.
type completion struct {
	user   uint64
	result int32
	_      uint32
}

// Ring has a queue of requests that the kernel takes, and one of those that it has completed. Its methods may be called
// concurrently, and for nil.
type Ring struct {
	f      *os.File
	fd     uintptr
	queues []byte // shared with the kernel
	slots  []byte

	submissions []submission
	tail        *atomic.Uint32 // of the submissions

	completions  []completion
	first, after *atomic.Uint32 // the completions that nobody has looked at

	free     chan uint32 // numbers of requests that are not in use
	requests [entries]request
	ended    chan struct{} // closed when nobody looks at completions any more

	mu         sync.Mutex
	last       uint32
	queued     uint32 // that the kernel has not been told of
	submitting bool   // somebody tells it
}

// request is one that is under way.
type request struct {
	p      []byte       // kept for the kernel
	result atomic.Int32 // that the kernel comes between is no order to Go
	done   chan struct{}
}

// New makes a ring. An error means that there is none here.
func New() (*Ring, error) {
	var s setup
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, entries, uintptr(unsafe.Pointer(&s)), 0) //nolint:gosec // the kernel wants it so
	if errno != 0 {
		return nil, os.NewSyscallError("io_uring_setup", errno)
	}
	r := &Ring{fd: fd, free: make(chan uint32, entries), ended: make(chan struct{})}
	err := r.share(&s)
	if err == nil {
		err = r.try()
	}
	if err == nil {
		err = unix.SetNonblock(int(fd), true)
	}
	if err != nil {
		r.unmap()
		return nil, errors.Join(err, unix.Close(int(fd)))
	}
	r.f = os.NewFile(fd, "io_uring")
	if err := r.f.SetDeadline(time.Time{}); err != nil {
		r.unmap()
		return nil, errors.Join(fmt.Errorf("uring: it cannot be waited for: %w", err), r.f.Close())
	}
	for i := range r.requests {
		r.requests[i].done = make(chan struct{}, 1)
		r.free <- uint32(i)
	}
	go r.look()
	return r, nil
}

// share maps the queues.
func (r *Ring) share(s *setup) (err error) {
	const has = featSingleMap | featFastPoll
	if s.features&has != has || s.entries < entries || s.completions < entries {
		return fmt.Errorf("uring: features %#x are those of an old kernel", s.features)
	}
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	size := max(s.submission.array+s.entries*4, s.completion.list+s.completions*uint32(unsafe.Sizeof(completion{})))
	if r.queues, err = unix.Mmap(int(r.fd), 0, int(size), prot, flags); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	if r.slots, err = unix.Mmap(int(r.fd), mapEntries, int(s.entries)*int(unsafe.Sizeof(submission{})), prot, flags); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	at := func(off uint32) unsafe.Pointer { return unsafe.Pointer(&r.queues[off]) } //nolint:gosec // the kernel's layout
	r.tail = (*atomic.Uint32)(at(s.submission.tail))
	r.first, r.after = (*atomic.Uint32)(at(s.completion.head)), (*atomic.Uint32)(at(s.completion.tail))
	r.submissions = unsafe.Slice((*submission)(unsafe.Pointer(&r.slots[0])), s.entries) //nolint:gosec // the kernel's layout
	r.completions = unsafe.Slice((*completion)(at(s.completion.list)), s.completions)   //nolint:gosec // the kernel's layout
	for i := range unsafe.Slice((*uint32)(at(s.submission.array)), s.entries) {         //nolint:gosec // the kernel's layout
		*(*uint32)(at(s.submission.array + 4*uint32(i))) = uint32(i) // for ever
	}
	return nil
}

// try has the kernel do nothing, which it may refuse.
func (r *Ring) try() error {
	r.put(&submission{op: opNop})
	if n, err := r.enter(1); n != 1 || r.after.Load() != 1 {
		return fmt.Errorf("uring: it takes %d requests and completes %d: %w", n, r.after.Load(), err)
	}
	r.first.Store(1)
	return nil
}

func (r *Ring) unmap() {
	for _, m := range [][]byte{r.queues, r.slots} {
		if m != nil {
			_ = unix.Munmap(m) // it is one
		}
	}
}

// Close ends the ring. No call is under way, and none follows.
func (r *Ring) Close() error {
	if r == nil {
		return nil
	}
	err := r.f.Close()
	<-r.ended
	r.unmap()
	return err
}

// ReadAt is f.ReadAt.
func (r *Ring) ReadAt(f *os.File, p []byte, off int64) (int, error) {
	if r.whole(opRead, f, p, off) {
		return len(p), nil
	}
	return f.ReadAt(p, off)
}

// WriteAt is f.WriteAt.
func (r *Ring) WriteAt(f *os.File, p []byte, off int64) (int, error) {
	if r.whole(opWrite, f, p, off) {
		return len(p), nil
	}
	return f.WriteAt(p, off)
}

// whole reports whether the ring has moved all of p. If not, part of it may have been.
func (r *Ring) whole(op uint8, f *os.File, p []byte, off int64) bool {
	if r == nil || len(p) == 0 || len(p) > maxBytes || off < 0 {
		return false
	}
	i := <-r.free
	q := &r.requests[i]
	q.p = p
	r.submit(&submission{
		op: op, fd: int32(f.Fd()), off: uint64(off), user: uint64(i), //nolint:gosec // a file's, and not negative
		addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), length: uint32(len(p)), //nolint:gosec // the kernel wants it so
	})
	<-q.done
	good := int(q.result.Load()) == len(p)
	q.p = nil
	r.free <- i
	runtime.KeepAlive(f)
	return good
}

// submit hands a request to the kernel, with those of others who come meanwhile.
func (r *Ring) submit(s *submission) {
	r.mu.Lock()
	r.put(s)
	r.queued++
	if r.submitting {
		r.mu.Unlock()
		return
	}
	r.submitting = true
	r.mu.Unlock()
	runtime.Gosched() // for those who are about to ask for something, too
	r.mu.Lock()
	for r.queued > 0 {
		n := r.queued
		r.mu.Unlock()
		taken, err := r.enter(n)
		if err != nil { // short of memory, say: it passes
			_ = unix.Nanosleep(&unix.Timespec{Nsec: int64(time.Millisecond)}, nil) // or less
		}
		r.mu.Lock()
		r.queued -= taken
	}
	r.submitting = false
	r.mu.Unlock()
}

// put puts a request where the kernel will look. mu is held. There is room: a request has one of as many numbers.
func (r *Ring) put(s *submission) {
	r.submissions[r.last%uint32(len(r.submissions))] = *s //nolint:gosec // a power of two
	r.last++
	r.tail.Store(r.last)
}

// enter tells the kernel of n requests, and says how many it has taken.
func (r *Ring) enter(n uint32) (taken uint32, err error) {
	k, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, r.fd, uintptr(n), 0, 0, 0, 0)
	if errno != 0 {
		return 0, os.NewSyscallError("io_uring_enter", errno)
	}
	return uint32(k), nil //nolint:gosec // at most n
}

// look wakes those whose requests are completed, until the ring is closed.
func (r *Ring) look() {
	defer close(r.ended)
	raw, err := r.f.SyscallConn()
	if err != nil {
		return // it is closed already
	}
	_ = raw.Read(func(uintptr) bool { // it ends when the ring is closed
		i := r.first.Load()
		for ; i != r.after.Load(); i++ {
			c := &r.completions[i%uint32(len(r.completions))] //nolint:gosec // a power of two
			q := &r.requests[c.user]
			q.result.Store(c.result)
			r.first.Store(i + 1)
			q.done <- struct{}{}
		}
		return false
	})
}
