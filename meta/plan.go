package meta

import (
	"iter"

	"larder/meta/policy"
	"larder/protocol"
)

// Guard is what only the leader knows. PlanAlloc asks it, and nobody else does.
type Guard interface {
	// Leased reports whether an entry is under a lease or condemned: it cannot be a victim now.
	Leased(s Slot) bool
	// Touched reports whether an entry was used since the last applied touch: it is a victim only when nothing else is
	// left.
	Touched(s Slot) bool
	// RegionBusy reports whether something in a region is leased, condemned or in quarantine, or all of it is condemned.
	RegionBusy(r RegionID) bool
	// DeviceReady reports whether a device shows the generation that the index has for it, so that clients can use it.
	// The generation is logged before it is written to the device.
	DeviceReady(d DeviceID, node string, generation uint64) bool
}

// PlanKind says what to do with a REQUEST_ALLOC.
type PlanKind uint8

// Plans.
const (
	PlanNothing PlanKind = iota + 1 // the client's free pages suffice: answer at once; count Touched as used
	PlanCommand                     // log Cmd
	PlanMark                        // log Mark{Region}, then wait for its owner or a fence, and plan again
	PlanEmpty                       // log EmptyRegion{Region, For}, then plan again
	PlanWait                        // what could be evicted is leased, in quarantine or being given up: plan again later
	PlanRefuse                      // answer Code and Message
)

// AllocPlan is the outcome of PlanAlloc.
type AllocPlan struct {
	Kind    PlanKind
	Cmd     Alloc
	Region  RegionID
	For     SessionID // with PlanEmpty: see EmptyRegion
	Code    protocol.Code
	Message string
	Never   bool   // with PlanRefuse: not even an empty pool could give what is asked for
	Kept    bool   // with PlanRefuse: what could be evicted is guaranteed to other tenants
	Found   []bool // for PlanNothing: per key of the request
	Touched []Slot // for PlanNothing
}

// maxWalk bounds how many entries that cannot be victims one plan passes over.
const maxWalk = 1 << 16

// planner is the state of one PlanAlloc.
type planner struct {
	m    *Machine
	at   Reading
	s    *session
	req  *protocol.AllocRequest
	g    Guard
	last bool

	pageSize uint64
	run      uint64 // pages of the longest entry
	need     uint64 // pages that the client is short of
	want     uint64 // bytes of a region, at best
	least    uint64 // bytes of a region that would do
	cmd      Alloc
	found    []bool
	wait     bool // something could be had later
	coming   bool // a region of another's is on its way to the instance
	kept     bool // something could be had, but for the guarantee of another tenant
}

// PlanAlloc is Reading.PlanAlloc as of the last stamped log time.
func (m *Machine) PlanAlloc(id SessionID, req *protocol.AllocRequest, g Guard, last bool) AllocPlan {
	r := m.At(m.head.now)
	return r.PlanAlloc(id, req, g, last)
}

// PlanAlloc decides what a REQUEST_ALLOC leads to, by the order of DESIGN.md: free space; the instance's own entries;
// regions that nobody writes to any more; regions of other live clients. It changes nothing. last says that the
// request's time is nearly over, so that a region's minimum age no longer protects it.
func (r *Reading) PlanAlloc(id SessionID, req *protocol.AllocRequest, g Guard, last bool) AllocPlan {
	m := r.m
	p := planner{m: m, at: *r, s: m.sessions[id], req: req, g: g, last: last}
	if plan := p.prepare(); plan.Kind != 0 {
		return plan
	}
	if req.Promote {
		return p.promotion()
	}
	steps := []func() AllocPlan{p.reserved, p.freeSpace, p.ownEntries, p.departed, p.others}
	if req.Whole {
		steps = []func() AllocPlan{p.reserved, p.freeSpace, p.ownWhole, p.departed, p.others}
	}
	for _, step := range steps {
		if plan := step(); plan.Kind != 0 {
			return plan
		}
	}
	if p.wait {
		return AllocPlan{Kind: PlanWait}
	}
	if p.kept {
		return AllocPlan{
			Kind: PlanRefuse, Code: protocol.CodeNoSpace, Kept: true,
			Message: "the pool is full, and what is left to evict is guaranteed to other tenants: larder ctl tenants lists them; " +
				"lower a guarantee, or enlarge the pool",
		}
	}
	return refuse(protocol.CodeNoSpace, "the pool is full and nothing in it may be evicted for this instance: unpin "+
		"entries, close idle clients, or enlarge the pool")
}

func refuse(c protocol.Code, message string) AllocPlan {
	return AllocPlan{Kind: PlanRefuse, Code: c, Message: message}
}

