package raft

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	etcdraft "go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// round is one Ready on its way: begin takes it, persist writes it, finish tells
// raft. Raft may take other input between begin and finish, and another round may
// begin, as long as rounds are persisted and finished in order.
type round struct {
	early  []*pb.Message // may be sent before anything is written
	append *pb.Message   // what to write, and what to answer when it is durable; may be nil
	apply  *pb.Message   // committed entries for the state machine; may be nil
	sync   bool
	lost   uint64 // the term whose leadership ended, 0 if none
	// The snapshot to install, nil if none.
	spool *spool
}

// writes says whether the round changes the log; one that does not cannot sync either.
func (r *round) writes() bool {
	return r.append != nil && (len(r.append.GetEntries()) > 0 || r.append.Term != nil)
}

// begin takes the next Ready, nil if there is none. It carries out committed
// membership changes: the next Ready's messages must know of them.
func (c *Core) begin() (r *round, err error) {
	err = c.guard(func() error {
		if !c.rn.HasReady() {
			return nil
		}
		rd := c.rn.Ready()
		r = &round{sync: rd.MustSync}
		for _, m := range rd.Messages {
			switch m.GetTo() {
			case etcdraft.LocalAppendThread:
				r.append = m
			case etcdraft.LocalApplyThread:
				r.apply = m
			default:
				r.early = append(r.early, m)
			}
		}
		if n := len(rd.Entries); n > 0 {
			c.last = rd.Entries[n-1].GetIndex()
		}
		c.noteState(&rd, r)
		for _, rs := range rd.ReadStates {
			if c.cfg.OnRead != nil && len(rs.RequestCtx) == 8 {
				c.cfg.OnRead(binary.BigEndian.Uint64(rs.RequestCtx), rs.Index)
			}
		}
		for _, e := range r.apply.GetEntries() { // before anybody can apply, or take a snapshot, behind it
			if err := c.applyConf(e); err != nil {
				return err
			}
		}
		c.settle()
		return c.takeSnapshot(&rd, r)
	})
	return r, err
}

// noteState follows term and leadership.
func (c *Core) noteState(rd *etcdraft.Ready, r *round) {
	if rd.SoftState != nil {
		c.soft = *rd.SoftState
	}
	if rd.HardState != nil {
		c.term = rd.GetTerm()
	}
	lead := uint64(0)
	if c.soft.RaftState == etcdraft.StateLeader {
		lead = c.term
	}
	if lead != c.leadTerm {
		r.lost = c.leadTerm
		c.leadTerm = lead
		c.apply.leadTerm.Store(lead)
	}
}

// takeSnapshot finds the stream that belongs to the Ready's snapshot, and drops
// streams that raft had no use for.
func (c *Core) takeSnapshot(rd *etcdraft.Ready, r *round) error {
	if !etcdraft.IsEmptySnap(rd.Snapshot) {
		if len(rd.Snapshot.GetData()) == 8 {
			id := binary.BigEndian.Uint64(rd.Snapshot.GetData())
			r.spool = c.spools[id]
			delete(c.spools, id)
		}
		if r.spool == nil {
			return errors.New("raft: a snapshot was accepted whose stream is not here")
		}
		c.last = rd.Snapshot.GetMetadata().GetIndex()
		if n := len(rd.Entries); n > 0 {
			c.last = rd.Entries[n-1].GetIndex()
		}
	}
	for id, sp := range c.spools {
		delete(c.spools, id)
		sp.discard()
	}
	return nil
}

// persist writes what the round asks for. It touches only the store, so that raft
// may take input meanwhile.
func (c *Core) persist(r *round) error {
	m := r.append
	if m == nil {
		return nil
	}
	var hard *hardState
	if m.Term != nil { // set together or not at all
		hard = &hardState{term: m.GetTerm(), vote: m.GetVote(), commit: m.GetCommit()}
	}
	if err := c.witnessFirst(hard, r); err != nil {
		return err
	}
	if r.spool != nil {
		if err := c.install(r, hard); err != nil {
			return err
		}
		hard = nil // written with the snapshot
	}
	return c.log.append(m.GetEntries(), hard, r.sync)
}

// witnessFirst makes the witness agree before the log changes in a way that may
// otherwise look like a loss afterwards: a new term or vote, entries that replace
// others, a snapshot.
func (c *Core) witnessFirst(hard *hardState, r *round) error {
	ents := r.append.GetEntries()
	w := c.store.wit.last()
	old := w
	if hard != nil && (hard.term != c.log.hard.term || hard.vote != c.log.hard.vote) {
		w.term, w.vote = hard.term, hard.vote
	}
	switch {
	case r.spool != nil: // the log starts anew behind the snapshot
		w.index, w.indexTerm = 0, 0
	case len(ents) > 0 && ents[0].GetIndex() <= w.index:
		w.index = ents[0].GetIndex() - 1
		term, err := c.log.Term(w.index)
		if err != nil {
			return fmt.Errorf("raft: term of index %d: %w", w.index, err)
		}
		w.indexTerm = term
	}
	if w == old {
		return nil
	}
	return c.store.wit.write(w)
}

