package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"larder/meta"
	"larder/protocol"
)

// Place is where entries are to lie: exactly one field is set.
type Place struct {
	Tier   string `json:"tier,omitempty"`
	Node   string `json:"node,omitempty"`
	Device uint64 `json:"device,omitempty"`
}

// ParsePlace reads a tier (cxl, dram, ssd), a device (#3), or else the name of a node.
func ParsePlace(text string) (Place, error) {
	digits, device := strings.CutPrefix(text, "#")
	switch {
	case device:
		id, err := strconv.ParseUint(digits, 10, 32)
		if err != nil || id == 0 {
			return Place{}, fmt.Errorf("device %q: write # and its number, as in #3", text)
		}
		return Place{Device: id}, nil
	case protocol.TierRank(text) >= 0:
		return Place{Tier: text}, nil
	case text == "":
		return Place{}, errors.New("name a tier (cxl, dram, ssd), a device (#3) or a node")
	}
	return Place{Node: text}, nil
}

// TaskStatus is one task.
type TaskStatus struct {
	ID       uint64 `json:"id"`
	Kind     string `json:"kind"`   // demote, copy, move, drain or repair
	State    string `json:"state"`  // waiting, running, done or canceled
	Device   uint64 `json:"device"` // that takes the copies
	Node     string `json:"node"`   // of it
	Total    uint64 `json:"total"`  // entries
	Done     uint64 `json:"done"`
	Copied   uint64 `json:"copied"`  // of those done
	Skipped  uint64 `json:"skipped"` // gone, changed, or there already
	Failed   uint64 `json:"failed"`  // could not be read or written
	Bytes    uint64 `json:"bytes"`   // copied
	AgeMS    uint64 `json:"age_ms"`
	MoveFrom uint64 `json:"move_from,omitempty"` // device whose locations of the entries go; 2^32-1 = all others
}

// DeviceStatuses describes the devices, by id.
func (s *Server) DeviceStatuses() []DeviceStatus {
	m := s.master
	m.state.RLock()
	infos, nowMS := m.machine.Devices(), m.presentMS()
	tasks := map[meta.DeviceID]int{}
	for _, t := range m.machine.Tasks() {
		if t.State < meta.TaskFinished {
			tasks[t.Device]++
		}
	}
	m.mu.Lock()
	ready := map[meta.DeviceID]bool{}
	for i := range infos {
		d := &infos[i]
		ready[d.ID] = d.Mode == meta.DeviceServing && m.deviceReady(d.ID, d.Node, d.Generation)
	}
	held := m.waitsOf(infos, m.now())
	m.mu.Unlock()
	m.state.RUnlock()
	out := make([]DeviceStatus, 0, len(infos))
	for i := range infos {
		d := &infos[i]
		x := DeviceStatus{
			ID: uint64(d.ID), UUID: d.UUID, Path: d.Path, Node: d.Node, Tier: d.Tier, Coherence: d.Coherence, Size: d.Size,
			Free: d.Free, LargestFree: d.LargestFree, Regions: d.Regions, Volatile: d.Volatile,
			Generation: strconv.FormatUint(d.Generation, 16), Home: d.Home, Mode: d.Mode.String(), Draining: d.Draining,
			Ready: ready[d.ID], Entries: d.Locations, LiveBytes: d.LiveBytes, CopyBytes: d.CopyBytes, Tasks: tasks[d.ID],
			Held: held[d.ID],
		}
		if d.Mode == meta.DeviceAway && d.UntilMS > nowMS {
			x.LostInMS = d.UntilMS - nowMS
		}
		out = append(out, x)
	}
	return out
}

// SetDraining has devices given up, or calls that off: the device, or all of a node. It returns those that it concerns.
// Leader only.
func (s *Server) SetDraining(ctx context.Context, where Place, draining bool) ([]DeviceStatus, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	m := s.master
	if !m.Serving() { // asked first, since what follows may need no command, which would be refused
		f := m.notLeader()
		return nil, &f
	}
	if err := m.needTiers(); err != nil {
		return nil, err
	}
	devices := slices.DeleteFunc(m.Devices(), func(d meta.DeviceInfo) bool {
		return (where.Device == 0 || uint64(d.ID) != where.Device) && (where.Node == "" || d.Node != where.Node)
	})
	if len(devices) == 0 {
		return nil, &protocol.Error{Code: protocol.CodeNotFound, Message: "there is no such device or node: larder ctl devices lists them"}
	}
	ids := map[uint64]bool{}
	for i := range devices {
		d := &devices[i]
		ids[uint64(d.ID)] = true
		if d.Draining == draining {
			continue
		}
		cmd := &meta.SetDevice{Device: d.ID, Mark: true, Draining: draining}
		if _, err := s.do(ctx, cmd); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(s.DeviceStatuses(), func(d DeviceStatus) bool { return !ids[d.ID] }), nil
}

// Tasks describes the tasks, those that are over included as long as they are remembered, by id.
func (s *Server) Tasks() []TaskStatus {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	nodes := map[meta.DeviceID]string{}
	for _, d := range m.machine.Devices() {
		nodes[d.ID] = d.Node
	}
	nowMS, tasks := m.presentMS(), m.machine.Tasks()
	out := make([]TaskStatus, 0, len(tasks))
	for i := range tasks {
		t := &tasks[i]
		out = append(out, TaskStatus{
			ID: uint64(t.ID), Kind: t.Kind.String(), State: t.State.String(), Device: uint64(t.Device), Node: nodes[t.Device],
			Total: uint64(t.Total), Done: uint64(t.Done), Copied: t.Copied, Skipped: t.Skipped, Failed: t.Failed, Bytes: t.Bytes,
			AgeMS: nowMS - min(nowMS, t.CreatedMS), MoveFrom: uint64(t.MoveFrom),
		})
	}
	return out
}

// CancelTasks ends tasks, whatever they are. The leader makes demotions and drains again for as long as they are called
// for. Leader only.
func (s *Server) CancelTasks(ctx context.Context, ids []uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	for _, id := range ids {
		_, err := s.do(ctx, &meta.CancelTask{Task: meta.TaskID(id)})
		if protocol.CodeOf(err) == protocol.CodeNotFound {
			return &protocol.Error{
				Code: protocol.CodeNotFound, Message: fmt.Sprintf("there is no task %d: larder ctl tasks lists them", id),
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Copy makes tasks that copy keys of a tenant to a place, or move them, and says which of the keys there are. If not all
// tasks could be made, it returns those that were with the error. Leader only.
func (s *Server) Copy(ctx context.Context, tenant string, keys [][]byte, to Place, move bool) (tasks []uint64, found []bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	m := s.master
	if !m.Serving() {
		f := m.notLeader()
		return nil, nil, &f
	}
	m.state.RLock()
	m.mu.Lock()
	cmds, found, f := m.planCopy(tenant, &copyOrder{
		keys: keys, tier: to.Tier, node: to.Node, device: to.Device, move: move,
	})
	m.mu.Unlock()
	m.state.RUnlock()
	if f != nil {
		return nil, nil, f
	}
	for _, cmd := range cmds {
		result, err := s.do(ctx, cmd)
		if err != nil {
			fault := m.taskFault(protocol.CodeOf(err))
			return tasks, found, &fault
		}
		r, err := meta.DecodeCount(result)
		if err != nil {
			return tasks, found, err
		}
		tasks = append(tasks, r.Count)
	}
	return tasks, found, nil
}
