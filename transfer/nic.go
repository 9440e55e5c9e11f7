package transfer

import (
	"context"
	"fmt"
)

// NIC is one port of an RDMA device, as libibverbs gives it: a device context with a protection domain and one completion
// queue. Its methods may be called concurrently.
type NIC interface {
	// Name is unique in this process and means something to an operator: "mlx5_0", or "mlx5_0/2" for a second port.
	Name() string
	// NUMANode is the node whose memory is closest to the NIC, -1 if that is not known.
	NUMANode() int
	// MaxMessage is how many bytes a work request moves at most.
	MaxMessage() int
	// CreateQP allocates a queue pair of the reliable connected (RC) kind in INIT. The error wraps syscall.ENOMEM if the
	// NIC has none left.
	CreateQP() (QueuePair, error)
	// Register makes memory known to the NIC, for work of this process and, as access says, of its peers. The memory must stay
	// mapped, or allocated, until it is deregistered; the NIC pins it.
	Register(mem []byte, access Access) (Region, error)
	// Poll takes completions, in the order of their queue pairs, and says how many. It does not wait.
	Poll(out []Completion) (int, error)
	// Wait is Poll that waits for a completion: it looks a few times, and then sleeps until one comes. It goes on across a
	// Reset, and ends with ctx. One goroutine at a time calls it.
	Wait(ctx context.Context, out []Completion) (int, error)
	// PortState asks the port. An error counts as [PortDown].
	PortState() (PortState, error)
	// Events gives what happens to the port, from now on. One that is lost is found out by PortState.
	Events() <-chan PortEvent
	// Reset closes the device context and opens it anew. When it returns nil, every queue pair is gone without Destroy,
	// none of their work can land, completions that nobody polled are lost, and so is all registered memory, without
	// Deregister.
	Reset(ctx context.Context) error
}

// QueuePair is one RC queue pair. Post and ToError are not called concurrently, nor is anything after Destroy has returned
// nil or the NIC was reset.
type QueuePair interface {
	// Address is what the peer needs to connect to this queue pair.
	Address() QPAddress
	// Connect takes a queue pair from INIT to RTS. It is local: the peer's end is told of it by [EndpointConfig.Exchange].
	Connect(remote QPAddress) error
	// Post hands over work requests, in order, and says how many were taken; the error is why the next one was not. Each
	// completes exactly once: it is signaled.
	Post(list []WorkRequest) (int, error)
	// ToError takes a queue pair to ERR, from any state, again if need be. What is outstanding completes soon with
	// [StatusFlushed], or as it had already ended.
	ToError() error
	// Destroy frees a queue pair, and is called only when every work request of it has completed and been polled. One that
	// fails is called again.
	Destroy() error
}

// QPAddress is where a queue pair is reached.
type QPAddress struct {
	GID [16]byte `json:"gid"`
	LID uint16   `json:"lid,omitempty"` // InfiniBand only
	QPN uint32   `json:"qpn"`           // 24 bits
	PSN uint32   `json:"psn"`           // the first packet's, 24 bits
	MTU uint16   `json:"mtu,omitempty"` // bytes of a packet, at most
	// Reads is how many READs it serves at once: more would break the connection.
	Reads uint8 `json:"reads,omitempty"`
}

// Access is what registered memory may be used for. This process's own WRITEs may always take from it.
type Access uint8

// The flags of access.
const (
	LocalWrite  Access = 1 << iota // this process's READs land in it
	RemoteRead                     // peers may read it
	RemoteWrite                    // peers may write it; LocalWrite is needed, too
)

// Region is memory that a NIC knows.
type Region interface {
	// RKey is the key by which peers reach it, at its address in this process.
	RKey() uint32
	// Deregister ends that. When it has returned nil no peer reads from it or writes to it any more, nor does work of this
	// process. One that fails is called again.
	Deregister() error
}

// Piece is a part of a region: local memory of a work request.
type Piece struct {
	Region         Region
	Offset, Length int
}

// MaxLocal is how many pieces a work request may have; all NICs that are known can do that.
const MaxLocal = 16

// WorkRequest is a one-sided operation.
type WorkRequest struct {
	ID     uint64 // comes back in its completion
	Op     Op
	Local  []Piece
	Remote uint64 // the address in the peer's process
	RKey   uint32
}

// Completion is the end of a work request.
type Completion struct {
	ID     uint64
	QPN    uint32
	Status CompletionStatus
	Vendor uint32 // the vendor's code for an error
}

// CompletionStatus has the values of ibv_wc_status.
type CompletionStatus uint8

// Those that mean something to this package. All but the first have the queue pair go to ERR.
const (
	StatusOK            CompletionStatus = 0
	StatusFlushed       CompletionStatus = 5  // IBV_WC_WR_FLUSH_ERR: the queue pair was in ERR
	StatusRemoteAccess  CompletionStatus = 10 // IBV_WC_REM_ACCESS_ERR: the peer has invalidated the rkey
	StatusRetryExceeded CompletionStatus = 12 // IBV_WC_RETRY_EXC_ERR: the peer does not answer
)

// String implements fmt.Stringer.
func (s CompletionStatus) String() string {
	switch s {
	case StatusOK:
		return "ok"
	case StatusFlushed:
		return "flushed"
	case StatusRemoteAccess:
		return "remote access error"
	case StatusRetryExceeded:
		return "retries exceeded"
	}
	return fmt.Sprintf("completion status %d", uint8(s))
}

// PortState is whether a port carries.
type PortState uint8

// The states of a port.
const (
	PortDown PortState = iota
	PortActive
)

// PortEvent is an asynchronous event of the device.
type PortEvent uint8

// The events.
const (
	EventPortDown PortEvent = iota // IBV_EVENT_PORT_ERR
	EventPortUp                    // IBV_EVENT_PORT_ACTIVE
	EventFatal                     // IBV_EVENT_DEVICE_FATAL: only a reset helps
)
