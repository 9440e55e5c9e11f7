package p2p

import (
	"encoding/binary"
	"fmt"
)

// Sizes of the protocol, in bytes. Both ends must have the same.
const (
	headerBytes = 32
	frameAlign  = 64       // a cache line: a header and a short body are one
	eagerBytes  = 64 << 10 // messages that are longer wait for their receive: what is copied once more costs more than asking
	creditBytes = 1 << 20  // what a peer keeps of messages that nobody receives
	partBytes   = 256 << 10
	maxMessage  = 1 << 47 // more than any process has
	maxAsks     = 1 << 16 // unanswered, of one sender with one peer: some 6 MiB where they are kept
)

// magic begins a header, followed by the kind: another byte order, version or place in the stream has another.
const magic = 0x4c503201

type kind uint32

const (
	eager kind = 1 + iota
	ask
	grant
	data
	credit
)

const kinds = int(credit) + 1

// frame is a header.
type frame struct {
	kind kind
	tag  uint64
	size int // bytes
	id   uint64
}

// body is how many bytes follow.
func (f *frame) body() int {
	if f.kind == eager || f.kind == data {
		return f.size
	}
	return 0
}

// span is what a frame with so long a body takes.
func span(body int) int { return (headerBytes + body + frameAlign - 1) &^ (frameAlign - 1) }

func (f *frame) put(b []byte) {
	binary.NativeEndian.PutUint32(b, magic)
	binary.NativeEndian.PutUint32(b[4:], uint32(f.kind))
	binary.NativeEndian.PutUint64(b[8:], f.tag)
	binary.NativeEndian.PutUint64(b[16:], uint64(f.size)) //nolint:gosec // lengths are not negative
	binary.NativeEndian.PutUint64(b[24:], f.id)
}

// most is how large a frame of a kind may say that something is.
var most = [kinds]uint64{eager: eagerBytes, ask: maxMessage, grant: maxMessage, data: partBytes, credit: creditBytes}

// parse reads a header of headerBytes. What it returns is sound as far as a header alone can tell.
func parse(b []byte) (frame, error) {
	m, size := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint64(b[16:])
	f := frame{
		kind: kind(binary.NativeEndian.Uint32(b[4:])),
		tag:  binary.NativeEndian.Uint64(b[8:]),
		id:   binary.NativeEndian.Uint64(b[24:]),
	}
	switch {
	case m != magic:
		return frame{}, fmt.Errorf("a header that begins with %#x", m)
	case f.kind == 0 || int(f.kind) >= kinds:
		return frame{}, fmt.Errorf("a frame of kind %d", f.kind)
	case size > most[f.kind]:
		return frame{}, fmt.Errorf("a frame of kind %d for %d bytes, the most is %d", f.kind, size, most[f.kind])
	case size == 0 && (f.kind == data || f.kind == credit):
		return frame{}, fmt.Errorf("a frame of kind %d for no bytes", f.kind)
	case f.tag != 0 && f.kind != eager && f.kind != ask, f.id != 0 && (f.kind == eager || f.kind == credit):
		return frame{}, fmt.Errorf("a frame of kind %d with tag %d and id %d", f.kind, f.tag, f.id)
	}
	f.size = int(size) //nolint:gosec // it is bounded
	return f, nil
}
