package cluster

import "time"

// Tests of real processes run on the wall clock, since the processes do. It is read and waited for here only.

func now() time.Time { return time.Now() } //nolint:forbidigo // see above

func since(t time.Time) time.Duration { return time.Since(t) } //nolint:forbidigo // see above

func until(t time.Time) time.Duration { return time.Until(t) } //nolint:forbidigo // see above

func sleep(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // see above

func after(d time.Duration) <-chan time.Time { return time.After(d) } //nolint:forbidigo // see above
