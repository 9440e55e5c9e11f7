package member

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// MaxCap bounds the slots of a group, so that a view and each row fit into a record of the store: 64 KiB with Larder's masters.
const MaxCap = 1024

// Member is one process in one slot of a group.
type Member struct {
	Rank        int    // in the group: its slot
	Global      int    // in the job
	Incarnation uint64 // of the process's life
}

// Reason says why a view is made.
type Reason string

// The reasons of views.
const (
	ReasonStart      Reason = "start"      // the group begins
	ReasonFailure    Reason = "failure"    // members or links between them have failed
	ReasonResync     Reason = "resync"     // the members are the same, but not at one mind: see Group.Resync
	ReasonActivate   Reason = "activate"   // Group.Activate
	ReasonDeactivate Reason = "deactivate" // Group.Deactivate
)

// Phase says how far a view is.
type Phase string

// The phases of a view, in their order.
const (
	PhaseConnect Phase = "connect" // members build channels; the view before works on
	PhaseHold    Phase = "hold"    // no further operation begins until the view is committed or given up
	PhaseCommit  Phase = "commit"  // it is in force
)

// View is who takes part in a group from one epoch on.
type View struct {
	Group string `json:"-"`
	Epoch uint64 `json:"epoch"` // grows from view to view; those that were given up are missing
	Phase Phase  `json:"phase"`

	// Members are who runs operations, by rank: the active set without those who are absent.
	Members Members `json:"members"`
	// Active is the set that users see.
	Active Mask `json:"active"`
	// Absent are those of Active who have failed while the group leaves deactivation to its user.
	Absent Mask `json:"absent,omitempty"`

	// StartSeq is the first operation of this view; those before belong to the views before. It is set by the commit.
	StartSeq uint64 `json:"start_seq"`
	// Table is what Config.Table made of the members' reports. It is set by the commit.
	Table []byte `json:"table,omitempty"`

	Reason   Reason `json:"reason"`
	Detail   string `json:"detail,omitempty"` // for people: what has failed, say
	Proposer int    `json:"proposer"`         // rank
	// Retry says that operations that no member has completed are run again in this view: Config.Retry, and it makes sense.
	Retry bool `json:"retry,omitempty"`
	// Left are the members of the view that this process knew before, which this one has not.
	Left Members `json:"-"`
}

// Index is a rank's place in Members, -1 if it is not among them.
func (v *View) Index(rank int) int {
	i, ok := slices.BinarySearchFunc(v.Members, rank, func(m Member, rank int) int { return m.Rank - rank })
	if !ok {
		return -1
	}
	return i
}

// Has reports whether a process is a member, in this life of it.
func (v *View) Has(rank int, incarnation uint64) bool {
	i := v.Index(rank)
	return i >= 0 && v.Members[i].Incarnation == incarnation
}

// Mask is a set of ranks: bit r%64 of word r/64.
//
//nolint:recvcheck // Set grows it
type Mask []uint64

// MaskOf is the set of some ranks.
func MaskOf(ranks ...int) Mask {
	var m Mask
	for _, r := range ranks {
		m.Set(r)
	}
	return m
}

// Has reports whether a rank is in the set.
func (m Mask) Has(rank int) bool {
	return rank >= 0 && rank/64 < len(m) && m[rank/64]>>(rank%64)&1 == 1
}

// Set adds a rank.
func (m *Mask) Set(rank int) {
	for len(*m) <= rank/64 {
		*m = append(*m, 0)
	}
	(*m)[rank/64] |= 1 << (rank % 64)
}

// Clear removes a rank.
func (m Mask) Clear(rank int) {
	if m.Has(rank) {
		m[rank/64] &^= 1 << (rank % 64)
	}
}

// Len is the number of ranks in the set.
func (m Mask) Len() int {
	n := 0
	for _, w := range m {
		n += bits.OnesCount64(w)
	}
	return n
}

// Ranks are the ranks in the set, in their order.
func (m Mask) Ranks() []int {
	var ranks []int
	for i, w := range m {
		for ; w != 0; w &= w - 1 {
			ranks = append(ranks, i*64+bits.TrailingZeros64(w))
		}
	}
	return ranks
}

// Clone is a copy.
func (m Mask) Clone() Mask { return slices.Clone(m) }

// Equal reports whether two sets have the same ranks, however many words they have.
func (m Mask) Equal(o Mask) bool { return slices.Equal(m.Ranks(), o.Ranks()) }

// String lists the ranks.
func (m Mask) String() string { return rankList(m.Ranks()) }

// rankList is ranks as people write them: "0,2,5".
func rankList(ranks []int) string {
	var b strings.Builder
	for i, r := range ranks {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(r))
	}
	return b.String()
}
