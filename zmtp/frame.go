package zmtp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// A frame is flags u8, a size, and a body. The size is one byte, or with flagLong eight, big-endian.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	shortest = 2 // bytes of a header
	longest  = 9
)

// appendFrame appends a frame of a message.
func appendFrame(b, body []byte, more bool) []byte {
	flags := byte(0)
	if more {
		flags = flagMore
	}
	return append(appendHeader(b, flags, len(body)), body...)
}

// appendHeader appends what comes before a body of n bytes.
func appendHeader(b []byte, flags byte, n int) []byte {
	if n < 256 {
		return append(b, flags, byte(n)) //nolint:gosec // checked
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(n))
}

// appendMessage appends all frames of a message.
func appendMessage(b []byte, parts [][]byte) []byte {
	for i, p := range parts {
		b = appendFrame(b, p, i < len(parts)-1)
	}
	return b
}

// appendCommand appends a command: its name, with a length of one byte, and data.
func appendCommand(b []byte, name string, data []byte) []byte {
	b = appendHeader(b, flagCommand, 1+len(name)+len(data))
	return append(append(append(b, byte(len(name))), name...), data...) //nolint:gosec // the names of commands are short
}

// readHeader reads what comes before a body.
func readHeader(r *bufio.Reader) (flags byte, size uint64, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, 0, fmt.Errorf("%w: a frame with flags %#x", ErrProtocol, flags)
	}
	var size8 [longest - 1]byte
	n := shortest - 1
	if flags&flagLong != 0 {
		n = longest - 1
	}
	if _, err := io.ReadFull(r, size8[len(size8)-n:]); err != nil {
		return 0, 0, cut(err)
	}
	return flags, binary.BigEndian.Uint64(size8[:]), nil
}

// step is how much memory is taken for a body ahead of its bytes: a peer that announces much has to send it.
const step = 64 << 10

// appendBody appends a body of n bytes from r.
func appendBody(b []byte, r *bufio.Reader, n int) ([]byte, error) {
	for n > 0 {
		k := min(n, step)
		b = slices.Grow(b, k)
		if _, err := io.ReadFull(r, b[len(b):len(b)+k]); err != nil {
			return b, cut(err)
		}
		b = b[:len(b)+k]
		n -= k
	}
	return b, nil
}

// cut makes the end of a stream within a frame an error of its own.
func cut(err error) error {
	if err == io.EOF { //nolint:errorlint // ReadFull's own
		return io.ErrUnexpectedEOF
	}
	return err
}

// splitCommand splits a command's body into its name and data.
func splitCommand(body []byte) (name string, data []byte, err error) {
	if len(body) == 0 || int(body[0]) >= len(body) || body[0] == 0 {
		return "", nil, fmt.Errorf("%w: a command of %d bytes without a name", ErrProtocol, len(body))
	}
	return string(body[1 : 1+body[0]]), body[1+body[0]:], nil
}
