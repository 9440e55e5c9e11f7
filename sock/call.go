//go:build !race

package sock

import (
	"syscall"
	"unsafe"
)

func sysRead(fd uintptr, p []byte) (int, syscall.Errno) { return call(syscall.SYS_READ, fd, p) }

func sysWrite(fd uintptr, p []byte) (int, syscall.Errno) { return call(syscall.SYS_WRITE, fd, p) }

func call(trap, fd uintptr, p []byte) (int, syscall.Errno) {
	//nolint:gosec // the slice holds what its length says
	n, _, errno := syscall.RawSyscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
