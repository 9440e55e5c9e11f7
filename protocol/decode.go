package protocol

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"unicode/utf8"
)

// dec reads one payload. The first error sticks: every later read returns zero values, and next ends the loops.
// It allocates nothing but errors and strings, and never more than the input announces and holds.
type dec struct {
	b   []byte
	p   int // position in b
	f   int // where the name of the current field begins; its length is fn
	fn  int //
	err *DecodeError
}

// fail records the first error, at the current field.
func (d *dec) fail(code Code, format string, args ...any) {
	if d.err == nil {
		d.err = &DecodeError{Field: string(d.b[d.f : d.f+d.fn]), Reason: fmt.Sprintf(format, args...), Code: code}
	}
	d.p = len(d.b)
}

// failAt is fail for what only shows once more than the field was read.
func (d *dec) failAt(field, format string, args ...any) {
	if d.err == nil {
		d.fail(CodeBadRequest, format, args...)
		d.err.Field = field
	}
}

func (d *dec) truncated() { d.fail(CodeBadRequest, "the payload ends too early") }

// inside says that what was decoded last was element i of the array name, or the map name if i is negative.
func (d *dec) inside(name string, i int) {
	if d.err == nil {
		return
	}
	inner := d.err.Field
	if inner == name {
		inner = "" // the value itself was at fault, before any of its fields was read
	}
	if i >= 0 {
		name = fmt.Sprintf("%s[%d]", name, i)
	}
	if inner != "" {
		name += "." + inner
	}
	d.err.Field = name
}

// next reports whether one more of n elements is to be read, and counts it.
func (d *dec) next(n *int) bool {
	if *n == 0 || d.err != nil {
		return false
	}
	*n--
	return true
}

// top reads the head of a payload. Maru's servers take anything for the map of a message whose fields are all
// optional, such as the [] that some send with HEARTBEAT: a value that is no map counts as an empty one.
func (d *dec) top() int {
	if d.p < len(d.b) && !isMap(d.b[d.p]) {
		d.skip()
		return 0
	}
	return d.mapHead()
}

func isMap(c byte) bool { return c&0xf0 == 0x80 || c == 0xde || c == 0xdf }

// end returns the error, if any. A payload is exactly one value.
func (d *dec) end() error {
	if d.err == nil && d.p != len(d.b) {
		d.fn = 0
		d.fail(CodeBadRequest, "%d bytes follow the message", len(d.b)-d.p)
	}
	if d.err != nil {
		return d.err
	}
	return nil
}

// need fails if one of the fields names, whose bits in have say whether they were there, is missing.
func (d *dec) need(have uint, names ...string) {
	if have == 1<<len(names)-1 || d.err != nil {
		return
	}
	for i, name := range names {
		if have&(1<<i) == 0 {
			d.failAt(name, "is missing")
			return
		}
	}
}

// mapHead reads the head of a map and returns how many fields follow.
func (d *dec) mapHead() int {
	c := d.byte()
	var n int
	switch {
	case c&0xf0 == 0x80:
		n = int(c & 0x0f)
	case c == 0xde:
		n = int(d.big(2)) //nolint:gosec // two bytes
	case c == 0xdf:
		n = int(d.big(4)) //nolint:gosec // four bytes fit an int
	default:
		d.mismatch("a map", c)
		return 0
	}
	return d.fits(n, 2, math.MaxInt)
}

// element reads the head of a map that is an element of an array.
func (d *dec) element() int {
	d.fn = 0
	return d.mapHead()
}

// arrayHead reads the head of an array of at most limit elements, and returns how many follow. nil is an empty one.
func (d *dec) arrayHead(limit int) int {
	c := d.byte()
	var n int
	switch {
	case c&0xf0 == 0x90:
		n = int(c & 0x0f)
	case c == 0xdc:
		n = int(d.big(2)) //nolint:gosec // two bytes
	case c == 0xdd:
		n = int(d.big(4)) //nolint:gosec // four bytes fit an int
	default:
		d.mismatch("an array", c)
		return 0
	}
	return d.fits(n, 1, limit)
}

// fits checks an announced number of elements, of at least size bytes each, before anything is made of it.
func (d *dec) fits(n, size, limit int) int {
	switch {
	case d.err != nil:
		return 0
	case n > limit:
		d.fail(CodeLimit, "%d elements are over the limit of %d: split the request", n, limit)
		return 0
	case n > (len(d.b)-d.p)/size:
		d.truncated()
		return 0
	}
	return n
}

