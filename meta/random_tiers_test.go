package meta

import (
	"fmt"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// checkPlaces verifies the chains of locations, and that tasks and their entries know each other.
func (p *pool) checkPlaces() {
	t, m := p.tb, p.m
	chained := uint64(0)
	for slot := range m.table.end {
		x := m.table.at(slot)
		if x.birth == 0 {
			continue
		}
		if x.flags&flagMoved != 0 {
			first := m.places.at(x.places)
			require.Equal(t, x.region, first.region)
			require.Equal(t, x.offset, first.offset)
		}
		devices := map[*device]bool{}
		m.locations(x, func(_ placeID, r *region, _ uint64) bool {
			require.False(t, devices[r.device] && r.sound(), "an entry has one sound location on a device")
			devices[r.device] = devices[r.device] || r.sound()
			return true
		})
		for at := x.places; at != 0; at = m.places.at(at).next {
			require.Equal(t, slot, m.places.at(at).slot)
			chained++
		}
		for at := m.firstCopy(x); at != 0 && m.places.at(at).next != 0; at = m.places.at(at).next {
			require.True(t, m.before(m.places.at(at), m.places.at(m.places.at(at).next)))
		}
		require.LessOrEqual(t, m.copies(x), protocol.MaxCopies)
	}
	require.Equal(t, m.places.count, chained)
	tasked := 0
	for _, x := range m.tasks {
		if !x.over() {
			tasked += len(x.items) - int(x.Done)
		}
	}
	require.GreaterOrEqual(t, tasked, len(m.tasked))
	children := map[Slot]uint32{}
	for slot := range m.table.end {
		if x := m.table.at(slot); x.birth != 0 && m.validParent(x) != None && !m.regionOf(x).slow() {
			children[m.validParent(x)]++
		}
	}
	for slot := range m.table.end {
		if x := m.table.at(slot); x.birth != 0 {
			require.Equal(t, children[slot], x.children)
		}
	}
}

// homeOf is a device with a home, as a node serves it.
type homeOf struct {
	device   DeviceID
	instance string
	session  SessionID
}

// nodes adds devices of two tiers with homes.
func (g *generator) nodes() {
	for i, tier := range []string{"dram", "ssd", "ssd"} {
		h := &homeOf{instance: fmt.Sprintf("node/n%d", i)}
		g.openHome(h)
		code, body := g.p.apply(Header{}, &AddDevice{
			UUID: fmt.Sprintf("home-%d", i), Node: fmt.Sprintf("n%d", i), Tier: tier, Coherence: "hardware", Size: 24 * page,
			Align: 4096, Generation: 7, Home: h.instance, Volatile: tier == "dram",
		})
		require.Zero(g.p.tb, code)
		r, err := DecodeCount(body)
		require.NoError(g.p.tb, err)
		h.device = DeviceID(r.Count)
		g.homes = append(g.homes, h)
	}
}

func (g *generator) openHome(h *homeOf) {
	code, body := g.p.apply(Header{}, &OpenSession{
		Instance: h.instance, TTLMS: 1000, Secret: g.r.Uint64(), Features: protocol.FeatureNode | protocol.FeatureCopies | protocol.FeaturePush,
	})
	if r, err := DecodeSession(body); code == 0 && err == nil {
		h.session = r.ID
	}
}

// copy registers a copy of some entry, by a home or by a client, which may be refused.
func (g *generator) copy() {
	p := g.p
	if len(g.homes) == 0 {
		return
	}
	h := g.homes[g.r.IntN(len(g.homes))]
	id := h.session
	if g.r.IntN(4) == 0 {
		id = g.session()
	} else {
		p.alloc(id, &protocol.AllocRequest{Size: 4 * page, PageSize: page, NeedPages: 1 + g.r.Uint64N(3), Evict: true, Device: uint64(h.device)})
	}
	info, ok := p.m.Session(id)
	if !ok || len(info.Regions) == 0 || p.m.table.end == 0 {
		return
	}
	var entries []protocol.RegisterEntry
	for range 1 + g.r.IntN(4) {
		slot := Slot(g.r.IntN(int(p.m.table.end)))
		if !p.m.table.live(slot) {
			continue
		}
		r, _ := p.m.Region(info.Regions[g.r.IntN(len(info.Regions))])
		x := p.m.table.at(slot)
		entries = append(entries, protocol.RegisterEntry{
			Key: p.m.Key(slot), RegionID: uint64(r.ID), Epoch: r.Epoch, KVOffset: g.r.Uint64N(6) * r.PageSize,
			KVLength: uint64(x.length), Checksum: x.checksum, Copy: true, Of: x.birth, Slot: uint64(slot), Replicas: g.r.Uint64N(4),
			MoveFrom: []uint64{0, 0, 1, 3, ^uint64(0)}[g.r.IntN(5)],
		})
	}
	if len(entries) > 0 {
		p.do(id, &Register{Entries: entries})
	}
}

// tiers has devices go away and come back, homes end and return, and tasks run.
func (g *generator) tiers() {
	p := g.p
	if len(g.homes) == 0 {
		return
	}
	h := g.homes[g.r.IntN(len(g.homes))]
	d, ok := p.m.Device(h.device)
	if !ok {
		return
	}
	switch g.r.IntN(7) {
	case 0:
		p.apply(Header{}, &SetDevice{
			Device: d.ID, Mode: DeviceMode(g.r.IntN(2)), UntilMS: g.r.Uint64N(2) * p.now, Mark: g.r.IntN(3) == 0, Draining: g.r.IntN(2) == 0,
		})
	case 1:
		p.apply(Header{}, &CloseSession{ID: h.session, Fenced: g.r.IntN(2) == 0})
		if d.Tier == "dram" {
			p.apply(Header{}, &Retire{Device: d.ID, Generation: d.Generation + 1, Fenced: true})
		}
		g.openHome(h)
	case 2:
		items := append(p.m.PlanDemote(DeviceID(1+g.r.IntN(3)), d.ID, 4*page, 3, g.r.Uint64()), p.m.PlanDrain(DeviceID(1+g.r.IntN(5)), 2)...)
		p.apply(Header{}, &AddTask{TaskKind: TaskKind(g.r.IntN(6)), Device: d.ID, MoveFrom: DeviceID(g.r.IntN(3)), Items: items})
	case 3, 4:
		for _, x := range p.m.Tasks() {
			p.do(h.session, &TaskDone{Task: x.ID, Done: x.Done + 1, Copied: 1})
		}
	case 5:
		if all := p.m.Tasks(); len(all) > 0 {
			p.apply(Header{}, &CancelTask{Task: all[g.r.IntN(len(all))].ID})
		}
	case 6:
		if all := p.m.Regions(); len(all) > 0 {
			x := all[g.r.IntN(len(all))]
			p.apply(Header{}, &FencedRegion{Region: x.ID, Epoch: x.Epoch})
		}
	}
}
