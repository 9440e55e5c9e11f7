package meta

import (
	"encoding/binary"
	"slices"

	"larder/protocol"
)

// session is a client identity that is kept alive by heartbeats, or was, while regions of it remain.
type session struct {
	object
	id       SessionID
	instance string
	tenant   *tenant
	ttlMS    uint64
	features uint64
	secret   uint64
	process  Process
	openedMS uint64
	acked    uint64
	open     bool
	fenced   bool // nothing of it writes any more

	// Not in the record.
	answers    [protocol.Window]*answer
	remembered int // bytes
	regions    []*region
	parts      []*partition
	pins       []*pin // its own, oldest first
	names      int    // that end with it
}

// hears reports whether the session's client can be asked for a region. Others keep theirs until they end: the entries
// would be dropped for nothing.
func (s *session) hears() bool { return s.ttlMS != 0 && s.features&protocol.FeaturePush != 0 }

// answer is what became of a seq.
type answer struct {
	object
	session  SessionID
	seq      uint64
	canceled bool
	result   []byte
}

// SeqState says what is known of a seq.
type SeqState uint8

// States of a seq.
const (
	SeqUnknown  SeqState = iota // not applied: it may be proposed
	SeqAnswered                 // applied, and this was the result
	SeqCanceled                 // refused for ever
	SeqTooOld                   // acked, and forgotten
	SeqAhead                    // more than protocol.Window ahead of acked
)

// Remembered says what is known of a session's seq. The result aliases the machine's memory.
func (m *Machine) Remembered(id SessionID, seq uint64) ([]byte, SeqState) {
	s := m.sessions[id]
	if s == nil {
		return nil, SeqUnknown
	}
	return s.remember(seq)
}

func (s *session) remember(seq uint64) ([]byte, SeqState) {
	if seq < s.acked {
		return nil, SeqTooOld
	}
	if seq-s.acked >= protocol.Window {
		return nil, SeqAhead
	}
	a := s.answers[seq%protocol.Window]
	switch {
	case a == nil || a.seq != seq:
		return nil, SeqUnknown
	case a.canceled:
		return nil, SeqCanceled
	default:
		return a.result, SeqAnswered
	}
}

// ack forgets the answers below acked: those that are remembered are of the window that begins at s.acked.
func (m *Machine) ack(s *session, acked uint64) {
	if acked <= s.acked {
		return
	}
	for i := range min(acked-s.acked, protocol.Window) {
		at := (s.acked + i) % protocol.Window
		if a := s.answers[at]; a != nil {
			s.answers[at] = nil
			s.remembered -= len(a.result)
			m.gone(a)
		}
	}
	s.acked = acked
	m.changed(s)
}

// answered remembers the result of a seq.
func (m *Machine) answered(s *session, seq uint64, result []byte, canceled bool) {
	if old := s.answers[seq%protocol.Window]; old != nil {
		s.remembered -= len(old.result)
		m.gone(old)
	}
	a := &answer{session: s.id, seq: seq, result: clone(result), canceled: canceled}
	s.answers[seq%protocol.Window] = a
	s.remembered += len(a.result)
	m.changed(a)
}

func (m *Machine) applyOpenSession(c *OpenSession, out *Results) {
	if len(c.Instance) == 0 || len(c.Instance) > protocol.MaxNameBytes || len(c.Tenant) > protocol.MaxNameBytes {
		out.fail(protocol.CodeBadRequest)
		return
	}
	old := m.sessions[c.Replaces]
	if old != nil && (old.instance != c.Instance || old.secret != c.Proof) {
		old = nil // not this client's to end
	}
	if id, ok := m.openOf[c.Instance]; ok {
		s := m.sessions[id]
		if s.secret != c.Secret && s != old {
			// A second process under the same name: the leader closes the old session first, if it may.
			out.fail(protocol.CodeDuplicate)
			return
		}
		if s.secret == c.Secret {
			m.sessionResult(s, out)
			return
		}
	}
	if old != nil {
		m.closeSession(old)
		m.fenceSession(old)
		m.forgetSession(old)
	}
	if len(m.sessions) >= MaxSessions {
		out.fail(protocol.CodeLimit)
		return
	}
	tenantName := c.Tenant
	if tenantName == "" {
		tenantName = DefaultTenant
	}
	t, ok := m.tenantOf(tenantName)
	if !ok {
		out.fail(protocol.CodeLimit)
		return
	}
	m.head.nextSession++
	s := &session{
		id: m.head.nextSession, instance: c.Instance, tenant: t, ttlMS: c.TTLMS, features: c.Features,
		secret: c.Secret, process: c.Process, openedMS: m.head.now, acked: 1, open: true,
	}
	m.sessions[s.id] = s
	m.openOf[s.instance] = s.id
	m.changed(s)
	m.inheritLast(s)
	m.sessionResult(s, out)
}

func (m *Machine) sessionResult(s *session, out *Results) {
	out.code(0)
	out.uvarint(uint64(s.id))
	out.u64(s.secret)
	out.uvarint(s.ttlMS)
}

func (m *Machine) applyCloseSession(c *CloseSession, out *Results) {
	s := m.sessions[c.ID]
	if s == nil {
		out.code(0) // closed before: closing is idempotent
		return
	}
	m.closeSession(s)
	if c.Fenced {
		m.fenceSession(s)
	}
	m.forgetSession(s)
	out.code(0)
}

