// Package raft is a replicated log on Pebble: one member of a cluster that
// agrees on a sequence of commands and keeps what it agreed on through kill -9,
// power loss and rotting disks. The algorithm is go.etcd.io/raft/v3; this
// package is everything that library leaves to its user: storage, transport,
// snapshots, membership, reads, and the loop that ties them together. It does
// not know what a command means.
//
// # Pieces
//
//   - [Store]: one Pebble database. It holds the log, the hard state, the
//     configuration and, under a key prefix of its own, the records of the
//     state machine ([StateStore]).
//   - [Core]: one member without goroutines, clocks or sockets. A simulator
//     drives it directly.
//   - [Node]: a Core with a loop goroutine, an apply goroutine, a ticker and a
//     transport. A server uses this.
//   - [Machine]: what the user implements.
//
// # What is durable, and when
//
// Entries and hard state go to Pebble in one batch, synced before any message
// that promises them is sent. Every entry carries a CRC32C and a hash chained
// to the entry before it; both are verified when the store is opened and
// whenever an entry is read back. Outside Pebble's write-ahead log lies a small
// witness file. It is synced before a new term or vote takes effect, and at
// most one tick (and, under load, [witnessInterval]) after entries are durable.
// A log that ends before what its witness saw has lost acknowledged data: the
// member refuses to start, because voting with a shorter log can undo what the
// cluster acknowledged.
//
// The state machine's records are written without a sync, in one batch with the
// applied index, so they are always a prefix of history; entries after that
// index are replayed at start. The log is truncated only up to an index that
// such a batch has covered, and later in the same write-ahead log.
//
// # Reads
//
// [Node.ReadIndex] gives any member an index to wait for. [Node.Confirm] gives
// the leader a deadline on CLOCK_BOOTTIME until which no other leader can have
// been elected; the caller reads its state, and answers only if the deadline has
// still not passed. A process that is stopped between any two of these steps
// fails the last one. Raft's own tick-based lease is not used: a paused process
// breaks it.
//
// # Faults
//
// A storage error stops the member; an fsync is never repeated. Malformed input
// from the network closes the connection it came from, and nothing else.
package raft
