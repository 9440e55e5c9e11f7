package service

import "time"

// began is where this process's time begins.
var began = time.Now() //nolint:forbidigo // what all durations are measured from

// now is the time since the start of the process; it never goes backwards.
func now() time.Duration { return time.Since(began) } //nolint:forbidigo // the one clock of this package

// nowNanos is the same as a number.
func nowNanos() int64 { return int64(now()) }

// every ticks until it is stopped.
func every(d time.Duration) *time.Ticker { return time.NewTicker(d) } //nolint:forbidigo // the one clock of this package
