package collective

import "time"

// now and since time the probes of Measure, and tell when an operation stands still; nothing else here has to do with time.
func now() time.Time                          { return time.Now() }        //nolint:forbidigo // what is measured is this machine
func since(begin time.Time) (t time.Duration) { return time.Since(begin) } //nolint:forbidigo // as above
