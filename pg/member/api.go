package member

import (
	"context"
	"log/slog"
	"time"

	"larder/pg/store"
)

// Hooks is the data plane of one group. Hold, Commit and Abandon are called by one goroutine, in the order of events, and must
// not wait for anything; Connect is called by another one. None of them is called after Group.Close has returned.
type Hooks interface {
	// Connect builds the channels of a proposed view that this process is a member of, while the view before works on. It is told
	// by ctx when the proposal has been given up. Members' addresses are those of Registry.Find. What it returns is given to
	// Config.Table of whoever commits the view. An error that is a [*ConnectError] says whose fault it was.
	Connect(ctx context.Context, v View) (report []byte, err error)
	// Hold stops the beginning of operations until the Commit or Abandon of this epoch, and returns the number after that of the
	// last operation of the group that this process has completed successfully, whatever became of those before it, and after
	// that of the last one it has begun. If View.Retry is set, those in progress must not complete either until then, for
	// they may be run again. Only members of the view in force are asked, also those whom the proposed one leaves out.
	Hold(v View) (done, entered uint64)
	// Commit is called for each view that is committed, or for the latest one of several, whether this process is in it or not.
	// Operations from View.StartSeq on run in it, if this process is a member. Those before belong to the views before: they go
	// on there, and fail where a member of those is gone.
	Commit(v View)
	// Abandon ends a proposal that this process was told of by Connect or Hold, and which did not come to pass. What was held
	// begins again, in the view that was committed last. It may come after a later view's Connect, but before its Hold.
	Abandon(epoch uint64)
}

// Process is a process of the job, as it has announced itself.
type Process struct {
	Rank        int // global
	Incarnation uint64
	Address     []byte // of its data plane: what its Node says
	Host        string
}

// RegistryConfig says who this process is.
type RegistryConfig struct {
	Store  store.Store
	Prefix string // of all keys, without a slash at its end: "pg/job7"
	Self   Process
	Lease  time.Duration // of the store: as it was opened with; 3 s
	Logger *slog.Logger

	// Appeared is told of each other process that announces itself, and Gone of each whose lease has ended or that another
	// incarnation has replaced. Lost is told that this process's own lease has ended: its groups have stopped, and Announce may be
	// called again. They are called by one goroutine and must not wait for anything. All may be nil.
	Appeared, Gone func(Process)
	Lost           func(error)
}

// Config says what a group is. All its processes give the same, apart from Extension and what is not of data.
type Config struct {
	ID    string
	Ranks []int // global rank of each slot; this process's is among them
	Cap   int   // slots; 0 stands for len(Ranks)
	// Extension says that this process is not one of the founders: it waits outside until it is activated. It may name fewer or more
	// slots than the group has: those that are new are added to it.
	Extension bool
	// AutoDeactivate has those who have failed leave the active set. Without it they stay there, absent, until Deactivate.
	AutoDeactivate bool
	// AutoSync has failures change the view at once; without it, when somebody calls Sync.
	AutoSync bool
	// Retry has operations that no member has completed when the view changed for a failure be run again in the new one.
	Retry bool

	Hooks Hooks
	// Isolated is told with an error when operations must stop, since others may count on this process's death: ErrIsolated, or
	// ErrLeaseLost if they do. It is told with nil when that is over: after ErrIsolated this process is still a member of the view, and
	// a new one with all members follows; after ErrLeaseLost it is outside of it. It is called as Hooks.Commit is. May be nil.
	Isolated func(error)
	// Table makes what View.Table of a view's members is from what their Connects have reported, by index. May be nil.
	Table func(v View, reports [][]byte) []byte
}

// Status says what became of a call.
type Status string

// What becomes of calls.
const (
	Applied            Status = "applied"
	AppliedWithDropped Status = "applied with dropped ranks"
	Rejected           Status = "rejected"
	Reconciled         Status = "reconciled" // of Sync: a failure was dealt with
	NoPending          Status = "no pending" // of Sync: there was none
)

// Response is what became of Activate, Deactivate or Sync.
type Response struct {
	Status  Status
	Epoch   uint64 // of the view that it is so in
	Dropped []int  // AppliedWithDropped: those who failed while they were to be activated
	Reason  string // Rejected: what is in the way
}
