package zmtp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// A greeting is 64 bytes: the signature ff, eight bytes of anything, 7f; the version, major and minor; the mechanism, 20
// bytes padded with zeros; whether this side is its server; and 31 zeros.
const (
	greetingSize  = 64
	signatureSize = 10
	mechanismAt   = 12
	mechanismSize = 20
	mechanism     = "NULL"
)

func greeting() []byte {
	b := make([]byte, greetingSize)
	b[0], b[8], b[9] = 0xff, 1, 0x7f // the eighth byte is what libzmq sends: with it a peer of ZMTP 1 sees an empty identity
	b[10], b[11] = 3, 1
	copy(b[mechanismAt:], mechanism)
	return b
}

// readGreeting reads the peer's, and returns the minor version of ZMTP 3.
func readGreeting(r io.Reader) (minor byte, err error) {
	var b [greetingSize]byte
	if _, err := io.ReadFull(r, b[:signatureSize]); err != nil {
		return 0, cut(err)
	}
	if b[0] != 0xff || b[9]&1 != 1 {
		return 0, fmt.Errorf("%w: it begins with % x", ErrProtocol, b[:signatureSize])
	}
	if _, err := io.ReadFull(r, b[signatureSize:mechanismAt]); err != nil {
		return 0, cut(err)
	}
	if b[10] < 3 {
		return 0, fmt.Errorf("%w: it speaks version %d", ErrProtocol, b[10])
	}
	if _, err := io.ReadFull(r, b[mechanismAt:]); err != nil {
		return 0, cut(err)
	}
	name := b[mechanismAt : mechanismAt+mechanismSize]
	if i := slices.Index(name, 0); i >= 0 {
		name = name[:i]
	}
	if string(name) != mechanism {
		return 0, fmt.Errorf("%w: its mechanism is %q", ErrProtocol, name)
	}
	if b[10] > 3 {
		return 1, nil // a later version talks as this one when it is told so
	}
	return b[11], nil
}

// ready is the READY command of one side.
func ready(cfg *Config) []byte {
	data := appendProperty(nil, "Socket-Type", string(cfg.Type))
	if cfg.Type == REQ || cfg.Type == DEALER || cfg.Type == ROUTER {
		data = appendProperty(data, "Identity", cfg.Identity)
	}
	return appendCommand(nil, "READY", data)
}

func appendProperty(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)          //nolint:gosec // the names of properties are short
	b = binary.BigEndian.AppendUint32(b, uint32(len(value))) //nolint:gosec // short
	return append(b, value...)
}

// properties are what a READY command says.
type properties struct {
	kind     SocketType
	identity string
}

// parseProperties reads the data of a READY command. Names are compared without regard to case; unknown ones say nothing.
func parseProperties(b []byte) (p properties, err error) {
	bad := func() (properties, error) { return p, fmt.Errorf("%w: its READY is cut short", ErrProtocol) }
	for len(b) > 0 {
		n := int(b[0])
		if n == 0 || len(b) < 1+n+4 {
			return bad()
		}
		name := string(b[1 : 1+n])
		size := binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return bad()
		}
		value := string(b[:size])
		b = b[size:]
		switch lower(name) {
		case "socket-type":
			p.kind = SocketType(value)
		case "identity":
			p.identity = value
		}
	}
	if len(p.identity) > maxIdentity {
		return p, fmt.Errorf("%w: an identity of %d bytes", ErrLimit, len(p.identity))
	}
	return p, nil
}

// lower is a property's name in lower case: they are ASCII.
func lower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// readReady reads the peer's first command.
func readReady(r *bufio.Reader, own SocketType) (p properties, err error) {
	flags, size, err := readHeader(r)
	if err != nil {
		return p, cut(err)
	}
	if flags&flagCommand == 0 || size > maxCommand {
		return p, fmt.Errorf("%w: a frame of %d bytes with flags %#x where READY was due", ErrProtocol, size, flags)
	}
	body, err := appendBody(nil, r, int(size))
	if err != nil {
		return p, err
	}
	name, data, err := splitCommand(body)
	switch {
	case err != nil:
		return p, err
	case name == "ERROR":
		return p, fmt.Errorf("%w: %.255q", ErrPeer, reasonOf(data))
	case name != "READY":
		return p, fmt.Errorf("%w: the command %.20q where READY was due", ErrProtocol, name)
	}
	if p, err = parseProperties(data); err != nil {
		return p, err
	}
	if !slices.Contains(peers[own], p.kind) {
		return p, fmt.Errorf("%w: %.20q, and this is %s", ErrType, p.kind, own)
	}
	return p, nil
}

// reasonOf is what an ERROR command says.
func reasonOf(data []byte) []byte {
	if len(data) == 0 || int(data[0]) > len(data)-1 {
		return nil
	}
	return data[1 : 1+data[0]]
}