// finish tells raft that the round is durable. It returns messages to send.
func (c *Core) finish(r *round) (late []*pb.Message, err error) {
	err = c.guard(func() error {
		for _, m := range r.append.GetResponses() {
			if m.GetTo() != c.cfg.ID {
				late = append(late, m)
				continue
			}
			if err := c.stepLocal(m); err != nil {
				return err
			}
		}
		return nil
	})
	return late, err
}

// stepLocal delivers the result of storage work. Raft refuses what has become
// pointless, which is no failure.
func (c *Core) stepLocal(m *pb.Message) error {
	err := c.rn.Step(m)
	if errors.Is(err, etcdraft.ErrStepPeerNotFound) {
		return nil // our own acknowledgement, after we were removed
	}
	return err
}

// applyEntries hands committed entries to the Machine. It runs on the apply side.
func (c *Core) applyEntries(m *pb.Message) error {
	a := &c.apply
	for _, e := range m.GetEntries() {
		index, term := e.GetIndex(), e.GetTerm()
		var data []byte
		if e.GetType() == pb.EntryNormal {
			data = e.GetData()
		}
		if err := c.cfg.Machine.Apply(index, term, data); err != nil {
			return fmt.Errorf("raft: apply entry %d of term %d: %w", index, term, err)
		}
		a.term = term
		a.index.Store(index)
		if term == a.leadTerm.Load() && a.announced.Load() != term {
			a.announced.Store(term)
			if c.cfg.OnLeadership != nil {
				c.cfg.OnLeadership(true, term)
			}
		}
	}
	return nil
}

