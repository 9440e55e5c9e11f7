package raft

import (
	"errors"
	"fmt"
)

// Errors that callers compare with errors.Is.
var (
	// ErrBusy means that too many bytes wait to be committed. Retry after some
	// of them have been: nothing was appended.
	ErrBusy = errors.New("raft: too much is waiting to be committed; retry later")

	// ErrDiskFull means that free space has fallen below the store's minimum.
	// Nothing was appended. Free space or enlarge the disk; the member goes on
	// by itself afterwards.
	ErrDiskFull = errors.New("raft: free disk space is below the minimum; free some space, the member goes on by itself")

	// ErrStopped means that the member was stopped.
	ErrStopped = errors.New("raft: the member is stopped")

	// ErrRemoved means that this member was removed from the cluster. Its id
	// cannot come back: wipe the data directory and join as a new member.
	ErrRemoved = errors.New("raft: this member was removed from the cluster; " +
		"wipe its data directory and join with a new id")

	// ErrConfChangePending means that another membership change has not been
	// applied yet. Retry when it has.
	ErrConfChangePending = errors.New("raft: another membership change is in progress; retry when it has finished")

	// ErrNotCaughtUp means that a learner is too far behind to be promoted.
	ErrNotCaughtUp = errors.New("raft: the learner has not caught up with the leader; wait and retry")

	// ErrUnknownMember means that no member has the given id.
	ErrUnknownMember = errors.New("raft: no member has this id; see the status for the ids")

	// ErrIDReused means that the id belongs, or once belonged, to a member.
	ErrIDReused = errors.New("raft: the id was used before; ids are for life, choose a new one")

	// ErrQuorumLoss means that the change would leave too few live voters.
	ErrQuorumLoss = errors.New("raft: the change would leave the cluster without a live quorum; " +
		"bring other members back first")

	// ErrTransferring means that leadership is being handed over. Retry; the
	// answer will name the new leader.
	ErrTransferring = errors.New("raft: leadership is being transferred; retry")

	// ErrSnapshotInvalid means that a snapshot stream is malformed, truncated
	// or does not match its checksums. Nothing of it was used.
	ErrSnapshotInvalid = errors.New("raft: the snapshot stream is damaged or incomplete; take or fetch it again")

	// ErrNotInitialised means that the data directory belongs to no member yet.
	ErrNotInitialised = errors.New("raft: the data directory holds no member; bootstrap a cluster or join one first")

	// ErrInitialised means that the data directory already belongs to a member.
	ErrInitialised = errors.New("raft: the data directory already holds a member; use an empty one")

	// ErrDiskStalled means that a write to the log did not finish in time.
	ErrDiskStalled = errors.New("raft: a log write has not finished for too long; check the disk, then restart")
)

// NotLeaderError says that this member does not lead.
type NotLeaderError struct {
	// Leader is the id of the member believed to lead, 0 if none is known.
	Leader uint64
}

// Error implements error.
func (e *NotLeaderError) Error() string {
	if e.Leader == 0 {
		return "raft: this member is not the leader and knows of none; retry"
	}
	return fmt.Sprintf("raft: this member is not the leader; ask member %x", e.Leader)
}

// CorruptionError says that stored bytes are not what was written.
type CorruptionError struct {
	// What names the damaged record.
	What string
	// Index is the log index concerned, 0 if none.
	Index uint64
	// Cause is what was noticed, may be nil.
	Cause error
}

// Error implements error.
func (e *CorruptionError) Error() string {
	s := "raft: " + e.What + " is damaged"
	if e.Index != 0 {
		s += fmt.Sprintf(" at index %d", e.Index)
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s + "; in a cluster remove this member, wipe its data directory and join again with a new id; " +
		"alone, restore a snapshot into a fresh directory"
}

// Unwrap gives the cause.
func (e *CorruptionError) Unwrap() error { return e.Cause }

// LostDataError says that the disk no longer holds what this member once
// acknowledged: its log is shorter than its witness or than the leader knows it
// to be. Such a member must not vote.
type LostDataError struct {
	// Have and Want are the last log index found and the one acknowledged.
	Have, Want uint64
	// Detail says how it was noticed.
	Detail string
}

// Error implements error.
func (e *LostDataError) Error() string {
	return fmt.Sprintf("raft: the log ends at %d but %d was acknowledged (%s): the disk lost or rolled back data; "+
		"remove this member, wipe its data directory and join as a new member with a new id",
		e.Have, e.Want, e.Detail)
}

// ForeignStoreError says that a data directory belongs to another member or
// another cluster.
type ForeignStoreError struct {
	// WantCluster and WantID are configured; HaveCluster and HaveID stored.
	WantCluster, HaveCluster, WantID, HaveID uint64
}

// Error implements error.
func (e *ForeignStoreError) Error() string {
	return fmt.Sprintf("raft: the data directory belongs to member %x of cluster %x, not to member %x of cluster %x; "+
		"point to the right directory or fix the ids", e.HaveID, e.HaveCluster, e.WantID, e.WantCluster)
}
