// Package server is a Larder master: it serves clients and operators from a replicated index.
//
// Master is its heart and has no goroutines, sockets or timers: it decodes requests, answers reads from the index,
// queues changes, plans evictions, and keeps what only a leader knows, which is leases, the uses of entries since the
// last logged ones, what is about to be evicted, and when sessions were last heard of. All of that is lost with the
// leader, and safely so: see lease.go.
//
// Server puts a Master on a network and on a disk: listeners (listen.go), connections (conn.go), the replicated log
// (package raft), the pool's devices (devices.go), and the HTTP admin with its metrics (admin.go, metrics.go).
// A request travels conn.go -> read.go, or mutate.go -> propose.go -> raft -> Master.Apply -> reply.go.
package server
