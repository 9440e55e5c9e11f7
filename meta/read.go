package meta

import (
	"cmp"
	"slices"
)

// TenantID names a tenant for lookups. Its zero value is the default tenant.
type TenantID struct{ t *tenant }

// Tenant returns the id of a tenant; one that does not exist yet finds nothing.
func (m *Machine) Tenant(name string) TenantID {
	if name == "" {
		name = DefaultTenant
	}
	if t := m.tenants[name]; t != nil {
		return TenantID{t}
	}
	return TenantID{&tenant{name: name}}
}

// HasTenant reports whether a tenant is there: it has had a session, or limits.
func (m *Machine) HasTenant(name string) bool { return m.tenants[name] != nil }

// Reading reads a Machine at a log time: entries whose time is over by then are not served. Like the Machine's own
// methods it must not be used beside Apply, and only by one goroutine.
type Reading struct {
	m     *Machine
	now   uint64
	ahead bool
}

// At reads at a log time in milliseconds. A leader's own is ahead of the last stamped one, by which the Machine's own
// methods go, for as long as nothing is logged.
func (m *Machine) At(nowMS uint64) Reading { return Reading{m: m, now: max(nowMS, m.head.now)} }

// Ahead reports whether something was passed over whose time is over at NowMS of the Reading, but not by what has been
// logged. Nobody may be told so before a log entry is stamped with that time or a later one: the next leader, whose log
// time goes on from what was stamped, would serve it again.
func (r *Reading) Ahead() bool { return r.ahead }

// NowMS is the log time that is read at.
func (r *Reading) NowMS() uint64 { return r.now }

// alive reports whether an entry may be served.
func (r *Reading) alive(x *entry) bool { return r.m.alive(x) && !r.over(x) }

// over reports whether the time of an entry is over, and notes if so: it is not by what has been logged.
func (r *Reading) over(x *entry) bool {
	if x.expires == 0 || x.expires > r.now {
		return false
	}
	r.ahead = true
	return true
}

// Find is Reading.Find as of the last stamped log time.
func (m *Machine) Find(t TenantID, key []byte) (Slot, bool) {
	r := m.At(m.head.now)
	return r.Find(t, key)
}

// Find returns the slot of a tenant's key, if it may be served.
func (r *Reading) Find(t TenantID, key []byte) (Slot, bool) {
	m := r.m
	if t.t == nil {
		t.t = m.tenants[DefaultTenant]
	}
	s, ok := m.find(t.t, key)
	if !ok || !r.alive(m.table.at(s)) {
		return None, false
	}
	return s, true
}

// Live is Reading.Live as of the last stamped log time.
func (m *Machine) Live(s Slot) bool {
	r := m.At(m.head.now)
	return r.Live(s)
}

// Live reports whether a slot holds an entry that may be served.
func (r *Reading) Live(s Slot) bool { return r.m.table.live(s) && r.alive(r.m.table.at(s)) }

// Birth returns what tells an entry from others that had or will have its slot; 0 for a free slot.
func (m *Machine) Birth(s Slot) uint64 {
	if s >= m.table.end {
		return 0
	}
	return m.table.at(s).birth
}

// Key returns the key of a taken slot. It aliases the machine's memory.
func (m *Machine) Key(s Slot) []byte { return m.table.key(m.table.at(s)) }

// Location fills in where the entry of a taken slot lies.
func (m *Machine) Location(s Slot, l *Location) {
	x := m.table.at(s)
	r, offset := m.regionOf(x), x.offset
	if x.places != 0 {
		if p := m.servedCopy(x); p != 0 { // after a fall a copy whose device was away may be faster than the primary
			if q := m.placeRegion(m.places.at(p)); !r.served() || q.rank() < r.rank() {
				r, offset = q, m.places.at(p).offset
			}
		}
	}
	r.locate(l)
	l.Offset, l.Length, l.Checksum = offset, uint64(x.length), x.checksum
}

