package raft

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	pb "go.etcd.io/raft/v3/raftpb"
)

// maxSnapshotStreams bounds how many followers are sent snapshots at once: each
// reads the whole state.
const maxSnapshotStreams = 2

// membersChanged follows a new membership. Called by the loop with the lock, or on
// the apply goroutine without.
func (n *Node) membersChanged(m []Member, user func([]Member)) {
	if n.cfg.Transport != nil {
		n.cfg.Transport.SetMembers(m)
	}
	if user != nil {
		n.queue.push(applyItem{fn: func() error { user(m); return nil }})
	}
}

// changeConf proposes a membership change and waits until a majority knows that it is in force.
func (n *Node) changeConf(ctx context.Context, typ pb.ConfChangeType, m Member) error {
	done := make(chan error, 1)
	n.mu.Lock()
	err := n.mayChange(typ, m)
	if err == nil {
		_, _, err = n.core.ProposeConfChange(typ, m, func(err error) { done <- err })
	}
	n.mu.Unlock()
	if err != nil {
		return err
	}
	n.poke()
	for {
		tick := n.ticks.wait()
		select {
		case err := <-done:
			return err
		case <-tick:
			if id, self := n.Leader(); !self {
				return &NotLeaderError{Leader: id} // the change may still come into force
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-n.done:
			return ErrStopped
		}
	}
}

// mayChange refuses, before anything is logged, what would hurt now. Called with
// the lock.
func (n *Node) mayChange(typ pb.ConfChangeType, m Member) error {
	st := n.core.Status()
	if st.State != "leader" {
		return &NotLeaderError{Leader: st.Leader}
	}
	voters, active := 0, 0
	var old *Member
	for i := range st.Members {
		o := &st.Members[i]
		if o.ID == m.ID {
			old = o
		}
		if o.Learner || typ == pb.ConfChangeRemoveNode && o.ID == m.ID {
			continue
		}
		voters++
		if o.Active {
			active++
		}
	}
	switch typ {
	case pb.ConfChangeAddNode:
		if old != nil && old.Learner && (!old.Active || old.Match+promoteLag < st.Commit) {
			return fmt.Errorf("%w: member %x is at %d of %d", ErrNotCaughtUp, m.ID, old.Match, st.Commit)
		}
	case pb.ConfChangeRemoveNode:
		if old != nil && !old.Learner && (voters == 0 || active <= voters/2) {
			return ErrQuorumLoss
		}
	case pb.ConfChangeAddLearnerNode, pb.ConfChangeUpdateNode:
	}
	return nil
}

// AddLearner adds a member that receives the log and does not vote. It starts with
// Store.Join under the same id.
func (n *Node) AddLearner(ctx context.Context, m Member) error {
	return n.changeConf(ctx, pb.ConfChangeAddLearnerNode, m)
}

// Promote makes a learner that has caught up a voter; ErrNotCaughtUp if it has not.
func (n *Node) Promote(ctx context.Context, id uint64) error {
	m, ok := n.member(id)
	if !ok {
		return ErrUnknownMember
	}
	return n.changeConf(ctx, pb.ConfChangeAddNode, m)
}

// AddMember adds a voter: first as a learner, and when it has caught up, as a
// voter. If ctx ends before that it stays a learner, and AddMember or Promote may
// be called again.
func (n *Node) AddMember(ctx context.Context, m Member) error {
	if old, ok := n.member(m.ID); !ok || !old.Learner {
		if err := n.AddLearner(ctx, m); err != nil {
			return err
		}
	}
	for {
		tick := n.ticks.wait()
		err := n.Promote(ctx, m.ID)
		if !errors.Is(err, ErrNotCaughtUp) && !errors.Is(err, ErrConfChangePending) {
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-n.done:
			return ErrStopped
		}
	}
}

// UpdateMember changes a member's address and context.
func (n *Node) UpdateMember(ctx context.Context, m Member) error {
	return n.changeConf(ctx, pb.ConfChangeUpdateNode, m)
}

// Remove removes a member for ever; it stops with ErrRemoved when it hears of it.
// ErrQuorumLoss if the voters that remain and are alive would be no quorum. A
// leader that is to go first hands over. Removing one that is removed is no error.
func (n *Node) Remove(ctx context.Context, id uint64) error {
	m, ok := n.member(id)
	if !ok && n.core.log.confs.newest().removed(id) {
		m.ID = id // again, since the first answer was lost
	} else if !ok {
		return ErrUnknownMember
	}
	if id == n.core.cfg.ID && n.leads.Load() && !m.Learner {
		if err := n.TransferLeadership(ctx, 0); err != nil {
			return err
		}
		lead, _ := n.Leader()
		return &NotLeaderError{Leader: lead} // the new leader carries it out
	}
	return n.changeConf(ctx, pb.ConfChangeRemoveNode, m)
}

// member finds a member in the newest configuration.
func (n *Node) member(id uint64) (Member, bool) {
	return n.core.log.confs.newest().find(id)
}

// TransferLeadership hands leadership to a voter, 0 for the one that has most of
// the log. It first waits until no deadline of Confirm stands, refusing new ones:
// a transfer elects without regard to them. If the other does not take over within
// an election timeout, this member steps down, since the message that tells the
// other to may still arrive.
func (n *Node) TransferLeadership(ctx context.Context, to uint64) error {
	n.mu.Lock()
	term := n.core.leadTerm
	to, err := n.transferee(to)
	if err != nil {
		n.mu.Unlock()
		return err
	}
	n.fenced = true
	n.mu.Unlock()
	if err := n.outwait(ctx); err != nil {
		n.unfence(term)
		return err
	}
	n.mu.Lock()
	if n.core.leadTerm == term {
		err = n.core.TransferLeadership(to)
	}
	n.mu.Unlock()
	n.poke()
	if err != nil {
		n.unfence(term)
		return err
	}
	for range 2 * n.core.cfg.ElectionTicks {
		tick := n.ticks.wait()
		if n.leadTermNow() != term {
			return nil
		}
		select {
		case <-tick:
		case <-n.done:
			return ErrStopped
		}
	}
	return n.resign(term, to)
}

// unfence lets Confirm go on, if this is still the same leadership.
func (n *Node) unfence(term uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.core.leadTerm == term {
		n.fenced = false
	}
}

func (n *Node) leadTermNow() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.core.leadTerm
}