// name reads the name of a field, valid until the next read. For a field whose value is nil it returns "", which
// the caller takes for an unknown field: nil means absent.
func (d *dec) name() []byte {
	d.fn = 0
	if d.p >= len(d.b) {
		d.truncated()
		return nil
	}
	var n int
	if c := d.b[d.p]; c&0xe0 == 0xa0 {
		n = int(c & 0x1f)
		d.p++
	} else {
		n = d.longName()
	}
	if n >= len(d.b)-d.p { // a value follows
		d.truncated()
		return nil
	}
	s := d.b[d.p : d.p+n]
	d.f, d.fn = d.p, n
	d.p += n
	if d.b[d.p] == 0xc0 {
		return nil
	}
	return s
}

// longName reads the head of a name that no field of this protocol has, and returns its length.
func (d *dec) longName() int {
	switch c := d.byte(); c {
	case 0xd9:
		return int(d.big(1)) //nolint:gosec // one byte
	case 0xda:
		return int(d.big(2)) //nolint:gosec // two bytes
	case 0xdb:
		return int(d.big(4)) //nolint:gosec // four bytes fit an int
	default:
		d.mismatch("a str as the name of a field", c)
		return 0
	}
}

func (d *dec) byte() byte {
	if d.p >= len(d.b) {
		d.truncated()
		return 0xc1 // msgpack never uses this one, so that no caller takes it for a value
	}
	c := d.b[d.p]
	d.p++
	return c
}

