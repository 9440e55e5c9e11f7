// Package meta is Larder's replicated state machine: which key's bytes lie where, who owns which region, in what order
// entries were used, which prefixes exist, which sessions are open and what they were answered.
//
// A log entry is a group of commands, stamped by the leader with the log time. Apply takes a group and returns a
// result per command. Apply is deterministic: it knows no clock, no randomness, no goroutine, no network and no file,
// so replicas that applied the same index are in the same state, and StateHash says whether they are.
//
// What only the leader knows stays outside: leases, which entries were just used, which are about to be evicted, how
// long a session has been silent. The leader asks PlanAlloc, which is pure and takes that knowledge as a Guard, what to
// do with a REQUEST_ALLOC; the plan is a command that names exact victims; Apply only checks that they are still there.
// So no replica ever chooses.
//
// State lives in memory, in pointer-free slabs, and in a Store. Flush writes what has changed since the last one,
// together with the applied index, as one batch; Open reads it all back, and the log from that index on brings the
// machine up to date. Policy order is part of it, so that a restart does not forget what was cold.
//
// A Machine is not safe for concurrent use. Its read methods may run beside each other, not beside Apply or Flush.
package meta
