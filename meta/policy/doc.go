// Package policy decides which entries of a full pool are missed least.
//
// The state machine divides its entries into partitions (one owner instance,
// one page size, one class of entry) and gives each a Policy. The leader reads
// Policy.Victims, skips what is leased, pinned or condemned, and logs the exact
// entries that it took; every replica then calls Policy.Evict for them in that
// order. So a policy has to be deterministic, and planning must change nothing.
// This package imports no clock, no random numbers and no locks; the seed of
// its hash table changes no outcome.
//
// # Shipped policies
//
//   - lru: least recently used (the default)
//   - lfu: least frequently used, ties by recency; counters never age
//   - fifo: first registered
//   - sieve: SIEVE (NSDI 2024)
//   - s3fifo: S3-FIFO (SOSP 2023), with ghosts
//   - ttl: what expires next
//   - length-aware: lfu with ties toward the block latest in its request
//   - prefix-lru: lru that never takes a block before those that continue it
//   - larder: what is least likely to be used soon, learned from the uses of
//     entries alike
//   - none: no bookkeeping, a baseline for benchmarks
//
// # Where state lives
//
// A policy keeps nothing per entry. What it remembers of an entry is its Order,
// in the machine's table, persisted and part of the state hash. Links of lists
// lie in the table too, but are not persisted: after a restart entries come
// back through Policy.Restore by ascending Order.Stamp, and since lists are
// ordered by stamp, pushing each at the hot end rebuilds them exactly. To move
// an entry is therefore to give it a new stamp: Table.NextStamp for a hot end,
// Table.ColdStamp for a cold end. What cannot be derived from orders (a hand,
// ghosts) goes into state pages.
//
// # Adding a policy
//
// Embed Base, which is a complete first-in-first-out policy of one queue, or
// Stateless for several queues of your own, and override what differs; see the
// example. Then call Register from your main, before the server starts, on
// every member of the cluster, and choose the name with --eviction-policy.
// policytest.Check tests what every policy must keep, and policytest.Cache
// measures hit ratios on a trace.
package policy
