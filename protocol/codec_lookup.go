package protocol

import (
	"encoding/binary"
	"math"
	"slices"
)

// AppendAs appends m as the payload of LOOKUP_KV, of Keys' first element alone, or of BATCH_LOOKUP_KV, as t says.
func (m *LookupRequest) AppendAs(b []byte, t Type) []byte {
	e := enc{b: b}
	s := e.open()
	e.oneOrKeys(m.Keys, t)
	e.optUint("lease_ms", m.LeaseMS)
	e.optBool("stop_at_miss", m.StopAtMiss)
	e.optBool("packed", m.Packed)
	e.optUints("release", m.Release)
	e.close(s)
	return e.b
}

// DecodeAs replaces m by what b, the payload of a message of type t, holds; keys alias b. Its error is a
// *DecodeError.
func (m *LookupRequest) DecodeAs(b []byte, t Type) error {
	*m = LookupRequest{Keys: m.Keys[:0], Release: m.Release[:0]}
	single, have := !t.Batch(), uint(0)
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key", "keys":
			have |= d.oneOrKeys(len(name) == len("key"), single, &m.Keys)
		case "lease_ms":
			m.LeaseMS = d.uint()
		case "stop_at_miss":
			m.StopAtMiss = d.bool()
		case "packed":
			m.Packed = d.bool()
		case "release":
			m.Release = d.uints(m.Release, MaxBatch)
		default:
			d.skip()
		}
	}
	d.needKeys(have, single)
	return d.end()
}

// oneOrKeys appends the keys of a message that has a batch: the first as "key", or all as "keys".
func (e *enc) oneOrKeys(keys [][]byte, t Type) {
	if t.Batch() {
		e.keys("keys", keys)
	} else if len(keys) > 0 {
		e.key("key", keys[0])
	}
}

// oneOrKeys reads the field "key", if one is set, or else "keys"; it skips the one that the message does not have.
// It returns the bit of the required field.
func (d *dec) oneOrKeys(one, single bool, keys *[][]byte) uint {
	switch {
	case one != single:
		d.skip()
		return 0
	case one:
		*keys = append((*keys)[:0], d.key())
	default:
		*keys = d.keys(*keys)
	}
	return 1
}

func (d *dec) needKeys(have uint, single bool) {
	if single {
		d.need(have, "key")
	} else {
		d.need(have, "keys")
	}
}

