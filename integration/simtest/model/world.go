package model

import (
	"bytes"
	"cmp"
	"maps"
	"slices"

	"larder/meta"
)

// world is one possible state of the pool.
type world struct {
	applied     uint64
	now         uint64
	incarnation uint64
	settings    meta.Settings

	entries  []*entry // by slot; nil = free. As long as it ever was
	contexts []*context
	inUse    *context // by the REGISTER that is being carried out: it does not go with an entry that is replaced
	tenants  []string // in the order of their making
	limits   map[string]meta.TenantLimits
	sessions map[meta.SessionID]*session
	regions  map[meta.RegionID]*region
	devices  map[meta.DeviceID]*device
	tasks    []*task // by id
	names    []name  // in the order of their making
	maru     []*maruKey
	revision uint64 // of the last change of any name
	before   uint64 // births before the REGISTER that is being carried out

	// The last ones given out.
	births, epochs, uses, pinIDs uint64
	lastSession                  meta.SessionID
	lastRegion                   meta.RegionID
	lastDevice                   meta.DeviceID

	marks     map[string]*clearing // CLEARs in progress
	sweepLeft uint64
	sweepAt   uint64
	change    policyChange
	guess     uint64 // for the present log entry, see guesses
	asked     uint64 // which bits of it have made a difference
	sweeps    int    // so far in the present log entry
	ordered   bool   // every entry's place is known: the policy orders by use, and has not changed since there were entries
	counts    Counters

	effects []meta.Effect // of the present log entry
	dropped []meta.Slot
	moved   []meta.Slot
	changes []NameChange
}

// entry is one key and where its bytes lie.
type entry struct {
	slot     meta.Slot
	birth    uint64
	key      string
	ctx      *context
	at       []*location // where its bytes lie: the primary first, then the copies, see settleCopies
	length   uint64
	checksum uint64
	added    uint64
	expires  uint64 // 0 = never
	prefix   bool
	hash     uint64
	group    uint64
	nodes    uint64 // on how many it is to lie
	cleared  bool   // by a CLEAR
	used     uint64 // when it was last given to its policy, or used
	old      bool   // perhaps still ordered by the policy that is being replaced
	pins     []*pin
}

// location is one of the places where the bytes of an entry lie.
type location struct {
	entry  *entry
	region *region
	offset uint64
	birth  uint64 // the entry's where that was registered, until a copy in a faster tier takes its place
}

// pin holds an entry.
type pin struct {
	id      uint64
	session meta.SessionID // 0 = durable or soft
	owner   string
	class   meta.Class
	until   uint64
	count   uint64
}

// context is an interned context. It is there as long as entries or a tenant need it.
type context struct {
	meta.Context
	base bool // a tenant's own
}

type session struct {
	info    meta.OpenSession
	id      meta.SessionID
	tenant  string
	opened  uint64
	acked   uint64
	open    bool
	fenced  bool
	answers map[uint64]answer // by seq
}

// answer is what became of a seq.
type answer struct {
	canceled bool
	result   []byte
}

type region struct {
	id         meta.RegionID
	device     *device
	offset     uint64
	length     uint64
	pageSize   uint64
	epoch      uint64
	generation uint64
	owner      *session // nil = nobody
	state      meta.RegionState
	born       uint64
	forSession meta.SessionID
}

type device struct {
	meta.AddDevice
	id       meta.DeviceID
	mode     meta.DeviceMode
	until    uint64
	draining bool
}

// task is what a home was asked to copy.
type task struct {
	meta.TaskInfo
	items []meta.Victim // none once it is over
}

func newWorld() *world {
	w := &world{
		settings: meta.DefaultSettings(), sessions: map[meta.SessionID]*session{},
		regions: map[meta.RegionID]*region{}, devices: map[meta.DeviceID]*device{}, limits: map[string]meta.TenantLimits{},
		marks: map[string]*clearing{}, ordered: true,
	}
	w.addTenant(meta.DefaultTenant)
	return w
}

