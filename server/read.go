package server

import (
	"errors"
	"sync"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Outcome says how Serve left a request.
type Outcome uint8

// Outcomes.
const (
	// Served means that the reply has been appended, or will be sent later.
	Served Outcome = iota
	// Blocked means that an entry in question is about to be evicted, or that its time is over and the log must say so
	// first: wait for Settled, and serve the same frame again. Nothing was appended.
	Blocked
	// Fatal means that the connection must be closed after what was appended has been sent.
	Fatal
)

// Access says what a member has to make sure of around serving a request.
type Access uint8

// Accesses.
const (
	// AccessLeader requests are served by the leader. What Serve appended for them may be sent only after the member
	// has confirmed, in a round that began after Serve returned, that it still leads in the same term.
	AccessLeader Access = iota
	// AccessRead requests are also served by a member that does not lead, after a ReadIndex that began after the
	// request arrived.
	AccessRead
	// AccessNone requests are served by anybody.
	AccessNone
)

// AccessOf says how a type is served.
func AccessOf(t protocol.Type) Access {
	switch t {
	case protocol.TypeExists, protocol.TypeBatchExists, protocol.TypePrefixMatch, protocol.TypeListKeys,
		protocol.TypeListBlocks, protocol.TypeListAllocations, protocol.TypeGetStats, protocol.TypeGetUsage:
		return AccessRead
	case protocol.TypeShutdown, protocol.TypeReportStats:
		return AccessNone
	default:
		return AccessLeader
	}
}

// scratch is what decoding and serving requests needs; it is shared by connections that are not busy.
type scratch struct {
	lookup   protocol.LookupRequest
	keys     protocol.KeysRequest
	register protocol.RegisterRequest
	leases   protocol.LeasesRequest
	prefix   protocol.PrefixMatchRequest
	cancel   protocol.CancelRequest
	results  []protocol.LookupResult
	copies   []protocol.Location // what results' Copies alias
	places   []meta.Location
	slots    []meta.Slot
	bools    []bool
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Serve serves one request of a client. It appends the reply to out if there is one at once; the reply to what has to
// go through the log is sent later. now is the clock, read after the request arrived.
func (m *Master) Serve(c *Client, h protocol.Header, payload, out []byte, now int64) ([]byte, Outcome) {
	m.n.Requests[h.Type].Add(1)
	if s := c.sess.Load(); s != nil {
		if s.ended.Load() && h.Type != protocol.TypeHandshake {
			return m.refuse(out, h, &errSessionEnded), Served
		}
		s.hear(now)
	}
	if h.Type == protocol.TypeLookup || h.Type == protocol.TypeBatchLookup {
		return m.timedLookup(c, h, payload, out, now)
	}
	sc, _ := scratches.Get().(*scratch)
	out, outcome := m.serve(c, sc, h, payload, out, now)
	scratches.Put(sc)
	return out, outcome
}

// leads reports whether a connection may be served what only a leader may say. One that read its requests before this
// member led, and so is not going to confirm that it does, may not: it is told to retry.
func (m *Master) leads(c *Client) bool { return m.serving.Load() && !c.follows }

var errSessionEnded = protocol.Error{
	Code: protocol.CodeSessionExpired, Message: "the session has ended: open a new one with HANDSHAKE",
}

// refuse appends an error reply and counts it.
func (m *Master) refuse(out []byte, h protocol.Header, f *protocol.Error) []byte {
	m.n.Errors[h.Type].Add(1)
	return appendError(out, h, f)
}

// refuseErr is refuse for an error of the decoder.
func (m *Master) refuseErr(out []byte, h protocol.Header, err error) []byte {
	f := protocol.Error{Code: protocol.CodeOf(err), Message: err.Error()}
	if d, ok := errors.AsType[*protocol.DecodeError](err); ok {
		f = *d.Reply()
	}
	return m.refuse(out, h, &f)
}

// serve dispatches everything but lookups.
func (m *Master) serve(
	c *Client, sc *scratch, h protocol.Header, payload, out []byte, now int64,
) ([]byte, Outcome) {
	access := AccessOf(h.Type)
	if access == AccessLeader && !m.leads(c) && h.Type.Known() && h.Type != protocol.TypeHandshake ||
		access == AccessRead && m.barred() {
		f := m.notLeader()
		return m.refuse(out, h, &f), Served
	}
	switch h.Type {
	case protocol.TypeExists, protocol.TypeBatchExists:
		return m.exists(c, sc, h, payload, out, now)
	case protocol.TypeRenew, protocol.TypeRelease:
		return m.serveLeases(c, sc, h, payload, out, now)
	case protocol.TypePrefixMatch:
		return m.prefixMatch(c, sc, h, payload, out, now)
	case protocol.TypeListKeys:
		return m.listKeys(c, h, payload, out, now)
	case protocol.TypeListBlocks:
		return m.listBlocks(c, h, payload, out, now)
	case protocol.TypeListAllocations:
		return m.listAllocations(h, payload, out), Served
	case protocol.TypeGetStats:
		return m.getStats(h, out), Served
	case protocol.TypeGetUsage:
		return m.getUsage(h, out), Served
	case protocol.TypeReportStats:
		return m.reportStats(h, payload, out), Served
	case protocol.TypeHeartbeat:
		b, mark := protocol.BeginReply(out, h)
		return protocol.EndFrame(protocol.AppendEmpty(b), mark), Served
	case protocol.TypeHandshake:
		return m.handshake(c, h, payload, out, now), Served
	case protocol.TypeFreedAck:
		return m.freedAck(c, h, payload, out), Served
	case protocol.TypeAttach:
		return m.attach(c, h, payload, out), Served
	case protocol.TypeTasks:
		return m.tasks(c, h, payload, out), Served
	case protocol.TypeTaskStatus:
		return m.taskStatus(h, payload, out), Served
	case protocol.TypeCopy:
		return m.copyKeys(c, h, payload, out), Served
	case protocol.TypeCancelTask:
		return m.cancelTasks(c, h, payload, out), Served
	case protocol.TypeListNames:
		return m.listNames(c, h, payload, out), Served
	case protocol.TypeWatchNames:
		return m.watchNames(c, h, payload, out, now), Served
	case protocol.TypeAccess:
		return m.access(c, h, payload, out, now), Served
	case protocol.TypeGranted:
		return m.granted(c, h, payload, out), Served
	case protocol.TypeFenced:
		return m.fenced(c, h, payload, out), Served
	case protocol.TypeShutdown:
		return m.refuse(out, h, &protocol.Error{Message: "Unknown message type: 255"}), Served
	default:
		return m.mutate(c, sc, h, payload, out, now), Served
	}
}

// timedLookup serves a lookup, and times one of latencySample.
func (m *Master) timedLookup(c *Client, h protocol.Header, payload, out []byte, now int64) ([]byte, Outcome) {
	c.sampled++
	if c.sampled%latencySample != 0 {
		return m.serveLookup(c, h, payload, out, now)
	}
	start := m.now()
	out, outcome := m.serveLookup(c, h, payload, out, now)
	m.n.observeLatency(h.Type, m.now()-start)
	return out, outcome
}

// leaseFor returns how long a lookup's lease lasts.
func (m *Master) leaseFor(c *Client, wantMS uint64) time.Duration {
	switch {
	case wantMS != 0:
		return min(time.Duration(min(wantMS, 1<<30))*time.Millisecond, m.cfg.MaxLease)
	case c.native():
		return m.cfg.DefaultLease
	default:
		return m.cfg.MaxLease // Maru's clients do not know of leases: they get all there is
	}
}

// serveLookup serves LOOKUP_KV and BATCH_LOOKUP_KV: the hot path. It allocates nothing.
func (m *Master) serveLookup(c *Client, h protocol.Header, payload, out []byte, now int64) ([]byte, Outcome) {
	if !m.leads(c) {
		f := m.notLeader()
		return m.refuse(out, h, &f), Served
	}
	sc, _ := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	req := &sc.lookup
	if err := req.DecodeAs(payload, h.Type); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	lease := m.leaseFor(c, req.LeaseMS)
	releases := len(req.Release) > 0
	m.state.RLock()
	at := m.reading(c, now)
	hits := m.findAll(c, sc, &at, now)
	if at.Ahead() {
		m.state.RUnlock()
		return out, m.stamp(c, &at)
	}
	ok := m.grantAll(sc, now, now+int64(lease), uint64(lease/time.Millisecond), c.native()) //nolint:gosec // not negative
	m.state.RUnlock()
	if releases {
		m.wakeParked()
	}
	if !ok {
		m.n.CondemnedWaits.Add(1)
		return out, Blocked
	}
	m.n.Keys.Add(uint64(len(sc.results)))
	m.n.Hits.Add(uint64(hits)) //nolint:gosec // not negative
	return appendLookup(out, h, sc.results, req.Packed), Served
}

// reading is the index as a connection's reads see it: a leader's at the log time that it would stamp now, so that what
// has expired is gone also while nothing is logged, unless the log takes no stamps at the moment; another member's at the
// last stamped one, since it has no clock of its own to move that on. What is Ahead must not be answered: see stamp. The
// caller holds state.
func (m *Master) reading(c *Client, now int64) meta.Reading {
	asOf := c.asOf
	c.asOf = 0
	switch {
	case !m.leads(c) || now < m.stampless.Load():
		return m.machine.At(m.machine.NowMS())
	case asOf != 0:
		return m.machine.At(asOf) // it has waited for that stamp: not again for what was over meanwhile
	default:
		return m.machine.At(m.logTime(now))
	}
}

// stamp has the log time of a reading logged, if it is ahead of what is, so that what has been answered as over stays so
// under every later leader. It reports Blocked, for the caller of Serve to wait for that.
func (m *Master) stamp(c *Client, at *meta.Reading) Outcome {
	c.asOf = at.NowMS()
	m.mu.Lock()
	m.stampMS = max(m.stampMS, at.NowMS())
	m.mu.Unlock()
	m.n.StampWaits.Add(1)
	m.cfg.Wake()
	return Blocked
}

// presentMS is the log time that operators see: see reading. The caller holds state.
func (m *Master) presentMS() uint64 {
	if m.serving.Load() {
		return m.logTime(m.now())
	}
	return m.machine.NowMS()
}

// findAll looks the keys up and fills in results and slots; it returns how many were found. The caller holds state.
func (m *Master) findAll(c *Client, sc *scratch, at *meta.Reading, now int64) (hits int) {
	sc.results, sc.copies = sc.results[:0], sc.copies[:0]
	copies := c.copies.Load()
	ready := copies && m.mayPromote(c, now)
	sc.slots = at.FindAll(c.tenantID(m), sc.lookup.Keys, sc.lookup.StopAtMiss, sc.slots[:0])
	var l meta.Location
	for _, slot := range sc.slots {
		if slot == meta.None {
			sc.results = append(sc.results, protocol.LookupResult{})
			continue
		}
		hits++
		m.machine.Location(slot, &l)
		sc.results = append(sc.results, protocol.LookupResult{Found: true, Location: l.Wire()})
		if copies {
			m.findCopies(sc, slot, ready)
		}
	}
	return hits
}

// findCopies adds to the last of the results where else the entry of a slot lies, and whether that should be in a faster
// tier, of a client that may be asked to copy it there if ready. The caller holds state.
func (m *Master) findCopies(sc *scratch, slot meta.Slot, ready bool) {
	r := &sc.results[len(sc.results)-1]
	r.Promote = m.wanted(slot, ready)
	if m.machine.Copies(slot) {
		sc.places = m.machine.Locations(slot, sc.places[:0])
		first := len(sc.copies)
		for i := 1; i < len(sc.places); i++ { // the first is the one that the result has already
			sc.copies = append(sc.copies, sc.places[i].Wire())
		}
		r.Copies = sc.copies[first:len(sc.copies):len(sc.copies)]
	}
	if r.Promote || len(r.Copies) > 0 {
		r.Version = m.machine.Birth(slot)
	}
}

// grantAll leases what was found and counts it as used. It does nothing but end leases, and returns false, if one of
// the entries is about to go. The caller holds state, so that the slots are still what they were.
func (m *Master) grantAll(sc *scratch, now, until int64, leaseMS uint64, named bool) bool {
	l := &m.leases
	granted, dropped := uint64(0), uint64(0)
	l.mu.Lock()
	for _, lease := range sc.lookup.Release {
		if l.release(lease, now) {
			m.n.LeasesReleased.Add(1)
		}
	}
	sc.lookup.Release = sc.lookup.Release[:0]
	marks := uint32(0)
	for _, slot := range sc.slots { // fetches the records at the same time, as meta.Reading.FindAll does
		if slot != meta.None {
			marks |= l.at(slot).touch
		}
	}
	if marks&slotCondemned != 0 || l.condemned > 0 {
		for i, slot := range sc.slots {
			if slot != meta.None && l.blocked(slot, meta.RegionID(sc.results[i].RegionID)) {
				l.mu.Unlock()
				return false
			}
		}
	}
	for i, slot := range sc.slots {
		if slot == meta.None {
			continue
		}
		r := &sc.results[i]
		lease := l.grant(slot, meta.RegionID(r.RegionID), now, until)
		if named {
			r.Lease, r.LeaseMS = lease, leaseMS
		}
		if len(r.Copies) > 0 {
			r.Copies = l.grantCopies(r.Copies, until)
		}
		granted++
		if !l.used(slot, now) {
			dropped++
		}
	}
	l.mu.Unlock()
	m.n.LeasesGranted.Add(granted)
	if dropped > 0 {
		m.n.TouchesDropped.Add(dropped)
	}
	return true
}

// appendLookup appends the reply to a lookup in the form that was asked for.
func appendLookup(out []byte, h protocol.Header, results []protocol.LookupResult, packed bool) []byte {
	b, mark := protocol.BeginReply(out, h)
	switch {
	case !h.Type.Batch():
		b = protocol.AppendLookupResult(b, &results[0])
	case packed:
		reply := protocol.LookupReply{Results: results}
		b = reply.AppendPacked(b)
	default:
		b = protocol.AppendLookupHead(b, len(results))
		for i := range results {
			b = protocol.AppendLookupResult(b, &results[i])
		}
	}
	return protocol.EndFrame(b, mark)
}

// exists serves EXISTS_KV and BATCH_EXISTS_KV. It promises nothing and does not count as a use.
func (m *Master) exists(
	c *Client, sc *scratch, h protocol.Header, payload, out []byte, now int64,
) ([]byte, Outcome) {
	req := &sc.keys
	if err := req.DecodeAs(payload, h.Type); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	sc.bools = sc.bools[:0]
	m.state.RLock()
	tenant, at := c.tenantID(m), m.reading(c, now)
	sc.slots = at.FindAll(tenant, req.Keys, false, sc.slots[:0])
	m.state.RUnlock()
	for _, slot := range sc.slots {
		sc.bools = append(sc.bools, slot != meta.None)
	}
	if at.Ahead() {
		return out, m.stamp(c, &at)
	}
	b, mark := protocol.BeginReply(out, h)
	reply := protocol.KeysReply{Results: sc.bools}
	return protocol.EndFrame(reply.AppendAs(b, h.Type), mark), Served
}

// serveLeases serves RENEW and RELEASE.
func (m *Master) serveLeases(
	c *Client, sc *scratch, h protocol.Header, payload, out []byte, now int64,
) ([]byte, Outcome) {
	req := &sc.leases
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	until := now + int64(m.leaseFor(c, req.LeaseMS))
	sc.bools = sc.bools[:0]
	var l meta.Location
	m.state.RLock()
	at := m.reading(c, now)
	m.leases.mu.Lock()
	for _, lease := range req.Leases {
		slot := meta.Slot(lease & 0xffffffff)
		held := false
		switch {
		case h.Type == protocol.TypeRelease:
			if held = m.leases.release(lease, now); held {
				m.n.LeasesReleased.Add(1)
			}
		case at.Live(slot):
			// An entry that has just been cleared or lost must not be read any longer: its lease runs out.
			m.machine.Location(slot, &l)
			held = !m.leases.blocked(slot, l.Region) && m.leases.renew(lease, l.Region, now, until)
			if held && m.machine.Copies(slot) {
				sc.places = m.machine.Locations(slot, sc.places[:0])
				for i := range sc.places {
					m.leases.note(sc.places[i].Region, until)
				}
			}
		}
		sc.bools = append(sc.bools, held)
	}
	m.leases.mu.Unlock()
	m.state.RUnlock()
	if at.Ahead() { // not of a RELEASE: nothing has been done but to renew the leases of others, which may be done again
		return out, m.stamp(c, &at)
	}
	if h.Type == protocol.TypeRelease {
		m.wakeParked()
	}
	b, mark := protocol.BeginReply(out, h)
	reply := protocol.LeasesReply{Success: true, Results: sc.bools}
	return protocol.EndFrame(reply.Append(b), mark), Served
}

// prefixMatch serves PREFIX_MATCH.
func (m *Master) prefixMatch(
	c *Client, sc *scratch, h protocol.Header, payload, out []byte, now int64,
) ([]byte, Outcome) {
	req := &sc.prefix
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	if req.Members > meta.MaxGroupMembers {
		return m.refuse(out, h, &protocol.Error{Code: protocol.CodeBadRequest, Message: "members is over 1024"}), Served
	}
	ctx := meta.ContextOf(c.tenantName(), &req.Context)
	var reply protocol.PrefixMatchReply
	var collect func(key []byte)
	if req.WantKeys {
		collect = func(key []byte) { reply.Keys = append(reply.Keys, append([]byte(nil), key...)) }
	}
	m.state.RLock()
	at := m.reading(c, now)
	reply.Matched = uint64(at.PrefixMatch(&ctx, req.Hashes, req.Members, collect)) //nolint:gosec // not negative
	m.state.RUnlock()
	if at.Ahead() {
		return out, m.stamp(c, &at)
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark), Served
}

// listKeysDefault is how many keys a page of LIST_KEYS has if the request names none.
const listKeysDefault = 256

// listKeys serves LIST_KEYS.
func (m *Master) listKeys(c *Client, h protocol.Header, payload, out []byte, now int64) ([]byte, Outcome) {
	var req protocol.ListKeysRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	if req.Limit == 0 {
		req.Limit = listKeysDefault
	}
	var reply protocol.ListKeysReply
	m.state.RLock()
	at := m.reading(c, now)
	reply.Cursor = at.ListKeys(c.tenantName(), req.Prefix, req.Cursor, int(req.Limit), func(s meta.Slot) { //nolint:gosec // at most MaxBatch
		reply.Keys = append(reply.Keys, m.keyInfo(s))
	})
	m.state.RUnlock()
	if at.Ahead() {
		return out, m.stamp(c, &at)
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark), Served
}

// listBlocks serves LIST_BLOCKS.
func (m *Master) listBlocks(c *Client, h protocol.Header, payload, out []byte, now int64) ([]byte, Outcome) {
	var req protocol.ListBlocksRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err), Served
	}
	if req.Limit == 0 {
		req.Limit = listKeysDefault
	}
	var reply protocol.ListBlocksReply
	places := map[*meta.Context]uint16{}
	m.state.RLock()
	at := m.reading(c, now)
	reply.Cursor = at.ListBlocks(c.tenantName(), req.Cursor, int(req.Limit), func(b *meta.Block) { //nolint:gosec // at most MaxBatch
		place, known := places[b.Context]
		if !known {
			place = uint16(len(reply.Contexts)) //nolint:gosec // a page has less
			places[b.Context] = place
			x := b.Context
			reply.Contexts = append(reply.Contexts, protocol.Context{
				Model: x.Model, LoRA: x.LoRA, Salt: x.Salt, BlockSize: x.BlockSize, Seed: x.Seed,
			})
		}
		reply.Blocks = append(reply.Blocks, protocol.BlockInfo{
			Context: place, InMemory: b.Media&meta.InMemory != 0, OnDisk: b.Media&meta.OnDisk != 0, HasParent: b.HasParent,
			Group: b.Group, Hash: b.Hash, Parent: b.Parent, Index: uint64(b.Index),
		})
	})
	m.state.RUnlock()
	if at.Ahead() {
		return out, m.stamp(c, &at)
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark), Served
}

