package replay

import (
	"context"
	"time"
)

// This file is the only one of the package that waits for time to pass; it measures on CLOCK_BOOTTIME.

// sleep waits, or returns the context's error if that is over first.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
}
