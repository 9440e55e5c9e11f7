// Package client is the Go client of a Larder pool: it keeps values, such as blocks of KV cache, in memory that many
// processes and hosts share.
//
// A Client holds a session with the pool's leader and follows it when it changes. It asks the leader for regions of
// memory, maps them, divides them into pages, copies values into free pages and registers them under their keys;
// bytes never pass through a master. When it has no free page it asks the leader for more memory, or to evict.
//
//	Put, PutBatch          store copies of values
//	Alloc, Store           fill memory of the pool in place, then register it
//	Get, GetBatch          copies of values
//	View, ViewBatch        values in place; what was read counts only if Close returns nil
//	Exists, PrefixMatch    whether something is held, without reading it
//	Delete, Pin, Clear     what becomes of entries
//
// # What it guarantees
//
// A Put that returned nil is found by every later Get, through crashes of masters, until it is deleted, evicted, or
// the device that holds the bytes loses them. A Get returns the bytes that were stored or none: copies are made under
// a lease, whose end is measured on CLOCK_BOOTTIME from when the request was sent; the device's generation is compared
// before and after; a copy that took too long is thrown away and repeated; with Config.Checksums a value that does not
// match its checksum is a miss.
//
// A client writes only into memory that is its own. It gives a region up when the leader asks (REVOKE), moves the
// stores that were under way there to another region, and puts private memory in the place of what open Allocs point
// to. When the leader has not answered for the session's TTL it suspends stores until the session is confirmed. A page
// whose REGISTER was sent and not answered is neither reused nor freed until its fate is known.
//
// # Errors
//
// Calls repeat themselves through everything that passes: lost connections, new leaders, full queues, expired
// sessions. What is left is an [*Error], which says what to do; compare it with ErrNotFound and the like.
package client
