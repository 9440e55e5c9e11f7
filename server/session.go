package server

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"larder/meta"
	"larder/protocol"
)

// session is what this member knows of an open session beside the index. It outlives terms, so that connections keep
// their sessions when leadership comes back.
type session struct {
	id       meta.SessionID
	instance string
	tenant   string
	ttl      int64 // ns; 0 = never expires
	process  meta.Process
	home     bool         // of a device
	seen     atomic.Int64 // when the client was heard from
	ended    atomic.Bool
	promotes pace

	// Guarded by Master.mu.
	clients []*Client
	closing bool // a CloseSession is on its way
	watches int  // WATCH_NAMES that wait
	missed  bool // pages of it may have been freed since this member led, of which its connections were not told
	demand  demand
}

// maxSessionClients bounds the connections of one session.
const maxSessionClients = 64

// features are those that this server has; the last two need meta.VersionTiers.
const features = protocol.FeaturePush | protocol.FeaturePacked | protocol.FeatureChecksums | protocol.FeatureCompression |
	protocol.FeatureCopies | protocol.FeatureNode

// featuresOf returns which of the features that a client wants it can have. The caller holds state.
func (m *Master) featuresOf(wanted uint64) uint64 {
	wanted &= features
	if !m.tiers() {
		wanted &^= protocol.FeatureCopies | protocol.FeatureNode
	}
	return wanted
}

// tiers reports whether all members know of copies, tasks and devices with homes: before that, no command that has to do
// with them may even be logged. The caller holds state.
func (m *Master) tiers() bool { return m.machine.Settings().Version >= meta.VersionTiers }

// hear notes that the client was heard from. What another of its connections noted meanwhile is not taken back.
func (s *session) hear(now int64) {
	for {
		old := s.seen.Load()
		if old >= now || s.seen.CompareAndSwap(old, now) {
			return
		}
	}
}

// attach makes a connection one of the session's. The caller holds mu.
func (s *session) attach(c *Client) {
	if old := c.sess.Swap(s); old != nil && old != s {
		old.detach(c)
	}
	if !slices.Contains(s.clients, c) {
		s.clients = append(s.clients, c)
	}
}

// detach undoes attach. The caller holds mu.
func (s *session) detach(c *Client) {
	s.clients = slices.DeleteFunc(s.clients, func(x *Client) bool { return x == c })
}

// pushTo returns the connection that pushes go over, nil if there is none. The caller holds mu.
func (s *session) pushTo() *Client {
	for _, c := range slices.Backward(s.clients) {
		if c.push.Load() {
			return c
		}
	}
	return nil
}

// adoptSessions takes over the sessions at an election: each has its full time again. The caller holds state for
// reading, and mu.
func (m *Master) adoptSessions(now int64) {
	open := map[meta.SessionID]bool{}
	for _, info := range m.machine.Sessions() {
		if !info.Open {
			continue
		}
		open[info.ID] = true
		s := m.know(&info)
		s.seen.Store(now)
		s.closing = false
	}
	for id, s := range m.sessions {
		if !open[id] {
			m.endSession(s)
		}
	}
}

// know returns the record of an open session, making it if need be. The caller holds mu.
func (m *Master) know(info *meta.SessionInfo) *session {
	s := m.sessions[info.ID]
	if s == nil {
		s = &session{
			id: info.ID, instance: info.Instance, tenant: info.Tenant, process: info.Process,
			home: info.Features&protocol.FeatureNode != 0,
			ttl:  int64(info.TTLMS) * int64(time.Millisecond), //nolint:gosec // clamped when it was opened
		}
		s.seen.Store(m.now())
		m.sessions[info.ID] = s
		if m.cfg.Watch != nil && m.cfg.Host.knows(s.process) {
			m.cfg.Watch(s.id, s.process)
		}
	}
	return s
}

// endSession takes note that a session is closed. The caller holds mu.
func (m *Master) endSession(s *session) {
	s.ended.Store(true)
	s.clients = nil
	delete(m.sessions, s.id)
	if m.cfg.Unwatch != nil {
		m.cfg.Unwatch(s.id)
	}
}

// handshake serves HANDSHAKE: it resumes a session at once, or queues the opening of a new one.
func (m *Master) handshake(c *Client, h protocol.Header, payload, out []byte, now int64) []byte {
	var req protocol.HandshakeRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	reply := protocol.HandshakeReply{}
	if req.InstanceID == "" && req.Session == 0 { // Maru's
		m.cfg.Describe(&reply)
		b, mark := protocol.BeginReply(out, h)
		maru := protocol.HandshakeReply{Success: true, RMAddress: reply.RMAddress}
		return protocol.EndFrame(maru.Append(b), mark)
	}
	c.named = true
	if !m.leads(c) {
		m.cfg.Describe(&reply)
		reply.Error = m.notLeader()
		m.n.Errors[h.Type].Add(1)
		b, mark := protocol.BeginReply(out, h)
		return protocol.EndFrame(reply.Append(b), mark)
	}
	if req.Protocol > protocol.Version {
		return m.refuse(out, h, &protocol.Error{
			Code:    protocol.CodeUnsupported,
			Message: fmt.Sprintf("protocol %d is newer than this server's %d: upgrade the servers first", req.Protocol, protocol.Version),
		})
	}
	if req.Session != 0 {
		return m.resume(c, h, &req, out, now)
	}
	return m.openSession(c, h, &req, out, now)
}

