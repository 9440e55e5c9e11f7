package maru

import (
	"errors"

	"larder/meta"
)

// maxReported is how many entries of one REPORT_STATS count; the others are dropped, as Maru does.
const maxReported = 10000

// Request is a decoded request. Keys are in their canonical form, and alias the body that they were read from, or the
// Request: both must stay until the request has been passed on.
type Request struct {
	Header
	Keys     [][]byte
	Entries  []meta.MaruEntry
	Instance string       // of REQUEST_ALLOC and RETURN_ALLOC; the one to leave out of LIST_ALLOCATIONS
	Region   meta.MaruInt // of RETURN_ALLOC
	Size     uint64       // of REQUEST_ALLOC
	Reports  []Report     // of REPORT_STATS
	scratch  []byte       // keys that are no str
	odd      bool         // it was well-formed, but Maru would fail at it
	have     uint
}

// errRequest is what is wrong with a request that can be decoded, and makes Maru's server fail: a key that is a list, say.
var errRequest = errors.New("maru: the request cannot be carried out")

// Fields that requests need, as bits.
const (
	hasKey = 1 << iota
	hasRegion
	hasOffset
	hasLength
	hasInstance
	hasSize
)

// needs are the fields without which Maru's server decodes a request not.
var needs = [256]uint{
	RequestAlloc: hasInstance | hasSize, ReturnAlloc: hasInstance | hasRegion,
	Register: hasKey | hasRegion | hasOffset | hasLength,
	Lookup:   hasKey, Exists: hasKey, Delete: hasKey, Pin: hasKey, Unpin: hasKey,
}

// Decode reads a request's payload, for the type that its header has. It fails with errBody or errRequest.
func (q *Request) Decode(h Header, payload []byte) error {
	*q = Request{Header: h, Keys: q.Keys[:0], Entries: q.Entries[:0], Reports: q.Reports[:0], scratch: q.scratch[:0]}
	if h.Type.String() == "" {
		return errBody
	}
	r := reader{b: payload}
	top := r.next()
	if top.kind == kindMap {
		var e meta.MaruEntry
		r.fields(top, func(name []byte) { q.field(&r, name, &e) })
		if h.Type == Register {
			q.Entries = append(q.Entries, e)
		}
	} else {
		r.rest(top, 1)
	}
	if need := needs[h.Type]; r.bad || len(r.b) > 0 || q.have&need != need {
		return errBody
	}
	if q.odd || len(q.Keys) > meta.MaxMaruBatch || len(q.Entries) > meta.MaxMaruBatch {
		return errRequest
	}
	return nil
}

// field reads one field of a request. Those that the type does not have are nothing to it.
func (q *Request) field(r *reader, name []byte, e *meta.MaruEntry) {
	switch string(name) {
	case "key":
		if q.Type >= Lookup && q.Type <= Unpin {
			q.Keys = append(q.Keys[:0], q.key(r))
			q.have |= hasKey
			return
		}
	case "keys":
		if q.Type >= BatchLookup && q.Type <= BatchUnpin {
			q.keys(r)
			return
		}
	case "entries":
		if q.Type == BatchRegister {
			q.entries(r)
			return
		}
		if q.Type == ReportStats {
			q.reports(r)
			return
		}
	case "instance_id":
		if q.Type == RequestAlloc || q.Type == ReturnAlloc || q.Type == Handshake {
			q.instance(r)
			q.have |= hasInstance
			return
		}
	case "exclude_instance_id":
		if q.Type == ListAllocations {
			q.instance(r)
			return
		}
	case "size":
		if q.Type == RequestAlloc {
			v := r.next()
			r.rest(v, 1)
			q.odd = q.odd || v.kind != kindInt && v.kind != kindBool || v.int.Neg
			q.Size = v.int.Abs
			q.have |= hasSize
			return
		}
	case "region_id":
		if q.Type == ReturnAlloc {
			q.Region = q.regionID(r)
			q.have |= hasRegion
			return
		}
	}
	if q.Type == Register {
		q.have |= q.entryField(r, name, e)
		return
	}
	r.skip()
}

// instance reads the name of an instance. Anything but a str is nobody's.
func (q *Request) instance(r *reader) {
	v := r.next()
	r.rest(v, 1)
	q.Instance = string(v.bytes)
}

// key reads a key.
func (q *Request) key(r *reader) []byte {
	v := r.next()
	if v.kind == kindStr {
		q.odd = q.odd || len(v.bytes) > meta.MaxMaruKeyBytes
		return v.bytes
	}
	r.rest(v, 1)
	from := len(q.scratch)
	var ok bool
	q.scratch, ok = appendCanonical(q.scratch, v)
	q.odd = q.odd || !ok || len(q.scratch)-from > meta.MaxMaruKeyBytes
	return q.scratch[from:len(q.scratch):len(q.scratch)]
}

