package meta

import (
	"encoding/binary"

	"larder/protocol"
)

// Results collects what Apply did with a group. It is reused from group to group.
type Results struct {
	// WantEffects makes Apply note the pages that were freed by others than their owners: only the leader needs them.
	WantEffects bool
	Effects     []Effect
	// Dropped are the slots, with WantEffects, of entries that went with their region, or in one that nobody writes to:
	// no page of theirs is anybody's news, but their slots are free for other entries.
	Dropped []Slot
	// Parted are the slots, with WantEffects, of entries that lost a location and live on, or did for a while: who holds a
	// lease may be reading there, and the lease is not to be renewed.
	Parted []Slot
	// WantBlocks makes Apply note, in order, how the blocks of prefixes have changed: a member that publishes them needs that.
	WantBlocks bool
	Blocks     []BlockChange
	Spans      []Span // one per command, in order
	buf        []byte
	start      int
}

// Span is the result of one command.
type Span struct {
	Header
	Remembered bool // the command had been applied before; this is what it answered then
	off, end   int
}

// Reset empties r and keeps its memory.
func (r *Results) Reset() {
	r.Effects, r.Dropped, r.Parted, r.Spans, r.buf = r.Effects[:0], r.Dropped[:0], r.Parted[:0], r.Spans[:0], r.buf[:0]
	r.Blocks = r.Blocks[:0]
}

// Bytes returns a span's encoded result, valid until Reset: an uvarint code, then, for code 0, what the
// kind's Decode function reads.
func (r *Results) Bytes(s *Span) []byte { return r.buf[s.off:s.end] }

func (r *Results) begin() { r.start = len(r.buf) }

func (r *Results) end(h Header, remembered bool) {
	r.Spans = append(r.Spans, Span{Header: h, Remembered: remembered, off: r.start, end: len(r.buf)})
}

// code writes the code that every result starts with.
func (r *Results) code(c protocol.Code) { r.buf = binary.AppendUvarint(r.buf, uint64(c)) }

func (r *Results) uvarint(v uint64) { r.buf = binary.AppendUvarint(r.buf, v) }
func (r *Results) u64(v uint64)     { r.buf = appendU64(r.buf, v) }
func (r *Results) bool(v bool)      { r.buf = appendBool(r.buf, v) }
func (r *Results) bytes(v []byte)   { r.buf = appendBytes(r.buf, v) }

// fail makes c the whole result of the command.
func (r *Results) fail(c protocol.Code) {
	r.buf = r.buf[:r.start]
	r.code(c)
}

// failed reports whether the command being written has a code other than 0.
func (r *Results) failed() bool { return len(r.buf) == r.start || r.buf[r.start] != 0 }

// DecodeCode reads the code of an encoded result and returns the rest.
func DecodeCode(b []byte) (protocol.Code, []byte, error) {
	d := decoder{b: b}
	c := d.code()
	return c, d.b, d.err
}

// SessionResult is the result of OpenSession.
type SessionResult struct {
	ID     SessionID
	Secret uint64
	TTLMS  uint64
}

// DecodeSession reads the result of OpenSession, after its code.
func DecodeSession(b []byte) (SessionResult, error) {
	d := decoder{b: b}
	r := SessionResult{ID: SessionID(d.uvarint()), Secret: d.u64(), TTLMS: d.uvarint()}
	return r, d.end()
}

// AllocResult is the result of Alloc.
type AllocResult struct {
	Given    bool // a region was given
	Location      // of the region; Offset, Length and Checksum are 0
	Phase    uint8
	Evicted  []Page
	Keys     uint32
	Found    []byte // bitmap
	Occupied uint64 // occupied pages of the instance
}

// FoundKey reports whether the request's key i existed.
func (r *AllocResult) FoundKey(i int) bool { return i/8 < len(r.Found) && r.Found[i/8]&(1<<(i%8)) != 0 }

// DecodeAlloc reads the result of Alloc, after its code.
func DecodeAlloc(b []byte) (AllocResult, error) {
	d := decoder{b: b}
	var r AllocResult
	r.Phase, r.Occupied = d.byte(), d.uvarint()
	r.Keys, r.Found = d.u32(), d.bytes()
	r.Given = d.bool()
	if r.Given {
		r.decode(&d)
	}
	r.Evicted = make([]Page, d.count(4))
	for i := range r.Evicted {
		r.Evicted[i].decode(&d)
	}
	return r, d.end()
}

