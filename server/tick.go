package server

import (
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Intervals of the background clock.
const (
	// TickInterval is how often a shell should call Tick: the precision of everything that waits for time.
	TickInterval = 10 * time.Millisecond
	// sessionInterval is how often session deadlines are looked at, well below the shortest TTL.
	sessionInterval = 200 * time.Millisecond
	// fenceInterval is how often the processes behind fenced regions are looked for.
	fenceInterval = time.Second
	// trimInterval is how often the lease table gives memory back.
	trimInterval = 250 * time.Millisecond
	// sweepSlots are looked at by one Sweep: about 1 ms if their entries live; it removes far fewer.
	sweepSlots = 8192
)

// housekeeping is when the background clock did what last.
type housekeeping struct {
	sessions, fences, trim int64
	nodes                  int64
	sweeping, freeing      bool // such a command is on its way
	expiring, homing       bool
	trimAt                 int
}

// Tick does what is due. It is called by one goroutine at a time, about every TickInterval; that it is called late
// delays but breaks nothing.
func (m *Master) Tick() {
	if !m.serving.Load() {
		return
	}
	now := m.now()
	m.state.RLock()
	m.mu.Lock()
	var due []push
	var late []*grant
	var fences []fencePush
	var box outbox
	if m.leading {
		m.tickSessions(now)
		m.tickState(now)
		m.tickOwners(now)
		m.tickLate()
		due = m.dueRevokes(now, int64(m.cfg.RevokeInterval))
		late, fences = m.tickNodes(now)
		m.tickTiers(now)
		m.tickWatches(now, &box)
		for _, r := range m.parked {
			if r.wakeAt <= now {
				m.cfg.Wake()
				break
			}
		}
	}
	m.mu.Unlock()
	m.state.RUnlock()
	box.flush()
	m.sendRevokes(due)
	m.sendFences(fences)
	m.failGrants(late, &errHomeAway)
	m.tellCleared()
	m.leases.mu.Lock()
	if m.touchesDue(now) {
		m.cfg.Wake()
	}
	if now-m.house.trim >= int64(trimInterval) {
		m.house.trim = now
		m.leases.sweepExpired(now)
		m.house.trimAt = m.leases.trim(m.house.trimAt, now)
	}
	m.leases.mu.Unlock()
}

// tickSessions closes the sessions that have not been heard from. The caller holds state for reading, and mu.
func (m *Master) tickSessions(now int64) {
	if now-m.house.sessions < int64(sessionInterval) {
		return
	}
	m.house.sessions = now
	var silent []*session
	for _, s := range m.sessions {
		if s.ttl > 0 && !s.closing && now-s.seen.Load() > s.ttl {
			silent = append(silent, s)
		}
	}
	sortBy(silent, func(s *session) uint64 { return uint64(s.id) }) // so that a simulation repeats exactly
	for _, s := range silent {
		m.closeSession(s, m.cfg.Host.dead(s.process))
	}
	m.tickHomes(now)
	if now-m.house.fences >= int64(fenceInterval) {
		m.house.fences = now
		m.checkFences()
	}
}

// tickState keeps the state machine's own chores going: one command of each kind at a time. The caller holds state for
// reading, and mu.
func (m *Master) tickState(now int64) {
	if !m.house.sweeping && m.machine.SweepPending() > 0 {
		m.house.sweeping = m.chore(&meta.Sweep{Limit: sweepSlots}, &m.house.sweeping)
	}
	if !m.house.expiring {
		if at, ok := m.machine.NextPinExpiry(); ok && at <= m.logTime(now) {
			m.house.expiring = m.chore(&meta.ExpirePins{}, &m.house.expiring)
		}
	}
	if m.house.freeing {
		return
	}
	var due []meta.RegionID
	for id, since := range m.drains {
		if now-since > int64(max(m.cfg.MaxLease, m.cfg.MaruLease)) {
			due = append(due, id)
		}
	}
	slices.Sort(due) // so that a simulation repeats exactly
	for _, id := range due {
		r, ok := m.machine.Region(id)
		switch {
		case !ok || r.State != meta.RegionDraining:
			delete(m.drains, id)
		case r.Live > 0:
			m.house.freeing = m.chore(&meta.EmptyRegion{Region: id}, &m.house.freeing)
		case r.For != 0 && m.machine.SessionOpen(r.For) && m.waitsFor(r.For):
			continue // it goes to the session that it was taken for
		default:
			m.house.freeing = m.chore(&meta.FreeRegion{Region: id}, &m.house.freeing)
		}
		return
	}
}

// waitsFor reports whether a session has a REQUEST_ALLOC on its way. The caller holds mu.
func (m *Master) waitsFor(id meta.SessionID) bool {
	for _, r := range m.parked {
		if r.key.session == id {
			return true
		}
	}
	for _, r := range m.queue {
		if r.alloc != nil && r.key.session == id {
			return true
		}
	}
	return false
}

// chore queues a command and clears flag when it is done. It reports whether it was queued.
func (m *Master) chore(cmd meta.Command, flag *bool) bool {
	term := m.term
	err := m.do(cmd, func(protocol.Code, []byte) {
		m.mu.Lock()
		if m.term == term {
			*flag = false
		}
		m.mu.Unlock()
	})
	return err == nil
}