// transferee checks or chooses the new leader. Called with the lock.
func (n *Node) transferee(to uint64) (uint64, error) {
	st := n.core.Status()
	if n.core.leadTerm == 0 {
		return 0, &NotLeaderError{Leader: st.Leader}
	}
	var best Member
	for _, m := range st.Members {
		if m.Learner || m.ID == st.ID || to != 0 && m.ID != to {
			continue
		}
		if best.ID == 0 || m.Active && !best.Active || m.Active == best.Active && m.Match > best.Match {
			best = m
		}
	}
	switch {
	case to == st.ID:
		return 0, fmt.Errorf("raft: member %x leads already", to)
	case best.ID == 0:
		return 0, fmt.Errorf("%w: there is no other voter to hand over to", ErrUnknownMember)
	case !best.Active:
		return 0, fmt.Errorf("%w: member %x has not been heard of", ErrQuorumLoss, best.ID)
	}
	return best.ID, nil
}

// outwait waits until every deadline given by Confirm has passed.
func (n *Node) outwait(ctx context.Context) error {
	for {
		tick := n.ticks.wait()
		n.mu.Lock()
		deadline := n.deadline
		n.mu.Unlock()
		if n.cfg.Boottime() >= deadline {
			return nil
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return ctx.Err()
		case <-n.done:
			return ErrStopped
		}
	}
}

// resign gives leadership up by moving to the next term, which any member may do
// at any time: what was sent in this one is void.
func (n *Node) resign(term, other uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.core.leadTerm != term {
		return nil
	}
	m := &pb.Message{
		Type: pb.MsgAppResp.Enum(), From: new(other), To: new(n.core.cfg.ID), Term: new(term + 1), Reject: new(true),
	}
	if err := n.core.step(m); err != nil {
		return err
	}
	n.poke()
	return fmt.Errorf("raft: member %x did not take leadership over in time; this member stepped down: %w", other, ErrTransferring)
}

// startSnapshot sends a snapshot to a follower, beside everything else, and tells
// raft how that went, whatever happens: a follower nobody reports on is in limbo.
func (n *Node) startSnapshot(m *pb.Message) {
	to := m.GetTo()
	n.mu.Lock()
	ok := len(n.sending) < maxSnapshotStreams && !n.sending[to] && n.Err() == nil
	if ok {
		n.sending[to] = true
		n.wg.Add(1)
	}
	n.mu.Unlock()
	if !ok {
		n.reportSnapshot(to, false)
		return
	}
	go func() {
		defer n.wg.Done()
		err := n.sendSnapshot(m)
		if err != nil {
			n.stats.snapshotsFailed.Add(1)
			n.cfg.Core.logger().Warn("sending a snapshot failed",
				slog.Uint64("member_id", to), slog.Any("error", err))
		} else {
			n.stats.snapshotsSent.Add(1)
		}
		n.mu.Lock()
		delete(n.sending, to)
		n.mu.Unlock()
		n.reportSnapshot(to, err == nil)
	}()
}

func (n *Node) reportSnapshot(to uint64, ok bool) {
	n.mu.Lock()
	n.core.ReportSnapshot(to, ok)
	n.mu.Unlock()
	n.poke()
}

// captureNow takes a checkpoint on the apply goroutine.
func (n *Node) captureNow() (cp *checkpoint, err error) {
	err = n.runApply(func() (err error) {
		cp, err = n.core.capture()
		return err
	})
	return cp, err
}

func (n *Node) sendSnapshot(m *pb.Message) error {
	cp, err := n.captureNow()
	if err != nil {
		return err
	}
	defer cp.close()
	m.Snapshot = &pb.Snapshot{Metadata: cp.m.meta()}
	return n.cfg.Transport.SendSnapshot(n.ctx, m, cp.stream)
}

// Snapshot writes a portable snapshot of the state, as RestoreSnapshot reads it,
// as of at least what this member had applied when it was called. Any member may
// be asked. It costs the reading of the whole state, and a pause of the state
// machine for as long as hard links take.
func (n *Node) Snapshot(ctx context.Context, w io.Writer) error {
	cp, err := n.captureNow()
	if err != nil {
		return err
	}
	defer cp.close()
	return cp.stream(&ctxWriter{ctx: ctx, w: w})
}

// ctxWriter fails when its context ends.
type ctxWriter struct {
	ctx context.Context
	w   io.Writer
}

// Write implements io.Writer.
func (c *ctxWriter) Write(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.w.Write(b)
}
