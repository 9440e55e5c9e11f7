package meta

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// tiered is a pool with a client's fast device and two nodes' slow ones, each with a region.
type tiered struct {
	*pool
	client SessionID
	fast   AllocResult
	homes  []*homeOf
	slow   []AllocResult
}

func newTiered(t *testing.T) *tiered {
	t.Helper()
	p := &tiered{pool: newPool(t)}
	s := DefaultSettings()
	s.Version = ClusterVersion
	p.apply(Header{}, &SetSettings{s})
	p.device(8 * page)
	p.res.WantEffects = true
	p.client = p.openWith("client", protocol.FeaturePush|protocol.FeatureCopies)
	_, p.fast = p.alloc(p.client, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
	for i := range 2 {
		h := &homeOf{instance: fmt.Sprintf("node/n%d/ssd", i)}
		h.session = p.openWith(h.instance, protocol.FeatureNode|protocol.FeatureCopies|protocol.FeaturePush)
		code, body := p.apply(Header{}, &AddDevice{
			UUID: h.instance, Node: fmt.Sprintf("n%d", i), Tier: "ssd", Size: 8 * page, Align: 4096, Generation: 7, Home: h.instance,
		})
		require.Zero(t, code)
		r, err := DecodeCount(body)
		require.NoError(t, err)
		h.device = DeviceID(r.Count)
		_, given := p.alloc(h.session, &protocol.AllocRequest{Size: 8 * page, PageSize: page, Device: uint64(h.device)})
		require.True(t, given.Given)
		p.homes, p.slow = append(p.homes, h), append(p.slow, given)
	}
	return p
}

func (p *pool) openWith(instance string, features uint64) SessionID {
	code, body := p.apply(Header{}, &OpenSession{Instance: instance, TTLMS: 10_000, Secret: p.index + 99, Features: features})
	require.Zero(p.tb, code)
	r, err := DecodeSession(body)
	require.NoError(p.tb, err)
	return r.ID
}

// put registers an entry in the client's region.
func (p *tiered) put(key string, at int) Slot {
	require.True(p.tb, p.register(p.client, nil, entryAt(key, p.fast, at))[0].New)
	return p.slot(key)
}

func (p *tiered) slot(key string) Slot {
	s, ok := p.m.Find(TenantID{}, []byte(key))
	require.True(p.tb, ok, key)
	return s
}

// copy has the i-th node copy an entry to a page of its region.
func (p *tiered) copy(key string, i, at int) protocol.Code {
	e := entryAt(key, p.slow[i], at)
	slot := p.slot(key)
	e.Copy, e.Slot, e.Of = true, uint64(slot), p.m.Birth(slot)
	r := p.register(p.homes[i].session, nil, e)[0]
	require.Equal(p.tb, r.Code == 0, r.New)
	return r.Code
}

// where are the devices that serve an entry, the primary's first.
func (p *tiered) where(key string) (devices []DeviceID) {
	for _, l := range p.m.Locations(p.slot(key), nil) {
		devices = append(devices, l.Device)
	}
	return devices
}

func (p *tiered) evict(keys ...string) AllocResult {
	c := &Alloc{Phase: 1, PageSize: page}
	for _, k := range keys {
		c.Victims = append(c.Victims, Victim{p.slot(k), p.m.Birth(p.slot(k))})
	}
	code, body := p.do(p.client, c)
	require.Zero(p.tb, code)
	r, err := DecodeAlloc(body)
	require.NoError(p.tb, err)
	return r
}

func TestEntriesStaySmall(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(entry{}), uintptr(128))
	require.LessOrEqual(t, unsafe.Sizeof(place{}), uintptr(40))
}

