package zmtp

import "errors"

// What goes wrong with a peer. All end the connection.
var (
	// ErrProtocol says that the peer sends what is not ZMTP 3.
	ErrProtocol = errors.New("zmtp: the peer does not speak ZMTP 3.x with the mechanism NULL")
	// ErrPeer says that the peer refuses this side, and why.
	ErrPeer = errors.New("zmtp: the peer refuses the connection")
	// ErrType says that the peer's socket is of a type that does not go with this side's.
	ErrType = errors.New("zmtp: the peer's socket type does not fit")
	// ErrLimit says that the peer goes over a limit of this side.
	ErrLimit = errors.New("zmtp: the peer goes over a limit")
	// ErrSilent says that nothing came for too long.
	ErrSilent = errors.New("zmtp: the peer is silent")
	// ErrClosed says that this side has closed the connection.
	ErrClosed = errors.New("zmtp: closed")
	// ErrEndpoint says that an endpoint cannot be parsed.
	ErrEndpoint = errors.New("zmtp: an endpoint is tcp://HOST:PORT, ipc://PATH or ipc://@NAME")
)
