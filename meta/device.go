package meta

import (
	"encoding/binary"
	"slices"

	"larder/protocol"
)

// device is one span of one tier on one node.
type device struct {
	object
	id DeviceID
	AddDevice
	mode     DeviceMode
	untilMS  uint64 // see SetDevice
	draining bool

	// Not in the record.
	regions int
	free    []extent // ascending by offset, never adjacent
}

// DeviceMode says whether what lies on a device is served.
type DeviceMode uint8

// Modes of a device.
const (
	DeviceServing DeviceMode = iota
	DeviceAway               // its home is gone and may come back: nothing there is served
)

// String returns the mode's name.
func (m DeviceMode) String() string { return [...]string{"serving", "away"}[m] }

// extent is a run of bytes of a device.
type extent struct{ offset, length uint64 }

func (m *Machine) applyAddDevice(c *AddDevice, out *Results) {
	c.Align = max(c.Align, MinPageSize)
	switch {
	case len(c.UUID) == 0 || len(c.UUID) > protocol.MaxNameBytes || c.Generation == 0,
		c.DataOffset%c.Align != 0, c.Size < c.DataOffset, c.Size > 1<<60:
		out.fail(protocol.CodeBadRequest)
		return
	case m.settings.Version < VersionTiers && (c.Home != "" || c.NUMA != 0): // others could not read it
		out.fail(protocol.CodeUnsupported)
		return
	case len(m.devices) >= MaxDevices:
		out.fail(protocol.CodeLimit)
		return
	}
	for _, d := range m.sortedDevices() {
		if d.UUID == c.UUID {
			out.code(0)
			out.uvarint(uint64(d.id))
			out.uvarint(1) // it was there before
			return
		}
	}
	m.head.nextDevice++
	d := &device{id: m.head.nextDevice, AddDevice: *c}
	d.reset()
	m.devices[d.id] = d
	m.changed(d)
	out.code(0)
	out.uvarint(uint64(d.id))
	out.uvarint(0)
}

// reset makes the whole data part of a device free.
func (d *device) reset() {
	d.free = nil
	if end := d.Size / d.Align * d.Align; end > d.DataOffset {
		d.free = []extent{{d.DataOffset, end - d.DataOffset}}
	}
}

// applyRetire gives a device a new generation. Every location of the old one is dead from here on; sweeps remove them.
// Regions of the old generation are given up: at once where nobody can write to the old bytes any more, otherwise
// when their owners acknowledge. A device that a new incarnation took out of service comes back only fenced.
func (m *Machine) applyRetire(c *Retire, out *Results) {
	d := m.devices[c.Device]
	switch {
	case d == nil || c.Generation == 0:
		out.fail(protocol.CodeNotFound)
		return
	case d.Generation == c.Generation:
		out.code(0)
		return
	case d.Generation == 0 && !c.Fenced:
		out.fail(protocol.CodeForbidden)
		return
	}
	d.Generation = c.Generation
	d.mode, d.untilMS = DeviceServing, 0
	m.cancelTasks(d.id)
	if c.BootID != "" {
		d.BootID = c.BootID
	}
	if c.Path != "" {
		d.Path = c.Path
	}
	if c.Size != 0 && c.Size != d.Size {
		m.resizeDevice(d, c.Size)
	}
	m.changed(d)
	m.startSweep()
	for _, r := range m.sortedRegions() {
		if r.device != d {
			continue
		}
		r.recount()
		switch {
		case c.Fenced && r.state != RegionDraining, r.state == RegionOwned && r.owner.fenced: // a home's
			m.abandon(r)
		case r.state == RegionOwned:
			r.markedFor = 0
			m.setRegionState(r, RegionMarked)
		case r.state == RegionDeparted:
			m.abandon(r)
		}
	}
	out.code(0)
}

// resizeDevice changes a device's size. What regions still hold beyond a smaller size stays theirs until they are
// freed, also if the device grows again meanwhile.
func (m *Machine) resizeDevice(d *device, size uint64) {
	d.Size = size
	d.reset()
	for _, r := range m.sortedRegions() {
		if r.device == d {
			d.hold(r)
		}
	}
}

// hold takes a region's extent out of the free space, and reports whether it was free. What lies beyond the device's
// end is not free space either way.
func (d *device) hold(r *region) bool {
	end := d.dataEnd()
	return r.offset >= end || d.reserve(extent{r.offset, min(r.length, end-r.offset)})
}

