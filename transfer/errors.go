package transfer

import (
	"errors"
	"fmt"
)

// Reasons why a request fails. Compare with errors.Is.
var (
	// ErrStale says that the buffer is not registered, or under another generation: nothing has been read or written.
	ErrStale = errors.New("transfer: the buffer is gone or has another generation: describe the segment again")
	// ErrRange says that a request does not lie within its buffer.
	ErrRange = errors.New("transfer: outside of the buffer")
	// ErrReadOnly says that a WRITE was asked of a buffer that is registered for reading.
	ErrReadOnly = errors.New("transfer: the buffer is registered for reading only")
	// ErrCanceled says that the batch was canceled before this request was carried out.
	ErrCanceled = errors.New("transfer: canceled")
	// ErrTimeout says that a request was not carried out in time. It lands no more.
	ErrTimeout = errors.New("transfer: not done in time")
	// ErrUnsettled says that a WRITE failed and its bytes may still land: the peer does not answer. Leave the range
	// alone until [Batch.Settled] is closed, or the peer's process is known to have ended.
	ErrUnsettled = errors.New("transfer: the peer does not answer, bytes may still land there")
	// ErrChecksum says that bytes arrived which are not those that were sent, on every way there is.
	ErrChecksum = errors.New("transfer: checksum mismatch")
	// ErrNoPath says that no way to the peer is left.
	ErrNoPath = errors.New("transfer: no way to the peer is left")
	// ErrClosed says that the engine, or the segment, was closed.
	ErrClosed = errors.New("transfer: closed")
	// ErrMemory says that memory behind a buffer is gone: its file was truncated, or the memory failed.
	ErrMemory = errors.New("transfer: memory behind the buffer is gone")
	// ErrStorage says that the storage under a buffer failed. What it says itself follows.
	ErrStorage = errors.New("transfer: the storage under the buffer failed")
	// ErrMissing says that nothing is stored, or nothing that is whole, where a READ asked.
	ErrMissing = errors.New("transfer: nothing is stored there")
	// ErrFull says that an engine has as many notifications waiting as it takes: this one was not delivered. Try later.
	ErrFull = errors.New("transfer: the receiver has not taken its notifications")
	// ErrUncertain says that the peer has not answered: what it was told it may know, or not.
	ErrUncertain = errors.New("transfer: the peer has not answered, it may have been told or not")
	// ErrNoRoom says that the peer has no room for another endpoint, in spite of asking others to let go of theirs. Try again.
	ErrNoRoom = errors.New("transfer: the peer has no room for another endpoint")
	// ErrRefused says that the peer does not take this process: a wrong token, or another protocol.
	ErrRefused = errors.New("transfer: refused by the peer")
)

// PathError is the last failure on the way to a peer, inside of [ErrNoPath].
type PathError struct {
	Peer string // its name
	Path string // transport, address here, address there
	Err  error
}

// Error implements error.
func (e *PathError) Error() string { return fmt.Sprintf("to %s by %s: %v", e.Peer, e.Path, e.Err) }

// Unwrap gives the failure.
func (e *PathError) Unwrap() error { return e.Err }
