package protocol

// Append appends m as the payload of TASKS.
func (m *TasksRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("device", m.Device)
	e.optUint("after", m.After)
	e.optUint("limit", m.Limit)
	e.optUint("items", m.Items)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *TasksRequest) Decode(b []byte) error {
	*m = TasksRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "device":
			m.Device = d.uint()
			have |= 1
		case "after":
			m.After = d.uint()
		case "limit":
			m.Limit = d.uint()
		case "items":
			m.Items = d.uint()
		default:
			d.skip()
		}
	}
	d.need(have, "device")
	return d.end()
}

// Append appends m as the payload of TASKS' reply.
func (m *TasksReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("tasks", len(m.Tasks))
	for i := range m.Tasks {
		e.task(&m.Tasks[i])
	}
	e.optUints("canceled", m.Canceled)
	e.optUint("lease_ms", m.LeaseMS)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func (e *enc) task(t *Task) {
	s := e.open()
	e.uint("id", t.ID)
	e.optStr("kind", t.Kind)
	e.optUint("done", t.Done)
	e.optUint("total", t.Total)
	e.optUint("move_from", t.MoveFrom)
	e.array("items", len(t.Items))
	for i := range t.Items {
		e.taskItem(&t.Items[i])
	}
	e.close(s)
}

// taskItem appends an item, of which nothing but an empty map is left if it has no key.
func (e *enc) taskItem(v *TaskItem) {
	s := e.open()
	if len(v.Key) > 0 {
		e.key("key", v.Key)
		e.optUint("slot", v.Slot)
		e.uint("version", v.Version)
		e.optUint("lease", v.Lease)
		e.location(&v.Location)
		e.optLocations("copies", v.Copies)
	}
	e.close(s)
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *TasksReply) Decode(b []byte) error {
	*m = TasksReply{Canceled: m.Canceled[:0], Tasks: m.Tasks[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "tasks":
			m.Tasks = d.tasks(m.Tasks)
			have |= 1
		case "canceled":
			m.Canceled = d.uints(m.Canceled, MaxBatch)
		case "lease_ms":
			m.LeaseMS = d.uint()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "tasks")
}

func (d *dec) tasks(s []Task) []Task {
	for v := range elements(d, &s, MaxTasks, "tasks") {
		d.task(v)
	}
	return s
}

func (d *dec) task(t *Task) {
	old := *t
	*t = Task{Items: t.Items[:0]}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			t.ID = d.uint()
			have |= 1
		case "kind":
			t.Kind = d.str(old.Kind, MaxNameBytes)
		case "done":
			t.Done = d.uint()
		case "total":
			t.Total = d.uint()
		case "move_from":
			t.MoveFrom = d.uint()
		case "items":
			t.Items = d.taskItems(t.Items)
			have |= 2
		default:
			d.skip()
		}
	}
	d.need(have, "id", "items")
}

func (d *dec) taskItems(s []TaskItem) []TaskItem {
	for v := range elements(d, &s, MaxTaskItems, "items") {
		d.taskItem(v)
	}
	return s
}

func (d *dec) taskItem(v *TaskItem) {
	*v = TaskItem{Copies: v.Copies[:0]}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key":
			v.Key = d.key()
		case "slot":
			v.Slot = d.uint()
		case "version":
			v.Version = d.uint()
		case "lease":
			v.Lease = d.uint()
		case "copies":
			v.Copies = d.locations("copies", v.Copies)
		default:
			have |= d.wholeLocation(name, &v.Location)
		}
	}
	if len(v.Key) > 0 {
		d.need(have, "handle", "kv_offset", "kv_length")
	}
}

