package member

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// This file has the records of a group in the store: JSON, with lists of processes as text, so that a view of MaxCap members fits
// into one and people can read them. Whatever does not decode counts as not being there.

const (
	// maxDetail bounds texts for people in records, in bytes.
	maxDetail = 256
	// MaxReport bounds what Hooks.Connect and Config.Table return, in bytes: a row, and a view record beside two lists of MaxCap
	// members, has room for it.
	MaxReport = 8 << 10
)

// errRecord says that a value of the store is none of ours.
var errRecord = errors.New("member: malformed record")

// spec is what a group is: all its processes agree on it before anything else.
type spec struct {
	Ranks          []int `json:"ranks"`    // global rank of each slot
	Founders       int   `json:"founders"` // slots that the group starts with: the first ones
	Cap            int   `json:"cap"`
	FirstCap       int   `json:"first_cap"` // before it was extended: what processes may still say
	AutoDeactivate bool  `json:"auto_deactivate"`
	AutoSync       bool  `json:"auto_sync"`
	Retry          bool  `json:"retry"`
}

func decodeSpec(value []byte) (s spec, err error) {
	if err := json.Unmarshal(value, &s); err != nil {
		return spec{}, fmt.Errorf("%w: %w", errRecord, err)
	}
	if s.Cap < 1 || s.Cap > MaxCap || s.FirstCap > s.Cap || len(s.Ranks) > s.Cap || s.Founders < 1 || s.Founders > len(s.Ranks) {
		return spec{}, fmt.Errorf("%w: a spec of %d ranks, %d of them founders, and %d slots", errRecord, len(s.Ranks), s.Founders, s.Cap)
	}
	if err := checkRanks(s.Ranks); err != nil {
		return spec{}, fmt.Errorf("%w: %w", errRecord, err)
	}
	return s, nil
}

// record is the view record.
type record struct {
	Generation uint64 `json:"gen"`  // revision that made the spec: another one's record is as good as none
	Last       uint64 `json:"last"` // highest epoch that was proposed
	Committed  View   `json:"committed"`
	Proposed   *View  `json:"proposed,omitempty"`
	Note       string `json:"note,omitempty"` // why the last proposal was given up
}

func decodeRecord(value []byte) (r record, err error) {
	if err := json.Unmarshal(value, &r); err != nil {
		return record{}, fmt.Errorf("%w: %w", errRecord, err)
	}
	if r.Committed.Epoch > r.Last || r.Proposed != nil && (r.Proposed.Epoch > r.Last || r.Proposed.Epoch <= r.Committed.Epoch) {
		return record{}, fmt.Errorf("%w: epochs out of order", errRecord)
	}
	return r, nil
}

// state is where a process stands to its group.
type state string

const (
	stateInactive state = "inactive"
	stateAwaiting state = "awaiting" // it may be activated
	stateActive   state = "active"   // it is in the view, as far as it knows
)

// row is what one process says of itself and of the others. Only it writes it.
type row struct {
	Generation  uint64 `json:"gen"`
	Incarnation uint64 `json:"inc"`
	// Attached is a random number of this membership: a process may leave a group and take its slot again, and hear of its row of
	// before later than that.
	Attached uint64 `json:"att,omitempty"`
	State    state  `json:"state"`
	// Out is the latest epoch that was known when the process last began, or began anew: it is outside of all views up to there,
	// whatever they say.
	Out uint64 `json:"out,omitempty"`
	// Seen is the view that the process was in, or knew of, when it wrote this: what it says in Down it says of that one.
	Seen  uint64  `json:"seen,omitempty"`
	Up    peers   `json:"up,omitempty"`    // who it is connected to
	Down  []doubt `json:"down,omitempty"`  // who it was connected to, and is no longer
	Heard peers   `json:"heard,omitempty"` // whom others doubt; what Up and Down say of those is said in the knowledge of that
	Ack   *ack    `json:"ack,omitempty"`
	// Resync asks for a new view after this epoch, even of the same members.
	Resync *resync `json:"resync,omitempty"`
	// Sync is the epoch of a view of which the process wants failures to be dealt with: where AutoSync does not do that.
	Sync uint64 `json:"sync,omitempty"`
}

// doubt is a peer that a process has lost.
type doubt struct {
	Rank        int    `json:"rank"`
	Incarnation uint64 `json:"inc"`
	Why         string `json:"why,omitempty"`
}

// ack is how far a process is with a proposal.
type ack struct {
	Epoch     uint64 `json:"epoch"`
	Connected bool   `json:"connected,omitempty"`
	Held      bool   `json:"held,omitempty"`
	Done      uint64 `json:"done,omitempty"`
	Entered   uint64 `json:"entered,omitempty"`
	Report    []byte `json:"report,omitempty"`
	Failed    string `json:"failed,omitempty"` // why it will not take part
}

type resync struct {
	Epoch uint64 `json:"epoch"`
	Retry bool   `json:"retry,omitempty"` // operations may be run again
	Why   string `json:"why,omitempty"`
}

