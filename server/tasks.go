package server

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Bounds of what is told of tasks.
const (
	// tasksPerReply is for a TASKS that names no limit: enough to keep a home busy until it asks again.
	tasksPerReply = 4
	// maxTasksReply is where a reply to TASKS takes no further task, in bytes: one of the largest still fits a frame then.
	maxTasksReply = protocol.MaxPayload / 2
)

// allOthers stands in a task for all devices but its own, in the index; on the wire it is ^0.
const allOthers = ^meta.DeviceID(0)

// wireMoveFrom converts the device whose locations go to the protocol's form.
func wireMoveFrom(d meta.DeviceID) uint64 {
	if d == allOthers {
		return ^uint64(0)
	}
	return uint64(d)
}

// isHome returns an error unless a session is the home of a device, or serves transfers of one of the masters' own. The
// caller holds state.
func (m *Master) isHome(s *session, id meta.DeviceID) *protocol.Error {
	d, ok := m.machine.Device(id)
	switch {
	case !ok:
		return &protocol.Error{Code: protocol.CodeNotFound, Message: "there is no such device"}
	case s == nil || !s.home:
		return &errNoHome
	case d.Home == s.instance:
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.attachedBy(id, s.id)
}

// attachedBy returns an error unless a session has attached a device in this term. As long as nobody has, it may be that a
// new leader has not been told yet. The caller holds mu.
func (m *Master) attachedBy(id meta.DeviceID, session meta.SessionID) *protocol.Error {
	switch h := m.nodes.of(id); {
	case h == nil:
		return &errNotAttached
	case h.session != session:
		return &errNoHome
	}
	return nil
}

var errNotAttached = protocol.Error{
	Code: protocol.CodeUnavailable, RetryAfterMS: 100, Message: "nobody has attached the device since the leader was elected: retry",
}

// tasks serves TASKS.
func (m *Master) tasks(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.TasksRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	if req.Limit == 0 {
		req.Limit = tasksPerReply
	}
	m.state.RLock()
	defer m.state.RUnlock()
	device := meta.DeviceID(min(req.Device, maxDeviceID))
	if f := m.isHome(c.sess.Load(), device); f != nil {
		return m.refuse(out, h, f)
	}
	var reply protocol.TasksReply
	size := 0
	for _, t := range m.machine.Tasks() {
		switch {
		case t.Device != device:
		case t.State == meta.TaskCanceled && uint64(t.ID) <= req.After:
			reply.Canceled = append(reply.Canceled, uint64(t.ID))
		case t.State >= meta.TaskFinished || uint64(t.ID) <= req.After:
		case uint64(len(reply.Tasks)) < req.Limit && size < maxTasksReply:
			task, n := m.wireTask(&t, req.Items)
			reply.Tasks, size = append(reply.Tasks, task), size+n
		}
	}
	if req.Items > 0 {
		reply.LeaseMS = uint64(m.cfg.MaxLease / time.Millisecond) //nolint:gosec // positive
		m.leaseItems(reply.Tasks, m.now())
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}

// locationBytes is about what a location takes on the wire.
const locationBytes = 160

// leaseItems leases what tasks are to copy, in all of its places, for as long as can be: an entry may leave a place and live
// on in another, and what is read there then would be another's bytes under its name. Items that are about to leave are not
// copied. The caller holds state.
func (m *Master) leaseItems(tasks []protocol.Task, now int64) {
	until := now + int64(m.cfg.MaxLease)
	l := &m.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range tasks {
		for j := range tasks[i].Items {
			it := &tasks[i].Items[j]
			slot, region := meta.Slot(it.Slot), meta.RegionID(it.RegionID) //nolint:gosec // as wireTask wrote it
			switch {
			case len(it.Key) == 0:
			case l.blocked(slot, region):
				*it = protocol.TaskItem{}
			default:
				it.Lease = l.grant(slot, region, now, until)
				it.Copies = l.grantCopies(it.Copies, until)
				m.n.LeasesGranted.Add(1)
			}
		}
	}
}

// wireTask describes a task with what is left of it, at most limit items unless that is 0, and says about how many bytes
// that takes. The caller holds state.
func (m *Master) wireTask(t *meta.TaskInfo, limit uint64) (w protocol.Task, size int) {
	w = protocol.Task{
		ID: uint64(t.ID), Kind: t.Kind.String(), Done: uint64(t.Done), Total: uint64(t.Total), MoveFrom: wireMoveFrom(t.MoveFrom),
	}
	var places []meta.Location
	m.machine.TaskItems(t.ID, int(t.Done), func(_ int, v meta.Victim, live bool) bool {
		item := protocol.TaskItem{}
		if places = places[:0]; live {
			places = m.machine.Locations(v.Slot, places)
		}
		if len(places) > 0 {
			item = protocol.TaskItem{
				Key: m.machine.Key(v.Slot), Slot: uint64(v.Slot), Version: v.Birth, Location: places[0].Wire(),
			}
			for i := range places[1:] {
				item.Copies = append(item.Copies, places[1+i].Wire())
			}
		}
		size += len(item.Key) + locationBytes*len(places)
		w.Items = append(w.Items, item)
		return limit == 0 || uint64(len(w.Items)) < limit
	})
	return w, size
}

// taskDone makes the command for TASK_DONE, if its session is the home that the task is for.
func (m *Master) taskDone(c *Client, payload []byte) (mut protocol.Mutation, cmd meta.Command, err error) {
	var req protocol.TaskDoneRequest
	if err := req.Decode(payload); err != nil {
		return mut, nil, err
	}
	m.state.RLock()
	defer m.state.RUnlock()
	if t, ok := m.machine.Task(meta.TaskID(req.Task)); ok {
		if f := m.isHome(c.sess.Load(), t.Device); f != nil {
			return mut, nil, f
		}
	}
	if !m.tiers() {
		return mut, nil, &errNoTiers
	}
	if max(req.Done, req.Copied, req.Skipped, req.Failed) > protocol.MaxTaskItems {
		return mut, nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "a task has at most 1024 items"}
	}
	return req.Mutation, &meta.TaskDone{
		Task: meta.TaskID(req.Task), Done: uint32(req.Done), Copied: uint32(req.Copied), Skipped: uint32(req.Skipped), //nolint:gosec // bounded
		Failed: uint32(req.Failed), Bytes: req.Bytes, //nolint:gosec // bounded
	}, nil
}

// wakeHomes tells the homes of devices for which tasks were made or canceled. It is called by track, with state and mu held.
func (m *Master) wakeHomes() {
	busy := map[meta.DeviceID]bool{}
	for _, t := range m.machine.Tasks() {
		if t.State != meta.TaskFinished {
			busy[t.Device] = true
		}
	}
	for _, id := range sortedKeys(busy) {
		if c, _ := m.homeOf(id); c != nil {
			c.push1(protocol.TypeTasksPush, (&protocol.TasksPush{Device: uint64(id)}).Append)
		}
	}
}

// doEach logs commands one after another. each is called with the outcome of every one, in order, and done when no further
// one is on its way: after the last, or after the first that was refused. It returns an error if nothing was queued. The
// caller holds mu.
func (m *Master) doEach(cmds []meta.Command, each func(i int, code protocol.Code, result []byte), done func()) error {
	i := 0
	var next func() error
	next = func() error {
		return m.do(cmds[i], func(code protocol.Code, result []byte) {
			each(i, code, result)
			if i++; code != protocol.CodeOK || i == len(cmds) {
				done()
				return
			}
			m.mu.Lock()
			err := next()
			m.mu.Unlock()
			if err != nil {
				each(i, protocol.CodeOf(err), nil)
				done()
			}
		})
	}
	return next()
}

// copyKeys serves COPY: it makes tasks of what the keys are, and answers with their ids when all are logged. A repetition may
// make them again: that a home does twice what changes nothing the second time.
func (m *Master) copyKeys(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.CopyRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	if !c.native() {
		return m.refuse(out, h, &errNeedsSession)
	}
	var reply protocol.CopyReply
	m.state.RLock()
	m.mu.Lock()
	cmds, found, f := m.planCopy(c.tenantName(), &copyOrder{
		keys: req.Keys, tier: req.Tier, node: req.Node, device: req.Device, move: req.Move,
	})
	m.state.RUnlock()
	defer m.mu.Unlock()
	reply.Found = found
	switch {
	case f != nil:
		return m.refuse(out, h, f)
	case len(cmds) == 0:
		b, mark := protocol.BeginReply(out, h)
		return protocol.EndFrame(reply.Append(b), mark)
	}
	c.took(0) // stays counted until the answer
	err := m.doEach(cmds, func(_ int, code protocol.Code, result []byte) {
		if id, ok := taskID(code, result); ok {
			reply.Tasks = append(reply.Tasks, id)
		} else {
			reply.Error = m.taskFault(code)
		}
	}, func() { m.answerLater(c, h, &reply.Error, reply.Append) })
	if err != nil {
		c.answered(0)
		return m.refuseErr(out, h, err)
	}
	return out
}

var errNeedsSession = protocol.Error{
	Code: protocol.CodeSessionExpired, Message: "this needs a session: open one with HANDSHAKE first",
}

// answerLater answers a request whose commands have been applied.
func (m *Master) answerLater(c *Client, h protocol.Header, f *protocol.Error, body func([]byte) []byte) {
	if f.Code != protocol.CodeOK {
		m.n.Errors[h.Type].Add(1)
	}
	c.frame(h, body)
	c.answered(0)
	c.peer.Flush()
}

// taskID reads the result of an AddTask.
func taskID(code protocol.Code, result []byte) (id uint64, ok bool) {
	if code != protocol.CodeOK {
		return 0, false
	}
	_, rest, err := meta.DecodeCode(result)
	if err != nil {
		return 0, false
	}
	r, err := meta.DecodeCount(rest)
	return r.Count, err == nil
}

// taskFault says why a task could not be made or changed.
func (m *Master) taskFault(code protocol.Code) protocol.Error {
	switch code {
	case protocol.CodeNotLeader, protocol.CodeUnavailable:
		return m.notLeader()
	case protocol.CodeBusy:
		return protocol.Error{
			Code: code, RetryAfterMS: 1000,
			Message: fmt.Sprintf("there are %d tasks already, the most there can be: retry when some are done", meta.MaxTasks),
		}
	default:
		return protocol.Error{Code: code, Message: codeTexts[code]}
	}
}

// copyOrder says what is to be copied where to: exactly one of tier, node and device is set.
type copyOrder struct {
	keys   [][]byte
	tier   string
	node   string
	device uint64
	move   bool
}

// planCopy makes the commands that a COPY needs, and says which keys there are. The caller holds state, and mu.
func (m *Master) planCopy(tenant string, o *copyOrder) (cmds []meta.Command, found []bool, f *protocol.Error) {
	if !m.tiers() {
		return nil, nil, &errNoTiers
	}
	targets, f := m.targets(o)
	if f != nil {
		return nil, nil, f
	}
	t := m.machine.Tenant(tenant)
	var l meta.Location
	for _, key := range o.keys {
		slot, ok := m.machine.Find(t, key) // as of what is logged: nobody is told that an entry's time is over before that is
		found = append(found, ok)
		if !ok {
			continue
		}
		m.machine.Location(slot, &l)
		if to := m.destination(o, targets, slot, l.Length); to != nil {
			to.items = append(to.items, meta.Victim{Slot: slot, Birth: m.machine.Birth(slot)})
		}
	}
	kind, from := meta.TaskCopy, meta.DeviceID(0)
	if o.move {
		kind, from = meta.TaskMove, allOthers
	}
	for _, to := range targets {
		for items := range slices.Chunk(to.items, meta.MaxTaskItems) {
			cmds = append(cmds, &meta.AddTask{TaskKind: kind, Device: to.ID, MoveFrom: from, Items: items})
		}
	}
	return cmds, found, nil
}

// destination chooses the device that a COPY copies an entry to, nil if there is nothing to do. One that is moved to where it
// lies already only leaves the other places. The caller holds state.
func (m *Master) destination(o *copyOrder, targets []*target, slot meta.Slot, length uint64) *target {
	i := slices.IndexFunc(targets, func(d *target) bool { return m.liesOn(slot, d.ID) })
	switch {
	case !o.move || i < 0:
		return m.roomFor(targets, slot, length)
	case m.machine.Copies(slot):
		return targets[i]
	}
	return nil
}

// target is a device that tasks copy to.
type target struct {
	meta.DeviceInfo
	room  uint64 // bytes that no entry lies in
	items []meta.Victim
}

// targetsOf lists the devices to which somebody can be told to copy, of those that want selects: in the fastest tier first,
// of those in one tier that with the most room. The caller holds state, and mu.
func (m *Master) targetsOf(devices []meta.DeviceInfo, want func(d *meta.DeviceInfo) bool) []*target {
	var list []*target
	for i := range devices {
		d := &devices[i]
		if d.Mode != meta.DeviceServing || d.Draining || m.nodes.of(d.ID) == nil || !want(d) {
			continue
		}
		room := roomOf(d)
		list = append(list, &target{DeviceInfo: *d, room: room - min(d.LiveBytes, room)})
	}
	slices.SortStableFunc(list, func(a, b *target) int {
		if x, y := protocol.TierRank(a.Tier), protocol.TierRank(b.Tier); x != y {
			return x - y
		}
		return cmp.Compare(b.room, a.room)
	})
	return list
}

// roomOf is how much a device can hold, in bytes.
func roomOf(d *meta.DeviceInfo) uint64 { return d.Size - min(d.DataOffset, d.Size) }

// targets lists the devices that a COPY may copy to.
func (m *Master) targets(o *copyOrder) ([]*target, *protocol.Error) {
	set := 0
	for _, is := range []bool{o.tier != "", o.node != "", o.device != 0} {
		if is {
			set++
		}
	}
	if set != 1 {
		return nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "name one of tier, node and device to copy to"}
	}
	list := m.targetsOf(m.machine.Devices(), func(d *meta.DeviceInfo) bool {
		return o.tier != "" && d.Tier == o.tier || o.node != "" && d.Node == o.node || o.device != 0 && uint64(d.ID) == o.device
	})
	if len(list) == 0 {
		return nil, &protocol.Error{
			Code: protocol.CodeNotFound, Message: "no node serves such a device at the moment: larder ctl devices lists them",
		}
	}
	return list, nil
}

