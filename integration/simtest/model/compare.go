package model

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// Counters count what was done since a model, or a process with a machine, started.
type Counters struct {
	Registered   uint64
	Existing     uint64
	Deduplicated uint64
	Touched      uint64
	Removed      [meta.Reasons]uint64
	Copied       uint64
	Fallen       uint64
	Evictions    [4]uint64
	Allocs       [4]uint64
}

// CompareState compares the whole state with what a machine that applied the same log, and nothing more, lets be read:
// entries, regions, devices, sessions with what was answered to them, pins, prefixes, settings, sums, and, under
// policies that order by use alone, the order of eviction. It returns a *Violation at the first difference. It changes
// nothing in the machine, and costs as much as there is to compare.
func (m *Model) CompareState(machine *meta.Machine) error {
	var why error
	fit := slices.Clone(m.worlds)
	fit = slices.DeleteFunc(fit, func(w *world) bool {
		err := w.compareState(machine)
		why = cmp.Or(why, err)
		return err != nil
	})
	return m.keep(fit, why)
}

// CompareCounters compares what a machine has counted since it was made with what the model has: they are no part of
// the state, so it must have been made with the model, as an empty pool, and have applied the same log itself.
func (m *Model) CompareCounters(machine *meta.Machine) error {
	s, w := machine.Stats(), m.worlds[0]
	return w.same("counters", w.counts, Counters{
		s.Registered, s.Existing, s.Deduplicated, s.Touched, s.Removed, s.Copied, s.Fallen, s.Evictions, s.Allocs,
	})
}

// same compares one part of the state.
func (w *world) same(what string, want, got any) error {
	if reflect.DeepEqual(want, got) {
		return nil
	}
	return w.violation("the state: "+what, want, got)
}

func (w *world) compareState(m *meta.Machine) error {
	for _, compare := range []func(*meta.Machine) error{
		w.compareHead, w.compareRegions, w.compareDevices, w.compareSessions, w.compareEntries, w.compareKeys,
		w.compareLocations, w.compareReplicas, w.comparePrefixes, w.comparePins, w.compareTasks, w.compareNames, w.compareMaru,
		w.compareStats, w.compareOrder,
	} {
		if err := compare(m); err != nil {
			return err
		}
	}
	return nil
}

// head is what there is one of in a pool.
type head struct {
	Applied, NowMS, Incarnation, NextPinExpiry uint64
	Expires                                    bool
	Settings                                   meta.Settings
}

func (w *world) compareHead(m *meta.Machine) error {
	want := head{Applied: w.applied, NowMS: w.now, Incarnation: w.incarnation, Settings: w.settings}
	for _, h := range w.timed() {
		if !want.Expires || h.until < want.NextPinExpiry {
			want.NextPinExpiry, want.Expires = h.until, true
		}
	}
	got := head{Applied: m.Applied(), NowMS: m.NowMS(), Incarnation: m.Incarnation(), Settings: m.Settings()}
	got.NextPinExpiry, got.Expires = m.NextPinExpiry()
	if err := w.same("head", want, got); err != nil {
		return err
	}
	lo, hi := 0, 0
	if w.change.state != notChanging {
		lo, hi = max(w.change.lo, 1), max(w.change.hi, 1)
	}
	if w.change.state == perhapsChanging {
		lo = 0
	}
	moving := int(m.SweepPending() - w.sweepLeft)
	if moving < lo || moving > hi {
		return w.violation("the state: sweeps pending", fmt.Sprintf("%d slots and %d..%d entries", w.sweepLeft, lo, hi),
			m.SweepPending())
	}
	return nil
}

