package raft

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

// TestAnswerFromBeforeAPauseDoesNotCount: a leader asks its quorum, is stopped for longer than an election takes, and
// finds the answers when it goes on. They say nothing of the time since, so it has to ask again.
func TestAnswerFromBeforeAPauseDoesNotCount(t *testing.T) {
	c := startMem(t, 1, 2, 3)
	lead := c.leader(t)
	c.put(t, lead, "x", "1")
	_, err := lead.node.Confirm(t.Context())
	require.NoError(t, err)
	for _, n := range c.nodes {
		if n != lead {
			n.node.mu.Lock() // its answer has to wait
		}
	}
	before := lead.node.stats.readRounds.Load()
	type answer struct {
		deadline int64
		err      error
	}
	got := make(chan answer, 1)
	go func() {
		deadline, err := lead.node.Confirm(context.WithoutCancel(t.Context()))
		got <- answer{deadline, err}
	}()
	require.Eventually(t, func() bool { return lead.node.stats.readRounds.Load() > before }, 10*time.Second, time.Millisecond)
	resumed := c.clock.Add(int64(10 * time.Second))
	for _, n := range c.nodes {
		if n != lead {
			n.node.mu.Unlock()
		}
	}
	a := <-got
	require.NoError(t, a.err)
	require.Greater(t, a.deadline, resumed)
	require.GreaterOrEqual(t, lead.node.stats.readRounds.Load(), before+2, "it asked again after the pause")
}

// TestSyncOfTheFirstOfTwoRounds: of two rounds that are written together, the sync that the first needs is done by the
// second, though that writes nothing that needs one itself.
func TestSyncOfTheFirstOfTwoRounds(t *testing.T) {
	core, r, mem := roundToSync(t)
	hard := core.log.hardState()
	next := &round{append: &pb.Message{Term: new(hard.term), Vote: new(hard.vote), Commit: new(hard.commit)}}
	require.True(t, next.writes())
	requireDurable(t, core, r, next, mem)
}

// TestAMinorityCommitsNothing: what a leader and fewer than half of the others have is not applied, and gone when the
// rest elects another leader.
func TestAMinorityCommitsNothing(t *testing.T) {
	for _, ids := range [][]uint64{{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}} {
		s := newSim(t, ids...)
		require.NoError(t, s.put("before", "1"))
		s.settle()
		lead := s.leader()
		reach := map[uint64]bool{lead.id: true} // with the leader one short of a majority
		for _, id := range ids {
			if len(reach) < len(ids)/2 {
				reach[id] = true
			}
		}
		s.cut = func(from, to uint64) bool { return reach[from] != reach[to] }
		_, _, err := lead.core.Propose([]byte("lost=1"))
		require.NoError(t, err)
		s.settle()
		for _, n := range s.nodes {
			require.Empty(t, n.kv.get("lost"), "%d of %d members have it", len(reach), len(ids))
		}
		require.Equal(t, "1", lead.kv.get("before"))
	}
}
