package p2p

import (
	"errors"
	"fmt"
)

var (
	// ErrPending is what [Config.Lane] says as long as a lane is being made.
	ErrPending = errors.New("p2p: the lane is being made")
	// ErrClosed ends the operations of a port that is closed.
	ErrClosed = errors.New("p2p: the port is closed")
	// ErrReplaced ends operations with a process whose place another has taken.
	ErrReplaced = errors.New("p2p: another process has taken the rank")
)

// DownError ends an operation with a rank that is dead or cannot be reached.
type DownError struct {
	Rank int // Any: no rank is left
	Err  error
}

func (e *DownError) Error() string {
	if e.Rank == Any {
		return fmt.Sprintf("p2p: no rank is left to receive from: %v", e.Err)
	}
	return fmt.Sprintf("p2p: rank %d is down: %v", e.Rank, e.Err)
}

func (e *DownError) Unwrap() error { return e.Err }

// TruncateError ends a receive whose buffer was too short for the message. The buffer is full; the rest of the message is lost.
type TruncateError struct {
	From   int
	Tag    uint64
	Bytes  int // of the message
	Buffer int // bytes that there was room for
}

func (e *TruncateError) Error() string {
	return fmt.Sprintf("p2p: rank %d has sent %d bytes with tag %d to a buffer of %d: receive into one that is as long",
		e.From, e.Bytes, e.Tag, e.Buffer)
}

// ProtocolError says that a rank has sent what this version does not.
type ProtocolError struct {
	Rank   int
	Reason string
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("p2p: rank %d has sent %s: it runs another version, or has gone mad", e.Rank, e.Reason)
}
