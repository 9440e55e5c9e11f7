package meta

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"

	"larder/meta/policy"
	"larder/protocol"
)

// region is an extent of a device that one session owns.
type region struct {
	object
	id         RegionID
	device     *device
	offset     uint64
	length     uint64
	pageSize   uint64
	epoch      uint64
	generation uint64 // of the device, when the region was given
	owner      *session
	state      RegionState
	bornMS     uint64
	markedFor  SessionID // who gets it once its owner has let go; 0 = nobody

	// Not in the record.
	handle     handle
	live       uint32 // entries' locations
	pinned     uint32 // of them, of hard-pinned entries
	liveBytes  uint64
	head       Slot     // entries that were registered here, and have not left
	places     placeID  // other locations
	copyBytes  uint64   // of them those that are not primaries
	occupied   []uint64 // bitmap of pages
	maru       maruList // keys of Maru's: they count in live and pinned, not in liveBytes
	parts      [2]*partition
	countedFor *tenant // see recount
}

// partition is the entries of one session, page size and class, in the order of their policy.
type partition struct {
	session  *session
	pageSize uint64
	class    Class
	pol      policy.Policy
	old      policy.Policy // what the pool used before, while its entries go over to pol; nil otherwise
	stuck    bool          // old holds entries and offers none; set and used within one Sweep
}

// beyond reports whether a region reaches beyond the end of its device, which has shrunk: it is never given again.
func (r *region) beyond() bool { return r.offset+r.length > r.device.dataEnd() }

// served reports whether what lies in a region may be: it was not taken from its owner, nor were its bytes lost.
func (r *region) served() bool { return r.sound() && r.device.mode == DeviceServing }

// sound reports whether a region was not taken from its owner, and its bytes were not lost: what lies there is served, or
// will be when its device is back.
func (r *region) sound() bool {
	return r.state <= RegionDeparted && r.generation == r.device.Generation
}

// pages returns how many whole pages a region has.
func (r *region) pages() uint64 { return r.length / r.pageSize }

// span returns the pages that length bytes at offset touch.
func (r *region) span(offset, length uint64) (first, end uint64) {
	return offset / r.pageSize, (offset + length + r.pageSize - 1) / r.pageSize
}

// overlaps reports whether a page of the span is occupied.
func (r *region) overlaps(first, end uint64) bool {
	for p := first; p < end; {
		word := r.occupied[p/64] >> (p % 64)
		if word != 0 {
			return p+uint64(bits.TrailingZeros64(word)) < end //nolint:gosec // 0..63
		}
		p = (p/64 + 1) * 64
	}
	return false
}

// occupy sets or clears the pages of the span.
func (r *region) occupy(first, end uint64, on bool) {
	for p := first; p < end; p++ {
		if on {
			r.occupied[p/64] |= 1 << (p % 64)
		} else {
			r.occupied[p/64] &^= 1 << (p % 64)
		}
	}
}

// locate fills in the location of a region as a whole.
func (r *region) locate(l *Location) {
	*l = Location{
		Region: r.id, Device: r.device.id, RegionOffset: r.offset, RegionLength: r.length,
		Generation: r.generation, Epoch: r.epoch, PageSize: r.pageSize,
	}
}

// newRegion cuts a region of size bytes from a device for a session.
func (m *Machine) newRegion(d *device, size, pageSize uint64, s *session) *region {
	offset, ok := d.allocate(size)
	if !ok {
		return nil
	}
	m.head.nextRegion++
	r := &region{id: m.head.nextRegion, device: d, offset: offset, length: size, head: None}
	d.regions++
	m.addRegion(r)
	m.give(r, pageSize, s)
	return r
}

