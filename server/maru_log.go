package server

import (
	"maps"
	"slices"
	"time"

	"larder/maru"
	"larder/meta"
	"larder/protocol"
)

// Log implements maru.Index.
func (d *maruDoor) Log(
	q *maru.Request, again bool, within time.Duration, done func(o maru.Outcome, reply func(b []byte) []byte),
) {
	d.s.master.LogMaru(q, again, within, done)
}

// LogMaru is what maru.Index says of Log.
func (m *Master) LogMaru(
	q *maru.Request, again bool, within time.Duration, done func(o maru.Outcome, reply func(b []byte) []byte),
) {
	cmd := q.Command()
	switch {
	case within <= 0:
		done(maru.Failed, nil)
		return
	case !m.Serving():
		done(maru.Elsewhere, nil)
		return
	}
	cmd.Again = again && cmd.Op == meta.MaruRegister
	if q.Type.Mutates() {
		m.state.RLock()
		cmd.DeadlineMS = m.logTime(m.now()) + max(1, uint64(within/time.Millisecond))
		m.state.RUnlock()
	}
	t, n := q.Type, max(len(q.Keys), len(q.Entries))
	r := &request{cmd: meta.AppendCommand(nil, meta.Header{}, cmd), arrived: m.now()}
	r.bytes = len(r.cmd)
	if cmd.Op == meta.MaruRegister {
		r.lateAt = r.arrived + int64(within)
	}
	r.done = func(code protocol.Code, result []byte) {
		if r.undone {
			code = protocol.CodePending
		}
		m.maruLogged(t, n, code, result, done)
	}
	m.mu.Lock()
	fault := m.enqueue(r)
	m.mu.Unlock()
	switch {
	case fault == nil:
	case fault.Code == protocol.CodeBusy:
		done(maru.Failed, nil)
	default:
		done(maru.Elsewhere, nil)
	}
}

// maruLogged passes on what became of a logged request for n keys.
func (m *Master) maruLogged(
	t maru.Type, n int, code protocol.Code, result []byte, done func(o maru.Outcome, reply func(b []byte) []byte),
) {
	switch code {
	case protocol.CodeOK:
	case protocol.CodeNotLeader, protocol.CodeUnavailable:
		done(maru.Doubt, nil)
		return
	default:
		done(maru.Failed, nil)
		return
	}
	_, rest, err := meta.DecodeCode(result)
	if err != nil {
		done(maru.Failed, nil)
		return
	}
	out := meta.DecodeMaru(rest)
	if !t.Mutates() && m.hidesLate() {
		done(maru.Failed, nil) // it may have read what is about to be undone
		return
	}
	done(maru.Done, func(b []byte) []byte {
		if out.Op == meta.MaruLookup {
			m.state.RLock()
			defer m.state.RUnlock()
			return maru.AppendLookup(b, t, n, out.Found, m.maruHandle)
		}
		return maru.AppendBools(b, t, n, out.Bool)
	})
}

// hidesLate reports whether something waits to be undone, see findLate.
func (m *Master) hidesLate() bool {
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	return len(m.leases.undo) > 0
}

// maruLeased leaves what logged lookups have found where it is for a while. The caller holds the leases.
func (m *Master) maruLeased(s *meta.Span, now int64) {
	code, rest, err := meta.DecodeCode(m.results.Bytes(s))
	if err != nil || code != protocol.CodeOK {
		return
	}
	meta.MaruRegions(rest, func(id meta.RegionID) { m.leases.note(id, now+int64(m.cfg.MaruLease)) })
}

// maruFrees reports whether a command of Maru's may have left a region for nobody.
func (m *Master) maruFrees(s *meta.Span) bool {
	_, rest, err := meta.DecodeCode(m.results.Bytes(s))
	if err != nil || len(rest) == 0 {
		return false
	}
	op := meta.DecodeMaru(rest).Op
	return op == meta.MaruReturn || op == meta.MaruDelete
}

// findLate finds what a group has registered for clients of Maru's that have given up meanwhile, because the log took so long.
// Nobody is told of it, and tickLate undoes it. The caller holds the leases since before anybody could see what was applied.
func (m *Master) findLate(g *group, now int64) {
	spans := m.results.Spans
	for i, r := range g.spans {
		if r.lateAt == 0 || now <= r.lateAt || i >= len(spans) {
			continue
		}
		code, rest, err := meta.DecodeCode(m.results.Bytes(&spans[i]))
		group, err2 := meta.DecodeGroup(append(meta.BeginGroup(nil, 0, nil), r.cmd...))
		if err != nil || err2 != nil || code != protocol.CodeOK {
			continue
		}
		c, ok := group.Commands[0].Command.(*meta.Maru)
		if !ok {
			continue
		}
		r.undone = true
		if m.leases.undo == nil {
			m.leases.undo = map[string]meta.MaruEntry{}
		}
		out := meta.DecodeMaru(rest)
		for _, e := range c.Entries {
			if out.Bool() {
				m.leases.undo[string(e.Key)] = e
			}
		}
	}
}

// tickLate has what was registered too late removed. The caller holds mu.
func (m *Master) tickLate() {
	l := &m.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.undo) == 0 || l.undoing {
		return
	}
	cmd := &meta.Maru{Op: meta.MaruUndo}
	for _, key := range slices.Sorted(maps.Keys(l.undo)) {
		if len(cmd.Entries) < meta.MaxMaruBatch {
			cmd.Entries = append(cmd.Entries, l.undo[key])
		}
	}
	term := m.term
	l.undoing = m.do(cmd, func(code protocol.Code, _ []byte) { m.lateGone(term, cmd.Entries, code) }) == nil
}

// lateGone takes note that what was registered too late is gone.
func (m *Master) lateGone(term uint64, entries []meta.MaruEntry, code protocol.Code) {
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	if m.term64.Load() != term {
		return
	}
	m.leases.undoing = false
	for i := range entries {
		if code == protocol.CodeOK {
			delete(m.leases.undo, string(entries[i].Key))
		}
	}
}
