package collective

// Tracks of a fabric. Blocks of one track and sender come in order.
const (
	inputs = iota
	results
	notices
	tracks
)

// fabric carries the blocks of flows among some members, which it counts by position.
type fabric interface {
	// members are those of the positions; me is this one's position.
	members() (list []int, me int)
	// chunk is the most bytes of a piece, for blocks that have one for all receivers or each its own.
	chunk(split bool) int
	// shares reports whether everybody gets all blocks, those that it does not want, too.
	shares() bool
	// send sends a flow's block b to those who get it, and reports false if there is no room for now. The dead need none.
	send(o *flow, track, b int) bool
	// peek is the next block of a position for this one, or what of it is, and how many blocks come after it. What does not
	// belong to the flow makes it fail.
	peek(o *flow, track, from int) (piece []byte, left int, ok bool)
	// next lets go of it.
	next(track, from int)
	// dead is an error if a position is dead, will send nothing that is not there yet, and has not sent what the flow needs of it.
	dead(o *flow, from int) error
	// look takes what there is beside the flow: notices, and blocks that nobody waits for. They may make it fail.
	look(o *flow)
	// hear takes notices only, so that there is room for others. A flow begins with it.
	hear(o *flow)
	// notify sends a notice to all who can take it.
	notify(n notice)
}
