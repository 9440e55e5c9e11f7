package meta

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/protocol"
)

// check verifies what must hold between any two commands.
func (p *pool) check() {
	t, m := p.tb, p.m
	for _, d := range m.sortedDevices() {
		used, free := uint64(0), uint64(0)
		var spans []extent
		for _, e := range d.free {
			free += e.length
			spans = append(spans, e)
		}
		n := 0
		for _, r := range m.regionList {
			if r.device == d {
				used += min(r.offset+r.length, max(d.dataEnd(), r.offset)) - r.offset
				spans = append(spans, extent{r.offset, r.length})
				n++
			}
		}
		require.Equal(t, d.room(), used+free, "used + free = capacity")
		require.Equal(t, d.regions, n)
		for i, a := range spans {
			for _, b := range spans[i+1:] {
				require.False(t, a.offset < b.offset+b.length && b.offset < a.offset+a.length, "%v and %v overlap", a, b)
			}
		}
	}
	live, pins := uint64(0), 0
	for _, r := range m.regionList {
		n, pages, bytes, copies, pinned := uint32(0), uint64(0), uint64(0), uint64(0), uint32(0)
		m.EachEntry(r.id, func(s Slot) bool {
			x := m.table.at(s)
			var l Location
			require.True(t, m.LocationIn(s, r.id, &l))
			first, end := r.span(l.Offset, uint64(x.length))
			require.True(t, r.overlaps(first, end))
			pages += end - first
			n++
			bytes += uint64(x.length)
			if x.pins > 0 {
				pinned++
			}
			if m.regionOf(x) == r {
				live++
				if x.pins > 0 {
					pins++
				}
			} else {
				copies += uint64(x.length)
			}
			return true
		})
		keys, pinnedKeys := p.checkMaru(r)
		require.Equal(t, r.live, n+keys)
		require.Equal(t, r.pinned, pinned+pinnedKeys)
		require.Equal(t, r.liveBytes, bytes)
		require.Equal(t, r.copyBytes, copies)
		occupied := uint64(0)
		runs := m.Occupied(r.id)
		for i := 1; i < len(runs); i += 2 {
			occupied += runs[i] / r.pageSize
		}
		require.Equal(t, pages, occupied, "no page is occupied twice or without an entry")
		require.Equal(t, r.owner == nil, r.state == RegionDraining && r.owner == nil)
		if r.owner == nil {
			require.Zero(t, r.live)
		}
	}
	require.Equal(t, m.table.count, live)
	p.checkPlaces()
	p.checkNames()
	p.checkMaruKeys()
	inPolicies := 0
	for _, s := range m.sessions {
		for _, part := range s.parts {
			inPolicies += part.pol.Len()
			if part.old != nil {
				inPolicies += part.old.Len()
			}
		}
		require.True(t, s.open || len(s.regions) > 0, "a closed session without regions is forgotten")
	}
	require.Equal(t, int(m.table.count)-pins, inPolicies, "what is not pinned is in a policy")
	holders := map[*tenant]uint64{}
	for slot, pins := range m.pinsOf {
		holders[m.contextOf(m.table.at(slot)).tenant] += uint64(len(pins))
	}
	spaces := map[*tenant]uint64{}
	for _, r := range m.regionList {
		if r.owner != nil && r.sound() {
			spaces[r.owner.tenant] += r.length
		}
	}
	for _, x := range m.tenants {
		require.Equal(t, spaces[x], x.space)
		require.Equal(t, holders[x], x.pins+x.sessionPins)
	}
}

// Random commands, some of them nonsense, leave every invariant intact; a replica that applies the same log, and one
// that is rebuilt from the store now and then, end in the same state; what was acknowledged is found.
func TestRandomCommands(t *testing.T) {
	for seed := range uint64(8) {
		for _, name := range policy.Names() {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) { randomRun(t, name, seed, 1000) })
		}
	}
}

func randomRun(t *testing.T, name string, seed uint64, steps int) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 17))
	p := newPool(t)
	g := generator{r: r, p: p}
	s := DefaultSettings()
	s.Policy, s.MinRegionAgeMS, s.Version = name, 100, ClusterVersion
	p.apply(Header{}, &SetSettings{s})
	p.device(32 * page)
	p.device(16 * page)
	g.nodes()
	for i := range steps {
		p.now += r.Uint64N(50)
		g.step()
		if i%20 == 0 {
			p.check()
		}
		if r.IntN(30) == 0 {
			p.m = p.rebuilt()
		}
	}
	p.check()
	g.verify()
	replica, err := Open(newMemStore())
	require.NoError(t, err)
	w := newNameWatcher(t, replica)
	defer w.same()
	blocks := newBlockFollowers(t, replica)
	out := Results{WantBlocks: true}
	for i, group := range p.log {
		out.Reset()
		require.NoError(t, replica.Apply(uint64(i)+1, group, &out))
		blocks.step(r, &out)
		if r.IntN(4) == 0 {
			w.look()
		}
	}
	requireSame(t, replica, p.m) // same log, same state, whether rebuilt on the way or not
	blocks.swept(p.index + 1)
}