// An entry with a copy falls to it when its primary goes, in whatever way that does; without one it goes.
func TestFall(t *testing.T) {
	for name, lose := range map[string]func(p *tiered){
		"evicted": func(p *tiered) {
			r := p.evict("kept", "gone")
			require.True(p.tb, r.Evicted[0].Copy, "leases on it are not over")
			require.False(p.tb, r.Evicted[1].Copy)
		},
		"its region is returned and given away": func(p *tiered) {
			p.do(p.client, &ReturnRegion{Region: p.fast.Region})
			code, _ := p.do(p.openWith("other", 0), &Alloc{Region: p.fast.Region, PageSize: page, Phase: 2})
			require.Zero(p.tb, code)
		},
		"its region is taken": func(p *tiered) { p.apply(Header{}, &Mark{Region: p.fast.Region}) },
		"its device is retired": func(p *tiered) {
			p.apply(Header{}, &Retire{Device: 1, Generation: 99, Fenced: true})
			require.Equal(p.tb, []DeviceID{2}, p.where("kept"), "also before a sweep")
			p.apply(Header{}, &Sweep{Limit: 100})
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTiered(t)
			p.put("gone", 0)
			p.put("kept", 1)
			require.Zero(t, p.copy("kept", 0, 0))
			require.Equal(t, []DeviceID{1, 2}, p.where("kept"))
			lose(p)
			_, ok := p.m.Find(TenantID{}, []byte("gone"))
			require.False(t, ok)
			require.Equal(t, []DeviceID{2}, p.where("kept"))
			p.check()
			p.m = p.rebuilt()
			require.Equal(t, []DeviceID{2}, p.where("kept"))
			plan := p.m.PlanAlloc(p.homes[0].session, &protocol.AllocRequest{PageSize: page, NeedPages: 1, Evict: true, Device: 2}, noGuard{}, false)
			require.Equal(t, []Victim{{p.slot("kept"), p.m.Birth(p.slot("kept"))}}, plan.Cmd.Victims, "it is in its new owner's order")
		})
	}
}

// A copy in a faster tier becomes the primary; the old one stays as a copy, unless the entry is to be moved.
func TestPromotion(t *testing.T) {
	for _, move := range []bool{false, true} {
		p := newTiered(t)
		p.put("k", 0)
		require.Zero(t, p.copy("k", 0, 0))
		p.evict("k")
		require.Equal(t, []DeviceID{2}, p.where("k"))
		slot := p.slot("k")
		require.False(t, p.m.Wanted(slot))
		p.index++
		require.NoError(t, p.m.Apply(p.index, BeginGroup(nil, p.now, []Touch{{slot, 2}}), &p.res))
		p.log = append(p.log, nil)
		require.True(t, p.m.Wanted(slot), "used twice where it is slow")
		e := entryAt("k", p.fast, 3)
		e.Copy, e.Of = true, p.m.Birth(slot)
		if move {
			e.MoveFrom = ^uint64(0)
		}
		require.True(t, p.register(p.client, nil, e)[0].New)
		if move {
			require.Equal(t, []DeviceID{1}, p.where("k"))
			require.Len(t, p.res.Effects, 1)
			require.Equal(t, p.slow[0].Region, p.res.Effects[0].Region)
			require.Equal(t, ReasonMoved, p.res.Effects[0].Reason)
		} else {
			require.Equal(t, []DeviceID{1, 2}, p.where("k"))
		}
		require.False(t, p.m.Wanted(slot))
		p.check()
		p.rebuilt()
	}
}

// What is not a copy of the entry that was read is refused, and its page stays free.
func TestCopiesRefused(t *testing.T) {
	p := newTiered(t)
	slot := p.put("k", 0)
	right := entryAt("k", p.slow[0], 0)
	right.Copy, right.Slot, right.Of = true, uint64(slot), p.m.Birth(slot)
	for name, c := range map[string]struct {
		change func(e *protocol.RegisterEntry)
		code   protocol.Code
	}{
		"another version":       {func(e *protocol.RegisterEntry) { e.Of++ }, protocol.CodeNotFound},
		"another key":           {func(e *protocol.RegisterEntry) { e.Key = []byte("x") }, protocol.CodeNotFound},
		"another slot":          {func(e *protocol.RegisterEntry) { e.Slot = 99 }, protocol.CodeNotFound},
		"another length":        {func(e *protocol.RegisterEntry) { e.KVLength-- }, protocol.CodeNotFound},
		"registered before":     {func(e *protocol.RegisterEntry) { e.Of = 0 }, protocol.CodeNotFound},
		"an old epoch":          {func(e *protocol.RegisterEntry) { e.Epoch += 9 }, protocol.CodeStaleEpoch},
		"a region of another's": {func(e *protocol.RegisterEntry) { e.RegionID, e.Epoch = uint64(p.fast.Region), p.fast.Epoch }, protocol.CodeNotOwner},
	} {
		e := right
		c.change(&e)
		r := p.register(p.homes[0].session, nil, e)[0]
		require.False(t, r.New, name)
		require.Equal(t, c.code, r.Code, name)
	}
	require.Zero(t, p.copy("k", 0, 0))
	require.Equal(t, protocol.CodeDuplicate, p.copy("k", 0, 1))
	require.Equal(t, protocol.CodeOverlap, func() protocol.Code { p.put("l", 1); return p.copy("l", 0, 0) }())
	p.check()
}

