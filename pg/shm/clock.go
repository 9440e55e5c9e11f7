package shm

import "time"

// A wait is as long as it is for whoever waits, a process outside: there is nothing to simulate.

// moment is a reading of the monotonic clock.
func moment() time.Time { return time.Now() } //nolint:forbidigo // see above

// since is how long ago that was.
func since(t time.Time) time.Duration { return time.Since(t) } //nolint:forbidigo // see above
