// Package transfer moves bytes between processes: it reads from and writes to memory that another process has
// registered. It knows addresses, buffers and rails; it does not know keys.
//
// # Segments, buffers, batches
//
// An [Engine] is one process's end. Memory that others may reach is registered as a [Buffer]; all of them together are
// the process's segment, which a [Descriptor] describes to others. A [Segment] is another process's, as this one knows
// it. A [Batch] is an array of [Request], each a READ (from there to here) or a WRITE. [Engine.Submit] returns at once;
// the outcome is known request by request. Requests that are longer than the slice size are cut into slices, which
// are independent: they take different ways, in any order.
//
// # What has ended does not land
//
// A buffer has a random generation, which every request names: one that names another fails with [ErrStale] and has
// changed nothing. [Buffer.Retire] returns when nothing can land in the buffer any more; NICs have let go of its memory
// then. A slice is tried again, and a request ends, only when no earlier attempt can still land:
//
//	transport  why an attempt that was given up lands no more
//	local      the copy has ended: it is made here
//	rdma       a READ lands here: its work request has completed, be it flushed, or its NIC was reset. A WRITE lands there: the
//	           peer has confirmed that its queue pairs of the link are in ERR or destroyed, or is not that process any more
//	tcp        a READ lands here: whoever reads the connection has let go of it. A WRITE lands there: the peer has
//	           confirmed that the connection is closed and nobody reads it, or is not the process any more that it was
//	storage    a READ lands here, as over tcp. A WRITE of a connection has ended there before its end is confirmed
//
// To other hosts the kernel sends long bodies over TCP from the memory that they lie in, where it can ([Config.ZeroCopy]). An
// answer to a READ then holds its buffer until the kernel has let go of that memory, and [Buffer.Retire] waits for it: a connection
// that does not get rid of its answers is reset first. A WRITE ends as above, and no earlier than the peer's TCP has all of it.
// What is neither confirmed nor let go of within [Config.AbortTimeout] of the reset ends as unsettled, later by that time.
//
// A peer that is stuck cannot confirm anything. A request that waits for it ends after [Config.AbortTimeout] with
// [ErrUnsettled]: bytes of a WRITE may still land in the range that it named, until [Batch.Settled] is closed.
//
// Memory that is a truncated file's is no crash: what needs it fails with [ErrMemory], wherever it lies, and the connection
// goes on.
//
// # Storage
//
// A buffer may lie on [Storage] instead of memory: an SSD's store, a file. Its owner reads what is asked for into staging
// memory, which is aligned, pooled and bounded by [Config.StagingBytes], and sends that; a WRITE is received there, checked
// if it has a checksum, and confirmed when the storage has taken it. Handles of such buffers say what they are, and take
// lanes of their own: within the process, or over TCP by connections of their own, of which each has up to 32 requests under
// way beside each other, answered in order. A [File] is read and written through an io_uring where the kernel has one for this
// process, and by threads that wait otherwise. Memory never waits for a disk. A storage that fails fails the request, with
// [ErrStorage] or [ErrMissing]; one that hangs costs those that asked it their time, and [Buffer.Retire] waits for it.
//
// # Rails
//
// A rail is one way to a peer: an address here, an address there, and the connections between them; over RDMA a NIC here, a
// NIC there, and the endpoint that an [EndpointStore] has for them. Connections take slices from one queue when they have
// room, so that each rail carries what it can; one that is slower than the rest leaves the last slices to them. A rail that
// fails pauses, longer each time, and is tried again.
//
// A READ that waits much longer on a rail than others take, while nothing is queued, is asked for once more over another, into
// memory of the engine's own. If that comes first, what the first attempt still brings is thrown away as it arrives: it cannot
// land. A WRITE is not hedged: which of two attempts the peer takes last nobody can tell without waiting for both.
//
// A [Topology] tells which NICs are close to which memory: behind the same PCIe switch as a GPU, on the same NUMA node. It is
// read from sysfs, or given, and goes to peers in the descriptor. Where it makes a difference, slices take the rails that are
// close to the memory at both ends; another takes them only if those are paused, have failed with them, or are much slower,
// for which it carries one slice a second to be compared.
//
// # Transports
//
// Of the transports that lead to a peer's memory the first in the order of [Transports] is taken, unless another has been
// measured to take less than half of the time for slices of that size, with what is under way beside them taken into account.
// One that carries nothing is measured by a READ of the engine's own, every few seconds while others carry something. A slice
// that finds no way by one transport takes the next.
//
// # Discovery
//
// A peer is opened by an address, which asks it for its descriptor, by a descriptor, or by a name: engines with a [Directory]
// publish themselves there, whenever their buffers change and from time to time.
//
// # Notifications
//
// [Segment.Notify] tells the other engine something, at most once and in order. One that is sent after a batch is done comes
// after the batch's bytes. Nobody waits for a receiver: what it has no room for is refused.
package transfer
