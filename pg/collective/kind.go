package collective

import "fmt"

// Kind is what a collective does. The numbers are the same in all versions: peers compare them.
type Kind uint8

// The kinds. The zero value is none, so that a missing one is noticed.
const (
	AllReduce Kind = iota + 1
	Broadcast
	Reduce
	AllGather
	ReduceScatter
	AllToAll
	Gather
	Scatter
	Barrier
)

// kinds are the names of the kinds.
var kinds = [...]string{
	AllReduce: "all_reduce", Broadcast: "broadcast", Reduce: "reduce", AllGather: "all_gather", ReduceScatter: "reduce_scatter",
	AllToAll: "all_to_all", Gather: "gather", Scatter: "scatter", Barrier: "barrier",
}

// Valid reports whether k is one of the kinds.
func (k Kind) Valid() bool { return k > 0 && int(k) < len(kinds) }

// String gives torch's name of the kind.
func (k Kind) String() string {
	if !k.Valid() {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// Rooted reports whether a kind has a root.
func (k Kind) Rooted() bool { return k == Broadcast || k == Reduce || k == Gather || k == Scatter }

// Reduces reports whether a kind has an operation.
func (k Kind) Reduces() bool { return k == AllReduce || k == Reduce || k == ReduceScatter }
