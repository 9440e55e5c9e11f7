package meta

import (
	"encoding/binary"
	"slices"

	"larder/protocol"
)

// TaskID names a task for ever. 0 is none.
type TaskID uint64

// TaskKind says why entries are copied.
type TaskKind uint8

// Kinds of tasks.
const (
	TaskDemote TaskKind = iota + 1 // ahead of their eviction, to a slower tier
	TaskCopy                       // since somebody asked
	TaskMove                       // the same, and their other locations go
	TaskDrain                      // away from a device that is given up
	TaskRepair                     // of an entry that lies on fewer nodes than was asked for
)

// String returns the kind's name.
func (k TaskKind) String() string {
	if k > TaskRepair {
		return "unknown"
	}
	return [...]string{"none", "demote", "copy", "move", "drain", "repair"}[k]
}

// TaskState is how far a task has come.
type TaskState uint8

// States of a task. The last two are final.
const (
	TaskWaiting TaskState = iota
	TaskRunning
	TaskFinished
	TaskCanceled
)

// String returns the state's name.
func (s TaskState) String() string {
	return [...]string{"waiting", "running", "done", "canceled"}[s]
}

// Limits of tasks.
const (
	// MaxTasks bounds those that are not finished: what one leader plans ahead for all devices.
	MaxTasks = 256
	// MaxTaskItems bounds the entries of one: a home does as many in a second or so, and its progress is one record.
	MaxTaskItems = 1024
	// maxFinished are remembered when they are over, so that whoever asked for them learns how they ended.
	maxFinished = 256
)

// AddTask has the home of a device copy entries to it. MoveFrom names the device whose locations of them go then; the
// highest id there is stands for all others, 0 for none. The result is a CountResult: the task's id.
type AddTask struct {
	TaskKind TaskKind
	Device   DeviceID
	MoveFrom DeviceID
	Items    []Victim
}

// TaskDone says how many of a task's entries, from the first on, are through, and what became of those since the last.
type TaskDone struct {
	Task                    TaskID
	Done                    uint32
	Copied, Skipped, Failed uint32
	Bytes                   uint64
}

// CancelTask ends a task.
type CancelTask struct{ Task TaskID }

// TaskInfo describes a task.
type TaskInfo struct {
	ID       TaskID
	Kind     TaskKind
	State    TaskState
	Device   DeviceID
	MoveFrom DeviceID
	Total    uint32
	Done     uint32
	// Copied, Skipped (gone, changed, or there already) and Failed (could not be read or written) add up to Done.
	Copied, Skipped, Failed uint64
	Bytes                   uint64
	CreatedMS               uint64
}

// task is a piece of tiering work.
type task struct {
	object
	TaskInfo
	items []Victim // none once it is over
}

// over reports whether nothing is left to do.
func (t *task) over() bool { return t.State >= TaskFinished }

func (m *Machine) applyAddTask(c *AddTask, out *Results) {
	d := m.devices[c.Device]
	running, over := 0, []*task(nil)
	for _, t := range m.sortedTasks() {
		if t.over() {
			over = append(over, t)
		} else {
			running++
		}
	}
	switch {
	case m.settings.Version < VersionTiers:
		out.fail(protocol.CodeUnsupported)
		return
	case d == nil:
		out.fail(protocol.CodeNotFound)
		return
	case c.TaskKind < TaskDemote || c.TaskKind > TaskRepair || len(c.Items) == 0 || len(c.Items) > MaxTaskItems:
		out.fail(protocol.CodeBadRequest)
		return
	case running >= MaxTasks:
		out.fail(protocol.CodeBusy)
		return
	}
	for _, t := range over[:max(0, len(over)-maxFinished+1)] {
		delete(m.tasks, t.ID)
		m.gone(t)
	}
	m.head.births++ // ids are births, so that no record has to count them
	t := &task{items: slices.Clone(c.Items), TaskInfo: TaskInfo{
		ID: TaskID(m.head.births), Kind: c.TaskKind, Device: c.Device, MoveFrom: c.MoveFrom,
		Total: uint32(len(c.Items)), CreatedMS: m.head.now, //nolint:gosec // at most MaxTaskItems
	}}
	m.addTask(t)
	m.changed(t)
	out.code(0)
	out.uvarint(uint64(t.ID))
	out.uvarint(0)
}

