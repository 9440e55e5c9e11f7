package source

import "time"

// This file is the only one that reads a clock: how long an engine has been away is a matter of real time, and nothing of what
// is known depends on it but when it is dropped.

func now() time.Time {
	return time.Now() //nolint:forbidigo // as above
}

func since(t time.Time) time.Duration {
	return time.Since(t) //nolint:forbidigo // as above
}

// timer is ready once after d. stop frees it.
func timer(d time.Duration) (ready <-chan time.Time, stop func() bool) {
	t := time.NewTimer(d) //nolint:forbidigo // as above
	return t.C, t.Stop
}
