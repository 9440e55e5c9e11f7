package meta

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"larder/protocol"
)

// Maru's clients register what they like: offsets that are no multiple of a page, locations that overlap, regions that are
// not there, lengths below zero; and their pins have no owner. None of that fits an entry. So their keys are a table of
// their own beside the entries. A key whose region is there when it is registered hangs on that: it counts as one of the
// region's live entries, so that whatever is decided about regions (what is freed, given anew, or emptied first) sees it,
// and it goes with the region. A key of a region that is not there is only a key.

// Limits of Maru's keys.
const (
	// MaxMaruKeyBytes bounds a key. Maru has no bound; its connectors' keys have some hundred bytes.
	MaxMaruKeyBytes = 64 << 10
	// MaxMaruBatch bounds the keys of one command, and with them for how long it holds up others.
	MaxMaruBatch = 65536
	// MaxMaruKeys and MaxMaruKeysBytes bound the keys of a pool, and their own bytes: those of regions that are not there are
	// bounded by nothing else. Maru's default is 1 MiB for a key, of which so many fill 16 TiB.
	MaxMaruKeys      = 1 << 24
	MaxMaruKeysBytes = 4 << 30
)

// MaruOp is what a Maru command does.
type MaruOp uint8

// Operations. Numbers are for ever: they are in logs.
const (
	MaruRegister MaruOp = 1 // register Entries; the first writer of a key wins
	MaruDelete   MaruOp = 2 // remove Keys that are not pinned
	MaruPin      MaruOp = 3 // count a pin of each of Keys
	MaruUnpin    MaruOp = 4 // count one less
	MaruLookup   MaruOp = 5 // where Keys lie, in order with the operations around it
	MaruExists   MaruOp = 6 // which of Keys are there, likewise
	MaruReturn   MaruOp = 7 // Instance returns Region
	MaruUndo     MaruOp = 8 // remove Entries that lie just there, pinned or not: they were registered too late
)

// Maru is an operation of a client of Maru's. It is applied as a whole or, with DeadlineMS, not at all: an entry of the log
// that is stamped later refuses it with CodePending, since its client has given up and may use the page for something else.
type Maru struct {
	Op         MaruOp
	Strict     bool   // of MaruPin: stop at the first key that is missing
	Again      bool   // of MaruRegister: it may have been applied before, so that a key that lies just there is new, too
	DeadlineMS uint64 // log time in ms; 0 = none
	Keys       [][]byte
	Entries    []MaruEntry // of MaruRegister and MaruUndo
	Instance   string      // of MaruReturn
	Region     RegionID    // of MaruReturn
}

// MaruEntry is a key with its location, which nobody checks.
type MaruEntry struct {
	Key                    []byte
	Region, Offset, Length MaruInt
}

// MaruInt is an integer of msgpack, of 64 bits with a sign or without; or, since nobody checks, something else.
type MaruInt struct {
	Neg bool
	Abs uint64
	Raw string // in msgpack, if it is no integer; "" = it is
}

// MaruFound is where a key lies.
type MaruFound struct {
	Region         RegionID // 0 = the key is not found
	Epoch          uint64   // of the region
	Offset, Length MaruInt
}

// MaruSum is a sum of MaruInts, of 128 bits in two's complement.
type MaruSum struct {
	Hi, Lo uint64
	Odd    uint64 // how many of them were no integers
}

// add adds v, or with minus subtracts it.
func (s *MaruSum) add(v MaruInt, minus bool) {
	var carry uint64
	if v.Raw != "" && minus {
		s.Odd--
		return
	}
	if v.Raw != "" {
		s.Odd++
		return
	}
	if v.Neg != minus {
		s.Lo, carry = bits.Sub64(s.Lo, v.Abs, 0)
		s.Hi -= carry
		return
	}
	s.Lo, carry = bits.Add64(s.Lo, v.Abs, 0)
	s.Hi += carry
}

// Add adds v.
func (s *MaruSum) Add(v MaruInt) { s.add(v, false) }

// Plus returns the sum of two.
func (s *MaruSum) Plus(o MaruSum) MaruSum {
	lo, carry := bits.Add64(s.Lo, o.Lo, 0)
	return MaruSum{s.Hi + o.Hi + carry, lo, s.Odd + o.Odd}
}

// Int returns the sum as an integer of msgpack, if it is one.
func (s *MaruSum) Int() (MaruInt, bool) {
	switch {
	case s.Odd != 0:
	case s.Hi == 0:
		return MaruInt{Abs: s.Lo}, true
	case s.Hi == ^uint64(0) && s.Lo >= 1<<63:
		return MaruInt{Neg: true, Abs: -s.Lo}, true
	}
	return MaruInt{}, false
}

// marus reports whether keys may hang on a region: it is of an instance without an end, as those of Maru's clients are. In
// the regions of other clients, which know nothing of such keys, they would name bytes that their owners replace.
func (r *region) marus() bool { return r.sound() && r.owner != nil && r.owner.ttlMS == 0 }