// Append appends m as the payload of TASK_DONE.
func (m *TaskDoneRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.uint("task", m.Task)
	e.uint("done", m.Done)
	e.optUint("copied", m.Copied)
	e.optUint("skipped", m.Skipped)
	e.optUint("failed", m.Failed)
	e.optUint("bytes", m.Bytes)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *TaskDoneRequest) Decode(b []byte) error {
	*m = TaskDoneRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "task":
			m.Task = d.uint()
			have |= 1
		case "done":
			m.Done = d.uint()
			have |= 2
		case "copied":
			m.Copied = d.uint()
		case "skipped":
			m.Skipped = d.uint()
		case "failed":
			m.Failed = d.uint()
		case "bytes":
			m.Bytes = d.uint()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "task", "done")
	return d.end()
}

// Append appends m as the payload of COPY.
func (m *CopyRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.keys("keys", m.Keys)
	e.optStr("tier", m.Tier)
	e.optStr("node", m.Node)
	e.optUint("device", m.Device)
	e.optBool("move", m.Move)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *CopyRequest) Decode(b []byte) error {
	*m = CopyRequest{Keys: m.Keys[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "keys":
			m.Keys = d.keys(m.Keys)
			have |= 1
		case "tier":
			m.Tier = d.label()
		case "node":
			m.Node = d.label()
		case "device":
			m.Device = d.uint()
		case "move":
			m.Move = d.bool()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "keys")
	return d.end()
}

// Append appends m as the payload of COPY's reply.
func (m *CopyReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uints("tasks", m.Tasks)
	e.optBools("found", m.Found)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *CopyReply) Decode(b []byte) error {
	*m = CopyReply{Tasks: m.Tasks[:0], Found: m.Found[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "tasks":
			m.Tasks = d.uints(m.Tasks, MaxBatch)
			have |= 1
		case "found":
			m.Found = d.bools(m.Found)
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "tasks")
}

// Append appends m as the payload of TASK_STATUS or CANCEL_TASK.
func (m *TaskStatusRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.optUints("tasks", m.Tasks)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *TaskStatusRequest) Decode(b []byte) error {
	*m = TaskStatusRequest{Tasks: m.Tasks[:0]}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "tasks":
			m.Tasks = d.uints(m.Tasks, MaxBatch)
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	return d.end()
}

// Append appends m as the payload of the reply to TASK_STATUS or CANCEL_TASK.
func (m *TaskStatusReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("tasks", len(m.Tasks))
	for i := range m.Tasks {
		e.taskStatus(&m.Tasks[i])
	}
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func (e *enc) taskStatus(v *TaskStatus) {
	s := e.open()
	e.uint("id", v.ID)
	e.optStr("kind", v.Kind)
	e.optUint("device", v.Device)
	e.optUint("total", v.Total)
	e.optUint("done", v.Done)
	e.optUint("copied", v.Copied)
	e.optUint("skipped", v.Skipped)
	e.optUint("failed", v.Failed)
	e.optUint("bytes", v.Bytes)
	e.optStr("state", v.State)
	e.close(s)
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *TaskStatusReply) Decode(b []byte) error {
	*m = TaskStatusReply{Tasks: m.Tasks[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "tasks":
			for v := range elements(&d, &m.Tasks, MaxBatch, "tasks") {
				d.taskStatus(v)
			}
			have |= 1
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "tasks")
}

func (d *dec) taskStatus(v *TaskStatus) {
	*v = TaskStatus{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			v.ID = d.uint()
			have |= 1
		case "kind":
			v.Kind = d.label()
		case "device":
			v.Device = d.uint()
		case "total":
			v.Total = d.uint()
		case "done":
			v.Done = d.uint()
		case "copied":
			v.Copied = d.uint()
		case "skipped":
			v.Skipped = d.uint()
		case "failed":
			v.Failed = d.uint()
		case "bytes":
			v.Bytes = d.uint()
		case "state":
			v.State = d.label()
		default:
			d.skip()
		}
	}
	d.need(have, "id")
}

// Append appends m as the payload of Tasks.
func (m *TasksPush) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("device", m.Device)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *TasksPush) Decode(b []byte) error {
	*m = TasksPush{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "device":
			m.Device = d.uint()
			have |= 1
		default:
			d.skip()
		}
	}
	d.need(have, "device")
	return d.end()
}
