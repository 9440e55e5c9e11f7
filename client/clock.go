package client

import (
	"context"
	"time"
)

// This file is the only one that waits for time to pass. Deadlines that matter to safety are never measured by these
// timers, but on Config.Clock.

// sleep waits, or returns the context's error if that is over first.
func sleep(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // callers wrap
	}
	t := time.NewTimer(d) //nolint:forbidigo // see above
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// wake returns a channel that is ready after d, and a function that frees the timer.
func wake(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(d) //nolint:forbidigo // see above
	return t.C, t.Stop
}

// margin is how much earlier than the granter's the holder's end of a duration of d nanoseconds is: clocks of two
// hosts run at most 1% apart (crystals do 0.01%), and 2 ms cover the granularity of milliseconds twice.
func margin(d int64) int64 { return d/100 + 2*int64(time.Millisecond) }

// millis is ms milliseconds in nanoseconds, bounded to a day, so that no sum overflows.
func millis(ms uint64) int64 {
	const day = 24 * 60 * 60 * 1000
	return int64(min(ms, day)) * int64(time.Millisecond)
}

// timeLeft is how much of d is left when ctx is over by then: d if ctx has no deadline, and 0 if that has passed. A
// context's deadline is a wall-clock time.
func timeLeft(ctx context.Context, d time.Duration) time.Duration {
	if end, has := ctx.Deadline(); has {
		d = min(d, max(time.Until(end), 0)) //nolint:forbidigo // see above
	}
	return d
}
