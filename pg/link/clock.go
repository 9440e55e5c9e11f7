package link

import "time"

// Time here is that of sockets and other processes: the kernel keeps it, and nothing could be simulated by another.

// soon is a deadline for a connection.
func soon(d time.Duration) time.Time { return time.Now().Add(d) } //nolint:forbidigo // see above

// past is a deadline that has passed: it ends what waits for a connection.
func past() time.Time { return time.Unix(1, 0) }

// after is a channel that is sent to once d has passed.
func after(d time.Duration) <-chan time.Time { return time.After(d) } //nolint:forbidigo // see above
