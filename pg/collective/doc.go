// Package collective has the algorithms of process groups: all-reduce, broadcast, all-gather and so on among the members of a
// mesh, which are counted from 0 without gaps.
//
// # Operations are polled
//
// [Comm.Start] makes an [Op] of [Args]; each Poll moves all that can be moved and returns. Nothing runs between polls, nothing
// blocks, no goroutine is started, and small operations allocate nothing: what an operation needs lies in the Comm, which
// has one operation at a time. How long to wait, and where, is the caller's business.
//
// # Flows
//
// There is one state machine, the flow. Members send numbered blocks on two tracks: inputs, and results. Of each block of inputs
// a member either reduces everybody's piece at once, in the order of the members, or copies what each has sent to where it
// belongs; what it has reduced it may send on as a block of results. Kinds differ in who sends what to whom:
//
//	kind                    inputs                         results
//	all-reduce, small       all of it, to all; reduced     -
//	all-reduce, large       to each its segment; reduced   the own segment, to all
//	reduce, small           all of it, to the root         -
//	reduce, large           to each its segment; reduced   the own segment, to the root
//	reduce-scatter          to each its part; reduced      -
//	broadcast, small        all of it, from the root       -
//	broadcast, large        the root: to each its segment  the own segment, to all but the root
//	all-gather, gather      all of it, to all or the root  -
//	all-to-all, scatter     to each its part               -
//	barrier                 nothing, to all                -
//
// Blocks are as large as a channel's chunk, and as many are under way as channels hold, so that sending, reducing and receiving
// of different blocks overlap, between members too. Results of a reduction are the same to the bit everywhere: one member makes
// them, or all do from the same operands in the same order; float16 and bfloat16 are rounded once.
//
// # Channels
//
// Flows run over a fabric. In the room of one host a block is written once and read by all; operands are reduced where
// they lie, in the peers' slots. Over lanes, to other hosts, each receiver is sent its own, as a message with a header in a ring;
// operands are reduced out of the ring. A message is written when there is room for all of it, so that rings hold whole ones.
//
// Channels are bounded, and nobody waits for itself by that. Results are taken as soon as they come first. Let b be the least block
// of inputs that somebody has not taken: who has not sent it yet finds room, since what fills its channels is results, or older
// inputs that all have taken; and once all have sent it, it comes first everywhere. So it is taken, and so is every other.
//
// Among many members, small all-reduces, broadcasts, reductions and barriers over lanes are made by trees: recursive doubling (with
// members beyond a power of two folded in), binomial trees and dissemination (Thakur, Rabenseifner and Gropp, "Optimization of
// collective communication operations in MPICH", 2005; Hensgen, Finkel and Manber, 1988). Large ones are always exchanged
// directly: that takes as many bytes as a ring of members does, in two steps.
//
// Members on several hosts, some of which share one, work in stages: within hosts, between hosts, within hosts. There float16 and
// bfloat16 are rounded at each level, twice at most.
//
// # Deaths
//
// Data is looked at first, deaths second: what a member has published before it died is used. In a room an operation
// fails at a survivor if and only if a dead member has published less than its part of it. That part is the same for all and
// a dead member publishes no more, so an operation completes at all survivors of a host, or at none.
//
// # Disagreement
//
// Every block carries the operation's number and its [Signature]. A member that finds another one's where it expects its own
// fails with a [MismatchError], and tells the others by a notice. One that waits for long sends a notice of what it
// waits in, so that those who all wait for each other, in different operations, find out.
//
// After an error the mesh is not used any more.
//
// # Choosing
//
// All members choose the same way from the operation's signature, the mesh, and a [Table] of sizes, which they must have in common.
// [Comm.Measure] measures a mesh and gives all members the same [Rates], and [Rates.Table] says how a table follows from them.
package collective