// clone copies everything.
func (w *world) clone() *world {
	c := *w
	c.effects, c.dropped, c.moved, c.changes = nil, nil, nil, nil
	c.names = slices.Clone(w.names)
	c.tenants, c.limits, c.marks = slices.Clone(w.tenants), maps.Clone(w.limits), map[string]*clearing{}
	for key, x := range w.marks {
		c.marks[key] = &clearing{x.tenant, x.left}
	}
	contexts, sessions := map[*context]*context{}, map[*session]*session{}
	regions, devices := map[*region]*region{}, map[*device]*device{}
	c.contexts = nil
	for _, x := range w.contexts {
		contexts[x] = new(*x)
		c.contexts = append(c.contexts, contexts[x])
	}
	c.sessions = map[meta.SessionID]*session{}
	for id, s := range w.sessions {
		n := new(*s)
		n.answers = maps.Clone(s.answers)
		c.sessions[id], sessions[s] = n, n
	}
	c.devices = map[meta.DeviceID]*device{}
	for id, d := range w.devices {
		n := new(*d)
		c.devices[id], devices[d] = n, n
	}
	c.regions = map[meta.RegionID]*region{}
	for id, r := range w.regions {
		n := new(*r)
		n.device, n.owner = devices[r.device], sessions[r.owner]
		c.regions[id], regions[r] = n, n
	}
	c.tasks = nil
	for _, t := range w.tasks {
		c.tasks = append(c.tasks, new(*t)) // what it names is never changed in place
	}
	c.maru = nil
	for _, k := range w.maru {
		n := new(*k)
		n.region = regions[k.region]
		c.maru = append(c.maru, n)
	}
	c.entries = make([]*entry, len(w.entries))
	for i, e := range w.entries {
		if e != nil {
			c.entries[i] = e.clone(contexts[e.ctx], regions)
		}
	}
	return &c
}

func (e *entry) clone(ctx *context, regions map[*region]*region) *entry {
	n := new(*e)
	n.ctx, n.at, n.pins = ctx, nil, nil
	for _, l := range e.at {
		n.at = append(n.at, &location{n, regions[l.region], l.offset, l.birth})
	}
	for _, p := range e.pins {
		n.pins = append(n.pins, new(*p))
	}
	return n
}

// at returns the entry of a slot, nil if it is free.
func (w *world) at(s meta.Slot) *entry {
	if int(s) >= len(w.entries) {
		return nil
	}
	return w.entries[s]
}

// held returns all entries, by slot.
func (w *world) held() []*entry {
	return slices.DeleteFunc(slices.Clone(w.entries), func(e *entry) bool { return e == nil })
}

// find returns a tenant's entry, dead or alive.
func (w *world) find(tenant, key string) *entry {
	for _, e := range w.entries {
		if e != nil && e.key == key && e.ctx.Tenant == tenant {
			return e
		}
	}
	return nil
}

// in returns what lies in a region: first what was registered there and has not moved since, then all else, both the
// newest first.
func (w *world) in(r *region) []*location {
	var in []*location
	for _, e := range w.held() {
		for _, l := range e.at {
			if l.region == r {
				in = append(in, l)
			}
		}
	}
	slices.SortFunc(in, func(a, b *location) int {
		if a.first() != b.first() {
			return map[bool]int{true: -1, false: 1}[a.first()]
		}
		return cmp.Compare(b.birth, a.birth)
	})
	return in
}

// live counts the locations and keys of Maru's in a region.
func (w *world) live(r *region) int { return len(w.in(r)) + len(w.maruIn(r)) }

// pinned counts those of hard-pinned entries: readers may have found them there, primaries or copies.
func (w *world) pinned(r *region) int {
	n := 0
	for _, l := range w.in(r) {
		if l.entry.hard() {
			n++
		}
	}
	for _, k := range w.maruIn(r) {
		if k.pins > 0 {
			n++
		}
	}
	return n
}

// owned returns a session's regions, by id.
func (w *world) owned(s *session) []*region {
	var owned []*region
	for _, r := range w.regions {
		if r.owner == s {
			owned = append(owned, r)
		}
	}
	slices.SortFunc(owned, func(a, b *region) int { return cmp.Compare(a.id, b.id) })
	return owned
}

func byID[K cmp.Ordered, V any](in map[K]V) []V {
	out := make([]V, 0, len(in))
	for _, k := range slices.Sorted(maps.Keys(in)) {
		out = append(out, in[k])
	}
	return out
}

func (w *world) regionList() []*region   { return byID(w.regions) }
func (w *world) sessionList() []*session { return byID(w.sessions) }
func (w *world) deviceList() []*device   { return byID(w.devices) }

