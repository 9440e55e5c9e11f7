package collective

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrProtocol says that a peer has sent what does not fit: it uses another table, or another version, or has gone mad.
var ErrProtocol = errors.New("collective: a peer has sent what does not fit here")

// header goes before each message in a ring, little-endian:
//
//	0 seq 8 | 8 signature 8 | 16 left 4 | 20 len 4 | 24 track 1 | 25 zero 7
type header struct {
	seq, sig uint64
	left     uint32 // messages after this one, of the operation, the track and the pair
	len      uint32 // of what follows, in bytes
	track    uint8
}

const headerBytes = 32

func (h header) put(b []byte) {
	binary.LittleEndian.PutUint64(b, h.seq)
	binary.LittleEndian.PutUint64(b[8:], h.sig)
	binary.LittleEndian.PutUint32(b[16:], h.left)
	binary.LittleEndian.PutUint32(b[20:], h.len)
	binary.LittleEndian.PutUint64(b[24:], uint64(h.track))
}

// readHeader decodes the header at the beginning of b, of a message of most bytes or less. ok is false if b has less than a header.
func readHeader(b []byte, most int) (h header, ok bool, err error) {
	if len(b) < headerBytes {
		return header{}, false, nil
	}
	h = header{
		seq: binary.LittleEndian.Uint64(b), sig: binary.LittleEndian.Uint64(b[8:]),
		left: binary.LittleEndian.Uint32(b[16:]), len: binary.LittleEndian.Uint32(b[20:]),
	}
	track := binary.LittleEndian.Uint64(b[24:])
	if track >= tracks || uint64(h.len) > u64(most) {
		return header{}, false, fmt.Errorf("%w: a message of %d bytes on track %d, where %d may come", ErrProtocol, h.len, track, most)
	}
	h.track = uint8(track)
	return h, true, nil
}

// notice is told beside an operation's blocks. One without a cause says only in which operation its sender waits; others say
// why it has given up.
type notice struct {
	seq, sig uint64 // of the sender's flow
	cause    cause
	member   uint16 // who is the cause
	gotSeq   uint64 // of a mismatch: what member has called
	gotSig   uint64
}

// cause is why an operation was given up.
type cause uint16

const (
	waits cause = iota
	mismatch
	down
	broken // neither: it was misused
)

const noticeBytes = 24

// put writes what is not in the header.
func (n notice) put(b []byte) {
	binary.LittleEndian.PutUint16(b, uint16(n.cause))
	binary.LittleEndian.PutUint16(b[2:], n.member)
	binary.LittleEndian.PutUint32(b[4:], 0)
	binary.LittleEndian.PutUint64(b[8:], n.gotSeq)
	binary.LittleEndian.PutUint64(b[16:], n.gotSig)
}

// readNotice decodes a notice of an operation that its header names.
func readNotice(seq, sig uint64, b []byte) (notice, error) {
	if len(b) != noticeBytes || binary.LittleEndian.Uint16(b) > uint16(broken) {
		return notice{}, fmt.Errorf("%w: a notice of %d bytes", ErrProtocol, len(b))
	}
	return notice{
		seq: seq, sig: sig, cause: cause(binary.LittleEndian.Uint16(b)), member: binary.LittleEndian.Uint16(b[2:]),
		gotSeq: binary.LittleEndian.Uint64(b[8:]), gotSig: binary.LittleEndian.Uint64(b[16:]),
	}, nil
}

// Lengths, indexes and counts that are not negative, and were bounded before.
func u16(n int) uint16 { return uint16(n) } //nolint:gosec // as said
func u32(n int) uint32 { return uint32(n) } //nolint:gosec // as said
func u64(n int) uint64 { return uint64(n) } //nolint:gosec // as said

// errorOf is what a notice of an operation means to one that is in it, and noticeOf the notice of an error. Errors say of whom they
// speak.
func (n notice) errorOf(from int) error {
	switch n.cause {
	case mismatch:
		return &MismatchError{Member: int(n.member), Want: unpack(n.seq, n.sig), Got: unpack(n.gotSeq, n.gotSig)}
	case down:
		return &DownError{Member: int(n.member), Err: fmt.Errorf("as member %d has found", from)}
	case broken:
		return fmt.Errorf("%w: member %d has given up", ErrProtocol, from)
	case waits:
	}
	return nil
}

func noticeOf(seq, sig uint64, err error) notice {
	n := notice{seq: seq, sig: sig, cause: broken}
	if e, ok := errors.AsType[*MismatchError](err); ok {
		n.cause, n.member, n.gotSeq, n.gotSig = mismatch, u16(e.Member), e.Got.Seq<<stageBits, e.Got.pack()
	} else if e, ok := errors.AsType[*DownError](err); ok {
		n.cause, n.member = down, u16(e.Member)
	}
	return n
}
