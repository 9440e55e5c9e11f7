package transfer

import (
	"fmt"
	"time"
)

// BudgetError says that a NIC has no room for an endpoint to one peer. Other peers that have theirs go on. Try again
// later, or let another NIC carry; if it does not pass, [EndpointStats] tell who holds the queue pairs.
type BudgetError struct {
	NIC, Peer               string
	QPs, Budget             int // allocated; how many may be, or the NIC has turned out to have
	Endpoints, MaxEndpoints int
	Waiting, MaxWaiting     int // retired, not destroyed yet
	Connecting              int // other peers that wait for room or for their peer's answer
	Err                     error
}

// Error implements error.
func (e *BudgetError) Error() string {
	return fmt.Sprintf("transfer: NIC %s has no room for peer %s: %d of %d queue pairs, %d of %d endpoints, %d of %d waiting to be "+
		"destroyed, %d connecting: %v: try later, take another NIC, or raise the budget", e.NIC, e.Peer, e.QPs, e.Budget,
		e.Endpoints, e.MaxEndpoints, e.Waiting, e.MaxWaiting, e.Connecting, e.Err)
}

// Unwrap gives the reason: syscall.ENOMEM if it was the NIC that had no queue pair left.
func (e *BudgetError) Unwrap() error { return e.Err }

// BackoffError says that a peer has failed and is left alone for now. Take another way to it.
type BackoffError struct {
	NIC, Peer string
	Failures  int           // in a row
	Left      time.Duration // until it may be tried again
	Err       error         // the last failure
}

// Error implements error.
func (e *BackoffError) Error() string {
	return fmt.Sprintf("transfer: peer %s by NIC %s: %d failures in a row, it may be tried again in %v: %v", e.Peer, e.NIC, e.Failures,
		e.Left, e.Err)
}

// Unwrap gives the last failure.
func (e *BackoffError) Unwrap() error { return e.Err }

// NICError says that a NIC carries nothing at present. Its monitor looks every second whether it does again.
type NICError struct {
	NIC   string
	State NICState
	Err   error // why
}

// Error implements error.
func (e *NICError) Error() string {
	return fmt.Sprintf("transfer: NIC %s is %v: %v: take another NIC", e.NIC, e.State, e.Err)
}

// Unwrap gives the reason.
func (e *NICError) Unwrap() error { return e.Err }