// hard reports whether an entry is hard-pinned.
func (e *entry) hard() bool {
	return slices.ContainsFunc(e.pins, func(p *pin) bool { return p.class == meta.ClassHard })
}

// class returns an entry's class.
func (e *entry) class() meta.Class {
	switch {
	case e.hard():
		return meta.ClassHard
	case len(e.pins) > 0:
		return meta.ClassSoft
	default:
		return meta.ClassNormal
	}
}

// lost reports whether a region's bytes may be gone.
func (r *region) lost() bool { return r.generation != r.device.Generation }

// alive reports whether an entry may be served: from where it lies, and at all.
func (w *world) alive(e *entry) bool {
	return w.kept(e) && slices.ContainsFunc(e.at, (*location).served)
}

// over reports whether an entry will never be served again. One whose device is away may be.
func (w *world) over(e *entry) bool {
	return !w.kept(e) || !slices.ContainsFunc(e.at, (*location).sound)
}

// kept reports whether an entry was not cleared, and its time is not over.
func (w *world) kept(e *entry) bool { return !e.cleared && (e.expires == 0 || e.expires > w.now) }

// death says why an entry is not served.
func (w *world) death(e *entry) meta.Reason {
	switch r := e.primary().region; {
	case r.lost():
		return meta.ReasonLost
	case !r.sound():
		return meta.ReasonTaken
	case e.expires != 0 && e.expires <= w.now:
		return meta.ReasonExpired
	case !e.cleared: // the device is away, and may bring it back; but something else takes its key
		return meta.ReasonLost
	default:
		return meta.ReasonCleared
	}
}

// touch counts uses of an entry.
func (w *world) touch(e *entry, n uint64) {
	w.counts.Touched += n
	if w.settings.Policy == "lru" && !e.hard() {
		w.placed(e)
	}
}

// placed puts an entry at the hot end of its policy.
func (w *world) placed(e *entry) {
	w.uses++
	e.used = w.uses
}

// joins gives an entry, which was registered or whose pins have changed, to the pool's policy.
func (w *world) joins(e *entry) {
	if !e.hard() {
		w.leavesOld(e)
		w.placed(e)
	}
}

// drop removes an entry. tell says that the owner of its primary does not know; those of copies never do.
func (w *world) drop(e *entry, why meta.Reason, tell bool) {
	for _, l := range e.at[1:] {
		w.tell(l, why)
	}
	first := e.primary()
	switch {
	case !tell:
	case why != meta.ReasonTaken && first.hears():
		w.effects = append(w.effects, meta.Effect{Page: first.page(), Reason: why})
	default:
		w.dropped = append(w.dropped, e.slot)
	}
	w.leavesOld(e)
	w.entries[e.slot] = nil
	w.counts.Removed[why]++
	w.forgetContext(e.ctx)
}

// location describes where a region lies.
func (r *region) location() meta.Location {
	return meta.Location{
		Region: r.id, Device: r.device.id, RegionOffset: r.offset, RegionLength: r.length, Generation: r.generation,
		Epoch: r.epoch, PageSize: r.pageSize,
	}
}

func (w *world) addTenant(name string) {
	w.tenants = append(w.tenants, name)
	w.contexts = append(w.contexts, &context{Context: meta.Context{Tenant: name}, base: true})
}

// forgetContext removes a context that nothing needs any more.
func (w *world) forgetContext(c *context) {
	if c.base || c == w.inUse || slices.ContainsFunc(w.entries, func(e *entry) bool { return e != nil && e.ctx == c }) {
		return
	}
	w.contexts = slices.DeleteFunc(w.contexts, func(x *context) bool { return x == c })
}

// tenantOf returns the tenant that a command acts for.
func tenantOf(s *session) string {
	if s == nil {
		return meta.DefaultTenant
	}
	return s.tenant
}

// settle notes, after a log entry, whether the order of entries is known.
func (w *world) settle() {
	if len(w.held()) == 0 && w.change.state == notChanging {
		w.ordered = true
	}
}

// hasPrefix is bytes.HasPrefix on an entry's key.
func (e *entry) hasPrefix(prefix []byte) bool { return bytes.HasPrefix([]byte(e.key), prefix) }