// Locations appends where the bytes of the entry of a taken slot lie and are served, the fastest tier first.
func (m *Machine) Locations(s Slot, list []Location) []Location {
	x := m.table.at(s)
	from := len(list)
	m.locations(x, func(_ placeID, r *region, offset uint64) bool {
		if r.served() {
			list = append(list, Location{})
			l := &list[len(list)-1]
			r.locate(l)
			l.Offset, l.Length, l.Checksum = offset, uint64(x.length), x.checksum
		}
		return true
	})
	if main := m.regionOf(x); len(list) > from && list[from].Region == main.id { // behind copies that are faster, see Location
		for i := from; i+1 < len(list) && m.regions[list[i+1].Region].rank() < main.rank(); i++ {
			list[i], list[i+1] = list[i+1], list[i]
		}
	}
	return list
}

// Copies reports whether the entry of a taken slot lies in more places than one.
func (m *Machine) Copies(s Slot) bool { return m.firstCopy(m.table.at(s)) != 0 }

// LocationIn fills in where the entry of a taken slot lies in a region, and reports whether it does.
func (m *Machine) LocationIn(s Slot, id RegionID, l *Location) (found bool) {
	x := m.table.at(s)
	m.locations(x, func(_ placeID, r *region, offset uint64) bool {
		if r.id == id {
			r.locate(l)
			l.Offset, l.Length, l.Checksum = offset, uint64(x.length), x.checksum
			found = true
		}
		return !found
	})
	return found
}

// Wanted reports whether the entry of a taken slot should get a copy in a faster tier: it lies in the slowest alone, is not
// too large, and has been used there often enough. Members may differ in what they know of that.
func (m *Machine) Wanted(s Slot) bool {
	x := m.table.at(s)
	after, most := m.settings.PromoteAfter, m.settings.PromoteMost
	if after == 0 || uint64(x.used) < after || !m.regionOf(x).slow() || m.settings.Version < VersionTiers ||
		most != 0 && uint64(x.length) > most {
		return false
	}
	p := m.servedCopy(x)
	return p == 0 || m.placeRegion(m.places.at(p)).slow()
}

// EntryInfo describes an entry to operators.
type EntryInfo struct {
	Location
	Tenant  string
	Model   string
	Class   Class
	AddedMS uint64
}

// Entry describes the entry of a taken slot.
func (m *Machine) Entry(s Slot) EntryInfo {
	x := m.table.at(s)
	c := m.contextOf(x)
	i := EntryInfo{Tenant: c.Tenant, Model: c.Model, Class: x.class(), AddedMS: x.added}
	if x.pins > 0 {
		i.Class = ClassHard
	}
	m.Location(s, &i.Location)
	return i
}

// SessionInfo describes a session.
type SessionInfo struct {
	ID       SessionID
	Instance string
	Tenant   string
	TTLMS    uint64
	Features uint64
	Secret   uint64
	Open     bool
	Fenced   bool
	Process  Process
	OpenedMS uint64
	Acked    uint64
	Regions  []RegionID
	Pins     int
	Entries  uint64
	Bytes    uint64
	// Answers and AnswerBytes are what is kept of answered and canceled seqs.
	Answers, AnswerBytes int
}

func (s *session) info() SessionInfo {
	i := SessionInfo{
		ID: s.id, Instance: s.instance, Tenant: s.tenant.name, TTLMS: s.ttlMS, Features: s.features, Secret: s.secret,
		Open: s.open, Fenced: s.fenced, Process: s.process, OpenedMS: s.openedMS, Acked: s.acked, Pins: len(s.pins),
		AnswerBytes: s.remembered,
	}
	for _, a := range s.answers {
		if a != nil {
			i.Answers++
		}
	}
	for _, r := range s.regions {
		i.Regions = append(i.Regions, r.id)
		i.Entries += uint64(r.live)
		i.Bytes += r.liveBytes
	}
	return i
}

// Session describes a session, open or closed with regions left.
func (m *Machine) Session(id SessionID) (SessionInfo, bool) {
	s := m.sessions[id]
	if s == nil {
		return SessionInfo{}, false
	}
	return s.info(), true
}

// SessionOpen reports whether a session is open, without allocating.
func (m *Machine) SessionOpen(id SessionID) bool { return m.sessionOpen(id) }

