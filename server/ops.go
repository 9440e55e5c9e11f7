package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"larder/cxl"
	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
	"larder/raft"
)

// Version is set when the binary is linked; what the build recorded is used if it is empty.
var Version string

// buildVersion names this build.
func buildVersion() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// Config returns the configuration that the server runs on.
func (s *Server) Config() Config { return s.cfg }

// Addr returns the address that clients are told: with port 0, the one that the system chose.
func (s *Server) Addr() string { return s.cfg.Advertise }

// NodeID returns this member's id.
func (s *Server) NodeID() uint64 { return s.nodeID }

// Counters returns the live counters.
func (s *Server) Counters() *Counters { return s.counters }

// Raft returns the member's own metrics. It is not for hot paths.
func (s *Server) Raft() raft.NodeMetrics { return s.node.Metrics() }

// Status describes this member.
func (s *Server) Status() Status {
	rs := s.node.Status()
	m := s.master
	st := Status{
		NodeID: s.nodeID, ClusterName: s.cfg.ClusterName, ClusterID: strconv.FormatUint(s.clusterID, 16),
		Version: buildVersion(), UptimeMS: (cxl.Boottime() - s.started) / int64(time.Millisecond),
		Role: rs.State, Leader: rs.Leader, Term: rs.Term, Commit: rs.Commit, Applied: rs.Applied,
		FirstIndex: rs.FirstIndex, LastIndex: rs.LastIndex, Serving: m.Serving(),
		Connections: int(s.counters.Connections.Load()), Disk: s.store.Space(),
		Members: memberStatus(&rs),
	}
	for _, x := range rs.Members {
		if x.ID == s.nodeID && x.Learner {
			st.Role = "learner"
		}
	}
	if st.Serving {
		st.GraceMS = int64(m.graceMS(m.now())) //nolint:gosec // an election timeout at most
	}
	applied, hash := m.StateHash()
	st.Applied, st.StateHash = applied, strconv.FormatUint(hash, 16)
	m.state.RLock()
	st.Settings, st.Stats = m.machine.Settings(), m.machine.Stats()
	st.Incarnation, st.LogTimeMS = m.machine.Incarnation(), m.machine.NowMS()
	m.state.RUnlock()
	st.Devices = s.DeviceStatuses()
	if uuid := namesake(m.Devices()); uuid != "" {
		st.Pool = s.poolOf(uuid)
	}
	return st
}

// StateHash returns the index that was applied last and the hash of the state then, which all members agree on.
func (m *Master) StateHash() (applied, hash uint64) {
	m.state.Lock() // the hash brings itself up to date, which is a change
	defer m.state.Unlock()
	return m.machine.Applied(), m.machine.StateHash()
}