func (w *world) compareDevices(m *meta.Machine) error {
	want := make([]meta.DeviceInfo, 0, len(w.devices))
	for _, d := range w.deviceList() {
		i := meta.DeviceInfo{ID: d.id, AddDevice: d.AddDevice, Mode: d.mode, UntilMS: d.until, Draining: d.draining}
		for _, e := range w.free(d) {
			i.Free += e.length
			i.LargestFree = max(i.LargestFree, e.length)
		}
		for _, r := range w.regions {
			if r.device != d {
				continue
			}
			i.Regions++
			i.Locations += uint64(len(w.maruIn(r)))
			for _, l := range w.in(r) {
				i.Locations++
				i.LiveBytes += l.entry.length
				if l != l.entry.primary() {
					i.CopyBytes += l.entry.length
				}
			}
		}
		want = append(want, i)
		if one, ok := m.Device(d.id); !ok || one != i {
			return w.violation("the state: device", i, one)
		}
	}
	return w.same("devices", want, m.Devices())
}

func (w *world) compareRegions(m *meta.Machine) error {
	want := make([]meta.RegionInfo, 0, len(w.regions))
	for _, r := range w.regionList() {
		i := meta.RegionInfo{
			ID: r.id, Device: r.device.id, Offset: r.offset, Length: r.length, PageSize: r.pageSize, Epoch: r.epoch,
			Generation: r.generation, State: r.state, Live: uint32(w.live(r)), Pinned: uint32(w.pinned(r)),
			BornMS: r.born, For: r.forSession,
		}
		if r.owner != nil {
			i.Owner, i.Instance = r.owner.id, r.owner.info.Instance
		}
		for _, l := range w.in(r) {
			i.LiveBytes += l.entry.length
		}
		want = append(want, i)
		if err := w.compareRegion(m, r, i); err != nil {
			return err
		}
	}
	if err := w.same("regions", want, m.Regions()); err != nil {
		return err
	}
	for st := meta.RegionOwned; st <= meta.RegionDraining; st++ {
		var some []meta.RegionInfo
		m.RegionsIn(st, func(i meta.RegionInfo) { some = append(some, i) })
		in := slices.DeleteFunc(slices.Clone(want), func(i meta.RegionInfo) bool { return i.State != st })
		if err := w.same("regions that are "+st.String(), emptyNil(in), some); err != nil {
			return err
		}
	}
	return nil
}

// compareRegion compares one region and what it holds.
func (w *world) compareRegion(m *meta.Machine, r *region, want meta.RegionInfo) error {
	if got, ok := m.Region(r.id); !ok || got != want {
		return w.violation("the state: region", want, got)
	}
	var slots, got []meta.Slot
	in := w.in(r)
	for _, l := range in {
		slots = append(slots, l.entry.slot)
	}
	m.EachEntry(r.id, func(s meta.Slot) bool {
		got = append(got, s)
		return true
	})
	if err := w.same(fmt.Sprintf("entries of region %d, the newest first", r.id), slots, got); err != nil {
		return err
	}
	var runs []uint64
	slices.SortFunc(in, func(a, b *location) int { return cmp.Compare(a.offset, b.offset) })
	for _, l := range in {
		first, end := l.pages()
		if n := len(runs); n > 0 && runs[n-2]+runs[n-1] == first*r.pageSize {
			runs[n-1] += (end - first) * r.pageSize
		} else {
			runs = append(runs, first*r.pageSize, (end-first)*r.pageSize)
		}
	}
	return w.same(fmt.Sprintf("occupied pages of region %d", r.id), runs, m.Occupied(r.id))
}

func (w *world) compareSessions(m *meta.Machine) error {
	want := make([]meta.SessionInfo, 0, len(w.sessions))
	for _, s := range w.sessionList() {
		i := w.describeSession(s)
		want = append(want, i)
		if got, ok := m.Session(s.id); !ok || !reflect.DeepEqual(got, i) {
			return w.violation("the state: session", i, got)
		}
		id, found := m.SessionOf(s.info.Instance)
		if open := w.sessionOf(s.info.Instance); found != (open != nil) || found && id != open.id {
			return w.violation("the state: the open session of "+s.info.Instance, open, id)
		}
		if m.SessionOpen(s.id) != s.open {
			return w.violation("the state: session open", s.open, m.SessionOpen(s.id))
		}
		if err := w.compareAnswers(m, s); err != nil {
			return err
		}
	}
	return w.same("sessions", want, m.Sessions())
}

