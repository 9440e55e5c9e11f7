package ssd

import "time"

// clock is how compaction waits. Tests bring their own.
type clock interface {
	// after gives a channel that becomes readable in d, and a function that ends the wait early.
	after(d time.Duration) (<-chan time.Time, func() bool)
}

type realClock struct{}

func (realClock) after(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(d) //nolint:forbidigo // this is the clock that is injected
	return t.C, t.Stop
}