// resume attaches a connection to a session that is still open.
func (m *Master) resume(c *Client, h protocol.Header, req *protocol.HandshakeRequest, out []byte, now int64) []byte {
	m.state.RLock()
	defer m.state.RUnlock()
	id := meta.SessionID(req.Session)
	info, ok := m.machine.Session(id)
	switch {
	case !ok || !info.Open:
		return m.refuse(out, h, &errSessionEnded)
	case info.Secret != req.Secret || req.InstanceID != "" && req.InstanceID != info.Instance:
		return m.refuse(out, h, &protocol.Error{
			Code: protocol.CodeForbidden, Message: "the secret or the instance id is not that of the session",
		})
	}
	m.mu.Lock()
	s := m.know(&info)
	if s.closing || len(s.clients) >= maxSessionClients && !slices.Contains(s.clients, c) {
		closing := s.closing
		m.mu.Unlock()
		if closing {
			return m.refuse(out, h, &errSessionEnded)
		}
		return m.refuse(out, h, &protocol.Error{
			Code: protocol.CodeLimit, Message: "the session has too many connections: close some",
		})
	}
	s.hear(now)
	s.attach(c)
	c.has(m.featuresOf(req.Features))
	m.mu.Unlock()
	b, mark := protocol.BeginReply(out, h)
	if req.DevicesOnly {
		info.Regions = nil
	} else {
		m.resendRevokes(s)
	}
	reply := m.welcome(&info, req.Features, true)
	return protocol.EndFrame(reply.Append(b), mark)
}

// welcome makes the reply to a HANDSHAKE. The caller holds state.
func (m *Master) welcome(info *meta.SessionInfo, wanted uint64, resumed bool) *protocol.HandshakeReply {
	r := &protocol.HandshakeReply{
		Success: true, Protocol: protocol.Version, Features: m.featuresOf(wanted),
		Session: uint64(info.ID), Secret: info.Secret, Resumed: resumed, TTLMS: info.TTLMS,
		DefaultLeaseMS: uint64(m.cfg.DefaultLease / time.Millisecond), //nolint:gosec // checked to be positive
		MaxLeaseMS:     uint64(m.cfg.MaxLease / time.Millisecond),     //nolint:gosec // checked to be positive
		// A page that turns out free may have been read until a moment ago.
		QuarantineMS: uint64(m.cfg.MaxLease / time.Millisecond), //nolint:gosec // checked to be positive
		Incarnation:  m.machine.Incarnation(),
	}
	m.cfg.Describe(r)
	r.Devices = m.wireDevices()
	for _, id := range info.Regions {
		region, ok := m.machine.Region(id)
		if !ok || region.State != meta.RegionOwned && region.State != meta.RegionMarked {
			continue
		}
		r.Regions = append(r.Regions, protocol.OwnedRegion{
			Region: wireRegion(&region), Revoking: region.State == meta.RegionMarked, Occupied: m.machine.Occupied(id),
		})
	}
	return r
}

// wireDevice converts a device to the protocol's form.
func wireDevice(d *meta.DeviceInfo) protocol.Device {
	return protocol.Device{
		ID: uint64(d.ID), Path: d.Path, UUID: d.UUID, Tier: d.Tier, Coherence: d.Coherence, Size: d.Size,
		Generation: d.Generation, Node: d.Node, NUMA: d.NUMA,
	}
}

// wireDevices describes all devices, by id, as a leader knows them.
func (m *Master) wireDevices() []protocol.Device {
	m.devMu.Lock()
	defer m.devMu.Unlock()
	list := make([]protocol.Device, 0, len(m.order))
	for _, id := range m.order {
		list = append(list, *m.devices[id])
	}
	return list
}