// array reads the head of an array, and returns how many values follow; ok is false if it is something else, which is passed over.
func (q *Request) array(r *reader) (n int, ok bool) {
	v := r.next()
	if v.kind != kindArray {
		r.rest(v, 1)
		q.odd = true
		return 0, false
	}
	return v.n, true
}

func (q *Request) keys(r *reader) {
	n, ok := q.array(r)
	if !ok {
		return
	}
	q.Keys = q.Keys[:0]
	for i := 0; i < n && !r.bad; i++ {
		q.Keys = append(q.Keys, q.key(r))
	}
}

// entries reads those of a BATCH_REGISTER_KV. Each needs all of its fields.
func (q *Request) entries(r *reader) {
	n, ok := q.array(r)
	if !ok {
		return
	}
	q.Entries = q.Entries[:0]
	for i := 0; i < n && !r.bad; i++ {
		var e meta.MaruEntry
		have, at := uint(0), r.next()
		if at.kind != kindMap {
			r.fail()
			return
		}
		r.fields(at, func(name []byte) { have |= q.entryField(r, name, &e) })
		if have != needs[Register] {
			r.fail()
			return
		}
		q.Entries = append(q.Entries, e)
	}
}

// entryField reads a field of an entry that is to be registered, and says which.
func (q *Request) entryField(r *reader, name []byte, e *meta.MaruEntry) uint {
	switch string(name) {
	case "key":
		e.Key = q.key(r)
		return hasKey
	case "region_id":
		e.Region = q.regionID(r)
		return hasRegion
	case "kv_offset":
		e.Offset = q.number(r)
		return hasOffset
	case "kv_length":
		e.Length = q.number(r)
		return hasLength
	}
	r.skip()
	return 0
}

// maxOdd is how long what stands for an integer may be: a float, say. It counts in no limit of the index, which has three for a key.
const maxOdd = 64

// number reads an integer. Nobody checks that it is one: what is none comes back as it was.
func (q *Request) number(r *reader) meta.MaruInt {
	from := r.b
	v := r.next()
	if v.kind == kindInt {
		return v.int
	}
	r.rest(v, 1)
	raw := from[:len(from)-len(r.b)]
	q.odd = q.odd || len(raw) > maxOdd
	return meta.MaruInt{Raw: string(raw)}
}

// regionID reads the number of a region, as which Python takes all that are equal to it.
func (q *Request) regionID(r *reader) meta.MaruInt {
	n := q.number(r)
	if n.Raw == "" {
		return n
	}
	switch v := (&reader{b: []byte(n.Raw)}).next(); v.kind {
	case kindBool:
		return v.int
	case kindFloat:
		if i, ok := integral(v.float); ok {
			return i
		}
	default:
	}
	return n
}

// reports reads what a client has measured.
func (q *Request) reports(r *reader) {
	v := r.next()
	if v.kind != kindArray {
		r.rest(v, 1)
		q.odd = true
		return
	}
	for i := 0; i < v.n && !r.bad; i++ {
		at := r.next()
		if at.kind != kindMap || i >= maxReported {
			q.odd = q.odd || i < maxReported
			r.rest(at, 1)
			continue
		}
		p := Report{Op: "unknown", Result: "none", Client: "_unknown"}
		r.fields(at, func(name []byte) {
			v := r.next()
			r.rest(v, 1)
			p.set(string(name), v)
		})
		q.Reports = append(q.Reports, p)
	}
}

// Mutates reports whether a request changes the index, and so goes through its log.
func (t Type) Mutates() bool {
	switch t {
	case ReturnAlloc, Register, Delete, Pin, Unpin, BatchRegister, BatchPin, BatchUnpin:
		return true
	default:
		return false
	}
}

// reads reports whether a request asks for keys.
func (t Type) reads() bool {
	switch t {
	case Lookup, Exists, BatchLookup, BatchExists:
		return true
	default:
		return false
	}
}

// Command is the request as an operation of the index: one that changes it, or that is to be read in order with those.
// It aliases q.
func (q *Request) Command() *meta.Maru { //nolint:cyclop // a table
	c := &meta.Maru{Keys: q.Keys, Entries: q.Entries}
	switch q.Type {
	case Register, BatchRegister:
		c.Op = meta.MaruRegister
	case Delete:
		c.Op = meta.MaruDelete
	case Pin, BatchPin:
		c.Op, c.Strict = meta.MaruPin, true
	case Unpin, BatchUnpin:
		c.Op = meta.MaruUnpin
	case Lookup, BatchLookup:
		c.Op = meta.MaruLookup
	case Exists, BatchExists:
		c.Op = meta.MaruExists
	case ReturnAlloc:
		c.Op, c.Instance = meta.MaruReturn, q.Instance
		if !q.Region.Neg && q.Region.Raw == "" {
			c.Region = meta.RegionID(q.Region.Abs)
		}
	default:
		return nil
	}
	return c
}