// foundMaru is where the key of a slot lies, for those who ask.
func (m *Machine) foundMaru(s Slot) MaruFound {
	if s == 0 {
		return MaruFound{}
	}
	r := m.maruRegion(m.maru.at(s))
	if r == nil || !r.served() {
		return MaruFound{}
	}
	_, offset, length := m.maru.location(s)
	return MaruFound{r.id, r.epoch, offset, length}
}

func (m *Machine) applyMaru(c *Maru, out *Results) {
	switch {
	case m.settings.Version < VersionMaru:
		out.fail(protocol.CodeUnsupported)
		return
	case c.DeadlineMS != 0 && m.head.now > c.DeadlineMS:
		out.fail(protocol.CodePending)
		return
	}
	out.code(0)
	out.buf = append(out.buf, byte(c.Op))
	switch c.Op {
	case MaruRegister:
		m.maruRegister(c, out)
	case MaruUndo:
		m.maruUndo(c, out)
	case MaruDelete, MaruPin, MaruUnpin, MaruExists:
		stopped := false
		for _, key := range c.Keys {
			ok := !stopped && m.maruKeyed(c.Op, m.findMaru(key))
			stopped = stopped || c.Strict && !ok
			out.bool(ok)
		}
	case MaruLookup:
		for _, key := range c.Keys {
			f := m.foundMaru(m.findMaru(key))
			out.uvarint(uint64(f.Region))
			if f.Region != 0 {
				out.uvarint(f.Epoch)
				out.buf = appendMaruInts(out.buf, f.Offset, f.Length)
			}
		}
	case MaruReturn:
		out.bool(m.maruReturn(c))
	default:
		out.fail(protocol.CodeBadRequest)
	}
}

func (m *Machine) maruRegister(c *Maru, out *Results) {
	size := m.maru.bytes
	for i := range c.Entries {
		n := len(c.Entries[i].Key)
		if n > MaxMaruKeyBytes {
			out.fail(protocol.CodeKeyTooLong)
			return
		}
		size += uint64(n)
	}
	if m.maru.count+len(c.Entries) > MaxMaruKeys || size > MaxMaruKeysBytes {
		out.fail(protocol.CodeLimit)
		return
	}
	for i := range c.Entries {
		e := &c.Entries[i]
		s := m.maru.find(e.Key)
		if m.maruThere(s) {
			out.bool(c.Again && m.maruLies(s, e))
			continue
		}
		out.bool(true)
		if s != 0 {
			m.emptied(m.dropMaru(s)) // its bytes are lost
		}
		m.head.births++
		r := m.regions[RegionID(e.Region.Abs)]
		if r != nil && (e.Region.Neg || e.Region.Raw != "" || !r.marus()) {
			r = nil
		}
		s = m.addMaru(e, m.head.births, 0, r)
		m.hangMaru(s)
		m.maru.mark(s)
	}
}

// maruUndo removes what should not have been registered.
func (m *Machine) maruUndo(c *Maru, out *Results) {
	for i := range c.Entries {
		e := &c.Entries[i]
		s := m.findMaru(e.Key)
		there := m.maruLies(s, e)
		if there {
			m.deleteMaru(s)
		}
		out.bool(there)
	}
}

// maruLies reports whether the key of a slot lies just where an entry says.
func (m *Machine) maruLies(s Slot, e *MaruEntry) bool {
	if s == 0 {
		return false
	}
	region, offset, length := m.maru.location(s)
	return region == e.Region && offset == e.Offset && length == e.Length
}

// deleteMaru removes a key. Its region goes too if its owner has returned it, and it has waited for that.
func (m *Machine) deleteMaru(s Slot) {
	if r := m.dropMaru(s); r != nil {
		m.emptied(r)
	}
}

// maruKeyed carries out an operation on the key of a slot, which may be 0.
func (m *Machine) maruKeyed(op MaruOp, s Slot) bool {
	if s == 0 {
		return false
	}
	pins := m.maru.at(s).pins
	switch op {
	case MaruDelete:
		if pins > 0 {
			return false
		}
		m.deleteMaru(s)
	case MaruPin:
		m.pinMaru(s, pins+1)
	case MaruUnpin:
		if pins == 0 {
			return false
		}
		m.pinMaru(s, pins-1)
	default: // it is there
	}
	return true
}

// maruReturn has an instance return a region. Its session ends with its last one: who comes back opens another.
func (m *Machine) maruReturn(c *Maru) bool {
	r := m.regions[c.Region]
	if r == nil || r.owner == nil || r.owner.ttlMS != 0 || r.owner.instance != c.Instance {
		return false
	}
	switch r.state {
	case RegionOwned, RegionOrphaned:
		owner := r.owner
		m.depart(r)
		if owner.open && !slices.ContainsFunc(owner.regions, func(r *region) bool { return r.state == RegionOwned }) {
			m.closeSession(owner)
			m.fenceSession(owner)
			m.forgetSession(owner)
		}
	case RegionDeparted: // returned before, and still there for its keys
	default:
		return false
	}
	return true
}

