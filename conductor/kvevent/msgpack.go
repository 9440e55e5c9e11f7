package kvevent

import (
	"encoding/binary"
	"errors"
	"math"
)

// reader reads msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md). A read that fails leaves it where it was
// or somewhere behind, so that only skip, which went before, tells where a value ends.
type reader struct {
	b []byte
	p int
}

// maxDepth bounds values within values: events have five levels.
const maxDepth = 32

var (
	errShort = errors.New("kvevent: a value is cut short")
	errDeep  = errors.New("kvevent: values are nested too deeply")
	errType  = errors.New("kvevent: a value is of another type than was due")
)

// kind is what sort of value comes next.
type kind uint8

const (
	kindBad kind = iota
	kindNil
	kindBool
	kindInt
	kindFloat
	kindText // a string or bytes
	kindArray
	kindMap
	kindExt
)

// fixed are the types of a byte from 0xc0 to 0xdf, and how many bytes follow it: a value's, or a length's.
var fixed = [32]struct {
	kind kind
	n    int
}{
	{kindNil, 0},
	{kindBad, 0},
	{kindBool, 0},
	{kindBool, 0},
	{kindText, 1},
	{kindText, 2},
	{kindText, 4},
	{kindExt, 1},
	{kindExt, 2},
	{kindExt, 4},
	{kindFloat, 4},
	{kindFloat, 8},
	{kindInt, 1},
	{kindInt, 2},
	{kindInt, 4},
	{kindInt, 8},
	{kindInt, 1},
	{kindInt, 2},
	{kindInt, 4},
	{kindInt, 8},
	{kindExt, 1},
	{kindExt, 2},
	{kindExt, 4},
	{kindExt, 8},
	{kindExt, 16},
	{kindText, 1},
	{kindText, 2},
	{kindText, 4},
	{kindArray, 2},
	{kindArray, 4},
	{kindMap, 2},
	{kindMap, 4},
}

// peek is the kind of the next value.
func (r *reader) peek() kind {
	if r.p >= len(r.b) {
		return kindBad
	}
	switch c := r.b[r.p]; {
	case c < 0x80, c >= 0xe0:
		return kindInt
	case c < 0x90:
		return kindMap
	case c < 0xa0:
		return kindArray
	case c < 0xc0:
		return kindText
	default:
		return fixed[c-0xc0].kind
	}
}

// take returns the next n bytes.
func (r *reader) take(n int) ([]byte, error) {
	if n < 0 || n > len(r.b)-r.p {
		return nil, errShort
	}
	b := r.b[r.p : r.p+n]
	r.p += n
	return b, nil
}

// number reads n bytes, big-endian.
func (r *reader) number(n int) (uint64, error) {
	b, err := r.take(n)
	if err != nil {
		return 0, err
	}
	switch n {
	case 1:
		return uint64(b[0]), nil
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), nil
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), nil
	default:
		return binary.BigEndian.Uint64(b), nil
	}
}

// isNil reads a nil, if one comes next.
func (r *reader) isNil() bool {
	if r.p < len(r.b) && r.b[r.p] == 0xc0 {
		r.p++
		return true
	}
	return false
}

// integer reads an integer: 64 bits, in two's complement if it is negative.
func (r *reader) integer() (uint64, error) {
	if r.peek() != kindInt {
		return 0, errType
	}
	c := r.b[r.p]
	r.p++
	switch {
	case c < 0x80:
		return uint64(c), nil
	case c >= 0xe0:
		return uint64(int64(int8(c))), nil //nolint:gosec // two's complement
	}
	n := fixed[c-0xc0].n
	v, err := r.number(n)
	if err == nil && c >= 0xd0 { // signed
		shift := 64 - 8*n
		v = uint64(int64(v<<shift) >> shift) //nolint:gosec // two's complement
	}
	return v, err
}

// float reads a number as a float.
func (r *reader) float() (float64, error) {
	if r.peek() == kindInt {
		v, err := r.integer()
		return float64(int64(v)), err //nolint:gosec // a time; what does not fit is none
	}
	if r.peek() != kindFloat {
		return 0, errType
	}
	c := r.b[r.p]
	r.p++
	v, err := r.number(fixed[c-0xc0].n)
	if c == 0xca {
		return float64(math.Float32frombits(uint32(v))), err //nolint:gosec // four bytes
	}
	return math.Float64frombits(v), err
}

// text reads a string or bytes, which stay in the payload.
func (r *reader) text() ([]byte, error) {
	if r.peek() != kindText {
		return nil, errType
	}
	n, err := r.length(0xa0, 0x1f)
	if err != nil {
		return nil, err
	}
	return r.take(n)
}

// array reads the head of an array, and returns how many values follow.
func (r *reader) array() (int, error) {
	if r.peek() != kindArray {
		return 0, errType
	}
	n, err := r.length(0x90, 0x0f)
	if err == nil && n > len(r.b)-r.p { // each takes a byte at least
		err = errShort
	}
	return n, err
}

// dict reads the head of a map, and returns how many pairs follow.
func (r *reader) dict() (int, error) {
	if r.peek() != kindMap {
		return 0, errType
	}
	n, err := r.length(0x80, 0x0f)
	if err == nil && n > (len(r.b)-r.p)/2 {
		err = errShort
	}
	return n, err
}

// length reads a head whose short form has the length in its lowest bits.
func (r *reader) length(short, mask byte) (int, error) {
	c := r.b[r.p]
	r.p++
	if c&^mask == short {
		return int(c & mask), nil
	}
	n, err := r.number(fixed[c-0xc0].n)
	return int(n), err //nolint:gosec // four bytes
}

// skip passes over one value.
func (r *reader) skip() error { return r.skipWithin(maxDepth) }

func (r *reader) skipWithin(depth int) (err error) {
	if depth == 0 {
		return errDeep
	}
	var n int
	switch r.peek() {
	case kindBad:
		return errShort
	case kindText:
		_, err = r.text()
		return err
	case kindArray:
		n, err = r.array()
	case kindMap:
		n, err = r.dict()
		n *= 2
	default:
		return r.skipScalar()
	}
	for ; n > 0 && err == nil; n-- {
		err = r.skipWithin(depth - 1)
	}
	return err
}

// skipScalar passes over a value that is not made of others.
func (r *reader) skipScalar() error {
	c := r.b[r.p]
	r.p++
	if c < 0x80 || c >= 0xe0 {
		return nil
	}
	n := fixed[c-0xc0].n
	switch {
	case c >= 0xc7 && c <= 0xc9: // ext with a length, and a type
		v, err := r.number(n)
		if err != nil {
			return err
		}
		n = int(v) + 1 //nolint:gosec // four bytes
	case fixed[c-0xc0].kind == kindExt:
		n++ // its type
	}
	_, err := r.take(n)
	return err
}
