package protocol

import (
	"encoding/binary"
	"slices"
)

// The fields of the hot messages come in the order in which the encoders of this package write them. The functions
// here take a field if it is the next one, at a fifth of the cost of reading a name and finding out what it is; what
// they do not take is left to the general decoder, so that they never change what a message means.
//
// A position of -1 means that an earlier field was not there.

// quickField is the name of a field with its head, of at most 16 bytes, so that two words tell it from any other.
type quickField struct {
	size  int
	first uint64 // the first eight bytes, or all of a shorter one
	mask  uint64 // of the bytes that are in first
	last  uint64 // the last eight bytes
}

func newQuickField(name string) quickField {
	b := append([]byte{0xa0 | byte(len(name))}, name...) //nolint:gosec // short names
	padded := slices.Concat(make([]byte, 8), b, make([]byte, 8))
	return quickField{
		size:  len(b),
		first: binary.LittleEndian.Uint64(padded[8:]),
		mask:  1<<(8*min(len(b), 8)) - 1,
		last:  binary.LittleEndian.Uint64(padded[len(b):]),
	}
}

var (
	quickRegionID   = newQuickField("region_id")
	quickOffset     = newQuickField("offset")
	quickLength     = newQuickField("length")
	quickAuthToken  = newQuickField("auth_token")
	quickKVOffset   = newQuickField("kv_offset")
	quickKVLength   = newQuickField("kv_length")
	quickDevice     = newQuickField("device")
	quickGeneration = newQuickField("generation")
	quickEpoch      = newQuickField("epoch")
	quickPageSize   = newQuickField("page_size")
	quickChecksum   = newQuickField("checksum")
	quickLease      = newQuickField("lease")
	quickLeaseMS    = newQuickField("lease_ms")
	quickHash       = newQuickField("hash")
	quickParent     = newQuickField("parent")
	quickIndex      = newQuickField("index")
)

// quickUint reads an int that is the value of field at b[p], and returns the position behind it, or -1.
func quickUint(b []byte, p int, field *quickField, v *uint64) int {
	e := p + field.size
	if p < 0 || len(b)-e < 9 {
		return -1
	}
	if (binary.LittleEndian.Uint64(b[p:])^field.first)&field.mask != 0 ||
		field.size > 8 && binary.LittleEndian.Uint64(b[e-8:]) != field.last {
		return -1
	}
	w := b[e : e+9]
	switch c := w[0]; {
	case c < 0x80:
		*v = uint64(c)
		return e + 1
	case c == 0xcc:
		*v = uint64(w[1])
		return e + 2
	case c == 0xcd:
		*v = uint64(binary.BigEndian.Uint16(w[1:]))
		return e + 3
	case c == 0xce:
		*v = uint64(binary.BigEndian.Uint32(w[1:]))
		return e + 5
	case c == 0xcf:
		*v = binary.BigEndian.Uint64(w[1:])
		return e + 9
	}
	return -1
}

// quickOption reads an optional field at b[p], if it is there and n, the number of fields that are left, allows it.
func quickOption(b []byte, p, n int, field *quickField, v *uint64) (next, left int) {
	if n > 0 {
		if q := quickUint(b, p, field, v); q >= 0 {
			return q, n - 1
		}
	}
	return p, n
}

// quickKey reads a key of less than 256 bytes that is the value of field at b[p].
func quickKey(b []byte, p int, field string, v *[]byte) int {
	e := p + len(field)
	if p < 0 || len(b)-e < 2 || string(b[p:e]) != field {
		return -1
	}
	var n int
	switch c := b[e]; {
	case c&0xe0 == 0xa0:
		n = int(c & 0x1f)
		e++
	case c == 0xd9 || c == 0xc4:
		n = int(b[e+1])
		e += 2
	default:
		return -1
	}
	if n > len(b)-e {
		return -1
	}
	*v = b[e : e+n : e+n]
	return e + n
}

// quickText passes over text if it is at b[p].
func quickText(b []byte, p int, text string) int {
	e := p + len(text)
	if p < 0 || e > len(b) || string(b[p:e]) != text {
		return -1
	}
	return e
}

// quickEntry reads the first of v's n fields, as far as they are in order. It returns the bits of the required ones
// that it read, and the number of fields that are left.
func (d *dec) quickEntry(v *RegisterEntry, n int) (have uint, left int) {
	if n < 4 || d.err != nil {
		return 0, n
	}
	b := d.b
	p := quickKey(b, d.p, "\xa3key", &v.Key)
	p = quickUint(b, p, &quickRegionID, &v.RegionID)
	p = quickUint(b, p, &quickKVOffset, &v.KVOffset)
	p = quickUint(b, p, &quickKVLength, &v.KVLength)
	if p < 0 {
		return 0, n
	}
	n -= 4
	p, n = quickOption(b, p, n, &quickEpoch, &v.Epoch)
	p, n = quickOption(b, p, n, &quickChecksum, &v.Checksum)
	if n > 0 {
		if q := quickUint(b, p, &quickHash, &v.Hash); q >= 0 {
			v.HasPrefix = true
			p, n = quickOption(b, q, n-1, &quickParent, &v.Parent)
			p, n = quickOption(b, p, n, &quickIndex, &v.Index)
		}
	}
	d.p = p
	return haveEntry, n
}

// quickResult is quickEntry for a LookupResult.
func (d *dec) quickResult(r *LookupResult, n int) (have uint, left int) {
	if n < 4 || d.err != nil {
		return 0, n
	}
	b := d.b
	p := quickText(b, d.p, "\xa5found\xc3\xa6handle\x84")
	p = quickUint(b, p, &quickRegionID, &r.RegionID)
	p = quickUint(b, p, &quickOffset, &r.Offset)
	p = quickUint(b, p, &quickLength, &r.Length)
	p = quickUint(b, p, &quickAuthToken, &r.AuthToken)
	p = quickUint(b, p, &quickKVOffset, &r.KVOffset)
	p = quickUint(b, p, &quickKVLength, &r.KVLength)
	if p < 0 {
		return 0, n
	}
	r.Found = true
	n -= 4
	p, n = quickOption(b, p, n, &quickDevice, &r.Device)
	p, n = quickOption(b, p, n, &quickGeneration, &r.Generation)
	p, n = quickOption(b, p, n, &quickEpoch, &r.Epoch)
	p, n = quickOption(b, p, n, &quickPageSize, &r.PageSize)
	p, n = quickOption(b, p, n, &quickChecksum, &r.Checksum)
	p, n = quickOption(b, p, n, &quickLease, &r.Lease)
	p, n = quickOption(b, p, n, &quickLeaseMS, &r.LeaseMS)
	d.p = p
	return haveFound | haveHandle | haveKVOffset | haveKVLength, n
}
