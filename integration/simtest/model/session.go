package model

import (
	"maps"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// ack forgets the answers below acked.
func (s *session) ack(acked uint64) {
	s.acked = max(s.acked, acked)
	maps.DeleteFunc(s.answers, func(seq uint64, _ answer) bool { return seq < s.acked })
}

// remembered returns how many bytes of answers are kept.
func (s *session) remembered() int {
	n := 0
	for _, a := range s.answers {
		n += len(a.result)
	}
	return n
}

// refuses says why a seq that was not answered is not to be applied now, 0 if it is.
func (s *session) refuses(seq uint64) protocol.Code {
	switch {
	case seq < s.acked:
		return protocol.CodeTooOld
	case s.answers[seq].canceled:
		return protocol.CodeCanceled
	case seq-s.acked >= protocol.Window || s.remembered() > meta.MaxRemembered:
		return protocol.CodeTooManyUnacked
	default:
		return 0
	}
}

func (s *session) result() result {
	return result{value: meta.SessionResult{ID: s.id, Secret: s.info.Secret, TTLMS: s.info.TTLMS}}
}

// sessionOf returns the open session of an instance.
func (w *world) sessionOf(instance string) *session {
	for _, s := range w.sessions {
		if s.open && s.info.Instance == instance {
			return s
		}
	}
	return nil
}

func (w *world) openSession(c *meta.OpenSession) result {
	if c.Instance == "" || len(c.Instance) > protocol.MaxNameBytes || len(c.Tenant) > protocol.MaxNameBytes {
		return refused(protocol.CodeBadRequest)
	}
	old := w.sessions[c.Replaces]
	if old != nil && (old.info.Instance != c.Instance || old.info.Secret != c.Proof) {
		old = nil // somebody else's
	}
	switch s := w.sessionOf(c.Instance); {
	case s == nil:
	case s.info.Secret == c.Secret:
		return s.result()
	case s != old:
		return refused(protocol.CodeDuplicate)
	}
	if old != nil {
		w.end(old)
		w.fenced(old)
	}
	tenant := c.Tenant
	if tenant == "" {
		tenant = meta.DefaultTenant
	}
	known := slices.Contains(w.tenants, tenant)
	if len(w.sessions) >= meta.MaxSessions || !known && len(w.contexts) >= meta.MaxContexts {
		return refused(protocol.CodeLimit)
	}
	if !known {
		w.addTenant(tenant)
	}
	w.lastSession++
	s := &session{
		info: *c, id: w.lastSession, tenant: tenant, opened: w.now, acked: 1, open: true, answers: map[uint64]answer{},
	}
	w.sessions[s.id] = s
	w.inherit(s)
	return s.result()
}

func (w *world) closeSession(c *meta.CloseSession) result {
	if s := w.sessions[c.ID]; s != nil {
		w.end(s)
		if c.Fenced {
			w.fenced(s)
		}
		w.forget(s)
	}
	return result{}
}

// end closes a session: its pins, names and answers go, its regions are orphaned. Those on devices of its own stay.
func (w *world) end(s *session) {
	if !s.open {
		return
	}
	s.open = false
	s.answers = map[uint64]answer{}
	for _, h := range w.pinList(func(p *pin) bool { return p.session == s.id }) {
		w.unhold(h)
	}
	w.endNames(func(id meta.SessionID) bool { return id == s.id })
	stay := w.contributes(s)
	for _, r := range w.owned(s) {
		if r.state == meta.RegionOwned && !stay {
			r.state = meta.RegionOrphaned
		}
	}
}

// fenced says that nothing of an ended session writes any more.
func (w *world) fenced(s *session) {
	s.fenced = true
	for _, r := range w.owned(s) {
		switch r.state {
		case meta.RegionOrphaned:
			w.depart(r)
		case meta.RegionMarked:
			w.abandon(r)
		case meta.RegionOwned, meta.RegionDeparted, meta.RegionDraining:
		}
	}
	w.forget(s)
}

// forget removes an ended session that has no regions left.
func (w *world) forget(s *session) {
	if s == nil || s.open || w.sessions[s.id] != s || len(w.owned(s)) > 0 {
		return
	}
	delete(w.sessions, s.id)
	w.changeMayEnd()
}

func (w *world) fence(c *meta.Fence) result {
	s := w.sessions[c.ID]
	switch {
	case s == nil:
	case s.open:
		return refused(protocol.CodeBadRequest)
	default:
		w.fenced(s)
	}
	return result{}
}

func (w *world) cancel(s *session, h meta.Header, c *meta.Cancel) result {
	if s == nil || len(c.Seqs) > protocol.Window || slices.Contains(c.Seqs, h.Seq) {
		return refused(protocol.CodeBadRequest)
	}
	s.ack(h.Acked)
	for _, seq := range c.Seqs {
		if seq >= s.acked && seq-s.acked >= protocol.Window {
			return refused(protocol.CodeTooManyUnacked)
		}
	}
	var codes []protocol.Code
	for _, seq := range c.Seqs {
		a, known := s.answers[seq]
		code := protocol.Code(0)
		switch {
		case known && !a.canceled:
			code = 1
		case !known && seq >= s.acked:
			s.answers[seq] = answer{canceled: true}
		}
		codes = append(codes, code)
	}
	return result{value: codes}
}

// idsPerIncarnation is how far apart the ids of two incarnations begin: far enough that none is used twice.
const idsPerIncarnation = 4 << 20

// newIncarnation makes all that was known unusable.
func (w *world) newIncarnation(c *meta.NewIncarnation) result {
	switch {
	case c.Incarnation > meta.MaxIncarnation:
		return refused(protocol.CodeBadRequest)
	case c.Incarnation <= w.incarnation:
		return result{}
	}
	for _, e := range w.held() {
		e.cleared = true
	}
	first := uint64(0)
	if w.incarnation != 0 {
		first = c.Incarnation * idsPerIncarnation
	}
	w.newNames(first)
	for _, s := range w.sessionList() {
		w.end(s)
		w.forget(s)
	}
	if w.incarnation != 0 {
		w.lastSession = max(w.lastSession, meta.SessionID(first))
		w.lastRegion = max(w.lastRegion, meta.RegionID(first))
		w.births, w.epochs, w.pinIDs = max(w.births, first), max(w.epochs, first), max(w.pinIDs, first)
	}
	w.incarnation = c.Incarnation
	for _, r := range w.regionList() {
		w.epochs++
		r.epoch = w.epochs
		if r.state == meta.RegionDeparted {
			w.abandon(r)
		}
	}
	for _, d := range w.devices {
		d.Generation = 0 // out of service until nobody can write to it any more
	}
	w.startSweep()
	return result{}
}
