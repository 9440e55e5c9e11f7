package main

import (
	"sync/atomic"
	"time"
)

// The proxy's time is the machine's: whoever it waits for is outside of this process.

// now is the time.
func now() time.Time {
	return time.Now() //nolint:forbidigo // as above
}

// after calls f once d has passed, unless it is stopped or reset before.
func after(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, f) //nolint:forbidigo // as above
}

// cooloff keeps what failed from being tried again at once. Its methods may be called concurrently.
type cooloff struct{ until atomic.Int64 }

// begin starts it, or starts it again. It reports whether it was over.
func (c *cooloff) begin(d time.Duration) bool {
	t := now()
	return c.until.Swap(t.Add(d).UnixNano()) < t.UnixNano()
}

// end says that what failed has worked.
func (c *cooloff) end() { c.until.Store(0) }

// on reports whether it is not over.
func (c *cooloff) on() bool {
	until := c.until.Load()
	return until != 0 && now().UnixNano() < until
}