func (l *Location) appendTo(b []byte) []byte {
	for _, v := range [...]uint64{
		uint64(l.Region), uint64(l.Device), l.RegionOffset, l.RegionLength, l.Epoch, l.PageSize, l.Offset, l.Length,
	} {
		b = binary.AppendUvarint(b, v)
	}
	return appendU64(appendU64(b, l.Generation), l.Checksum)
}

func (l *Location) decode(d *decoder) {
	l.Region, l.Device = RegionID(d.uvarint()), DeviceID(d.u32())
	for _, v := range [...]*uint64{&l.RegionOffset, &l.RegionLength, &l.Epoch, &l.PageSize, &l.Offset, &l.Length} {
		*v = d.uvarint()
	}
	l.Generation, l.Checksum = d.u64(), d.u64()
}

// pageCopy is set in the encoded slot of a page whose entry lives on.
const pageCopy = 1 << 32

func (p *Page) appendTo(b []byte) []byte {
	b = appendBytes(b, p.Key)
	slot := uint64(p.Slot)
	if p.Copy {
		slot |= pageCopy
	}
	for _, v := range [...]uint64{slot, uint64(p.Region), uint64(p.Owner), p.Offset, p.Length} {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func (p *Page) decode(d *decoder) {
	p.Key = d.bytes()
	slot := d.uvarint()
	if slot >= 2*pageCopy {
		d.fail()
	}
	p.Slot, p.Copy = Slot(slot&(pageCopy-1)), slot&pageCopy != 0
	p.Region, p.Owner = RegionID(d.uvarint()), SessionID(d.uvarint())
	p.Offset, p.Length = d.uvarint(), d.uvarint()
}

// RegisterResult is the result of one entry of Register.
type RegisterResult struct {
	New      bool
	Code     protocol.Code
	Key      []byte   // of the existing entry, if it differs from the one given
	Existing Location // if not New and Code is 0
}

// Outcomes of one entry, as encoded.
const (
	regNew = iota
	regExists
	regRefused
)

// RegisterIter reads the result of Register, after its code, entry by entry and without allocating.
type RegisterIter struct {
	d decoder
	n int
}

// DecodeRegister starts reading.
func DecodeRegister(b []byte) RegisterIter {
	it := RegisterIter{d: decoder{b: b}}
	it.n = it.d.count(1)
	return it
}

// Len returns how many entries are left.
func (it *RegisterIter) Len() int { return it.n }

// Next reads the next entry's result into r. It returns false at the end, or when the result is corrupt: see Err.
func (it *RegisterIter) Next(r *RegisterResult) bool {
	if it.n == 0 || it.d.err != nil {
		return false
	}
	it.n--
	*r = RegisterResult{}
	switch it.d.byte() {
	case regNew:
		r.New = true
	case regExists:
		r.Key = it.d.bytes()
		r.Existing.decode(&it.d)
	default:
		r.Code = it.d.code()
	}
	return it.d.err == nil
}

// Err returns ErrCorrupt if the result did not decode.
func (it *RegisterIter) Err() error { return it.d.err }

// DeleteResult is the result of Delete.
type DeleteResult struct {
	Codes []protocol.Code // per key: 0, CodeNotFound, CodePinned
	Freed []Page          // of those deleted
}

// DecodeDelete reads the result of Delete, after its code.
func DecodeDelete(b []byte) (DeleteResult, error) {
	d := decoder{b: b}
	r := DeleteResult{Codes: make([]protocol.Code, d.count(1))}
	for i := range r.Codes {
		r.Codes[i] = d.code()
		if r.Codes[i] == 0 {
			var p Page
			p.decode(&d)
			r.Freed = append(r.Freed, p)
		}
	}
	return r, d.end()
}

// DecodeCodes reads the result of Pin, after its code: a code per key. For Cancel it is a 1 per seq that had been applied.
func DecodeCodes(b []byte) ([]protocol.Code, error) {
	d := decoder{b: b}
	codes := make([]protocol.Code, d.count(1))
	for i := range codes {
		codes[i] = d.code()
	}
	return codes, d.end()
}

// CountResult is the result of Sweep, EmptyRegion, ExpirePins and AddDevice (the device's id): a number, and how much is
// left (of ExpirePins: whether anything is).
type CountResult struct{ Count, Left uint64 }

// DecodeCount reads a CountResult, after its code.
func DecodeCount(b []byte) (CountResult, error) {
	d := decoder{b: b}
	r := CountResult{Count: d.uvarint(), Left: d.uvarint()}
	return r, d.end()
}
