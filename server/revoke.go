package server

import (
	"cmp"
	"log/slog"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// revokeInterval is how often an owner that has not answered is asked again: often enough that a client which
// reconnects hears of it before its own timeouts, rare enough to cost nothing.
const revokeInterval = 500 * time.Millisecond

// freedPerPush bounds the pages of one FREED push: with the longest keys a frame still fits.
const freedPerPush = 4096

// revoke is a marked region whose owner has not let go yet.
type revoke struct {
	owner meta.SessionID
	epoch uint64
	since int64
	sent  int64
}

// adoptRegions takes over the regions that are being given up, at an election. The caller holds state for reading, and
// mu.
func (m *Master) adoptRegions(now int64) {
	clear(m.revokes)
	clear(m.drains)
	m.scanRegions(now)
	m.copyDevices()
}

// copyDevices keeps descriptions of the devices for replies. The caller holds state, and mu.
func (m *Master) copyDevices() {
	infos := m.machine.Devices()
	stale := m.nodes.follow(infos)
	devices, order := map[meta.DeviceID]*protocol.Device{}, make([]meta.DeviceID, 0, len(infos))
	for i := range infos {
		d := &infos[i]
		w := wireDevice(d)
		if h := m.nodes.of(d.ID); h != nil && h.endpoint.Engine != "" {
			endpoint := h.endpoint // replies hold on to it
			w.Endpoint = &endpoint
		}
		devices[d.ID] = &w
		order = append(order, d.ID)
	}
	m.devMu.Lock()
	m.devices, m.order, m.namesake = devices, order, namesake(infos)
	m.devMu.Unlock()
	for _, id := range stale {
		if s := m.sessions[id]; s != nil {
			for _, c := range s.clients {
				c.peer.Close("what its device shows has been given up: attach it again")
			}
		}
	}
}

// track takes note of what the commands just applied mean for sessions and regions.
func (m *Master) track(spans []meta.Span, now int64) {
	var regions, sessions, devices, tasks bool
	for i := range spans {
		switch spans[i].Kind {
		case meta.KindCloseSession, meta.KindOpenSession, meta.KindFence:
			sessions, regions = true, true
		case meta.KindIncarnation:
			sessions, regions, devices = true, true, true
		case meta.KindMark, meta.KindRevokeDone, meta.KindReturn, meta.KindEmptyRegion, meta.KindFreeRegion,
			meta.KindSweep, meta.KindFencedRegion:
			regions = true
		case meta.KindAddDevice, meta.KindRetire, meta.KindDropDevice, meta.KindDevice:
			regions, devices = true, true
		case meta.KindMaru:
			regions = regions || m.maruFrees(&spans[i])
		case meta.KindTask, meta.KindCancelTask:
			tasks = true
		default:
		}
	}
	if !regions && !sessions && !tasks {
		return
	}
	m.state.RLock()
	m.mu.Lock()
	if m.leading {
		if sessions {
			for id, s := range m.sessions {
				if !m.machine.SessionOpen(id) {
					served := m.nodes.left(id)
					devices = devices || served
					m.endSession(s)
				}
			}
		}
		m.scanRegions(now)
	}
	if devices {
		m.copyDevices()
	}
	if tasks {
		m.wakeHomes()
	}
	due := m.dueRevokes(now, 0)
	m.mu.Unlock()
	m.state.RUnlock()
	m.sendRevokes(due)
}

// scanRegions brings revokes and drains up to date. The caller holds state for reading, and mu.
func (m *Master) scanRegions(now int64) {
	seen := map[meta.RegionID]bool{}
	m.machine.RegionsIn(meta.RegionMarked, func(r meta.RegionInfo) {
		seen[r.ID] = true
		if old := m.revokes[r.ID]; old == nil || old.epoch != r.Epoch {
			m.revokes[r.ID] = &revoke{owner: r.Owner, epoch: r.Epoch, since: now}
		}
	})
	m.machine.RegionsIn(meta.RegionDraining, func(r meta.RegionInfo) {
		seen[r.ID] = true
		if _, ok := m.drains[r.ID]; !ok {
			m.drains[r.ID] = now
		}
		delete(m.revokes, r.ID)
	})
	for id := range m.revokes {
		if !seen[id] {
			delete(m.revokes, id)
		}
	}
	for id := range m.drains {
		if _, marked := m.revokes[id]; !seen[id] || marked {
			delete(m.drains, id)
		}
	}
	fenced := int64(0)
	m.machine.RegionsIn(meta.RegionOrphaned, func(meta.RegionInfo) { fenced++ })
	m.n.RegionsFenced.Store(fenced)
	m.n.RevokesPending.Store(int64(len(m.revokes)))
}

// push is a REVOKE that is to be sent.
type push struct {
	client *Client
	region meta.RegionID
	epoch  uint64
}

// dueRevokes returns the REVOKEs that were last sent at least age ago, to owners that are connected. The caller holds
// mu.
func (m *Master) dueRevokes(now, age int64) []push {
	var due []push
	for id, r := range m.revokes {
		s := m.sessions[r.owner]
		if s == nil || r.sent != 0 && now-r.sent < age || r.sent != 0 && age == 0 {
			continue
		}
		if c := s.pushTo(); c != nil {
			r.sent = now
			due = append(due, push{c, id, r.epoch})
		}
	}
	slices.SortFunc(due, func(a, b push) int { return cmp.Compare(a.region, b.region) })
	return due
}

// resendRevokes sends a session that has just reconnected what it may have missed.
func (m *Master) resendRevokes(s *session) {
	m.mu.Lock()
	for _, r := range m.revokes {
		if r.owner == s.id {
			r.sent = 0
		}
	}
	m.retry = true
	m.mu.Unlock()
}

// sendRevokes pushes REVOKEs.
func (m *Master) sendRevokes(due []push) {
	var box outbox
	for _, p := range due {
		b := p.client.peer.Lock()
		b, mark := protocol.BeginFrame(b, protocol.TypeRevoke, 0)
		msg := protocol.RevokePush{RegionID: uint64(p.region), Epoch: p.epoch}
		p.client.peer.Unlock(protocol.EndFrame(msg.Append(b), mark))
		m.n.RevokesSent.Add(1)
		box.add(p.client)
	}
	box.flush()
}

// pushFreed tells owners of pages of theirs that somebody else freed. One that is not connected reads them from its
// occupied pages when it comes back.
func (m *Master) pushFreed() {
	effects := m.results.Effects
	if len(effects) == 0 {
		return
	}
	slices.SortStableFunc(effects, func(a, b meta.Effect) int { return cmp.Compare(a.Owner, b.Owner) })
	now := m.now()
	for len(effects) > 0 {
		n := 1
		for n < len(effects) && n < freedPerPush && effects[n].Owner == effects[0].Owner {
			n++
		}
		m.pushPages(effects[:n], now)
		effects = effects[n:]
	}
}

// pushPages sends one FREED.
func (m *Master) pushPages(effects []meta.Effect, now int64) {
	m.mu.Lock()
	var c *Client
	if s := m.sessions[effects[0].Owner]; s != nil {
		c = s.pushTo()
	}
	m.pushID++
	msg := protocol.FreedPush{ID: m.pushID, Pages: make([]protocol.Page, len(effects))}
	m.mu.Unlock()
	if c == nil {
		return
	}
	m.leases.mu.Lock()
	for i := range effects {
		p := &effects[i].Page
		msg.Pages[i] = protocol.Page{
			Key: p.Key, RegionID: uint64(p.Region), KVOffset: p.Offset, KVLength: p.Length,
			FreeAfterMS: m.leases.freeAfter(p.Region, p.Offset, now),
		}
	}
	m.leases.mu.Unlock()
	m.n.FreedPushed.Add(uint64(len(effects)))
	if c.unacked.Add(int64(len(effects))) > maxUnackedPages {
		c.peer.Close("it does not acknowledge the pages that were freed")
		return
	}
	b := c.peer.Lock()
	b, mark := protocol.BeginFrame(b, protocol.TypeFreed, 0)
	c.peer.Unlock(protocol.EndFrame(msg.Append(b), mark))
	m.box.add(c)
}

// missFreed takes note of owners whose pages were freed while this member did not lead. Whoever led then told those that
// were connected to it. An owner that does little may have stayed here through all of that term, and nobody has told it.
func (m *Master) missFreed() {
	if len(m.results.Effects) == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.results.Effects {
		if s := m.sessions[m.results.Effects[i].Owner]; s != nil {
			s.missed = true
		}
	}
}

// missAll is missFreed for a snapshot, which does not say what was freed.
func (m *Master) missAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		s.missed = true
	}
}