// generator draws commands and remembers which keys must be there.
type generator struct {
	r        *rand.Rand
	p        *pool
	sessions []SessionID
	homes    []*homeOf
	maru     maruMirror
}

func (g *generator) session() SessionID {
	if len(g.sessions) == 0 || g.r.IntN(20) == 0 {
		g.sessions = append(g.sessions, g.p.openOf([]string{DefaultTenant, "acme"}[len(g.sessions)%3/2], fmt.Sprintf("i%d", len(g.sessions))))
	}
	return g.sessions[g.r.IntN(len(g.sessions))]
}

func (g *generator) key() []byte { return fmt.Appendf(nil, "key-%d", g.r.IntN(60)) }

func (g *generator) keys() [][]byte {
	keys := make([][]byte, 1+g.r.IntN(4))
	for i := range keys {
		keys[i] = g.key()
	}
	return keys
}

func (g *generator) step() {
	p, id := g.p, g.session()
	switch g.r.IntN(31) {
	case 0, 1, 2:
		g.alloc(id)
	case 3, 4, 5, 6, 7, 8:
		g.register(id)
	case 9:
		p.do(id, &Delete{Keys: g.keys()})
	case 10:
		c := &Pin{Undo: g.r.IntN(2) == 0, Class: Class(1 + g.r.IntN(2)), Keys: g.keys(), Strict: g.r.IntN(4) == 0}
		if g.r.IntN(2) == 0 {
			c.Owner = fmt.Sprintf("op%d", g.r.IntN(3))
			if g.r.IntN(2) == 0 {
				c.Until = p.now + g.r.Uint64N(200)
			}
		}
		p.do(id, c)
	case 11:
		p.apply(Header{}, &ExpirePins{})
	case 12:
		p.apply(Header{}, &Sweep{Limit: uint32(g.r.IntN(40))})
	case 13:
		g.clear(id)
	case 14:
		g.session2(id)
	case 15:
		if regions := p.m.Regions(); len(regions) > 0 {
			x := regions[g.r.IntN(len(regions))]
			p.do(x.Owner, []Command{
				&ReturnRegion{x.ID, x.Epoch * g.r.Uint64N(2)}, &RevokeDone{x.ID, x.Epoch}, &EmptyRegion{x.ID, id}, &FreeRegion{x.ID}, &Mark{x.ID, id},
			}[g.r.IntN(5)])
		}
	case 16:
		if g.r.IntN(10) == 0 {
			d := p.m.Devices()[g.r.IntN(len(p.m.Devices()))]
			size := uint64(0)
			if g.r.IntN(2) == 0 {
				size = d.DataOffset + (8+g.r.Uint64N(24))*page
			}
			p.apply(Header{}, &Retire{Device: d.ID, Generation: d.Generation + 1, Size: size, Fenced: g.r.IntN(2) == 0})
		}
	case 17:
		g.touch()
	case 18:
		p.do(id, &Cancel{Seqs: []uint64{p.seqs[id] + 1 + g.r.Uint64N(3)}})
		p.seqs[id] += 4
	case 19:
		if g.r.IntN(5) == 0 {
			s := p.m.Settings()
			s.Policy = policy.Names()[g.r.IntN(len(policy.Names()))]
			p.apply(Header{}, &SetSettings{s})
		}
	case 20:
		p.apply(Header{}, &SetTenant{[]string{DefaultTenant, "acme"}[g.r.IntN(2)], TenantLimits{
			Guarantee: g.r.Uint64N(4) * g.r.Uint64N(16) * page, MaxPins: g.r.Uint64N(3) * g.r.Uint64N(8),
		}})
	case 21, 22, 23:
		g.copy()
	case 24:
		g.tiers()
	case 25, 26:
		g.name(id)
	case 27, 28, 29, 30:
		if g.maru == nil {
			g.maru = maruMirror{}
		}
		if p.m.Settings().Version >= VersionMaru {
			g.maru.step(g)
		}
	}
}

func (g *generator) touch() {
	p := g.p
	p.index++
	group := BeginGroup(nil, p.now, []Touch{{Slot(g.r.IntN(40)), 1 + uint32(g.r.IntN(3))}, {Slot(g.r.IntN(40)), 1}, {1 << 30, 1}})
	p.log = append(p.log, group)
	require.NoError(p.tb, p.m.Apply(p.index, group, &p.res))
}

func (g *generator) alloc(id SessionID) {
	req := &protocol.AllocRequest{
		Size: (1 + g.r.Uint64N(8)) * page, PageSize: page << g.r.IntN(2), NeedPages: g.r.Uint64N(4), Evict: g.r.IntN(4) > 0,
		Whole: g.r.IntN(8) == 0,
	}
	if g.r.IntN(3) == 0 {
		req.Keys, req.FreePages = g.keys(), g.r.Uint64N(3)
	}
	info, _ := g.p.m.Session(id)
	before := g.p.m.Stats().Tenants
	switch plan, _ := g.p.alloc(id, req); plan.Kind {
	case PlanMark:
		g.p.apply(Header{}, &Mark{plan.Region, id})
	case PlanEmpty:
		g.p.apply(Header{}, &EmptyRegion{plan.Region, plan.For})
	default: // applied by alloc, or nothing to apply
	}
	for i, x := range g.p.m.Stats().Tenants {
		if x.Name != info.Tenant {
			require.GreaterOrEqual(g.p.tb, x.Space, min(before[i].Space, x.Guarantee), "no other tenant is taken below its guarantee")
		}
	}
}

