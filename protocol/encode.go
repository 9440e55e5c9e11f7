package protocol

import (
	"encoding/binary"
	"math"
	"strings"
	"unicode/utf8"
)

// The msgpack encoder: https://github.com/msgpack/msgpack/blob/master/spec.md, ints and lengths in their smallest
// form, as Maru's peers write them.

// enc appends one payload to b. Methods named opt... leave a field out when it has its zero value, which is what an
// absent field means.
type enc struct {
	b []byte
	n int // fields so far of the innermost open map
}

// scope is an open map.
type scope struct {
	mark  int // where its head is
	outer int // fields so far of the map around it
}

// open begins a map whose number of fields is not known yet.
func (e *enc) open() scope {
	s := scope{mark: len(e.b), outer: e.n}
	e.b = append(e.b, 0x80)
	e.n = 0
	return s
}

// close ends the map s. Maps of more than 15 fields, which none of the hot messages has, move up by two bytes to
// make room for a longer head.
func (e *enc) close(s scope) {
	if e.n < 16 {
		e.b[s.mark] = 0x80 | byte(e.n) //nolint:gosec // less than 16
	} else {
		e.b = append(e.b, 0, 0)
		copy(e.b[s.mark+3:], e.b[s.mark+1:])
		e.b[s.mark] = 0xde
		binary.BigEndian.PutUint16(e.b[s.mark+1:], uint16(e.n)) //nolint:gosec // a few dozen at most
	}
	e.n = s.outer
}

// field begins a field; name has fewer than 32 bytes.
func (e *enc) field(name string) {
	e.n++
	e.b = append(append(e.b, 0xa0|byte(len(name))), name...) //nolint:gosec // less than 32
}

func (e *enc) uint(name string, v uint64) {
	e.field(name)
	e.b = appendUint(e.b, v)
}

func (e *enc) optUint(name string, v uint64) {
	if v != 0 {
		e.uint(name, v)
	}
}

func (e *enc) optStrs(name string, v []string) {
	if len(v) == 0 {
		return
	}
	e.array(name, len(v))
	for _, s := range v {
		e.b = append(appendStrHead(e.b, len(s)), s...)
	}
}

func (e *enc) bool(name string, v bool) {
	e.field(name)
	e.b = appendBool(e.b, v)
}

func (e *enc) optBool(name string, v bool) {
	if v {
		e.bool(name, true)
	}
}

func (e *enc) float(name string, v float64) {
	e.field(name)
	e.b = append(e.b, 0xcb)
	e.b = binary.BigEndian.AppendUint64(e.b, math.Float64bits(v))
}

func (e *enc) str(name, v string) {
	e.field(name)
	e.b = append(appendStrHead(e.b, len(v)), v...)
}

func (e *enc) optStr(name, v string) {
	if v != "" {
		e.str(name, v)
	}
}

func (e *enc) key(name string, v []byte) {
	e.field(name)
	e.b = appendKey(e.b, v)
}

func (e *enc) optKey(name string, v []byte) {
	if len(v) != 0 {
		e.key(name, v)
	}
}

func (e *enc) keys(name string, v [][]byte) {
	e.field(name)
	e.b = appendArrayHead(e.b, len(v))
	for _, k := range v {
		e.b = appendKey(e.b, k)
	}
}

func (e *enc) optKeys(name string, v [][]byte) {
	if len(v) != 0 {
		e.keys(name, v)
	}
}

func (e *enc) uints(name string, v []uint64) {
	e.field(name)
	e.b = appendArrayHead(e.b, len(v))
	for _, u := range v {
		e.b = appendUint(e.b, u)
	}
}

func (e *enc) optUints(name string, v []uint64) {
	if len(v) != 0 {
		e.uints(name, v)
	}
}

func (e *enc) bools(name string, v []bool) {
	e.field(name)
	e.b = appendArrayHead(e.b, len(v))
	for _, t := range v {
		e.b = appendBool(e.b, t)
	}
}

func (e *enc) optBools(name string, v []bool) {
	if len(v) != 0 {
		e.bools(name, v)
	}
}

// array begins a field that holds an array of n elements, which the caller appends.
func (e *enc) array(name string, n int) {
	e.field(name)
	e.b = appendArrayHead(e.b, n)
}

func (e *enc) mutation(m *Mutation) {
	e.optUint("seq", m.Seq)
	e.optUint("acked", m.Acked)
}

// fault appends the fields of a failed reply.
func (e *enc) fault(f *Error) {
	if f.Code == CodeOK && f.Message == "" {
		return
	}
	e.str("error", errorText(f.Message))
	if f.Code == CodeOK {
		return
	}
	e.uint("code", uint64(f.Code))
	e.bool("retryable", f.Code.Retryable())
	e.optStr("leader", f.Leader)
	e.optUint("retry_after_ms", f.RetryAfterMS)
}

// errorText makes a text sendable: valid UTF-8, because Python's decoders drop a whole message over one bad byte,
// and not over MaxTextBytes.
func errorText(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if len(s) <= MaxTextBytes {
		return s
	}
	cut := MaxTextBytes
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut]
}

//nolint:gosec // the cases see to it that the bytes hold all of v
func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return append(b, 0xcd, byte(v>>8), byte(v))
	case v <= math.MaxUint32:
		return append(b, 0xce, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	}
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 0xc3)
	}
	return append(b, 0xc2)
}

//nolint:gosec // the cases see to it that the bytes hold all of n
func appendStrHead(b []byte, n int) []byte {
	switch {
	case n < 32:
		return append(b, 0xa0|byte(n))
	case n <= math.MaxUint8:
		return append(b, 0xd9, byte(n))
	case n <= math.MaxUint16:
		return append(b, 0xda, byte(n>>8), byte(n))
	default:
		return append(b, 0xdb, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	}
}

// appendKey appends a key: as str, Maru's form, if it is ASCII, and else as bin, because a str must be valid UTF-8.
// Decoders take both as the same bytes.
func appendKey(b, k []byte) []byte {
	if isASCII(k) {
		return append(appendStrHead(b, len(k)), k...)
	}
	return append(appendBinHead(b, len(k)), k...)
}

//nolint:gosec // the cases see to it that the bytes hold all of n
func appendBinHead(b []byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, 0xc4, byte(n))
	case n <= math.MaxUint16:
		return append(b, 0xc5, byte(n>>8), byte(n))
	default:
		return append(b, 0xc6, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	}
}

func isASCII(k []byte) bool {
	const high = 0x8080808080808080
	for len(k) >= 8 {
		if binary.LittleEndian.Uint64(k)&high != 0 {
			return false
		}
		k = k[8:]
	}
	for _, c := range k {
		if c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

//nolint:gosec // the cases see to it that the bytes hold all of n
func appendArrayHead(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n <= math.MaxUint16:
		return append(b, 0xdc, byte(n>>8), byte(n))
	default:
		return append(b, 0xdd, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	}
}

//nolint:gosec // the cases see to it that the bytes hold all of n
func appendMapHead(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x80|byte(n))
	case n <= math.MaxUint16:
		return append(b, 0xde, byte(n>>8), byte(n))
	default:
		return append(b, 0xdf, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	}
}
