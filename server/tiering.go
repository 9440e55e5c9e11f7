package server

import (
	"log/slog"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Bounds of the leader's planning of tiers.
const (
	// tierInterval is how often the leader looks for something to copy. Each time it makes one task at most, of 1024 entries:
	// far more than a device can take in that time, and about a millisecond of its own.
	tierInterval = 100 * time.Millisecond
	// maxTasksPerTarget demotions, and as many drains, wait for one device at a time: some seconds of work for it.
	maxTasksPerTarget = 8
	// demotePause is how long a device is left alone that could take nothing of a task, since it is full or ill.
	demotePause = 10 * time.Second
	// demoteRest is how long a device is not looked at again in which nothing cold was found to copy: a look can pass over
	// thousands of entries of every client.
	demoteRest = time.Second
	// maxRepairsPerTarget is how many repairs wait for one device: it goes on with others' reads and writes meanwhile.
	maxRepairsPerTarget = 1
	// repairRest is how long no entry is looked for that lies on too few nodes when none was found that could be helped.
	repairRest = time.Second
	// drainWindow is how many entries of a device that is given up are looked at for those that lie nowhere else.
	drainWindow = 8 * meta.MaxTaskItems
)

// tiering is what the leader's planner remembers.
type tiering struct {
	at       int64 // when it last looked
	planning bool  // a command of it is on its way
	turn     meta.DeviceID
	paused   map[meta.DeviceID]int64  // targets: until when
	rests    map[meta.DeviceID]int64  // sources of demotions: until when
	looks    uint64                   // for what is to be demoted
	ended    map[meta.TaskID]struct{} // tasks whose end has been seen; nil = this leader has not looked yet
	repairAt meta.Slot                // the next entry to look at of those that lie on too few nodes
	resting  int64                    // until when none is looked for
}

// tickTiers plans what is to be copied, one task at a time: what lies on too few nodes, then what has to leave devices that
// are given up, then what is cold in tiers that fill up. The caller holds state for reading, and mu.
func (m *Master) tickTiers(now int64) {
	t := &m.tiering
	if t.planning || now-t.at < int64(tierInterval) || len(m.nodes.homes)+len(m.nodes.exposers) == 0 || !m.tiers() ||
		m.graceMS(now) > 0 { // what may be leased is not known yet
		return
	}
	t.at = now
	p := m.newTierPlan(now)
	if p.needless != 0 {
		t.planning = m.chore(&meta.CancelTask{Task: p.needless}, &t.planning)
		return
	}
	if cmd := p.repair(); cmd != nil {
		t.planning = m.chore(cmd, &t.planning)
		return
	}
	devices := p.devices
	first, _ := slices.BinarySearchFunc(devices, t.turn+1, func(d meta.DeviceInfo, id meta.DeviceID) int { return int(d.ID) - int(id) })
	for i := range devices { // by turns, so that none waits for another for ever
		d := &devices[(first+i)%len(devices)]
		cmd := p.drain(d)
		if cmd == nil {
			cmd = p.demote(d)
		}
		if cmd != nil {
			t.turn = d.ID
			t.planning = m.chore(cmd, &t.planning)
			return
		}
	}
}

// Kinds of tasks that the planner makes, and how many of each wait for one device.
const (
	demotions = iota
	drains
	repairs
	kinds
)

var maxWaiting = [kinds]int{maxTasksPerTarget, maxTasksPerTarget, maxRepairsPerTarget}

// tierPlan is one look at the devices and tasks.
type tierPlan struct {
	m        *Master
	now      int64
	devices  []meta.DeviceInfo
	targets  []*target
	lows     meta.Watermarks
	tasks    int                          // that are not over
	waiting  map[meta.DeviceID][kinds]int // tasks for a device that are not over, by kind
	away     map[meta.DeviceID]bool       // devices that do not keep what lies there: away or given up
	demoting uint64                       // entries that demotions have yet to copy
	places   []meta.Location              // scratch
	nodes    []string                     // scratch
	needless meta.TaskID                  // a drain of a device that is not given up any more
}

// newTierPlan looks at the devices and tasks.
func (m *Master) newTierPlan(now int64) *tierPlan {
	devices := m.machine.Devices()
	p := &tierPlan{
		m: m, now: now, devices: devices, targets: m.targetsOf(devices, func(*meta.DeviceInfo) bool { return true }),
		waiting: map[meta.DeviceID][kinds]int{}, away: map[meta.DeviceID]bool{},
	}
	set := m.machine.Settings()
	p.lows, _ = set.Watermarks() // those that cannot be read are not set
	draining := map[meta.DeviceID]bool{}
	for i := range p.devices {
		d := &p.devices[i]
		draining[d.ID] = d.Draining
		if d.Draining || d.Mode != meta.DeviceServing {
			p.away[d.ID] = true
		}
	}
	seen := map[meta.TaskID]struct{}{}
	for _, t := range m.machine.Tasks() {
		if t.State >= meta.TaskFinished {
			seen[t.ID] = struct{}{}
			if _, old := m.tiering.ended[t.ID]; !old && m.tiering.ended != nil {
				m.taskEnded(&t, now)
			}
			continue
		}
		p.waits(&t)
		if t.Kind == meta.TaskDrain && !draining[t.MoveFrom] {
			p.needless = t.ID
		}
	}
	m.tiering.ended = seen
	return p
}

// waits counts a task that is not over.
func (p *tierPlan) waits(t *meta.TaskInfo) {
	p.tasks++
	n := p.waiting[t.Device]
	switch t.Kind {
	case meta.TaskDemote:
		n[demotions]++
		p.demoting += uint64(t.Total - t.Done)
	case meta.TaskDrain:
		n[drains]++
	case meta.TaskRepair:
		n[repairs]++
	default:
	}
	p.waiting[t.Device] = n
}

// taskEnded counts a task that is over, and leaves its device alone for a while if it could take nothing of it.
func (m *Master) taskEnded(t *meta.TaskInfo, now int64) {
	if t.Kind == meta.TaskDemote {
		m.n.DemotedBytes.Add(t.Bytes)
	}
	if t.State != meta.TaskFinished || t.Copied > 0 {
		return
	}
	if t.Failed == 0 {
		if t.Kind == meta.TaskRepair { // what was not to be copied may be planned again at once
			m.tiering.paused[t.Device] = now + int64(repairRest)
		}
		return
	}
	m.cfg.Logger.Warn("nothing of a task could be copied: no more for a while", slog.Uint64("task", uint64(t.ID)),
		slog.String("kind", t.Kind.String()), slog.Uint64("device", uint64(t.Device)), slog.Uint64("failed", t.Failed))
	m.tiering.paused[t.Device] = now + int64(demotePause)
}

// takes reports whether a device can be given another task, of those that waiting counts at index kind.
func (p *tierPlan) takes(to *target, kind int) bool {
	return p.waiting[to.ID][kind] < maxWaiting[kind] && p.m.tiering.paused[to.ID] <= p.now
}

// demote copies the cold end of a device below, if it is used above the watermark. It returns nil if there is nothing to do.
func (p *tierPlan) demote(d *meta.DeviceInfo) meta.Command {
	goal := p.coldBytes(d)
	if goal == 0 || p.tasks >= meta.MaxTasks || p.m.tiering.rests[d.ID] > p.now {
		return nil
	}
	if goal = min(goal, p.uncopied(d)); goal == 0 {
		return nil
	}
	p.m.tiering.looks++
	var below []*target
	for _, to := range p.targets {
		if protocol.TierRank(to.Tier) > protocol.TierRank(d.Tier) && p.takes(to, demotions) && p.reaches(to, d) {
			below = append(below, to)
		}
	}
	firstWith(below, func(to *target) bool { return to.Node == d.Node }) // its bytes need not travel
	for _, to := range below {
		if items := p.m.machine.PlanDemote(d.ID, to.ID, goal, meta.MaxTaskItems, p.m.tiering.looks); len(items) > 0 {
			return &meta.AddTask{TaskKind: meta.TaskDemote, Device: to.ID, Items: items}
		}
	}
	p.m.tiering.rests[d.ID] = p.now + int64(demoteRest)
	return nil
}

// reaches reports whether who serves a device can read another: by transfer, or since it is on the same host.
func (p *tierPlan) reaches(to *target, from *meta.DeviceInfo) bool {
	return p.m.nodes.of(from.ID) != nil || from.Path != "" && (to.Node == from.Node || to.BootID != "" && to.BootID == from.BootID)
}

// coldBytes is how much of a device should have copies below: its coldest part, up to the watermark, once it is used above
// that.
func (p *tierPlan) coldBytes(d *meta.DeviceInfo) uint64 {
	low := p.lows.For(d.Tier, d.ID)
	room := roomOf(d)
	if p.away[d.ID] || d.LiveBytes <= room/100*low {
		return 0
	}
	return room / 100 * (100 - low)
}

// uncopied is how much of what should have copies below a device has none yet, that of faster devices included: which
// entries the copies there are of is known only by looking at each.
func (p *tierPlan) uncopied(d *meta.DeviceInfo) uint64 {
	want, have := uint64(0), p.demoting*(d.LiveBytes/max(d.Locations, 1))
	for i := range p.devices {
		if x := &p.devices[i]; protocol.TierRank(x.Tier) > protocol.TierRank(d.Tier) {
			have += x.CopyBytes
		} else {
			want += p.coldBytes(x)
		}
	}
	return want - min(have, want)
}

// drain empties a device that is given up: what lies nowhere else is moved to other devices, and so is what would lie on fewer
// nodes than was asked for, as far as others have room. Regions of which nothing is left to move are asked of their owners. It
// returns nil if there is nothing to do at the moment.
func (p *tierPlan) drain(d *meta.DeviceInfo) meta.Command {
	if !d.Draining || d.Mode != meta.DeviceServing {
		return nil
	}
	hosts := p.hostsFor(d)
	if region := p.spare(d, meta.RegionOwned, hosts); region != 0 {
		return &meta.Mark{Region: region}
	}
	if region := p.spare(d, meta.RegionDeparted, hosts); region != 0 {
		return &meta.EmptyRegion{Region: region}
	}
	if p.tasks >= meta.MaxTasks {
		return nil
	}
	var free []*target
	for _, to := range p.targets {
		if p.takes(to, drains) && p.reaches(to, d) {
			free = append(free, to)
		}
	}
	firstWith(free, func(to *target) bool { return to.Tier == d.Tier })
	hosts = slices.DeleteFunc(hosts, func(to *target) bool { // what is on its way there is not in its room yet
		return p.waiting[to.ID][drains] > 0 || !p.takes(to, drains)
	})
	var best *target
	for _, v := range p.m.machine.PlanDrain(d.ID, drainWindow) {
		to := p.moveTo(d, v.Slot, free, hosts)
		if to != nil && len(to.items) < meta.MaxTaskItems {
			if to.items = append(to.items, v); best == nil || len(to.items) > len(best.items) {
				best = to
			}
		}
	}
	if best == nil {
		return nil
	}
	return &meta.AddTask{TaskKind: meta.TaskDrain, Device: best.ID, MoveFrom: d.ID, Items: best.items}
}

// hostsFor lists the devices that could take replicas from one that is given up, with the room that they have for that. Those
// that have just failed to take anything are not among them: a drain does not wait for what may never be.
func (p *tierPlan) hostsFor(d *meta.DeviceInfo) (hosts []*target) {
	for _, to := range p.targets {
		if p.m.tiering.paused[to.ID] <= p.now {
			host := *to
			hosts = append(hosts, &host)
		}
	}
	p.spareOf(hosts)
	firstWith(hosts, func(to *target) bool { return to.Tier == d.Tier })
	return hosts
}

// moveTo chooses where an entry is to be moved from a device that is given up, of those that take what lies there alone and
// those that take replicas. nil: nowhere, or it need not be.
func (p *tierPlan) moveTo(d *meta.DeviceInfo, s meta.Slot, free, hosts []*target) *target {
	if !p.elsewhere(s) {
		var l meta.Location
		p.m.machine.Location(s, &l)
		return p.m.roomFor(free, s, l.Length)
	}
	if !p.thinned(d, s) || !p.m.machine.Repairable(s) {
		return nil
	}
	to, need := p.hostOff(hosts)
	if to != nil {
		to.room -= need
	}
	return to
}

// thinned reports whether an entry would lie on fewer nodes than was asked for when it has left a device that is given up. The
// caller has called elsewhere.
func (p *tierPlan) thinned(d *meta.DeviceInfo, s meta.Slot) bool {
	want := p.m.machine.Replicas(s)
	if want < 2 || len(p.places) == 0 {
		return false
	}
	p.nodes = p.m.machine.StaysOn(s, p.nodes[:0])
	return len(p.nodes) < want && !slices.Contains(p.nodes, d.Node)
}

// stays reports whether an entry is yet to be moved from a device that is given up: it lies nowhere else, or a replica of it
// can be made.
func (p *tierPlan) stays(d *meta.DeviceInfo, s meta.Slot, hosts []*target) bool {
	if !p.elsewhere(s) {
		return true
	}
	if !p.thinned(d, s) {
		return false
	}
	if p.m.machine.Tasked(s) {
		return true
	}
	to, _ := p.hostOff(hosts)
	return to != nil && p.m.machine.Repairable(s)
}

// firstWith moves the targets that have a property to the front, without changing their order else.
func firstWith(list []*target, has func(*target) bool) {
	slices.SortStableFunc(list, func(a, b *target) int {
		switch x, y := has(a), has(b); {
		case x == y:
			return 0
		case x:
			return -1
		default:
			return 1
		}
	})
}

// elsewhere reports whether an entry is served from a device that keeps it.
func (p *tierPlan) elsewhere(slot meta.Slot) bool {
	p.places = p.m.machine.Locations(slot, p.places[:0])
	return slices.ContainsFunc(p.places, func(l meta.Location) bool { return !p.away[l.Device] })
}

// spare finds a region of a device that is given up in which nothing stays, so that it can be asked of its owner, or emptied if
// it has none any more; 0 if there is none.
func (p *tierPlan) spare(d *meta.DeviceInfo, st meta.RegionState, hosts []*target) (found meta.RegionID) {
	looked := 0
	p.m.machine.RegionsIn(st, func(r meta.RegionInfo) {
		if r.Device != d.ID || found != 0 || r.Pinned > 0 || looked >= drainWindow {
			return
		}
		stays := false
		p.m.machine.EachEntry(r.ID, func(s meta.Slot) bool {
			looked++
			stays = p.m.machine.Live(s) && p.stays(d, s, hosts)
			return !stays && looked < drainWindow
		})
		if !stays && looked < drainWindow {
			found = r.ID
		}
	})
	return found
}
