package pg

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

var (
	// ErrClosed says that the group, or its world, was closed.
	ErrClosed = errors.New("pg: the group was closed: make another one")
	// ErrInactive says that this rank is not active in the group: others have gone on without it.
	ErrInactive = errors.New("pg: this rank is not active in the group: Join, and have an active rank Activate it")
	// ErrJoining says that the group takes no calls while [Group.Join] is waiting.
	ErrJoining = errors.New("pg: the group is joining: wait for Join to return")
	// ErrIsolated says that the store does not confirm this process any more: others may have gone on without it.
	ErrIsolated = errors.New("pg: cut off from the store, and so from the group")
	// ErrConfig says that a call or a configuration cannot be right. What follows says why.
	ErrConfig = errors.New("pg: wrong use")
)

// Reasons of a PeerError that are this package's own.
var (
	errRootGone = errors.New("the root is not active")
	errMovedOn  = errors.New("the others have gone on without this collective")
)

// PeerError says that ranks were lost while a collective ran, or before it could. What its memory holds is undefined. The group
// goes on without them, unless [GroupConfig.AutoDeactivate] is off.
type PeerError struct {
	Group string
	Call  string
	Seq   uint64 // of the collective, from 0
	Ranks []int
	Err   error // what told of it
}

// Error implements error.
func (e *PeerError) Error() string {
	return fmt.Sprintf("pg: %s, number %d of group %s, failed: lost %s: %v", e.Call, e.Seq, e.Group, rankList(e.Ranks), e.Err)
}

// Unwrap gives what told of it.
func (e *PeerError) Unwrap() error { return e.Err }

// MismatchError says that another rank has called something else where this one has called this. Neither is carried out; the
// group goes on with what is called next.
type MismatchError struct {
	Group        string
	Rank         int // -1: another one has noticed, and told this one
	Seq          uint64
	Mine, Theirs string
}

// Error implements error.
func (e *MismatchError) Error() string {
	at := "another rank"
	if e.Rank >= 0 {
		at = fmt.Sprintf("rank %d", e.Rank)
	}
	return fmt.Sprintf("pg: in group %s this rank has called %s, and %s %s: all ranks must call the same ones in the same order",
		e.Group, e.Mine, at, e.Theirs)
}

// TimeoutError says that ranks which are alive have not come to a collective in time. It is given up at this rank.
type TimeoutError struct {
	Group string
	Call  string
	Seq   uint64
	Late  []int // empty: it has been waiting for a view, or for messages
	After time.Duration
}

// Error implements error.
func (e *TimeoutError) Error() string {
	why := "nothing has moved"
	if len(e.Late) > 0 {
		why = fmt.Sprintf("waiting for %s, alive but not there yet", rankList(e.Late))
	}
	return fmt.Sprintf("pg: %s, number %d of group %s, was given up after %v: %s", e.Call, e.Seq, e.Group, e.After, why)
}

// rankList is "rank 3", or "ranks 3, 5".
func rankList(ranks []int) string {
	s := make([]string, len(ranks))
	for i, r := range ranks {
		s[i] = strconv.Itoa(r)
	}
	if len(s) == 1 {
		return "rank " + s[0]
	}
	return "ranks " + strings.Join(s, ", ")
}

// wrong makes an ErrConfig.
func wrong(format string, a ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrConfig}, a...)...)
}