// MaruLookup returns where a key of Maru's lies.
func (m *Machine) MaruLookup(key []byte) MaruFound { return m.foundMaru(m.findMaru(key)) }

// MaruIn reports whether keys of Maru's lie in a region.
func (m *Machine) MaruIn(id RegionID) bool {
	r := m.regions[id]
	return r != nil && r.maru.first != 0
}

// MaruExists reports whether a key of Maru's is there, be it in a region that never was.
func (m *Machine) MaruExists(key []byte) bool { return m.findMaru(key) != 0 }

// MaruTotal returns how many keys of Maru's there are, and the sum of their lengths.
func (m *Machine) MaruTotal() (keys int, size MaruSum) { return m.maru.count, m.maru.size }

// MaruUsed returns the sum of the lengths of Maru's keys in a region.
func (m *Machine) MaruUsed(id RegionID) MaruSum {
	if r := m.regions[id]; r != nil {
		return r.maru.size
	}
	return MaruSum{}
}

// MaruResult is the result of a Maru command, after its code.
type MaruResult struct {
	Op MaruOp
	d  decoder
}

// DecodeMaru reads the result of a Maru command, after its code: as many of what Bool or Found return as it had keys.
func DecodeMaru(b []byte) MaruResult {
	d := decoder{b: b}
	return MaruResult{MaruOp(d.byte()), d}
}

// Bool returns what became of the next key: of MaruRegister whether it is new.
func (r *MaruResult) Bool() bool { return r.d.bool() }

// Found returns where the next key of MaruLookup lies.
func (r *MaruResult) Found() MaruFound {
	f := MaruFound{Region: RegionID(r.d.uvarint())}
	if f.Region != 0 {
		f.Epoch = r.d.uvarint()
		decodeMaruInts(&r.d, &f.Offset, &f.Length)
	}
	return f
}

// End fails with ErrCorrupt if the result was not that.
func (r *MaruResult) End() error { return r.d.end() }

// MaruRegions calls fn with each region that a result of MaruLookup names: whoever asked is about to read there. rest is
// the result after its code.
func MaruRegions(rest []byte, fn func(id RegionID)) {
	r := DecodeMaru(rest)
	if r.Op != MaruLookup {
		return
	}
	for last := RegionID(0); len(r.d.b) > 0; {
		if f := r.Found(); f.Region != 0 && f.Region != last {
			fn(f.Region)
			last = f.Region
		}
	}
}

// appendMaruInts writes integers, at most 4: first a byte of their signs and of which are something else, then their amounts.
func appendMaruInts(b []byte, v ...MaruInt) []byte {
	signs := byte(0)
	for i := range v {
		if v[i].Neg {
			signs |= 1 << i
		}
		if v[i].Raw != "" {
			signs |= 1 << (4 + i)
		}
	}
	b = append(b, signs)
	for i := range v {
		if v[i].Raw != "" {
			b = appendBytes(b, v[i].Raw)
			continue
		}
		b = binary.AppendUvarint(b, v[i].Abs)
	}
	return b
}

func decodeMaruInts(d *decoder, v ...*MaruInt) {
	signs := d.byte()
	for i := range v {
		if signs&(1<<(4+i)) != 0 {
			*v[i] = MaruInt{Raw: d.string()}
			continue
		}
		*v[i] = MaruInt{Neg: signs&(1<<i) != 0, Abs: d.uvarint()}
	}
}

// appendTo writes the operation, then what it needs.
func (c *Maru) appendTo(b []byte) []byte {
	b = appendBool(appendBool(append(b, byte(c.Op)), c.Strict), c.Again)
	b = binary.AppendUvarint(b, c.DeadlineMS)
	switch c.Op {
	case MaruRegister, MaruUndo:
		b = binary.AppendUvarint(b, uint64(len(c.Entries)))
		for i := range c.Entries {
			e := &c.Entries[i]
			b = appendMaruInts(appendBytes(b, e.Key), e.Region, e.Offset, e.Length)
		}
	case MaruReturn:
		b = binary.AppendUvarint(appendBytes(b, c.Instance), uint64(c.Region))
	default:
		b = binary.AppendUvarint(b, uint64(len(c.Keys)))
		for _, key := range c.Keys {
			b = appendBytes(b, key)
		}
	}
	return b
}

func (c *Maru) decode(d *decoder) {
	c.Op, c.Strict, c.Again, c.DeadlineMS = MaruOp(d.byte()), d.bool(), d.bool(), d.uvarint()
	switch c.Op {
	case MaruRegister, MaruUndo:
		c.Entries = make([]MaruEntry, d.count(5))
		for i := range c.Entries {
			e := &c.Entries[i]
			e.Key = d.bytes()
			decodeMaruInts(d, &e.Region, &e.Offset, &e.Length)
		}
	case MaruReturn:
		c.Instance, c.Region = d.string(), RegionID(d.uvarint())
	default:
		c.Keys = make([][]byte, d.count(1))
		for i := range c.Keys {
			c.Keys[i] = d.bytes()
		}
	}
}

// Kind implements Command.
func (*Maru) Kind() Kind { return KindMaru }