func decodeRow(value []byte) (r row, err error) {
	if err := json.Unmarshal(value, &r); err != nil {
		return row{}, fmt.Errorf("%w: %w", errRecord, err)
	}
	switch r.State {
	case stateInactive, stateAwaiting, stateActive:
	default:
		return row{}, fmt.Errorf("%w: state %.20q", errRecord, r.State)
	}
	return r, nil
}

// doubts is what a row says against a process, nil if nothing.
func (r *row) doubts(rank int, incarnation uint64) *doubt {
	for i := range r.Down {
		if r.Down[i].Rank == rank && r.Down[i].Incarnation == incarnation {
			return &r.Down[i]
		}
	}
	return nil
}

// peer is one life of the process in a slot.
type peer struct {
	Rank        int
	Incarnation uint64
}

// peers are processes by rank. As text they are "0:inc 3:inc", incarnations to the base of 36.
type peers []peer

func (p peers) has(rank int, incarnation uint64) bool {
	i, ok := slices.BinarySearchFunc(p, rank, func(x peer, rank int) int { return x.Rank - rank })
	return ok && p[i].Incarnation == incarnation
}

// MarshalText writes them.
func (p peers) MarshalText() ([]byte, error) {
	var b []byte
	for i, x := range p {
		if i > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendInt(b, int64(x.Rank), 10)
		b = append(b, ':')
		b = strconv.AppendUint(b, x.Incarnation, 36)
	}
	return b, nil
}

// UnmarshalText reads them.
func (p *peers) UnmarshalText(text []byte) error {
	*p = nil
	last := -1
	for field := range strings.FieldsSeq(string(text)) {
		rank, inc, err := parsePeer(field)
		if err != nil || rank <= last {
			return fmt.Errorf("%w: peer %.40q", errRecord, field)
		}
		last = rank
		*p = append(*p, peer{rank, inc})
	}
	return nil
}

// parsePeer reads "3:inc".
func parsePeer(s string) (rank int, incarnation uint64, err error) {
	left, right, _ := strings.Cut(s, ":")
	r, err := strconv.ParseUint(left, 10, 32)
	if err == nil && r >= MaxCap {
		err = errRecord
	}
	if err != nil {
		return 0, 0, err //nolint:wrapcheck // callers do
	}
	incarnation, err = strconv.ParseUint(right, 36, 64)
	return int(r), incarnation, err //nolint:wrapcheck // callers do
}

// Members is a list of members by rank. As text it is "0/10:inc 3/13:inc": rank, global rank, and incarnation to the base of 36.
type Members []Member

// MarshalText writes them.
func (m Members) MarshalText() ([]byte, error) {
	var b []byte
	for i, x := range m {
		if i > 0 {
			b = append(b, ' ')
		}
		b = fmt.Appendf(b, "%d/%d:%s", x.Rank, x.Global, strconv.FormatUint(x.Incarnation, 36))
	}
	return b, nil
}

// UnmarshalText reads them.
func (m *Members) UnmarshalText(text []byte) error {
	*m = nil
	last := -1
	for field := range strings.FieldsSeq(string(text)) {
		left, right, _ := strings.Cut(field, "/")
		global, inc, ok := strings.Cut(right, ":")
		rank, _, err := parsePeer(left + ":" + inc)
		g, gerr := strconv.ParseInt(global, 10, 32)
		if !ok || err != nil || gerr != nil || g < 0 || rank <= last {
			return fmt.Errorf("%w: member %.60q", errRecord, field)
		}
		_, incarnation, _ := parsePeer(left + ":" + inc)
		last = rank
		*m = append(*m, Member{rank, int(g), incarnation})
	}
	return nil
}

// encode is a record as the store keeps it.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // none of our types can fail
	}
	return b
}

// clip bounds a text for people.
func clip(s string) string {
	if len(s) > maxDetail {
		return strings.ToValidUTF8(s[:maxDetail-3], "") + "..."
	}
	return s
}

// announcement is a process in the store.
type announcement struct {
	Incarnation uint64 `json:"inc"`
	Address     []byte `json:"address,omitempty"`
	Host        string `json:"host,omitempty"`
}

// MaxGlobal bounds global ranks: a job has fewer processes.
const MaxGlobal = 1 << 20

// checkRanks refuses global ranks that cannot be, or that come twice.
func checkRanks(ranks []int) error {
	slot := make(map[int]int, len(ranks))
	for i, g := range ranks {
		if g < 0 || g >= MaxGlobal {
			return &ConfigError{"Ranks", fmt.Sprintf("slot %d has global rank %d: they are 0 to %d", i, g, MaxGlobal-1)}
		}
		if j, ok := slot[g]; ok {
			return &ConfigError{"Ranks", fmt.Sprintf("global rank %d is in slots %d and %d: a process has one slot of a group", g, j, i)}
		}
		slot[g] = i
	}
	return nil
}