// prepare checks the request and works out what it is short of.
func (p *planner) prepare() AllocPlan {
	req, set := p.req, &p.m.settings
	if p.s == nil || !p.s.open {
		return refuse(protocol.CodeSessionExpired, "the session has ended: open a new one with HANDSHAKE")
	}
	p.pageSize = req.PageSize
	if p.pageSize == 0 {
		p.pageSize = set.PageSize
	}
	size := req.Size
	if size == 0 && (req.NeedPages > 0 || len(req.Keys) > 0) {
		size = set.RegionSize
	}
	switch {
	case p.pageSize%MinPageSize != 0 || p.pageSize > 1<<40:
		return refuse(protocol.CodeMisaligned, "page_size must be a multiple of 4096")
	case size == 0:
		return refuse(protocol.CodeBadRequest, "size must not be 0")
	case size > 1<<48 || req.NeedPages > 1<<40 || req.RunPages > 1<<40 || req.FreePages > 1<<48:
		return AllocPlan{Kind: PlanRefuse, Code: protocol.CodeNoSpace, Never: true, Message: "more is asked for than any pool can hold"}
	}
	p.run = max(1, req.RunPages)
	p.need = req.NeedPages
	if len(req.Keys) > 0 && !req.Promote {
		return p.walkKeys(size)
	}
	p.sizes(size)
	return p.fits()
}

// fits refuses what is larger than the largest device.
func (p *planner) fits() AllocPlan {
	usable := false
	for _, d := range p.m.devices {
		if !p.mayUse(d) {
			continue
		}
		usable = true
		if p.least <= d.room() && p.least/p.pageSize <= MaxRegionPages {
			return AllocPlan{}
		}
	}
	if !usable {
		return AllocPlan{} // the first is on its way: it is refused, or waited for, like a full pool
	}
	return AllocPlan{
		Kind: PlanRefuse, Code: protocol.CodeNoSpace, Never: true,
		Message: "more is asked for in one run than the largest device holds: ask for less, or enlarge the pool",
	}
}

// sizes works out how large a region should and must be.
func (p *planner) sizes(size uint64) {
	p.want = max(roundUp(size, p.pageSize), p.run*p.pageSize)
	p.least = p.want
	if p.need > 0 {
		p.least = p.run * p.pageSize
	}
}

func roundUp(v, to uint64) uint64 { return (v + to - 1) / to * to }

// walkKeys goes through the keys that the client is about to store, in order, as if each were stored at once: one that
// is held counts as used; one that is not takes a free page, or else the coldest page that has not been used by an
// earlier key. So a batch evicts exactly what its stores would have evicted one after the other.
func (p *planner) walkKeys(size uint64) AllocPlan {
	p.found = make([]bool, len(p.req.Keys))
	used := map[Slot]bool{}
	free, short := p.req.FreePages, uint64(0)
	next, stop := p.victims(used)
	defer stop()
	taken := map[Slot]bool{}
	for i, key := range p.req.Keys {
		slot, ok := p.m.find(p.s.tenant, key)
		if ok && !taken[slot] && p.at.Live(slot) {
			p.found[i] = true
			if !used[slot] {
				used[slot] = true
			}
			p.cmd.Touched = append(p.cmd.Touched, slot)
			continue
		}
		for free < p.run {
			v, ok := next()
			if !ok {
				break
			}
			taken[v] = true
			x := p.m.table.at(v)
			p.cmd.Victims = append(p.cmd.Victims, Victim{v, x.birth})
			free += p.pagesOf(x)
		}
		if free < p.run {
			short += p.run - free
			free = 0
			continue
		}
		free -= p.run
	}
	if short == 0 && len(p.cmd.Victims) == 0 {
		return AllocPlan{Kind: PlanNothing, Found: p.found, Touched: p.cmd.Touched}
	}
	p.need = short
	for _, v := range p.cmd.Victims {
		p.need += p.pagesOf(p.m.table.at(v.Slot))
	}
	p.sizes(size)
	return p.fits()
}

// pagesOf returns how many of the requested pages an entry takes up.
func (p *planner) pagesOf(x *entry) uint64 { return (uint64(x.length) + p.pageSize - 1) / p.pageSize }