// AppendAs appends m as the payload of the reply to LOOKUP_KV, which has Results' first element, or to
// BATCH_LOOKUP_KV in its unpacked form, as t, the request's type, says.
func (m *LookupReply) AppendAs(b []byte, t Type) []byte {
	if !t.Batch() && len(m.Results) > 0 && m.Code == CodeOK && m.Message == "" {
		return AppendLookupResult(b, &m.Results[0])
	}
	e := enc{b: b}
	s := e.open()
	switch {
	case t.Batch():
		e.array("entries", len(m.Results))
		for i := range m.Results {
			e.b = AppendLookupResult(e.b, &m.Results[i])
		}
	case len(m.Results) > 0:
		e.lookupResult(&m.Results[0])
	default:
		e.bool("found", false)
	}
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// AppendPacked appends m as the payload of the reply to BATCH_LOOKUP_KV in its packed form.
func (m *LookupReply) AppendPacked(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.field("packed")
	e.b = appendBinHead(e.b, len(m.Results)*PackedSize)
	for i := range m.Results {
		e.b = AppendPacked(e.b, &m.Results[i])
	}
	if size := packedMoreSize(m.Results); size > 0 {
		e.field("copies")
		e.b = appendPackedMore(e.b, m.Results, size)
	}
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func (e *enc) lookupResult(r *LookupResult) {
	e.bool("found", r.Found)
	if !r.Found {
		return
	}
	e.location(&r.Location)
	e.optUint("lease", r.Lease)
	e.optUint("lease_ms", r.LeaseMS)
	if r.more() {
		var n byte
		e.b, n = appendMore(e.b, r)
		e.n += int(n)
	}
}

// DecodeAs replaces m by what b, the payload of the reply to a request of type t, holds. It takes both forms of a
// batch. Its error is a *DecodeError.
func (m *LookupReply) DecodeAs(b []byte, t Type) error {
	*m = LookupReply{Results: m.Results[:0]}
	d := dec{b: b}
	if t.Batch() {
		m.decodeBatch(&d)
	} else {
		m.decodeSingle(&d)
	}
	return d.end()
}

func (m *LookupReply) decodeSingle(d *dec) {
	m.Results = append(m.Results, LookupResult{})
	have := d.lookupResult(&m.Results[0], &m.Error, d.top())
	m.settle()
	if m.Code == CodeOK {
		d.needResult(have, m.Results[0].Found)
	}
}

func (m *LookupReply) decodeBatch(d *dec) {
	have := uint(0)
	var heads, more []byte // "copies" is read last, whatever the order of the fields
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "entries":
			m.Results, heads = m.Results[:0], nil
			for k := d.arrayHead(MaxBatch); d.next(&k); {
				m.Results = append(m.Results, LookupResult{})
				r := &m.Results[len(m.Results)-1]
				d.needResult(d.lookupResult(r, nil, d.element()), r.Found)
				d.inside("entries", len(m.Results)-1)
			}
			have |= 1
		case "packed":
			m.Results, heads = d.packed(m.Results)
			have |= 1
		case "copies":
			more = d.bytes(MaxBatch*packedMoreMax, CodeLimit)
		default:
			d.fault(name, &m.Error)
		}
	}
	if heads != nil && d.err == nil {
		d.packedMore(m.Results, heads, more)
	}
	d.needReply(&m.Error, have, "entries")
}

const (
	haveFound = 1 << iota
	haveHandle
	haveKVOffset
	haveKVLength
)

// lookupResult reads n fields of r and, if e is not nil, of e; it returns the bits of the required ones.
func (d *dec) lookupResult(r *LookupResult, e *Error, n int) uint {
	have, n := d.quickResult(r, n)
	return have | d.lookupFields(r, e, n)
}

func (d *dec) lookupFields(r *LookupResult, e *Error, n int) uint {
	have := uint(0)
	for d.next(&n) {
		switch name := d.name(); string(name) {
		case "found":
			r.Found = d.bool()
			have |= haveFound
		case "handle":
			d.handle(&r.Handle)
			have |= haveHandle
		case "kv_offset":
			r.KVOffset = d.uint()
			have |= haveKVOffset
		case "kv_length":
			r.KVLength = d.uint()
			have |= haveKVLength
		case "lease":
			r.Lease = d.uint()
		case "lease_ms":
			r.LeaseMS = d.uint()
		default:
			if d.locationField(name, &r.Location) || d.moreField(name, r) {
				continue
			}
			if e == nil {
				d.skip()
			} else {
				d.fault(name, e)
			}
		}
	}
	return have
}

func (d *dec) needResult(have uint, found bool) {
	if !found && have&haveFound != 0 {
		return
	}
	d.need(have, "found", "handle", "kv_offset", "kv_length")
}

