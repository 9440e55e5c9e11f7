package pg

import "time"

// Time here is that of other processes: the kernel keeps it.

// moment is a reading of the monotonic clock.
func moment() time.Time { return time.Now() } //nolint:forbidigo // see above

// since is how long ago that was.
func since(t time.Time) time.Duration { return time.Since(t) } //nolint:forbidigo // see above

// every ticks until stop is called. A tick that nobody takes in time is left out.
func every(d time.Duration) (tick <-chan time.Time, stop func()) {
	t := time.NewTicker(d) //nolint:forbidigo // see above
	return t.C, t.Stop
}

// pause waits, or for stop.
func pause(d time.Duration, stop <-chan struct{}) {
	t := time.NewTimer(d) //nolint:forbidigo // see above
	defer t.Stop()
	select {
	case <-t.C:
	case <-stop:
	}
}

// afterFunc calls f after d.
func afterFunc(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, f) //nolint:forbidigo // see above
}