// big reads a big-endian unsigned integer of n bytes.
func (d *dec) big(n int) uint64 {
	if len(d.b)-d.p < n {
		d.truncated()
		return 0
	}
	s := d.b[d.p : d.p+n]
	d.p += n
	switch n {
	case 1:
		return uint64(s[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(s))
	case 4:
		return uint64(binary.BigEndian.Uint32(s))
	default:
		return binary.BigEndian.Uint64(s)
	}
}

func (d *dec) mismatch(want string, c byte) {
	if d.err == nil {
		d.fail(CodeBadRequest, "must be %s, not %s", want, describe(c))
	}
}

func (d *dec) uint() uint64 {
	if d.p < len(d.b) {
		if c := d.b[d.p]; c < 0x80 {
			d.p++
			return uint64(c)
		}
	}
	return d.wideUint()
}

func (d *dec) wideUint() uint64 {
	c := d.byte()
	switch c {
	case 0xcc:
		return d.big(1)
	case 0xcd:
		return d.big(2)
	case 0xce:
		return d.big(4)
	case 0xcf:
		return d.big(8)
	case 0xd0:
		return d.notNegative(int64(int8(d.big(1)))) //nolint:gosec // the sign is what is wanted
	case 0xd1:
		return d.notNegative(int64(int16(d.big(2)))) //nolint:gosec // the sign is what is wanted
	case 0xd2:
		return d.notNegative(int64(int32(d.big(4)))) //nolint:gosec // the sign is what is wanted
	case 0xd3:
		return d.notNegative(int64(d.big(8))) //nolint:gosec // the sign is what is wanted
	}
	if c >= 0xe0 {
		return d.notNegative(int64(int8(c))) //nolint:gosec // a negative fixint
	}
	if c >= 0x80 {
		d.mismatch("an int", c)
		return 0
	}
	return uint64(c)
}

func (d *dec) notNegative(v int64) uint64 {
	if v < 0 {
		d.fail(CodeBadRequest, "must not be negative, as %d is", v)
		return 0
	}
	return uint64(v)
}

func (d *dec) bool() bool {
	c := d.byte()
	if c&0xfe != 0xc2 {
		d.mismatch("a bool", c)
		return false
	}
	return c == 0xc3
}

func (d *dec) float() float64 {
	if d.p < len(d.b) {
		switch d.b[d.p] {
		case 0xca:
			d.p++
			return float64(math.Float32frombits(uint32(d.big(4)))) //nolint:gosec // four bytes
		case 0xcb:
			d.p++
			return math.Float64frombits(d.big(8))
		}
	}
	return float64(d.uint())
}

// bytes reads a str or bin of at most limit bytes, which aliases the input.
func (d *dec) bytes(limit int, code Code) []byte {
	if d.p >= len(d.b) {
		d.truncated()
		return nil
	}
	var n int
	if c := d.b[d.p]; c&0xe0 == 0xa0 {
		n = int(c & 0x1f)
		d.p++
	} else {
		n = d.longBytes()
	}
	if d.err != nil {
		return nil
	}
	if n > limit {
		d.fail(code, "%d bytes are over the limit of %d", n, limit)
		return nil
	}
	if n > len(d.b)-d.p {
		d.truncated()
		return nil
	}
	s := d.b[d.p : d.p+n : d.p+n]
	d.p += n
	return s
}

func (d *dec) longBytes() int {
	c := d.byte()
	switch c {
	case 0xd9, 0xc4:
		return int(d.big(1)) //nolint:gosec // one byte
	case 0xda, 0xc5:
		return int(d.big(2)) //nolint:gosec // two bytes
	case 0xdb, 0xc6:
		return int(d.big(4)) //nolint:gosec // four bytes fit an int
	}
	d.mismatch("a str or bin", c)
	return 0
}

func (d *dec) key() []byte { return d.bytes(MaxKeyBytes, CodeKeyTooLong) }

// str reads a str of at most limit bytes. old is returned, and nothing allocated, if it is the same.
func (d *dec) str(old string, limit int) string {
	s := d.bytes(limit, CodeBadRequest)
	if string(s) == old {
		return old
	}
	if !utf8.Valid(s) {
		d.fail(CodeBadRequest, "is not valid UTF-8")
		return ""
	}
	return string(s)
}

func (d *dec) label() string { return d.str("", MaxNameBytes) }
func (d *dec) text() string  { return d.str("", MaxTextBytes) }

// keys reads at most MaxBatch keys.
func (d *dec) keys(s [][]byte) [][]byte {
	s = s[:0]
	for n := d.arrayHead(MaxBatch); d.next(&n); {
		s = append(s, d.key())
	}
	return s
}

// strs reads at most n strs of at most limit bytes each.
func (d *dec) strs(s []string, n, limit int) []string {
	s = s[:0]
	for k := d.arrayHead(n); d.next(&k); {
		s = append(s, d.str("", limit))
	}
	return s
}

func (d *dec) uints(s []uint64, limit int) []uint64 {
	s = s[:0]
	for n := d.arrayHead(limit); d.next(&n); {
		s = append(s, d.uint())
	}
	return s
}

// bools reads at most MaxBatch bools.
func (d *dec) bools(s []bool) []bool {
	s = s[:0]
	for n := d.arrayHead(MaxBatch); d.next(&n); {
		s = append(s, d.bool())
	}
	return s
}

// grow returns s with one more element, which keeps what it held before if the capacity was there.
func grow[T any](s []T) []T {
	if len(s) < cap(s) {
		return s[:len(s)+1]
	}
	var zero T
	return append(s, zero)
}

// elements reads the head of an array of at most limit elements, and yields their places in s one after the other: the loop's
// body reads each, over what was there before. field is the array's name. It is inlined, so that d stays where it is.
func elements[T any](d *dec, s *[]T, limit int, field string) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		*s = (*s)[:0]
		for n := d.arrayHead(limit); d.next(&n); {
			*s = grow(*s)
			if !yield(&(*s)[len(*s)-1]) {
				return
			}
			d.inside(field, len(*s)-1)
		}
	}
}

// skip passes over one value of a field that is not known here.
func (d *dec) skip() { d.skipValue(0) }

func (d *dec) skipValue(depth int) {
	if depth > MaxDepth {
		d.fail(CodeBadRequest, "is nested deeper than %d", MaxDepth)
		return
	}
	c := d.byte()
	if d.err != nil {
		return
	}
	size, n := 0, 0 // bytes that follow, and values after those
	switch {
	case c < 0x80 || c >= 0xe0 || c == 0xc0 || c == 0xc2 || c == 0xc3:
		return
	case c&0xf0 == 0x80:
		n = 2 * int(c&0x0f)
	case c&0xf0 == 0x90:
		n = int(c & 0x0f)
	case c&0xe0 == 0xa0:
		size = int(c & 0x1f)
	default:
		size, n = d.longSkip(c)
	}
	if size > len(d.b)-d.p || n > len(d.b)-d.p {
		d.truncated()
		return
	}
	d.p += size
	for d.next(&n) {
		d.skipValue(depth + 1)
	}
}