// A value and its replicas are registered by one command; a key that was there keeps what it has.
func TestReplicas(t *testing.T) {
	p := newTiered(t)
	for i := range DeviceID(2) {
		p.apply(Header{}, &AddDevice{
			UUID: fmt.Sprint("x", i), Node: fmt.Sprint("m", i), Tier: "ssd", Size: 8 * page, Align: 4096, Generation: 7, Home: "h",
		})
	}
	_, other := p.alloc(p.client, &protocol.AllocRequest{Size: 4 * page, PageSize: page, Tier: "ssd", Avoid: []string{"m0"}})
	require.Equal(t, DeviceID(5), other.Device, "none on the node that is to be avoided")
	copyOf := entryAt("k", other, 0)
	copyOf.Copy = true
	for i, want := range []bool{true, false} {
		r := p.register(p.client, nil, entryAt("k", p.fast, i), copyOf)
		require.Equal(t, want, r[0].New)
		require.Equal(t, want, r[1].New)
		require.Equal(t, []DeviceID{1, 5}, p.where("k"))
		copyOf.KVOffset += page
	}
	code, body := p.do(p.client, &Delete{Keys: [][]byte{[]byte("k")}})
	require.Zero(t, code)
	d, err := DecodeDelete(body)
	require.NoError(t, err)
	require.Equal(t, p.fast.Region, d.Freed[0].Region)
	require.Len(t, p.res.Effects, 1, "of the copy its owner hears as of any page")
	require.Equal(t, other.Region, p.res.Effects[0].Region)
	require.True(t, p.res.Effects[0].Copy)
	p.check()
	p.rebuilt()
}

// What lies on a device that is away is not served, is not swept, and is there when it comes back; its home's next session
// owns its regions, and evicts what lies there.
func TestAway(t *testing.T) {
	p := newTiered(t)
	p.put("k", 0)
	p.put("both", 1)
	require.Zero(t, p.copy("k", 0, 0))
	require.Zero(t, p.copy("both", 0, 1))
	p.evict("k")
	h := p.homes[0]
	p.apply(Header{}, &CloseSession{ID: h.session})
	code, _ := p.apply(Header{}, &SetDevice{Device: h.device, Mode: DeviceAway, UntilMS: 99})
	require.Zero(t, code)
	_, ok := p.m.Find(TenantID{}, []byte("k"))
	require.False(t, ok)
	require.Equal(t, []DeviceID{1}, p.where("both"))
	_, late := p.alloc(p.client, &protocol.AllocRequest{Size: page, PageSize: page, Device: uint64(h.device)})
	require.False(t, late.Given)
	p.m.startSweep()
	p.apply(Header{}, &Sweep{Limit: 100})
	p.check()
	p.m = p.rebuilt()
	h.session = p.openWith(h.instance, protocol.FeatureNode)
	p.apply(Header{}, &SetDevice{Device: h.device})
	require.Equal(t, []DeviceID{2}, p.where("k"))
	require.Equal(t, []DeviceID{1, 2}, p.where("both"))
	info, _ := p.m.Session(h.session)
	require.Equal(t, []RegionID{p.slow[0].Region}, info.Regions)
	r, _ := p.m.Region(p.slow[0].Region)
	require.NotEqual(t, p.slow[0].Epoch, r.Epoch)
	plan := p.m.PlanAlloc(h.session, &protocol.AllocRequest{PageSize: page, NeedPages: 2, Evict: true, Device: 2}, noGuard{}, false)
	require.Equal(t, []Slot{p.slot("k"), p.slot("both")}, []Slot{plan.Cmd.Victims[0].Slot, plan.Cmd.Victims[1].Slot}, "its own first, then copies")
	p.check()
	p.rebuilt()
}

// The regions of a home that is proven gone come free with its device's generation: nobody would acknowledge.
func TestRetireWithoutHome(t *testing.T) {
	p := newTiered(t)
	p.put("k", 0)
	require.Zero(t, p.copy("k", 0, 0))
	p.apply(Header{}, &CloseSession{ID: p.homes[0].session, Fenced: true})
	code, _ := p.apply(Header{}, &Retire{Device: p.homes[0].device, Generation: 9})
	require.Zero(t, code)
	p.apply(Header{}, &Sweep{Limit: 100})
	code, _ = p.apply(Header{}, &FreeRegion{Region: p.slow[0].Region})
	require.Zero(t, code)
	p.check()
	p.rebuilt()
}

