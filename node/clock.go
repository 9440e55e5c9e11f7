package node

import (
	"context"
	"time"

	"larder/cxl"
)

// This file is the only one that waits for time to pass.

// clock is what tests replace.
type clock interface {
	// now is CLOCK_BOOTTIME in nanoseconds.
	now() int64
	// timer is ready once after d. stop frees it.
	timer(d time.Duration) (ready <-chan time.Time, stop func() bool)
}

type hostClock struct{}

func (hostClock) now() int64 { return cxl.Boottime() }

func (hostClock) timer(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(d) //nolint:forbidigo // see above
	return t.C, t.Stop
}

// sleep waits, or returns the context's error if that is over first.
func sleep(ctx context.Context, c clock, d time.Duration) error {
	return wait(ctx, c, d, nil)
}

// wait returns when d has passed or something came from woken, or the context's error if that is over first.
func wait(ctx context.Context, c clock, d time.Duration, woken <-chan struct{}) error {
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // callers wrap
	}
	ready, stop := c.timer(d)
	defer stop()
	select {
	case <-ready:
	case <-woken:
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	return nil
}
