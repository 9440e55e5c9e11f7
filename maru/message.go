package maru

import (
	"encoding/binary"
	"errors"
)

// Type is a message's type. A reply's has bit 0x80 set in addition; those of the last group have it anyway.
type Type uint8

// Types.
const (
	RequestAlloc    Type = 0x01
	ReturnAlloc     Type = 0x03
	ListAllocations Type = 0x04
	Register        Type = 0x10
	Lookup          Type = 0x11
	Exists          Type = 0x12
	Delete          Type = 0x13
	Pin             Type = 0x14
	Unpin           Type = 0x15
	BatchRegister   Type = 0x20
	BatchLookup     Type = 0x21
	BatchExists     Type = 0x22
	BatchPin        Type = 0x23
	BatchUnpin      Type = 0x24
	GetStats        Type = 0xf0
	Heartbeat       Type = 0xf1
	ReportStats     Type = 0xf2
	GetUsage        Type = 0xf3
	Handshake       Type = 0xfe
	Shutdown        Type = 0xff
)

// typeNames are those of metrics; types without one are not known.
var typeNames = [256]string{
	RequestAlloc: "REQUEST_ALLOC", ReturnAlloc: "RETURN_ALLOC", ListAllocations: "LIST_ALLOCATIONS",
	Register: "REGISTER_KV", Lookup: "LOOKUP_KV", Exists: "EXISTS_KV", Delete: "DELETE_KV", Pin: "PIN_KV", Unpin: "UNPIN_KV",
	BatchRegister: "BATCH_REGISTER_KV", BatchLookup: "BATCH_LOOKUP_KV", BatchExists: "BATCH_EXISTS_KV",
	BatchPin: "BATCH_PIN_KV", BatchUnpin: "BATCH_UNPIN_KV", GetStats: "GET_STATS", Heartbeat: "HEARTBEAT",
	ReportStats: "REPORT_STATS", GetUsage: "GET_USAGE", Handshake: "HANDSHAKE", Shutdown: "SHUTDOWN",
}

// String returns the type's name, "" if it is not known.
func (t Type) String() string { return typeNames[t] }

// replyBit is set in the type of a reply.
const replyBit = 0x80

// headerSize is how long a header is: magic, version, type, flags, 3 bytes of nothing, sequence, length of the payload.
const headerSize = 16

const (
	magic   = 0xcf00
	version = 1
)

// Header is what a reply repeats of its request.
type Header struct {
	Type     Type
	Flags    uint8
	Sequence uint32
}

// ageAt is where a member that passes a request on says, in the three bytes that mean nothing to Maru, for how many
// milliseconds it has had it.
const ageAt = 5

// maxAge is the longest that fits there.
const maxAge = 1<<24 - 1

// errBody is what is wrong with a body that cannot be decoded. Its sender is told no more than this by Maru's server.
var errBody = errors.New("maru: the body is no request")

// parseHeader splits a body. Bytes behind the payload are ignored.
func parseHeader(body []byte) (h Header, ageMS uint32, payload []byte, err error) {
	if len(body) < headerSize || binary.BigEndian.Uint16(body) != magic || body[2] != version {
		return h, 0, nil, errBody
	}
	n := binary.BigEndian.Uint32(body[12:])
	if uint64(n) > uint64(len(body)-headerSize) { //nolint:gosec // not negative
		return h, 0, nil, errBody
	}
	h = Header{Type(body[3]), body[4], binary.BigEndian.Uint32(body[8:])}
	ageMS = uint32(body[ageAt])<<16 | uint32(body[ageAt+1])<<8 | uint32(body[ageAt+2])
	return h, ageMS, body[headerSize : headerSize+int(n)], nil
}

// setAge writes into a body, which has a header, for how long it has been on its way.
func setAge(body []byte, ms uint32) {
	ms = min(ms, maxAge)
	body[ageAt], body[ageAt+1], body[ageAt+2] = byte(ms>>16), byte(ms>>8), byte(ms) //nolint:gosec // three bytes
}

// beginReply appends the header of a reply; endReply fills in how long its payload became, which begins at mark.
func beginReply(b []byte, h Header) (out []byte, mark int) {
	b = append(b, magic>>8, magic&0xff, version, byte(h.Type|replyBit), h.Flags, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, h.Sequence)
	b = append(b, 0, 0, 0, 0)
	return b, len(b)
}

func endReply(b []byte, mark int) []byte {
	binary.BigEndian.PutUint32(b[mark-4:], uint32(len(b)-mark)) //nolint:gosec // replies are bounded
	return b
}

// internalError is all that Maru's server says of what it cannot decode, or fails at.
const internalError = "internal server error"

// appendFailure appends the reply to what failed. For what could not be decoded the header is zero.
func appendFailure(b []byte, h Header, text string) []byte {
	b, mark := beginReply(b, h)
	return endReply(appendStr(appendStr(append(b, 0x81), "error"), text), mark)
}
