package model

import (
	"cmp"
	"fmt"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// home is a device that a node serves, and the name of its sessions.
type home struct{ instance, uuid, tier string }

// session is the home's open one, 0 if it has none.
func (g *generator) homeSession(h home) meta.SessionID {
	id, _ := g.p.m.SessionOf(h.instance)
	return id
}

func (g *generator) homeDevice(h home) meta.DeviceInfo {
	all := g.p.m.Devices()
	i := slices.IndexFunc(all, func(d meta.DeviceInfo) bool { return d.UUID == h.uuid })
	if i < 0 {
		return meta.DeviceInfo{}
	}
	return all[i]
}

// nodes draws what homes do, or what is done to them: first of all they are there.
func (g *generator) nodes(id meta.SessionID, n int) command {
	h := pick(g, g.homes)
	d, node := g.homeDevice(h), g.homeSession(h)
	switch {
	case g.one(40), d.ID == 0 && !g.one(4):
		return command{Command: g.joins(h)}
	case node == 0 && !g.one(4):
		features := protocol.FeaturePush
		if g.p.m.Settings().Version >= meta.VersionTiers { // before it a leader grants no others
			features |= protocol.FeatureNode | protocol.FeatureCopies
		}
		return command{Command: &meta.OpenSession{
			Instance: h.instance, Tenant: pick(g, []string{"", "acme"}), TTLMS: 1000, Secret: g.Uint64(), Features: features,
		}}
	}
	switch n {
	case 0, 1:
		return g.protected(node, g.homeAlloc(node, d.ID))
	case 2, 3, 4:
		return g.protected(node, &meta.Register{Entries: g.copies(node)})
	case 5:
		return g.protected(id, &meta.Register{Entries: g.copies(id)})
	case 6:
		return g.protected(id, g.replicas(id))
	case 7:
		return command{Command: g.away(d, node)}
	case 8:
		return command{Command: g.task(d)}
	case 9:
		return g.protected(node, g.taskDone())
	default:
		return command{Command: g.fencedRegion()}
	}
}

func (g *generator) joins(h home) meta.Command {
	return &meta.AddDevice{
		UUID: h.uuid, Node: fmt.Sprint("n", g.IntN(3)), Tier: h.tier, Coherence: "hardware",
		Size: (16+g.Uint64N(16))*page + header, DataOffset: header,
		Align: page, Generation: 7, Home: h.instance, Volatile: h.tier == "dram", NUMA: g.Uint64N(3),
	}
}

func (g *generator) homeAlloc(node meta.SessionID, d meta.DeviceID) meta.Command {
	plan := g.p.m.PlanAlloc(node, &protocol.AllocRequest{
		Size: (2 + g.Uint64N(6)) * page, PageSize: page << (g.IntN(4) / 3), NeedPages: 1 + g.Uint64N(3), Evict: true, Device: uint64(d),
	}, guard{g.Rand}, false)
	if plan.Kind != meta.PlanCommand {
		return &meta.Alloc{Device: d, Size: (2 + g.Uint64N(6)) * page, PageSize: page}
	}
	return &plan.Cmd
}

// any returns a slot, mostly of an entry that is held.
func (g *generator) any() meta.Slot {
	slot := meta.Slot(0)
	for range 9 {
		if slot = meta.Slot(g.IntN(g.keyCount)); g.p.m.Birth(slot) != 0 {
			break
		}
	}
	return slot
}

// wished is on how many nodes an entry is to lie: mostly on one.
func (g *generator) wished() uint64 { return []uint64{0, 0, 0, 1, 2, 2, 3, 4, 9}[g.IntN(9)] }

// copied returns the slot of an entry that lies in more places than others.
func (g *generator) copied() meta.Slot {
	best, most := g.any(), 0
	for range 6 {
		slot := g.any()
		if g.p.m.Birth(slot) == 0 {
			continue
		}
		if n := len(g.p.m.Locations(slot, nil)); n > most {
			best, most = slot, n
		}
	}
	return best
}

// copies makes copies of entries in a session's regions, most of them right.
func (g *generator) copies(id meta.SessionID) []protocol.RegisterEntry {
	info, _ := g.p.m.Session(id)
	entries := []protocol.RegisterEntry{}
	for range 1 + g.IntN(3) {
		e := protocol.RegisterEntry{Copy: true, Key: g.key(), KVLength: page, Of: g.Uint64N(9), Replicas: g.wished()}
		slot := g.any()
		if g.one(3) {
			slot = g.copied()
		}
		if g.p.m.Birth(slot) != 0 {
			x := g.p.m.Entry(slot)
			e.Key, e.KVLength, e.Checksum = slices.Clone(g.p.m.Key(slot)), x.Length, x.Checksum*g.Uint64N(3)
			e.Slot, e.Of = uint64(slot), g.p.m.Birth(slot)
			if e.Checksum != x.Checksum && !g.one(20) {
				e.Checksum = x.Checksum
			}
		}
		if len(info.Regions) > 0 {
			g.freePage(&e, pick(g, info.Regions))
		}
		switch g.IntN(40) {
		case 0:
			e.Of++
		case 1:
			e.Of = 0
		case 2:
			e.Slot++
		case 3:
			e.KVLength++
		case 4:
			e.Epoch--
		case 5:
			e.Touch = true
		case 6:
			if all := g.p.m.Regions(); len(all) > 0 {
				x := pick(g, all)
				e.RegionID, e.Epoch = uint64(x.ID), x.Epoch
			}
		case 7, 8, 9, 10:
			e.MoveFrom = 1 + g.Uint64N(6)
		case 11, 12:
			e.MoveFrom = ^uint64(0) >> g.IntN(40)
		}
		entries = append(entries, e)
	}
	return entries
}

// freePage has an entry lie in a region, on a page that is free more often than not.
func (g *generator) freePage(e *protocol.RegisterEntry, id meta.RegionID) {
	r, _ := g.p.m.Region(id)
	e.RegionID, e.Epoch = uint64(r.ID), r.Epoch
	for range 5 {
		e.KVOffset = g.Uint64N(r.Length/r.PageSize) * r.PageSize
		runs := g.p.m.Occupied(id)
		taken := false
		for i := 0; i < len(runs); i += 2 {
			taken = taken || e.KVOffset < runs[i]+runs[i+1] && runs[i] < e.KVOffset+e.KVLength
		}
		if !taken {
			return
		}
	}
}

// replicas stores an entry and a copy of it at once.
func (g *generator) replicas(id meta.SessionID) meta.Command {
	c, ok := g.register(id).(*meta.Register)
	info, _ := g.p.m.Session(id)
	if !ok || len(info.Regions) == 0 {
		return &meta.Sweep{Limit: 3}
	}
	for _, e := range c.Entries {
		g.freePage(&e, pick(g, info.Regions))
		e.Copy, e.Touch = true, false
		c.Entries = append(c.Entries, e)
	}
	return c
}

// away ends a home, or changes how its device is used.
func (g *generator) away(d meta.DeviceInfo, node meta.SessionID) meta.Command {
	if all := g.p.m.Devices(); len(all) > 0 && g.one(8) {
		d = pick(g, all)
	}
	switch n := g.IntN(8); {
	case n < 2:
		return &meta.CloseSession{ID: node, Fenced: g.one(2)}
	case n == 2:
		return &meta.Retire{Device: d.ID, Generation: d.Generation + 1, Fenced: g.one(2)}
	case n == 3 && g.one(4):
		return pick(g, []meta.Command{&meta.SetDevice{Device: d.ID + 50}, &meta.DropDevice{Device: d.ID}})
	default:
		return &meta.SetDevice{
			Device: d.ID, Mode: meta.DeviceMode(g.IntN(9) / 4), UntilMS: g.Uint64N(3) * g.p.now, Mark: g.one(3), Draining: g.one(2),
		}
	}
}

// task has a device's home copy what the leader would have it copy, or anything.
func (g *generator) task(d meta.DeviceInfo) meta.Command {
	c := &meta.AddTask{TaskKind: meta.TaskKind(1 + g.IntN(4)), Device: d.ID, MoveFrom: meta.DeviceID(g.IntN(4))}
	switch g.IntN(4) {
	case 0:
		c.Items = g.p.m.PlanDemote(meta.DeviceID(1+g.IntN(4)), d.ID, 8*page, 1+g.IntN(4), g.Uint64())
	case 1:
		c.Items = g.p.m.PlanDrain(meta.DeviceID(1+g.IntN(6)), 1+g.IntN(4))
	default:
		for range 1 + g.IntN(3) {
			slot := g.any()
			c.Items = append(c.Items, meta.Victim{Slot: slot, Birth: cmp.Or(g.p.m.Birth(slot), 3)})
		}
	}
	switch g.IntN(16) {
	case 0:
		c.Device = meta.DeviceID(g.IntN(60))
	case 1:
		c.TaskKind = meta.TaskKind(g.IntN(9))
	}
	return c
}

// taskDone says how far some task has come, rightly or not, or ends it.
func (g *generator) taskDone() meta.Command {
	all := g.p.m.Tasks()
	if len(all) == 0 || g.one(30) {
		return &meta.CancelTask{Task: meta.TaskID(g.Uint64N(9))}
	}
	t := pick(g, all)
	if g.one(6) {
		return &meta.CancelTask{Task: t.ID}
	}
	c := &meta.TaskDone{Task: t.ID, Done: t.Done, Bytes: g.Uint64N(9) * page}
	for range g.IntN(3) {
		c.Done++
		*pick(g, []*uint32{&c.Copied, &c.Skipped, &c.Failed})++
	}
	if g.one(12) {
		c.Done -= min(c.Done, g.Uint32N(3))
	}
	return c
}

func (g *generator) fencedRegion() meta.Command {
	all := g.p.m.Regions()
	for _, r := range all {
		if r.State == meta.RegionMarked || r.State == meta.RegionOrphaned {
			return &meta.FencedRegion{Region: r.ID, Epoch: r.Epoch - g.Uint64N(5)/4}
		}
	}
	if len(all) == 0 {
		return &meta.FencedRegion{Region: 3, Epoch: 4}
	}
	r := pick(g, all)
	return &meta.FencedRegion{Region: r.ID, Epoch: r.Epoch - g.Uint64N(5)/4}
}
