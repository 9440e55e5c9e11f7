package shm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sealed is what keeps a mapping from ever faulting: the file has the size that it has for good.
const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// create makes an anonymous file of zeros that no process can shorten. Memory is taken when it is touched.
func create(name string, size int) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("shm: make shared memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(size)); err != nil {
		return nil, errors.Join(fmt.Errorf("shm: make shared memory of %d bytes: %w", size, err), f.Close())
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sealed); err != nil {
		return nil, errors.Join(fmt.Errorf("shm: seal shared memory: %w", err), f.Close())
	}
	return f, nil
}

// sealWrites has nobody map the file for writing from now on; mappings that there are stay as they are. Kernels older than
// 5.1 cannot do it: then a peer that goes mad may garble what others read, and is found out by the checks that they make.
func sealWrites(f *os.File) {
	_, _ = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
}

// admit looks whether a peer's file is safe to map, and how long it is.
func admit(f *os.File) (size int, err error) {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("%w: it has no seals: %w", ErrFile, err)
	}
	if seals&sealed != sealed {
		return 0, fmt.Errorf("%w: it is not sealed against shrinking and growing (seals %#x)", ErrFile, seals)
	}
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("shm: look at shared memory: %w", err)
	}
	if info.Size() <= 0 || info.Size() > maxFile {
		return 0, fmt.Errorf("%w: it has %d bytes", ErrFile, info.Size())
	}
	return int(info.Size()), nil
}

// maxFile bounds what a peer can have this process map.
const maxFile = 4 << 30

// mapFile maps a whole file. A child that is forked does not inherit it: it must not go on where its parent has ended.
func mapFile(f *os.File, size int, writable bool) ([]byte, error) {
	p, err := mapAt(nil, f, 0, size, writable)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), size), nil //nolint:gosec // so much is mapped
}

func mapAt(at unsafe.Pointer, f *os.File, offset, size int, writable bool) (unsafe.Pointer, error) {
	prot, flags := unix.PROT_READ, unix.MAP_SHARED
	if writable {
		prot |= unix.PROT_WRITE
	}
	if at != nil {
		flags |= unix.MAP_FIXED
	}
	p, err := unix.MmapPtr(int(f.Fd()), int64(offset), at, uintptr(size), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("shm: map shared memory: %w", err)
	}
	_ = unix.Madvise(unsafe.Slice((*byte)(p), size), unix.MADV_DONTFORK) //nolint:gosec // so much is mapped; best effort
	return p, nil
}

// mapTwice maps a file's first head bytes, and the size bytes behind them twice in a row.
func mapTwice(f *os.File, head, size int) ([]byte, error) {
	whole := head + 2*size
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(whole), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("shm: reserve addresses: %w", err)
	}
	b := unsafe.Slice((*byte)(base), whole) //nolint:gosec // so much is mapped
	if _, err = mapAt(base, f, 0, head+size, true); err == nil {
		_, err = mapAt(unsafe.Add(base, head+size), f, head, size, true)
	}
	if err != nil {
		return nil, errors.Join(err, unmap(b))
	}
	return b, nil
}

// unmap lets go of what mapFile or mapTwice has mapped.
func unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))) //nolint:gosec // it is a mapping
}

// Operations of futex(2). Without FUTEX_PRIVATE_FLAG they work between processes.
const (
	futexWaitOp = 0
	futexWakeOp = 1
)

// futexWait sleeps until the word is woken, for as long as it is was, and no longer than limit. It may return early.
func futexWait(b []byte, at int, was uint32, limit time.Duration) {
	ts := unix.NsecToTimespec(int64(limit))
	// EAGAIN (the word is another by now), EINTR and ETIMEDOUT all mean: look again.
	//nolint:gosec // the word is aligned, and mapped memory does not move
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b[at])), futexWaitOp, uintptr(was), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// futexWake wakes all that sleep on the word. It does not block, so the scheduler need not know of it.
func futexWake(b []byte, at int) {
	//nolint:gosec // as above
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b[at])), futexWakeOp, math.MaxInt32, 0, 0, 0)
}
