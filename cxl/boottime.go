package cxl

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Boottime returns nanoseconds since this host booted, time spent in suspend included (CLOCK_BOOTTIME). It never goes
// back, and is comparable between processes of one host and one time namespace. It costs one bare system call, 0.1 to
// 0.5 us by the machine's mitigations, as the runtime's own clock, which is cheaper, stands still through a suspend:
// read it once for a batch of requests. It does not allocate.
func Boottime() int64 { return readClock(unix.CLOCK_BOOTTIME) }

// wallNanos is the wall clock in Unix nanoseconds, for records that people read.
func wallNanos() int64 { return readClock(unix.CLOCK_REALTIME) }

// readClock reads a clock that every supported kernel has. The call cannot block, so the scheduler is not told of it.
func readClock(id uintptr) int64 {
	var ts unix.Timespec
	_, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0) //nolint:gosec // the call fills ts and keeps nothing
	if errno != 0 {
		panic("cxl: clock_gettime: " + errno.Error()) // impossible since Linux 2.6.39
	}
	return ts.Nano()
}
