package server

import (
	"context"
	"strings"
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
		TimeoutMS: max(1, uint64(within/time.Millisecond)),
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
