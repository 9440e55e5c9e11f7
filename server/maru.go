package server

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"larder/maru"
	"larder/meta"
	"larder/protocol"
)

const (
	// ownerInterval is how often owners of Maru's are looked for among the connections.
	ownerInterval = time.Second
	// ownerAt separates the host from the identity in what the index keeps of an owner's client.
	ownerAt = "/"
)

// maruDoor answers Maru's clients from the index. It implements maru.Index.
type maruDoor struct {
	s *Server

	mu      sync.Mutex
	clients map[*maru.Client]struct{}
}

// openDoor begins to listen for Maru's clients.
func (s *Server) openDoor() (err error) {
	s.maruDoor = &maruDoor{s: s, clients: map[*maru.Client]struct{}{}}
	if s.maru, err = maru.Listen(s.ctx, s.cfg.Maru, s.cfg.MaxConnections, s.maruDoor, s.logger); err != nil {
		return fmt.Errorf("server: %w", err)
	}
	return nil
}

// Term implements maru.Index.
func (d *maruDoor) Term() uint64 {
	if m := d.s.master; m.Serving() {
		return m.Term()
	}
	return 0
}

// Confirm implements maru.Index.
func (d *maruDoor) Confirm(ctx context.Context, term uint64) bool {
	m := d.s.master
	deadline, err := d.s.node.Confirm(ctx)
	m.n.Confirms.Add(1)
	if err != nil || m.Term() != term || m.now() >= deadline {
		m.n.ConfirmFailures.Add(1)
		return false
	}
	return true
}

// Leader implements maru.Index.
func (d *maruDoor) Leader() string {
	id, self := d.s.node.Leader()
	if self {
		return ""
	}
	d.s.mu.Lock()
	members := d.s.members
	d.s.mu.Unlock()
	for _, m := range members {
		if m.ID == id {
			return decodeContext(m.Context).Maru
		}
	}
	return ""
}

// ResourceManager implements maru.Index.
func (d *maruDoor) ResourceManager() string { return d.s.cfg.MaruRMAdvertise }

// Joined implements maru.Index.
func (d *maruDoor) Joined(c *maru.Client) {
	d.mu.Lock()
	d.clients[c] = struct{}{}
	d.mu.Unlock()
}

// Left implements maru.Index.
func (d *maruDoor) Left(c *maru.Client) {
	d.mu.Lock()
	delete(d.clients, c)
	d.mu.Unlock()
}

// Heard implements maru.Index.
func (d *maruDoor) Heard(c *maru.Client, q *maru.Request) {
	name := q.Instance
	if name == "" && len(q.Entries) > 0 && c.Instance.Load() == nil && !q.Entries[0].Region.Neg && q.Entries[0].Region.Raw == "" {
		// Only who owns a region writes there. After a connection broke this may be all that is heard.
		m := d.s.master
		m.state.RLock()
		r, _ := m.machine.Region(meta.RegionID(q.Entries[0].Region.Abs))
		m.state.RUnlock()
		name = r.Instance
	}
	if old := c.Instance.Load(); name != "" && (old == nil || *old != name) {
		c.Instance.Store(&name)
	}
}

// alive reports whether the client of an instance may have a connection: one over which it was heard, or one of the same
// DEALER, or, of one that has no identity, any from its host of which nothing is known.
func (d *maruDoor) alive(instance, process string) bool {
	host, identity, known := strings.Cut(process, ownerAt)
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.clients {
		heard := c.Instance.Load()
		switch {
		case heard != nil && *heard == instance, !known, identity != "" && c.Identity == identity:
			return true
		case heard == nil && identity == "" && c.Identity == "" && c.Host == host:
			return true
		}
	}
	return false
}

// Read implements maru.Index.
func (d *maruDoor) Read(q *maru.Request, b []byte) ([]byte, maru.Outcome) {
	m := d.s.master
	m.state.RLock()
	defer m.state.RUnlock()
	ok := true
	switch q.Type {
	case maru.Exists, maru.BatchExists:
		i := 0
		m.leases.mu.Lock()
		undo := m.leases.undo
		b = maru.AppendBools(b, q.Type, len(q.Keys), func() bool {
			key := q.Keys[i]
			i++
			_, late := undo[string(key)]
			return !late && m.machine.MaruExists(key)
		})
		m.leases.mu.Unlock()
	case maru.Lookup, maru.BatchLookup:
		return m.maruLookup(q, b)
	case maru.ListAllocations:
		b = maru.AppendHandles(b, m.maruHandles(q.Instance))
	case maru.GetUsage:
		rows, draining := m.maruUsage()
		st := m.machine.Stats()
		b, ok = maru.AppendUsage(b, rows, st.PoolBytes, st.FreeBytes+draining)
	case maru.GetStats:
		t := m.maruTotals()
		b, ok = maru.AppendTotals(b, &t, &d.s.maru.Stats)
	default:
		return b, maru.Failed
	}
	if !ok {
		return b, maru.Failed
	}
	return b, maru.Done
}