// addTask enters a task and what it is to copy.
func (m *Machine) addTask(t *task) {
	m.tasks[t.ID] = t
	for _, v := range t.items[t.Done:] {
		m.tasked[v.Slot] = t.ID
	}
}

// through takes items of a task out of the books, up to the n-th.
func (m *Machine) through(t *task, n uint32) {
	for _, v := range t.items[t.Done:n] {
		if m.tasked[v.Slot] == t.ID {
			delete(m.tasked, v.Slot)
		}
	}
	t.Done = n
}

func (m *Machine) applyTaskDone(c *TaskDone, out *Results) {
	t := m.tasks[c.Task]
	switch {
	case t == nil || t.State == TaskCanceled:
		out.fail(protocol.CodeCanceled)
		return
	case t.over() || c.Done < t.Done: // told before
		out.code(0)
		return
	case c.Done > t.Total || uint64(c.Done-t.Done) != uint64(c.Copied)+uint64(c.Skipped)+uint64(c.Failed):
		out.fail(protocol.CodeBadRequest)
		return
	}
	m.through(t, c.Done)
	t.Copied += uint64(c.Copied)
	t.Skipped += uint64(c.Skipped)
	t.Failed += uint64(c.Failed)
	t.Bytes += c.Bytes
	t.State = TaskRunning
	if t.Done == t.Total {
		t.State, t.items = TaskFinished, nil
	}
	m.changed(t)
	out.code(0)
}

func (m *Machine) applyCancelTask(c *CancelTask, out *Results) {
	t := m.tasks[c.Task]
	if t == nil {
		out.fail(protocol.CodeNotFound)
		return
	}
	m.cancelTask(t)
	out.code(0)
}

func (m *Machine) cancelTask(t *task) {
	if t.over() {
		return
	}
	done := t.Done
	m.through(t, t.Total)
	t.Done, t.State, t.items = done, TaskCanceled, nil
	m.changed(t)
}

// cancelTasks ends the tasks that copy to a device.
func (m *Machine) cancelTasks(to DeviceID) {
	for _, t := range m.sortedTasks() {
		if t.Device == to {
			m.cancelTask(t)
		}
	}
}

func (m *Machine) sortedTasks() []*task {
	return sortedValues(m.tasks, func(t *task) uint64 { return uint64(t.ID) })
}

// Tasks describes the tasks, those that are over included as long as they are remembered, by id.
func (m *Machine) Tasks() []TaskInfo {
	infos := make([]TaskInfo, 0, len(m.tasks))
	for _, t := range m.sortedTasks() {
		infos = append(infos, t.TaskInfo)
	}
	return infos
}

// Task describes a task.
func (m *Machine) Task(id TaskID) (TaskInfo, bool) {
	if t := m.tasks[id]; t != nil {
		return t.TaskInfo, true
	}
	return TaskInfo{}, false
}

// TaskItems calls fn with what a task is to copy, from the i-th entry on, until it returns false. live says that it is that
// very entry still, and served.
func (m *Machine) TaskItems(id TaskID, i int, fn func(i int, v Victim, live bool) bool) {
	t := m.tasks[id]
	for ; t != nil && i < len(t.items); i++ {
		v := t.items[i]
		if !fn(i, v, m.Birth(v.Slot) == v.Birth && m.Live(v.Slot)) {
			return
		}
	}
}

