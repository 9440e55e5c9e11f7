package simtest

import (
	"fmt"

	"larder/meta"
	"larder/protocol"
)

const (
	pageSize   = meta.MinPageSize
	headerSpan = pageSize // of a device, before its data
)

// stamp is what a page holds: which value, by whom. A page of nobody holds the zero stamp.
type stamp struct {
	key     string
	version uint64
	writer  uint64 // pid
}

// memory is the bytes behind a device: one inode. Who has mapped it keeps it when the device gets another.
type memory struct {
	generation uint64 // as the header says
	pages      []stamp
	readers    []*lease // that promise that pages stay put
	owners     []*holding
}

// device is one pool device, as the host sees it.
type device struct {
	uuid string
	mem  *memory
	size uint64
	lost bool // its header is gone with its bytes
	// claim is the process that may write the header, for as long as it lives and leads.
	claim *actor
	// Of one that a node serves: the tier, and the node. The others are the masters' own, of cxl.
	tier string
	home *client
}

// Tiers of nodes' devices.
const (
	tierDRAM = "dram"
	tierSSD  = "ssd"
)

func (s *sim) newDevice(i int) *device {
	size := headerSpan + s.mix.pages*pageSize
	return &device{uuid: fmt.Sprintf("%032x", i+1), size: size, mem: newMemory(size)}
}

func newMemory(size uint64) *memory { return &memory{pages: make([]stamp, size/pageSize)} }

// device finds a device by the id that the index gives it.
func (s *sim) device(id meta.DeviceID) *device {
	info, ok := s.log.state.Device(id)
	if !ok {
		return nil
	}
	for _, d := range s.devices {
		if d.uuid == info.UUID {
			return d
		}
	}
	return nil
}

// deviceReady implements server.MasterConfig.DeviceReady.
func (s *sim) deviceReady(id meta.DeviceID, generation uint64) bool {
	d := s.device(id)
	return d != nil && d.mem.generation == generation
}

// manage is what a leader owes the cluster: a new pool's settings, and its devices, again and again. The order of what
// is logged and what is written to a device is that of the server.
func (m *member) manage(p *proc, term uint64) {
	s := m.s
	leads := func() bool { return m.master.Term() == term }
	for begun := false; leads(); {
		if !begun {
			if !m.seed(p) {
				p.sleep(200 * ms)
				continue
			}
			begun = true
		}
		for _, d := range s.devices[:s.mix.devices] {
			if leads() {
				m.serveDevice(p, d)
			}
		}
		p.sleep(500 * ms)
	}
	for _, d := range s.devices {
		if d.claim == m.life {
			d.claim = nil
		}
	}
}

// seed gives a new pool its settings and its first incarnation, and a restored one its next.
func (m *member) seed(p *proc) bool {
	s := m.s
	now := s.log.state.Incarnation()
	if now != 0 && m.restored == nil {
		return true
	}
	if now == 0 {
		set := meta.DefaultSettings()
		set.Version = meta.ClusterVersion
		set.Policy, set.PageSize, set.RegionSize = s.mix.policy, pageSize, 8*pageSize
		set.MinRegionAgeMS, set.TTLMS = s.mix.minAgeMS, 30_000
		if len(s.mix.nodes) > 0 {
			set.TierLow, set.PromoteAfter = s.mix.tierLow, 1
			set.PromoteRate = 2 * pageSize
		}
		if _, code := m.do(p, &meta.SetSettings{Settings: set}); code != protocol.CodeOK {
			return false
		}
	}
	s.incarnations = max(now, s.incarnations) + 1 // larger than any before, in whatever line of history
	_, code := m.do(p, &meta.NewIncarnation{Incarnation: s.incarnations})
	if code == protocol.CodeOK && m.restored != nil {
		m.enter(func() { m.note(m.restored()) })
		m.restored = nil
	}
	return code == protocol.CodeOK
}

// serveDevice takes a device into service. Its generation is in the log before it is in the header.
func (m *member) serveDevice(p *proc, d *device) {
	s := m.s
	var known *meta.DeviceInfo
	for _, x := range m.master.Devices() {
		if x.UUID == d.uuid {
			known = &x
		}
	}
	if known != nil && !d.lost && d.mem.generation == known.Generation {
		return
	}
	if d.claim != nil && !d.claim.dead && d.claim != m.life {
		return // the leader before holds it still
	}
	d.claim = m.life
	generation := s.rngMaster.Uint64() | 1
	if known == nil {
		if d.mem.generation != 0 {
			d.mem = newMemory(d.size) // added after the snapshot that the index was restored from: whoever has it may write
		}
		_, code := m.do(p, &meta.AddDevice{
			UUID: d.uuid, Path: "/pool/" + d.uuid, Node: "host", Tier: "cxl", Coherence: "hardware", Size: d.size,
			DataOffset: headerSpan, Align: pageSize, Generation: generation, Volatile: true, BootID: hostBoot,
		})
		if code != protocol.CodeOK {
			return
		}
	} else {
		// A file is replaced by another inode, which nobody has mapped, before its new generation is logged. After a
		// restore it must be.
		fenced := d.lost && s.rngFaults.IntN(2) == 0 || known.Generation == 0
		if fenced {
			d.mem = newMemory(d.size)
		}
		_, code := m.do(p, &meta.Retire{
			Device: known.ID, Generation: generation, BootID: hostBoot, Path: known.Path, Size: d.size, Fenced: fenced,
		})
		if code != protocol.CodeOK {
			return
		}
	}
	p.sleep(s.rngFaults.Int64N(20 * ms)) // formatting takes a while
	if d.mem.generation = generation; d.lost {
		d.lost = false
		s.cover.Generations++
	}
	s.trace("header", m.id, generation)
}

// lose makes a device lose its bytes: what lies there is garbage, and the header says so.
func (d *device) lose() {
	d.lost = true
	d.mem.generation = 0
	for i := range d.mem.pages {
		d.mem.pages[i] = stamp{key: "lost"}
	}
}

func deviceID(id uint64) meta.DeviceID { return meta.DeviceID(id) }

func regionID(id uint64) meta.RegionID { return meta.RegionID(id) }
