package shm

import "errors"

var (
	// ErrEnded says that the other end of a ring was given up by its process: by Fail or Close.
	ErrEnded = errors.New("shm: the other end of the ring has been given up")
	// ErrCorrupt says that a peer has written what no working peer writes: its process runs another version, or has gone mad.
	ErrCorrupt = errors.New("shm: a peer has written nonsense into memory that it shares")
	// ErrFile says that an open file from a peer is not what it should be.
	ErrFile = errors.New("shm: not a file that can be shared")
	// ErrConfig says that sizes make no sense.
	ErrConfig = errors.New("shm: wrong size")
)