// A pin holds all locations of an entry where they are: whoever pinned it reads the copy where the primary is not served.
func TestPinnedCopies(t *testing.T) {
	p := newTiered(t)
	p.put("k", 0)
	require.Zero(t, p.copy("k", 0, 0))
	pin := &Pin{Class: ClassHard, Keys: [][]byte{[]byte("k")}}
	p.do(p.client, pin)
	p.m = p.rebuilt()
	at := p.slow[0].Region
	refused := func(want protocol.Code) {
		r, _ := p.m.Region(at)
		require.Equal(t, want != 0, r.Pinned == 1)
		code, _ := p.do(p.homes[0].session, &Alloc{Region: at, PageSize: page, Phase: 1})
		require.Equal(t, want, code)
	}
	code, _ := p.apply(Header{}, &Mark{Region: at})
	require.Equal(t, protocol.CodePending, code)
	refused(protocol.CodePending)
	code, _ = p.do(p.homes[0].session, &Alloc{Phase: 1, PageSize: page, Victims: []Victim{{p.slot("k"), p.m.Birth(p.slot("k"))}}})
	require.Equal(t, protocol.CodePending, code)
	require.Equal(t, []DeviceID{1, 2}, p.where("k"))
	p.check()
	pin.Undo = true
	p.do(p.client, pin)
	refused(0)
	require.Equal(t, []DeviceID{1}, p.where("k"))
	p.check()
	p.rebuilt()
}

// The coldest entries without a copy below are demoted, and each by one task at a time; of those to be evicted, the ones
// that live on below go first.
func TestDemotion(t *testing.T) {
	p := newTiered(t)
	for i := range 6 {
		p.put(fmt.Sprint("k", i), i)
	}
	v := p.m.PlanDemote(1, 2, 3*page, 100, 0)
	require.Equal(t, []Slot{p.slot("k0"), p.slot("k1"), p.slot("k2")}, []Slot{v[0].Slot, v[1].Slot, v[2].Slot})
	code, body := p.apply(Header{}, &AddTask{TaskKind: TaskDemote, Device: 2, Items: v})
	require.Zero(t, code)
	task, err := DecodeCount(body)
	require.NoError(t, err)
	id := TaskID(task.Count)
	require.Equal(t, p.slot("k3"), p.m.PlanDemote(1, 2, 1, 100, 0)[0].Slot)
	require.Zero(t, p.copy("k1", 0, 0))
	live := 0
	p.m.TaskItems(id, 0, func(_ int, _ Victim, ok bool) bool { live += int(b2u(ok)); return true })
	require.Equal(t, 3, live)
	code, _ = p.do(p.homes[0].session, &TaskDone{Task: id, Done: 3, Copied: 2})
	require.Equal(t, protocol.CodeBadRequest, code, "what became of each is told")
	for range 2 { // the second time changes nothing
		code, _ = p.do(p.homes[0].session, &TaskDone{Task: id, Done: 3, Copied: 1, Skipped: 2, Bytes: 5})
		require.Zero(t, code)
		info, ok := p.m.Task(id)
		require.True(t, ok)
		require.Equal(t, TaskInfo{
			ID: id, Kind: TaskDemote, State: TaskFinished, Device: 2, Total: 3, Done: 3, Copied: 1, Skipped: 2, Bytes: 5, CreatedMS: p.now,
		}, info)
	}
	plan := p.m.PlanAlloc(p.client, &protocol.AllocRequest{PageSize: page, NeedPages: 2, Evict: true}, noGuard{}, false)
	require.Equal(t, []Slot{p.slot("k1"), p.slot("k0")}, []Slot{plan.Cmd.Victims[0].Slot, plan.Cmd.Victims[1].Slot})
	p.check()
	p.rebuilt()
}

