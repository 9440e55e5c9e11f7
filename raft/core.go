package raft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	etcdraft "go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// Limits of one member. Each bounds memory or the length of a stall.
const (
	// MaxProposalBytes is the largest single proposal: a batch of commands, far below what one frame of the
	// transport may carry.
	MaxProposalBytes = 8 << 20
	// maxSizePerMsg is large enough that a batch of group-committed entries goes out in one message, small enough
	// that one message on a 1 Gbit/s link takes 8 ms, well under a heartbeat.
	maxSizePerMsg = 1 << 20
	// maxInflightMsgs and maxInflightBytes bound what is on its way to one follower: 64 MiB cover 10 Gbit/s at 50 ms.
	maxInflightMsgs  = 512
	maxInflightBytes = 64 << 20
	// maxUncommitted bytes may wait on the leader; more gives ErrBusy. Two seconds of a 100 MB/s disk's work.
	maxUncommitted = 256 << 20
	// maxApplying bytes may be handed to the state machine and not yet be applied.
	maxApplying = 32 << 20
	// promoteLag is by how many entries a learner may trail and still be promoted: about what is proposed within a
	// round trip at full load, so that its promotion does not stall commits.
	promoteLag = 10000
)

// Defaults of CoreConfig.
const (
	defaultElectionTicks  = 10
	defaultHeartbeatTicks = 1
	defaultKeepEntries    = 50000    // for slow followers: seconds of full load
	defaultKeepBytes      = 64 << 20 // the same in bytes, also bounds the check at start
)

// Machine is the replicated state machine. All calls come from one goroutine at a
// time: the apply goroutine of a Node, or whoever drives a Core.
type Machine interface {
	// Apply executes one committed entry. Entries come in order, each index once; data is empty for entries of
	// raft's own, and valid during the call only. An error stops the member.
	Apply(index, term uint64, data []byte) error
	// Flush writes what is not yet in the state store, and the applied index, in one batch, and returns that index.
	// The log may be cut up to it.
	Flush() (applied uint64, err error)
	// Restored says that a snapshot, taken at index, has replaced everything in the state store.
	Restored(index uint64) error
	// Applied is the applied index that the state store holds, 0 if it is empty. It is asked once, at the start.
	Applied() uint64
}

// CoreConfig configures a Core.
type CoreConfig struct {
	// ID and ClusterID must be those of the store.
	ID, ClusterID uint64
	// ElectionTicks without a leader start an election, by turns a tick apart; 0 is 10.
	ElectionTicks int
	// HeartbeatTicks is the leader's interval between heartbeats; 0 is 1.
	HeartbeatTicks int
	// Machine is the state machine, reading and writing Store.State.
	Machine Machine
	// Send hands messages to the network, in order, when the rules of persistence allow. It must not block, and
	// owns the slice; messages are immutable. A MsgSnap needs Core.WriteSnapshot, or what Node does.
	Send func([]*pb.Message)
	// OnRead gets the results of ReadIndex. May be nil.
	OnRead func(ctx, index uint64)
	// OnLeadership is told that the member leads and has applied an entry of its own term, and that it no longer
	// leads. Called between calls of the Machine. May be nil.
	OnLeadership func(isLeader bool, term uint64)
	// OnMembers is told each new membership. It must not call the Core, and must not change the slice. May be nil.
	OnMembers func([]Member)
	// LogKeepEntries and LogKeepBytes are kept behind the flushed index for slow followers; 0 is 50,000 and 64 MiB.
	LogKeepEntries, LogKeepBytes uint64
	// MaxUncommittedBytes may wait to be committed before proposals get ErrBusy; 0 is 256 MiB.
	MaxUncommittedBytes uint64
	// Logger gets raft's messages; nil for none.
	Logger *slog.Logger
}