// PlanDrain names entries with a location on a device that no task copies yet and that no pin keeps there, at most limit.
// It changes nothing.
func (m *Machine) PlanDrain(from DeviceID, limit int) (victims []Victim) {
	for _, r := range m.regionList {
		if r.device.id != from || r.live == 0 {
			continue
		}
		m.EachEntry(r.id, func(slot Slot) bool {
			if x := m.table.at(slot); m.tasked[slot] == 0 && x.pins == 0 && m.alive(x) {
				victims = append(victims, Victim{slot, x.birth})
			}
			return len(victims) < limit
		})
		if len(victims) >= limit {
			break
		}
	}
	return victims
}

func (t *task) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint64(append(b, recTask), uint64(t.ID))
}

func (t *task) appendValue(b []byte) []byte {
	b = append(b, byte(t.Kind), byte(t.State))
	for _, v := range [...]uint64{
		uint64(t.Device), uint64(t.MoveFrom), uint64(t.Total), uint64(t.Done), t.Copied, t.Skipped, t.Failed, t.Bytes, t.CreatedMS,
	} {
		b = binary.AppendUvarint(b, v)
	}
	return appendVictims(b, t.items)
}

func (t *task) load(key, value *decoder) {
	t.ID = TaskID(key.be64())
	t.Kind, t.State = TaskKind(value.byte()), TaskState(value.byte())
	t.Device, t.MoveFrom = DeviceID(value.u32()), DeviceID(value.u32())
	t.Total, t.Done = value.u32(), value.u32()
	for _, v := range []*uint64{&t.Copied, &t.Skipped, &t.Failed, &t.Bytes, &t.CreatedMS} {
		*v = value.uvarint()
	}
	t.items = decodeVictims(value)
	whole := len(t.items) == int(t.Total)
	if t.Kind > TaskRepair || t.State > TaskCanceled || t.Done > t.Total || !t.over() && !whole || t.over() && len(t.items) > 0 {
		value.fail()
	}
	if len(t.items) == 0 {
		t.items = nil
	}
}

func (m *Machine) loadTasks(store Store) error {
	return scan(m, store, recTask, func() *task { return &task{} }, func(t *task) error {
		if t.over() {
			m.tasks[t.ID] = t
		} else {
			m.addTask(t)
		}
		return nil
	})
}

func appendVictims(b []byte, list []Victim) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, v := range list {
		b = binary.AppendUvarint(b, uint64(v.Slot))
		b = binary.AppendUvarint(b, v.Birth)
	}
	return b
}

func decodeVictims(d *decoder) []Victim {
	list := make([]Victim, d.count(2))
	for i := range list {
		list[i] = Victim{Slot: d.u32(), Birth: d.uvarint()}
	}
	return list
}

func (c *AddTask) appendTo(b []byte) []byte {
	b = binary.AppendUvarint(append(b, byte(c.TaskKind)), uint64(c.Device))
	return appendVictims(binary.AppendUvarint(b, uint64(c.MoveFrom)), c.Items)
}

func (c *AddTask) decode(d *decoder) {
	c.TaskKind, c.Device, c.MoveFrom = TaskKind(d.byte()), DeviceID(d.u32()), DeviceID(d.u32())
	c.Items = decodeVictims(d)
}

func (c *TaskDone) appendTo(b []byte) []byte {
	for _, v := range [...]uint64{
		uint64(c.Task), uint64(c.Done), uint64(c.Copied), uint64(c.Skipped), uint64(c.Failed), c.Bytes,
	} {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func (c *TaskDone) decode(d *decoder) {
	c.Task, c.Done = TaskID(d.uvarint()), d.u32()
	c.Copied, c.Skipped, c.Failed, c.Bytes = d.u32(), d.u32(), d.u32(), d.uvarint()
}

func (c *CancelTask) appendTo(b []byte) []byte { return binary.AppendUvarint(b, uint64(c.Task)) }
func (c *CancelTask) decode(d *decoder)        { c.Task = TaskID(d.uvarint()) }
