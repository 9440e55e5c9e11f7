package server

import (
	"context"
	"time"

	"larder/cxl"
)

// systemClock is the host's clock. It and the timers below are the only places of the package that ask what time it
// is, apart from deadlines of sockets.
type systemClock struct{}

// Boottime implements Clock.
func (systemClock) Boottime() int64 { return cxl.Boottime() }

// every calls fn about every interval until ctx ends. Calls that are late are left out.
func every(ctx context.Context, interval time.Duration, fn func()) {
	t := time.NewTicker(interval) //nolint:forbidigo // see systemClock
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			fn()
		}
	}
}

// pause waits for d, or until ctx ends; then it returns false.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d) //nolint:forbidigo // see systemClock
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// socketDeadline is the wall-clock time d from now, which is what net.Conn wants. The runtime measures it on the
// monotonic clock.
func socketDeadline(d time.Duration) time.Time {
	return time.Now().Add(d) //nolint:forbidigo // see systemClock
}
