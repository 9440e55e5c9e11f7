package protocol

import "encoding/binary"

// The fields of the hot messages come in the order in which the encoders of this package write them. The functions
// here take a field if it is the next one, at a fifth of the cost of reading a name and finding out what it is; what
// they do not take is left to the general decoder, so that they never change what a message means.
//
// A field is given as the head and text of its name. A position of -1 means that an earlier field was not there.

// quickUint reads an int that is the value of field at b[p], and returns the position behind it, or -1.
func quickUint(b []byte, p int, field string, v *uint64) int {
	e := p + len(field)
	if p < 0 || len(b)-e < 9 || string(b[p:e]) != field {
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
func quickOption(b []byte, p, n int, field string, v *uint64) (next, left int) {
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
	n := 0
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
	p = quickUint(b, p, "\xa9region_id", &v.RegionID)
	p = quickUint(b, p, "\xa9kv_offset", &v.KVOffset)
	p = quickUint(b, p, "\xa9kv_length", &v.KVLength)
	if p < 0 {
		return 0, n
	}
	n -= 4
	p, n = quickOption(b, p, n, "\xa5epoch", &v.Epoch)
	p, n = quickOption(b, p, n, "\xa8checksum", &v.Checksum)
	if n > 0 {
		if q := quickUint(b, p, "\xa4hash", &v.Hash); q >= 0 {
			v.HasPrefix = true
			p, n = quickOption(b, q, n-1, "\xa6parent", &v.Parent)
			p, n = quickOption(b, p, n, "\xa5index", &v.Index)
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
	p = quickUint(b, p, "\xa9region_id", &r.RegionID)
	p = quickUint(b, p, "\xa6offset", &r.Offset)
	p = quickUint(b, p, "\xa6length", &r.Length)
	p = quickUint(b, p, "\xaaauth_token", &r.AuthToken)
	p = quickUint(b, p, "\xa9kv_offset", &r.KVOffset)
	p = quickUint(b, p, "\xa9kv_length", &r.KVLength)
	if p < 0 {
		return 0, n
	}
	r.Found = true
	n -= 4
	p, n = quickOption(b, p, n, "\xa6device", &r.Device)
	p, n = quickOption(b, p, n, "\xaageneration", &r.Generation)
	p, n = quickOption(b, p, n, "\xa5epoch", &r.Epoch)
	p, n = quickOption(b, p, n, "\xa9page_size", &r.PageSize)
	p, n = quickOption(b, p, n, "\xa8checksum", &r.Checksum)
	p, n = quickOption(b, p, n, "\xa5lease", &r.Lease)
	p, n = quickOption(b, p, n, "\xa8lease_ms", &r.LeaseMS)
	d.p = p
	return haveFound | haveHandle | haveKVOffset | haveKVLength, n
}
