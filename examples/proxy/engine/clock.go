package engine

import (
	"context"
	"time"
)

// An engine takes its time in that of the machine: whoever waits for it is outside of this process.

// now is the time.
func now() time.Time {
	return time.Now() //nolint:forbidigo // as above
}

// pause waits, or until the context ends.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d) //nolint:forbidigo // as above
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
