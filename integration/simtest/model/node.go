package model

import (
	"cmp"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// maxFinished is how many tasks are remembered when they are over, the one that is made included.
const maxFinished = 256

// home reports whether a session is one of a node that serves a device.
func (w *world) home(s *session) bool {
	return w.settings.Version >= meta.VersionTiers && s.info.Features&protocol.FeatureNode != 0
}

// contributes reports whether a session is a home that has regions on its own devices alone, and did not
// have any elsewhere when it ended.
func (w *world) contributes(s *session) bool {
	for _, r := range w.owned(s) {
		if r.device.Home != s.info.Instance || r.state == meta.RegionOrphaned {
			return false
		}
	}
	return w.home(s)
}

// inherit gives a home the regions of the session that it had before, under new epochs.
func (w *world) inherit(s *session) {
	if !w.home(s) {
		return
	}
	for _, old := range slices.Backward(w.sessionList()) {
		if old.open || !w.contributes(old) || old.info.Instance != s.info.Instance {
			continue
		}
		for _, r := range w.owned(old) {
			w.epochs++
			r.owner, r.epoch = s, w.epochs
		}
		w.forget(old)
		return
	}
}

func (w *world) setDevice(c *meta.SetDevice) result {
	d := w.devices[c.Device]
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refused(protocol.CodeUnsupported)
	case d == nil:
		return refused(protocol.CodeNotFound)
	case c.Mark:
		d.draining = c.Draining
		return result{}
	case c.Mode > meta.DeviceAway || c.Mode == meta.DeviceAway && d.Home == "":
		return refused(protocol.CodeBadRequest)
	}
	d.mode, d.until = c.Mode, c.UntilMS
	return result{}
}

// fencedRegion says that the owner of a region of an epoch writes there no more.
func (w *world) fencedRegion(c *meta.FencedRegion) result {
	r := w.regions[c.Region]
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refused(protocol.CodeUnsupported)
	case r == nil || r.epoch != c.Epoch:
		return refused(protocol.CodeStaleEpoch)
	case r.state == meta.RegionMarked:
		w.drain(r)
	case r.state == meta.RegionOrphaned:
		w.depart(r)
	}
	return result{}
}

func (t *task) over() bool { return t.State == meta.TaskFinished || t.State == meta.TaskCanceled }

// task returns the one with an id, nil if it is not known any more.
func (w *world) task(id meta.TaskID) *task {
	i := slices.IndexFunc(w.tasks, func(t *task) bool { return t.ID == id })
	if i < 0 {
		return nil
	}
	return w.tasks[i]
}

func (w *world) addTask(c *meta.AddTask) result {
	var over []*task
	for _, t := range w.tasks {
		if t.over() {
			over = append(over, t)
		}
	}
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refused(protocol.CodeUnsupported)
	case w.devices[c.Device] == nil:
		return refused(protocol.CodeNotFound)
	case c.TaskKind < meta.TaskDemote || c.TaskKind > meta.TaskRepair,
		len(c.Items) == 0 || len(c.Items) > meta.MaxTaskItems:
		return refused(protocol.CodeBadRequest)
	case len(w.tasks)-len(over) >= meta.MaxTasks:
		return refused(protocol.CodeBusy)
	}
	if len(over) >= maxFinished {
		forgotten := over[:len(over)-maxFinished+1]
		w.tasks = slices.DeleteFunc(w.tasks, func(t *task) bool { return slices.Contains(forgotten, t) })
	}
	w.births++
	w.tasks = append(w.tasks, &task{meta.TaskInfo{
		ID: meta.TaskID(w.births), Kind: c.TaskKind, Device: c.Device, MoveFrom: c.MoveFrom, Total: uint32(len(c.Items)),
		CreatedMS: w.now,
	}, c.Items})
	return result{value: meta.CountResult{Count: w.births}}
}

// taskDone notes how far a task has come. Saying so again changes nothing.
func (w *world) taskDone(c *meta.TaskDone) result {
	t := w.task(c.Task)
	switch {
	case t == nil || t.State == meta.TaskCanceled:
		return refused(protocol.CodeCanceled)
	case t.State == meta.TaskFinished || c.Done < t.Done:
		return result{}
	case c.Done > t.Total, uint64(c.Copied)+uint64(c.Skipped)+uint64(c.Failed) != uint64(c.Done-t.Done):
		return refused(protocol.CodeBadRequest)
	}
	t.Copied += uint64(c.Copied)
	t.Skipped += uint64(c.Skipped)
	t.Failed += uint64(c.Failed)
	t.Bytes += c.Bytes
	t.Done, t.State = c.Done, meta.TaskRunning
	if t.Done == t.Total {
		t.State, t.items = meta.TaskFinished, nil
	}
	return result{}
}

