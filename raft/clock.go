package raft

import (
	"context"
	"time"
)

// The network needs the wall clock for deadlines and pauses, and nothing else in
// the package does: it is read here only.

// deadlineIn is the time d from now, for connections.
func deadlineIn(d time.Duration) time.Time {
	return time.Now().Add(d) //nolint:forbidigo // see above
}

// pause waits for d; false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d) //nolint:forbidigo // see above
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// newTimer is a stopped timer.
func newTimer() *time.Timer {
	t := time.NewTimer(time.Hour) //nolint:forbidigo // see above
	t.Stop()
	return t
}
