package rm

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

const (
	magic      = 0x4d415255 // "URAM" on the wire
	version    = 2
	headerSize = 12

	// maxRequest is the largest payload of a request, as in Maru; the longest that makes sense is half of it.
	maxRequest = 8 << 10
	// maxReply is the largest payload of a reply that a client of this package takes: statistics of thousands of pools.
	maxReply = 1 << 20
)

// Kind is what a frame is.
type Kind uint16

// The kinds of frames.
const (
	KindAlloc       Kind = 1
	KindAllocReply  Kind = 2
	KindFree        Kind = 3
	KindFreeReply   Kind = 4
	KindStats       Kind = 5
	KindStatsReply  Kind = 6
	KindAccess      Kind = 9
	KindAccessReply Kind = 10
	KindError       Kind = 255
)

// Status is how a request ended: 0, or a negative errno of Linux.
type Status int32

// The statuses that are sent.
const (
	StatusOK          Status = 0
	StatusOwner       Status = -1  // EPERM: another client's region, or another client's connection
	StatusNotFound    Status = -2  // ENOENT: no such region or pool
	StatusUnavailable Status = -11 // EAGAIN: no leader answered in time
	StatusNoRoom      Status = -12 // ENOMEM
	StatusToken       Status = -13 // EACCES: the handle's token is not what was given out
	StatusNoPool      Status = -19 // ENODEV
	StatusInvalid     Status = -22 // EINVAL: a size that nobody can have, or no client id
	StatusUnknown     Status = -38 // ENOSYS: no such kind of request
	StatusProtocol    Status = -71 // EPROTO: what cannot be decoded
	StatusTooLarge    Status = -90 // EMSGSIZE
)

// Error is an error that goes to the peer in a frame of its own.
type Error struct {
	Status  Status
	Message string
	fatal   bool // the connection ends with it
}

func (f *Error) Error() string { return fmt.Sprintf("rm: %s (status %d)", f.Message, f.Status) }

// faults whose connection is of no further use.
var (
	errHeader  = &Error{StatusProtocol, "bad header", true}
	errLarge   = &Error{StatusTooLarge, "payload too large", true}
	errKind    = &Error{StatusUnknown, "unknown request", true}
	errAlloc   = &Error{StatusProtocol, "bad alloc req", true}
	errFree    = &Error{StatusProtocol, "bad free req", true}
	errAccess  = &Error{StatusProtocol, "bad get_access req", true}
	errPathLen = &Error{StatusProtocol, "bad alloc req: pool path too long", true}
	errPathCut = &Error{StatusProtocol, "bad alloc req: pool path truncated", true}
	errPathNUL = &Error{StatusProtocol, "bad alloc req: pool path contains null byte", true}
	errPinned  = &Error{StatusOwner, "client_id mismatch on connection", true}
)

// faults after which the client may go on. The two of tokens are spelled as clients have always read them.
var (
	errNoClient    = &Error{StatusInvalid, "missing client_id", false}
	errFreeToken   = &Error{StatusToken, "invalid authToken", false}
	errAccessToken = &Error{StatusToken, "invalid auth token", false}
	errUnavailable = &Error{StatusUnavailable, "the pool has no leader that answers: try again", false}
)

// parseHeader takes a header apart. An Error says what is wrong with it.
func parseHeader(b []byte, most uint32) (kind Kind, length int, err error) {
	if binary.LittleEndian.Uint32(b) != magic || binary.LittleEndian.Uint16(b[4:]) != version {
		return 0, 0, errHeader
	}
	n := binary.LittleEndian.Uint32(b[8:])
	if n > most {
		return 0, 0, errLarge
	}
	return Kind(binary.LittleEndian.Uint16(b[6:])), int(n), nil
}

// beginFrame begins a frame with its header, whose length endFrame fills in.
func beginFrame(kind Kind) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, 128), magic)
	b = binary.LittleEndian.AppendUint16(b, version)
	b = binary.LittleEndian.AppendUint16(b, uint16(kind))
	return binary.LittleEndian.AppendUint32(b, 0)
}

// endFrame completes a frame.
func endFrame(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[8:], uint32(len(b)-headerSize)) //nolint:gosec // far below
	return b
}

// readFrame reads a frame into buf, whose memory the payload may be; begun is called once its first bytes are there.
func readFrame(r io.Reader, buf []byte, most uint32, begun func() error) (kind Kind, payload []byte, err error) {
	buf = slices.Grow(buf[:0], headerSize)[:headerSize]
	n, err := io.ReadAtLeast(r, buf, 1)
	if err != nil {
		return 0, nil, err //nolint:wrapcheck // io.EOF between two frames stays what it is
	}
	if err = begun(); err != nil {
		return 0, nil, err
	}
	if _, err = io.ReadFull(r, buf[n:]); err != nil {
		return 0, nil, unexpected(err)
	}
	kind, length, err := parseHeader(buf, most)
	if err != nil {
		return 0, nil, err
	}
	payload = slices.Grow(buf[:0], length)[:length]
	if _, err = io.ReadFull(r, payload); err != nil {
		return 0, nil, unexpected(err)
	}
	return kind, payload, nil
}

// unexpected is the end of a connection within a frame.
func unexpected(err error) error {
	if err == io.EOF { //nolint:errorlint // io.ReadFull's own
		return io.ErrUnexpectedEOF
	}
	return fmt.Errorf("rm: read: %w", err)
}