func memberStatus(rs *raft.Status) []MemberStatus {
	out := make([]MemberStatus, 0, len(rs.Members))
	for _, m := range rs.Members {
		c := decodeContext(m.Context)
		x := MemberStatus{
			ID: m.ID, Addr: m.Addr, Client: c.Client, Socket: c.Socket, Admin: c.Admin, Learner: m.Learner,
			Leader: m.ID == rs.Leader, Active: m.Active, Match: m.Match,
		}
		if rs.State == "leader" && rs.LastIndex > m.Match {
			x.Lag = rs.LastIndex - m.Match
		}
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b MemberStatus) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Ready returns nil when this member can serve: a leader is known, the log is applied, the disk and, if it leads, the
// devices are well.
func (s *Server) Ready() error {
	if err := s.node.Err(); err != nil {
		return err
	}
	if err := s.store.Healthy(); err != nil {
		return err
	}
	st := s.node.Status()
	switch {
	case st.Leader == 0:
		return errors.New("no leader is known: is a majority of the members running?")
	case st.Applied < st.Commit && st.Commit-st.Applied > readyLag:
		return fmt.Errorf("catching up: %d log entries are not applied yet", st.Commit-st.Applied)
	case st.Leader == s.nodeID && !s.master.Serving():
		return errors.New("just elected, not ready yet")
	case st.Leader == s.nodeID && !s.isReady():
		return errors.Join(errors.New("not all pool devices are in service"), s.devices.problem())
	}
	return nil
}

// readyLag is how many entries a ready member may be behind: what a busy leader commits in a few milliseconds.
const readyLag = 1000

// Members lists the cluster.
func (s *Server) Members() []MemberStatus {
	rs := s.node.Status()
	return memberStatus(&rs)
}

// Regions lists up to limit regions with ids above after, ascending; next is 0 at the end.
func (s *Server) Regions(after uint64, limit int) (regions []RegionStatus, next uint64) {
	m := s.master
	m.state.RLock()
	infos := m.machine.Regions()
	nowMS := m.presentMS()
	m.state.RUnlock()
	infos = infos[sortedAfter(infos, after):]
	if limit > 0 && len(infos) > limit {
		infos = infos[:limit]
		next = uint64(infos[limit-1].ID)
	}
	now := m.now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	for i := range infos {
		r := &infos[i]
		x := RegionStatus{
			ID: uint64(r.ID), Device: uint64(r.Device), Offset: r.Offset, Length: r.Length, PageSize: r.PageSize,
			Epoch: r.Epoch, State: r.State.String(), Instance: r.Instance, Session: uint64(r.Owner),
			Entries: uint64(r.Live), Bytes: r.LiveBytes, Pinned: uint64(r.Pinned), AgeMS: nowMS - min(nowMS, r.BornMS),
		}
		if l := m.leases.regions[r.ID]; l != nil {
			x.LeasedMS = int64(msUp(l.until - now)) //nolint:gosec // an election timeout at most
		}
		if v := m.revokes[r.ID]; v != nil {
			x.RevokingMS = int64(msUp(now - v.since)) //nolint:gosec // milliseconds fit
		}
		regions = append(regions, x)
	}
	return regions, next
}

// sortedAfter returns the index of the first region with an id above after.
func sortedAfter(infos []meta.RegionInfo, after uint64) int {
	i, found := slices.BinarySearchFunc(infos, after, func(r meta.RegionInfo, id uint64) int {
		return cmp.Compare(uint64(r.ID), id)
	})
	if found {
		i++
	}
	return i
}

// Clients lists the sessions, ascending.
func (s *Server) Clients() []ClientStatus {
	m := s.master
	m.state.RLock()
	infos := m.machine.Sessions()
	m.state.RUnlock()
	now := m.now()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]ClientStatus, 0, len(infos))
	for i := range infos {
		x := &infos[i]
		c := ClientStatus{
			Session: uint64(x.ID), Instance: x.Instance, Tenant: x.Tenant, Open: x.Open, Fenced: x.Fenced, TTLMS: x.TTLMS,
			ExpiresMS: -1, Regions: len(x.Regions), Pins: x.Pins, Acked: x.Acked, PID: x.Process.PID,
			LocalHost: m.cfg.Host.knows(x.Process), OpenedMS: x.OpenedMS,
		}
		if v := m.sessions[x.ID]; v != nil && m.leading {
			c.Connections = len(v.clients)
			if v.ttl > 0 {
				c.ExpiresMS = max(0, (v.seen.Load()+v.ttl-now)/int64(time.Millisecond))
			}
		}
		out = append(out, c)
	}
	return out
}

// maxKeyPage bounds a page of Keys.
const maxKeyPage = 10_000

// Keys lists up to limit entries of a tenant ("" = all) whose keys begin with prefix, in no particular order; next is 0
// at the end. A page may be empty and yet not be the last.
func (s *Server) Keys(tenant string, prefix []byte, cursor uint64, limit int) (keys []KeyStatus, next uint64) {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	at := m.machine.At(m.presentMS())
	next = at.ListKeys(tenant, prefix, cursor, min(max(limit, 1), maxKeyPage), func(slot meta.Slot) {
		info := m.machine.Entry(slot)
		k := KeyStatus{
			Tenant: info.Tenant, Key: string(m.machine.Key(slot)), Location: info.Location, Class: info.Class.String(),
		}
		if info.Class == meta.ClassHard {
			k.Pins = 1
		}
		keys = append(keys, k)
	})
	return keys, next
}

// Pins lists about limit of the pins that the filter selects, those of sessions included; all of an entry are on one
// page, which may so be longer. next is 0 at the end; a page may be empty and yet not be the last.
func (s *Server) Pins(filter PinFilter, cursor uint64, limit int) (pins []PinStatus, next uint64) {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	nowMS := m.presentMS()
	at := m.machine.At(nowMS)
	next = at.ListPins(filter.Tenant, filter.Owner, cursor, min(max(limit, 1), maxKeyPage), func(p meta.PinInfo) {
		x := PinStatus{
			Tenant: p.Tenant, Key: p.Key, Class: p.Class.String(), Owner: p.Owner, Session: uint64(p.Session),
			UntilMS: p.UntilMS, LeftMS: -1,
		}
		if p.UntilMS != 0 {
			x.LeftMS = int64(p.UntilMS - min(nowMS, p.UntilMS)) //nolint:gosec // below 2^51
		}
		pins = append(pins, x)
	})
	return pins, next
}