func (m *Machine) applySetDevice(c *SetDevice, out *Results) {
	d := m.devices[c.Device]
	switch {
	case m.settings.Version < VersionTiers:
		out.fail(protocol.CodeUnsupported)
		return
	case d == nil:
		out.fail(protocol.CodeNotFound)
		return
	case !c.Mark && (c.Mode > DeviceAway || c.Mode == DeviceAway && d.Home == ""):
		out.fail(protocol.CodeBadRequest)
		return
	}
	if c.Mark {
		d.draining = c.Draining
	} else {
		d.mode, d.untilMS = c.Mode, c.UntilMS
	}
	m.changed(d)
	out.code(0)
}

// applyFencedRegion ends what an owner may do in a region that was taken from it, or that it left without a word.
func (m *Machine) applyFencedRegion(c *FencedRegion, out *Results) {
	r := m.regions[c.Region]
	switch {
	case m.settings.Version < VersionTiers:
		out.fail(protocol.CodeUnsupported)
		return
	case r == nil || r.epoch != c.Epoch:
		out.fail(protocol.CodeStaleEpoch)
		return
	case r.state == RegionMarked:
		m.drain(r)
	case r.state == RegionOrphaned:
		m.depart(r)
	}
	out.code(0)
}

func (m *Machine) applyDropDevice(c *DropDevice, out *Results) {
	d := m.devices[c.Device]
	switch {
	case d == nil:
		out.fail(protocol.CodeNotFound)
	case d.regions > 0:
		out.fail(protocol.CodeBusy)
	default:
		m.cancelTasks(d.id)
		delete(m.devices, d.id)
		m.gone(d)
		out.code(0)
	}
}

// allocate takes the first free extent of size bytes (first fit), or reports that there is none.
func (d *device) allocate(size uint64) (uint64, bool) {
	for i := range d.free {
		e := &d.free[i]
		if e.length < size {
			continue
		}
		offset := e.offset
		e.offset += size
		e.length -= size
		if e.length == 0 {
			d.free = slices.Delete(d.free, i, i+1)
		}
		return offset, true
	}
	return 0, false
}

// reserve takes exactly e, when regions are read back from the store.
func (d *device) reserve(e extent) bool {
	for i, f := range d.free {
		if e.offset < f.offset || e.offset+e.length > f.offset+f.length {
			continue
		}
		rest := make([]extent, 0, 2)
		if e.offset > f.offset {
			rest = append(rest, extent{f.offset, e.offset - f.offset})
		}
		if end := f.offset + f.length; e.offset+e.length < end {
			rest = append(rest, extent{e.offset + e.length, end - e.offset - e.length})
		}
		d.free = slices.Replace(d.free, i, i+1, rest...)
		return true
	}
	return false
}

// release gives e back, cut off at limit, and joins it with its neighbours.
func (d *device) release(e extent, limit uint64) {
	if e.offset >= limit {
		return
	}
	e.length = min(e.length, limit-e.offset)
	i, _ := slices.BinarySearchFunc(d.free, e.offset, func(f extent, off uint64) int {
		if f.offset < off {
			return -1
		}
		return 1
	})
	d.free = slices.Insert(d.free, i, e)
	if i+1 < len(d.free) && e.offset+e.length == d.free[i+1].offset {
		d.free[i].length += d.free[i+1].length
		d.free = slices.Delete(d.free, i+1, i+2)
	}
	if i > 0 && d.free[i-1].offset+d.free[i-1].length == d.free[i].offset {
		d.free[i-1].length += d.free[i].length
		d.free = slices.Delete(d.free, i, i+1)
	}
}

// dataEnd is the end of the part of a device that regions are cut from.
func (d *device) dataEnd() uint64 { return d.Size / d.Align * d.Align }

// room is how many bytes regions can be cut from. A device may have shrunk to less than its header.
func (d *device) room() uint64 { return max(d.dataEnd(), d.DataOffset) - d.DataOffset }

// largestFree returns the longest free extent, and the sum of all.
func (d *device) largestFree() (largest, total uint64) {
	for _, e := range d.free {
		largest = max(largest, e.length)
		total += e.length
	}
	return largest, total
}

func (d *device) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint32(append(b, recDevice), uint32(d.id))
}

func (d *device) appendValue(b []byte) []byte {
	b = d.appendTo(b)
	if d.mode == DeviceServing && d.untilMS == 0 && !d.draining {
		return b
	}
	if d.Home == "" && d.NUMA == 0 {
		b = d.appendHome(b)
	}
	return appendBool(binary.AppendUvarint(append(b, byte(d.mode)), d.untilMS), d.draining)
}

func (d *device) load(key, value *decoder) {
	d.id = DeviceID(key.be32())
	d.decode(value)
	if value.err == nil && len(value.b) > 0 {
		d.mode, d.untilMS, d.draining = DeviceMode(value.byte()), value.uvarint(), value.bool()
	}
	if d.mode > DeviceAway {
		value.fail()
	}
}
