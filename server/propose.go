package server

import (
	"errors"
	"log/slog"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// group is one log entry on its way. Requests that need a plan, and uses of entries, go only into a group that is alone
// on its way, since both are settled against the state that it will find. What else arrives meanwhile may follow in a
// second group as soon as the log can take it.
type group struct {
	term    uint64
	index   uint64     // 0 until Propose has returned
	spans   []*request // that have a command in the group, in its order
	members []*request // to be answered when it is applied: spans, and those that are answered without a command
	regions []meta.RegionID
	slots   []meta.Slot
	touched bool // uses of entries are in the group
	began   int64
}

// wakeParked has parked requests planned again soon, if there are any.
func (m *Master) wakeParked() {
	if m.parkedN.Load() == 0 {
		return
	}
	m.mu.Lock()
	m.retry = true
	idle := len(m.groups) == 0
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
	ahead := len(m.groups) > 0
	m.mu.Unlock()
	if ahead {
		return queued, 0, false // PumpAhead sees to it, or the end of the group that is on its way
	}
	n := m.answering.Load()
	return queued, int(max(n, -n)), n > 0
}

// Pump builds and proposes a group if none is on its way and there is something to propose. It is called by one
// goroutine at a time, after Wake.
func (m *Master) Pump() {
	m.proposing.Lock()
	defer m.proposing.Unlock()
	for m.pumpOnce(m.build()) {
	}
}

// PumpAhead builds and proposes a second group if one is on its way alone and enough is queued for the next. A shell
// calls it when the log can take another entry while that one is still to be committed, applied and answered: so the
// disk need not wait for these. Enough is half of what the group on its way answers; below that, waiting for those to
// come back with their next requests makes fewer syncs.
func (m *Master) PumpAhead() {
	if !m.proposing.TryLock() {
		return // somebody is at it
	}
	defer m.proposing.Unlock()
	now := m.now()
	m.mu.Lock()
	worth := len(m.groups) == 1 && len(m.queue) > 0 && 2*len(m.queue) >= len(m.groups[0].members)
	if worth {
		m.leases.mu.Lock()
		worth = len(m.parked) == 0 && !m.touchesDue(now) // both wait for a group that is alone
		m.leases.mu.Unlock()
	}
	m.mu.Unlock()
	if worth {
		m.pumpOnce(m.buildAhead())
	}
}

// pumpOnce proposes a group, if it is one. It reports whether there may be more to do. The caller holds proposing.
func (m *Master) pumpOnce(g *group, data []byte) bool {
	if g == nil {
		return false
	}
	index, term, err := m.cfg.Propose(g.term, data)
	m.mu.Lock()
	on := slices.Index(m.groups, g)
	if err == nil {
		// The group may have been applied already.
		g.index = index
		if on >= 0 && term != g.term {
			err = &raft.NotLeaderError{}
		} else {
			m.mu.Unlock()
			m.n.Groups.Add(1)
			m.n.GroupCommands.Observe(uint64(len(g.spans)))
			m.n.GroupBytes.Observe(uint64(len(data)))
			return false
		}
	}
	if on < 0 { // resigned meanwhile, which has answered everybody
		m.mu.Unlock()
		return true
	}
	m.groups = slices.Delete(m.groups, on, on+1)
	// What is over by this leader's clock only counts as held for a while: reads go on though the log does not.
	m.stampMS = 0
	m.stampless.Store(m.now() + int64(busyRetry))
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
	if !m.leading || len(m.groups) > 0 {
		return nil, nil
	}
	m.requeueParked(now)
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	stamp := m.stampMS > m.machine.NowMS()
	if len(m.queue) == 0 && !m.touchesDue(now) && !stamp {
		return nil, nil
	}
	touches := m.leases.takeTouches()
	m.n.TouchesLogged.Add(uint64(len(touches)))
	g := &group{term: m.term, began: now, touched: true}
	data := meta.BeginGroup(make([]byte, 0, m.groupSize(len(touches))), m.logTime(now), touches)
	data = m.fill(g, data, func(r *request, data []byte) []byte { return m.addTo(g, r, data, now) })
	if len(g.members) == 0 && len(g.spans) == 0 && len(touches) == 0 && !stamp {
		m.leases.settleTouches()
		return nil, nil // all of them wait for a victim
	}
	m.groups = append(m.groups, g)
	return g, data
}

// buildAhead makes the second group, of the commands up to the first that needs a plan. See group.
func (m *Master) buildAhead() (*group, []byte) {
	now := m.now()
	m.state.RLock()
	defer m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || len(m.groups) >= maxGroups {
		return nil, nil
	}
	g := &group{term: m.term, began: now}
	data := meta.BeginGroup(make([]byte, 0, m.groupSize(0)), m.logTime(now), nil)
	data = m.fill(g, data, func(r *request, data []byte) []byte {
		if r.alloc != nil {
			return nil
		}
		return g.add(r, data)
	})
	if len(g.members) == 0 {
		return nil, nil
	}
	m.groups = append(m.groups, g)
	return g, data
}

// fill moves requests from the queue into a group, in order, until it is full or add returns nil. The caller holds mu.
func (m *Master) fill(g *group, data []byte, add func(r *request, data []byte) []byte) []byte {
	n := 0
	for _, r := range m.queue {
		if len(g.members) >= MaxGroupCommands || len(g.members) > 0 && len(data)+len(r.cmd) > MaxGroupBytes {
			break
		}
		more := add(r, data)
		if more == nil {
			break
		}
		data = more
		n++
		m.queued -= r.bytes
	}
	m.queue = append(m.queue[:0:0], m.queue[n:]...)
	return data
}

// add adds a request that needs no plan.
func (g *group) add(r *request, data []byte) []byte {
	g.spans = append(g.spans, r)
	g.members = append(g.members, r)
	return append(data, r.cmd...)
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
		return g.add(r, data)
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
		return m.addOwn(g, data, r.plan.Region, &meta.EmptyRegion{Region: r.plan.Region, For: r.plan.For})
	case planOwner:
		m.park(r, now, now)
		delete(m.owners.heard, r.plan.For)
		g.spans = append(g.spans, &request{})
		return meta.AppendCommand(data, meta.Header{}, &meta.CloseSession{ID: r.plan.For, Fenced: true})
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
	if g.touched {
		m.leases.settleTouches()
	}
}

// forget takes a request that is answered out of the table of those on their way. The caller holds mu.
func (m *Master) forget(r *request) {
	if r.key.seq != 0 && m.inflight[r.key] == r {
		delete(m.inflight, r.key)
	}
}

// ours returns the oldest group on its way if an entry that is to be applied is it: of the entries of a term only its
// leader proposes any with content, and this leader's are applied in the order in which it made them.
func (m *Master) ours(index, term uint64, content bool) *group {
	if !content {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.groups) == 0 || m.groups[0].term != term {
		return nil
	}
	g := m.groups[0]
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
	if g != nil {
		m.findLate(g, now)
	}
	m.copiesGone(now)
	for _, slot := range m.results.Parted {
		m.leases.part(slot, now)
	}
	for i := range m.results.Spans {
		if s := &m.results.Spans[i]; !s.Remembered {
			m.resultGone(s, now)
		}
	}
	for _, slot := range m.results.Dropped {
		m.leases.dropped(slot)
	}
	for i := range m.results.Effects {
		if p := &m.results.Effects[i].Page; !p.Copy {
			m.leases.gone(p, now)
		}
	}
}

// resultGone takes note of the pages that a command's result says are free.
func (m *Master) resultGone(s *meta.Span, now int64) {
	if s.Kind == meta.KindMaru {
		m.maruLeased(s, now)
	}
	if s.Kind != meta.KindAlloc && s.Kind != meta.KindDelete {
		return
	}
	code, rest, err := meta.DecodeCode(m.results.Bytes(s))
	switch {
	case err != nil || code != 0:
	case s.Kind == meta.KindAlloc:
		if a, err := meta.DecodeAlloc(rest); err == nil {
			m.pagesGone(a.Evicted, now)
		}
	default:
		if d, err := meta.DecodeDelete(rest); err == nil {
			m.pagesGone(d.Freed, now)
		}
	}
}

// copiesGone puts pages into the quarantine that were freed while their entries lived, before the leases of entries that
// have left are forgotten: one command can free several locations of an entry, and the slot may have another one by now.
func (m *Master) copiesGone(now int64) {
	for i := range m.results.Effects {
		if p := &m.results.Effects[i].Page; p.Copy {
			m.leases.freed(p, now)
		}
	}
}

func (m *Master) pagesGone(pages []meta.Page, now int64) {
	for i := range pages {
		if pages[i].Copy {
			m.leases.freed(&pages[i], now)
		} else {
			m.leases.gone(&pages[i], now)
		}
	}
}

// finish answers the requests of a group that has been applied. It lets the next group go first.
func (m *Master) finish(g *group) {
	now := m.now()
	m.n.GroupNanos.Observe(uint64(max(now-g.began, 0)))
	spans := m.results.Spans
	m.mu.Lock()
	if len(m.groups) == 0 || m.groups[0] != g {
		m.mu.Unlock()
		return // leadership was lost, and everybody told so
	}
	m.groups = slices.Delete(m.groups, 0, 1)
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