// A device that is drained gets no new regions; what lies there is named until it has left.
func TestDrain(t *testing.T) {
	p := newTiered(t)
	p.put("a", 0)
	p.put("b", 1)
	p.apply(Header{}, &SetDevice{Device: 1, Mark: true, Draining: true})
	require.Equal(t, PlanRefuse, p.m.PlanAlloc(p.openWith("x", 0), &protocol.AllocRequest{Size: page, PageSize: page}, noGuard{}, false).Kind)
	require.Len(t, p.m.PlanDrain(1, 100), 2)
	for i, key := range []string{"a", "b"} {
		e := entryAt(key, p.slow[0], i)
		e.Copy, e.Slot, e.Of, e.MoveFrom = true, uint64(p.slot(key)), p.m.Birth(p.slot(key)), 1
		require.True(t, p.register(p.homes[0].session, nil, e)[0].New)
		require.Equal(t, []DeviceID{2}, p.where(key))
	}
	require.Empty(t, p.m.PlanDrain(1, 100))
	d, _ := p.m.Device(1)
	require.True(t, d.Draining)
	require.Zero(t, d.LiveBytes)
	p.m = p.rebuilt()
	d, _ = p.m.Device(1)
	require.True(t, d.Draining)
}

// Nothing of tiers is accepted as long as there may be members that know nothing of them, and their records are those of
// before.
func TestBeforeTiers(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	code, _ := p.apply(Header{}, &AddDevice{UUID: "n", Tier: "ssd", Size: 8 * page, Align: 4096, Generation: 7, Home: "node/n"})
	require.Equal(t, protocol.CodeUnsupported, code)
	code, _ = p.apply(Header{}, &AddDevice{UUID: "n", Tier: "cxl", Size: 8 * page, Align: 4096, Generation: 7, NUMA: 1})
	require.Equal(t, protocol.CodeUnsupported, code)
	code, _ = p.apply(Header{}, &SetDevice{Device: 1, Mark: true, Draining: true})
	require.Equal(t, protocol.CodeUnsupported, code)
	code, _ = p.apply(Header{}, &AddTask{TaskKind: TaskCopy, Device: 1, Items: []Victim{{1, 2}}})
	require.Equal(t, protocol.CodeUnsupported, code)
	node := p.openWith("node/n", protocol.FeatureNode)
	_, given := p.alloc(node, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	code, _ = p.apply(Header{}, &FencedRegion{Region: given.Region, Epoch: given.Epoch})
	require.Equal(t, protocol.CodeUnsupported, code)
	again := entryAt("k", given, 1)
	again.Copy = true
	require.Equal(t, protocol.CodeUnsupported, p.register(node, nil, entryAt("k", given, 0), again)[1].Code)
	p.apply(Header{}, &CloseSession{ID: node})
	r, _ := p.m.Region(given.Region)
	require.Equal(t, RegionOrphaned, r.State, "as any session's")

	s := DefaultSettings()
	s.Version = VersionTiers
	p.apply(Header{}, &SetSettings{s})
	node = p.openWith("node/n", protocol.FeatureNode)
	r, _ = p.m.Region(given.Region)
	require.Equal(t, RegionOrphaned, r.State, "it stays so: it is on no device of its own")
	require.NotEqual(t, node, r.Owner)
	p.check()
	p.rebuilt()
}

// Settings that a version has brought are what they always were before it, on every member and in its records.
func TestSettingsOfLaterVersions(t *testing.T) {
	p := newPool(t)
	s := DefaultSettings()
	s.Version, s.PromoteMost, s.PromoteRate = VersionTiers, 1, 2
	p.apply(Header{}, &SetSettings{s})
	require.EqualValues(t, 64<<20, p.m.Settings().PromoteMost)
	require.EqualValues(t, 256<<20, p.m.Settings().PromoteRate)
	p.rebuilt()
	s.Version = VersionPromotion
	p.apply(Header{}, &SetSettings{s})
	require.Equal(t, s, p.m.Settings())
	p.m = p.rebuilt()
	require.Equal(t, s, p.m.Settings())
}

// What was to be copied to a device that has lost its bytes, or is gone, is not any more; elsewhere it is.
func TestRetireCancelsTasks(t *testing.T) {
	p := newTiered(t)
	v := []Victim{{p.put("k", 0), 1}}
	for _, h := range p.homes {
		code, _ := p.apply(Header{}, &AddTask{TaskKind: TaskCopy, Device: h.device, Items: v})
		require.Zero(t, code)
	}
	p.apply(Header{}, &Retire{Device: p.homes[0].device, Generation: 9, Fenced: true})
	all := p.m.Tasks()
	require.Equal(t, []TaskState{TaskCanceled, TaskWaiting}, []TaskState{all[0].State, all[1].State})
	code, _ := p.do(p.homes[0].session, &TaskDone{Task: all[0].ID, Done: 1, Copied: 1})
	require.Equal(t, protocol.CodeCanceled, code)
	p.check()
	p.rebuilt()
}

// A fenced region is its taker's, whatever its owner does; late words of its owner mean nothing.
func TestFencedRegion(t *testing.T) {
	p := newTiered(t)
	p.put("a", 0)
	p.apply(Header{}, &Mark{Region: p.fast.Region})
	code, _ := p.apply(Header{}, &FencedRegion{Region: p.fast.Region, Epoch: p.fast.Epoch + 1})
	require.Equal(t, protocol.CodeStaleEpoch, code)
	code, _ = p.apply(Header{}, &FencedRegion{Region: p.fast.Region, Epoch: p.fast.Epoch})
	require.Zero(t, code)
	r, _ := p.m.Region(p.fast.Region)
	require.Equal(t, RegionDraining, r.State)
	require.Equal(t, protocol.CodeStaleEpoch, p.register(p.client, nil, entryAt("late", p.fast, 5))[0].Code)
	p.check()
}

// Whoever has been told of a location that goes must learn that a lease does not keep it any longer: in whatever way it
// goes, and whether or not its owner is told.
func TestLocationsThatGoAreTold(t *testing.T) {
	for name, lose := range map[string]func(p *tiered){
		"the primary is evicted":        func(p *tiered) { p.evict("k") },
		"the primary's region is taken": func(p *tiered) { p.apply(Header{}, &Mark{Region: p.fast.Region}) },
		"the copy's region is emptied": func(p *tiered) {
			p.apply(Header{}, &Mark{Region: p.slow[0].Region})
		},
		"the copy is evicted": func(p *tiered) {
			s := p.slot("k")
			code, _ := p.do(p.homes[0].session, &Alloc{Phase: 1, PageSize: page, Victims: []Victim{{s, p.m.Birth(s)}}})
			require.Zero(p.tb, code)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTiered(t)
			p.put("k", 0)
			require.Zero(t, p.copy("k", 0, 0))
			lose(p)
			require.Equal(t, []Slot{p.slot("k")}, p.res.Parted)
			require.Len(t, p.where("k"), 1)
		})
	}
}

