package store

import (
	"context"
	"time"

	"larder/cxl"
)

// Time here is that of other processes and of the kernel: nothing could be simulated by another clock. How old a lease is, is
// measured by the clock that goes on while a host is suspended.

// now reads that clock, in nanoseconds.
func now() int64 { return cxl.Boottime() }

// ago is how long before now that was.
func ago(at int64) time.Duration { return time.Duration(max(now()-at, 0)) }

// soon is a deadline for a connection.
func soon(d time.Duration) time.Time { return time.Now().Add(d) } //nolint:forbidigo // see above

// epoch is a number that is greater than what an earlier process of any host was told, if that has counted up from there less
// than once a nanosecond.
func epoch() uint64 { return uint64(time.Now().UnixNano()) } //nolint:forbidigo // see above

// sleep waits, or returns the context's error if that is over first.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d) //nolint:forbidigo // see above
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
}

// every ticks until stop is called. A tick that nobody takes in time is left out.
func every(d time.Duration) (tick <-chan time.Time, stop func()) {
	t := time.NewTicker(d) //nolint:forbidigo // see above
	return t.C, t.Stop
}
