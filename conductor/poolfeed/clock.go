package poolfeed

import (
	"context"
	"time"
)

// Nothing that is told depends on the clock: it ends waits, and says when what is known is too old.

// clock is the time since some moment; it never goes back.
func clock() time.Duration { return time.Since(began) } //nolint:forbidigo // as above

var began = time.Now() //nolint:forbidigo // as above

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	t := timer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// timer fires once, after d.
func timer(d time.Duration) *time.Timer {
	return time.NewTimer(d) //nolint:forbidigo // as above
}