// Settings returns the replicated settings as this member has applied them.
func (s *Server) Settings() meta.Settings {
	s.master.state.RLock()
	defer s.master.state.RUnlock()
	return s.master.machine.Settings()
}

// SetSettings logs the settings that change makes of the present ones. Leader only.
func (s *Server) SetSettings(ctx context.Context, change func(*meta.Settings)) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	set := s.Settings()
	old := set
	change(&set)
	switch {
	case !policy.Known(set.Policy):
		return &protocol.Error{
			Code:    protocol.CodeBadRequest,
			Message: fmt.Sprintf("there is no eviction policy %q: choose one of %v", set.Policy, policy.Names()),
		}
	case set.Version > meta.ClusterVersion || set.Version < old.Version:
		return &protocol.Error{
			Code: protocol.CodeBadRequest,
			Message: fmt.Sprintf("the cluster version can go from %d up to %d, which this binary speaks", old.Version,
				meta.ClusterVersion),
		}
	case set.PageSize == 0 || set.PageSize%meta.MinPageSize != 0 || set.RegionSize < set.PageSize:
		return &protocol.Error{
			Code: protocol.CodeBadRequest, Message: "the page size must be a multiple of 4096, and not over the region size",
		}
	}
	_, err := s.do(ctx, &meta.SetSettings{Settings: set})
	return err
}

// Tenants describes the tenants, in the order in which they were made.
func (s *Server) Tenants() []meta.TenantStats {
	s.master.state.RLock()
	defer s.master.state.RUnlock()
	return s.master.machine.Stats().Tenants
}

// tenant describes one, that is perhaps not there yet, and says how much can be guaranteed to it.
func (s *Server) tenant(name string) (x meta.TenantStats, left uint64) {
	s.master.state.RLock()
	left = s.master.machine.Guaranteeable(name)
	s.master.state.RUnlock()
	for _, t := range s.Tenants() {
		if t.Name == name {
			return t, left
		}
	}
	return meta.TenantStats{Name: name}, left
}

// SetTenant logs the limits that change makes of a tenant's present ones, and describes it afterwards. A tenant that is
// not there yet is made. Leader only.
func (s *Server) SetTenant(ctx context.Context, name string, change func(*meta.TenantLimits)) (meta.TenantStats, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	s.limiting.Lock() // nobody else's change of another limit may come in between
	defer s.limiting.Unlock()
	old, _ := s.tenant(name)
	limits := old.TenantLimits
	change(&limits)
	// Members that run the release before stop at a command that they do not know: it must not even be logged.
	err := error(&protocol.Error{Code: protocol.CodeUnsupported})
	if s.Settings().Version >= meta.VersionTenants || s.master.Term() == 0 { // who does not lead says so
		_, err = s.do(ctx, &meta.SetTenant{Tenant: name, Limits: limits})
	}
	now, left := s.tenant(name)
	f, refused := errors.AsType[*protocol.Error](err)
	if !refused {
		return now, err
	}
	switch f.Code {
	case protocol.CodeNoSpace:
		f.Message = fmt.Sprintf("at most %v can be guaranteed to tenant %q: the rest of the pool is guaranteed to others, "+
			"whose guarantees larder ctl tenants lists", Size(left), clip(name))
	case protocol.CodeNotFound:
		f.Message = fmt.Sprintf("there is no tenant %q, and no limit to set for it: larder ctl tenants lists them", clip(name))
	case protocol.CodeUnsupported:
		f.Message = fmt.Sprintf("tenants have limits from cluster version %d on: when every member runs this release, raise it "+
			"with larder ctl upgrade", meta.VersionTenants)
	case protocol.CodeLimit:
		f.Message = fmt.Sprintf("there are %d contexts and tenants already, and no room for another", meta.MaxContexts)
	default:
	}
	return now, f
}

// AddMember adds a member and returns its id, with which it is then started. A voter is first a learner until it has
// caught up, so that it must be started meanwhile. Leader only.
func (s *Server) AddMember(ctx context.Context, m NewMember) (uint64, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if s.master.barred() { // one that joined now could come to lead, and not know that its index is out of date
		return 0, &protocol.Error{
			Code: protocol.CodeUnavailable, Message: "the restored index has no incarnation of its own yet: retry",
		}
	}
	if m.ID == 0 {
		m.ID = raft.NewMemberID()
	}
	x := raft.Member{
		ID: m.ID, Addr: m.Addr, Context: encodeContext(memberContext{Client: m.Client, Admin: m.Admin}),
	}
	if m.Voter {
		return m.ID, s.node.AddMember(ctx, x)
	}
	return m.ID, s.node.AddLearner(ctx, x)
}

