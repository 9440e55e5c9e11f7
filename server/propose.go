package server

import (
	"errors"
	"log/slog"
	"time"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// group is one log entry on its way. There is at most one: what arrives meanwhile goes into the next.
type group struct {
	term    uint64
	index   uint64     // 0 until Propose has returned
	spans   []*request // that have a command in the group, in its order
	members []*request // to be answered when it is applied: spans, and those that are answered without a command
	regions []meta.RegionID
	slots   []meta.Slot
	began   int64
}

// wakeParked has parked requests planned again soon, if there are any.
func (m *Master) wakeParked() {
	if m.parkedN.Load() == 0 {
		return
	}
	m.mu.Lock()
	m.retry = true
	idle := m.group == nil
	m.mu.Unlock()
	if idle {
		m.cfg.Wake()
	}
}

// Crowd tells a shell whether it should wait a moment before it calls Pump, so that clients which have just been
// answered join the next group with their next requests: without that, half of those that each wait for an answer miss
// the group that starts now, and every second sync is for the other half. queued requests wait; expected
// is how many would if everybody came back whom the last group answered; busy says that some of these have not been
// sent their answers yet.
func (m *Master) Crowd() (queued, expected int, busy bool) {
	m.mu.Lock()
	queued = len(m.queue)
	m.mu.Unlock()
	n := m.answering.Load()
	return queued, int(max(n, -n)), n > 0
}

// Pump builds and proposes a group if none is on its way and there is something to propose. It is called by one
// goroutine at a time, after Wake.
func (m *Master) Pump() {
	for m.pumpOnce() {
	}
}

// pumpOnce reports whether there may be more to do.
func (m *Master) pumpOnce() bool {
	g, data := m.build()
	if g == nil {
		return false
	}
	index, term, err := m.cfg.Propose(g.term, data)
	m.mu.Lock()
	if err == nil {
		// The group may have been applied already.
		g.index = index
		if m.group == g && term != g.term {
			err = &raft.NotLeaderError{}
		} else {
			m.mu.Unlock()
			m.n.Groups.Add(1)
			m.n.GroupCommands.Observe(uint64(len(g.spans)))
			m.n.GroupBytes.Observe(uint64(len(data)))
			return false
		}
	}
	if m.group != g { // resigned meanwhile, which has answered everybody
		m.mu.Unlock()
		return true
	}
	m.group = nil
	m.release(g)
	for _, r := range g.members {
		m.forget(r)
	}
	m.announce()
	m.mu.Unlock()
	fault := m.proposeFault(err)
	var box outbox
	for _, r := range g.members {
		m.fail(r, &fault, &box)
	}
	box.flush()
	return true
}

// proposeFault says to clients why a group could not be proposed. Nothing of it was appended.
func (m *Master) proposeFault(err error) protocol.Error {
	retry := uint64(busyRetry / time.Millisecond)
	switch {
	case errors.Is(err, raft.ErrDiskFull):
		return protocol.Error{
			Code: protocol.CodeDiskFull, RetryAfterMS: 1000,
			Message: "the master's disk is nearly full and it refuses changes: free space there, then retry",
		}
	case errors.Is(err, raft.ErrBusy):
		return protocol.Error{Code: protocol.CodeBusy, RetryAfterMS: retry, Message: "the log is behind: retry"}
	}
	if _, ok := errors.AsType[*raft.NotLeaderError](err); ok {
		return m.notLeader()
	}
	if !errors.Is(err, raft.ErrTransferring) && !errors.Is(err, raft.ErrStopped) {
		m.cfg.Logger.Warn("proposal failed", slog.Any("error", err))
	}
	return protocol.Error{
		Code: protocol.CodeUnavailable, RetryAfterMS: retry, Message: "leadership is changing: retry",
	}
}

// build makes a group of what is queued: the uses of entries first, then the commands in order, with a plan made for
// each REQUEST_ALLOC on the state as it is before the group.
func (m *Master) build() (*group, []byte) {
	now := m.now()
	m.state.RLock()
	defer m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || m.group != nil {
		return nil, nil
	}
	m.requeueParked(now)
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	if len(m.queue) == 0 && !m.touchesDue(now) {
		return nil, nil
	}
	touches := m.leases.takeTouches()
	m.n.TouchesLogged.Add(uint64(len(touches)))
	g := &group{term: m.term, began: now}
	data := meta.BeginGroup(make([]byte, 0, m.groupSize(len(touches))), m.logTime(now), touches)
	n := 0
	for _, r := range m.queue {
		if len(g.members) >= MaxGroupCommands || len(g.members) > 0 && len(data)+len(r.cmd) > MaxGroupBytes {
			break
		}
		n++
		m.queued -= r.bytes
		data = m.addTo(g, r, data, now)
	}
	m.queue = append(m.queue[:0:0], m.queue[n:]...)
	if len(g.members) == 0 && len(g.spans) == 0 && len(touches) == 0 {
		m.leases.settleTouches()
		return nil, nil // all of them wait for a victim
	}
	m.group = g
	return g, data
}

// groupSize estimates the bytes of the next group.
func (m *Master) groupSize(touches int) int {
	n := 64 + 6*touches
	for _, r := range m.queue {
		n += len(r.cmd)
		if n > MaxGroupBytes {
			break
		}
	}
	return n
}

// touchesDue reports whether uses of entries have waited long enough.
func (m *Master) touchesDue(now int64) bool {
	t := &m.leases.touches
	return t.live > 0 && (now-t.since >= int64(m.cfg.TouchInterval) || len(t.pending) >= maxPendingTouches/2)
}

// addTo adds one request to a group. The caller holds state for reading, mu and the leases.
func (m *Master) addTo(g *group, r *request, data []byte, now int64) []byte {
	if r.alloc == nil {
		g.spans = append(g.spans, r)
		g.members = append(g.members, r)
		return append(data, r.cmd...)
	}
	head := meta.Header{Session: r.key.session, Seq: r.key.seq, Acked: r.acked}
	switch m.planAlloc(r, now) {
	case meta.PlanCommand:
		g.spans = append(g.spans, r)
		g.members = append(g.members, r)
		for _, v := range r.plan.Cmd.Victims {
			m.leases.condemn(v.Slot)
			g.slots = append(g.slots, v.Slot)
		}
		if id := r.plan.Cmd.Region; id != 0 {
			m.leases.condemnRegion(id)
			g.regions = append(g.regions, id)
		}
		return m.takeEarly(g, r, meta.AppendCommand(data, head, &r.plan.Cmd), now)
	case meta.PlanMark:
		m.park(r, now, 0)
		return m.addOwn(g, data, r.plan.Region, &meta.Mark{Region: r.plan.Region, For: r.key.session})
	case meta.PlanEmpty:
		m.park(r, now, now)
		return m.addOwn(g, data, r.plan.Region, &meta.EmptyRegion{Region: r.plan.Region})
	case meta.PlanWait:
		return data // parked by planAlloc
	default:
		// Nothing to log: the answer goes out when the group is applied, which proves that this was still the leader
		// when it was planned.
		r.silent = true
		g.members = append(g.members, r)
		return data
	}
}

// addOwn adds a command of the Master's own that concerns a region.
func (m *Master) addOwn(g *group, data []byte, region meta.RegionID, cmd meta.Command) []byte {
	m.leases.condemnRegion(region)
	g.regions = append(g.regions, region)
	g.spans = append(g.spans, &request{})
	return meta.AppendCommand(data, meta.Header{}, cmd)
}

// release takes the marks of a group back. The caller holds mu.
func (m *Master) release(g *group) {
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	m.unmark(g)
}

// unmark is release for a caller that holds the leases.
func (m *Master) unmark(g *group) {
	for _, s := range g.slots {
		m.leases.spare(s)
	}
	for _, id := range g.regions {
		m.leases.spareRegion(id)
	}
	g.slots, g.regions = nil, nil
	m.leases.settleTouches()
}

// forget takes a request that is answered out of the table of those on their way. The caller holds mu.
func (m *Master) forget(r *request) {
	if r.key.seq != 0 && m.inflight[r.key] == r {
		delete(m.inflight, r.key)
	}
}

// ours returns the group on its way if an entry that is to be applied is it: of the entries of a term only its leader
// proposes any with content, and this leader has one at a time.
func (m *Master) ours(index, term uint64, content bool) *group {
	if !content {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.group
	if g == nil || g.term != term {
		return nil
	}
	if g.index != 0 && g.index != index {
		m.cfg.Logger.Error("a log entry of this term is not the one proposed",
			slog.Uint64("index", index), slog.Uint64("proposed", g.index))
	}
	return g
}

// settleLeases brings the lease table in line with what has just been applied. The caller holds the leases, and let go
// of state after it took them.
func (m *Master) settleLeases(g *group) {
	now := m.now()
	if g != nil {
		m.unmark(g)
	}
	for i := range m.results.Spans {
		s := &m.results.Spans[i]
		if s.Remembered {
			continue
		}
		switch s.Kind {
		case meta.KindAlloc:
			if code, rest, err := meta.DecodeCode(m.results.Bytes(s)); err == nil && code == 0 {
				if a, err := meta.DecodeAlloc(rest); err == nil {
					m.pagesGone(a.Evicted, now)
				}
			}
		case meta.KindDelete:
			if code, rest, err := meta.DecodeCode(m.results.Bytes(s)); err == nil && code == 0 {
				if d, err := meta.DecodeDelete(rest); err == nil {
					m.pagesGone(d.Freed, now)
				}
			}
		default:
		}
	}
	for _, slot := range m.results.Dropped {
		m.leases.dropped(slot)
	}
	for i := range m.results.Effects {
		m.leases.gone(&m.results.Effects[i].Page, now)
	}
}

func (m *Master) pagesGone(pages []meta.Page, now int64) {
	for i := range pages {
		m.leases.gone(&pages[i], now)
	}
}

// finish answers the requests of a group that has been applied. It lets the next group go first.
func (m *Master) finish(g *group) {
	now := m.now()
	m.n.GroupNanos.Observe(uint64(max(now-g.began, 0)))
	spans := m.results.Spans
	m.mu.Lock()
	if m.group != g {
		m.mu.Unlock()
		return // leadership was lost, and everybody told so
	}
	m.group = nil
	var again []*request
	for i, r := range g.spans {
		if r.replan = r.alloc != nil && i < len(spans) && resultCode(m.results.Bytes(&spans[i])) == protocol.CodePending; r.replan {
			m.n.AllocReplans.Add(1)
			again = append(again, r)
		}
	}
	for _, r := range g.members {
		if !r.replan {
			m.forget(r)
		}
	}
	m.planAgain(again, now)
	m.announce()
	m.answering.Store(int64(len(g.members) + len(m.queue)))
	m.mu.Unlock()
	m.cfg.Wake()
	for i, r := range g.spans {
		if i < len(spans) && !r.replan {
			m.deliver(r, m.results.Bytes(&spans[i]), now)
		}
	}
	for _, r := range g.members {
		if r.silent {
			m.deliverPlanned(r, now)
		}
	}
	m.track(spans, now)
}

// planAgain takes back REQUEST_ALLOCs whose plans the state had overtaken. The caller holds mu.
func (m *Master) planAgain(again []*request, now int64) {
	for _, r := range again {
		m.queued += r.bytes
		if r.tries++; r.tries > maxTries {
			// The plan does not fit the state though that has not changed: do not spin.
			m.park(r, now, now+int64(parkRetry))
			m.queued -= r.bytes
			continue
		}
		m.queue = append(m.queue, r)
	}
	if len(m.parked) > 0 {
		m.retry = true
	}
}

// maxTries is how often a plan may be out of date in a row before the request waits for parkRetry in between.
const maxTries = 4

// resultCode is the code of an encoded result.
func resultCode(b []byte) protocol.Code {
	code, _, err := meta.DecodeCode(b)
	if err != nil {
		return protocol.CodeInternal
	}
	return code
}