// SessionOf returns the open session of an instance.
func (m *Machine) SessionOf(instance string) (SessionID, bool) {
	id, ok := m.openOf[instance]
	return id, ok
}

// Sessions describes all sessions, by id.
func (m *Machine) Sessions() []SessionInfo {
	infos := make([]SessionInfo, 0, len(m.sessions))
	for _, s := range m.sortedSessions() {
		infos = append(infos, s.info())
	}
	return infos
}

// RegionInfo describes a region.
type RegionInfo struct {
	ID         RegionID
	Device     DeviceID
	Offset     uint64
	Length     uint64
	PageSize   uint64
	Epoch      uint64
	Generation uint64
	Owner      SessionID // 0 = nobody
	Instance   string
	State      RegionState
	Live       uint32 // entries
	Pinned     uint32
	LiveBytes  uint64
	BornMS     uint64
	For        SessionID // who gets it once its owner has let go
}

func (r *region) info() RegionInfo {
	i := RegionInfo{
		ID: r.id, Device: r.device.id, Offset: r.offset, Length: r.length, PageSize: r.pageSize, Epoch: r.epoch,
		Generation: r.generation, State: r.state, Live: r.live, Pinned: r.pinned, LiveBytes: r.liveBytes,
		BornMS: r.bornMS, For: r.markedFor,
	}
	if r.owner != nil {
		i.Owner, i.Instance = r.owner.id, r.owner.instance
	}
	return i
}

// Region describes a region.
func (m *Machine) Region(id RegionID) (RegionInfo, bool) {
	r := m.regions[id]
	if r == nil {
		return RegionInfo{}, false
	}
	return r.info(), true
}

// Regions describes all regions, by id.
func (m *Machine) Regions() []RegionInfo {
	infos := make([]RegionInfo, len(m.regionList))
	for i, r := range m.regionList {
		infos[i] = r.info()
	}
	return infos
}

// RegionsIn calls fn with the regions in a state, by id, without describing the others.
func (m *Machine) RegionsIn(st RegionState, fn func(RegionInfo)) {
	for _, r := range m.regionList {
		if r.state == st {
			fn(r.info())
		}
	}
}

// Occupied returns the pages of a region that hold entries, as offset, length, offset, length ... in bytes, ascending;
// runs of neighbouring pages are one.
func (m *Machine) Occupied(id RegionID) []uint64 {
	r := m.regions[id]
	if r == nil {
		return nil
	}
	var runs []uint64
	for p, n := uint64(0), r.pages(); p < n; p++ {
		if r.occupied[p/64] == 0 {
			p |= 63
			continue
		}
		if r.occupied[p/64]&(1<<(p%64)) == 0 {
			continue
		}
		first := p
		for p < n && r.occupied[p/64]&(1<<(p%64)) != 0 {
			p++
		}
		runs = append(runs, first*r.pageSize, (p-first)*r.pageSize)
	}
	return runs
}

// EachEntry calls fn with every entry that has a location in a region, its primary or a copy, until it returns false.
func (m *Machine) EachEntry(id RegionID, fn func(s Slot) bool) {
	r := m.regions[id]
	if r == nil {
		return
	}
	for s := r.head; s != None; s = m.table.at(s).rnext {
		if !fn(s) {
			return
		}
	}
	for p := r.places; p != 0; p = m.places.at(p).rnext {
		if !fn(m.places.at(p).slot) {
			return
		}
	}
}

// DeviceInfo describes a device.
type DeviceInfo struct {
	ID DeviceID
	AddDevice
	Mode        DeviceMode
	UntilMS     uint64 // see SetDevice
	Draining    bool
	Free        uint64
	LargestFree uint64
	Regions     int
	Locations   uint64 // of entries, primaries and copies
	LiveBytes   uint64 // of them
	CopyBytes   uint64 // of the copies among them
}

func (d *device) info() DeviceInfo {
	largest, free := d.largestFree()
	return DeviceInfo{
		ID: d.id, AddDevice: d.AddDevice, Mode: d.mode, UntilMS: d.untilMS, Draining: d.draining,
		Free: free, LargestFree: largest, Regions: d.regions,
	}
}

