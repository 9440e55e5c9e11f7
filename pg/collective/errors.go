package collective

import (
	"errors"
	"fmt"
)

// ErrArgs says that an operation cannot be what its caller asks for. Nothing was sent. What follows says why.
var ErrArgs = errors.New("collective: wrong arguments")

// ErrComm says that a Comm's fields do not fit together, or that an operation was started before the last one was over.
var ErrComm = errors.New("collective: wrong use of a mesh")

// MismatchError says that another member has called something else than this one at the same point.
type MismatchError struct {
	Member int // who
	Want   Signature
	Got    Signature // what it has called
}

// Error implements error.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("collective: member %d has called %v, and this one %v: all must call the same in the same order",
		e.Member, e.Got, e.Want)
}

// DownError says that an operation cannot end because a member is dead that has not done its part.
type DownError struct {
	Member int
	Err    error // what told of it; nil if nothing is known
}

// Error implements error.
func (e *DownError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("collective: member %d is down", e.Member)
	}
	return fmt.Sprintf("collective: member %d is down: %v", e.Member, e.Err)
}

// Unwrap gives what told of it.
func (e *DownError) Unwrap() error { return e.Err }