// closeSession ends a session: its pins are undone, its names removed, its answers forgotten, its regions orphaned.
func (m *Machine) closeSession(s *session) {
	if !s.open {
		return
	}
	s.open = false
	if m.openOf[s.instance] == s.id {
		delete(m.openOf, s.instance)
	}
	for i, a := range s.answers {
		if a != nil {
			s.answers[i] = nil
			m.gone(a)
		}
	}
	s.remembered = 0
	for _, p := range s.pins {
		m.undoPin(p)
	}
	s.pins = nil
	m.endNames(s.tenant, s)
	stay := m.contributes(s)
	for _, r := range s.regions {
		if r.state == RegionOwned && !stay {
			m.setRegionState(r, RegionOrphaned)
		}
	}
	m.changed(s)
}

// contributes reports whether a session's regions are all on devices that it serves itself. They stay its own when it ends,
// for its next session: with the devices they are gone or away meanwhile. Those that the server of a masters' own device
// has there are no different from other clients'.
func (m *Machine) contributes(s *session) bool {
	return m.home(s) && !slices.ContainsFunc(s.regions, func(r *region) bool {
		return r.device.Home != s.instance || r.state == RegionOrphaned // it ended with others
	})
}

// home reports whether a session is the home of a device. Members that know no homes must agree as long as there are any.
func (m *Machine) home(s *session) bool {
	return s.features&protocol.FeatureNode != 0 && m.settings.Version >= VersionTiers
}

// inheritLast gives a home the regions of its session before.
func (m *Machine) inheritLast(s *session) {
	if !m.home(s) {
		return
	}
	for _, old := range slices.Backward(m.sortedSessions()) {
		if old != s && !old.open && m.contributes(old) && old.instance == s.instance {
			m.inherit(old, s)
			m.forgetSession(old)
			return
		}
	}
}

// fenceSession says that nothing of a closed session writes any more: its regions may be given away.
func (m *Machine) fenceSession(s *session) {
	s.fenced = true
	m.changed(s)
	for _, r := range slices.Clone(s.regions) {
		switch r.state {
		case RegionOrphaned:
			m.depart(r)
		case RegionMarked:
			m.abandon(r)
		default: // nobody writes there any more
		}
	}
}

func (m *Machine) applyFence(c *Fence, out *Results) {
	s := m.sessions[c.ID]
	switch {
	case s == nil:
	case s.open:
		out.fail(protocol.CodeBadRequest)
		return
	default:
		m.fenceSession(s)
		m.forgetSession(s)
	}
	out.code(0)
}

// forgetSession removes a closed session that has no regions left.
func (m *Machine) forgetSession(s *session) {
	if s.open || s.dead || len(s.regions) > 0 {
		return
	}
	for _, p := range s.parts {
		m.discard(p, p.pol, 0)
		if p.old != nil {
			m.discard(p, p.old, oldPages)
		}
	}
	if len(s.parts) > 0 {
		m.parts = slices.DeleteFunc(m.parts, func(p *partition) bool { return p.session == s })
	}
	if m.set.oldPolicy != "" { // whether the session has partitions depends on the history of this process
		m.endMigration()
	}
	delete(m.sessions, s.id)
	m.gone(s)
}

func (m *Machine) applyCancel(s *session, h Header, c *Cancel, out *Results) {
	if s == nil || len(c.Seqs) > protocol.Window || slices.Contains(c.Seqs, h.Seq) {
		out.fail(protocol.CodeBadRequest)
		return
	}
	// The request in question may have been the first to say how far the client has come: without that its seq could
	// seem to lie ahead of the window, and be refused now but not when it comes.
	m.ack(s, h.Acked)
	for _, seq := range c.Seqs {
		if _, state := s.remember(seq); state == SeqAhead {
			out.fail(protocol.CodeTooManyUnacked)
			return
		}
	}
	out.code(0)
	out.uvarint(uint64(len(c.Seqs)))
	for _, seq := range c.Seqs {
		_, state := s.remember(seq)
		if state == SeqUnknown {
			m.answered(s, seq, nil, true)
		}
		out.uvarint(b2u(state == SeqAnswered))
	}
}

func b2u(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (s *session) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint64(append(b, recSession), uint64(s.id))
}

func (s *session) appendValue(b []byte) []byte {
	b = appendBytes(appendBytes(b, s.instance), s.tenant.name)
	b = binary.AppendUvarint(b, s.ttlMS)
	b = binary.AppendUvarint(b, s.features)
	b = appendU64(b, s.secret)
	b = s.process.appendTo(b)
	b = binary.AppendUvarint(b, s.openedMS)
	b = binary.AppendUvarint(b, s.acked)
	return appendBool(appendBool(b, s.open), s.fenced)
}

// load reads a session; its tenant is left to the caller, by name.
func (s *session) load(key, value *decoder) {
	s.id = SessionID(key.be64())
	s.instance = value.string()
	s.tenant = &tenant{name: value.string()}
	s.ttlMS, s.features, s.secret = value.uvarint(), value.uvarint(), value.u64()
	s.process.decode(value)
	s.openedMS, s.acked = value.uvarint(), value.uvarint()
	s.open, s.fenced = value.bool(), value.bool()
}

func (a *answer) appendKey(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(append(b, recAnswer), uint64(a.session))
	return append(b, byte(a.seq%protocol.Window)) // a Window is at most 256 long
}

func (a *answer) appendValue(b []byte) []byte {
	b = appendBool(binary.AppendUvarint(b, a.seq), a.canceled)
	return appendBytes(b, a.result)
}

func (a *answer) load(key, value *decoder) {
	a.session = SessionID(key.be64())
	key.byte()
	a.seq, a.canceled = value.uvarint(), value.bool()
	a.result = clone(value.bytes())
}
