package maru

import (
	"context"
	"time"
)

// now is the present, for measuring how long requests have waited. It and pause are the only places of the package that ask
// what time it is.
func now() time.Time {
	return time.Now() //nolint:forbidigo // see above
}

// pause waits for d, or until ctx ends; then it returns false.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d) //nolint:forbidigo // see now
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
