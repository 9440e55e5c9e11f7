package link

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrClosed says that the node, the mesh or the pair was closed in this process.
	ErrClosed = errors.New("link: closed")
	// ErrEnded says that the peer has closed the lane, or that its process has ended.
	ErrEnded = errors.New("link: the peer has closed its end of the lane")
	// ErrLost says that a connection to a process was lost without a word: it was killed, say.
	ErrLost = errors.New("link: the connection was lost")
	// ErrLeft says that a process has closed its node.
	ErrLeft = errors.New("link: the process has taken its leave")
	// ErrReplaced says that another incarnation of a rank has taken the place of this one, or that the process has connected anew.
	ErrReplaced = errors.New("link: another process has taken its place")
	// ErrNotConnected says that there is no connection to a process. Connect first.
	ErrNotConnected = errors.New("link: not connected")
	// ErrNoTransport says that two processes have no transport in common that leads from one to the other.
	ErrNoTransport = errors.New("link: no transport leads there")
	// ErrFrame says that a peer has sent what no working peer sends.
	ErrFrame = errors.New("link: a frame that cannot be")
	// ErrBusy says that a process has too much to do for a question. Ask again later.
	ErrBusy = errors.New("link: the process has too many questions to answer")
)

// Why a process refuses another.
const (
	RefusedVersion  = "version"  // it speaks another version of this protocol
	RefusedJob      = "job"      // it is of another job
	RefusedToken    = "token"    // it has another token
	RefusedHello    = "hello"    // it does not say who it is
	RefusedRank     = "rank"     // it says that it has a rank which it cannot have, or looks for another
	RefusedStale    = "stale"    // it is an incarnation that another has replaced
	RefusedOther    = "other"    // another incarnation of its rank is connected: it may be too early
	RefusedBusy     = "busy"     // there are too many at once
	RefusedUnknown  = "unknown"  // nothing here waits for the lane: the mesh was given up, or has another epoch
	RefusedMismatch = "mismatch" // the two do not agree on members, order or sizes
	RefusedFailed   = "failed"   // memory or sockets could not be had
	RefusedClosed   = "closed"   // the node, mesh or pair was closed
)

// RefusedError says that a peer does not take this process, its mesh or its lane, or the other way round. Code is one of
// those above.
type RefusedError struct {
	Code   string `json:"code"`
	Text   string `json:"text"`
	Blames []int  `json:"blames,omitempty"` // ranks to which the peer could make no lane, or its own
	By     string `json:"-"`                // who: "rank 3", or an address
}

// Error implements error.
func (e *RefusedError) Error() string { return fmt.Sprintf("link: refused by %s: %s", e.By, e.Text) }

// lasting reports whether trying again would not help.
func (e *RefusedError) lasting() bool { return e.Code != RefusedOther && e.Code != RefusedBusy }

// DownError says that a process is not connected any more, and why.
type DownError struct {
	Rank        int
	Incarnation uint64
	Err         error
}

// Error implements error.
func (e *DownError) Error() string {
	return fmt.Sprintf("link: rank %d (incarnation %016x) is down: %v", e.Rank, e.Incarnation, e.Err)
}

// Unwrap gives the reason.
func (e *DownError) Unwrap() error { return e.Err }

// LaneError says that one lane has failed. Its process may be well.
type LaneError struct {
	Rank      int
	Transport string
	Err       error
}

// Error implements error.
func (e *LaneError) Error() string {
	return fmt.Sprintf("link: the lane to rank %d over %s: %v", e.Rank, e.Transport, e.Err)
}

// Unwrap gives the reason.
func (e *LaneError) Unwrap() error { return e.Err }

// Missing is a member that a mesh waits for.
type Missing struct {
	Member
	For string // what is missing of it
}

// MissingError says which members a mesh was waiting for when its time was over.
type MissingError struct {
	Group   string
	Epoch   uint64
	Missing []Missing
	Err     error
}

// Error implements error.
func (e *MissingError) Error() string {
	var b strings.Builder
	for i, m := range e.Missing {
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "rank %d (incarnation %016x): %s", m.Rank, m.Incarnation, m.For)
	}
	return fmt.Sprintf("link: the mesh of group %q, epoch %d, lacks %s: %v", e.Group, e.Epoch, b.String(), e.Err)
}

// Unwrap gives the reason, which is that of a context most often.
func (e *MissingError) Unwrap() error { return e.Err }
