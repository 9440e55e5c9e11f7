package raft

import (
	"testing"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
)

// TestReadsAreNotPassedOn asks a follower, which led a moment ago, for a read index. To pass it on in the asker's name
// would end the connection to the leader, which takes messages from their senders only.
func TestReadsAreNotPassedOn(t *testing.T) {
	s := newSim(t, 1, 2, 3)
	lead := s.leader()
	s.tick(2)
	for _, n := range s.nodes {
		if n == lead {
			continue
		}
		asker := 1 + 2 + 3 - lead.id - n.id
		require.NoError(t, n.core.Step(&pb.Message{
			Type: pb.MsgReadIndex.Enum(), From: new(asker), To: new(n.id),
			Entries: []*pb.Entry{{Data: []byte("12345678")}},
		}))
		s.process()
		for _, m := range s.msgs {
			require.NotEqual(t, pb.MsgReadIndex, m.m.GetType(), "from %d to %d", m.m.GetFrom(), m.m.GetTo())
		}
		s.settle()
	}
}