// appliedDone tells raft that a batch of entries was applied.
func (c *Core) appliedDone(m *pb.Message) error {
	return c.guard(func() error {
		for _, r := range m.GetResponses() {
			if err := c.stepLocal(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// announceLoss tells, on the apply side, that a leadership which was announced is
// over.
func (c *Core) announceLoss(r *round) error {
	if r.lost == 0 {
		return nil
	}
	term := r.lost
	return c.runApply(func() error { c.lossApplied(term); return nil })
}

func (c *Core) lossApplied(term uint64) {
	if c.apply.announced.Load() == term && c.cfg.OnLeadership != nil {
		c.cfg.OnLeadership(false, term)
	}
}

// applyConf carries out a committed membership change, or finds that it must not
// be: every member finds the same, since it depends on the log alone.
func (c *Core) applyConf(e *pb.Entry) error {
	index := e.GetIndex()
	w, waiting := c.confWaiters[index]
	if waiting {
		delete(c.confWaiters, index)
	}
	var refused error
	switch e.GetType() {
	case pb.EntryConfChange:
		if index <= c.log.confs.newest().Index {
			return nil // replayed: the configuration already has it
		}
		var err error
		if refused, err = c.changeConf(e); err != nil {
			return err
		}
	case pb.EntryConfChangeV2:
		return fmt.Errorf("raft: entry %d is a joint membership change, which this release never proposes", index)
	case pb.EntryNormal:
		if waiting && !w.settles {
			refused = ErrConfChangePending // raft put an empty entry in its place
		}
	}
	switch {
	case !waiting:
	case e.GetTerm() != w.term:
		w.done(&NotLeaderError{Leader: c.soft.Lead})
	case refused != nil || w.settles:
		w.done(refused)
	default:
		c.settling = append(c.settling, w.done)
	}
	return nil
}

// settle lets an empty entry follow the membership changes that have come into force, and says that they are done when
// that is committed. A change is in force where it is known to be committed, at first on the leader alone: without the
// leader's disk, the voters that are left would still count the old majority, and might wait for ever for one who has
// been removed, or for a vote of one who does not know that it has one. A voter of the new majority that has the entry
// learned with it that the change is committed.
func (c *Core) settle() {
	if len(c.settling) == 0 {
		return
	}
	index, term, err := c.Propose(nil)
	if not := new(NotLeaderError); err != nil && !errors.As(err, &not) {
		return // busy, full or about to hand over: again with the next tick
	}
	dones := c.settling
	c.settling = nil
	done := func(err error) {
		for _, d := range dones {
			d(err)
		}
	}
	if err != nil {
		done(err)
		return
	}
	c.confWaiters[index] = confWaiter{term: term, done: done, settles: true}
}

func (c *Core) changeConf(e *pb.Entry) (refused, err error) {
	cc, ch, err := decodeConfChange(e.GetData())
	if err != nil {
		return nil, err
	}
	cur := c.log.confs.newest()
	if refused := c.admissible(cur, cc.GetType(), ch.Member); refused != nil {
		return refused, nil
	}
	next := cur.with(e.GetIndex(), cc.GetType(), ch.Member)
	cs := c.rn.ApplyConfChange(cc)
	if err := cs.Equivalent(next.state()); err != nil {
		return nil, fmt.Errorf("raft: the membership diverged at %d: %w", e.GetIndex(), err)
	}
	b := c.store.db.NewBatch()
	if err := putConf(b, next); err != nil {
		return nil, err
	}
	if err := errors.Join(b.Commit(pebble.NoSync), b.Close()); err != nil {
		return nil, fmt.Errorf("raft: write the configuration: %w", err)
	}
	c.log.mu.Lock()
	c.log.confs.set(append(c.log.confs.list, next)...)
	c.log.mu.Unlock()
	c.removed = next.removed(c.cfg.ID)
	if _, still := next.find(ch.Member.ID); !still {
		delete(c.heard, ch.Member.ID)
	}
	if c.cfg.OnMembers != nil {
		c.cfg.OnMembers(next.Members)
	}
	return nil, nil
}

// admissible says why a change must not be carried out.
func (c *Core) admissible(cur *conf, typ pb.ConfChangeType, m Member) error {
	old, had := cur.find(m.ID)
	switch typ {
	case pb.ConfChangeAddNode:
		if cur.removed(m.ID) {
			return ErrIDReused
		}
	case pb.ConfChangeAddLearnerNode:
		if cur.removed(m.ID) || had && !old.Learner {
			return ErrIDReused
		}
	case pb.ConfChangeUpdateNode, pb.ConfChangeRemoveNode:
		if !had {
			return ErrUnknownMember
		}
		if typ == pb.ConfChangeRemoveNode && !old.Learner && cur.voters() == 1 {
			return ErrQuorumLoss
		}
	}
	return nil
}

func decodeConfChange(data []byte) (*pb.ConfChange, *confChange, error) {
	cc, ch := new(pb.ConfChange), new(confChange)
	if err := proto.Unmarshal(data, cc); err != nil {
		return nil, nil, fmt.Errorf("raft: decode a membership change: %w", err)
	}
	if err := json.Unmarshal(cc.GetContext(), ch); err != nil {
		return nil, nil, fmt.Errorf("raft: decode a membership change: %w", err)
	}
	ch.Member.ID = cc.GetNodeId()
	return cc, ch, ch.Member.validate()
}

// ProposeConfChange proposes to add, promote (AddNode of a learner), update or
// remove a member. Done is called once, from Process or Tick, when a majority
// knows that the change is in force or the entry has lost its place; never if the
// member stops leading and never learns. Asking again for what is in force already
// waits for the majority.
func (c *Core) ProposeConfChange(typ pb.ConfChangeType, m Member, done func(error)) (index, term uint64, err error) {
	if err := m.validate(); err != nil {
		return 0, 0, err
	}
	if err := c.mayPropose(); err != nil {
		return 0, 0, err
	}
	cur := c.log.confs.newest()
	if typ == pb.ConfChangeRemoveNode && cur.removed(m.ID) && done != nil {
		c.settling = append(c.settling, done)
		c.settle()
		return cur.Index, c.leadTerm, nil
	}
	if err := c.admissible(cur, typ, m); err != nil {
		return 0, 0, err
	}
	ctx, err := json.Marshal(confChange{Member: m})
	if err != nil {
		return 0, 0, fmt.Errorf("raft: encode a membership change: %w", err)
	}
	cc := &pb.ConfChange{Type: typ.Enum(), NodeId: new(m.ID), Context: ctx}
	index, term, err = c.proposed(c.guard(func() error { return c.rn.ProposeConfChange(cc) }))
	if err == nil && done != nil {
		c.confWaiters[index] = confWaiter{term: term, done: done}
	}
	return index, term, err
}

// Status is a member's view of itself and, if it leads, of the others.
type Status struct {
	// ID, ClusterID of this member; Term; Leader is 0 if unknown.
	ID, ClusterID, Term, Leader uint64
	// State is "leader", "follower", "candidate", "pre_candidate".
	State string
	// Commit and Applied indexes; FirstIndex and LastIndex of the log, LogBytes about its size.
	Commit, Applied, FirstIndex, LastIndex, LogBytes uint64
	// Ready means that it leads and has applied an entry of its own term.
	Ready bool
	// Members by id.
	Members []Member
}

var stateNames = [...]string{
	etcdraft.StateFollower: "follower", etcdraft.StateCandidate: "candidate",
	etcdraft.StateLeader: "leader", etcdraft.StatePreCandidate: "pre_candidate",
}

// Status reports the member's state.
func (c *Core) Status() Status {
	st := c.rn.BasicStatus()
	first, _, bytes := c.log.size()
	s := Status{
		ID: c.cfg.ID, ClusterID: c.cfg.ClusterID, Term: st.GetTerm(), Leader: st.Lead,
		State: stateNames[st.RaftState], Commit: st.GetCommit(), Applied: c.apply.index.Load(),
		FirstIndex: first, LastIndex: c.last, LogBytes: bytes,
		Members: slices.Clone(c.log.confs.newest().Members),
	}
	if st.RaftState != etcdraft.StateLeader {
		return s
	}
	s.Ready = c.leadTerm != 0 && c.apply.announced.Load() == c.leadTerm
	full := c.rn.Status()
	for i := range s.Members {
		pr := full.Progress[s.Members[i].ID]
		s.Members[i].Match = pr.Match
		s.Members[i].Active = c.active(s.Members[i].ID)
	}
	return s
}
