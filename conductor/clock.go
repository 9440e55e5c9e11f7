package conductor

import "time"

// nowNanos is the time of day, in nanoseconds since 1970; it is only told to people.
func nowNanos() int64 { return time.Now().UnixNano() } //nolint:forbidigo // tells people when; nothing is decided by it
