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
//	PutLayers, GetLayers   values layer by layer, while the others are being computed or used
//	Send, Receive          the same from one instance to another, past the pool; SendTo finds it by name
//	Exists, PrefixMatch    whether something is held, without reading it
//	Delete, Pin, Clear     what becomes of entries
//	PutName, WatchNames    small values that processes tell each other of themselves; KeepName, NewDirectory
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
// # Tiers and nodes
//
// What this process cannot map, because another host has it or because it is a disk, it reads and writes by transfer: see
// package transfer, and Config.Transfer. Reads of a call go out as one batch, under leases that are renewed until the bytes are
// here. The owner of such a region asks for its handle once; a page to which a transfer may still write is neither used nor
// given up. A View of such an entry is a copy. Transfers end with the context of the call that they are for.
//
// An entry may lie at several places. Readers take the one that costs the least, memory before a neighbour's memory before
// another host's before a disk, those that have failed lately last, any of those that are as fast, and go on at the next under
// the same lease. Writers may have replicas on other nodes or in another tier: Config.Replicas, Config.WriteThrough. What is
// read from a disk and wanted faster is copied in the background into pages that are free; what nodes copy for the pool, CopyIn
// copies.
//
// # From prefill to decode
//
// The decode instance makes memory ready with Receive, and passes the Ticket on to the prefill instance, as the serving
// engines pass everything else on: it names the memory, and is as good as a key to it. Or it lets the masters do that, by
// Publish: SendTo then needs but the instance's name and the key, and waits for the ticket. The sender writes each layer there as
// it is computed, and then tells the receiver by a notification of the transfer engines: it comes after the bytes, and wakes
// who waits, where a word in memory would have to be watched. The decode begins when the last layer is there. The value lies in
// the receiver's own memory, not in a region, since a region can be taken away at any time; Store copies it into the pool and
// registers it, once. Either end may give up: the sender tells the receiver, and a closed receiver lets nothing land any more.
//
// # Names
//
// Masters keep small values under names, for what processes tell each other: who there is and where, who leads, which view of a
// group holds. Every change has a revision; PutName with IfRevision or IfAbsent is a compare-and-set. A Leased name ends with the
// session of who has set it, and so says that somebody is there, as of the last Config.TTL. WatchNames tells of changes. KeepName
// puts a leased name again when the session was lost; Directory so publishes the segments of transfer engines.
//
// # Errors
//
// Calls repeat themselves through everything that passes: lost connections, new leaders, full queues, expired
// sessions. What is left is an [*Error], which says what to do; compare it with ErrNotFound and the like.
package client
