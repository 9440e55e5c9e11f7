// Package pg has process groups: collectives between processes that keep going when some of them die.
//
// # Worlds, groups, ranks
//
// A [World] is one process's part in a job; its number there is its global rank. A [Group] is an ordered list of slots; a
// process's place in it is its rank, which is never given to another place. Groups have room for more ranks than they begin with
// (the capacity); a rank is active or it is not, and inactive ones are not waited for. A process that is started anew under the
// same global rank takes its old places.
//
// # Calls
//
// What is to be done is a [Call]: [AllReduce], [Broadcast], [Send] and so on make them. [Group.Do] carries one out in the
// caller's thread; [Group.Start] queues it, any number of them, and returns a [Work] to wait for. Collectives of a group run one
// after the other, in the order in which they were called, and all active ranks must call the same ones in the same order: one
// that differs in kind, dtype, operation, root or count fails at every rank that notices, with a [MismatchError] that says what
// the other one called. Sends and receives are matched by rank and tag, beside the collectives.
//
// Memory of a call must not be touched until it is done. The result may be the operand's memory (in place), or memory apart from it.
//
// # Views
//
// The active ranks from one moment on are a view; views are numbered by epochs, and agreed on through a [store.Store]: with the
// masters' no rank is special, and a minority that has lost them stops. Each view has channels of its own. The view also says
// from which collective on it holds (the start), so that every collective runs at all of its ranks in one view, or fails.
//
// When a rank dies, the others learn of it by the end of its connection, at once; when its host vanishes or it hangs, by the end of
// its lease, or because it does not answer when a collective makes no progress. Ranks that are only late are waited for, until
// [GroupConfig.Timeout]. The collective that was under way ends with a [PeerError] that names who failed; with [GroupConfig.Retry]
// it is run again by those that are left, with the operands that it was called with. On one host, a collective that one survivor
// completes, all complete.
//
// A process that joins connects to all beside what they are doing; they pause for two messages to the store and no more.
//
// # Waiting
//
// Operations are polled by whoever waits for them: nothing of a small one leaves the caller's thread. A thread that waits spins
// for a moment and then sleeps on a word of memory that its peers may ring. Nothing spins while there is nothing to do.
package pg