// AppendLookupResult appends r as a map, which is both the payload of LOOKUP_KV's reply and an element of
// BATCH_LOOKUP_KV's "entries". It writes out what enc.lookupResult does, at half the time.
func AppendLookupResult(b []byte, r *LookupResult) []byte {
	if !r.Found {
		return append(b, "\x81\xa5found\xc2"...)
	}
	head := len(b)
	b = appendUint(append(b, "\x84\xa5found\xc3\xa6handle\x84\xa9region_id"...), r.RegionID)
	b = appendUint(append(b, "\xa6offset"...), r.Offset)
	b = appendUint(append(b, "\xa6length"...), r.Length)
	b = appendUint(append(b, "\xaaauth_token"...), r.AuthToken)
	b = appendUint(append(b, "\xa9kv_offset"...), r.KVOffset)
	b = appendUint(append(b, "\xa9kv_length"...), r.KVLength)
	options := byte(0)
	if r.Device != 0 {
		b = appendUint(append(b, "\xa6device"...), r.Device)
		options++
	}
	if r.Generation != 0 {
		b = appendUint(append(b, "\xaageneration"...), r.Generation)
		options++
	}
	if r.Epoch != 0 {
		b = appendUint(append(b, "\xa5epoch"...), r.Epoch)
		options++
	}
	if r.PageSize != 0 {
		b = appendUint(append(b, "\xa9page_size"...), r.PageSize)
		options++
	}
	if r.Checksum != 0 {
		b = appendUint(append(b, "\xa8checksum"...), r.Checksum)
		options++
	}
	if r.Lease != 0 {
		b = appendUint(append(b, "\xa5lease"...), r.Lease)
		options++
	}
	if r.LeaseMS != 0 {
		b = appendUint(append(b, "\xa8lease_ms"...), r.LeaseMS)
		options++
	}
	if r.more() {
		more, n := appendMore(b, r)
		b = more
		options += n
	}
	b[head] += options
	return b
}

// AppendLookupHead appends the head of the payload of BATCH_LOOKUP_KV's reply, up to the first of n results, each of
// which the caller appends with AppendLookupResult. With them the payload is complete.
func AppendLookupHead(b []byte, n int) []byte {
	return appendArrayHead(append(b, "\x81\xa7entries"...), n)
}

// BeginLookup is AppendLookupHead for a number of results that is not known before, as with StopAtMiss; mark is for
// EndLookup.
func BeginLookup(b []byte) (_ []byte, mark int) {
	b = append(b, "\x81\xa7entries\xdc\x00\x00"...)
	return b, len(b)
}

// EndLookup completes the payload that BeginLookup began at mark, with n results, at most MaxBatch.
func EndLookup(b []byte, mark, n int) []byte {
	binary.BigEndian.PutUint16(b[mark-2:], uint16(n)) //nolint:gosec // at most MaxBatch
	return b
}

// PackedSize is the size in bytes of a result in its packed form: eleven little-endian u64, in this order.
//
//	 0  bit 0: found; bit 1: promote; bits 8 to 15: copies; the upper 32 bits: lease_ms. A result that is not found is
//	    all zeros.
//	 8  device id
//	16  region id
//	24  offset of the region in the device
//	32  length of the region
//	40  generation of the device
//	48  epoch of the region
//	56  kv_offset
//	64  kv_length
//	72  checksum
//	80  lease
//
// A region's auth token and page size are left out: who needs them asks in the unpacked form.
//
// Of the results that have promote or copies, if there are any, the reply has more in a second bin, "copies": in the
// order of the results, the version, u64, and a record of PackedCopySize bytes per copy.
const PackedSize = 88

// PackedCopySize is the size in bytes of a copy in the packed form: eight little-endian u64, which are device id, region
// id, offset of the region, its length, generation, epoch, kv_offset and checksum. Its kv_length is the result's.
const PackedCopySize = 64

const (
	packedFound   = 1
	packedPromote = 2
	packedCopies  = 8 // shift of the number of copies
	packedMore    = packedPromote | 0xff<<packedCopies
	packedMoreMax = 8 + MaxCopies*PackedCopySize // bytes of a result in the second bin
)

// AppendPackedHead appends the head of the payload of a packed reply, up to the first of n results, each of which the
// caller appends with AppendPacked. With them the payload is complete, if they have neither promote nor copies: such are
// written by LookupReply.AppendPacked.
func AppendPackedHead(b []byte, n int) []byte {
	return appendBinHead(append(b, "\x81\xa6packed"...), n*PackedSize)
}

