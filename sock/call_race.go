//go:build race

package sock

import (
	"errors"
	"syscall"
)

// The race detector must see what a socket puts in order: these calls tell it.

func sysRead(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Read(int(fd), p)) }

func sysWrite(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Write(int(fd), p)) }

func result(n int, err error) (int, syscall.Errno) {
	if err == nil {
		return n, 0
	}
	errno, _ := errors.AsType[syscall.Errno](err)
	return 0, errno
}
