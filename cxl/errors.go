package cxl

import (
	"errors"
	"fmt"
)

// Reasons why a device, or a part of it, cannot be used. Compare with [errors.Is].
var (
	// ErrNoHeader says that the header span holds only zeros: the device was never formatted.
	ErrNoHeader = errors.New("no header: the device is blank, format it before use")
	// ErrForeignHeader says that the header span holds something that is not ours to overwrite. The error that
	// wraps it is a [*ForeignError].
	ErrForeignHeader = errors.New("foreign content in the header span")
	// ErrCorruptHeader says that the header is ours and neither copy of it passes its checks.
	ErrCorruptHeader = errors.New("corrupt header: both copies fail their checks; " +
		"the device's content is lost, format it again with force")
	// ErrHeaderVersion says that the header was written by a later release.
	ErrHeaderVersion = errors.New("header written by a later release: upgrade this binary")
	// ErrFormatted says that the device already carries this pool's header.
	ErrFormatted = errors.New("device is already formatted for this pool: open it, or format with force to discard it")
	// ErrTruncated says that bytes behind a mapping are gone: the file was truncated, or the memory failed.
	ErrTruncated = errors.New("mapped bytes are gone: the file was truncated or its memory failed; treat it as a miss")
	// ErrClaimed says that another server owns the device. The error that wraps it is a [*ClaimedError].
	ErrClaimed = errors.New("device is claimed")
	// ErrNotClaimed says that an owner's operation was called on a device opened without a claim, or whose claim
	// was taken over by force.
	ErrNotClaimed = errors.New("device is not claimed by this process: open it with Claim set")
	// ErrNoSpace says that the file system lacks the room for a device. The error that wraps it is a [*SpaceError].
	ErrNoSpace = errors.New("not enough room on the file system")
	// ErrNotDevice says that a path is neither a regular file, a memfd nor a device-DAX.
	ErrNotDevice = errors.New("not a pool device: want a regular file, a memfd or a /dev/daxX.Y")
	// ErrRange says that an offset or length lies outside the device's data, or does not fit its counterpart.
	ErrRange = errors.New("outside the device's data")
	// ErrReadOnly says that a write was asked of a mapping or device opened for reading.
	ErrReadOnly = errors.New("opened for reading only")
	// ErrClosed says that the device or mapping was closed.
	ErrClosed = errors.New("closed")
	// ErrNoCacheControl says that this CPU architecture has no cache maintenance that a device without hardware
	// coherence needs.
	ErrNoCacheControl = errors.New("no cache maintenance on this architecture: use a device with hardware coherence")
)

// ForeignError says what occupies a header span. It matches [ErrForeignHeader].
type ForeignError struct {
	Path  string
	Found string // what was found, in words
	Hint  string // what to do next
}

// Error says what was found and what to do.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("cxl: %s holds %s: %s", e.Path, e.Found, e.Hint)
}

// Unwrap makes the error match [ErrForeignHeader].
func (*ForeignError) Unwrap() error { return ErrForeignHeader }

// ClaimedError says who owns a device. It matches [ErrClaimed].
type ClaimedError struct {
	Path   string
	Claim  Claim  // the claim found in the header, zero if none could be read
	Reason string // why it was not taken over
	Hint   string // what to do next
}

// Error says who holds the device and what to do.
func (e *ClaimedError) Error() string {
	if e.Claim.PID == 0 {
		return fmt.Sprintf("cxl: %s is claimed: %s: %s", e.Path, e.Reason, e.Hint)
	}
	return fmt.Sprintf("cxl: %s is claimed by pid %d since %s: %s: %s",
		e.Path, e.Claim.PID, e.Claim.SinceTime().Format("2006-01-02 15:04:05"), e.Reason, e.Hint)
}

// Unwrap makes the error match [ErrClaimed].
func (*ClaimedError) Unwrap() error { return ErrClaimed }

// SpaceError says how many bytes a device still needs and how many its file system has. It matches [ErrNoSpace].
type SpaceError struct {
	Path       string
	Need, Have int64 // bytes
}

// Error names the shortage.
func (e *SpaceError) Error() string {
	return fmt.Sprintf("cxl: %s needs %d more bytes and its file system has %d: free some, enlarge it, or ask for less",
		e.Path, e.Need, e.Have)
}

// Unwrap makes the error match [ErrNoSpace].
func (*SpaceError) Unwrap() error { return ErrNoSpace }