// maruLookup answers a LOOKUP_KV or its batch, and leaves what it names where it is for a while. The caller holds state.
func (m *Master) maruLookup(q *maru.Request, b []byte) ([]byte, maru.Outcome) {
	until := m.now() + int64(m.cfg.MaruLease)
	last, hits := meta.RegionID(0), uint64(0)
	l := &m.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	busy, i := false, 0
	b = maru.AppendLookup(b, q.Type, len(q.Keys), func() meta.MaruFound {
		f := m.machine.MaruLookup(q.Keys[i])
		if _, late := l.undo[string(q.Keys[i])]; late {
			f = meta.MaruFound{}
		}
		i++
		if f.Region == 0 {
			return f
		}
		hits++
		if f.Region != last {
			last = f.Region
			x := l.region(f.Region)
			busy = busy || x.condemned > 0
			x.until = max(x.until, until)
		}
		return f
	}, m.maruHandle)
	if busy {
		return b, maru.Later // it may be given to somebody else by what is on its way
	}
	m.n.Keys.Add(uint64(len(q.Keys)))
	m.n.Hits.Add(hits)
	return b, maru.Done
}

// maruHandle is the handle of the region that a key was found in, if it is still that region. The caller holds state.
func (m *Master) maruHandle(f meta.MaruFound) (maru.Handle, bool) {
	r, ok := m.machine.Region(f.Region)
	if !ok || r.Epoch != f.Epoch || r.State > meta.RegionDeparted {
		return maru.Handle{}, false
	}
	return m.handleOf(&r), true
}

func (m *Master) handleOf(r *meta.RegionInfo) maru.Handle {
	return maru.Handle{Region: uint64(r.ID), Offset: r.Offset, Length: r.Length, Token: m.mapToken(r)}
}

// eachMaru calls fn with the regions that instances without an end own, or have returned, in the order in which they were
// given. The caller holds state.
func (m *Master) eachMaru(fn func(r *meta.RegionInfo)) {
	lasting := map[meta.SessionID]bool{}
	for _, r := range m.machine.Regions() {
		of, known := lasting[r.Owner]
		if !known {
			info, ok := m.machine.Session(r.Owner)
			of = ok && info.TTLMS == 0
			lasting[r.Owner] = of
		}
		if of && r.State <= meta.RegionDeparted {
			fn(&r)
		}
	}
}

func (m *Master) maruHandles(but string) (handles []maru.Handle) {
	m.eachMaru(func(r *meta.RegionInfo) {
		if r.State != meta.RegionDeparted && (but == "" || r.Instance != but) {
			handles = append(handles, m.handleOf(r))
		}
	})
	return handles
}

// maruUsage is what each instance has, and how many bytes are on their way to be free.
func (m *Master) maruUsage() (rows []maru.Usage, draining uint64) {
	at := map[string]int{}
	m.eachMaru(func(r *meta.RegionInfo) {
		i, ok := at[r.Instance]
		if !ok {
			i = len(rows)
			at[r.Instance] = i
			rows = append(rows, maru.Usage{Instance: r.Instance})
		}
		u := &rows[i]
		u.Regions++
		u.Allocated += r.Length
		u.Used = u.Used.Plus(m.machine.MaruUsed(r.ID))
	})
	slices.SortFunc(rows, func(a, b maru.Usage) int { return strings.Compare(a.Instance, b.Instance) })
	m.machine.RegionsIn(meta.RegionDraining, func(r meta.RegionInfo) { draining += r.Length })
	return rows, draining
}

func (m *Master) maruTotals() (t maru.Totals) {
	keys, size := m.machine.MaruTotal()
	t.Keys, t.Size = uint64(keys), size //nolint:gosec // not negative
	active := map[string]bool{}
	m.eachMaru(func(r *meta.RegionInfo) {
		t.Regions++
		t.Allocated += r.Length
		if r.State != meta.RegionDeparted {
			active[r.Instance] = true
		}
	})
	t.Active = uint64(len(active))
	return t
}