// What is written to a device that is away would be acknowledged and not served: it is refused.
func TestRegisterOnADeviceThatIsAway(t *testing.T) {
	p := newTiered(t)
	p.apply(Header{}, &SetDevice{Device: p.homes[0].device, Mode: DeviceAway})
	r := p.register(p.homes[0].session, nil, entryAt("k", p.slow[0], 0))
	require.Equal(t, protocol.CodeStaleGeneration, r[0].Code)
	p.apply(Header{}, &SetDevice{Device: p.homes[0].device})
	require.True(t, p.register(p.homes[0].session, nil, entryAt("k", p.slow[0], 0))[0].New)
}

// A move to a device that holds the entry already frees the other places all the same.
func TestMoveToWhereItLies(t *testing.T) {
	p := newTiered(t)
	slot := p.put("k", 0)
	require.Zero(t, p.copy("k", 0, 0))
	e := entryAt("k", p.slow[0], 1)
	e.Copy, e.Slot, e.Of, e.MoveFrom = true, uint64(slot), p.m.Birth(slot), 1
	require.Equal(t, protocol.CodeDuplicate, p.register(p.homes[0].session, nil, e)[0].Code)
	require.Equal(t, []DeviceID{2}, p.where("k"))
	require.Len(t, p.res.Effects, 1)
	require.Equal(t, p.fast.Region, p.res.Effects[0].Region)
	p.check()
	p.rebuilt()
}

// TestAHomeInheritsWhatIsOnItsDevice: what an ended session had on another device, such as who exposes one of the masters' own
// has, and all from before the pool knew of homes, is taken as other clients' is.
func TestAHomeInheritsWhatIsOnItsDevice(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	version := func(v uint32) {
		s := DefaultSettings()
		s.Version = v
		p.apply(Header{}, &SetSettings{s})
	}
	var given [2]AllocResult
	var ids [2]SessionID
	for i := range given {
		ids[i] = p.openWith("node/n/a", protocol.FeatureNode)
		_, given[i] = p.alloc(ids[i], &protocol.AllocRequest{Size: 4 * page, PageSize: page})
		require.True(t, p.register(ids[i], nil, entryAt(fmt.Sprint("k", i), given[i], 0))[0].New)
		p.apply(Header{}, &CloseSession{ID: ids[i]})
		version(ClusterVersion)
	}
	id := p.openWith("node/n/a", protocol.FeatureNode)
	info, _ := p.m.Session(id)
	require.Empty(t, info.Regions)
	again, _ := p.rebuilt().Session(id)
	require.Equal(t, info, again)
	for i := range given {
		r, _ := p.m.Region(given[i].Region)
		require.Equal(t, RegionOrphaned, r.State)
		p.apply(Header{}, &Fence{ID: ids[i]})
		r, _ = p.m.Region(given[i].Region)
		require.Equal(t, RegionDeparted, r.State, "its process is proven dead")
		_, ok := p.m.Find(TenantID{}, fmt.Append(nil, "k", i))
		require.True(t, ok)
	}
	_, taken := p.alloc(p.open("c"), &protocol.AllocRequest{Size: 4 * page, PageSize: page, Evict: true})
	require.True(t, taken.Given)
}

