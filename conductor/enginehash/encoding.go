package enginehash

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
)

// cbor is cbor2.dumps(value, canonical=True): RFC 8949 with the shortest heads.
type cbor struct{}

// The major types.
const (
	cborUint  = 0 << 5
	cborNeg   = 1 << 5
	cborBytes = 2 << 5
	cborText  = 3 << 5
	cborArray = 4 << 5
	cborNull  = 0xf6
)

// head appends a type with a number in its shortest form.
func (cbor) head(b []byte, kind byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, kind|byte(n))
	case n <= math.MaxUint8:
		return append(b, kind|24, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, kind|25), uint16(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, kind|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, kind|27), n)
}

func (c cbor) text(b []byte, s string) []byte {
	return append(c.head(b, cborText, uint64(len(s))), s...)
}

func (c cbor) block(b, parent []byte, tokens []uint32, keys Keys) ([]byte, error) {
	b = c.head(b, cborArray, 3)
	b = append(c.head(b, cborBytes, uint64(len(parent))), parent...)
	b = c.head(b, cborArray, uint64(len(tokens)))
	for _, t := range tokens {
		b = c.head(b, cborUint, uint64(t))
	}
	if len(keys) == 0 {
		return append(b, cborNull), nil
	}
	return c.value(b, keys)
}

func (c cbor) value(b []byte, v any) (_ []byte, err error) {
	switch v := v.(type) {
	case nil:
		return append(b, cborNull), nil
	case string:
		return c.text(b, v), nil
	case []byte:
		return append(c.head(b, cborBytes, uint64(len(v))), v...), nil
	case int:
		if v < 0 {
			return c.head(b, cborNeg, uint64(-1-v)), nil
		}
		return c.head(b, cborUint, uint64(v)), nil
	case Keys:
		b = c.head(b, cborArray, uint64(len(v)))
		for i := 0; i < len(v) && err == nil; i++ {
			b, err = c.value(b, v[i])
		}
		return b, err
	}
	return nil, fmt.Errorf("%w, not a %T", ErrKey, v)
}

// msgpack is msgspec.msgpack.encode(value): the shortest forms.
type msgpack struct{}

// head appends a length: in one byte if it is at most small, which short is combined with, else behind the first of types whose
// 1, 2 or 4 bytes it fits; 0 stands for a form that there is not.
func (msgpack) head(b []byte, n, small int, short byte, types [3]byte) []byte {
	switch {
	case n <= small:
		return append(b, short|byte(n)) //nolint:gosec // small
	case n <= math.MaxUint8 && types[0] != 0:
		return append(b, types[0], byte(n)) //nolint:gosec // checked
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, types[1]), uint16(n)) //nolint:gosec // checked
	}
	return binary.BigEndian.AppendUint32(append(b, types[2]), uint32(n)) //nolint:gosec // as long as keys never are
}

func (m msgpack) text(b []byte, s string) []byte {
	return append(m.head(b, len(s), 31, 0xa0, [3]byte{0xd9, 0xda, 0xdb}), s...)
}

func (m msgpack) bytes(b, s []byte) []byte {
	return append(m.head(b, len(s), -1, 0, [3]byte{0xc4, 0xc5, 0xc6}), s...)
}

func (m msgpack) array(b []byte, n int) []byte { return m.head(b, n, 15, 0x90, [3]byte{0, 0xdc, 0xdd}) }

func (m msgpack) uint(b []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

// negative appends a number below 0.
func (m msgpack) negative(b []byte, v int) []byte {
	switch {
	case v >= -32:
		return append(b, byte(v)) //nolint:gosec // two's complement
	case v >= math.MinInt8:
		return append(b, 0xd0, byte(v)) //nolint:gosec // two's complement
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(b, 0xd1), uint16(v)) //nolint:gosec // two's complement
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(b, 0xd2), uint32(v)) //nolint:gosec // two's complement
	}
	return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(v)) //nolint:gosec // two's complement
}

func (m msgpack) block(b, parent []byte, tokens []uint32, keys Keys) ([]byte, error) {
	b = m.bytes(m.array(b, 3), parent)
	b = m.array(b, len(tokens))
	for _, t := range tokens {
		b = m.uint(b, uint64(t))
	}
	if len(keys) == 0 {
		return append(b, 0xc0), nil
	}
	return m.value(b, keys)
}

func (m msgpack) value(b []byte, v any) (_ []byte, err error) {
	switch v := v.(type) {
	case nil:
		return append(b, 0xc0), nil
	case string:
		return m.text(b, v), nil
	case []byte:
		return m.bytes(b, v), nil
	case int:
		if v < 0 {
			return m.negative(b, v), nil
		}
		return m.uint(b, uint64(v)), nil
	case Keys:
		b = m.array(b, len(v))
		for i := 0; i < len(v) && err == nil; i++ {
			b, err = m.value(b, v[i])
		}
		return b, err
	}
	return nil, fmt.Errorf("%w, not a %T", ErrKey, v)
}

