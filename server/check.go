package server

import (
	"context"
	"encoding/hex"
	"fmt"

	"github.com/zeebo/xxh3"

	"larder/cxl"
	"larder/meta"
)

// checkBatch is how many entries are checked between two looks at the context, and under one hold of the index.
const checkBatch = 1024

// Check compares the index with the devices: headers, that entries lie inside their regions and regions inside their
// devices, that nothing overlaps. deep also reads the bytes of entries that have checksums.
func (s *Server) Check(ctx context.Context, deep bool) (*CheckReport, error) {
	report := &CheckReport{Deep: deep, Foreign: []ForeignDevice{}, Problems: []string{}}
	c := &checker{s: s, report: report, open: map[meta.DeviceID]*cxl.Device{}}
	defer c.close()
	m := s.master
	m.state.RLock()
	devs, regions := m.machine.Devices(), m.machine.Regions()
	m.state.RUnlock()
	c.report.Devices, c.report.Regions = len(devs), len(regions)
	for i := range devs {
		c.device(&devs[i])
	}
	c.regions(devs, regions)
	for i := range regions {
		if err := c.region(ctx, &regions[i], deep); err != nil {
			return c.report, err
		}
	}
	return c.report, nil
}

// checker is one Check in progress.
type checker struct {
	s      *Server
	report *CheckReport
	open   map[meta.DeviceID]*cxl.Device
}

func (c *checker) problem(format string, args ...any) {
	if len(c.report.Problems) < maxProblems {
		c.report.Problems = append(c.report.Problems, fmt.Sprintf(format, args...))
	}
}

func (c *checker) close() {
	for _, d := range c.open {
		_ = d.Close() // opened for reading
	}
}

// device checks a device's header.
func (c *checker) device(d *meta.DeviceInfo) {
	if d.Node != c.s.devices.host || d.Home != "" {
		c.report.Foreign = append(c.report.Foreign, ForeignDevice{ID: uint64(d.ID), Path: d.Path, Node: d.Node, Home: d.Home})
		return
	}
	info, err := cxl.Inspect(d.Path)
	switch {
	case err != nil:
		c.problem("device %d: %v", d.ID, err)
		return
	case info.HeaderErr != nil:
		c.problem("device %d: %s: %v", d.ID, d.Path, info.HeaderErr)
		return
	case hex.EncodeToString(info.Header.Device[:]) != d.UUID:
		c.problem("device %d: %s carries the uuid %x, not %s", d.ID, d.Path, info.Header.Device, d.UUID)
		return
	case info.Header.Generation != d.Generation:
		c.problem("device %d: %s has generation %x, the index %x", d.ID, d.Path, info.Header.Generation, d.Generation)
	case info.Lost:
		c.problem("device %d: %s may have lost its bytes: the host was restarted", d.ID, d.Path)
	case info.Header.Size < d.Size:
		c.problem("device %d: %s has %d bytes, the index %d", d.ID, d.Path, info.Header.Size, d.Size)
	}
	dev, err := cxl.Open(d.Path, cxl.Expect{ReadOnly: true})
	if err != nil {
		c.problem("device %d: %v", d.ID, err)
		return
	}
	c.open[d.ID] = dev
}

// regions checks that regions lie inside their devices and do not overlap.
func (c *checker) regions(devs []meta.DeviceInfo, regions []meta.RegionInfo) {
	byDevice := map[meta.DeviceID]*meta.DeviceInfo{}
	for i := range devs {
		byDevice[devs[i].ID] = &devs[i]
	}
	starts := map[meta.DeviceID][]*meta.RegionInfo{}
	for i := range regions {
		r := &regions[i]
		d := byDevice[r.Device]
		switch {
		case d == nil:
			c.problem("region %d is on device %d, which does not exist", r.ID, r.Device)
			continue
		case r.Offset < d.DataOffset || r.Length > d.Size || r.Offset > d.Size-r.Length:
			c.problem("region %d [%d, +%d) leaves device %d of %d bytes", r.ID, r.Offset, r.Length, d.ID, d.Size)
		}
		starts[r.Device] = append(starts[r.Device], r)
	}
	for _, list := range starts {
		sortBy(list, func(r *meta.RegionInfo) uint64 { return r.Offset })
		for i := 1; i < len(list); i++ {
			if a, b := list[i-1], list[i]; a.Offset+a.Length > b.Offset {
				c.problem("regions %d and %d overlap", a.ID, b.ID)
			}
		}
	}
}

// entryRef is an entry as it was when its region was read.
type entryRef struct {
	slot  meta.Slot
	birth uint64
	loc   meta.Location
	key   string
}

// region checks the entries of a region.
func (c *checker) region(ctx context.Context, r *meta.RegionInfo, deep bool) error {
	m := c.s.master
	var entries []entryRef
	m.state.RLock()
	m.machine.EachEntry(r.ID, func(slot meta.Slot) bool {
		e := entryRef{slot: slot, birth: m.machine.Birth(slot), key: string(m.machine.Key(slot))}
		if m.machine.Location(slot, &e.loc); e.loc.Region == r.ID {
			c.report.Entries++ // once, wherever else it lies
		}
		m.machine.LocationIn(slot, r.ID, &e.loc)
		entries = append(entries, e)
		return true
	})
	m.state.RUnlock()
	sortBy(entries, func(e entryRef) uint64 { return e.loc.Offset })
	end := uint64(0)
	for i := range entries {
		e := &entries[i]
		if e.loc.Length == 0 || e.loc.Offset > r.Length || e.loc.Length > r.Length-e.loc.Offset {
			c.problem("entry %q leaves region %d", e.key, r.ID)
			continue
		}
		if e.loc.Offset < end {
			c.problem("entry %q overlaps another in region %d", e.key, r.ID)
		}
		end = e.loc.Offset + e.loc.Length
		if !deep {
			continue
		}
		if i%checkBatch == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		c.bytes(e)
	}
	return nil
}

// bytes compares an entry's bytes with its checksum. An entry that leaves meanwhile may be overwritten: it is skipped.
func (c *checker) bytes(e *entryRef) {
	dev := c.open[e.loc.Device]
	if dev == nil || e.loc.Checksum == 0 {
		c.report.Skipped++
		return
	}
	sum, err := checksum(dev, &e.loc)
	if err == nil && sum == e.loc.Checksum {
		c.report.Verified++
		return
	}
	m := c.s.master
	m.state.RLock()
	same := m.machine.Live(e.slot) && m.machine.Birth(e.slot) == e.birth
	m.state.RUnlock()
	switch {
	case !same:
		c.report.Skipped++
	case err != nil:
		c.problem("entry %q: %v", e.key, err)
	default:
		c.problem("entry %q: its bytes have the checksum %x, it was stored with %x", e.key, sum, e.loc.Checksum)
	}
}

// checksum reads an entry's bytes and sums them up.
func checksum(dev *cxl.Device, l *meta.Location) (uint64, error) {
	m, err := dev.Map(int64(l.RegionOffset+l.Offset), int64(l.Length), cxl.MapOptions{ReadOnly: true}) //nolint:gosec // inside the device
	if err != nil {
		return 0, err
	}
	defer func() { _ = m.Close() }() // read-only
	if err := m.Refresh(m.Bytes()); err != nil {
		return 0, err
	}
	var sum uint64
	err = cxl.Guard(func() { sum = xxh3.Hash(m.Bytes()) })
	return sum, err
}