// TestDamagedLocationsAreDropped: one location goes, its owner is told unless it is the one that says so, and with the last
// one the entry goes.
func TestDamagedLocationsAreDropped(t *testing.T) {
	p := newTiered(t)
	slot := p.put("k", 1)
	require.Zero(t, p.copy("k", 0, 2))
	require.Zero(t, p.copy("k", 1, 3))
	damaged := func(id SessionID, r AllocResult, at uint64) (code protocol.Code, freed []Page) {
		c, body := p.apply(Header{Session: id}, &Delete{Keys: [][]byte{[]byte("k")}, Region: r.Region, Offset: at})
		require.Zero(t, c)
		d, err := DecodeDelete(body)
		require.NoError(t, err)
		return d.Codes[0], d.Freed
	}
	code, _ := damaged(p.client, p.fast, 0)
	require.Equal(t, protocol.CodeNotFound, code, "it lies elsewhere in that region")
	code, freed := damaged(p.client, p.slow[0], 2*page+1)
	require.Zero(t, code)
	require.True(t, freed[0].Copy)
	require.Len(t, p.res.Effects, 1)
	require.Equal(t, p.homes[0].session, p.res.Effects[0].Owner)
	require.Equal(t, ReasonLost, p.res.Effects[0].Reason)
	require.Equal(t, []Slot{slot}, p.res.Parted)
	code, freed = damaged(p.client, p.fast, page)
	require.Zero(t, code)
	require.True(t, freed[0].Copy)
	require.Empty(t, p.res.Effects, "its owner has the answer")
	require.Equal(t, []DeviceID{p.homes[1].device}, p.where("k"))
	code, freed = damaged(p.client, p.slow[1], 3*page)
	require.Zero(t, code)
	require.False(t, freed[0].Copy)
	require.Len(t, p.res.Effects, 1)
	_, found := p.m.Find(TenantID{}, []byte("k"))
	require.False(t, found)
}

// Clients that share a device share what is demoted, too, by how much they have there. What one has no use for is others'.
func TestDemotionIsShared(t *testing.T) {
	p := newTiered(t)
	d := p.device(32 * page)
	put := func(name string, n int) {
		id := p.open(name)
		_, at := p.alloc(id, &protocol.AllocRequest{Size: uint64(n) * page, PageSize: page, Device: uint64(d)})
		for i := range n {
			require.True(t, p.register(id, nil, entryAt(fmt.Sprint(name, i), at, i))[0].New)
		}
	}
	put("a", 12)
	put("b", 6)
	put("c", 2)
	plan := func(goal uint64, limit int, turn uint64) map[string]int {
		got := map[string]int{}
		for _, v := range p.m.PlanDemote(d, 2, goal*page, limit, turn) {
			got[string(p.m.Key(v.Slot)[:1])]++
		}
		return got
	}
	for turn := range uint64(5) {
		require.Equal(t, map[string]int{"a": 6, "b": 3, "c": 1}, plan(10, 100, turn))
		require.Equal(t, map[string]int{"a": 6, "b": 3, "c": 1}, plan(100, 10, turn))
		require.Equal(t, map[string]int{"a": 12, "b": 6, "c": 2}, plan(100, 100, turn))
		require.Equal(t, map[string]int{string("abc"[turn%3]): 1}, plan(100, 1, turn), "none is passed over for ever")
	}
	var items []Victim
	for i := range 12 {
		slot := p.slot(fmt.Sprint("a", i))
		items = append(items, Victim{slot, p.m.Birth(slot)})
	}
	p.apply(Header{}, &AddTask{TaskKind: TaskDemote, Device: 2, Items: items})
	require.Equal(t, map[string]int{"b": 5, "c": 1}, plan(6, 100, 0), "what one has no use for goes to others")
}