// count adds what lies in a region to what its device holds.
func (i *DeviceInfo) count(r *region) {
	i.Locations += uint64(r.live)
	i.LiveBytes += r.liveBytes
	i.CopyBytes += r.copyBytes
}

// Device describes a device.
func (m *Machine) Device(id DeviceID) (DeviceInfo, bool) {
	d := m.devices[id]
	if d == nil {
		return DeviceInfo{}, false
	}
	i := d.info()
	for _, r := range m.regionList {
		if r.device == d {
			i.count(r)
		}
	}
	return i, true
}

// Devices describes all devices, by id.
func (m *Machine) Devices() []DeviceInfo {
	infos := make([]DeviceInfo, 0, len(m.devices))
	for _, d := range m.sortedDevices() {
		infos = append(infos, d.info())
	}
	for _, r := range m.regionList {
		at, _ := slices.BinarySearchFunc(infos, r.device.id, func(i DeviceInfo, id DeviceID) int { return cmp.Compare(i.ID, id) })
		infos[at].count(r)
	}
	return infos
}

// counters count since the process started, but for Evictions. They are not part of the state's hash.
type counters struct {
	Registered   uint64
	Existing     uint64          // REGISTERs of a key that was held
	Deduplicated uint64          // of them, those whose prefix hash was held under another key
	Touched      uint64          // uses
	Removed      [Reasons]uint64 // entries, by reason
	Copied       uint64          // copies registered
	Promoted     uint64          // of them, those of entries that lay in the slowest tier alone, in a faster one
	PromotedSize uint64          // bytes of these
	Fallen       uint64          // entries whose primary went while a copy stayed
	Evictions    [4]uint64       // entries, by REQUEST_ALLOC's phase; kept in the store
	Allocs       [4]uint64       // REQUEST_ALLOCs carried out, by phase
}

// TenantStats counts what a tenant holds, and says what it may.
type TenantStats struct {
	Name        string
	Entries     uint64
	Bytes       uint64 // of the entries
	Space       uint64 // bytes of the regions in which they are served: what a guarantee is about
	Pins        uint64 // durable and soft
	SessionPins uint64
	TenantLimits
}

// Stats sums up the machine.
type Stats struct {
	counters
	Entries   uint64
	Lacking   uint64 // of them, those that lie on fewer nodes than was asked for
	KeyBytes  uint64
	LiveBytes uint64
	Slots     uint64 // highest slot ever taken, plus one
	Sessions  int    // open
	Closed    int    // closed, with regions left
	Regions   [RegionDraining + 1]int
	Devices   int
	Contexts  int
	Names     int
	NameBytes int    // of their keys and values
	PoolBytes uint64 // of the devices, without their headers
	FreeBytes uint64 // in no region
	Tenants   []TenantStats
}

// Stats sums up the machine. Its cost is that of its sessions, regions and tenants, not of its entries.
func (m *Machine) Stats() Stats {
	s := Stats{
		counters: m.stats, Entries: m.table.count, Lacking: m.lacking.count, KeyBytes: m.table.keys.bytes, Slots: uint64(m.table.end),
		Devices: len(m.devices), Contexts: len(m.contexts),
		Names: m.names.count, NameBytes: m.names.bytes,
	}
	for _, x := range m.sessions {
		if x.open {
			s.Sessions++
		} else {
			s.Closed++
		}
	}
	for _, r := range m.regionList {
		s.Regions[r.state]++
		s.LiveBytes += r.liveBytes
	}
	for _, d := range m.devices {
		_, free := d.largestFree()
		s.FreeBytes += free
	}
	s.PoolBytes = m.poolBytes()
	for _, t := range sortedValues(m.tenants, func(t *tenant) uint64 { return uint64(t.base) }) {
		s.Tenants = append(s.Tenants, TenantStats{t.name, t.entries, t.bytes, t.space, t.pins, t.sessionPins, t.limits.TenantLimits})
	}
	return s
}
