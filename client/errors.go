package client

import (
	"context"
	"errors"
	"fmt"

	"larder/protocol"
)

// Reasons why a call failed, for errors.Is. Every error of this package that comes from a server, or from the state of
// the session, is an [*Error], which matches the one that belongs to its code.
var (
	// ErrNotFound says that no such key is held, or that its bytes did not survive.
	ErrNotFound = errors.New("not found")
	// ErrNoSpace says that nothing is evictable, or that the value is larger than the pool.
	ErrNoSpace = errors.New("no space: nothing is evictable; unpin entries, or enlarge the pool")
	// ErrSessionExpired says that the session ended while the call ran, and its regions with it. The client opens
	// another one by itself: repeat the call.
	ErrSessionExpired = errors.New("session expired")
	// ErrRevoked says that the region of an open Alloc was taken away. Repeat Alloc and Store.
	ErrRevoked = errors.New("region revoked")
	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("client is closed")
	// ErrLease says that a lease ended before the bytes had been used: what was read may be wrong. Repeat the read.
	ErrLease = errors.New("lease ended: throw the bytes away and read again")
	// ErrTimeout says that no decision was reached in time. An interrupted store is undone in the background.
	ErrTimeout = errors.New("timed out")
	// ErrPinned says that a pin holds the entry.
	ErrPinned = errors.New("pinned")
	// ErrConfig says that a Config, an argument, or what a server offered cannot be used.
	ErrConfig = errors.New("invalid argument")
)

// Error says what failed, of which key, and what to do. Compare it with the Err values of this package.
type Error struct {
	Code protocol.Code // what the server said, or the code that fits best
	Op   string        // the method that failed, such as "put"
	Key  string        // the key concerned, if one was
	Hint string        // what to do next, for people; may be empty
	Err  error         // what caused it; may be nil
}

// Error describes e for people.
func (e *Error) Error() string {
	s := "client: " + e.Op
	if e.Key != "" {
		s += fmt.Sprintf(" %.64q", e.Key)
	}
	s += ": " + e.Code.String()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is matches the sentinel of e's code.
func (e *Error) Is(target error) bool { return target == sentinels[e.Code] }

// Retryable reports whether the same call may succeed if it is repeated.
func (e *Error) Retryable() bool {
	return e.Code.Retryable() || e.Code == protocol.CodeSessionExpired || errors.Is(e.Err, ErrLease)
}

// Retryable reports whether err is an [*Error] that says so, or ErrLease, ErrRevoked or ErrSessionExpired.
func Retryable(err error) bool {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Retryable()
	}
	return errors.Is(err, ErrLease) || errors.Is(err, ErrRevoked) || errors.Is(err, ErrSessionExpired)
}

var sentinels = map[protocol.Code]error{
	protocol.CodeNotFound:       ErrNotFound,
	protocol.CodeNoSpace:        ErrNoSpace,
	protocol.CodeSessionExpired: ErrSessionExpired,
	protocol.CodeRevoking:       ErrRevoked,
	protocol.CodeTimeout:        ErrTimeout,
	protocol.CodePinned:         ErrPinned,
	protocol.CodeBadRequest:     ErrConfig,
	protocol.CodeConflict:       ErrConflict,
}

// Errors of the transport. None of them leaves the package unless the time for retries is over.
var (
	errConnLost    = errors.New("connection lost")
	errCallTimeout = errors.New("no answer in time")
	errBacklog     = errors.New("too many bytes wait to be sent")
)

// fail makes the Error that a method returns. Errors that are one already keep their code; a context's error is a
// timeout or the caller's own doing, and stays visible to errors.Is.
func fail(op string, key []byte, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrClosed) {
		return ErrClosed
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	e := &Error{Op: op, Key: string(key), Err: err}
	if p, ok := errors.AsType[*protocol.Error](err); ok {
		e.Code, e.Hint, e.Err = p.Code, p.Message, nil
		return e
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		e.Code = protocol.CodeTimeout
	case errors.Is(err, errConnLost), errors.Is(err, errCallTimeout), errors.Is(err, errBacklog):
		e.Code, e.Hint = protocol.CodeUnavailable, "no master answered in time: are they running, at these addresses?"
	case errors.Is(err, ErrSessionExpired):
		e.Code = protocol.CodeSessionExpired
	case errors.Is(err, ErrRevoked):
		e.Code = protocol.CodeRevoking
	case errors.Is(err, ErrNotFound):
		e.Code = protocol.CodeNotFound
	case errors.Is(err, ErrLease):
		e.Code = protocol.CodeTimeout
	case errors.Is(err, ErrNoSpace):
		e.Code = protocol.CodeNoSpace
	case errors.Is(err, ErrConfig):
		e.Code = protocol.CodeBadRequest
	default:
		e.Code = protocol.CodeOf(err)
	}
	return e
}

// refused makes an error of a code, with what to do about it.
func refused(code protocol.Code, hint string) error {
	return &protocol.Error{Code: code, Message: hint}
}