func (w *world) describeSession(s *session) meta.SessionInfo {
	i := meta.SessionInfo{
		ID: s.id, Instance: s.info.Instance, Tenant: s.tenant, TTLMS: s.info.TTLMS, Features: s.info.Features,
		Secret: s.info.Secret, Open: s.open, Fenced: s.fenced, Process: s.info.Process, OpenedMS: s.opened, Acked: s.acked,
		Pins: len(w.pinList(func(p *pin) bool { return p.session == s.id })), Answers: len(s.answers), AnswerBytes: s.remembered(),
	}
	for _, r := range w.owned(s) {
		i.Regions = append(i.Regions, r.id)
		i.Entries += uint64(len(w.maruIn(r)))
		for _, l := range w.in(r) {
			i.Entries++
			i.Bytes += l.entry.length
		}
	}
	return i
}

// compareAnswers compares what is remembered of every seq about the window.
func (w *world) compareAnswers(m *meta.Machine, s *session) error {
	for seq := max(s.acked, 1) - 1; seq <= s.acked+protocol.Window; seq++ {
		a, known := s.answers[seq]
		state := meta.SeqUnknown
		switch {
		case seq < s.acked:
			state = meta.SeqTooOld
		case seq-s.acked >= protocol.Window:
			state = meta.SeqAhead
		case known && a.canceled:
			state = meta.SeqCanceled
		case known:
			state = meta.SeqAnswered
		}
		got, gotState := m.Remembered(s.id, seq)
		if gotState != state || !bytes.Equal(got, a.result) {
			return w.violation(fmt.Sprintf("the state: answer of session %d to seq %d", s.id, seq),
				fmt.Sprintf("%d %x", state, a.result), fmt.Sprintf("%d %x", gotState, got))
		}
	}
	return nil
}

func (w *world) compareEntries(m *meta.Machine) error {
	for i := range w.entries {
		slot := meta.Slot(i)
		e := w.at(slot)
		if e == nil {
			if m.Birth(slot) != 0 || m.Live(slot) {
				return w.violation(fmt.Sprintf("the state: slot %d", i), "free", fmt.Sprintf("%q", m.Key(slot)))
			}
			continue
		}
		if m.Birth(slot) != e.birth || string(m.Key(slot)) != e.key {
			return w.violation(fmt.Sprintf("the state: slot %d", i), fmt.Sprintf("%q born %d", e.key, e.birth),
				fmt.Sprintf("born %d", m.Birth(slot)))
		}
		want := meta.EntryInfo{
			Location: e.found().describe(), Tenant: e.ctx.Tenant, Model: e.ctx.Model, Class: e.class(), AddedMS: e.added,
		}
		if got := m.Entry(slot); got != want {
			return w.violation(fmt.Sprintf("the state: entry %q", e.key), want, got)
		}
		if m.Live(slot) != w.alive(e) {
			return w.violation(fmt.Sprintf("the state: entry %q may be served", e.key), w.alive(e), m.Live(slot))
		}
		found, ok := m.Find(m.Tenant(e.ctx.Tenant), []byte(e.key))
		if ok != w.alive(e) || ok && found != slot {
			return w.violation(fmt.Sprintf("the state: key %q is found", e.key), w.alive(e), fmt.Sprint(found, ok))
		}
	}
	return nil
}

