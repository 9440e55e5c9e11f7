package zmtp

import "time"

// Deadlines of connections are the system's own: the kernel's timers end reads and writes.

// soon is a deadline after some time from now.
func soon(d time.Duration) time.Time {
	return time.Now().Add(d) //nolint:forbidigo // as above
}

// pause waits.
func pause(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // as above
}

// every ticks.
func every(d time.Duration) *time.Ticker {
	return time.NewTicker(d) //nolint:forbidigo // as above
}
