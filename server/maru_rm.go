package server

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"larder/cxl"
	"larder/maru/rm"
	"larder/meta"
	"larder/protocol"
)

const (
	// maruInstance is a session without end whose secret, which nobody is told, makes the tokens of handles: it is part of the
	// replicated state, the same on every member and after every restart.
	maruInstance = "larder/maru"
	// maruAlign is what sizes of Maru's regions are rounded up to, as Maru's resource manager does.
	maruAlign = 2 << 20
	// maruMaxSize is the largest region that may be asked for.
	maruMaxSize = 1 << 48
	// mappedTier is the tier of devices that Maru's clients know what to do with.
	mappedTier = "cxl"
	// maruRetry is how long a request waits that found no leader.
	maruRetry = 50 * time.Millisecond
	// maxMaruTokens are kept of regions; there are fewer regions than that with pages of theirs in use, or they are made again.
	maxMaruTokens = 1 << 16
)

// maruTokens are the tokens of regions, which are in the handle of each key that a client of Maru's is told.
type maruTokens struct {
	mu     sync.RWMutex
	by     meta.SessionID // whose secret they are made with; 0 = none is known
	secret rm.Secret
	tokens map[meta.RegionID]maruToken
}

type maruToken struct{ epoch, token uint64 }

// mapToken is the token of a region's handle, as the resource manager expects it: another one each time that the region is
// given. The caller holds state. It is 0, which no client's request to map the region is granted with, as long as no leader
// has served Maru's clients.
func (m *Master) mapToken(r *meta.RegionInfo) uint64 {
	by, open := m.machine.SessionOf(maruInstance)
	if !open {
		return 0
	}
	t := &m.maruTokens
	t.mu.RLock()
	known, ok := t.tokens[r.ID]
	ok = ok && t.by == by && known.epoch == r.Epoch
	t.mu.RUnlock()
	if ok {
		return known.token
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by != by {
		info, _ := m.machine.Session(by)
		t.secret = sha256.Sum256(binary.LittleEndian.AppendUint64([]byte(maruInstance), info.Secret))
		t.by, t.tokens = by, nil
	}
	if t.tokens == nil || len(t.tokens) >= maxMaruTokens {
		t.tokens = map[meta.RegionID]maruToken{}
	}
	token := t.secret.Token(uint64(r.ID), r.Offset, r.Length, r.Epoch, r.Instance)
	t.tokens[r.ID] = maruToken{r.Epoch, token}
	return token
}

// openMaru has the session for tokens opened, unless it is. Leader only.
func (s *Server) openMaru(ctx context.Context) error {
	m := s.master
	m.state.RLock()
	_, open := m.machine.SessionOf(maruInstance)
	m.state.RUnlock()
	if open {
		return nil
	}
	_, err := s.do(ctx, &meta.OpenSession{Instance: maruInstance, Tenant: meta.DefaultTenant, Secret: m.cfg.Random() | 1})
	if err != nil && protocol.CodeOf(err) != protocol.CodeDuplicate {
		return fmt.Errorf("server: begin to serve Maru's clients: %w", err)
	}
	return nil
}

// maruRegions has a resource manager's regions come from the pool. Any member answers: what it reads is as new as the leader's
// word, and what changes something goes to the leader.
type maruRegions struct{ s *Server }

// Alloc implements rm.Regions. The client owns the region until it frees it: it is a metadata server, and whether its clients
// use what it has given them is not known here. An answer that is lost with a leader may leave a region behind.
func (p maruRegions) Alloc(ctx context.Context, client string, size uint64, path string) (rm.Region, error) {
	switch {
	case size == 0 || size > maruMaxSize:
		return rm.Region{}, rm.ErrSize
	case client == maruInstance:
		return rm.Region{}, rm.ErrNoRoom
	}
	device, err := p.deviceAt(ctx, path)
	if err != nil {
		return rm.Region{}, err
	}
	req := protocol.AllocRequest{
		InstanceID: client, Size: (size + maruAlign - 1) / maruAlign * maruAlign, PageSize: maruAlign, Tier: mappedTier,
		Device: uint64(device),
	}
	var reply protocol.AllocReply
	err = p.s.askLeader(ctx, protocol.TypeRequestAlloc, &req, &reply)
	switch {
	case err != nil:
		return rm.Region{}, err
	case reply.Code == protocol.CodeNoSpace, reply.Code == protocol.CodeLimit, reply.Code == protocol.CodePending:
		return rm.Region{}, rm.ErrNoRoom
	case reply.Err() != nil:
		return rm.Region{}, reply.Err()
	}
	r, _, err := p.region(ctx, reply.Region.RegionID)
	return r, err
}

// deviceAt finds the device that has a path, or 0 for any.
func (p maruRegions) deviceAt(ctx context.Context, path string) (meta.DeviceID, error) {
	if _, err := p.s.node.ReadIndex(ctx); err != nil {
		return 0, err
	}
	some := false
	for _, d := range p.s.master.Devices() {
		if !mappable(&d) {
			continue
		}
		some = true
		if shared, _ := p.s.devices.share(&d); path != "" && (path == d.Path || path == shared) {
			return d.ID, nil
		}
	}
	switch {
	case !some:
		return 0, rm.ErrNoPool
	case path != "":
		return 0, rm.ErrUnknownPath
	}
	return 0, nil
}

// mappable reports whether clients reach a device by mapping it.
func mappable(d *meta.DeviceInfo) bool { return d.Tier == mappedTier && d.Mode == meta.DeviceServing }

// Free implements rm.Regions. What lies in the region is served until its space is needed.
func (p maruRegions) Free(ctx context.Context, client string, h rm.Handle) error {
	r, info, err := p.region(ctx, h.Region)
	switch {
	case err != nil:
		return err
	case r.Handle != h:
		return rm.ErrToken
	case info.Instance != client:
		return rm.ErrOwner
	case info.State == meta.RegionDeparted:
		return rm.ErrNotFound
	}
	req := protocol.ReturnAllocRequest{InstanceID: client, RegionID: h.Region, Epoch: info.Epoch}
	var reply protocol.SuccessReply
	if err := p.s.askLeader(ctx, protocol.TypeReturnAlloc, &req, &reply); err != nil {
		return err
	}
	if reply.Code == 0 && !reply.Success {
		return rm.ErrNotFound // it has been freed meanwhile
	}
	return reply.Err()
}

// Access implements rm.Regions.
func (p maruRegions) Access(ctx context.Context, h rm.Handle) (rm.Region, error) {
	r, _, err := p.region(ctx, h.Region)
	if err == nil && r.Handle != h {
		err = rm.ErrToken
	}
	return r, err
}

// region describes a region that may be mapped.
func (p maruRegions) region(ctx context.Context, id uint64) (rm.Region, meta.RegionInfo, error) {
	if _, err := p.s.node.ReadIndex(ctx); err != nil {
		return rm.Region{}, meta.RegionInfo{}, err
	}
	m := p.s.master
	m.state.RLock()
	defer m.state.RUnlock()
	info, ok := m.machine.Region(meta.RegionID(id))
	device, there := m.machine.Device(info.Device)
	if !ok || !there || info.State > meta.RegionDeparted || !mappable(&device) {
		return rm.Region{}, info, rm.ErrNotFound
	}
	token := m.mapToken(&info)
	if token == 0 {
		return rm.Region{}, info, errors.New("no leader has served Maru's clients yet: set maru_rm on all members")
	}
	r := rm.Region{Handle: rm.Handle{Region: id, Offset: info.Offset, Length: info.Length, Token: token}}
	r.Path, _ = p.s.devices.share(&device)
	return r, info, nil
}

// Pools implements rm.Regions.
func (p maruRegions) Pools(ctx context.Context) ([]rm.Pool, error) {
	if _, err := p.s.node.ReadIndex(ctx); err != nil {
		return nil, err
	}
	var pools []rm.Pool
	for _, d := range p.s.master.Devices() {
		if mappable(&d) {
			path, kind := p.s.devices.share(&d)
			pools = append(pools, rm.Pool{
				Path: path, File: kind != cxl.DeviceDAX, Total: d.Size - cxl.HeaderSpan, Free: d.Free, Align: maruAlign,
			})
		}
	}
	return pools, nil
}

// share is the path at which clients of this host open a device, and its kind: the one that this member opened it at, or else
// the one that it is known by.
func (d *devices) share(info *meta.DeviceInfo) (path string, kind cxl.Kind) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if dev := d.open[info.Path]; dev != nil {
		return dev.SharePath(), dev.Kind()
	}
	return info.Path, cxl.KindUnknown
}