// renumber puts a region of another number in the place of an empty one. Maru's clients name regions by their numbers alone: what
// one still says of a region that it has lost is then about none that another one has.
func (m *Machine) renumber(r *region) *region {
	m.disown(r)
	m.removeRegion(r)
	m.gone(r)
	m.head.nextRegion++
	fresh := &region{id: m.head.nextRegion, device: r.device, offset: r.offset, length: r.length, head: None}
	m.addRegion(fresh)
	return fresh
}

// give hands an empty region to a session under a new epoch.
func (m *Machine) give(r *region, pageSize uint64, s *session) {
	if r.owner != s {
		m.disown(r)
		r.owner = s
		s.regions = append(s.regions, r)
		slices.SortFunc(s.regions, func(a, b *region) int { return cmp.Compare(a.id, b.id) })
	}
	m.head.epochs++
	r.epoch = m.head.epochs
	r.pageSize = pageSize
	r.generation = r.device.Generation
	r.bornMS = m.head.now
	r.markedFor = 0
	r.occupied = make([]uint64, (r.pages()+63)/64)
	r.parts = [2]*partition{}
	m.setRegionState(r, RegionOwned)
}

// disown takes a region from the list of its owner, who is forgotten when it was the last of a closed session.
func (m *Machine) disown(r *region) {
	s := r.owner
	if s == nil {
		return
	}
	s.regions = slices.DeleteFunc(s.regions, func(x *region) bool { return x == r })
	r.owner = nil
	r.recount()
	r.parts = [2]*partition{}
	m.forgetSession(s)
}

func (m *Machine) setRegionState(r *region, st RegionState) {
	r.state = st
	r.recount()
	m.changed(r)
}

// depart makes a region one that nobody writes to any more: its entries are served until the space is needed.
func (m *Machine) depart(r *region) {
	if r.live == 0 || r.generation != r.device.Generation {
		m.abandon(r)
		return
	}
	m.setRegionState(r, RegionDeparted)
}

// abandon makes a region one without a writer, and leaves its entries, which are dead with that, to sweeps and
// EmptyRegion: for commands that concern many regions.
func (m *Machine) abandon(r *region) {
	m.setRegionState(r, RegionDraining)
	if r.live == 0 {
		m.disown(r)
	}
}

// drain makes a region one without a writer and without entries: what is left of them is dead, and removed here or, if
// that is too many, by EmptyRegion.
func (m *Machine) drain(r *region) {
	m.setRegionState(r, RegionDraining)
	m.empty(r, MaxDropPerCommand)
	if r.live == 0 {
		m.disown(r)
	}
}

// empty removes up to limit entries of a region that is being taken, and returns how many.
func (m *Machine) empty(r *region, limit int) int {
	n := 0
	for ; n < limit && r.head != None; n++ {
		m.forgoTaken(r.head, r)
		m.lose(r.head, ReasonTaken)
	}
	for ; n < limit && r.places != 0; n++ {
		v := m.places.at(r.places)
		m.forgoTaken(v.slot, r)
		if x := m.table.at(v.slot); x.flags&flagMoved != 0 && x.places == r.places {
			m.lose(v.slot, ReasonTaken)
		} else {
			m.loseCopy(r.places, ReasonTaken, false)
		}
	}
	return n + m.emptyMaru(r, limit-n)
}

func (m *Machine) applyReturn(s *session, c *ReturnRegion, out *Results) {
	r := m.regions[c.Region]
	switch {
	case r == nil || s == nil || r.owner != s || r.state == RegionDraining:
		out.fail(protocol.CodeNotFound)
		return
	case c.Epoch != 0 && c.Epoch != r.epoch:
		out.fail(protocol.CodeStaleEpoch)
		return
	case r.state == RegionOwned || r.state == RegionOrphaned:
		m.depart(r)
	case r.state == RegionMarked:
		m.drain(r)
	case r.state == RegionDeparted: // returned before: idempotent, as Maru's is
	}
	out.code(0)
}

