package raft

import (
	"fmt"

	etcdraft "go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// BadMessageError says that a peer sent what it may not. The message has had no
// effect.
type BadMessageError struct {
	// From is the sender as the message names it.
	From uint64
	// Type of the message, and why it was refused.
	Type, Why string
}

// Error implements error.
func (e *BadMessageError) Error() string {
	return fmt.Sprintf("raft: refused a %s from member %x: %s; do all members run compatible releases?",
		e.Type, e.From, e.Why)
}

func badMessage(m *pb.Message, why string) error {
	return &BadMessageError{From: m.GetFrom(), Type: m.GetType().String(), Why: why}
}

// checkMessage finds what would make the raft library panic or act for another
// member. It does not look for lies: members trust each other's logs.
func checkMessage(m *pb.Message, self uint64) error {
	if m.GetTo() != self {
		return badMessage(m, fmt.Sprintf("it is for member %x", m.GetTo()))
	}
	if from := m.GetFrom(); from == 0 || from == self || etcdraft.IsLocalMsgTarget(from) {
		return badMessage(m, "no other member can have sent it")
	}
	if len(m.GetResponses()) > 0 {
		return badMessage(m, "it carries local work")
	}
	switch m.GetType() {
	case pb.MsgApp:
		return checkAppend(m)
	case pb.MsgReadIndex, pb.MsgReadIndexResp:
		if e := m.GetEntries(); len(e) != 1 || len(e[0].GetData()) > 64 || e[0].GetType() != pb.EntryNormal {
			return badMessage(m, "it must carry one small entry")
		}
		return nil // it may be of any term
	case pb.MsgHeartbeatResp:
		if n := len(m.GetContext()); n != 0 && n != 8 {
			return badMessage(m, "its context must have 0 or 8 bytes")
		}
	case pb.MsgAppResp, pb.MsgVote, pb.MsgVoteResp, pb.MsgPreVote, pb.MsgPreVoteResp,
		pb.MsgHeartbeat, pb.MsgTimeoutNow, pb.MsgSnap:
	default: // proposals are not forwarded, the rest is local
		return badMessage(m, "this type is not for the network")
	}
	switch {
	case m.GetTerm() == 0:
		return badMessage(m, "it has no term")
	case len(m.GetEntries()) > 0:
		return badMessage(m, "this type carries no entries")
	}
	return nil
}

func checkAppend(m *pb.Message) error {
	index, term := m.GetIndex(), m.GetLogTerm()
	if m.GetTerm() == 0 || term > m.GetTerm() {
		return badMessage(m, "its terms do not ascend")
	}
	for _, e := range m.GetEntries() {
		index++
		if e.GetIndex() != index {
			return badMessage(m, "its entries are not in order")
		}
		if e.GetTerm() < term || e.GetTerm() > m.GetTerm() {
			return badMessage(m, "its terms do not ascend")
		}
		term = e.GetTerm()
		switch e.GetType() {
		case pb.EntryNormal:
		case pb.EntryConfChange:
			if _, _, err := decodeConfChange(e.GetData()); err != nil {
				return badMessage(m, err.Error())
			}
		default:
			return badMessage(m, "it has an entry of unknown type")
		}
	}
	return nil
}

// decodeMessage parses one message from the network.
func decodeMessage(b []byte) (*pb.Message, error) {
	m := new(pb.Message)
	if err := proto.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("raft: decode a message: %w", err)
	}
	return m, nil
}
