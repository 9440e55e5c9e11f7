package raft

import (
	"errors"
	"flag"
	"fmt"
	"strconv"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

func TestSingleMemberServesAtOnce(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	require.NotZero(t, s.nodes[1].leads, "a sole voter needs no election timeout")
	for i := range 100 {
		require.NoError(t, s.put(fmt.Sprint("k", i), "v"))
	}
	s.settle()
	require.Len(t, s.acked, 100)
	st := s.nodes[1].core.Status()
	require.Equal(t, "leader", st.State)
	require.Equal(t, st.Commit, st.Applied)
	require.True(t, st.Ready)
}

func TestProposeTellsIndexAndTerm(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	n := s.nodes[1]
	want := map[uint64]string{}
	got := map[uint64]string{}
	n.kv.onApply = func(index, term uint64, data []byte) {
		require.Equal(t, n.leads, term)
		got[index] = string(data)
	}
	for i := range 50 {
		index, term, err := n.core.Propose(fmt.Appendf(nil, "%d=x", i))
		require.NoError(t, err)
		require.Equal(t, n.leads, term)
		want[index] = fmt.Sprintf("%d=x", i)
		if i%7 == 0 {
			s.settle()
		}
	}
	s.settle()
	require.Equal(t, want, got)
}

func TestThreeMembersReplicate(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	for i := range 200 {
		require.NoError(t, s.put(fmt.Sprint("k", i), strconv.Itoa(i)))
		if i%10 == 0 {
			s.settle()
		}
	}
	s.settle()
	require.Len(t, s.acked, 200)
	s.agree()
}

func TestFollowerRefusesProposals(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	s.tick(2)
	for _, n := range s.nodes {
		if n == lead {
			continue
		}
		_, _, err := n.core.Propose([]byte("a=b"))
		var nl *NotLeaderError
		require.ErrorAs(t, err, &nl)
		require.Equal(t, lead.id, nl.Leader)
	}
}

func TestBusyWhenTooMuchIsUncommitted(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	s.cut = func(_, _ uint64) bool { return true }
	var err error
	for range 100 {
		if _, _, err = lead.core.Propose(make([]byte, 4<<20)); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, ErrBusy)
	_, _, err = lead.core.Propose(make([]byte, MaxProposalBytes+1))
	require.ErrorContains(t, err, "split it")
}

var seeds = flag.Uint64("seeds", 6, "random fault runs")

// TestRandomFaults pulls the plug on random members at random points, loses
// messages, cuts members off, flushes, moves leadership and membership, and
// requires every acknowledged key on every member afterwards. A failing seed
// repeats.
func TestRandomFaults(t *testing.T) {
	for seed := range *seeds {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			s := newSeededSim(t, seed, 1, 2, 3)
			r := s.rng
			s.drop = []float64{0, 0.05, 0.2}[r.IntN(3)]
			s.keep = []uint64{5, 50, 1000}[r.IntN(3)]
			unsynced := []int{0, 50, 100}[r.IntN(3)]
			for i := range 300 {
				s.step(i, unsynced)
				for _, n := range s.nodes {
					require.NoError(t, n.failed, "node %d at step %d", n.id, i)
				}
			}
			s.drop, s.cut = 0, func(_, _ uint64) bool { return false }
			s.tick(40) // transfers that are under way end
			require.NoError(t, s.put("last", "1"))
			s.settle()
			require.Contains(t, s.acked, "last", "a healed cluster works")
			s.agree()
		})
	}
}

// step does one random thing.
func (s *sim) step(i, unsynced int) {
	r := s.rng
	some := func() *simNode { return s.nodes[1+r.Uint64N(uint64(len(s.nodes)))] }
	lead := s.maybeLeader()
	if lead != nil { // a refusal is allowed, a loss is not
		k, v := "k"+strconv.Itoa(i), strconv.Itoa(i)
		if _, _, err := lead.core.Propose([]byte(k + "=" + v)); err == nil {
			s.pending[k] = v
		}
	}
	switch r.IntN(14) {
	case 0, 1, 2:
		s.tick(1 + r.IntN(3))
	case 3, 4:
		s.process()
	case 5, 6:
		s.deliver()
	case 7:
		require.NoError(s.t, some().core.Flush())
	case 8:
		s.crashSome(some(), unsynced)
	case 9:
		victim := some().id
		s.cut = func(from, to uint64) bool { return from == victim || to == victim }
	case 10, 11:
		s.cut = func(_, _ uint64) bool { return false }
	case 12:
		if lead != nil {
			_ = lead.core.TransferLeadership(some().id)
		}
	case 13:
		s.changeMembers(lead)
	}
}

func (s *sim) maybeLeader() *simNode {
	for _, id := range s.ids() {
		if n := s.nodes[id]; n.leads != 0 {
			return n
		}
	}
	return nil
}

