package raft

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	etcdraft "go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// Limits of the membership, so that its records stay small.
const (
	maxAddrBytes    = 512      // a host name and a port
	maxContextBytes = 16 << 10 // what the server wants to know of a member
	maxRemoved      = 1024     // ids remembered as used; one is added per removal
)

// Member is one member of the cluster.
type Member struct {
	// ID identifies the member for life: never 0, never used again, never derived from an address.
	ID uint64 `json:"id"`
	// Addr is where its transport listens: host:port.
	Addr string `json:"addr"`
	// Context is the user's, opaque, at most 16 KiB.
	Context []byte `json:"context,omitempty"`
	// Learner members receive the log but do not vote.
	Learner bool `json:"learner,omitempty"`
	// Match is the last index known to be durable there; leader only.
	Match uint64 `json:"-"`
	// Active means that the leader has heard from it within the last election timeout; leader only.
	Active bool `json:"-"`
}

// NewMemberID draws a random id for a member that joins.
func NewMemberID() uint64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails, by its documentation
		id := binary.LittleEndian.Uint64(b[:])
		if id != 0 && !etcdraft.IsLocalMsgTarget(id) {
			return id
		}
	}
}

func (m *Member) validate() error {
	switch {
	case m.ID == 0 || etcdraft.IsLocalMsgTarget(m.ID):
		return fmt.Errorf("raft: %x is not a usable member id; take one from NewMemberID", m.ID)
	case len(m.Addr) > maxAddrBytes:
		return fmt.Errorf("raft: the address of member %x is longer than %d bytes", m.ID, maxAddrBytes)
	case len(m.Context) > maxContextBytes:
		return fmt.Errorf("raft: the context of member %x is longer than %d bytes", m.ID, maxContextBytes)
	}
	return nil
}

// conf is the membership as of an index. It is immutable once made.
type conf struct {
	Index   uint64   `json:"index"`
	Members []Member `json:"members"` // by id
	Removed []uint64 `json:"removed,omitempty"`
}

// state is the configuration in raft's terms. Changes are one member at a time,
// so there is never a joint one.
func (c *conf) state() *pb.ConfState {
	cs := &pb.ConfState{AutoLeave: new(false)}
	for _, m := range c.Members {
		if m.Learner {
			cs.Learners = append(cs.Learners, m.ID)
		} else {
			cs.Voters = append(cs.Voters, m.ID)
		}
	}
	return cs
}

func (c *conf) find(id uint64) (Member, bool) {
	i, ok := slices.BinarySearchFunc(c.Members, id, func(m Member, id uint64) int { return cmp.Compare(m.ID, id) })
	if !ok {
		return Member{}, false
	}
	return c.Members[i], true
}

func (c *conf) removed(id uint64) bool { return slices.Contains(c.Removed, id) }

func (c *conf) voters() (n int) {
	for _, m := range c.Members {
		if !m.Learner {
			n++
		}
	}
	return n
}

// confChange travels in a conf change entry's context.
type confChange struct {
	Member Member `json:"member"`
}

// with is c after a change at index.
func (c *conf) with(index uint64, typ pb.ConfChangeType, m Member) *conf {
	n := &conf{Index: index, Removed: c.Removed}
	for _, o := range c.Members {
		if o.ID != m.ID {
			n.Members = append(n.Members, o)
		}
	}
	old, had := c.find(m.ID)
	if typ == pb.ConfChangeRemoveNode {
		n.Removed = append(slices.Clone(n.Removed), m.ID)
		if len(n.Removed) > maxRemoved {
			n.Removed = n.Removed[len(n.Removed)-maxRemoved:]
		}
		return n
	}
	m.Learner = typ == pb.ConfChangeAddLearnerNode || typ == pb.ConfChangeUpdateNode && old.Learner
	if typ == pb.ConfChangeUpdateNode && !had {
		return n // an update of nobody changes nothing
	}
	n.Members = append(n.Members, m)
	slices.SortFunc(n.Members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return n
}

// confHistory holds the configurations that a restart or a snapshot may need:
// the newest at or below the flushed index, and all after it. The list is guarded
// by the log's mutex; the newest can be read without.
type confHistory struct {
	list []*conf
	cur  atomic.Pointer[conf]
}

func (h *confHistory) newest() *conf {
	if c := h.cur.Load(); c != nil {
		return c
	}
	return &conf{} // a member that waits to be added
}

// set replaces the list, which must not be empty.
func (h *confHistory) set(list ...*conf) {
	h.list = list
	h.cur.Store(list[len(list)-1])
}

// at is the configuration as of index.
func (h *confHistory) at(index uint64) *conf {
	for _, c := range slices.Backward(h.list) {
		if c.Index <= index {
			return c
		}
	}
	return &conf{}
}

func confKey(index uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{prefixConf}, index)
}

func putConf(b *pebble.Batch, c *conf) error {
	v, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("raft: encode configuration: %w", err)
	}
	return b.Set(confKey(c.Index), sealed(v), nil)
}

func decodeConf(v []byte) (*conf, error) {
	b, err := unseal("the configuration", v)
	if err != nil {
		return nil, err
	}
	c := new(conf)
	if err := json.Unmarshal(b, c); err != nil {
		return nil, &CorruptionError{What: "the configuration", Cause: err}
	}
	return c, nil
}

func (h *confHistory) load(db *pebble.DB) error {
	h.list = nil
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{prefixConf}, UpperBound: []byte{prefixConf + 1}})
	if err != nil {
		return readError("the configuration", 0, err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err == nil {
			var c *conf
			if c, err = decodeConf(append([]byte(nil), v...)); err == nil {
				h.set(append(h.list, c)...)
			}
		}
		if err != nil {
			_ = it.Close() // err is the one to report
			return err
		}
	}
	if err := it.Close(); err != nil {
		return readError("the configuration", 0, err)
	}
	return nil
}

// prune drops, in the batch and in memory, what lies before the newest
// configuration at or below index.
func (h *confHistory) prune(b *pebble.Batch, index uint64) {
	keep := 0
	for i, c := range h.list {
		if c.Index <= index {
			keep = i
		}
	}
	for _, c := range h.list[:keep] {
		_ = b.Delete(confKey(c.Index), nil) // fails only on an indexed batch
	}
	h.list = h.list[keep:]
}