// longSkip says for a value with head c, whose length or payload follows, how many bytes and then values follow.
func (d *dec) longSkip(c byte) (size, values int) {
	switch c {
	case 0xc4, 0xd9: // bin 8, str 8
		return int(d.big(1)), 0 //nolint:gosec // one byte
	case 0xc5, 0xda: // bin 16, str 16
		return int(d.big(2)), 0 //nolint:gosec // two bytes
	case 0xc6, 0xdb: // bin 32, str 32
		return int(d.big(4)), 0 //nolint:gosec // four bytes fit an int
	case 0xc7, 0xc8, 0xc9: // ext 8, 16, 32: a length, a type
		return int(d.big(1<<(c-0xc7))) + 1, 0 //nolint:gosec // four bytes fit an int
	case 0xcc, 0xcd, 0xce, 0xcf: // uint 8 to 64
		return 1 << (c - 0xcc), 0
	case 0xd0, 0xd1, 0xd2, 0xd3: // int 8 to 64
		return 1 << (c - 0xd0), 0
	case 0xca, 0xcb: // float 32, 64
		return 4 << (c - 0xca), 0
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8: // fixext 1 to 16: a type
		return 1<<(c-0xd4) + 1, 0
	case 0xdc: // array 16
		return 0, int(d.big(2)) //nolint:gosec // two bytes
	case 0xdd: // array 32
		return 0, int(d.big(4)) //nolint:gosec // four bytes fit an int
	case 0xde: // map 16
		return 0, 2 * int(d.big(2)) //nolint:gosec // two bytes
	case 0xdf: // map 32
		return 0, 2 * int(d.big(4)) //nolint:gosec // four bytes fit an int
	}
	d.fail(CodeBadRequest, "0x%02x begins no msgpack value", c)
	return 0, 0
}

// describe names the msgpack type whose head is c.
func describe(c byte) string {
	switch {
	case c < 0x80 || c >= 0xe0 || c >= 0xcc && c <= 0xd3:
		return "an int"
	case isMap(c):
		return "a map"
	case c&0xf0 == 0x90 || c == 0xdc || c == 0xdd:
		return "an array"
	case c&0xe0 == 0xa0 || c >= 0xd9 && c <= 0xdb:
		return "a str"
	case c >= 0xc4 && c <= 0xc6:
		return "a bin"
	case c == 0xc0:
		return "nil"
	case c == 0xc2 || c == 0xc3:
		return "a bool"
	case c == 0xca || c == 0xcb:
		return "a float"
	case c == 0xc1:
		return "the invalid byte 0xc1"
	default:
		return "an ext"
	}
}

// mutation reads the fields of a Mutation, and skips any other.
func (d *dec) mutation(name []byte, m *Mutation) {
	switch string(name) {
	case "seq":
		m.Seq = d.uint()
	case "acked":
		m.Acked = d.uint()
	default:
		d.skip()
	}
}

// fault reads the fields of an Error, and skips any other. "retryable" is for clients in other languages: here it
// follows from the code.
func (d *dec) fault(name []byte, e *Error) {
	switch string(name) {
	case "error":
		e.Message = d.text()
	case "code":
		e.Code = d.code()
	case "leader":
		e.Leader = d.text()
	case "retry_after_ms":
		e.RetryAfterMS = d.uint()
	default:
		d.skip()
	}
}

func (d *dec) code() Code {
	v := d.uint()
	if v > math.MaxUint16 {
		d.fail(CodeBadRequest, "%d is over 65535", v)
		return CodeOK
	}
	return Code(v)
}

// settle gives an error without a code, which comes from a server that has none, one that is not worth a repetition.
func (e *Error) settle() {
	if e.Code == CodeOK && e.Message != "" {
		e.Code = CodeInternal
	}
}

// needReply ends the fields of a reply, of which names are required unless it failed.
func (d *dec) needReply(e *Error, have uint, names ...string) {
	e.settle()
	if e.Code == CodeOK {
		d.need(have, names...)
	}
}

// endReply is needReply and end.
func (d *dec) endReply(e *Error, have uint, names ...string) error {
	d.needReply(e, have, names...)
	return d.end()
}
