package member

import "time"

const (
	// ReportWindow bounds how long members wait for each other's word on a suspect: long enough for one whom the scheduler has passed
	// over, and short enough for the survivors of a failure to go on within a second.
	ReportWindow = 500 * time.Millisecond
	// Standby is how long each rank gives those before it to do what is to be done: several round trips of the store.
	Standby = 50 * time.Millisecond
	// RetryPause is how long to wait before something that has failed is tried again.
	RetryPause = 50 * time.Millisecond
	// MeshPause is how long a peer counts as unreachable to whom a channel could not be made although the connection is there: longer than
	// it takes to agree on a view without him.
	MeshPause = 2 * time.Second
	// HoldLimit is how long a proposal may keep operations waiting for members whose leases are in order, but who do not answer: less
	// than a lease, and far more than a hook takes. It includes connecting, where a failure has begun it.
	HoldLimit = 2 * time.Second
	// ConnectLimit is how long members may take to connect while nothing waits for it: registering memory with NICs takes seconds.
	ConnectLimit = 10 * time.Second
	// AdmitTimeout bounds how long Activate waits for those who are to be members, as the original does.
	AdmitTimeout = 20 * time.Second
	// SyncTimeout bounds how long Sync waits, as the original does.
	SyncTimeout = 30 * time.Second
)

const (
	// tickPause bounds how long a group goes without looking at the time: a fraction of any lease.
	tickPause = 50 * time.Millisecond
	// storeTimeout bounds one request to the store; what has become of it is asked again.
	storeTimeout = 2 * time.Second
	// closeTimeout bounds how long Close takes to say goodbye: others learn it from the lease else.
	closeTimeout = 2 * time.Second
)

// start is the zero of the package's clock, which goes on while the process is stopped.
var start = time.Now() //nolint:forbidigo // this file is the only one that asks for the time

// now is the time since start.
func now() time.Duration {
	return time.Since(start) //nolint:forbidigo // see start
}

// sleep waits for d, or until woken has something or done is closed; it reports whether done is not.
func sleep(d time.Duration, woken, done <-chan struct{}) bool {
	t := time.NewTimer(d) //nolint:forbidigo // see start
	defer t.Stop()
	select {
	case <-t.C:
	case <-woken:
	case <-done:
		return false
	}
	return true
}