func (g *generator) register(id SessionID) {
	info, ok := g.p.m.Session(id)
	if !ok || len(info.Regions) == 0 {
		return
	}
	var entries []protocol.RegisterEntry
	for range 1 + g.r.IntN(3) {
		x, _ := g.p.m.Region(info.Regions[g.r.IntN(len(info.Regions))])
		e := protocol.RegisterEntry{
			Key: g.key(), RegionID: uint64(x.ID), Epoch: x.Epoch, KVOffset: g.r.Uint64N(10) * x.PageSize,
			KVLength: 1 + g.r.Uint64N(2*x.PageSize), Checksum: g.r.Uint64(), TTLMS: g.r.Uint64N(2) * 500,
			Replicas: g.r.Uint64N(4),
		}
		if g.r.IntN(2) == 0 {
			e.HasPrefix, e.Index = true, g.r.Uint64N(6)
			e.Hash, e.Parent = 100+e.Index, 99+e.Index
			e.Group = g.r.Uint64N(2)<<16 | 2
		}
		entries = append(entries, e)
	}
	var ctx *protocol.Context
	if g.r.IntN(2) == 0 {
		ctx = &protocol.Context{Model: fmt.Sprintf("m%d", g.r.IntN(3)), BlockSize: 16}
	}
	code, _ := g.p.do(id, &Register{Context: ctx, Entries: entries})
	require.Contains(g.p.tb, []protocol.Code{0, protocol.CodeSessionExpired, protocol.CodeCanceled}, code)
}

func (g *generator) clear(id SessionID) {
	if g.r.IntN(4) > 0 {
		return
	}
	g.p.do(id, []*Clear{
		{All: true}, {Prefix: []byte("key-1")}, {Context: &Context{Model: "m1"}}, {},
	}[g.r.IntN(4)])
	for slot := range g.p.m.table.end {
		if g.p.m.Live(slot) {
			require.Greater(g.p.tb, g.p.m.Birth(slot), g.p.m.head.clearedAll)
		}
	}
}

// session2 ends sessions in the ways in which they end.
func (g *generator) session2(id SessionID) {
	switch g.r.IntN(6) {
	case 0:
		g.p.apply(Header{}, &CloseSession{ID: id, Fenced: g.r.IntN(2) == 0})
	case 1:
		g.p.apply(Header{}, &Fence{ID: id})
	case 2:
		if info, ok := g.p.m.Session(id); ok {
			code, body := g.p.apply(Header{}, &OpenSession{Instance: info.Instance, TTLMS: 1000, Secret: g.r.Uint64(), Replaces: id, Proof: info.Secret})
			if r, err := DecodeSession(body); code == 0 && err == nil {
				g.sessions = append(g.sessions, r.ID)
			}
		}
	case 3:
		if g.r.IntN(30) == 0 {
			g.p.apply(Header{}, &NewIncarnation{Incarnation: g.p.m.Incarnation() + 1})
		}
	}
}

// verify compares lookups with a walk over everything that is there.
func (g *generator) verify() {
	m := g.p.m
	seen := map[[2]string]bool{}
	for slot := range m.table.end {
		if m.table.live(slot) {
			key := [2]string{m.Entry(slot).Tenant, string(m.Key(slot))}
			require.False(g.p.tb, seen[key], "a tenant's key is held once")
			seen[key] = true
			found, ok := m.Find(m.Tenant(key[0]), []byte(key[1]))
			require.Equal(g.p.tb, m.Live(slot), ok)
			if ok {
				require.Equal(g.p.tb, slot, found)
			}
		}
	}
}

// FuzzApply: no log entry, however corrupt, makes a machine panic.
func FuzzApply(f *testing.F) {
	p := namesPool(f)
	g := generator{r: rand.New(rand.NewPCG(5, 5)), p: p}
	p.device(16 * page)
	for range 200 {
		p.now += 3
		g.step()
	}
	for _, group := range p.log {
		f.Add(group)
	}
	// A device that shrank to less than its header has no room, rather than a negative one.
	p.apply(Header{}, &Retire{Device: 1, Generation: 99, Size: 1, Fenced: true})
	f.Add(p.log[len(p.log)-1])
	f.Fuzz(func(t *testing.T, group []byte) {
		q := namesPool(t)
		q.device(16 * page)
		a := q.open("a")
		_, r := q.alloc(a, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
		q.register(a, nil, entryAt("k", r, 0))
		var out Results
		if q.m.Apply(q.index+1, group, &out) == nil {
			q.check()
		}
	})
}
