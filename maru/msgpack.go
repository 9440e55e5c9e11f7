package maru

import (
	"encoding/binary"
	"math"
	"unicode/utf8"

	"larder/meta"
)

// kind is the type of a msgpack value.
type kind uint8

const (
	kindNil kind = iota
	kindBool
	kindInt
	kindFloat
	kindStr
	kindBin
	kindArray
	kindMap
	kindExt
)

// value is the head of a msgpack value.
type value struct {
	kind  kind
	int   meta.MaruInt // of an integer; a bool's is 0 or 1
	float float64
	bytes []byte // of a str or bin
	n     int    // elements of an array, pairs of a map
}

// maxDepth bounds how deep values may lie in each other; msgpack's Python library has 511 at most.
const maxDepth = 64

// reader reads msgpack as Python's library does: strings must be UTF-8. The first error sticks.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) fail() {
	r.b, r.bad = nil, true
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// big reads a big-endian number of n bytes.
func (r *reader) big(n uint64) (v uint64) {
	for _, c := range r.take(n) {
		v = v<<8 | uint64(c)
	}
	return v
}

// signed is a number of n bytes with a sign.
func signed(v uint64, n int) meta.MaruInt {
	if shift := 64 - 8*n; v<<shift>>63 == 1 {
		return meta.MaruInt{Neg: true, Abs: -uint64(int64(v<<shift) >> shift)} //nolint:gosec // two's complement
	}
	return meta.MaruInt{Abs: v}
}

// next reads the head of the next value, and the value itself unless it is an array or a map.
func (r *reader) next() (v value) {
	head := r.take(1)
	if r.bad {
		return v
	}
	switch c := head[0]; {
	case c < 0x80:
		return value{kind: kindInt, int: meta.MaruInt{Abs: uint64(c)}}
	case c >= 0xe0:
		return value{kind: kindInt, int: meta.MaruInt{Neg: true, Abs: 256 - uint64(c)}}
	case c < 0x90:
		return r.many(kindMap, uint64(c&0x0f))
	case c < 0xa0:
		return r.many(kindArray, uint64(c&0x0f))
	case c < 0xc0:
		return r.str(uint64(c & 0x1f))
	default:
		return r.long(c)
	}
}

// long reads a value whose type takes a whole byte.
func (r *reader) long(c byte) value {
	switch c {
	case 0xc0:
		return value{kind: kindNil}
	case 0xc2, 0xc3:
		return value{kind: kindBool, int: meta.MaruInt{Abs: uint64(c - 0xc2)}}
	case 0xc4, 0xc5, 0xc6:
		return value{kind: kindBin, bytes: r.take(r.big(1 << (c - 0xc4)))}
	case 0xc7, 0xc8, 0xc9:
		r.take(r.big(1<<(c-0xc7)) + 1)
	case 0xca:
		return value{kind: kindFloat, float: float64(math.Float32frombits(uint32(r.big(4))))} //nolint:gosec // four bytes
	case 0xcb:
		return value{kind: kindFloat, float: math.Float64frombits(r.big(8))}
	case 0xcc, 0xcd, 0xce, 0xcf:
		return value{kind: kindInt, int: meta.MaruInt{Abs: r.big(1 << (c - 0xcc))}}
	case 0xd0, 0xd1, 0xd2, 0xd3:
		n := 1 << (c - 0xd0)
		return value{kind: kindInt, int: signed(r.big(uint64(n)), n)} //nolint:gosec // 1 to 8
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		r.take(1<<(c-0xd4) + 1)
	case 0xd9, 0xda, 0xdb:
		return r.str(r.big(1 << (c - 0xd9)))
	case 0xdc, 0xdd:
		return r.many(kindArray, r.big(2<<(c-0xdc)))
	case 0xde, 0xdf:
		return r.many(kindMap, r.big(2<<(c-0xde)))
	default:
		r.fail()
	}
	return value{kind: kindExt}
}

func (r *reader) str(n uint64) value {
	b := r.take(n)
	if !utf8.Valid(b) {
		r.fail()
	}
	return value{kind: kindStr, bytes: b}
}

// many reads the head of an array or a map. Each element takes a byte at least.
func (r *reader) many(k kind, n uint64) value {
	if n > uint64(len(r.b)) {
		r.fail()
		n = 0
	}
	return value{kind: k, n: int(n)}
}

// rest reads past what is in v.
func (r *reader) rest(v value, depth int) {
	if depth > maxDepth {
		r.fail()
	}
	for i := 0; i < v.n && !r.bad; i++ {
		if v.kind == kindMap {
			r.name()
		}
		r.rest(r.next(), depth+1)
	}
}