// compareKeys compares the listing of each tenant's keys.
func (w *world) compareKeys(m *meta.Machine) error {
	for _, tenant := range w.tenants {
		var want, got []string
		for _, e := range w.held() {
			if e.ctx.Tenant == tenant && w.alive(e) {
				want = append(want, e.key)
			}
		}
		const page = 7
		for cursor := uint64(0); ; {
			cursor = m.ListKeys(tenant, nil, cursor, page, func(s meta.Slot) { got = append(got, string(m.Key(s))) })
			if cursor == 0 {
				break
			}
		}
		if err := w.same("keys of tenant "+tenant, want, got); err != nil {
			return err
		}
	}
	return nil
}

// comparePrefixes asks for each block that entries hold, alone and by all members of its group.
func (w *world) comparePrefixes(m *meta.Machine) error {
	for _, e := range w.held() {
		if !e.prefix {
			continue
		}
		same := func(x *entry) bool { return x.ctx == e.ctx && x.prefix && x.hash == e.hash }
		want, wantKey := 0, ""
		if first := w.oldest(same); first != nil {
			want, wantKey = 1, first.key
		}
		gotKey := ""
		got := m.PrefixMatch(&e.ctx.Context, []uint64{e.hash}, 0, func(key []byte) { gotKey = string(key) })
		if got != want || gotKey != wantKey {
			return w.violation(fmt.Sprintf("the state: block %d", e.hash), fmt.Sprint(want, wantKey), fmt.Sprint(got, gotKey))
		}
		members := e.group & 0xffff
		if members == 0 || members > meta.MaxGroupMembers {
			continue
		}
		parts := map[uint64]bool{}
		for _, x := range w.held() {
			if same(x) && w.alive(x) && x.group&0xffff == members && x.group>>16 < members {
				parts[x.group>>16] = true
			}
		}
		all := uint64(len(parts)) == members
		if got := m.PrefixMatch(&e.ctx.Context, []uint64{e.hash}, members, nil); (got == 1) != all {
			return w.violation(fmt.Sprintf("the state: block %d of %d members", e.hash, members), all, got)
		}
	}
	return nil
}

func (w *world) comparePins(m *meta.Machine) error {
	var want, got []meta.PinInfo
	for _, h := range w.pinList(func(p *pin) bool { return p.session == 0 }) {
		want = append(want, meta.PinInfo{
			Key: emptyNil([]byte(h.entry.key)), Tenant: h.entry.ctx.Tenant, Owner: h.owner, Class: h.class, UntilMS: h.until,
		})
	}
	const page = 7
	for cursor := uint64(0); ; {
		var pins []meta.PinInfo
		pins, cursor = m.Pins(cursor, page)
		got = append(got, pins...)
		if cursor == 0 {
			break
		}
	}
	return w.same("durable and soft pins", want, got)
}

// sums are the gauges of a machine.
type sums struct {
	Entries, LiveBytes, Slots    uint64
	Open, Closed                 int
	Regions                      [meta.RegionDraining + 1]int
	Devices, Contexts            int
	PoolBytes, FreeBytes         uint64
	Tenants                      []meta.TenantStats
	KeyBytesTooFew, KeyBytesLost bool
}

func (w *world) compareStats(m *meta.Machine) error {
	held := w.held()
	want := sums{
		Entries: uint64(len(held)), Slots: uint64(len(w.entries)), Devices: len(w.devices), Contexts: len(w.contexts),
	}
	tenants := map[string]*meta.TenantStats{}
	for _, name := range w.tenants {
		tenants[name] = &meta.TenantStats{
			Name: name, Pins: uint64(w.pinsOf(name, true)), SessionPins: uint64(w.pinsOf(name, false)), Space: w.space(name),
			TenantLimits: w.limits[name],
		}
	}
	keyBytes := uint64(0)
	for _, e := range held {
		want.LiveBytes += e.length * uint64(len(e.at))
		tenants[e.ctx.Tenant].Entries++
		tenants[e.ctx.Tenant].Bytes += e.length
		keyBytes += uint64(len(e.key))
	}
	for _, name := range w.tenants {
		want.Tenants = append(want.Tenants, *tenants[name])
	}
	for _, s := range w.sessions {
		if s.open {
			want.Open++
		} else {
			want.Closed++
		}
	}
	for _, r := range w.regions {
		want.Regions[r.state]++
	}
	for _, d := range w.devices {
		want.PoolBytes += d.capacity()
		for _, e := range w.free(d) {
			want.FreeBytes += e.length
		}
	}
	s := m.Stats()
	const granule = 16 // keys are rounded up by less than this
	return w.same("sums", want, sums{
		s.Entries, s.LiveBytes, s.Slots, s.Sessions, s.Closed, s.Regions, s.Devices, s.Contexts, s.PoolBytes, s.FreeBytes,
		s.Tenants, s.KeyBytes < keyBytes, s.KeyBytes > keyBytes+granule*uint64(len(held)),
	})
}

