package node

import (
	"context"
	"log/slog"

	"larder/client"
	"larder/protocol"
	"larder/transfer"
)

// session is a device's session with the masters: what a node needs of a client. Its methods may be called concurrently;
// they repeat themselves through leader changes, and fail only for good, or when ctx is over.
type session interface {
	// pool names the pool, and its incarnation, as the last leader did.
	pool() (id [16]byte, incarnation uint64)
	attach(ctx context.Context, req *protocol.AttachRequest) (*protocol.AttachReply, error)
	// tasks asks for the first task there is to be done, of those with a higher id than after, and leases the first items
	// that are left of it.
	tasks(ctx context.Context, device, after, items uint64) (*protocol.TasksReply, error)
	// taskDone reports progress. wanted is false if the task was canceled.
	taskDone(ctx context.Context, req *protocol.TaskDoneRequest) (wanted bool, err error)
	// copyIn copies entries of a task to the device, which were leased by what was asked at a time. If it fails, it may have
	// copied some.
	copyIn(ctx context.Context, t *protocol.Task, items []protocol.TaskItem, askedAt int64, leaseMS uint64) (copied, error)
	// close ends the session, if its masters can be told of that before ctx is over. After it the home is called no more.
	close(ctx context.Context) error
}

// copied says what became of entries.
type copied struct {
	copied  uint64 // they have a copy now
	skipped uint64 // gone, changed, or there already
	failed  uint64 // could not be read or written
	bytes   uint64 // of those that were copied
}

// home is what a session calls. Its methods may be called concurrently.
type home interface {
	// connected says that a leader has taken the session, which has this number, and knows nothing of handles. It must not
	// block.
	connected(session uint64)
	// grant registers an extent for writing.
	grant(ctx context.Context, p *protocol.GrantPush) (protocol.Endpoint, error)
	// fence returns when nothing lands in a region any more, of an epoch or those before it.
	fence(ctx context.Context, p *protocol.FencePush) error
	// discard forgets what lies in stretches of regions of the session's own, which the masters know to be free, and which it
	// does not write to until it has returned. Nothing of it happens after that.
	discard(ctx context.Context, list []client.Unused) error
	// work says that there are tasks. It must not block.
	work()
}

// sessionConfig is what a session is opened with.
type sessionConfig struct {
	masters    []string
	instance   string
	engine     *transfer.Engine
	expose     bool // the device is the masters' own
	discards   bool // home.discard is wanted
	pageSize   uint64
	regionSize uint64
	logger     *slog.Logger
}

// opener opens a session. It waits until a leader has answered, or ctx is over.
type opener func(ctx context.Context, cfg *sessionConfig, h home) (session, error)
