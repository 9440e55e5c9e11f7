package server

import (
	"cmp"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Bounds of what waits for the homes of devices.
const (
	// maxGrants GRANTs wait for their homes at a time, some hundred bytes each; more ACCESSes are answered Busy.
	maxGrants = 4096
	// grantTimeout is how long a home may take for a GRANT, which registers memory; then the owner is told to ask again.
	grantTimeout = 2 * time.Second
	// fenceAfter is how many session TTLs an owner may leave a REVOKE unanswered before its region is fenced.
	fenceAfter = 1
)

// grant is an ACCESS that waits for the home of the device.
type grant struct {
	client   *Client
	h        protocol.Header
	owner    meta.SessionID
	home     meta.SessionID
	region   meta.RegionID
	epoch    uint64
	deadline int64
}

// fence is a region whose owner does not answer, or is gone, on a device whose home can make sure that it writes no more.
type fence struct {
	device meta.DeviceID
	epoch  uint64
	sent   int64 // 0 = not yet
}

// access serves ACCESS: the home of the region's device is asked for a handle, and its answer passed on. Nothing of it is
// logged; a leader that is none any more can only pass on what the next one has the home fence.
func (m *Master) access(c *Client, h protocol.Header, payload, out []byte, now int64) []byte {
	var req protocol.AccessRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	m.state.RLock()
	defer m.state.RUnlock()
	region, f := m.ownedBy(c.session(), meta.RegionID(req.RegionID), req.Epoch)
	if f != nil {
		return m.refuse(out, h, f)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	home, id := m.homeOf(region.Device)
	switch {
	case !m.leading:
		f := m.notLeader()
		return m.refuse(out, h, &f)
	case home == nil:
		return m.refuse(out, h, &errHomeAway)
	case len(m.grants) >= maxGrants:
		return m.refuse(out, h, &protocol.Error{
			Code: protocol.CodeBusy, RetryAfterMS: uint64(busyRetry / time.Millisecond),
			Message: "too many regions wait for the homes of their devices: retry",
		})
	}
	m.pushID++
	m.grants[m.pushID] = &grant{
		client: c, h: h, owner: c.session(), home: id, region: region.ID, epoch: region.Epoch, deadline: now + int64(grantTimeout),
	}
	c.took(0) // stays counted until the answer
	msg := protocol.GrantPush{
		ID: m.pushID, RegionID: uint64(region.ID), Epoch: region.Epoch, Device: uint64(region.Device), Offset: region.Offset,
		Length: region.Length,
	}
	home.push1(protocol.TypeGrant, msg.Append)
	return out
}

var errHomeAway = protocol.Error{
	Code: protocol.CodeUnavailable, RetryAfterMS: 100, Message: "the home of the region's device is not connected: retry",
}

// ownedBy describes a region if a session owns it under an epoch, or says why not. The caller holds state.
func (m *Master) ownedBy(owner meta.SessionID, id meta.RegionID, epoch uint64) (meta.RegionInfo, *protocol.Error) {
	r, ok := m.machine.Region(id)
	code := protocol.CodeOK
	switch {
	case !ok:
		code = protocol.CodeNotFound
	case owner == 0 || r.Owner != owner:
		code = protocol.CodeNotOwner
	case r.Epoch != epoch:
		code = protocol.CodeStaleEpoch
	case r.State != meta.RegionOwned:
		code = protocol.CodeRevoking
	}
	if code != protocol.CodeOK {
		return r, &protocol.Error{Code: code, Message: codeTexts[code]}
	}
	return r, nil
}

// homeOf returns the connection of who serves transfers of a device, nil if it has none, and its session. The caller holds
// mu.
func (m *Master) homeOf(id meta.DeviceID) (*Client, meta.SessionID) {
	h := m.nodes.of(id)
	if h == nil {
		return nil, 0
	}
	s := m.sessions[h.session]
	if s == nil {
		return nil, 0
	}
	return s.pushTo(), s.id
}

// push1 sends one push. It never blocks.
func (c *Client) push1(t protocol.Type, body func([]byte) []byte) {
	b := c.peer.Lock()
	b, mark := protocol.BeginFrame(b, t, 0)
	c.peer.Unlock(protocol.EndFrame(body(b), mark))
	c.peer.Flush()
}

// granted serves GRANTED: it answers the ACCESS that the GRANT was for, unless the region has been taken meanwhile.
func (m *Master) granted(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.GrantedRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	m.state.RLock()
	m.mu.Lock()
	g := m.grants[req.ID]
	known := g != nil && g.home == c.session()
	var reply protocol.AccessReply
	if known {
		delete(m.grants, req.ID)
		reply = m.accessReply(g, &req)
	}
	m.mu.Unlock()
	m.state.RUnlock()
	if known {
		m.answerAccess(g, &reply)
	}
	return appendSuccess(out, h, known)
}

// accessReply makes the answer to an ACCESS of what its home says. The caller holds state.
func (m *Master) accessReply(g *grant, req *protocol.GrantedRequest) (reply protocol.AccessReply) {
	if _, f := m.ownedBy(g.owner, g.region, g.epoch); f != nil {
		reply.Error = *f
		return reply
	}
	if req.Endpoint.Engine == "" {
		reply.Error = protocol.Error{
			Code: protocol.CodeUnavailable, RetryAfterMS: 100, Message: "the home of the device refused: " + clip(req.Fault),
		}
		return reply
	}
	reply.Endpoint = req.Endpoint
	return reply
}

func (m *Master) answerAccess(g *grant, reply *protocol.AccessReply) {
	if reply.Code != protocol.CodeOK {
		m.n.Errors[g.h.Type].Add(1)
		g.client.frameError(g.h, &reply.Error)
	} else {
		g.client.frame(g.h, reply.Append)
	}
	g.client.answered(0)
	g.client.peer.Flush()
}

// appendSuccess appends the reply to a request that has nothing to say but whether it did something.
func appendSuccess(out []byte, h protocol.Header, done bool) []byte {
	b, mark := protocol.BeginReply(out, h)
	reply := protocol.SuccessReply{Success: done}
	return protocol.EndFrame(reply.Append(b), mark)
}

// takeGrants takes those grants out of the table, by their ids, whose time is over, or all. The caller holds mu.
func (m *Master) takeGrants(now int64, all bool) (late []*grant) {
	var ids []uint64
	for id, g := range m.grants {
		if all || g.deadline <= now {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids) // so that a simulation repeats exactly
	for _, id := range ids {
		late = append(late, m.grants[id])
		delete(m.grants, id)
	}
	return late
}

// failGrants answers ACCESSes with an error.
func (m *Master) failGrants(grants []*grant, f *protocol.Error) {
	for _, g := range grants {
		m.answerAccess(g, &protocol.AccessReply{Error: *f})
	}
}

// provable reports whether the home of a device can make sure that the owner of a region there writes no more: all that it
// writes with was granted by that home, since it cannot have mapped the device. The caller holds state, and mu.
func (m *Master) provable(d *meta.DeviceInfo, owner meta.SessionID) bool {
	switch {
	case d == nil || d.Home == "" || m.nodes.of(d.ID) == nil:
		return false
	case d.Tier == "ssd" || d.Path == "":
		return true // nobody maps it
	}
	s, ok := m.machine.Session(owner)
	return ok && d.Tier == "dram" && s.Process.Known() && s.Process.BootID != d.BootID
}

// scanFences brings the table of regions that are to be fenced up to date: those of owners that have ended without a word,
// and those whose owners have not answered a REVOKE for long. The caller holds state for reading, and mu.
func (m *Master) scanFences(now int64) {
	if len(m.nodes.homes) == 0 {
		clear(m.fences)
		return
	}
	devices := map[meta.DeviceID]*meta.DeviceInfo{}
	infos := m.machine.Devices()
	for i := range infos {
		devices[infos[i].ID] = &infos[i]
	}
	seen := map[meta.RegionID]bool{}
	note := func(r meta.RegionInfo) {
		if !m.provable(devices[r.Device], r.Owner) {
			return
		}
		seen[r.ID] = true
		if old := m.fences[r.ID]; old == nil || old.epoch != r.Epoch {
			m.fences[r.ID] = &fence{device: r.Device, epoch: r.Epoch}
		}
	}
	m.machine.RegionsIn(meta.RegionOrphaned, note)
	m.machine.RegionsIn(meta.RegionMarked, func(r meta.RegionInfo) {
		asked := m.revokes[r.ID]
		if s := m.sessions[r.Owner]; s != nil && (asked == nil || now-asked.since < fenceAfter*s.ttl || s.ttl == 0) {
			return // it may answer yet
		}
		note(r)
	})
	for id := range m.fences {
		if !seen[id] {
			delete(m.fences, id)
		}
	}
}

// fencePush is a FENCE that is to be sent.
type fencePush struct {
	client *Client
	msg    protocol.FencePush
}

// dueFences returns the FENCEs that were last sent some time ago, to homes that are connected. The caller holds mu.
func (m *Master) dueFences(now int64) (due []fencePush) {
	for id, f := range m.fences {
		if f.sent != 0 && now-f.sent < int64(m.cfg.RevokeInterval) {
			continue
		}
		if c, _ := m.homeOf(f.device); c != nil {
			f.sent = now
			due = append(due, fencePush{c, protocol.FencePush{RegionID: uint64(id), Epoch: f.epoch, Device: uint64(f.device)}})
		}
	}
	slices.SortFunc(due, func(a, b fencePush) int { return cmp.Compare(a.msg.RegionID, b.msg.RegionID) })
	return due
}

func (m *Master) sendFences(due []fencePush) {
	for i := range due {
		due[i].client.push1(protocol.TypeFence, due[i].msg.Append)
		m.n.FencesSent.Add(1)
	}
}

// fenced serves FENCED: nothing of the region's owner lands there any more, and the log is told so. It is answered when
// that is applied; if the answer is lost, FENCE comes again.
func (m *Master) fenced(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.FencedRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.fences[meta.RegionID(req.RegionID)]
	if f := m.attachedBy(meta.DeviceID(min(req.Device, maxDeviceID)), c.session()); f != nil {
		return m.refuse(out, h, f)
	}
	if f == nil || f.epoch != req.Epoch || uint64(f.device) != req.Device {
		return appendSuccess(out, h, false) // it has been settled
	}
	c.took(0) // stays counted until the answer
	err := m.do(&meta.FencedRegion{Region: meta.RegionID(req.RegionID), Epoch: req.Epoch}, func(code protocol.Code, _ []byte) {
		c.frame(h, (&protocol.SuccessReply{Success: code == protocol.CodeOK}).Append)
		c.answered(0)
		c.peer.Flush()
	})
	if err != nil {
		c.answered(0)
		return m.refuseErr(out, h, err)
	}
	return out
}

// maxDeviceID is the highest id that a device can have.
const maxDeviceID = 1<<32 - 1

// tickNodes answers late grants and sends FENCEs that are due. The caller holds state for reading, and mu; what it returns
// is for sending without them.
func (m *Master) tickNodes(now int64) (late []*grant, due []fencePush) {
	late = m.takeGrants(now, false)
	if now-m.house.nodes >= int64(sessionInterval) {
		m.house.nodes = now
		m.scanFences(now)
	}
	return late, m.dueFences(now)
}
