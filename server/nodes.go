package server

import (
	"fmt"
	"log/slog"
	"time"

	"larder/meta"
	"larder/protocol"
)

// maxAttachSteps bounds the commands that one ATTACH may need: to add or retire the device, to serve it again, and once
// more if something came in between.
const maxAttachSteps = 4

// uuidDigits is the length of a device's uuid in hexadecimal.
const uuidDigits = 32

// errNoTiers says why there are no nodes, copies, tasks and names.
var errNoTiers = protocol.Error{
	Code: protocol.CodeUnsupported,
	Message: fmt.Sprintf("nodes, copies, tasks and names need cluster version %d: when every member runs this release, raise it with "+
		"larder ctl upgrade", meta.VersionTiers),
}

// needTiers returns an error unless the cluster version has nodes, copies, tasks and names.
func (m *Master) needTiers() error {
	m.state.RLock()
	defer m.state.RUnlock()
	if !m.tiers() {
		f := errNoTiers
		return &f
	}
	return nil
}

// home is what a leader knows, beside the index, of the session that serves a device: what ATTACH has said in this term.
type home struct {
	session    meta.SessionID // 0 = none has attached it yet
	generation uint64         // that the device shows; 0 = the home has not made it ready
	endpoint   protocol.Endpoint
}

// nodes is what a leader knows of devices that are served by nodes. It begins empty with a term, and homes ATTACH again.
type nodes struct {
	homes    map[meta.DeviceID]*home // of every device that has one in the index
	exposers map[meta.DeviceID]*home // sessions that serve transfers of the masters' own devices
}

// reset forgets everything.
func (n *nodes) reset() {
	n.homes = map[meta.DeviceID]*home{}
	n.exposers = map[meta.DeviceID]*home{}
}

// of returns who serves transfers of a device, nil if nobody does.
func (n *nodes) of(id meta.DeviceID) *home {
	h := n.homes[id]
	if h == nil {
		h = n.exposers[id]
	}
	if h == nil || h.session == 0 || h.generation == 0 {
		return nil
	}
	return h
}

// follow brings the homes in line with the devices of the index, and returns the sessions that must attach theirs again,
// since the index has given up what they show.
func (n *nodes) follow(devices []meta.DeviceInfo) (stale []meta.SessionID) {
	homed := map[meta.DeviceID]bool{}
	for i := range devices {
		d := &devices[i]
		if d.Home != "" {
			homed[d.ID] = true
			if n.homes[d.ID] == nil {
				n.homes[d.ID] = &home{}
			}
		}
		h := n.homes[d.ID]
		if h == nil {
			h = n.exposers[d.ID]
		}
		if h != nil && h.generation != 0 && h.generation != d.Generation {
			stale = append(stale, h.session)
			*h = home{}
		}
	}
	for id := range n.homes {
		if !homed[id] {
			delete(n.homes, id)
		}
	}
	return stale
}

// left takes note that a session has ended, and reports whether it served a device.
func (n *nodes) left(id meta.SessionID) (served bool) {
	for _, m := range []map[meta.DeviceID]*home{n.homes, n.exposers} {
		for _, h := range m {
			if h.session == id {
				*h = home{}
				served = true
			}
		}
	}
	return served
}

// deviceReady reports whether regions may be given on a device: it shows the generation that the index has. The caller
// holds mu.
func (m *Master) deviceReady(d meta.DeviceID, node string, generation uint64) bool {
	if h := m.nodes.homes[d]; h != nil {
		return h.session != 0 && h.generation == generation
	}
	return m.cfg.DeviceReady == nil || m.cfg.DeviceReady(d, node, generation)
}

// attachment is an ATTACH that is being served.
type attachment struct {
	client *Client
	s      *session
	h      protocol.Header
	req    protocol.AttachRequest
	given  uint64 // the generation that was logged on its behalf; 0 = none was needed so far
	steps  int
}

// attach serves ATTACH. What the index lacks is logged first, step by step; since each step goes by what the index has, it
// may be repeated, and needs no memory of its seq.
func (m *Master) attach(c *Client, h protocol.Header, payload, out []byte) []byte {
	a := &attachment{client: c, h: h, s: c.sess.Load()}
	if err := a.req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	if f := a.check(); f != nil {
		return m.refuse(out, h, f)
	}
	reply, f := m.attachStep(a)
	switch {
	case f != nil:
		return m.refuse(out, h, f)
	case reply != nil:
		b, mark := protocol.BeginReply(out, h)
		return protocol.EndFrame(reply.Append(b), mark)
	}
	return out // attachOn answers
}