// roomFor chooses the first of some devices that has room for an entry and does not hold it yet; if none has room, the first
// that does not hold it, whose home then evicts. It returns nil if all hold it. The caller holds state.
func (m *Master) roomFor(list []*target, slot meta.Slot, length uint64) *target {
	var full *target
	for _, to := range list {
		switch {
		case m.liesOn(slot, to.ID):
		case to.room >= length:
			to.room -= length
			return to
		case full == nil:
			full = to
		}
	}
	return full
}

// liesOn reports whether an entry has a served location on a device. The caller holds state.
func (m *Master) liesOn(slot meta.Slot, id meta.DeviceID) bool {
	return slices.ContainsFunc(m.machine.Locations(slot, nil), func(l meta.Location) bool { return l.Device == id })
}

// taskStatus serves TASK_STATUS.
func (m *Master) taskStatus(h protocol.Header, payload, out []byte) []byte {
	var req protocol.TaskStatusRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	m.state.RLock()
	reply := protocol.TaskStatusReply{Tasks: m.statusOf(req.Tasks)}
	m.state.RUnlock()
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}

// statusOf describes tasks, all if none are named. The caller holds state.
func (m *Master) statusOf(ids []uint64) []protocol.TaskStatus {
	if len(ids) == 0 {
		all := m.machine.Tasks()
		list := make([]protocol.TaskStatus, len(all))
		for i := range all {
			list[i] = wireTaskStatus(&all[i])
		}
		return list
	}
	list := make([]protocol.TaskStatus, 0, len(ids))
	for _, id := range ids {
		if t, ok := m.machine.Task(meta.TaskID(id)); ok {
			list = append(list, wireTaskStatus(&t))
		} else {
			list = append(list, protocol.TaskStatus{ID: id, State: "unknown"})
		}
	}
	return list
}