// name reads the name of a pair of a map, which is a str; Python's library takes a bin, too, which is no field's name.
func (r *reader) name() string {
	v := r.next()
	switch v.kind {
	case kindStr:
		return string(v.bytes)
	case kindBin:
	default:
		r.fail()
	}
	return ""
}

// fields calls fn with the name of each pair of a map, for fn to read its value.
func (r *reader) fields(v value, fn func(name []byte)) {
	for i := 0; i < v.n && !r.bad; i++ {
		name := r.next()
		switch name.kind {
		case kindStr:
			fn(name.bytes)
		case kindBin:
			r.skip()
		default:
			r.fail()
		}
	}
}

func (r *reader) skip() { r.rest(r.next(), 1) }

// appendCanonical appends a key in the one form that all equal keys have, as Python sees them: 42, 42.0 are one key, and
// so are 1 and true. A str is its bytes, as a native key is; all others begin with a byte that no UTF-8 has. It reports
// false for what is no key: a list or map, and for the one number that equals nothing.
func appendCanonical(b []byte, v value) ([]byte, bool) {
	switch v.kind {
	case kindStr:
		return append(b, v.bytes...), true
	case kindBin:
		return append(append(b, 0xff, 'b'), v.bytes...), true
	case kindNil:
		return append(b, 0xff, 'n'), true
	case kindBool, kindInt:
		return appendInt(b, v.int), true
	case kindFloat:
		if i, ok := integral(v.float); ok {
			return appendInt(b, i), true
		}
		return binary.BigEndian.AppendUint64(append(b, 0xff, 'f'), math.Float64bits(v.float)), !math.IsNaN(v.float)
	default:
		return b, false
	}
}

func appendInt(b []byte, v meta.MaruInt) []byte {
	sign := byte('+')
	if v.Neg {
		sign = '-'
	}
	return binary.BigEndian.AppendUint64(append(b, 0xff, sign), v.Abs)
}

// integral is a float as an integer of msgpack, if it is one.
func integral(f float64) (meta.MaruInt, bool) {
	a := math.Abs(f)
	if a != math.Trunc(a) || a >= 1<<64 || f < 0 && a > 1<<63 { // NaN is not equal to itself, either
		return meta.MaruInt{}, false
	}
	return meta.MaruInt{Neg: f < 0, Abs: uint64(a)}, true
}

func appendStr(b []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		b = append(b, 0xa0|byte(n))
	case n < 1<<8:
		b = append(b, 0xd9, byte(n))
	case n < 1<<16:
		b = append(b, 0xda, byte(n>>8), byte(n)) //nolint:gosec // two bytes
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(n)) //nolint:gosec // a message is at most 8 MiB
	}
	return append(b, s...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 0xc3)
	}
	return append(b, 0xc2)
}

func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return append(b, 0xcd, byte(v>>8), byte(v)) //nolint:gosec // two bytes
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	}
}

// appendNumber writes an integer in the fewest bytes, as Python's library does, and anything else as it came.
func appendNumber(b []byte, v meta.MaruInt) []byte {
	if v.Raw != "" {
		return append(b, v.Raw...)
	}
	if !v.Neg || v.Abs == 0 {
		return appendUint(b, v.Abs)
	}
	switch n := -v.Abs; {
	case v.Abs <= 32:
		return append(b, byte(n)) //nolint:gosec // two's complement, as all below
	case v.Abs <= 1<<7:
		return append(b, 0xd0, byte(n)) //nolint:gosec // above
	case v.Abs <= 1<<15:
		return append(b, 0xd1, byte(n>>8), byte(n)) //nolint:gosec // above
	case v.Abs <= 1<<31:
		return binary.BigEndian.AppendUint32(append(b, 0xd2), uint32(n)) //nolint:gosec // above
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xd3), n)
	}
}

func appendFloat(b []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(b, 0xcb), math.Float64bits(v))
}

func appendArray(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n)) //nolint:gosec // four bits
	case n < 1<<16:
		return append(b, 0xdc, byte(n>>8), byte(n)) //nolint:gosec // two bytes
	default:
		return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n)) //nolint:gosec // a batch is bounded
	}
}

func appendMap(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x80|byte(n)) //nolint:gosec // four bits
	case n < 1<<16:
		return append(b, 0xde, byte(n>>8), byte(n)) //nolint:gosec // two bytes
	default:
		return binary.BigEndian.AppendUint32(append(b, 0xdf), uint32(n)) //nolint:gosec // there are not that many clients
	}
}