// check returns what is wrong with an ATTACH whatever the index says.
func (a *attachment) check() *protocol.Error {
	bad := func(text string) *protocol.Error {
		return &protocol.Error{Code: protocol.CodeBadRequest, Message: text}
	}
	r := &a.req
	r.BootID = bootID(r.BootID)
	switch {
	case a.s == nil || !a.s.home:
		return &errNoHome
	case len(r.UUID) != uuidDigits:
		return bad("the uuid must have 32 hexadecimal digits")
	case r.Expose:
		return nil
	case protocol.TierRank(r.Tier) < 0:
		return bad("the tier must be cxl, dram or ssd")
	case r.Node == "" || r.Size == 0:
		return bad("node and size must be given")
	}
	return nil
}

var errNoHome = protocol.Error{
	Code: protocol.CodeForbidden, Message: "this is for the home of a device: open a session with FeatureNode",
}

// attachStep answers an ATTACH if the index is as it must be. Else it logs what is missing, and attachOn goes on.
func (m *Master) attachStep(a *attachment) (*protocol.AttachReply, *protocol.Error) {
	m.state.RLock()
	defer m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || a.s.ended.Load() {
		f := m.notLeader()
		if m.leading {
			f = errSessionEnded
		}
		return nil, &f
	}
	d := m.deviceByUUID(a.req.UUID)
	cmd, f := m.attachNeeds(a, d)
	switch {
	case f != nil:
		return nil, f
	case cmd == nil:
		return m.attached(a, d), nil
	case a.steps >= maxAttachSteps:
		return nil, &protocol.Error{
			Code: protocol.CodeBusy, RetryAfterMS: uint64(busyRetry / time.Millisecond),
			Message: "the device changes all the time: retry",
		}
	}
	a.steps++
	a.client.took(0) // stays counted until the answer
	if err := m.do(cmd, func(code protocol.Code, _ []byte) { m.attachOn(a, code) }); err != nil {
		a.client.answered(0)
		return nil, &protocol.Error{Code: protocol.CodeOf(err), Message: err.Error(), RetryAfterMS: uint64(busyRetry / time.Millisecond)}
	}
	return nil, nil //nolint:nilnil // the answer comes later
}

// attachOn goes on with an ATTACH once a command of it has been applied, or refused.
func (m *Master) attachOn(a *attachment, code protocol.Code) {
	var reply *protocol.AttachReply
	f := &protocol.Error{Code: code, Message: codeTexts[code]}
	switch code {
	case protocol.CodeOK:
		if reply, f = m.attachStep(a); reply == nil && f == nil {
			a.client.answered(0)
			return // another step
		}
	case protocol.CodeNotLeader, protocol.CodeUnavailable:
		*f = m.notLeader()
	case protocol.CodeBadRequest:
		f.Message = "the device does not fit: data_offset must be a multiple of align (at least 4096), and not over size"
	default:
	}
	if f != nil {
		m.n.Errors[a.h.Type].Add(1)
		a.client.frameError(a.h, f)
	} else {
		a.client.frame(a.h, reply.Append)
	}
	a.client.answered(0)
	a.client.peer.Flush()
}

// deviceByUUID finds a device, nil if there is none. The caller holds state.
func (m *Master) deviceByUUID(uuid string) *meta.DeviceInfo {
	for _, d := range m.machine.Devices() {
		if d.UUID == uuid {
			return &d
		}
	}
	return nil
}

// attachNeeds returns the next command that an ATTACH needs before it can be answered, nil if none, or why it cannot be.
// The caller holds state, and mu.
func (m *Master) attachNeeds(a *attachment, d *meta.DeviceInfo) (meta.Command, *protocol.Error) {
	r := &a.req
	if r.Expose {
		return nil, exposeFault(d)
	}
	if !m.tiers() {
		return nil, &errNoTiers
	}
	generation := m.cfg.Random() | 1
	switch {
	case d == nil:
		a.given = generation
		return &meta.AddDevice{
			UUID: r.UUID, Path: r.Path, Node: r.Node, Tier: r.Tier, Coherence: r.Coherence, Size: r.Size,
			DataOffset: r.DataOffset, Align: r.Align, Volatile: r.Volatile, BootID: r.BootID, Generation: generation,
			Home: a.s.instance, NUMA: r.NUMA,
		}, nil
	case d.Home != a.s.instance:
		return nil, &protocol.Error{
			Code:    protocol.CodeForbidden,
			Message: fmt.Sprintf("device %d has another home: leave it to that, or drop it first", d.ID),
		}
	case d.Generation == 0, d.Generation != a.given && (d.Generation != r.Generation || d.Size != r.Size):
		// Whether the generation in the index was ever shown is not known: what lies there can only be given up.
		a.given = generation
		if h := m.nodes.homes[d.ID]; h != nil {
			*h = home{}
		}
		return &meta.Retire{
			Device: d.ID, Generation: generation, BootID: r.BootID, Size: r.Size, Path: r.Path, Fenced: true,
		}, nil
	case r.Ready && r.Generation == d.Generation && d.Mode == meta.DeviceAway:
		return &meta.SetDevice{Device: d.ID, Mode: meta.DeviceServing}, nil
	}
	return nil, nil //nolint:nilnil // nothing is missing
}