// collectMaruRM emits what the resource manager has done, if this member is one.
func (m *metrics) collectMaruRM(e emitter) {
	r := m.server.maruRM
	if r == nil {
		return
	}
	for kind, name := range map[rm.Kind]string{
		rm.KindAlloc: "ALLOC", rm.KindFree: "FREE", rm.KindStats: "STATS", rm.KindAccess: "GET_ACCESS",
	} {
		e.counter("maru_rm_requests_total", "Requests to the resource manager for Maru's clients.", r.Requests[kind].Load(), "type", name)
	}
	e.counter("maru_rm_errors_total", "Requests to it that were answered with an error of their own.", r.Faults.Load())
	e.counter("maru_rm_refused_total", "Connections to it that were closed at once, since there were too many.", r.Refused.Load())
	e.gauge("maru_rm_clients", "Connections to it.", float64(r.Clients.Load()))
}

// What is sent to the leader, and what comes back.
type (
	encoder interface{ Append(b []byte) []byte }
	decoder interface {
		Decode(b []byte) error
		Err() error
	}
)

// askLeader sends a request that needs no session to the leader, itself included, until one answers or ctx ends. A refusal for
// want of a leader is tried again; all others are the caller's to look at.
func (s *Server) askLeader(ctx context.Context, t protocol.Type, req encoder, reply decoder) error {
	payload := req.Append(nil)
	for {
		answer, err := s.askOnce(ctx, t, payload)
		if err == nil {
			err = reply.Decode(answer)
		}
		if err == nil {
			switch code := protocol.CodeOf(reply.Err()); code {
			case protocol.CodeNotLeader, protocol.CodeUnavailable, protocol.CodeBusy, protocol.CodeDiskFull:
				err = reply.Err()
			default:
				return nil
			}
		}
		if !pause(ctx, maruRetry) {
			return err
		}
	}
}

