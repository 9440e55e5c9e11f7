package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"larder/maru"
	"larder/meta"
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

// Read implements maru.Index.
func (d *maruDoor) Read(q *maru.Request, b []byte) ([]byte, maru.Outcome) {
	return d.s.master.ReadMaru(q, &d.s.maru.Stats, b)
}

// ReadMaru appends the reply's payload to a request of Maru's that changes nothing, from the index as it is now; statistics
// are those that this member has kept. What it says holds if this member led until after it was read. It may be called
// concurrently.
func (m *Master) ReadMaru(q *maru.Request, statistics *maru.Stats, b []byte) ([]byte, maru.Outcome) {
	m.state.RLock()
	defer m.state.RUnlock()
	ok := true
	switch q.Type {
	case maru.Exists, maru.BatchExists:
		i := 0
		late := m.lateAmong(q.Keys)
		b = maru.AppendBools(b, q.Type, len(q.Keys), func() bool {
			i++
			return !late[i-1] && m.machine.MaruExists(q.Keys[i-1])
		})
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
		b, ok = maru.AppendTotals(b, &t, statistics)
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
	var one [1]meta.MaruFound
	found, hits := one[:0], uint64(0)
	for _, key := range q.Keys {
		f := m.machine.MaruLookup(key)
		if found = append(found, f); f.Region != 0 {
			hits++
		}
	}
	if !m.leaseMaru(q.Keys, found) {
		return b, maru.Later // it may be given to somebody else by what is on its way
	}
	i := 0
	b = maru.AppendLookup(b, q.Type, len(found), func() meta.MaruFound {
		i++
		return found[i-1]
	}, m.maruHandle)
	m.n.Keys.Add(uint64(len(q.Keys)))
	m.n.Hits.Add(hits)
	return b, maru.Done
}

// lateAmong finds the keys, by their places, that are about to be undone; there hardly ever are any.
func (m *Master) lateAmong(keys [][]byte) (late map[int]bool) {
	l := &m.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.undo) == 0 {
		return nil
	}
	late = map[int]bool{}
	for i, key := range keys {
		_, late[i] = l.undo[string(key)]
	}
	return late
}

// leaseMaru leaves what was found where it is for a while, and takes out what is about to be undone. It reports false if a
// region may be on its way to somebody else.
func (m *Master) leaseMaru(keys [][]byte, found []meta.MaruFound) bool {
	until, last := m.now()+int64(m.cfg.MaruLease), meta.RegionID(0)
	l := &m.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range found {
		if len(l.undo) > 0 {
			if _, late := l.undo[string(keys[i])]; late {
				found[i] = meta.MaruFound{}
			}
		}
		if found[i].Region == 0 || found[i].Region == last {
			continue
		}
		last = found[i].Region
		x := l.region(last)
		if x.condemned > 0 {
			return false
		}
		x.until = max(x.until, until)
	}
	return true
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

// collectMaru emits what the metadata server for Maru's clients has done, if this member is one.
func (m *metrics) collectMaru(e emitter) {
	d := m.server.maru
	if d == nil {
		return
	}
	for t := range 256 {
		name, n := maru.TypeName(t), d.Requests[t].Load()
		if failed := d.Failures[t].Load(); name != "" && (n > 0 || failed > 0) {
			e.counter("maru_requests_total", "Requests of Maru's clients by message type.", n, "type", name)
			e.counter("maru_errors_total", "Requests of theirs that were answered with an error.", failed, "type", name)
		}
	}
	e.counter("maru_forwarded_total", "Requests of theirs that were passed on to the leader.", d.Forwarded.Load())
	e.counter("maru_late_total", "Requests of theirs that were refused since they came too late, or may have.", d.Late.Load())
	e.counter("maru_accepted_total", "Connections of theirs.", d.Accepted.Load())
	e.gauge("maru_connections", "Connections of theirs at present.", float64(d.Connections.Load()))
	m.server.master.state.RLock()
	keys, _ := m.server.master.machine.MaruTotal()
	m.server.master.state.RUnlock()
	e.gauge("maru_keys", "Keys of theirs in the index.", float64(keys))
}