// crashSome takes power from one node or all, and brings them back.
func (s *sim) crashSome(n *simNode, unsynced int) {
	victims := []*simNode{n}
	if s.rng.IntN(4) == 0 {
		victims = victims[:0]
		for _, id := range s.ids() {
			victims = append(victims, s.nodes[id])
		}
	}
	for _, n := range victims {
		s.crash(n, unsynced)
	}
	for _, n := range victims {
		require.NoError(s.t, s.restart(n))
	}
}

// changeMembers adds a fourth member as a learner, promotes or updates it.
func (s *sim) changeMembers(lead *simNode) {
	if lead == nil {
		return
	}
	if s.nodes[4] == nil {
		s.join(4)
	}
	m := Member{ID: 4, Addr: "node4:1"}
	typ := pb.ConfChangeAddLearnerNode
	if old, ok := lead.core.log.confs.newest().find(4); ok {
		typ = pb.ConfChangeUpdateNode
		if old.Learner {
			typ = pb.ConfChangeAddNode
		}
	}
	_, _, _ = lead.core.ProposeConfChange(typ, m, nil) // refused while another is in progress
}

func TestRestartReplaysBehindTheFlush(t *testing.T) {
	s := newSim(t, 1)
	s.settle()
	n := s.nodes[1]
	for i := range 30 {
		require.NoError(t, s.put(fmt.Sprint("k", i), "v"))
		s.settle()
		if i == 15 {
			require.NoError(t, n.core.Flush())
		}
	}
	s.crash(n, 0)
	require.NoError(t, s.restart(n))
	require.Less(t, n.kv.applied, uint64(25), "the flush was not the last word")
	s.settle()
	require.Len(t, n.kv.kv, 30)
}

func TestLogIsCutBehindTheFlush(t *testing.T) {
	s := newSim(t, 1)
	s.keep = 100
	n := s.nodes[1]
	n.core.cfg.LogKeepEntries = 100
	s.settle()
	for i := range 1000 {
		require.NoError(t, s.put(fmt.Sprint("k", i%10), "v"))
	}
	s.settle()
	require.Equal(t, uint64(2), n.core.Status().FirstIndex, "nothing was flushed")
	require.NoError(t, n.core.Flush())
	st := n.core.Status()
	require.Equal(t, st.Applied-100+1, st.FirstIndex)
	require.NoError(t, s.put("synced", "x")) // carries the unsynced truncation along
	s.settle()
	s.crash(n, 0)
	require.NoError(t, s.restart(n))
	require.Equal(t, st.FirstIndex, n.core.Status().FirstIndex)
	s.settle()
	require.NoError(t, s.put("after", "x"))
	s.settle()
	require.Equal(t, "x", n.kv.kv["after"])
}

func TestLaggingMemberGetsASnapshot(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	lead.core.cfg.LogKeepEntries = 10
	slow := s.nodes[1+lead.id%3]
	s.cut = func(from, to uint64) bool { return from == slow.id || to == slow.id }
	for i := range 500 {
		require.NoError(t, s.put(fmt.Sprint("k", i), strconv.Itoa(i)))
		s.settle()
	}
	require.NoError(t, lead.core.Flush())
	require.Greater(t, lead.core.Status().FirstIndex, uint64(400))
	s.cut = func(_, _ uint64) bool { return false }
	s.agree()
	require.Greater(t, slow.core.log.base.index, uint64(400), "it was caught up by a snapshot")
	s.crash(slow, 0)
	require.NoError(t, s.restart(slow))
	s.agree()
}

func TestMembershipChanges(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	for i := range 20 {
		require.NoError(t, s.put(fmt.Sprint("k", i), "v"))
	}
	s.settle()
	change := func(typ pb.ConfChangeType, m Member) error {
		result := errors.New("no result")
		_, _, err := lead.core.ProposeConfChange(typ, m, func(err error) { result = err })
		if err != nil {
			return err
		}
		s.settle()
		return result
	}
	s.join(9)
	m := Member{ID: 9, Addr: "node9:1", Context: []byte("ctx")}
	require.NoError(t, change(pb.ConfChangeAddLearnerNode, m))
	s.agree()
	require.True(t, s.nodes[9].core.Status().Members[3].Learner)
	require.NoError(t, change(pb.ConfChangeAddNode, m))
	s.agree()
	got := s.nodes[9].core.Status().Members
	require.Len(t, got, 4)
	require.False(t, got[3].Learner)
	require.Equal(t, "node9:1", got[3].Addr)
	require.Equal(t, []byte("ctx"), got[3].Context)

	victim := s.nodes[1+lead.id%3]
	require.NoError(t, change(pb.ConfChangeRemoveNode, Member{ID: victim.id}))
	require.ErrorIs(t, change(pb.ConfChangeAddNode, Member{ID: victim.id}), ErrIDReused)
	require.ErrorIs(t, change(pb.ConfChangeRemoveNode, Member{ID: 77}), ErrUnknownMember)
	require.Len(t, lead.core.Status().Members, 3)

	_, _, err := lead.core.ProposeConfChange(pb.ConfChangeUpdateNode, m, nil)
	require.NoError(t, err)
	pending := errors.New("no result")
	_, _, err = lead.core.ProposeConfChange(pb.ConfChangeUpdateNode, m, func(err error) { pending = err })
	require.NoError(t, err)
	s.settle()
	require.ErrorIs(t, pending, ErrConfChangePending)

	for _, id := range []uint64{lead.id, 9} { // restarted members know the membership
		s.crash(s.nodes[id], 0)
		require.NoError(t, s.restart(s.nodes[id]))
		require.Len(t, s.nodes[id].core.Status().Members, 3)
	}
	require.NoError(t, victim.store.Close())
	delete(s.nodes, victim.id)
	s.agree()
}

