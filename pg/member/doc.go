// Package member lets processes agree on who takes part in a group, and from which operation on: on views.
//
// What they agree through is a small replicated store with compare-and-set, leases and one watch (see [larder/pg/store]), so no
// process is special. A [Registry] announces this process and tells of the others; a [Group] keeps one group's views. The data
// plane is reached through [Hooks] alone, and tells what it sees with Suspect and Linked.
//
// # Records
//
// A group has three kinds of records. The spec says which process has which slot, and changes only when the group is extended.
// The view record holds the view that is committed and at most one that is proposed; it changes by compare-and-set alone, so
// there is one view per epoch, and a proposal that another one replaces can never be committed. Each member has a row, which
// only it writes and which its lease ends: its state, which peers it is connected to, which suspicions it has heard of, and how
// far it is with the proposal. What is to be done next is a function of these records and the time since they became as they are,
// so whoever acts, dies and leaves it to the next one does no harm.
//
// # Views
//
// A view goes through three phases. Connect: its members build their channels while the view before works on. Hold: they, and
// those whom it leaves out, begin no further operations, and say how many they have begun. Commit: the first operation of the new
// view is the one after the last that anybody has begun. A view that answers a failure begins with hold, since there is nothing
// left to keep working. Whoever proposed a view leads it through; where it does not, the members take over in the order of their
// ranks, with a new proposal of a higher epoch.
//
// # Failures
//
// A member has failed when its row is gone or says that it is out, or when it and another one do not both say that they are
// connected. The latter waits until every member has said what it thinks of each suspect, or for [ReportWindow]: then those stay
// who are connected to each other, the least connected being left out one by one.
package member