// fastHome adds a home of a dram device, as the third, with a region.
func (p *tiered) fastHome() *homeOf {
	h := &homeOf{instance: "node/n9/dram"}
	h.session = p.openWith(h.instance, protocol.FeatureNode|protocol.FeatureCopies|protocol.FeaturePush)
	_, body := p.apply(Header{}, &AddDevice{
		UUID: h.instance, Node: "n9", Tier: "dram", Size: 8 * page, Align: 4096, Generation: 7, Home: h.instance,
	})
	r, err := DecodeCount(body)
	require.NoError(p.tb, err)
	h.device = DeviceID(r.Count)
	_, given := p.alloc(h.session, &protocol.AllocRequest{Size: 8 * page, PageSize: page, Device: uint64(h.device)})
	p.homes, p.slow = append(p.homes, h), append(p.slow, given)
	return h
}

// TestTheFastestComesFirst: an entry falls to a slow copy while the device of a faster one is away, and that comes back.
func TestTheFastestComesFirst(t *testing.T) {
	p := newTiered(t)
	h := p.fastHome()
	slot := p.put("k", 0)
	require.Zero(t, p.copy("k", 0, 0))
	require.Zero(t, p.copy("k", 1, 0))
	require.Zero(t, p.copy("k", 2, 0))
	p.apply(Header{}, &SetDevice{Device: h.device, Mode: DeviceAway})
	p.evict("k")
	require.Equal(t, []DeviceID{2, 3}, p.where("k"))
	p.apply(Header{}, &SetDevice{Device: h.device})
	require.Equal(t, []DeviceID{h.device, 2, 3}, p.where("k"))
	var l Location
	p.m.Location(slot, &l)
	require.Equal(t, h.device, l.Device)
	s := p.m.Settings()
	s.PromoteAfter = 1
	p.apply(Header{}, &SetSettings{s})
	p.m.touch(slot, 9)
	require.False(t, p.m.Wanted(slot), "it lies in a faster tier already")
	p.apply(Header{}, &SetDevice{Device: h.device, Mode: DeviceAway})
	require.True(t, p.m.Wanted(slot))
}

// TestAwayEntryIsReplaced: whoever owns the pages hears that what lay there is lost to the index, not that somebody has
// cleared it.
func TestAwayEntryIsReplaced(t *testing.T) {
	p := newTiered(t)
	h := p.fastHome()
	code, _ := p.do(h.session, &ReturnRegion{Region: p.slow[2].Region})
	require.Zero(t, code)
	r, _ := p.m.Region(p.slow[2].Region)
	code, _ = p.apply(Header{}, &FreeRegion{Region: r.ID})
	require.Zero(t, code)
	_, far := p.alloc(p.client, &protocol.AllocRequest{Size: 4 * page, PageSize: page, Device: uint64(h.device)})
	require.True(t, far.Given)
	require.True(t, p.register(p.client, nil, entryAt("k", far, 0))[0].New)
	p.apply(Header{}, &SetDevice{Device: h.device, Mode: DeviceAway})
	require.True(t, p.register(p.client, nil, entryAt("k", p.fast, 0))[0].New)
	require.Len(t, p.res.Effects, 1)
	require.Equal(t, ReasonLost, p.res.Effects[0].Reason)
	require.Equal(t, far.Region, p.res.Effects[0].Region)
	p.apply(Header{}, &SetDevice{Device: h.device})
	require.Equal(t, []DeviceID{1}, p.where("k"), "it does not come back")
}

// TestMarkAndModeAreApart: who has read one of them before the other changed does not undo that.
func TestMarkAndModeAreApart(t *testing.T) {
	p := newTiered(t)
	d := p.homes[0].device
	p.apply(Header{}, &SetDevice{Device: d, Mode: DeviceAway, UntilMS: 9})
	p.apply(Header{}, &SetDevice{Device: d, Mark: true, Draining: true})
	p.rebuilt()
	info, _ := p.m.Device(d)
	require.Equal(t, DeviceAway, info.Mode)
	require.EqualValues(t, 9, info.UntilMS)
	require.True(t, info.Draining)
	p.apply(Header{}, &SetDevice{Device: d})
	info, _ = p.m.Device(d)
	require.Equal(t, DeviceServing, info.Mode)
	require.Zero(t, info.UntilMS)
	require.True(t, info.Draining)
}
