package meta

import (
	"fmt"
	"hash/maphash"
	"slices"

	"larder/meta/policy"
	"larder/protocol"
)

// Machine is the state machine. See the package documentation for what may be called when.
type Machine struct {
	head     head
	settings Settings
	set      settingsRecord

	table      table
	prefixes   map[uint64]Slot // prefixKey -> first entry; the others follow by pnext
	prefixSeed uint64
	devices    map[DeviceID]*device
	regions    map[RegionID]*region
	regionList []*region // ascending by id
	regionAt   handles[region]
	places     places
	bornBefore uint64 // births before the REGISTER being applied
	tasks      map[TaskID]*task
	tasked     map[Slot]TaskID // entries that a task is to copy
	lacking    lacking
	contextAt  handles[contextRecord]
	sessions   map[SessionID]*session
	openOf     map[string]SessionID // the open session of an instance
	contexts   map[ContextID]*contextRecord
	contextIDs map[Context]ContextID
	tenants    map[string]*tenant
	names      nameTable
	maru       maruTable
	pinsOf     map[Slot][]*pin
	timedPins  pinHeap // those that end, the first on top

	// The state hash is the sum of three sums, each kept up to date as its part changes.
	entrySum, orderSum, objectSum uint64

	stale   []record // objects changed since their sums were computed
	pending []record // objects changed since the last flush
	parts   []*partition
	edits   []edit // of pages of policy state and of Maru's keys that are gone, for the next flush, in order
	dirty   dirtySlots
	scratch []byte
	loading bool
	out     *Results // of the Apply in progress
	none    Results  // stands in for out otherwise
	stats   counters
}

// head is the part of the state that changes with every command. It has one record.
type head struct {
	applied     uint64
	now         uint64 // log time, ms
	births      uint64
	epochs      uint64
	hot, cold   int64
	nextSession SessionID
	nextRegion  RegionID
	nextDevice  DeviceID
	nextContext ContextID
	nextPin     uint64
	incarnation uint64
	clearedAll  uint64
	marks       []clearMark
	sweepLeft   uint64
	sweepAt     uint64
	slots       Slot // table.end
}

func newMachine() *Machine {
	m := &Machine{
		table: newTable(), prefixes: map[uint64]Slot{},
		devices: map[DeviceID]*device{}, regions: map[RegionID]*region{}, sessions: map[SessionID]*session{},
		openOf: map[string]SessionID{}, contexts: map[ContextID]*contextRecord{}, contextIDs: map[Context]ContextID{},
		tenants: map[string]*tenant{}, pinsOf: map[Slot][]*pin{}, tasks: map[TaskID]*task{}, tasked: map[Slot]TaskID{},
		maru:     newMaruTable(),
		settings: DefaultSettings(),
	}
	m.prefixSeed = maphash.Comparable(m.table.seed, 0)
	m.set.m = m
	m.out = &m.none
	return m
}

// Applied returns the index of the last applied log entry.
func (m *Machine) Applied() uint64 { return m.head.applied }

// NowMS returns the log time of the last applied group, in milliseconds.
func (m *Machine) NowMS() uint64 { return m.head.now }

// Incarnation returns the pool's incarnation.
func (m *Machine) Incarnation() uint64 { return m.head.incarnation }

// Settings returns the replicated settings.
func (m *Machine) Settings() Settings { return m.settings }

// StateHash sums up the whole replicated state. Machines that applied the same log return the same value, whether they
// were rebuilt in between or not. Its cost is that of what changed since it was last called.
func (m *Machine) StateHash() uint64 {
	policies := uint64(0)
	for _, p := range m.parts {
		policies += p.sum()
	}
	return m.hashWith(policies)
}

// recordHash is the part of the state hash that its records must give again. What policies keep for themselves is left
// out: one that a user has written may restore it otherwise, which is no reason not to start.
func (m *Machine) recordHash() uint64 { return m.hashWith(0) }

func (m *Machine) hashWith(policies uint64) uint64 {
	m.refresh()
	h := m.entrySum + m.orderSum + m.objectSum + policies
	m.scratch = m.head.appendTo(m.scratch[:0])
	for _, c := range m.scratch {
		h = h*0x100000001b3 + uint64(c)
	}
	return mix(h)
}