// command finishes a plan.
func (p *planner) command(phase uint8) AllocPlan {
	p.cmd.Phase, p.cmd.PageSize, p.cmd.MaxOwned = phase, p.pageSize, p.m.settings.MaxRegionsPerInstance
	p.cmd.Keys, p.cmd.Found = uint32(len(p.found)), nil //nolint:gosec // at most protocol.MaxBatch
	if len(p.found) > 0 {
		p.cmd.Found = make([]byte, (len(p.found)+7)/8)
		for i, f := range p.found {
			if f {
				p.cmd.Found[i/8] |= 1 << (i % 8)
			}
		}
	}
	if phase != 1 || p.cmd.Region != 0 {
		p.cmd.Victims = nil
	}
	return AllocPlan{Kind: PlanCommand, Cmd: p.cmd}
}

// atLimit reports whether the instance may not own another region.
func (p *planner) atLimit() bool {
	limit := p.m.settings.MaxRegionsPerInstance
	return limit > 0 && uint64(len(p.s.regions)) >= limit || len(p.m.regions) >= MaxRegions
}

// reserved gives a region that was taken from its owner for this session, and that the owner has let go.
func (p *planner) reserved() AllocPlan {
	for _, r := range p.m.sortedRegions() {
		if r.markedFor != p.s.id || r.beyond() {
			continue
		}
		if r.state == RegionMarked || r.live > 0 || p.g.RegionBusy(r.id) {
			p.wait, p.coming = true, true
			if r.state == RegionDraining && r.live > 0 {
				return AllocPlan{Kind: PlanEmpty, Region: r.id}
			}
			continue // what can be had at once need not wait for it
		}
		if r.state == RegionDraining && r.length >= p.least && !p.atLimit() {
			p.cmd.Region = r.id
			return p.command(3)
		}
	}
	return AllocPlan{}
}

// freeSpace cuts a region from free space, see rate.
func (p *planner) freeSpace() AllocPlan {
	if p.atLimit() {
		return AllocPlan{}
	}
	var best *device
	var bestSize uint64
	rating := 0
	for _, d := range p.m.sortedDevices() {
		if !p.mayUse(d) {
			continue
		}
		largest, _ := d.largestFree()
		size := min(roundUp(p.want, d.Align), largest/d.Align*d.Align)
		size = min(size, MaxRegionPages*p.pageSize/d.Align*d.Align)
		if size >= p.least && !p.ready(d) {
			p.wait = true
			continue
		}
		r := p.rate(d)
		if size < p.least || best != nil && (r > rating || r == rating && size <= bestSize) {
			continue
		}
		best, bestSize, rating = d, size, r
	}
	if best == nil {
		return p.draining()
	}
	p.cmd.Device, p.cmd.Size = best.id, bestSize
	return p.command(0)
}

func (p *planner) ready(d *device) bool {
	return d.Generation != 0 && p.g.DeviceReady(d.id, d.Node, d.Generation)
}

// draining takes a region that is empty and on its way to free space.
func (p *planner) draining() AllocPlan {
	for _, r := range p.m.sortedRegions() {
		if r.state != RegionDraining || r.markedFor != 0 && p.m.sessionOpen(r.markedFor) || r.length < p.least ||
			r.beyond() || !p.mayUse(r.device) {
			continue
		}
		if r.live > 0 || p.g.RegionBusy(r.id) || !p.ready(r.device) {
			p.wait = true
			continue
		}
		p.cmd.Region = r.id
		return p.command(0)
	}
	return AllocPlan{}
}

// ownEntries evicts the instance's own entries in the order of the policy.
func (p *planner) ownEntries() AllocPlan {
	if !p.req.Evict {
		return AllocPlan{}
	}
	if p.need == 0 {
		return p.ownWhole()
	}
	if len(p.req.Keys) == 0 {
		next, stop := p.victims(nil)
		for got := uint64(0); got < p.need && len(p.cmd.Victims) < MaxDropPerCommand; {
			v, ok := next()
			if !ok {
				break
			}
			x := p.m.table.at(v)
			p.cmd.Victims = append(p.cmd.Victims, Victim{v, x.birth})
			got += p.pagesOf(x)
		}
		stop()
	}
	if len(p.cmd.Victims) > 0 {
		return p.command(1)
	}
	return p.ownWhole()
}

// ownWhole empties one own region, of whatever page size, and re-issues it.
func (p *planner) ownWhole() AllocPlan {
	if !p.req.Evict {
		return AllocPlan{}
	}
	r := p.fewest(p.s.regions, func(r *region) bool { return r.state == RegionOwned && p.usable(r) })
	if r == nil {
		return AllocPlan{}
	}
	if !p.req.Whole && r.pageSize == p.pageSize {
		return AllocPlan{} // its pages were tried one by one: they are free, being written, or leased
	}
	p.cmd.Region = r.id
	return p.command(1)
}