// pickle is pickle.dumps(value, protocol=5) of CPython: https://docs.python.org/3/library/pickletools.html names the opcodes. What
// is one object for Python in two places it writes once; here equal texts are, in the keys of one block, which is so for the
// identifier of an image that is there twice, and need not be for others.
type pickle struct{}

const (
	opProto, opFrame, opStop       = 0x80, 0x95, '.'
	opMark, opMemoize              = '(', 0x94
	opTuple, opTuple1, opEmpty     = 't', 0x85, ')' // 0x86 and 0x87 have two and three
	opNone                         = 'N'
	opInt1, opInt2, opInt4, opLong = 'K', 'M', 'J', 0x8a
	opBytes1, opBytes4             = 'C', 'B'
	opText1, opText4               = 0x8c, 'X'
	opGet1, opGet4                 = 'h', 'j'
)

// pickler writes one pickle.
type pickler struct {
	b    []byte
	memo int            // objects that may be named again
	seen map[string]int // of them, texts by what they are
}

// frame begins a pickle, and returns where its frame begins.
func (p *pickler) frame() int {
	p.b = append(p.b, opProto, 5, opFrame, 0, 0, 0, 0, 0, 0, 0, 0)
	return len(p.b)
}

func (p *pickler) end(from int) []byte {
	p.b = append(p.b, opStop)
	binary.LittleEndian.PutUint64(p.b[from-8:], uint64(len(p.b)-from)) //nolint:gosec // not negative
	return p.b
}

func (p *pickler) memoize() {
	p.b = append(p.b, opMemoize)
	p.memo++
}

// sized appends a text or bytes.
func (p *pickler) sized(op1, op4 byte, s string) {
	if len(s) < 256 {
		p.b = append(p.b, op1, byte(len(s))) //nolint:gosec // checked
	} else {
		p.b = binary.LittleEndian.AppendUint32(append(p.b, op4), uint32(len(s))) //nolint:gosec // as long as keys never are
	}
	p.b = append(p.b, s...)
	p.memoize()
}

func (p *pickler) text(s string) {
	at, there := p.seen[s]
	switch {
	case !there:
		if p.seen == nil {
			p.seen = map[string]int{}
		}
		p.seen[s] = p.memo
		p.sized(opText1, opText4, s)
	case at < 256:
		p.b = append(p.b, opGet1, byte(at)) //nolint:gosec // checked
	default:
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opGet4), uint32(at)) //nolint:gosec // few
	}
}

func (p *pickler) int(v int64) {
	switch {
	case v >= 0 && v <= math.MaxUint8:
		p.b = append(p.b, opInt1, byte(v))
	case v >= 0 && v <= math.MaxUint16:
		p.b = binary.LittleEndian.AppendUint16(append(p.b, opInt2), uint16(v))
	case v >= math.MinInt32 && v <= math.MaxInt32:
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opInt4), uint32(v)) //nolint:gosec // two's complement
	default: // two's complement in as few bytes as hold it
		n := (bits.Len64(uint64(max(v, ^v))) + 8) / 8 //nolint:gosec // not negative
		p.b = append(p.b, opLong, byte(n))            //nolint:gosec // 8 at most
		for i := range n {
			p.b = append(p.b, byte(v>>(8*i))) //nolint:gosec // a byte of it
		}
	}
}

// tuple appends a tuple of n values.
func (p *pickler) tuple(n int, values func() error) error {
	if n == 0 {
		p.b = append(p.b, opEmpty)
		return nil
	}
	if n > 3 {
		p.b = append(p.b, opMark)
	}
	if err := values(); err != nil {
		return err
	}
	if n > 3 {
		p.b = append(p.b, opTuple)
	} else {
		p.b = append(p.b, opTuple1+byte(n-1)) //nolint:gosec // 1 to 3
	}
	p.memoize()
	return nil
}

func (p *pickler) value(v any) error {
	switch v := v.(type) {
	case nil:
		p.b = append(p.b, opNone)
	case string:
		p.text(v)
	case []byte:
		p.sized(opBytes1, opBytes4, string(v))
	case int:
		p.int(int64(v))
	case Keys:
		return p.tuple(len(v), func() error {
			for _, k := range v {
				if err := p.value(k); err != nil {
					return err
				}
			}
			return nil
		})
	default:
		return fmt.Errorf("%w, not a %T", ErrKey, v)
	}
	return nil
}

func (pickle) text(b []byte, s string) []byte {
	p := &pickler{b: b}
	from := p.frame()
	p.text(s)
	return p.end(from)
}

func (pickle) block(b, parent []byte, tokens []uint32, keys Keys) ([]byte, error) {
	p := &pickler{b: b}
	from := p.frame()
	err := p.tuple(3, func() error {
		p.sized(opBytes1, opBytes4, string(parent))
		_ = p.tuple(len(tokens), func() error {
			for _, t := range tokens {
				p.int(int64(t))
			}
			return nil
		}) // numbers are always written
		if len(keys) == 0 {
			return p.value(nil)
		}
		return p.value(keys)
	})
	return p.end(from), err
}
