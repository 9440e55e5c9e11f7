package protocol

import (
	"encoding/binary"
	"fmt"
)

// HeaderSize is the size of a frame's header in bytes.
const HeaderSize = 16

const (
	frameMagic   = 0xCF00
	frameVersion = 1
)

// Flags of a header. The others that Maru defines (batch 1, urgent 4, no reply 8) mean nothing to either end and
// are echoed.
const (
	// FlagCompressed says that the payload is one zstd frame (RFC 8878). Reader undoes it.
	FlagCompressed uint8 = 2
	// FlagForwarded says that another member passes the request on: if the receiver does not lead it answers so, and
	// passes it on no further.
	FlagForwarded uint8 = 16
)

// Header is the head of a frame: big-endian magic u16 = 0xCF00, version u8 = 1, type u8, flags u8, three reserved
// bytes, sequence u32, payload length u32.
type Header struct {
	Type     Type
	Flags    uint8
	Sequence uint32 // matches a reply to its request; 0 in pushes
	Length   uint32 // bytes of payload that follow
}

// Append appends h in its wire form.
func (h Header) Append(b []byte) []byte {
	b = append(b, frameMagic>>8, frameMagic&0xff, frameVersion, byte(h.Type), h.Flags, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, h.Sequence)
	return binary.BigEndian.AppendUint32(b, h.Length)
}

// ParseHeader decodes the first HeaderSize bytes of b. Its error is a *FrameError: too short, a wrong magic or
// version, or a length over MaxPayload. Reserved bytes are ignored.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, &FrameError{Reason: fmt.Sprintf("%d bytes are too few for a header", len(b))}
	}
	_ = b[HeaderSize-1]
	if m := binary.BigEndian.Uint16(b); m != frameMagic {
		return Header{}, &FrameError{Reason: fmt.Sprintf("magic 0x%04X is not 0x%04X: the peer speaks something else",
			m, frameMagic)}
	}
	if b[2] != frameVersion {
		return Header{}, &FrameError{Reason: fmt.Sprintf("version %d is not %d", b[2], frameVersion)}
	}
	h := Header{
		Type:     Type(b[3]),
		Flags:    b[4],
		Sequence: binary.BigEndian.Uint32(b[8:]),
		Length:   binary.BigEndian.Uint32(b[12:]),
	}
	if h.Length > MaxPayload {
		return Header{}, &FrameError{Reason: fmt.Sprintf("payload of %d bytes is over the limit of %d", h.Length,
			MaxPayload)}
	}
	return h, nil
}

// ParseFrame splits a body that holds one frame, as a message-oriented transport delivers it, into header and
// payload, which aliases b. Bytes after the payload are ignored. Its error is a *FrameError. A compressed payload
// is returned as it is: see Decompress.
func ParseFrame(b []byte) (Header, []byte, error) {
	h, err := ParseHeader(b)
	if err != nil {
		return Header{}, nil, err
	}
	if len(b)-HeaderSize < int(h.Length) {
		return Header{}, nil, &FrameError{Reason: fmt.Sprintf("payload of %d bytes is cut off at %d", h.Length,
			len(b)-HeaderSize)}
	}
	return h, b[HeaderSize : HeaderSize+int(h.Length)], nil
}

// BeginFrame appends the header of a frame whose payload the caller appends next; mark is for EndFrame.
func BeginFrame(buf []byte, t Type, seq uint32) (_ []byte, mark int) {
	return Header{Type: t, Sequence: seq}.Append(buf), len(buf)
}

// BeginReply is BeginFrame for the reply to a request with header h, whose flags it echoes.
func BeginReply(buf []byte, h Header) (_ []byte, mark int) {
	return Header{Type: h.Type.Reply(), Flags: h.Flags &^ FlagCompressed, Sequence: h.Sequence}.Append(buf), len(buf)
}

// EndFrame completes the frame that BeginFrame or BeginReply began at mark: the payload is all that was appended
// since. A payload over MaxPayload, which no peer would accept, is replaced by an error of CodeLimit, so that the
// stream stays whole; callers that can do better check PayloadLen first.
func EndFrame(buf []byte, mark int) []byte {
	if PayloadLen(buf, mark) > MaxPayload {
		buf = AppendErrorReply(buf[:mark+HeaderSize], &Error{
			Code:    CodeLimit,
			Message: "message is over the limit of a frame: ask for less at once",
		})
	}
	binary.BigEndian.PutUint32(buf[mark+12:], uint32(PayloadLen(buf, mark))) //nolint:gosec // at most MaxPayload
	return buf
}

// PayloadLen returns how many bytes of payload the frame that was begun at mark has so far.
func PayloadLen(buf []byte, mark int) int { return len(buf) - mark - HeaderSize }