func (c *CoreConfig) setDefaults() {
	if c.ElectionTicks == 0 {
		c.ElectionTicks = defaultElectionTicks
	}
	if c.HeartbeatTicks == 0 {
		c.HeartbeatTicks = defaultHeartbeatTicks
	}
	if c.LogKeepEntries == 0 {
		c.LogKeepEntries = defaultKeepEntries
	}
	if c.LogKeepBytes == 0 {
		c.LogKeepBytes = defaultKeepBytes
	}
	if c.MaxUncommittedBytes == 0 {
		c.MaxUncommittedBytes = maxUncommitted
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

// Core is one member without goroutines, clocks or sockets: the same inputs give
// the same outputs, except that raft draws election jitter from crypto/rand. It
// is not safe for concurrent use.
//
// After any of Tick, Step, Propose, ProposeConfChange, TransferLeadership and
// ReadIndex, call Process until it says that there is no more.
type Core struct {
	cfg   CoreConfig
	store *Store
	log   *logStore
	rn    *etcdraft.RawNode
	err   error // the member is broken; nothing works any more

	soft        etcdraft.SoftState
	term        uint64 // as of the last Ready
	last        uint64 // last index of raft's log, stable or not
	leadTerm    uint64 // the term led, as of the last Ready; 0 if none
	quiet       int    // ticks during which votes are refused, see Step
	removed     bool
	witnessDue  bool
	confWaiters map[uint64]confWaiter
	settling    []func(error)     // of changes that are in force, see settle
	spools      map[uint64]*spool // received, not yet seen in a Ready
	ticks       uint64
	heard       map[uint64]uint64 // member -> the tick at which it was last heard of

	apply applySide
	// runApply runs fn where the Machine is called from, after everything that was handed over before.
	runApply func(fn func() error) error
}

// applySide is what the goroutine that applies uses.
type applySide struct {
	index     atomic.Uint64 // applied
	term      uint64        // of that entry
	leadTerm  atomic.Uint64 // the term to announce when one of its entries is applied; 0 if none
	announced atomic.Uint64 // the term announced
}

type confWaiter struct {
	term    uint64
	done    func(error)
	settles bool // it waits for the entry behind a change, see settle
}

// NewCore starts a member on its store. A sole voter elects itself with the first
// Process; others wait for an election timeout.
func NewCore(cfg CoreConfig, store *Store) (*Core, error) {
	cfg.setDefaults()
	if err := store.CheckIdentity(cfg.ClusterID, cfg.ID); err != nil {
		return nil, err
	}
	c := &Core{
		cfg: cfg, store: store, log: store.log,
		confWaiters: map[uint64]confWaiter{}, spools: map[uint64]*spool{}, heard: map[uint64]uint64{},
	}
	c.runApply = func(fn func() error) error { return fn() }
	applied, err := c.checkApplied(cfg.Machine.Applied())
	if err != nil {
		return nil, err
	}
	err = c.guard(func() error {
		c.rn, err = etcdraft.NewRawNode(c.raftConfig(applied))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("raft: start: %w", err)
	}
	c.apply.index.Store(applied)
	if c.apply.term, err = c.log.Term(applied); err != nil {
		return nil, fmt.Errorf("raft: term of the applied index %d: %w", applied, err)
	}
	c.last = c.log.last
	c.term = c.log.hard.term
	cur := c.log.confs.newest()
	c.removed = cur.removed(cfg.ID)
	if c.log.hard.term > bootTerm { // a member without a past has no promise to keep
		c.quiet = cfg.ElectionTicks
	}
	if m, ok := cur.find(cfg.ID); ok && !m.Learner && cur.voters() == 1 {
		return c, c.guard(c.rn.Campaign)
	}
	return c, nil
}

// checkApplied compares the state machine's applied index with the log.
func (c *Core) checkApplied(applied uint64) (uint64, error) {
	base := c.log.base.index
	if applied == 0 && base == bootIndex {
		applied = base // a new cluster begins here, with an empty state
	}
	switch {
	case applied < base:
		return 0, &CorruptionError{What: "the state", Index: applied, Cause: fmt.Errorf("the log begins at %d", base+1)}
	case applied > c.log.last:
		return 0, &LostDataError{Have: c.log.last, Want: applied, Detail: "applied index of the state"}
	}
	// Entries are applied, and memberships recorded, as soon as they are committed and in the log. The note that they
	// are committed comes with the next write, and may be missing.
	c.log.hard.commit = max(c.log.hard.commit, applied, c.log.confs.newest().Index)
	c.log.snapIndex = max(applied, base)
	return applied, nil
}

func (c *Core) raftConfig(applied uint64) *etcdraft.Config {
	return &etcdraft.Config{
		ID:            c.cfg.ID,
		ElectionTick:  c.cfg.ElectionTicks,
		HeartbeatTick: c.cfg.HeartbeatTicks,
		Storage:       c.log,
		Applied:       applied,
		// Storage work arrives as messages. Appends are done in order by one goroutine and synced before their
		// responses are delivered, which rules out the overwritten-append race that the library documents. Applying
		// goes on beside that, and raft itself bounds how much of it is outstanding.
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             maxSizePerMsg,
		MaxCommittedSizePerReady:  maxApplying,
		MaxUncommittedEntriesSize: c.cfg.MaxUncommittedBytes,
		MaxInflightMsgs:           maxInflightMsgs,
		MaxInflightBytes:          maxInflightBytes,
		CheckQuorum:               true, // a leader that is cut off stops leading
		PreVote:                   true, // a member that was cut off does not disturb when it comes back
		ReadOnlyOption:            etcdraft.ReadOnlySafe,
		Logger:                    &raftLogger{l: c.cfg.Logger},
		DisableProposalForwarding: true, // the leader stamps time and picks victims before it proposes
		StepDownOnRemoval:         true,
	}
}

// guard turns a panic of the raft library into an error that breaks the member:
// the library panics when its storage fails and when the log contradicts what the
// cluster knows.
func (c *Core) guard(fn func() error) (err error) {
	if c.err != nil {
		return c.err
	}
	defer func() {
		if r := recover(); r != nil {
			err = c.panicError(r)
			c.err = err
		}
	}()
	return fn()
}

func (c *Core) panicError(r any) error {
	text := fmt.Sprint(r)
	if strings.Contains(text, "tocommit(") { // the leader knows that we acknowledged more than we have
		return &LostDataError{Have: c.last, Want: c.last + 1, Detail: text}
	}
	if err, ok := r.(error); ok {
		return fmt.Errorf("raft: internal: %w", err)
	}
	return fmt.Errorf("raft: internal: %s", text)
}

// Tick advances logical time.
func (c *Core) Tick() {
	if c.quiet > 0 {
		c.quiet--
	}
	c.ticks++
	c.witnessDue = true
	_ = c.guard(func() error { // a failure is kept and returned by Process
		c.rn.Tick()
		c.settle()
		if c.turnToCampaign() {
			return c.rn.Campaign()
		}
		return nil
	})
}

// turnToCampaign says that the leader has been silent for an election timeout, and that it is this voter's turn to ask
// for votes. Raft by itself waits for up to as long again, drawn at random so that two voters seldom ask at once; turns
// by id, a tick apart, do that too, and halve the time without a leader. Whoever asks in vain (its log is short, or
// others still hear the leader) has asked with a PreVote, which changes nothing, and raft's own timer goes on. No sooner
// than the timeout: others refuse until then, on which Node.Confirm relies.
func (c *Core) turnToCampaign() bool {
	lead := c.soft.Lead
	if lead == 0 || c.soft.RaftState != etcdraft.StateFollower {
		return false
	}
	heard, ok := c.heard[lead]
	if !ok {
		return false
	}
	turn, voter := 0, false
	for _, m := range c.log.confs.newest().Members {
		switch {
		case m.Learner || m.ID == lead:
		case m.ID == c.cfg.ID:
			voter = true
		case m.ID < c.cfg.ID:
			turn++
		}
	}
	// One tick more than the timeout: the others' ticks may be a tick behind.
	return voter && c.ticks-heard == uint64(c.cfg.ElectionTicks+1+turn) //nolint:gosec // small
}

// Step takes a message from another member. Messages that no peer may send, and
// malformed ones, are an error that concerns the sender only. A MsgSnap goes to
// StepSnapshot.
func (c *Core) Step(m *pb.Message) error {
	if err := checkMessage(m, c.cfg.ID); err != nil {
		return err
	}
	if m.GetType() == pb.MsgSnap {
		return badMessage(m, "snapshots come as streams")
	}
	c.hear(m.GetFrom())
	// A promise not to elect anybody while the leader may believe in its quorum (see Node.Confirm) was given from
	// memory. After a restart it is kept by refusing votes for as long as it may have lasted. A transfer of
	// leadership is the leader's own will, and goes on.
	if c.quiet > 0 && (m.GetType() == pb.MsgVote || m.GetType() == pb.MsgPreVote) &&
		string(m.GetContext()) != campaignTransfer {
		return nil
	}
	if m.GetType() == pb.MsgApp && len(m.GetEntries()) > 0 && c.store.health.critical.Load() {
		return nil // it is sent again when there is space
	}
	if m.GetType() == pb.MsgReadIndex && c.rn.BasicStatus().RaftState != etcdraft.StateLeader {
		return nil // raft would pass it on in the asker's name, which nobody believes; the asker asks again
	}
	return c.step(m)
}

// hear notes a sign of life of a member.
func (c *Core) hear(from uint64) {
	if _, member := c.log.confs.newest().find(from); member {
		c.heard[from] = c.ticks
	}
}

// active says whether a member was heard of within an election timeout. Raft's own
// notion forgets everybody once per timeout, for a round trip.
func (c *Core) active(id uint64) bool {
	at, ok := c.heard[id]
	return id == c.cfg.ID || ok && c.ticks-at <= uint64(c.cfg.ElectionTicks) //nolint:gosec // not negative
}

// campaignTransfer is the context of votes asked for in a transfer of leadership.
const campaignTransfer = "CampaignTransfer"

func (c *Core) step(m *pb.Message) error {
	return c.guard(func() error {
		err := c.rn.Step(m)
		if errors.Is(err, etcdraft.ErrStepPeerNotFound) || errors.Is(err, etcdraft.ErrProposalDropped) {
			return nil // late messages of former members
		}
		return err
	})
}

// Propose appends data to the log of the leader and returns where. The outcome is
// seen at Machine.Apply: an entry of that index and term is this one, an entry of
// that index and another term means that this one is lost. Data belongs to raft
// afterwards.
func (c *Core) Propose(data []byte) (index, term uint64, err error) {
	if len(data) > MaxProposalBytes {
		return 0, 0, fmt.Errorf("raft: a proposal of %d bytes exceeds the limit of %d; split it", len(data), MaxProposalBytes)
	}
	if err := c.mayPropose(); err != nil {
		return 0, 0, err
	}
	return c.proposed(c.guard(func() error { return c.rn.Propose(data) }))
}

func (c *Core) mayPropose() error {
	switch {
	case c.err != nil:
		return c.err
	case c.leadTerm == 0:
		return &NotLeaderError{Leader: c.soft.Lead}
	case c.store.health.full.Load():
		return ErrDiskFull
	}
	return nil
}

// proposed turns raft's answer into ours. A leader appends one entry for each
// accepted proposal, and nothing else between two Readies.
func (c *Core) proposed(err error) (index, term uint64, _ error) {
	switch {
	case err == nil:
		c.last++
		return c.last, c.leadTerm, nil
	case !errors.Is(err, etcdraft.ErrProposalDropped):
		return 0, 0, err
	}
	st := c.rn.BasicStatus()
	switch {
	case st.RaftState != etcdraft.StateLeader:
		return 0, 0, &NotLeaderError{Leader: st.Lead}
	case st.LeadTransferee != 0:
		return 0, 0, ErrTransferring
	}
	return 0, 0, ErrBusy
}

// ReadIndex asks for an index such that a read that waits for it sees everything
// that was acknowledged before the call. CoreConfig.OnRead gets it, or never
// does: ask again after a while, with another ctx.
func (c *Core) ReadIndex(ctx uint64) {
	_ = c.guard(func() error { // a failure is kept and returned by Process
		c.rn.ReadIndex(binary.BigEndian.AppendUint64(nil, ctx))
		return nil
	})
}

// ReportSnapshot says what became of a MsgSnap that Send was given. It must be
// called for each, also when it is unknown: a follower nobody reports on gets
// neither entries nor another snapshot.
func (c *Core) ReportSnapshot(to uint64, ok bool) {
	status := etcdraft.SnapshotFailure
	if ok {
		status = etcdraft.SnapshotFinish
	}
	_ = c.guard(func() error { c.rn.ReportSnapshot(to, status); return nil }) // kept, and returned by Process
}

// ReportUnreachable says that messages to a member were lost.
func (c *Core) ReportUnreachable(to uint64) {
	_ = c.guard(func() error { c.rn.ReportUnreachable(to); return nil }) // kept, and returned by Process
}

// TransferLeadership asks the leader to hand over to a voter. Proposals fail with
// ErrTransferring until that has happened or an election timeout has passed.
func (c *Core) TransferLeadership(to uint64) error {
	if c.leadTerm == 0 {
		return &NotLeaderError{Leader: c.soft.Lead}
	}
	m, ok := c.log.confs.newest().find(to)
	if !ok || m.Learner {
		return fmt.Errorf("%w: %x is not a voter", ErrUnknownMember, to)
	}
	return c.guard(func() error { c.rn.TransferLeader(to); return nil })
}

// Process handles one Ready: it persists, sends, applies. More means that there
// may be more to do. An error means that the member is broken and must stop.
func (c *Core) Process() (more bool, err error) {
	r, err := c.begin()
	if err != nil || r == nil {
		return false, errors.Join(err, c.witnessIfDue())
	}
	c.cfg.Send(r.early)
	if err := c.persist(r); err != nil {
		c.err = err
		return false, err
	}
	late, err := c.finish(r)
	if err != nil {
		return false, err
	}
	if len(late) > 0 {
		c.cfg.Send(late)
	}
	if err := c.announceLoss(r); err != nil {
		return false, err
	}
	if r.apply != nil {
		if err := c.applyEntries(r.apply); err != nil {
			c.err = err
			return false, err
		}
		if err := c.appliedDone(r.apply); err != nil {
			return false, err
		}
	}
	if err := c.witnessIfDue(); err != nil {
		return false, err
	}
	return c.rn.HasReady(), nil
}

func (c *Core) witnessIfDue() error {
	if c.err != nil || !c.witnessDue {
		return c.err
	}
	c.witnessDue = false
	if c.err = c.store.syncWitness(); c.err != nil {
		return c.err
	}
	return nil
}

// Flush makes the Machine write its state, and cuts the log behind it.
func (c *Core) Flush() error {
	index, err := c.cfg.Machine.Flush()
	if err != nil {
		return fmt.Errorf("raft: flush the state: %w", err)
	}
	return c.flushed(index)
}

func (c *Core) flushed(index uint64) error {
	if index == 0 {
		return nil // an empty state
	}
	return c.log.flushed(index, c.cfg.LogKeepEntries, c.cfg.LogKeepBytes, c.store.holdIndex())
}

// LeadTerm is the term in which this member leads, 0 if it does not.
func (c *Core) LeadTerm() uint64 { return c.leadTerm }

// Removed says that the member is no longer part of the cluster.
func (c *Core) Removed() bool { return c.removed }

// raftLogger passes the raft library's messages on. Its Panic and Fatal panic, as
// the library expects; guard catches that.
type raftLogger struct{ l *slog.Logger }

func (r *raftLogger) log(level slog.Level, text func() string) {
	ctx := context.Background()
	if r.l.Enabled(ctx, level) { // formatting costs more than the message is worth
		r.l.LogAttrs(ctx, level, "raft", slog.String("text", text()))
	}
}

func (r *raftLogger) logv(level slog.Level, v []any) {
	r.log(level, func() string { return fmt.Sprint(v...) })
}

func (r *raftLogger) logf(level slog.Level, format string, v []any) {
	r.log(level, func() string { return fmt.Sprintf(format, v...) })
}

// Debug implements raft.Logger.
func (r *raftLogger) Debug(v ...any) { r.logv(slog.LevelDebug, v) }

// Debugf implements raft.Logger.
func (r *raftLogger) Debugf(f string, v ...any) { r.logf(slog.LevelDebug, f, v) }

// Info implements raft.Logger.
func (r *raftLogger) Info(v ...any) { r.logv(slog.LevelInfo, v) }

// Infof implements raft.Logger.
func (r *raftLogger) Infof(f string, v ...any) { r.logf(slog.LevelInfo, f, v) }

// Warning implements raft.Logger.
func (r *raftLogger) Warning(v ...any) { r.logv(slog.LevelWarn, v) }

// Warningf implements raft.Logger.
func (r *raftLogger) Warningf(f string, v ...any) { r.logf(slog.LevelWarn, f, v) }

// Error implements raft.Logger.
func (r *raftLogger) Error(v ...any) { r.logv(slog.LevelError, v) }

// Errorf implements raft.Logger.
func (r *raftLogger) Errorf(f string, v ...any) { r.logf(slog.LevelError, f, v) }

// Fatal implements raft.Logger. It panics; guard catches that.
func (r *raftLogger) Fatal(v ...any) { panic(fmt.Sprint(v...)) }

// Fatalf implements raft.Logger. It panics; guard catches that.
func (r *raftLogger) Fatalf(f string, v ...any) { panic(fmt.Sprintf(f, v...)) }

// Panic implements raft.Logger. Guard catches it.
func (r *raftLogger) Panic(v ...any) { panic(fmt.Sprint(v...)) }

// Panicf implements raft.Logger. Guard catches it.
func (r *raftLogger) Panicf(f string, v ...any) { panic(fmt.Sprintf(f, v...)) }