// watcher is a leader's knowledge by which everything is leased: it sees what a plan would evict, in order, and lets
// nothing happen.
type watcher struct{ offered []meta.Slot }

// Leased notes what is offered.
func (g *watcher) Leased(s meta.Slot) bool {
	g.offered = append(g.offered, s)
	return true
}

// Touched implements meta.Guard.
func (*watcher) Touched(meta.Slot) bool { return false }

// RegionBusy implements meta.Guard.
func (*watcher) RegionBusy(meta.RegionID) bool { return true }

// DeviceReady implements meta.Guard.
func (*watcher) DeviceReady(meta.DeviceID, string, uint64) bool { return false }

// copiesFirst is among how many of the coldest entries those are looked for that live on in a copy.
const copiesFirst = 64

// compareOrder compares the order in which entries would be evicted, where the policy orders by use or registration
// alone: of each session and page size, those that are not pinned, the least recently used first, then those that are
// soft-pinned. Of the coldest, those that live on elsewhere are looked at before all others, and the copies of entries
// whose primaries lie elsewhere after them.
func (w *world) compareOrder(m *meta.Machine) error {
	if !w.ordered || w.settings.Policy != "lru" && w.settings.Policy != "fifo" {
		return nil
	}
	for _, s := range w.sessionList() {
		if !s.open {
			continue
		}
		sizes := map[uint64]bool{}
		for _, r := range w.owned(s) {
			sizes[r.pageSize] = true
		}
		for _, size := range slices.Sorted(maps.Keys(sizes)) {
			if err := w.compareOrderOf(m, s, size); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *world) compareOrderOf(m *meta.Machine, s *session, pageSize uint64) error {
	var want []meta.Slot
	for _, class := range []meta.Class{meta.ClassNormal, meta.ClassSoft} {
		mine := slices.DeleteFunc(w.held(), func(e *entry) bool {
			r := e.primary().region
			return r.owner != s || r.pageSize != pageSize || e.class() != class
		})
		slices.SortFunc(mine, func(a, b *entry) int { return cmp.Compare(a.used, b.used) })
		for _, e := range mine[:min(len(mine), copiesFirst)] {
			if slices.ContainsFunc(e.at[1:], (*location).served) {
				want = append(want, e.slot)
			}
		}
		for _, e := range mine {
			want = append(want, e.slot)
		}
	}
	for _, r := range w.owned(s) {
		for _, l := range w.in(r) {
			if r.state == meta.RegionOwned && r.pageSize == pageSize && l != l.entry.primary() && !l.entry.hard() {
				want = append(want, l.entry.slot)
			}
		}
	}
	missing := "?"
	for w.find(s.tenant, missing) != nil {
		missing += "?"
	}
	var g watcher
	m.PlanAlloc(s.id, &protocol.AllocRequest{
		Size: pageSize, PageSize: pageSize, Keys: [][]byte{[]byte(missing)}, Evict: true,
	}, &g, false)
	return w.same(fmt.Sprintf("the order of eviction of session %d, pages of %d", s.id, pageSize), emptyNil(want), g.offered)
}
