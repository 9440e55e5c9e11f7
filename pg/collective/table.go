package collective

import "fmt"

// Table has the sizes at which algorithms change, in bytes, and how operations are cut. All members of a mesh must use the
// same one: it travels with the view. See [Rates.Table] for how it is made of what was measured.
type Table struct {
	// OneShot is the largest all-reduce in a room whose members each reduce all of it, as what a member reads: the operand
	// times the other members. Beyond that each reduces its segment.
	OneShot int `json:"one_shot"`
	// LaneOneShot is the same over lanes, as what a member sends.
	LaneOneShot int `json:"lane_one_shot"`
	// Split is the smallest broadcast and reduction over lanes, and reduction in a room of SplitMembers or more, that is cut into
	// segments.
	Split        int `json:"split"`
	SplitMembers int `json:"split_members"`
	// Tree is the least number of members that small operations go by trees for over lanes, and TreeBytes the most they have.
	Tree      int `json:"tree"`
	TreeBytes int `json:"tree_bytes"`
	// Stage is the smallest operand that members on several hosts work on in stages if it can be cut among those of a host.
	// Smaller ones, too, go in stages, by one member of each host.
	Stage int `json:"stage"`
	// RoomChunk and LaneChunk are the most bytes in a block. Those that the room's slots and the rings have room for bound them.
	RoomChunk int `json:"room_chunk"`
	LaneChunk int `json:"lane_chunk"`
	// Blocks is how many blocks an operation is cut into if they do not become smaller than MinChunk by that: so they overlap.
	Blocks   int `json:"blocks"`
	MinChunk int `json:"min_chunk"`
	// Lead is how many blocks of inputs a member sends before it looks for those of others.
	Lead int `json:"lead"`
}

// DefaultTable is what is used where nothing was measured.
var DefaultTable = Table{
	OneShot: 128 << 10, LaneOneShot: 64 << 10, Split: 256 << 10, SplitMembers: 4, Tree: 9, TreeBytes: 16 << 10, Stage: 64 << 10,
	RoomChunk: 512 << 10, LaneChunk: 128 << 10, Blocks: 4, MinChunk: 16 << 10, Lead: 2,
}

// check refuses what cannot be, and puts the default where there is nothing.
func (t Table) check() (Table, error) {
	if t == (Table{}) {
		return DefaultTable, nil
	}
	for _, f := range []struct {
		name  string
		value int
		least int
	}{
		{"one_shot", t.OneShot, 0},
		{"lane_one_shot", t.LaneOneShot, 0},
		{"split", t.Split, 0},
		{"split_members", t.SplitMembers, 2},
		{"tree", t.Tree, 2},
		{"tree_bytes", t.TreeBytes, 0},
		{"stage", t.Stage, 0},
		{"room_chunk", t.RoomChunk, leastChunk},
		{"lane_chunk", t.LaneChunk, leastChunk},
		{"blocks", t.Blocks, 1},
		{"min_chunk", t.MinChunk, 0},
		{"lead", t.Lead, 1},
	} {
		if f.value < f.least {
			return t, fmt.Errorf("%w: a table's %s is %d or more, not %d", ErrComm, f.name, f.least, f.value)
		}
	}
	return t, nil
}