// Log implements maru.Index.
func (d *maruDoor) Log(
	q *maru.Request, again bool, within time.Duration, done func(o maru.Outcome, reply func(b []byte) []byte),
) {
	m := d.s.master
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
		cmd.DeadlineMS = m.logTime(m.now()) + max(1, uint64(within/time.Millisecond)) //nolint:gosec // positive
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

// Alloc implements maru.Index.
func (d *maruDoor) Alloc(ctx context.Context, c *maru.Client, q *maru.Request, within time.Duration) (maru.Handle, maru.Outcome) {
	m := d.s.master
	switch {
	case q.Size == 0 || q.Size > maruMaxSize || q.Instance == maruInstance:
		return maru.Handle{}, maru.Refused
	case within <= 0:
		return maru.Handle{}, maru.Failed
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if o := d.own(ctx, c, q.Instance); o != maru.Done {
		return maru.Handle{}, o
	}
	req := protocol.AllocRequest{
		InstanceID: q.Instance, Size: (q.Size + maruAlign - 1) / maruAlign * maruAlign, PageSize: maruAlign, Tier: mappedTier,
		TimeoutMS: max(1, uint64(within/time.Millisecond)), //nolint:gosec // positive
	}
	payload, err := d.s.askHere(ctx, protocol.TypeRequestAlloc, req.Append(nil))
	var reply protocol.AllocReply
	if err == nil {
		err = reply.Decode(payload)
	}
	switch {
	case err != nil:
		return maru.Handle{}, maru.Doubt
	case reply.Code == protocol.CodeNotLeader:
		return maru.Handle{}, maru.Doubt // that it was not proposed is not known
	case reply.Err() != nil:
		return maru.Handle{}, maru.Refused
	}
	m.state.RLock()
	defer m.state.RUnlock()
	r, ok := m.machine.Region(meta.RegionID(reply.Region.RegionID))
	if !ok || r.Epoch != reply.Region.Epoch {
		return maru.Handle{}, maru.Doubt
	}
	return m.handleOf(&r), maru.Done
}

// own opens the session that an instance owns its regions by, unless it is open.
func (d *maruDoor) own(ctx context.Context, c *maru.Client, instance string) maru.Outcome {
	m := d.s.master
	m.state.RLock()
	id, open := m.machine.SessionOf(instance)
	info, _ := m.machine.Session(id)
	m.state.RUnlock()
	switch {
	case open && info.TTLMS != 0, instance == "" || len(instance) > protocol.MaxNameBytes:
		return maru.Refused // it is the name of a native client, or none that the index can hold
	case open:
		return maru.Done
	}
	_, err := d.s.do(ctx, &meta.OpenSession{
		Instance: instance, Tenant: meta.DefaultTenant, Secret: m.cfg.Random(), Features: meta.FeatureMaru,
		Process: meta.Process{BootID: c.Host + ownerAt + c.Identity},
	})
	switch protocol.CodeOf(err) {
	case protocol.CodeNotLeader, protocol.CodeUnavailable:
		return maru.Elsewhere
	default:
	}
	if err != nil && protocol.CodeOf(err) != protocol.CodeDuplicate {
		return maru.Refused
	}
	return maru.Done
}

// owners is since when nobody has heard of the clients of instances of Maru's: the leader's, guarded by Master.mu.
type owners struct {
	heard  map[meta.SessionID]int64
	looked int64
}

// tickOwners looks for the clients of Maru's instances. The caller holds state for reading, and mu.
func (m *Master) tickOwners(now int64) {
	if m.cfg.OwnerAlive == nil || now-m.owners.looked < int64(ownerInterval) {
		return
	}
	m.owners.looked = now
	heard := map[meta.SessionID]int64{}
	for _, s := range m.machine.Sessions() {
		if !s.Open || s.Features&meta.FeatureMaru == 0 {
			continue
		}
		at, known := m.owners.heard[s.ID]
		if !known || m.cfg.OwnerAlive(s.Instance, s.Process.BootID) {
			at = now
		}
		heard[s.ID] = at
	}
	m.owners.heard = heard
}

// goneOwner is the instance of Maru's whose client was silent for longest, if that is long enough: its regions may be had
// when there is no other room. The caller holds state for reading, and mu.
func (m *Master) goneOwner(now int64) (id meta.SessionID) {
	since := now - int64(m.cfg.OwnerGrace) + 1
	for s, at := range m.owners.heard {
		if at > since || at == since && s > id {
			continue
		}
		if info, ok := m.machine.Session(s); ok && info.Open && !m.cfg.OwnerAlive(info.Instance, info.Process.BootID) {
			id, since = s, at
		}
	}
	return id
}