// departed gives a region of an owner that is gone.
func (p *planner) departed() AllocPlan {
	if p.atLimit() {
		return AllocPlan{}
	}
	r := p.fewest(p.m.sortedRegions(), func(r *region) bool { return r.state == RegionDeparted && p.mayUse(r.device) && p.usable(r) })
	if r == nil {
		return AllocPlan{}
	}
	if r.live > MaxDropPerCommand {
		plan := AllocPlan{Kind: PlanEmpty, Region: r.id}
		if p.m.settings.Version >= VersionTenants {
			plan.For = p.s.id
		}
		return plan
	}
	p.cmd.Region = r.id
	return p.command(2)
}

// others takes a region from another client that is alive, or whose process may still write: it is asked first.
func (p *planner) others() AllocPlan {
	if p.atLimit() || !p.req.Evict || p.coming {
		return AllocPlan{}
	}
	young := false
	r := p.fewest(p.m.sortedRegions(), func(r *region) bool {
		if !p.mayUse(r.device) || r.owner != nil && r.device.Home == r.owner.instance {
			return false
		}
		if r.state == RegionMarked || r.state == RegionOrphaned && !p.keeps(r) {
			p.wait = true // it may come free: its owner may answer, or be proven dead
			return false
		}
		if r.state != RegionOwned || r.owner == p.s || r.pinned > 0 || r.length < p.least || !r.owner.hears() || p.keeps(r) {
			return false
		}
		if !p.last && p.at.now-r.bornMS < p.m.settings.MinRegionAgeMS {
			young = true
			return false
		}
		return true
	})
	if r == nil {
		p.wait = p.wait || young
		return AllocPlan{}
	}
	return AllocPlan{Kind: PlanMark, Region: r.id}
}

// PlanEarly names the region that an instance would be given at the cost of another live client, if it is time to ask
// for it before a store needs it: percent of the pool lies in regions, the instance's recent demand in bytes is more
// than its own entries could make room for, and no region is on its way to it. 0: there is none. It changes nothing.
func (r *Reading) PlanEarly(id SessionID, pageSize, demand, percent uint64, g Guard) RegionID {
	m := r.m
	s := m.sessions[id]
	if s == nil || !s.open {
		return 0
	}
	own := uint64(0)
	for _, r := range s.regions {
		own += r.liveBytes
	}
	pool, given := uint64(0), uint64(0)
	for _, d := range m.sortedDevices() {
		_, free := d.largestFree()
		pool, given = pool+d.room(), given+d.room()-min(d.room(), free)
	}
	if demand <= own || given/100 < pool/100*percent/100 {
		return 0
	}
	for _, r := range m.regionList {
		if r.markedFor == id {
			return 0
		}
	}
	p := planner{m: m, at: *r, s: s, req: &protocol.AllocRequest{Evict: true}, g: g, pageSize: pageSize, least: pageSize}
	return p.others().Region
}

// usable reports whether a region could be given whole now.
func (p *planner) usable(r *region) bool {
	if r.pinned > 0 || r.length < p.least || r.generation != r.device.Generation {
		return false
	}
	if p.keeps(r) {
		return false
	}
	if p.g.RegionBusy(r.id) {
		p.wait = true
		return false
	}
	return true
}

// keeps reports whether a region is guaranteed to another tenant than the instance's, and notes if so.
func (p *planner) keeps(r *region) bool {
	kept := keeps(r, p.s)
	p.kept = p.kept || kept
	return kept
}

// fewest returns the region with the fewest live entries, of those the oldest, of those the first.
func (p *planner) fewest(regions []*region, ok func(*region) bool) *region {
	var best *region
	for _, r := range regions {
		if !ok(r) {
			continue
		}
		if best == nil || r.live < best.live || r.live == best.live && r.bornMS < best.bornMS {
			best = r
		}
	}
	return best
}

// victims returns an iterator over the instance's own entries that may be evicted now, coldest first: first those that
// nobody has used since the last decision, then the others, then the soft-pinned. used, which may grow while the
// iterator runs, holds entries that are in use by this very request.
func (p *planner) victims(used map[Slot]bool) (next func() (Slot, bool), stop func()) {
	return iter.Pull(func(yield func(Slot) bool) {
		if !p.req.Evict {
			return
		}
		w := victimWalk{p: p, used: used, yield: yield}
		for _, class := range []Class{ClassNormal, ClassSoft} {
			if part := p.m.partitionOf(p.s, p.pageSize, class); part != nil && !w.partition(part) {
				return
			}
		}
		w.copies()
	})
}