// PromoteMember makes a learner that has caught up a voter. Leader only.
func (s *Server) PromoteMember(ctx context.Context, id uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return s.node.Promote(ctx, id)
}

// RemoveMember removes a member for ever. Leader only.
func (s *Server) RemoveMember(ctx context.Context, id uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return s.node.Remove(ctx, id)
}

// TransferLeadership hands leadership to a member, 0 = the one that is furthest. Leader only.
func (s *Server) TransferLeadership(ctx context.Context, to uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return s.node.TransferLeadership(ctx, to)
}

// Pin pins keys of a tenant for an operator and says for each whether it existed. Leader only.
func (s *Server) Pin(ctx context.Context, keys [][]byte, spec PinSpec) ([]bool, error) {
	cmd := &meta.Pin{Class: meta.ClassHard, Owner: spec.Owner, Keys: keys}
	if spec.Soft {
		cmd.Class = meta.ClassSoft
	}
	if spec.Owner == "" {
		return nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "a pin needs an owner's name"}
	}
	if spec.TTL > 0 {
		m := s.master
		m.state.RLock()
		cmd.Until = m.logTime(m.now()) + uint64(max(spec.TTL/time.Millisecond, 1))
		m.state.RUnlock()
	}
	return s.pin(ctx, spec.Tenant, cmd)
}

// Unpin undoes Pin of the same tenant and owner, hard and soft, and says for each key whether there was such a pin.
// Leader only.
func (s *Server) Unpin(ctx context.Context, tenant string, keys [][]byte, owner string) ([]bool, error) {
	return s.pin(ctx, tenant,
		&meta.Pin{Undo: true, Class: meta.ClassHard, Owner: owner, Keys: keys},
		&meta.Pin{Undo: true, Class: meta.ClassSoft, Owner: owner, Keys: keys})
}

// pin carries commands out and says for each key whether one of them found what it is about.
func (s *Server) pin(ctx context.Context, tenant string, cmds ...*meta.Pin) (out []bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if !s.master.Serving() { // asked first, since what follows may need no command, which would be refused
		f := s.master.notLeader()
		return nil, &f
	}
	if len(cmds[0].Keys) > protocol.MaxBatch {
		return nil, &protocol.Error{Code: protocol.CodeLimit, Message: "at most 4096 keys at once"}
	}
	out = make([]bool, len(cmds[0].Keys))
	session := meta.SessionID(0) // whose tenant is the default one
	if tenant != "" && tenant != meta.DefaultTenant {
		if !s.hasTenant(tenant) {
			return out, nil // and so none of the keys, and nothing that would be worth making it
		}
		if session, err = s.openFor(ctx, tenant); err != nil {
			return nil, err
		}
		// Closed whatever became of ctx: while the log takes nothing it expires by itself.
		defer s.closeFor(session)
	}
	for _, cmd := range cmds {
		result, err := s.doIn(ctx, session, cmd)
		if err != nil {
			return nil, err
		}
		codes, err := meta.DecodeCodes(result)
		if err != nil {
			return nil, err
		}
		for i, c := range codes[:min(len(codes), len(out))] {
			if c == protocol.CodeLimit {
				return nil, &protocol.Error{
					Code: c, Message: "the limit of pins is reached, that of an entry (1024) or of its tenant (larder ctl tenants): " +
						"undo some, or raise the tenant's with larder ctl tenants set",
				}
			}
			out[i] = out[i] || c == 0
		}
	}
	return out, nil
}

// hasTenant reports whether a tenant is there: it has had a session, or limits.
func (s *Server) hasTenant(name string) bool {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	return m.machine.HasTenant(name)
}

// openFor opens a session in a tenant: it is by their session that commands say which tenant's keys they mean.
func (s *Server) openFor(ctx context.Context, tenant string) (meta.SessionID, error) {
	m := s.master
	secret := m.cfg.Random() | 1
	cmd := &meta.OpenSession{
		Instance: fmt.Sprintf("larder-admin-%016x", m.cfg.Random()), Tenant: tenant, Secret: secret,
		TTLMS: uint64(m.cfg.SessionTTL / time.Millisecond), //nolint:gosec // positive
	}
	result, err := s.await(ctx, func(done func(protocol.Code, []byte)) error {
		return m.Do(cmd, func(code protocol.Code, result []byte) {
			if code == protocol.CodeOK {
				m.knowOpened(result)
			}
			done(code, result)
		})
	})
	if err != nil {
		return 0, err
	}
	opened, err := meta.DecodeSession(result)
	return opened.ID, err
}

