package member

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

var (
	// ErrClosed says that the group or the registry was closed here.
	ErrClosed = errors.New("member: closed")
	// ErrIsolated says that the store has not confirmed this process's lease for longer than that lasts, so that others may count
	// on its death: operations must stop. See Config.Isolated.
	ErrIsolated = errors.New("member: the store has not confirmed this process for longer than its lease")
	// ErrLeaseLost says that others have counted on this process's death: its rows in the store are gone. It is outside of all
	// views, and may announce itself and join again.
	ErrLeaseLost = errors.New("member: this process's lease has ended: others go on without it, until it joins again")
	// ErrActive says that a process that is in the view asked to join it.
	ErrActive = errors.New("member: join: this process is in the view already; only one that is outside may join")
	// ErrReplaced says that the group was made anew while this process was taken for dead: close it, and attach to the new one.
	ErrReplaced = errors.New("member: the group was made anew without this process: close it, and attach again")
	// ErrPolicy says that a combination of options makes no sense.
	ErrPolicy = errors.New("member: AutoSync requires AutoDeactivate: without the latter no failure changes the active set," +
		" so there is nothing to synchronise; set both, or AutoSync to false")
)

// ConfigError says which option of a registry or a group cannot be so, and what it may be.
type ConfigError struct{ Field, Problem string }

func (e *ConfigError) Error() string { return "member: " + e.Field + ": " + e.Problem }

// SpecError says that this process describes a group otherwise than those did who made it.
type SpecError struct {
	Group       string
	Differences []string // "cap: 8 here, 4 in the group"
}

func (e *SpecError) Error() string {
	return fmt.Sprintf("member: group %q exists with another description: %s; all its processes must give the same one",
		e.Group, strings.Join(e.Differences, "; "))
}

// RankError says that a call named a rank that the group does not have, or not as the call needs it.
type RankError struct {
	Rank    int
	Problem string
}

func (e *RankError) Error() string { return fmt.Sprintf("member: rank %d %s", e.Rank, e.Problem) }

// TakenError says that another process has announced itself under the same rank, and is still alive.
type TakenError struct {
	What   string // "rank 3 of the job", "slot 3 of group x"
	Other  string // who has it, as far as that is known
	Waited time.Duration
	Err    error // the context's
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("member: %s is taken by %s, which is alive after %v: end that process first, or give this one another rank (%v)",
		e.What, e.Other, e.Waited.Round(time.Millisecond), e.Err)
}

func (e *TakenError) Unwrap() error { return e.Err }

// StartError says why a group has not started.
type StartError struct {
	Group   string
	Missing []int    // ranks that have not announced themselves
	Apart   []string // pairs that are announced, but not connected: "0-2"
	Detail  string   // what else is in the way
	Err     error    // the context's
}

func (e *StartError) Error() string {
	parts := []string{}
	if len(e.Missing) > 0 {
		parts = append(parts, "not there: ranks "+rankList(e.Missing))
	}
	if len(e.Apart) > 0 {
		parts = append(parts, "not connected: "+strings.Join(e.Apart, ", "))
	}
	if e.Detail != "" {
		parts = append(parts, e.Detail)
	}
	if len(parts) == 0 {
		parts = append(parts, "the view is still being agreed on")
	}
	return fmt.Sprintf("member: group %q has not started: %s: %v", e.Group, strings.Join(parts, "; "), e.Err)
}

func (e *StartError) Unwrap() error { return e.Err }

// ConnectError is what Hooks.Connect returns when it is the connections to some members that failed.
type ConnectError struct {
	Ranks []int // in the group
	Err   error
}

func (e *ConnectError) Error() string {
	return fmt.Sprintf("member: no channels to ranks %s: %v", rankList(e.Ranks), e.Err)
}

func (e *ConnectError) Unwrap() error { return e.Err }
