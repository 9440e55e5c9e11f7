// Package shm is the memory that processes of one host share to exchange data without the kernel: a [Bell] to sleep on, a
// ring ([Producer], [Consumer]) for a byte stream between two of them, and a [Room] in which each publishes to all others.
//
// # Words with one writer
//
// All of it is anonymous files (memfd) that one process makes and others map. Every shared word but a bell's is written by one
// process only, and data is ordered by the atomic store of the counter that makes it visible and the load that finds it. So
// there are no locks: a process that dies at any moment leaves nothing half done, and what it has published stays readable as
// long as somebody has it mapped. Who waits looks at data first and at deaths second.
//
// # Peers that are not to be trusted with a crash
//
// Files are sealed against shrinking, so that no access of theirs can fault, and files that come from others must be. A counter
// or a length in a peer's memory is checked each time it is read; one's own place is kept in one's own memory. A peer that
// writes nonsense costs an error, [ErrCorrupt], in the one ring or log that it has written to.
//
// # Nothing blocks
//
// Rings and rooms never wait. Who needs data or room polls, in [Bell.Wait], which spins a little and then sleeps: each process
// has one bell, which others ring when they have made something visible to it. As long as nobody sleeps on it that costs them
// one load.
//
// The package needs Linux; elsewhere everything that makes or opens memory fails with [errors.ErrUnsupported].
package shm