func (w *world) cancelTask(c *meta.CancelTask) result {
	t := w.task(c.Task)
	if t == nil {
		return refused(protocol.CodeNotFound)
	}
	t.cancel()
	return result{}
}

func (t *task) cancel() {
	if !t.over() {
		t.State, t.items = meta.TaskCanceled, nil
	}
}

// cancelTasks ends the tasks that copy to a device.
func (w *world) cancelTasks(to *device) {
	for _, t := range w.tasks {
		if t.Device == to.id {
			t.cancel()
		}
	}
}

// checkTasks verifies that tasks are few, in the order of their making, and not doubled.
func (w *world) checkTasks() error {
	running := 0
	for i, t := range w.tasks {
		if i > 0 && cmp.Compare(w.tasks[i-1].ID, t.ID) >= 0 || uint64(t.ID) > w.births {
			return w.violation("a task has an id of its own", "", t.ID)
		}
		if t.Copied+t.Skipped+t.Failed != uint64(t.Done) || t.Done > t.Total || (t.Done == t.Total) != (t.State == meta.TaskFinished) {
			return w.violation("what became of a task's entries adds up", "", t.TaskInfo)
		}
		if !t.over() {
			running++
		}
	}
	if running > meta.MaxTasks || len(w.tasks) > meta.MaxTasks+maxFinished {
		return w.violation("tasks are few", meta.MaxTasks, len(w.tasks))
	}
	return nil
}

// compareTasks compares the tasks and what they have left to do.
func (w *world) compareTasks(m *meta.Machine) error {
	var want []meta.TaskInfo
	for _, t := range w.tasks {
		want = append(want, t.TaskInfo)
		if got, ok := m.Task(t.ID); !ok || got != t.TaskInfo {
			return w.violation("the state: task", t.TaskInfo, got)
		}
		type item struct {
			meta.Victim
			live bool
		}
		var items, got []item
		for _, v := range t.items[min(len(t.items), int(t.Done)):] {
			e := w.at(v.Slot)
			items = append(items, item{v, e != nil && e.birth == v.Birth && w.alive(e)})
		}
		m.TaskItems(t.ID, int(t.Done), func(_ int, v meta.Victim, live bool) bool {
			got = append(got, item{v, live})
			return true
		})
		if err := w.same("what a task has left to do", items, got); err != nil {
			return err
		}
	}
	return w.same("tasks", want, emptyNil(m.Tasks()))
}

// compareLocations compares where the bytes of each entry lie, and are served.
func (w *world) compareLocations(m *meta.Machine) error {
	for _, e := range w.held() {
		var served []meta.Location
		for _, l := range e.served() {
			served = append(served, l.describe())
		}
		if err := w.same("locations of "+e.key, served, m.Locations(e.slot, nil)); err != nil {
			return err
		}
		for _, r := range w.regionList() {
			var want, got meta.Location
			for _, l := range e.at {
				if l.region == r {
					want = l.describe()
				}
			}
			if found := m.LocationIn(e.slot, r.id, &got); found != (want.Region != 0) || got != want {
				return w.violation("the state: location of "+e.key+" in a region", want, got)
			}
		}
		if m.Copies(e.slot) != (len(e.at) > 1) {
			return w.violation("the state: copies of "+e.key, len(e.at)-1, m.Copies(e.slot))
		}
	}
	return nil
}

// wish has an entry lie on at least so many nodes.
func (w *world) wish(e *entry, nodes uint64) {
	if w.settings.Version >= meta.VersionTiers {
		e.nodes = max(e.nodes, min(nodes, protocol.MaxCopies+1))
	}
}

// nodesOf are the nodes that some locations are on.
func nodesOf(at []*location) map[string]bool {
	nodes := map[string]bool{}
	for _, l := range at {
		nodes[l.region.device.Node] = true
	}
	return nodes
}

// waive gives a node up that an entry was to lie on, if a location that goes for its space is the only one there and there
// are not enough others.
func (w *world) waive(l *location) {
	e := l.entry
	others := nodesOf(slices.DeleteFunc(slices.Clone(e.at), func(x *location) bool { return x == l }))
	if !others[l.region.device.Node] && uint64(len(others)) < e.nodes {
		e.nodes--
	}
}

// compareReplicas compares on how many nodes entries are to lie, and which lie on fewer.
func (w *world) compareReplicas(m *meta.Machine) error {
	var want, got []meta.Slot
	for _, e := range w.held() {
		if n := m.Replicas(e.slot); uint64(n) != max(e.nodes, 1) {
			return w.violation("the state: nodes that "+e.key+" is to lie on", e.nodes, n)
		}
		if uint64(len(nodesOf(e.at))) < e.nodes {
			want = append(want, e.slot)
		}
	}
	slices.Sort(want)
	m.EachLacking(0, func(s meta.Slot) bool {
		got = append(got, s)
		return true
	})
	return w.same("entries that lie on too few nodes", want, got)
}