// openSession queues the opening of a session. An older one of the same instance is in the way unless its client has
// given it up, is proven dead, or repeats an opening whose reply was lost.
func (m *Master) openSession(
	c *Client, h protocol.Header, req *protocol.HandshakeRequest, out []byte, now int64,
) []byte {
	ttl := m.cfg.SessionTTL
	if req.TTLMS != 0 {
		ttl = min(ttl, time.Duration(min(req.TTLMS, 1<<40))*time.Millisecond)
	}
	ttl = max(ttl, minSessionTTL)
	cmd := &meta.OpenSession{
		Instance: req.InstanceID, Tenant: req.Tenant, TTLMS: uint64(ttl / time.Millisecond),
		Secret: req.Secret, Replaces: meta.SessionID(req.Replaces),
		Proof: req.ReplacesSecret,
		Process: meta.Process{
			BootID: bootID(req.BootID), PIDNamespace: req.PIDNamespace, PID: req.PID, Start: req.PIDStart,
		},
	}
	if cmd.Secret == 0 {
		cmd.Secret = m.cfg.Random() | 1
	}
	m.state.RLock()
	old, open := m.machine.SessionOf(req.InstanceID)
	info, _ := m.machine.Session(old)
	cmd.Features = m.featuresOf(req.Features)
	m.state.RUnlock()
	if req.Features&^cmd.Features&protocol.FeatureNode != 0 {
		return m.refuse(out, h, &errNoTiers)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if open && (old != cmd.Replaces || info.Secret != cmd.Proof) {
		switch {
		case info.Secret == cmd.Secret && info.Tenant == tenantOr(req.Tenant):
			// A repeated opening, whose first reply was lost: the machine returns the same session.
		case m.cfg.Host.dead(info.Process):
			m.closeSession(m.know(&info), true)
		default:
			return m.refuse(out, h, m.heldBy(&info, now))
		}
	}
	r := &request{client: c, h: h, arrived: now, bytes: len(payloadOf(req)), handshake: &handshake{features: req.Features}}
	r.cmd = meta.AppendCommand(nil, meta.Header{}, cmd)
	if fault := m.enqueue(r); fault != nil {
		return m.refuse(out, h, fault)
	}
	return out
}

// minSessionTTL keeps a client from asking for a session that ends before its next heartbeat can arrive.
const minSessionTTL = time.Second

// handshake is what the reply to a HANDSHAKE needs of its request.
type handshake struct{ features uint64 }

// payloadOf stands for the bytes that a waiting HANDSHAKE holds: its names.
func payloadOf(req *protocol.HandshakeRequest) string {
	return req.InstanceID + req.Tenant + req.BootID
}

func tenantOr(name string) string {
	if name == "" {
		return meta.DefaultTenant
	}
	return name
}

// heldBy says who holds an instance id. The caller holds mu.
func (m *Master) heldBy(info *meta.SessionInfo, now int64) *protocol.Error {
	if info.TTLMS == 0 {
		return &protocol.Error{
			Code:    protocol.CodeForbidden,
			Message: fmt.Sprintf("instance id %q is in use by a client without sessions: choose another", info.Instance),
		}
	}
	left := int64(info.TTLMS) * int64(time.Millisecond) //nolint:gosec // clamped when it was opened
	if s := m.sessions[info.ID]; s != nil {
		left = max(0, s.seen.Load()+s.ttl-now)
	}
	who := "a process that cannot be seen from here"
	if info.Process.Known() {
		who = fmt.Sprintf("process %d (boot %.8s)", info.Process.PID, info.Process.BootID)
	}
	return &protocol.Error{
		Code: protocol.CodeBusy, RetryAfterMS: msUp(left) + 1,
		Message: fmt.Sprintf("instance id %q is held by session %d of %s: stop it, choose another id, or wait %d ms",
			info.Instance, info.ID, who, msUp(left)),
	}
}

// closeSession logs the end of a session, once. fenced says that its process is proven dead. The caller holds mu.
func (m *Master) closeSession(s *session, fenced bool) {
	if s.closing && !fenced {
		return
	}
	s.closing = true
	ended := &m.n.SessionsExpired
	if fenced {
		ended = &m.n.SessionsFenced
	}
	err := m.do(&meta.CloseSession{ID: s.id, Fenced: fenced}, func(code protocol.Code, _ []byte) {
		if code != protocol.CodeOK {
			m.mu.Lock()
			s.closing = false // the housekeeping tries again, as often as a full disk refuses it
			m.mu.Unlock()
			return
		}
		ended.Add(1)
		m.cfg.Logger.Info("closed a session", slog.Uint64("session", uint64(s.id)), slog.String("instance", s.instance),
			slog.Bool("process_dead", fenced))
	})
	if err != nil {
		s.closing = false // as above
	}
}

// ProcessDied tells the Master that the process of a session has ended.
func (m *Master) ProcessDied(id meta.SessionID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; s != nil && m.leading {
		m.closeSession(s, true)
	}
}

// opened answers a HANDSHAKE whose session is open.
func (m *Master) opened(r *request, result []byte) *protocol.HandshakeReply {
	m.state.RLock()
	defer m.state.RUnlock()
	res, err := meta.DecodeSession(result)
	info, ok := m.machine.Session(res.ID)
	if err != nil || !ok {
		return &protocol.HandshakeReply{Error: errSessionEnded}
	}
	m.mu.Lock()
	s := m.know(&info)
	s.attach(r.client)
	r.client.has(m.featuresOf(r.handshake.features))
	m.mu.Unlock()
	return m.welcome(&info, r.handshake.features, false)
}

// bootID brings a client's boot id, which the kernel writes with dashes, into this package's form.
func bootID(text string) string { return strings.ToLower(strings.ReplaceAll(text, "-", "")) }