// A change that is said to be done survives the loss of the only member that carried it out so far.
func TestAChangeIsDoneWhenTheLeaderCanBeLost(t *testing.T) {
	for _, c := range []struct {
		name   string
		voters []uint64
		typ    pb.ConfChangeType
	}{
		{"promote", []uint64{1, 2}, pb.ConfChangeAddNode},
		{"remove", []uint64{1, 2, 3, 4}, pb.ConfChangeRemoveNode},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSim(t, c.voters...)
			lead := s.leader()
			other := Member{ID: 1 + lead.id%2}
			if c.typ == pb.ConfChangeAddNode {
				s.join(9)
				other = Member{ID: 9, Addr: "node9:1"}
				_, _, err := lead.core.ProposeConfChange(pb.ConfChangeAddLearnerNode, other, nil)
				require.NoError(t, err)
				s.agree()
			}
			done := false
			_, _, err := lead.core.ProposeConfChange(c.typ, other, func(err error) {
				require.NoError(t, err)
				done = true
			})
			require.NoError(t, err)
			for range 20 {
				if s.process(); done {
					break
				}
				s.deliver()
			}
			require.True(t, done)
			s.drop = 1 // what it said last is lost with it
			s.deliver()
			s.drop = 0
			gone := []*simNode{lead}
			if c.typ == pb.ConfChangeRemoveNode {
				gone = append(gone, s.nodes[other.ID])
			}
			for _, n := range gone {
				require.NoError(t, n.store.Close())
				delete(s.nodes, n.id)
			}
			require.NotEqual(t, lead.id, s.leader().id)
			require.NoError(t, s.put("k", "v"))
			s.agree()
		})
	}
}

func TestRemovingTwiceIsNoError(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	gone := Member{ID: 1 + lead.id%3}
	for range 2 {
		result := errors.New("no result")
		_, _, err := lead.core.ProposeConfChange(pb.ConfChangeRemoveNode, gone, func(err error) { result = err })
		require.NoError(t, err)
		s.settle()
		require.NoError(t, result)
	}
	require.Len(t, lead.core.Status().Members, 2)
}

func TestTransferLeadership(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	to := 1 + lead.id%3
	require.NoError(t, lead.core.TransferLeadership(to))
	_, _, err := lead.core.Propose([]byte("a=b"))
	require.ErrorIs(t, err, ErrTransferring)
	s.settle()
	require.Equal(t, to, s.leader().id)
	require.Zero(t, lead.leads)
}

// A leader that dies is replaced as soon as the others are free to vote, whichever of them is next in turn.
func TestLostLeaderIsReplacedWithoutJitter(t *testing.T) {
	for seed := range uint64(10) {
		s := newSeededSim(t, seed+1, 1, 2, 3)
		lead := s.leader()
		s.tick(int(seed))
		timeout := lead.core.cfg.ElectionTicks
		s.crash(lead, 0)
		s.tick(timeout - 1)
		require.Nil(t, s.maybeLeader(), "seed %d: others may still count on the old leader", seed)
		s.tick(4) // the tick that may be missing, two turns, and the vote
		require.NotNil(t, s.maybeLeader(), "seed %d", seed)
		s.close()
	}
}

func TestRestartedVoterKeepsItsPromise(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	s.tick(3)
	voter, other := s.nodes[1+lead.id%3], s.nodes[1+(lead.id+1)%3]
	s.crash(voter, 0)
	require.NoError(t, s.restart(voter))
	term := lead.core.Status().Term
	vote := &pb.Message{
		Type: pb.MsgVote.Enum(), From: new(other.id), To: new(voter.id), Term: new(term + 1),
		Index: new(uint64(1000)), LogTerm: new(term + 1),
	}
	require.NoError(t, voter.core.Step(vote))
	_, err := voter.core.Process()
	require.NoError(t, err)
	require.Equal(t, term, voter.core.Status().Term, "a vote within an election timeout of the start")
	s.cut = func(_, _ uint64) bool { return true }
	for range 10 {
		voter.core.Tick()
	}
	require.NoError(t, voter.core.Step(vote))
	s.process()
	require.Equal(t, term+1, voter.core.Status().Term)
}