// keyInfo describes an entry. The caller holds state.
func (m *Master) keyInfo(s meta.Slot) protocol.KeyInfo {
	info := m.machine.Entry(s)
	k := protocol.KeyInfo{Key: append([]byte(nil), m.machine.Key(s)...), Location: info.Wire()}
	if info.Class != meta.ClassNormal {
		k.Class = info.Class.String()
	}
	if info.Class == meta.ClassHard {
		k.Pins = 1
	}
	return k
}

// listAllocations serves LIST_ALLOCATIONS.
func (m *Master) listAllocations(h protocol.Header, payload, out []byte) []byte {
	var req protocol.ListAllocationsRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	reply := protocol.ListAllocationsReply{Success: true}
	m.state.RLock()
	for _, st := range []meta.RegionState{meta.RegionOwned, meta.RegionOrphaned} {
		m.machine.RegionsIn(st, func(r meta.RegionInfo) {
			if req.ExcludeInstanceID == "" || r.Instance != req.ExcludeInstanceID {
				reply.Allocations = append(reply.Allocations, wireRegion(&r))
			}
		})
	}
	m.state.RUnlock()
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}

// wireRegion converts a region to the protocol's form.
func wireRegion(r *meta.RegionInfo) protocol.Region {
	return protocol.Region{
		Handle: protocol.Handle{RegionID: uint64(r.ID), Offset: r.Offset, Length: r.Length},
		Device: uint64(r.Device), Generation: r.Generation, Epoch: r.Epoch, PageSize: r.PageSize,
	}
}

// getUsage serves GET_USAGE.
func (m *Master) getUsage(h protocol.Header, out []byte) []byte {
	var reply protocol.GetUsageReply
	m.state.RLock()
	st := m.machine.Stats()
	reply.PoolTotal, reply.PoolFree = st.PoolBytes, st.FreeBytes
	rows := map[string]*protocol.InstanceUsage{}
	var order []string
	for _, r := range m.machine.Regions() {
		if r.Instance == "" {
			continue
		}
		u := rows[r.Instance]
		if u == nil {
			u = &protocol.InstanceUsage{InstanceID: r.Instance}
			rows[r.Instance] = u
			order = append(order, r.Instance)
		}
		u.Regions++
		u.Allocated += r.Length
		u.Used += r.LiveBytes
	}
	m.state.RUnlock()
	for _, name := range sorted(order) {
		reply.Instances = append(reply.Instances, *rows[name])
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}
