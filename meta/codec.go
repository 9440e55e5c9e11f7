package meta

import (
	"encoding/binary"
	"errors"

	"larder/protocol"
)

// ErrCorrupt is returned for log entries, results and records that do not decode. A replica that meets one stops:
// going on would let it differ from the others.
var ErrCorrupt = errors.New("meta: corrupt record; restore this member from a snapshot or rejoin it as a new one")

// decoder reads the varint-based encoding of commands, results and records. The first error sticks; after it all
// reads return zero values.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail() { d.b, d.err = nil, ErrCorrupt }

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// u32 reads a number that is kept in 32 bits.
func (d *decoder) u32() uint32 {
	v := d.uvarint()
	if v > 1<<32-1 {
		d.fail()
		return 0
	}
	return uint32(v)
}

// code reads a result's code.
func (d *decoder) code() protocol.Code {
	v := d.uvarint()
	if v > 1<<16-1 {
		d.fail()
		return protocol.CodeInternal
	}
	return protocol.Code(v)
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) u64() uint64 {
	if len(d.b) < 8 {
		d.fail()
		return 0
	}
	v := binary.LittleEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

// be64 and be32 read the parts of record keys, which are big-endian so that records sort by number.
func (d *decoder) be64() uint64 {
	if len(d.b) < 8 {
		d.fail()
		return 0
	}
	v := binary.BigEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

func (d *decoder) be32() uint32 {
	if len(d.b) < 4 {
		d.fail()
		return 0
	}
	v := binary.BigEndian.Uint32(d.b)
	d.b = d.b[4:]
	return v
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail()
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) bool() bool { return d.byte() != 0 }

// bytes returns a length-prefixed slice of the input, without copying it.
func (d *decoder) bytes() []byte {
	n := d.uvarint()
	if n > uint64(len(d.b)) {
		d.fail()
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) string() string { return string(d.bytes()) }

// count reads the length of a list whose elements take at least min bytes each, so that a corrupt length cannot
// make the caller allocate more than the input could hold.
func (d *decoder) count(minBytes int) int {
	n := d.uvarint()
	if n > uint64(len(d.b)/minBytes) { //nolint:gosec // not negative
		d.fail()
		return 0
	}
	return int(n) //nolint:gosec // bounded by len(d.b)
}

// end fails if input is left over.
func (d *decoder) end() error {
	if d.err == nil && len(d.b) != 0 {
		d.fail()
	}
	return d.err
}

func appendBytes[T ~string | ~[]byte](b []byte, v T) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	return append(b, v...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

// clone copies b, nil for nothing.
func clone(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}