// Apply applies one log entry: the recency in front of it, then its commands. An error means that the entry is corrupt
// or needs a newer binary; the machine is then undefined, and its owner must stop.
func (m *Machine) Apply(index uint64, group []byte, out *Results) error {
	m.head.applied = index
	if len(group) == 0 {
		return nil
	}
	d := decoder{b: group}
	if v := d.byte(); v != groupFormat {
		return fmt.Errorf("meta: log entry %d has format %d, this binary reads %d: run a newer one", index, v, groupFormat)
	}
	m.head.now = max(m.head.now, d.uvarint())
	m.out = out
	defer func() { m.out = &m.none }()
	for n := d.count(2); n > 0; n-- {
		slot, count := d.u32(), d.u32()
		if m.table.live(slot) && count > 0 {
			m.touch(slot, count)
		}
	}
	for len(d.b) > 0 && d.err == nil {
		h, body := d.next()
		if d.err != nil {
			break
		}
		if err := m.applyOne(h, body, out); err != nil {
			return fmt.Errorf("log entry %d: %w", index, err)
		}
	}
	if d.err != nil {
		return fmt.Errorf("log entry %d: %w", index, d.err)
	}
	return nil
}

// applyOne applies a command once: one that was applied before answers what it answered then.
func (m *Machine) applyOne(h Header, body []byte, out *Results) error {
	out.begin()
	var s *session
	if h.Session != 0 {
		s = m.sessions[h.Session]
		if s == nil || !s.open {
			out.fail(protocol.CodeSessionExpired)
			out.end(h, false)
			return nil
		}
	}
	if s != nil && h.Seq != 0 {
		m.ack(s, h.Acked)
		if done := m.repeated(s, h, out); done {
			return nil
		}
	}
	d := decoder{b: body}
	if err := m.dispatch(h, s, &d, out); err != nil {
		return err
	}
	if s != nil && h.Seq != 0 && s.open && out.final() {
		m.answered(s, h.Seq, out.buf[out.start:], false)
	}
	out.end(h, false)
	return nil
}

// repeated answers a command whose seq is not to be applied now.
func (m *Machine) repeated(s *session, h Header, out *Results) bool {
	result, state := s.remember(h.Seq)
	switch {
	case state == SeqAnswered:
		out.buf = append(out.buf, result...)
	case state == SeqCanceled:
		out.fail(protocol.CodeCanceled)
	case state == SeqTooOld:
		out.fail(protocol.CodeTooOld)
	case state == SeqAhead, s.remembered > MaxRemembered:
		out.fail(protocol.CodeTooManyUnacked)
	default:
		return false
	}
	out.end(h, state == SeqAnswered)
	return true
}

// final reports whether the result being written is the answer for good: the retryable codes leave the seq open.
func (r *Results) final() bool {
	c, _, err := DecodeCode(r.buf[r.start:])
	return err == nil && !c.Retryable()
}

// dispatch decodes and applies a command.
func (m *Machine) dispatch(h Header, s *session, d *decoder, out *Results) error {
	if h.Kind == KindRegister {
		m.applyRegister(h, s, d, out)
		return d.end()
	}
	c := newCommand(h.Kind)
	if c == nil {
		return fmt.Errorf("command %d is not known to this binary: run a newer one", h.Kind)
	}
	c.decode(d)
	if err := d.end(); err != nil {
		return err
	}
	return m.applyCommand(h, s, c, out)
}

func newCommand(k Kind) Command {
	switch k {
	case KindOpenSession:
		return &OpenSession{}
	case KindCloseSession:
		return &CloseSession{}
	case KindFence:
		return &Fence{}
	case KindAlloc:
		return &Alloc{}
	case KindReturn:
		return &ReturnRegion{}
	case KindRegister:
		return &Register{}
	case KindDelete:
		return &Delete{}
	case KindPin, KindUnpin:
		return &Pin{}
	case KindCancel:
		return &Cancel{}
	case KindClear:
		return &Clear{}
	case KindSweep:
		return &Sweep{}
	case KindMark:
		return &Mark{}
	case KindRevokeDone:
		return &RevokeDone{}
	case KindFreeRegion:
		return &FreeRegion{}
	case KindEmptyRegion:
		return &EmptyRegion{}
	case KindAddDevice:
		return &AddDevice{}
	case KindRetire:
		return &Retire{}
	case KindDropDevice:
		return &DropDevice{}
	case KindSettings:
		return &SetSettings{}
	case KindIncarnation:
		return &NewIncarnation{}
	case KindExpirePins:
		return &ExpirePins{}
	case KindTenant:
		return &SetTenant{}
	case KindDevice:
		return &SetDevice{}
	case KindTask:
		return &AddTask{}
	case KindTaskDone:
		return &TaskDone{}
	case KindCancelTask:
		return &CancelTask{}
	case KindFencedRegion:
		return &FencedRegion{}
	case KindPutName:
		return &PutName{}
	case KindDeleteName:
		return &DeleteName{}
	case KindMaru:
		return &Maru{}
	default:
		return nil
	}
}

