package transfer

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A frame is a header and, for some types, a body. All numbers are little-endian.
//
//	0   type u8, version u8, status u16, body length u32
//	8   seq u64
//	16  generation u64
//	24  offset u64
//	32  checksum u64, of the body or, in a read, 1 if the answer should carry one
//	40  buffer u32, length u32
//
// On a data connection, which is one way, the peer answers in the order of the requests:
//
//	read   -> data with the bytes, or fail
//	write  -> ack, which covers all writes up to its seq, or fail
//	fail      has a status code, and for some a text
//	bye    <- the last frame before the peer closes: seq is that of the last request that it has carried out
//
// On a control connection each request has one answer before the next:
//
//	describe -> described, with a descriptor as JSON
//	abort    -> aborted: the data connection that seq names is closed, and nobody reads it
//	ping     -> pong
//	notify   -> notified, or fail; the body is a name of length bytes, and what there is to say
//	stats    -> statistics, of the endpoints of each NIC, as JSON
//
// On an RDMA control connection answers come in any order, and name the seq of their question; gen is the number of a link:
//
//	connect -> connected, or fail: queue pairs are connected with as many of the peer's, which makes a link
//	grant   -> granted, or fail: how the buffer of that generation, gen, is reached by NICs
//	close   -> closed: the link's queue pairs there carry out nothing any more
//	ping    -> pong
//	recall  <- the peer wants the link to be closed, to make room for another
type header struct {
	kind   uint8
	status uint16
	body   uint32
	seq    uint64
	gen    uint64
	off    uint64
	sum    uint64
	buffer uint32
	length uint32
}

const (
	headerSize   = 48
	frameVersion = 1
	maxHello     = 4 << 10 // bytes of the first frame's body
	maxControl   = 2 << 20 // bytes of a body on a control connection: a descriptor of maxListed buffers and a topology
)

// Types of frames.
const (
	frameHello uint8 = 1 + iota
	frameWelcome
	frameRead
	frameData
	frameWrite
	frameAck
	frameFail
	frameBye
	frameDescribe
	frameDescribed
	frameAbort
	frameAborted
	framePing
	framePong
	frameNotify
	frameNotified
	frameConnect
	frameConnected
	frameGrant
	frameGranted
	frameClose
	frameClosed
	frameRecall
	frameStats
	frameStatistics
	frameEnd // no type
)

func (h *header) encode(b []byte) {
	_ = b[headerSize-1]
	b[0], b[1] = h.kind, frameVersion
	le := binary.LittleEndian
	le.PutUint16(b[2:], h.status)
	le.PutUint32(b[4:], h.body)
	le.PutUint64(b[8:], h.seq)
	le.PutUint64(b[16:], h.gen)
	le.PutUint64(b[24:], h.off)
	le.PutUint64(b[32:], h.sum)
	le.PutUint32(b[40:], h.buffer)
	le.PutUint32(b[44:], h.length)
}

// decode reads a header. What cannot be is an error: the connection must be closed.
func (h *header) decode(b []byte) error {
	_ = b[headerSize-1]
	le := binary.LittleEndian
	*h = header{
		kind: b[0], status: le.Uint16(b[2:]), body: le.Uint32(b[4:]), seq: le.Uint64(b[8:]), gen: le.Uint64(b[16:]),
		off: le.Uint64(b[24:]), sum: le.Uint64(b[32:]), buffer: le.Uint32(b[40:]), length: le.Uint32(b[44:]),
	}
	switch {
	case b[1] != frameVersion:
		return fmt.Errorf("transfer: a frame of version %d, this release speaks %d", b[1], frameVersion)
	case h.kind == 0 || h.kind >= frameEnd:
		return fmt.Errorf("transfer: a frame of unknown type %d", h.kind)
	case h.length > maxSlice:
		return fmt.Errorf("transfer: %d bytes asked for in one frame, at most %d", h.length, maxSlice)
	}
	most := uint32(0)
	switch h.kind {
	case frameHello, frameWelcome:
		most = maxHello
	case frameData, frameWrite:
		most = maxSlice
	case frameDescribed, frameConnect, frameConnected, frameGranted, frameStatistics:
		most = maxControl
	case frameFail:
		most = maxReason
	case frameNotify:
		most = maxName + MaxNotification
	}
	if h.body > most {
		return fmt.Errorf("transfer: a body of %d bytes in a frame of type %d, at most %d", h.body, h.kind, most)
	}
	return nil
}

// Status codes of fail.
const (
	statusOK uint16 = iota
	statusStale
	statusRange
	statusReadOnly
	statusChecksum
	statusMemory
	statusRefused
	statusStorage
	statusMissing
	statusFull
	statusClosed
	statusNoRoom
)

// failures in the order of their codes.
var failures = [...]error{
	nil, ErrStale, ErrRange, ErrReadOnly, ErrChecksum, ErrMemory, ErrRefused, ErrStorage, ErrMissing, ErrFull, ErrClosed,
	ErrNoRoom,
}

// statusOf is the code of an error that goes to a peer.
func statusOf(err error) uint16 {
	for i, f := range failures {
		if f != nil && errors.Is(err, f) {
			return uint16(i)
		}
	}
	return statusRefused
}

// failure is the error of a code that came from a peer.
func failure(status uint16) error {
	if status == 0 || int(status) >= len(failures) {
		return fmt.Errorf("%w: status %d", ErrRefused, status)
	}
	return failures[status]
}