// cutMissed ends, at an election, the connections that go on from an earlier term of this member and may have missed a
// FREED since: the reply to their clients' next HANDSHAKE says which pages are occupied. Nothing else would ever tell them,
// and they would not use the others again. Connections that have missed nothing stay.
func (m *Master) cutMissed() {
	m.mu.Lock()
	var behind []*session
	for _, s := range m.sessions {
		if s.missed {
			s.missed = false
			behind = append(behind, s)
		}
	}
	sortBy(behind, func(s *session) uint64 { return uint64(s.id) }) // so that a simulation repeats exactly
	var stale []*Client
	for _, s := range behind {
		for _, c := range s.clients {
			if c.push.Load() {
				stale = append(stale, c)
			}
		}
	}
	m.mu.Unlock()
	for _, c := range stale {
		c.peer.Close("it may not have been told of pages that were freed while this member did not lead")
	}
}

// maxUnackedPages bounds what a client may leave unacknowledged: a million pages, far beyond what one that reads its
// pushes can be behind.
const maxUnackedPages = 1 << 20

// freedAck takes the acknowledgement of FREED, which confirms all that were sent before it, too.
func (m *Master) freedAck(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.FreedAckRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	c.unacked.Store(0)
	b, mark := protocol.BeginReply(out, h)
	reply := protocol.SuccessReply{Success: true}
	return protocol.EndFrame(reply.Append(b), mark)
}

// checkFences closes or fences sessions whose processes are proven dead and whose regions somebody might need. The
// caller holds state for reading, and mu.
func (m *Master) checkFences() {
	owners := map[meta.SessionID]bool{}
	note := func(r meta.RegionInfo) { owners[r.Owner] = true }
	m.machine.RegionsIn(meta.RegionMarked, note)
	m.machine.RegionsIn(meta.RegionOrphaned, note)
	ids := make([]meta.SessionID, 0, len(owners))
	for id := range owners {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		info, ok := m.machine.Session(id)
		if !ok || !m.cfg.Host.dead(info.Process) {
			continue
		}
		if s := m.sessions[id]; info.Open && s != nil {
			m.closeSession(s, true)
			continue
		}
		m.n.SessionsFenced.Add(1)
		m.cfg.Logger.Info("fencing an ended session: its process is dead", slog.Uint64("session", uint64(id)))
		if err := m.do(&meta.Fence{ID: id}, nil); err != nil {
			return // tried again in a second
		}
	}
}
