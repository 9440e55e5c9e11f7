// Package uring reads and writes files through an io_uring, so that many requests are under way at once without a thread for
// each: a thread that waits in a read costs its process a hand-over of the processor, twice, and those who come at the same
// time share one system call, and the disk's queue one notification.
//
// It is a way to do [os.File.ReadAt] and [os.File.WriteAt], and has no other effect: what the ring cannot do, or reports to
// have failed, is done by these. Where the kernel has no io_uring, or a process may not use it, as in many containers, that is
// everything: a nil [Ring] works.
//
// A call returns when the kernel has completed its request, however that ends: nothing of it happens any more.
package uring