// exposeFault returns why a session cannot serve transfers of a device of the masters' own, nil if it can.
func exposeFault(d *meta.DeviceInfo) *protocol.Error {
	switch {
	case d == nil:
		return &protocol.Error{Code: protocol.CodeNotFound, Message: "the pool has no such device yet: retry when it does"}
	case d.Home != "":
		return &protocol.Error{Code: protocol.CodeForbidden, Message: "the device has a home, which serves it"}
	}
	return nil
}

// attached answers an ATTACH. The caller holds state, and mu.
func (m *Master) attached(a *attachment, d *meta.DeviceInfo) *protocol.AttachReply {
	r := &a.req
	reply := &protocol.AttachReply{
		Device: uint64(d.ID), Generation: d.Generation, Fresh: !r.Expose && d.Generation != r.Generation,
	}
	if r.Generation != d.Generation || !r.Ready {
		return reply
	}
	h := &home{session: a.s.id, generation: r.Generation, endpoint: r.Endpoint}
	if r.Expose {
		m.nodes.exposers[d.ID] = h
	} else {
		m.nodes.homes[d.ID] = h
	}
	m.copyDevices()
	m.retry = true // there is room for those who wait
	m.cfg.Wake()
	m.cfg.Logger.Info("a device is ready", slog.Uint64("device", uint64(d.ID)), slog.String("home", a.s.instance),
		slog.String("node", d.Node), slog.String("tier", d.Tier), slog.Bool("exposed", r.Expose))
	return reply
}

// keepGone bounds the devices that are remembered after their bytes and homes are gone. A node brings new memory under a new
// uuid each time, so that they do not come back: the index would grow with every start of a node.
const keepGone = 16

// tickHomes takes devices out of service whose homes are gone: what was volatile is lost at once, the rest when it has been
// away for too long. Of those that were volatile and have no regions any more keepGone are remembered. It has one command on
// its way at a time. The caller holds state for reading, and mu.
func (m *Master) tickHomes(now int64) {
	if m.house.homing || len(m.nodes.homes) == 0 {
		return
	}
	nowMS := m.logTime(now)
	devices := m.machine.Devices()
	var gone []meta.DeviceID
	for i := range devices {
		d := &devices[i]
		if _, open := m.machine.SessionOf(d.Home); d.Home == "" || open {
			continue
		}
		switch {
		case d.Mode == meta.DeviceServing && !d.Volatile:
			until := nowMS + uint64(m.cfg.AwayTimeout/time.Millisecond) //nolint:gosec // checked to be positive
			m.cfg.Logger.Warn("the home of a device is gone: nothing there is served until it is back",
				slog.Uint64("device", uint64(d.ID)), slog.String("home", d.Home), slog.Duration("for", m.cfg.AwayTimeout))
			m.house.homing = m.chore(awayCommand(d, until), &m.house.homing)
		case d.Mode == meta.DeviceServing, d.UntilMS != 0 && d.UntilMS <= nowMS:
			m.cfg.Logger.Warn("the home of a device is gone: what lay there is dropped",
				slog.Uint64("device", uint64(d.ID)), slog.String("home", d.Home))
			m.house.homing = m.loseDevice(d)
		case d.Volatile && d.Regions == 0:
			if gone = append(gone, d.ID); len(gone) <= keepGone {
				continue
			}
			m.cfg.Logger.Info("a device whose home and bytes are gone is forgotten", slog.Uint64("device", uint64(gone[0])))
			m.house.homing = m.chore(&meta.DropDevice{Device: gone[0]}, &m.house.homing)
		default:
			continue
		}
		return
	}
}

// awayCommand takes a device out of service until a log time, 0 = for good: until it is attached again.
func awayCommand(d *meta.DeviceInfo, until uint64) meta.Command {
	return &meta.SetDevice{Device: d.ID, Mode: meta.DeviceAway, UntilMS: until}
}

// loseDevice gives up what lies on a device, under a generation that no node has ever shown, and then takes it out of
// service. If a new leader finds only the first of it done, it does both. It reports whether it has begun. The caller holds
// mu.
func (m *Master) loseDevice(d *meta.DeviceInfo) bool {
	term := m.term
	err := m.do(&meta.Retire{Device: d.ID, Generation: m.cfg.Random() | 1, Fenced: true}, func(code protocol.Code, _ []byte) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.term != term {
			return
		}
		if code != protocol.CodeOK || !m.chore(awayCommand(d, 0), &m.house.homing) {
			m.house.homing = false // the next tick tries again
		}
	})
	return err == nil
}