// victimWalk is one walk over the entries that may be evicted.
type victimWalk struct {
	p      *planner
	used   map[Slot]bool
	yield  func(Slot) bool
	walked int    // entries that could not be victims
	recent []Slot // of the partition, used since the last decision
	over   bool   // the caller wants no more
	early  map[Slot]bool
}

// copyWindow is how many of the coldest entries are looked through for those that live on in a copy, before others are
// evicted: so few that the order of the policy hardly changes.
const copyWindow = 64

// withCopies offers those of the coldest entries that are served elsewhere, too.
func (w *victimWalk) withCopies(part *partition) {
	m, looked := w.p.m, 0
	if m.places.count == 0 {
		return
	}
	part.victims(w.p.at.now, func(s Slot) policy.Verdict {
		if looked++; looked > copyWindow {
			return policy.Stop
		}
		x := m.table.at(s)
		if w.used[s] || x.places == 0 || m.servedCopy(x) == 0 || !w.p.evictable(s) || w.p.g.Touched(s) {
			return policy.Skip
		}
		if w.early == nil {
			w.early = map[Slot]bool{}
		}
		w.early[s] = true
		if w.over = !w.yield(s); w.over {
			return policy.Stop
		}
		return policy.Take
	})
}

// promotion makes room for a copy, in a faster tier, of what the instance has just read: from free space, or else from the
// coldest of its own entries that are served elsewhere, too, and fall to that. Nobody waits for it, nothing is lost by it, and
// what is to lie on several nodes stays on as many.
func (p *planner) promotion() AllocPlan {
	if plan := p.freeSpace(); plan.Kind != 0 {
		return plan
	}
	looked := 0
	if part := p.m.partitionOf(p.s, p.pageSize, ClassNormal); part != nil {
		part.victims(p.at.now, func(s Slot) policy.Verdict {
			if looked++; looked > copyWindow || len(p.cmd.Victims) > 0 {
				return policy.Stop
			}
			if p.mayFall(s) {
				p.cmd.Victims = append(p.cmd.Victims, Victim{s, p.m.table.at(s).birth})
			}
			return policy.Skip
		})
	}
	if len(p.cmd.Victims) > 0 {
		return p.command(1)
	}
	return refuse(protocol.CodeNoSpace, "no entry of this instance that is cold in a faster tier has a copy in a slower one")
}

// mayFall reports whether an entry may leave a faster tier for one that is promoted. It takes up as much, so that its pages are
// the run that is needed.
func (p *planner) mayFall(s Slot) bool {
	x := p.m.table.at(s)
	return p.m.servedCopy(x) != 0 && x.want == 0 && !p.m.regionOf(x).slow() && p.pagesOf(x) >= p.run && p.evictable(s) &&
		!p.g.Touched(s)
}

// copies offers the copies in the instance's regions of entries whose primaries lie elsewhere: nothing is lost with them.
func (w *victimWalk) copies() {
	p := w.p
	for _, r := range p.s.regions {
		if r.state != RegionOwned || r.pageSize != p.pageSize || r.copyBytes == 0 {
			continue
		}
		for at := r.places; at != 0 && w.walked <= maxWalk; at = p.m.places.at(at).rnext {
			s := p.m.places.at(at).slot
			x := p.m.table.at(s)
			primary := x.flags&flagMoved != 0 && x.places == at
			if w.walked++; primary || w.used[s] || w.early[s] || x.pins > 0 || p.g.Leased(s) {
				continue
			}
			if !w.yield(s) {
				return
			}
		}
	}
}

// partition offers the entries of one partition; false means that the caller wants no more.
func (w *victimWalk) partition(part *partition) bool {
	w.recent = nil
	if w.withCopies(part); w.over {
		return false
	}
	part.victims(w.p.at.now, w.offer)
	for _, s := range w.recent {
		if !w.over && !w.used[s] {
			w.over = !w.yield(s)
		}
	}
	return !w.over
}

// offer looks at the next entry in the policy's order.
func (w *victimWalk) offer(s Slot) policy.Verdict {
	switch {
	case w.used[s] || w.early[s]:
		return policy.Skip
	case !w.p.evictable(s):
		w.p.wait = true
	case w.p.g.Touched(s):
		if len(w.recent) < protocol.MaxBatch {
			w.recent = append(w.recent, s)
		}
	default:
		if w.over = !w.yield(s); w.over {
			return policy.Stop
		}
		return policy.Take
	}
	if w.walked++; w.walked > maxWalk {
		return policy.Stop
	}
	return policy.Skip
}

func (p *planner) evictable(s Slot) bool {
	return !p.g.Leased(s) && p.m.regionOf(p.m.table.at(s)).state == RegionOwned
}