func (m *Machine) applyCommand(h Header, s *session, c Command, out *Results) error {
	switch c := c.(type) {
	case *OpenSession:
		m.applyOpenSession(c, out)
	case *CloseSession:
		m.applyCloseSession(c, out)
	case *Fence:
		m.applyFence(c, out)
	case *Alloc:
		m.applyAlloc(s, c, out)
	case *ReturnRegion:
		m.applyReturn(s, c, out)
	case *Delete:
		m.applyDelete(s, c, out)
	case *Pin:
		m.applyPin(s, c, out)
	case *Cancel:
		m.applyCancel(s, h, c, out)
	case *Clear:
		m.applyClear(s, c, out)
	case *Sweep:
		m.applySweep(c, out)
	case *Mark:
		m.applyMark(c, out)
	case *RevokeDone:
		m.applyRevokeDone(s, c, out)
	case *FreeRegion:
		m.applyFreeRegion(c, out)
	case *EmptyRegion:
		m.applyEmptyRegion(c, out)
	case *AddDevice:
		m.applyAddDevice(c, out)
	case *Retire:
		m.applyRetire(c, out)
	case *DropDevice:
		m.applyDropDevice(c, out)
	case *SetSettings:
		return m.applySettings(c, out)
	case *NewIncarnation:
		m.applyIncarnation(c, out)
	case *ExpirePins:
		m.applyExpirePins(out)
	case *SetTenant:
		m.applyTenant(c, out)
	case *SetDevice:
		m.applySetDevice(c, out)
	case *AddTask:
		m.applyAddTask(c, out)
	case *TaskDone:
		m.applyTaskDone(c, out)
	case *CancelTask:
		m.applyCancelTask(c, out)
	case *FencedRegion:
		m.applyFencedRegion(c, out)
	case *PutName:
		m.applyPutName(s, c, out)
	case *DeleteName:
		m.applyDeleteName(s, c, out)
	case *Maru:
		m.applyMaru(c, out)
	}
	return nil
}

// applySettings changes the replicated settings. A policy or version that this binary lacks stops it: it could not go
// on in step with the others.
func (m *Machine) applySettings(c *SetSettings, out *Results) error {
	n := c.Settings
	switch {
	case n.Version < m.settings.Version, n.PageSize%MinPageSize != 0 || n.PageSize == 0, n.RegionSize < n.PageSize,
		!n.HasWatermarks():
		out.fail(protocol.CodeBadRequest)
		return nil
	case m.set.oldPolicy != "" && (n.Policy != m.settings.Policy || n.TTLMS != m.settings.TTLMS):
		out.fail(protocol.CodeBusy) // the last change is still in progress
		return nil
	}
	if err := n.supported(); err != nil {
		return err
	}
	old := m.settings
	m.settings = n
	m.setPolicy(old)
	m.changed(&m.set)
	out.code(0)
	return nil
}

// supported says whether this binary can go on under the settings.
func (s *Settings) supported() error {
	if s.Version > ClusterVersion {
		return fmt.Errorf("the cluster's version is %d, this binary supports up to %d: run a newer one", s.Version, ClusterVersion)
	}
	return knownPolicy(s.Policy)
}

func knownPolicy(name string) error {
	if policy.Known(name) {
		return nil
	}
	return fmt.Errorf("the pool's eviction policy is %q, this binary has %v: register it", name, policy.Names())
}

func (m *Machine) addRegion(r *region) {
	m.regions[r.id] = r
	r.handle = m.regionAt.put(r)
	m.regionList = append(m.regionList, r)
}

func (m *Machine) removeRegion(r *region) {
	delete(m.regions, r.id)
	m.regionAt.drop(r.handle)
	m.regionList = slices.DeleteFunc(m.regionList, func(x *region) bool { return x == r })
}
