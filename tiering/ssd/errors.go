package ssd

import (
	"errors"
	"fmt"
)

// Errors of a [Store]; what is returned wraps one of them.
var (
	// ErrNotFound means that some byte of the range is not there: never written, discarded, or of an older generation.
	ErrNotFound = errors.New("ssd: not found")
	// ErrDamaged means that what the disk gave back is not what was written: to be taken as a miss. It is counted.
	ErrDamaged = errors.New("ssd: damaged")
	// ErrNoSpace means that the store holds as much as its capacity allows. Discards are still taken.
	ErrNoSpace = errors.New("ssd: no space")
	// ErrFailed means that a write or a flush failed and nothing is known of what reached the disk since: the store has
	// stopped for good. Mend the disk and open the store again; what was acknowledged is found by the log.
	ErrFailed = errors.New("ssd: the storage failed, mend the disk and open the store again")
	// ErrClosed means that the store was closed.
	ErrClosed = errors.New("ssd: closed")
	// ErrRange means that an extent does not lie within the logical size.
	ErrRange = errors.New("ssd: out of range")

	// ErrNoStore means that the directory holds no store, and none was to be made.
	ErrNoStore = errors.New("ssd: no store here")
	// ErrCorrupt means that both copies of the superblock are damaged, or contradict each other.
	ErrCorrupt = errors.New("ssd: damaged superblock")
	// ErrVersion means that a later release wrote the store.
	ErrVersion = errors.New("ssd: later format")
	// ErrMismatch means that the store is another pool's or device's, or of another shape than asked for.
	ErrMismatch = errors.New("ssd: another store")
	// ErrLocked means that another process has the store open.
	ErrLocked = errors.New("ssd: open in another process")
	// ErrOptions means that options contradict each other or a bound.
	ErrOptions = errors.New("ssd: bad options")
)

// noSpace says what to do about a full store.
func noSpace(live, usable int64) error {
	return fmt.Errorf("%w: %d of %d usable bytes are live: discard extents, or open with a larger Capacity", ErrNoSpace, live, usable)
}
