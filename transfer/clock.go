package transfer

import "time"

// Time here is that of sockets and other processes: the kernel keeps it, and nothing could be simulated by another. What
// must not depend on suspends or on who steps the clock is measured by [Engine.now].

// moment is a reading of the monotonic clock.
func moment() time.Time { return time.Now() } //nolint:forbidigo // see above

// since is how long ago that was.
func since(t time.Time) time.Duration { return time.Since(t) } //nolint:forbidigo // see above

// soon is a deadline for a connection.
func soon(d time.Duration) time.Time { return moment().Add(d) }

// past is a deadline that has passed: it ends what waits for a connection.
func past() time.Time { return time.Unix(1, 0) }

// after is a channel that is sent to once d has passed.
func after(d time.Duration) <-chan time.Time { return time.After(d) } //nolint:forbidigo // see above

// monotonic is the process's clock, in nanoseconds from now on.
func monotonic() func() int64 {
	start := moment()
	return func() int64 { return int64(since(start)) }
}

// every ticks until stop is called. A tick that nobody takes in time is left out.
func every(d time.Duration) (tick <-chan time.Time, stop func()) {
	t := time.NewTicker(d) //nolint:forbidigo // see above
	return t.C, t.Stop
}