func TestReadIndexNeedsAQuorum(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	require.NoError(t, s.put("a", "1"))
	s.settle()
	follower := s.nodes[1+lead.id%3]
	follower.core.ReadIndex(1)
	s.settle()
	require.GreaterOrEqual(t, follower.reads[1], lead.core.Status().Commit)
	s.cut = func(from, to uint64) bool { return from == lead.id || to == lead.id }
	lead.core.ReadIndex(2)
	s.settle()
	require.NotContains(t, lead.reads, uint64(2), "a leader that is cut off answers no read")
}

func TestForeignStores(t *testing.T) {
	fs := vfs.NewCrashableMem()
	store, err := OpenStore("/data", testStoreOptions(fs))
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Close()) }()
	_, err = NewCore(CoreConfig{ID: 1, ClusterID: 7, Machine: newKV(store.State())}, store)
	require.ErrorIs(t, err, ErrNotInitialised)
	require.Error(t, store.Bootstrap(0, 1, simMembers(1)))
	require.ErrorContains(t, store.Bootstrap(7, 2, simMembers(1)), "join instead")
	require.NoError(t, store.Bootstrap(7, 1, simMembers(1)))
	require.NoError(t, store.Bootstrap(7, 1, simMembers(1)), "twice is once")
	var foreign *ForeignStoreError
	require.ErrorAs(t, store.Bootstrap(8, 1, simMembers(1)), &foreign)
	require.ErrorAs(t, store.Join(7, 2), &foreign)
	require.Equal(t, uint64(1), foreign.HaveID)
}

func TestBadMessagesHaveNoEffect(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	from := 1 + lead.id%3
	msg := func(f func(*pb.Message)) *pb.Message {
		m := &pb.Message{
			Type: pb.MsgApp.Enum(), From: new(from), To: new(lead.id), Term: new(uint64(99)),
			Index: new(uint64(5)), LogTerm: new(uint64(1)),
		}
		f(m)
		return m
	}
	for name, m := range map[string]*pb.Message{
		"proposal":       msg(func(m *pb.Message) { m.Type = pb.MsgProp.Enum() }),
		"local":          msg(func(m *pb.Message) { m.Type = pb.MsgHup.Enum() }),
		"storage":        msg(func(m *pb.Message) { m.Type = pb.MsgStorageAppendResp.Enum() }),
		"snapshot":       msg(func(m *pb.Message) { m.Type = pb.MsgSnap.Enum() }),
		"unknown":        msg(func(m *pb.Message) { m.Type = pb.MessageType(200).Enum() }),
		"self":           msg(func(m *pb.Message) { m.From = m.To }),
		"misdirected":    msg(func(m *pb.Message) { m.To = new(uint64(50)) }),
		"no term":        msg(func(m *pb.Message) { m.Term = nil }),
		"read":           msg(func(m *pb.Message) { m.Type = pb.MsgReadIndex.Enum() }),
		"short context":  msg(func(m *pb.Message) { m.Type, m.Context = pb.MsgHeartbeatResp.Enum(), []byte{1} }),
		"gap":            msg(func(m *pb.Message) { m.Entries = []*pb.Entry{{Index: new(uint64(9)), Term: new(uint64(1))}} }),
		"older entry":    msg(func(m *pb.Message) { m.Entries = []*pb.Entry{{Index: new(uint64(6))}} }),
		"newer entry":    msg(func(m *pb.Message) { m.Entries = []*pb.Entry{{Index: new(uint64(6)), Term: new(uint64(100))}} }),
		"bad conf":       msg(func(m *pb.Message) { m.Entries = confEntry(pb.EntryConfChange) }),
		"joint conf":     msg(func(m *pb.Message) { m.Entries = confEntry(pb.EntryConfChangeV2) }),
		"local response": msg(func(m *pb.Message) { m.Responses = []*pb.Message{{}} }),
	} {
		var bad *BadMessageError
		require.ErrorAs(t, lead.core.Step(m), &bad, name)
	}
	s.settle()
	require.Equal(t, lead.id, s.leader().id)
	s.agree()
}

func confEntry(typ pb.EntryType) []*pb.Entry {
	return []*pb.Entry{{Index: new(uint64(6)), Term: new(uint64(1)), Type: typ.Enum(), Data: []byte("\xff")}}
}
