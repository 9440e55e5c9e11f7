//go:build cgo

package main

import "time"

// timer tells when a caller's patience is over. It decides nothing but when a call returns.
func timer(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(d) //nolint:forbidigo // bounds a caller's wait, in the time of the caller
	return t.C, t.Stop
}

// stopwatch tells how long ago it was made, for measurements.
func stopwatch() func() time.Duration {
	began := time.Now()                                      //nolint:forbidigo // measures, and decides nothing but when to stop measuring
	return func() time.Duration { return time.Since(began) } //nolint:forbidigo // the same
}