func (m *Machine) applyMark(c *Mark, out *Results) {
	r := m.regions[c.Region]
	if r == nil || r.state != RegionOwned && r.state != RegionOrphaned || r.pinned > 0 ||
		c.For != 0 && keeps(r, m.sessions[c.For]) {
		out.fail(protocol.CodePending) // it has changed since it was planned
		return
	}
	r.markedFor = c.For
	m.stats.Evictions[3] += uint64(r.live) // all of them are lost with this, whenever they are removed
	if r.owner.fenced {
		m.drain(r)
	} else {
		m.setRegionState(r, RegionMarked)
		m.empty(r, MaxDropPerCommand)
	}
	out.code(0)
}

func (m *Machine) applyRevokeDone(s *session, c *RevokeDone, out *Results) {
	r := m.regions[c.Region]
	switch {
	case r == nil || s == nil || r.owner != s || r.epoch != c.Epoch:
		out.fail(protocol.CodeStaleEpoch)
	case r.state == RegionMarked:
		m.drain(r)
		out.code(0)
	case r.state == RegionDraining:
		out.code(0)
	default:
		out.fail(protocol.CodeBadRequest)
	}
}

func (m *Machine) applyEmptyRegion(c *EmptyRegion, out *Results) {
	r := m.regions[c.Region]
	if r == nil || r.state == RegionOwned || r.state == RegionOrphaned || r.pinned > 0 && r.state == RegionDeparted ||
		c.For != 0 && keeps(r, m.sessions[c.For]) {
		out.fail(protocol.CodePending)
		return
	}
	n := m.empty(r, MaxChorePerCommand)
	if r.state == RegionDeparted { // it has too many entries for the command that gives it, which counts the last of them
		m.stats.Evictions[2] += uint64(n) //nolint:gosec // not negative
	}
	left := uint64(r.live)
	if left == 0 && (r.state == RegionDeparted || r.state == RegionDraining) {
		m.drain(r)
	}
	out.code(0)
	out.uvarint(uint64(n)) //nolint:gosec // not negative
	out.uvarint(left)
}

// applyFreeRegion gives a drained region's extent back. The leader has waited until no reader can hold a lease in it.
func (m *Machine) applyFreeRegion(c *FreeRegion, out *Results) {
	r := m.regions[c.Region]
	if r == nil || r.state != RegionDraining || r.live > 0 {
		out.fail(protocol.CodePending)
		return
	}
	m.freeRegion(r)
	out.code(0)
}

func (m *Machine) freeRegion(r *region) {
	m.disown(r)
	r.device.release(extent{r.offset, r.length}, r.device.dataEnd())
	r.device.regions--
	m.removeRegion(r)
	m.gone(r)
}

func (r *region) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint64(append(b, recRegion), uint64(r.id))
}

func (r *region) appendValue(b []byte) []byte {
	owner := SessionID(0)
	if r.owner != nil {
		owner = r.owner.id
	}
	b = append(b, byte(r.state))
	for _, v := range [...]uint64{
		uint64(r.device.id), r.offset, r.length, r.pageSize, r.epoch, uint64(owner), r.bornMS, uint64(r.markedFor),
	} {
		b = binary.AppendUvarint(b, v)
	}
	return appendU64(b, r.generation)
}

// load reads a region; its device and owner are left to the caller, by id.
func (r *region) load(key, value *decoder) {
	r.id = RegionID(key.be64())
	r.state = RegionState(value.byte())
	r.device = &device{id: DeviceID(value.u32())}
	r.offset, r.length, r.pageSize, r.epoch = value.uvarint(), value.uvarint(), value.uvarint(), value.uvarint()
	r.owner = &session{id: SessionID(value.uvarint())}
	r.bornMS, r.markedFor = value.uvarint(), SessionID(value.uvarint())
	r.generation = value.u64()
	r.head = None
	if r.pageSize == 0 || r.state == 0 || int(r.state) >= len(regionStates) || r.pages() > MaxRegionPages {
		value.fail()
	}
}