func wireTaskStatus(t *meta.TaskInfo) protocol.TaskStatus {
	return protocol.TaskStatus{
		ID: uint64(t.ID), Kind: t.Kind.String(), Device: uint64(t.Device), Total: uint64(t.Total), Done: uint64(t.Done),
		Copied: t.Copied, Skipped: t.Skipped, Failed: t.Failed, Bytes: t.Bytes, State: t.State.String(),
	}
}

// cancelTasks serves CANCEL_TASK. Clients end what clients asked for: demotion and draining are the leader's.
func (m *Master) cancelTasks(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.TaskStatusRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	if !c.native() {
		return m.refuse(out, h, &errNeedsSession)
	}
	m.state.RLock()
	cmds, f := m.planCancel(req.Tasks)
	m.state.RUnlock()
	if f != nil {
		return m.refuse(out, h, f)
	}
	if len(cmds) == 0 {
		return m.taskStatus(h, payload, out)
	}
	var reply protocol.TaskStatusReply
	m.mu.Lock()
	defer m.mu.Unlock()
	c.took(0) // stays counted until the answer
	err := m.doEach(cmds, func(_ int, code protocol.Code, _ []byte) {
		if code != protocol.CodeOK {
			reply.Error = m.taskFault(code)
		}
	}, func() {
		m.state.RLock()
		reply.Tasks = m.statusOf(req.Tasks)
		m.state.RUnlock()
		m.answerLater(c, h, &reply.Error, reply.Append)
	})
	if err != nil {
		c.answered(0)
		return m.refuseErr(out, h, err)
	}
	return out
}

// planCancel makes the commands for CANCEL_TASK: one for each task that is not over. The caller holds state.
func (m *Master) planCancel(ids []uint64) (cmds []meta.Command, f *protocol.Error) {
	if len(ids) == 0 {
		return nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "name the tasks to end"}
	}
	for _, id := range ids {
		t, ok := m.machine.Task(meta.TaskID(id))
		switch {
		case !ok || t.State >= meta.TaskFinished:
		case t.Kind != meta.TaskCopy && t.Kind != meta.TaskMove:
			return nil, &protocol.Error{
				Code: protocol.CodeForbidden, Message: fmt.Sprintf("task %d is a %s of the servers', which they make again", id, t.Kind),
			}
		default:
			cmds = append(cmds, &meta.CancelTask{Task: t.ID})
		}
	}
	return cmds, nil
}
