package link

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"larder/pg/shm"
	"larder/transfer"
)

// scope names what lanes belong to: a mesh by its group and epoch, a pair by its group and the peer's rank.
type scope struct {
	pair  bool
	group string
	epoch uint64
	peer  int
}

func (s scope) String() string {
	if s.pair {
		return fmt.Sprintf("the pair of group %q with rank %d", s.group, s.peer)
	}
	return fmt.Sprintf("the mesh of group %q, epoch %d", s.group, s.epoch)
}

// partyMessage is what two processes say about a mesh or a pair that they build. Each end has drawn a number for its attempt, so
// that nothing is taken for a part of another.
//
//	offer  to each member at once: who I think the members are, and with whom I share memory
//	share  when all have offered: memory for the lane, and for the room
//	done   the lane and the room are ready here
//	leave  I have given up, or closed it
type partyMessage struct {
	Pair  bool          `json:"pair,omitempty"`
	Group string        `json:"group"`
	Epoch uint64        `json:"epoch,omitempty"`
	From  uint64        `json:"from,string"`         // the sender's number
	To    uint64        `json:"to,string,omitempty"` // the receiver's; 0 in an offer or a leave while none has come of it
	Offer *offer        `json:"offer,omitempty"`
	Share *share        `json:"share,omitempty"`
	Why   *RefusedError `json:"why,omitempty"` // of a leave
}

type offer struct {
	Terms  []byte     `json:"terms"`            // the digest of what all must agree on
	Text   string     `json:"text"`             // the same, for people
	Shares []byte     `json:"shares,omitempty"` // a bit for each member that the sender shares memory with
	Layout shm.Layout `json:"layout"`           // of the room, on which those of a host must agree
}

// share says which files come with it, in this order, and where the engine reaches the sender's ring.
type share struct {
	Ring   bool         `json:"ring,omitempty"`   // that the sender writes
	Outbox bool         `json:"outbox,omitempty"` // the sender's
	Engine *engineShare `json:"engine,omitempty"`
}

// engineShare is a ring in the sender's memory that the receiver's engine writes to.
type engineShare struct {
	Descriptor transfer.Descriptor `json:"descriptor"`
	Ring       transfer.Handle     `json:"ring"`
	Bytes      int                 `json:"bytes"`
	Name       string              `json:"name"` // of notifications to the sender
}

// check looks at what can be wrong with a message whatever it is about.
func (m *partyMessage) check(kind byte) error {
	ok := len(m.Group) <= maxName && m.From != 0
	switch kind {
	case frameOffer:
		ok = ok && m.Offer != nil && len(m.Offer.Shares) <= (MaxMembers+7)/8 && len(m.Offer.Terms) == sha256.Size
	case frameShare:
		ok = ok && m.Share != nil && m.To != 0
		if e := m.Share; ok && e.Engine != nil {
			ok = e.Engine.Bytes >= minRing && e.Engine.Bytes <= maxRing && len(e.Engine.Name) <= maxNotifyName
		}
	case frameDone:
		ok = ok && m.To != 0
	}
	if !ok {
		return fmt.Errorf("%w: kind %d lacks what it must say", ErrFrame, kind)
	}
	return nil
}

// of is the scope that a message from a rank is about.
func (m *partyMessage) of(rank int) scope {
	s := scope{pair: m.Pair, group: m.Group, epoch: m.Epoch}
	if m.Pair {
		s.peer = rank
	}
	return s
}

// terms are what the members of a mesh must agree on, as a digest and for people.
func terms(cfg *MeshConfig, ring int) ([]byte, string) {
	h := sha256.New()
	var b []byte
	for _, n := range []int{ring, len(cfg.Members)} {
		b = binary.LittleEndian.AppendUint64(b, uint64(n)) //nolint:gosec // only compared
	}
	for _, m := range cfg.Members {
		b = binary.LittleEndian.AppendUint64(b, uint64(m.Rank)) //nolint:gosec // only compared
		b = binary.LittleEndian.AppendUint64(b, m.Incarnation)
	}
	_, _ = h.Write(b) // it never fails
	text := fmt.Sprintf("%d members from rank %d to rank %d, rings of %d bytes", len(cfg.Members), cfg.Members[0].Rank,
		cfg.Members[len(cfg.Members)-1].Rank, ring)
	return h.Sum(nil), text
}

// layoutOf is a layout with its defaults filled in.
func layoutOf(l shm.Layout) shm.Layout {
	fill := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	fill(&l.Tracks, shm.DefaultLayout.Tracks)
	fill(&l.Slots, shm.DefaultLayout.Slots)
	fill(&l.SlotBytes, shm.DefaultLayout.SlotBytes)
	return l
}

// hosts divides members by who shares memory with whom: into sets in which everybody does with everybody, by rows of bits that all members
// have told all. All of them come to the same result, whatever the reason why some do not share.
func hosts(rows [][]byte) (sets [][]int) {
	shares := func(i, k int) bool { return hasBit(rows[i], k) && hasBit(rows[k], i) }
next:
	for i := range rows {
	sets:
		for s := range sets {
			for _, k := range sets[s] {
				if !shares(i, k) {
					continue sets
				}
			}
			sets[s] = append(sets[s], i)
			continue next
		}
		sets = append(sets, []int{i})
	}
	return sets
}

func hasBit(row []byte, i int) bool { return i/8 < len(row) && row[i/8]>>(i%8)&1 == 1 }

func setBit(row []byte, i int) { row[i/8] |= 1 << (i % 8) }
