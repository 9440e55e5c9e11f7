package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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
	infos := m.machine.Devices()
	m.state.RUnlock()
	for i := range infos {
		d := &infos[i]
		st.Devices = append(st.Devices, DeviceStatus{
			ID: uint64(d.ID), UUID: d.UUID, Path: d.Path, Node: d.Node, Tier: d.Tier, Coherence: d.Coherence, Size: d.Size,
			Free: d.Free, LargestFree: d.LargestFree, Regions: d.Regions, Volatile: d.Volatile,
			Generation: strconv.FormatUint(d.Generation, 16),
		})
		if len(d.UUID) == 32 {
			st.Pool = s.poolOf(d.UUID)
		}
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

// Keys lists up to limit entries of all tenants whose keys begin with prefix, in no particular order; next is 0 at the
// end. A page may be empty and yet not be the last.
func (s *Server) Keys(prefix []byte, cursor uint64, limit int) (keys []KeyStatus, next uint64) {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	at := m.machine.At(m.presentMS())
	next = at.ListKeys("", prefix, cursor, min(max(limit, 1), maxKeyPage), func(slot meta.Slot) {
		info := m.machine.Entry(slot)
		k := KeyStatus{Key: string(m.machine.Key(slot)), Location: info.Location, Class: info.Class.String()}
		if info.Class == meta.ClassHard {
			k.Pins = 1
		}
		keys = append(keys, k)
	})
	return keys, next
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

// Pin pins keys of the default tenant for an operator and says for each whether it existed. Leader only.
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
	return s.pin(ctx, cmd)
}

// Unpin undoes Pin of the same owner, hard and soft, and says for each key whether there was such a pin. Leader only.
func (s *Server) Unpin(ctx context.Context, keys [][]byte, owner string) ([]bool, error) {
	hard, err := s.pin(ctx, &meta.Pin{Undo: true, Class: meta.ClassHard, Owner: owner, Keys: keys})
	if err != nil {
		return nil, err
	}
	soft, err := s.pin(ctx, &meta.Pin{Undo: true, Class: meta.ClassSoft, Owner: owner, Keys: keys})
	if err != nil {
		return nil, err
	}
	for i := range hard {
		hard[i] = hard[i] || soft[i]
	}
	return hard, nil
}

func (s *Server) pin(ctx context.Context, cmd *meta.Pin) ([]bool, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if len(cmd.Keys) > protocol.MaxBatch {
		return nil, &protocol.Error{Code: protocol.CodeLimit, Message: "at most 4096 keys at once"}
	}
	result, err := s.do(ctx, cmd)
	if err != nil {
		return nil, err
	}
	codes, err := meta.DecodeCodes(result)
	if err != nil {
		return nil, err
	}
	out := make([]bool, len(codes))
	for i, c := range codes {
		if out[i] = c == 0; c == protocol.CodeLimit {
			return nil, &protocol.Error{Code: c, Message: "the limit of pins is reached: undo some"}
		}
	}
	return out, nil
}

// Drain takes all regions from an instance, and returns how many it has asked for. What is in them is dropped; the
// client is told to let go of them. Leader only.
func (s *Server) Drain(ctx context.Context, instance string) (int, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var ids []meta.RegionID
	m := s.master
	m.state.RLock()
	for _, r := range m.machine.Regions() {
		if r.Instance == instance && (r.State == meta.RegionOwned || r.State == meta.RegionOrphaned) {
			ids = append(ids, r.ID)
		}
	}
	m.state.RUnlock()
	n := 0
	for _, id := range ids {
		if err := s.outwait(ctx, id); err != nil {
			return n, err
		}
		_, err := s.do(ctx, &meta.Mark{Region: id})
		if protocol.CodeOf(err) == protocol.CodePending {
			continue // pinned, or gone meanwhile
		}
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
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
