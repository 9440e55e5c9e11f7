package rm

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

// sinceStart returns a clock that runs from now on.
func sinceStart() func() time.Duration {
	start := time.Now()                                      //nolint:forbidigo // how long an answer is remembered
	return func() time.Duration { return time.Since(start) } //nolint:forbidigo // as above
}