// knowOpened takes note of a session that no client asked for, so that it expires if nobody closes it, which nobody does
// whose time was over before it was opened. result is that of the command, with its code.
func (m *Master) knowOpened(result []byte) {
	_, rest, err := meta.DecodeCode(result)
	if err != nil {
		return
	}
	opened, err := meta.DecodeSession(rest)
	if err != nil {
		return
	}
	m.state.RLock()
	defer m.state.RUnlock()
	if info, ok := m.machine.Session(opened.ID); ok && info.Open {
		m.mu.Lock()
		m.know(&info)
		m.mu.Unlock()
	}
}

// closeFor logs the end of a session that openFor opened, and does not wait for it.
func (s *Server) closeFor(id meta.SessionID) {
	m := s.master
	if err := m.Do(&meta.CloseSession{ID: id, Fenced: true}, func(protocol.Code, []byte) {}); err != nil {
		s.logger.LogAttrs(s.ctx, slog.LevelDebug, "a session of the admin is left to expire", slog.Any("error", err))
	}
}

// doIn is do for a command that a session gives; 0 is none.
func (s *Server) doIn(ctx context.Context, id meta.SessionID, cmd meta.Command) ([]byte, error) {
	if id == 0 {
		return s.do(ctx, cmd)
	}
	m := s.master
	return s.await(ctx, func(done func(protocol.Code, []byte)) error {
		r := &request{cmd: meta.AppendCommand(nil, meta.Header{Session: id}, cmd), arrived: m.now(), done: done}
		m.mu.Lock()
		defer m.mu.Unlock()
		if fault := m.enqueue(r); fault != nil {
			return fault
		}
		return nil
	})
}

// Drain takes all regions from an instance, except those that it must leave: the report says which, and why. What is in
// the others is dropped; the client is told to let go of them. Leader only.
func (s *Server) Drain(ctx context.Context, instance string) (DrainReport, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var report DrainReport
	var ids []meta.RegionID
	m := s.master
	m.state.RLock()
	_, known := m.machine.SessionOf(instance)
	for _, r := range m.machine.Regions() {
		if r.Instance != instance {
			continue
		}
		known = true
		if r.State == meta.RegionOwned || r.State == meta.RegionOrphaned {
			ids = append(ids, r.ID)
		}
	}
	m.state.RUnlock()
	if !known {
		return report, &protocol.Error{
			Code: protocol.CodeNotFound,
			Message: fmt.Sprintf("instance %q has neither an open session nor a region: larder ctl clients lists the instances",
				clip(instance)),
		}
	}
	for _, id := range ids {
		if err := s.outwait(ctx, id); err != nil {
			return report, err
		}
		asked, kept, err := askFor(func() error {
			_, err := s.do(ctx, &meta.Mark{Region: id})
			return err
		}, func() (meta.RegionInfo, bool) {
			m.state.RLock()
			defer m.state.RUnlock()
			return m.machine.Region(id)
		})
		if err != nil {
			return report, err
		}
		if asked {
			report.Asked++
		}
		if kept != "" {
			report.Kept = append(report.Kept, KeptRegion{Region: uint64(id), Reason: kept})
		}
	}
	return report, nil
}

// askFor marks a region to be given up, and says why not if it is there and stays: a region without pins is marked, so
// one whose pins are gone by the time that they are counted is marked over again, once.
func askFor(mark func() error, look func() (meta.RegionInfo, bool)) (asked bool, kept string, err error) {
	for range 2 {
		if err := mark(); protocol.CodeOf(err) != protocol.CodePending {
			return err == nil, "", err
		}
		r, ok := look()
		switch {
		case !ok || r.State != meta.RegionOwned && r.State != meta.RegionOrphaned:
			return false, "", nil // gone meanwhile
		case r.Pinned > 0:
			return false, fmt.Sprintf("%d pinned entries: undo their pins, which larder ctl pins lists", r.Pinned), nil
		}
	}
	return false, "its entries were pinned and unpinned meanwhile: drain it again", nil
}

// outwait waits until a new leader's grace is over: what was leased before is not known until then.
func (s *Server) outwait(ctx context.Context, _ meta.RegionID) error {
	for {
		left := s.master.graceMS(s.master.now())
		if left == 0 {
			return nil
		}
		if !pause(ctx, time.Duration(left)*time.Millisecond) { //nolint:gosec // an election timeout at most
			return ctx.Err()
		}
	}
}

// SnapshotSave writes a snapshot of this member's state to w.
func (s *Server) SnapshotSave(ctx context.Context, w io.Writer) error { return s.node.Snapshot(ctx, w) }
