// Package verbs moves bytes by RDMA: a thin, safe layer over libibverbs. It is built with the tag rdma and cgo, and needs
// the headers of libibverbs-dev; without them [OpenNICs] alone is there, and says so. It is mechanism only: it connects what
// it is told to connect, reports what failed, and tries nothing again. A [NIC] is one for a transfer engine, which does.
//
// # Objects
//
// A [Context] is an open device. A [Domain] holds what may be used together: memory regions ([Region]), memory windows
// ([Window]) and reliable connected queue pairs ([QueuePair]). A [CompletionQueue] tells what has become of work requests. An
// object is closed before what it was made from, or closing that fails with [ErrInUse]; use after Close fails with
// [ErrClosed], and never reaches the device.
//
// # Memory
//
// The device reads and writes memory on its own, while the program runs. So the bytes must stay where they are, and stay
// allocated, until the region is closed. Two kinds of memory do:
//
//   - memory from mmap, whose pages stay until munmap: whoever maps it must not unmap it before [Region.Close];
//   - a slice of Go's heap, which [Domain.Register] pins with a [runtime.Pinner] until [Region.Close]. It must not hold Go
//     pointers.
//
// Memory of a goroutine's stack is never registered: what escapes to Register is on the heap. Processes that Go starts are
// no hazard: it starts them with CLONE_VM, so that no page is copied on write.
//
// # What has ended, and what may still land
//
// Completions of one queue pair come in the order in which its work was posted, and one without a completion of its own has
// ended when a later one has. After [QueuePair.Fail] all outstanding work is flushed; the completion of [List.AddMarker],
// posted after that, says that there is none left, and that nothing of this queue pair reads or writes memory HERE any more.
//
// It says nothing of the memory THERE: packets of a WRITE may be on their way, or in the other device. What bars them is the
// other end's alone: its queue pair is in the state ERR or is closed, or its region is closed, or its window invalidated.
package verbs
