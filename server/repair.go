package server

import (
	"slices"

	"larder/meta"
	"larder/protocol"
)

// repair has entries copied that lie on fewer nodes than was asked for: their nodes went, or none had room when they were
// stored. It returns nil if nothing can be done at the moment. What is to be done follows from the index alone, so that a
// new leader goes on with it.
func (p *tierPlan) repair() meta.Command {
	t, machine := &p.m.tiering, p.m.machine
	if machine.LackingCount() == 0 || p.tasks >= meta.MaxTasks || t.resting > p.now {
		return nil
	}
	var hosts []*target
	for _, to := range p.targets {
		if p.takes(to, repairs) {
			host := *to
			hosts = append(hosts, &host)
		}
	}
	if len(hosts) == 0 {
		return nil
	}
	p.spareOf(hosts)
	var best *target
	looked := 0
	last := machine.EachLacking(t.repairAt, func(s meta.Slot) bool {
		t.repairAt = s + 1
		if to := p.hostFor(hosts, s); to != nil {
			to.items = append(to.items, meta.Victim{Slot: s, Birth: machine.Birth(s)})
			if best == nil || len(to.items) > len(best.items) {
				best = to
			}
		}
		looked++
		return looked < drainWindow && (best == nil || len(best.items) < meta.MaxTaskItems)
	})
	if last { // from the first one on, the next time
		t.repairAt = 0
	}
	if best == nil {
		if last {
			t.resting = p.now + int64(repairRest)
		}
		return nil
	}
	return &meta.AddTask{TaskKind: meta.TaskRepair, Device: best.ID, Items: best.items}
}

// spareOf works out how much room the targets have that nobody needs to be evicted for: space in no region, and what is free
// in the regions of who serves the device. A copy that takes another's place would only have that one made again.
func (p *tierPlan) spareOf(hosts []*target) {
	at := map[meta.DeviceID]*target{}
	for _, to := range hosts {
		to.room = to.Free
		at[to.ID] = to
	}
	p.m.machine.RegionsIn(meta.RegionOwned, func(r meta.RegionInfo) {
		if to := at[r.Device]; to != nil && r.Owner == p.m.nodes.of(to.ID).session {
			to.room += r.Length - min(r.LiveBytes, r.Length)
		}
	})
}

// hostFor chooses the device that is to get a copy of an entry, and takes the room there: one on a node where it does not lie
// yet, in the tier where it is served the fastest if that has room, otherwise in a slower one. nil: there is none, or no need.
// What is away counts as being there: it is given up after a while, and a node that restarts should not have all copied that
// its disk has.
func (p *tierPlan) hostFor(hosts []*target, s meta.Slot) *target {
	machine := p.m.machine
	if p.places = machine.Locations(s, p.places[:0]); len(p.places) == 0 || !machine.Repairable(s) {
		return nil
	}
	if p.nodes = machine.KeptOn(s, p.nodes[:0]); len(p.nodes) >= machine.Replicas(s) {
		return nil
	}
	to, need := p.hostOff(hosts)
	if to != nil {
		to.room -= need
	}
	return to
}

// hostOff chooses among some devices one on none of p.nodes, with room for the entry that lies at p.places, and says how much
// it takes up.
func (p *tierPlan) hostOff(hosts []*target) (host *target, need uint64) {
	page := max(p.m.machine.Settings().PageSize, 1)
	need = (p.places[0].Length + page - 1) / page * page
	fastest := p.device(p.places[0].Device)
	for _, to := range hosts {
		if to.room < need || protocol.TierRank(to.Tier) < protocol.TierRank(fastest.Tier) || slices.Contains(p.nodes, to.Node) ||
			!slices.ContainsFunc(p.places, func(l meta.Location) bool { return p.reaches(to, p.device(l.Device)) }) {
			continue
		}
		return to, need
	}
	return nil, 0
}

// device describes a device that there is.
func (p *tierPlan) device(id meta.DeviceID) *meta.DeviceInfo {
	i, _ := slices.BinarySearchFunc(p.devices, id, func(d meta.DeviceInfo, id meta.DeviceID) int { return int(d.ID) - int(id) })
	return &p.devices[i]
}