// BeginPacked is AppendPackedHead for a number of results that is not known before; mark is for EndPacked.
func BeginPacked(b []byte) (_ []byte, mark int) {
	b = append(b, "\x81\xa6packed\xc6\x00\x00\x00\x00"...)
	return b, len(b)
}

// EndPacked completes the payload that BeginPacked began at mark, of results that have neither promote nor copies.
func EndPacked(b []byte, mark int) []byte {
	binary.BigEndian.PutUint32(b[mark-4:], uint32(len(b)-mark)) //nolint:gosec // a frame is far smaller
	return b
}

// AppendPacked appends r in its packed form.
func AppendPacked(b []byte, r *LookupResult) []byte {
	n := len(b)
	b = slices.Grow(b, PackedSize)[:n+PackedSize]
	p := b[n:]
	if !r.Found {
		clear(p)
		return b
	}
	_ = p[PackedSize-1]
	head := packedFound | min(r.LeaseMS, math.MaxUint32)<<32
	if r.more() {
		head |= r.packedHead()
	}
	binary.LittleEndian.PutUint64(p[0:], head)
	binary.LittleEndian.PutUint64(p[8:], r.Device)
	binary.LittleEndian.PutUint64(p[16:], r.RegionID)
	binary.LittleEndian.PutUint64(p[24:], r.Offset)
	binary.LittleEndian.PutUint64(p[32:], r.Length)
	binary.LittleEndian.PutUint64(p[40:], r.Generation)
	binary.LittleEndian.PutUint64(p[48:], r.Epoch)
	binary.LittleEndian.PutUint64(p[56:], r.KVOffset)
	binary.LittleEndian.PutUint64(p[64:], r.KVLength)
	binary.LittleEndian.PutUint64(p[72:], r.Checksum)
	binary.LittleEndian.PutUint64(p[80:], r.Lease)
	return b
}

// packed reads the records of a packed reply. It returns their bytes too if some say that there is more of them in the
// other bin.
func (d *dec) packed(s []LookupResult) (_ []LookupResult, more []byte) {
	s = s[:0]
	p := d.bytes(MaxBatch*PackedSize, CodeLimit)
	if len(p)%PackedSize != 0 {
		d.fail(CodeBadRequest, "%d bytes are no multiple of %d", len(p), PackedSize)
		return s, nil
	}
	s = slices.Grow(s, len(p)/PackedSize)
	all, heads := p, uint64(0)
	for ; len(p) >= PackedSize; p = p[PackedSize:] {
		s = s[:len(s)+1]
		heads |= readPacked(&s[len(s)-1], p)
	}
	if heads&packedMore == 0 {
		return s, nil
	}
	return s, all
}

// readPacked reads a record, and returns its first word, or 0 if nothing was found.
func readPacked(r *LookupResult, p []byte) uint64 {
	_ = p[PackedSize-1]
	head := binary.LittleEndian.Uint64(p[0:])
	if head&packedFound == 0 {
		*r = LookupResult{}
		return 0
	}
	r.Found = true
	r.LeaseMS = head >> 32
	r.Version, r.Promote, r.Copies = 0, head&packedPromote != 0, nil
	r.Device = binary.LittleEndian.Uint64(p[8:])
	r.RegionID = binary.LittleEndian.Uint64(p[16:])
	r.Offset = binary.LittleEndian.Uint64(p[24:])
	r.Length = binary.LittleEndian.Uint64(p[32:])
	r.AuthToken = 0
	r.Generation = binary.LittleEndian.Uint64(p[40:])
	r.Epoch = binary.LittleEndian.Uint64(p[48:])
	r.PageSize = 0
	r.KVOffset = binary.LittleEndian.Uint64(p[56:])
	r.KVLength = binary.LittleEndian.Uint64(p[64:])
	r.Checksum = binary.LittleEndian.Uint64(p[72:])
	r.Lease = binary.LittleEndian.Uint64(p[80:])
	return head
}