// errNoLeaderKnown says that there is nobody to ask.
var errNoLeaderKnown = errors.New("no leader is known")

func (s *Server) askOnce(ctx context.Context, t protocol.Type, payload []byte) ([]byte, error) {
	if s.master.Serving() {
		return s.askHere(ctx, t, payload)
	}
	addr, id := s.leaderAddr()
	if addr == "" || id == s.nodeID {
		return nil, errNoLeaderKnown
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = nc.Close() })() // it is read and written in vain then
	defer nc.Close()                                          //nolint:errcheck // its answer is there, or not
	b, mark := protocol.BeginFrame(nil, t, 1)
	if _, err := nc.Write(protocol.EndFrame(append(b, payload...), mark)); err != nil {
		return nil, err
	}
	_, answer, err := protocol.NewReader(nc).Next()
	return answer, err
}

// askHere has this member serve a request.
func (s *Server) askHere(ctx context.Context, t protocol.Type, payload []byte) ([]byte, error) {
	p := &insider{answered: make(chan struct{}, 1)}
	m := s.master
	c := m.NewClient(p)
	defer m.CloseClient(c)
	h := protocol.Header{Type: t, Sequence: 1, Length: uint32(len(payload))} //nolint:gosec // a request without keys
	out, _ := m.Serve(c, h, payload, nil, m.now())
	if len(out) == 0 {
		select {
		case <-p.answered:
			out = p.take()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if len(out) < protocol.HeaderSize {
		return nil, errNoLeaderKnown
	}
	return out[protocol.HeaderSize:], nil
}

// insider is a client of the Master in its own process, that asks one thing. It implements Peer.
type insider struct {
	mu       sync.Mutex
	buf      []byte
	answered chan struct{} // 1
}

// Lock implements Peer.
func (p *insider) Lock() []byte {
	p.mu.Lock()
	return p.buf
}

// Unlock implements Peer.
func (p *insider) Unlock(buf []byte) {
	p.buf = buf
	p.mu.Unlock()
}

// Flush implements Peer.
func (p *insider) Flush() {
	select {
	case p.answered <- struct{}{}:
	default:
	}
}

// Close implements Peer. There is no connection.
func (p *insider) Close(string) { p.Flush() }

func (p *insider) take() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.buf
}
