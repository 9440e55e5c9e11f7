package collective

import (
	"larder/pg/reduce"
	"larder/pg/shm"
)

// Comm is a mesh for operations: N members, of which this process is Me. One goroutine at a time may use it.
//
// Its fields are set before the first operation and not changed. A member alone needs neither lanes nor a room.
type Comm struct {
	N, Me int
	// Lane gives the two rings to and from another member. It is asked for those that are needed, again and again.
	Lane func(i int) (*shm.Producer, *shm.Consumer)
	// Room is that of this process's host, nil if it has none, and Local its members, by their index in the room.
	Room  *shm.Room
	Local []int
	// Hosts are all members by host. Nil stands for all on hosts of their own, but for those of Local.
	Hosts [][]int
	// Table must be the same at all members. The zero value stands for [DefaultTable].
	Table Table

	progress uint64
}

// Args are what to do. Src and Dst hold one buffer or one for each member:
//
//	kind            Src                     Dst
//	AllReduce       the operand             the result
//	Reduce          the operand             the result, at the root
//	Broadcast       what to send, at the root   where to, at the others; at the root the same, or nil
//	AllGather       the own part            one for each member
//	Gather          the own part            one for each member, at the root
//	Scatter         one for each member, at the root    the own part
//	ReduceScatter   one for each member     the own part's result
//	AllToAll        one for each member     one for each member
//	Barrier         -                       -
//
// Parts have one length, but for those of an AllToAll, where what a member has for another is as long as that expects. Dst may be
// the same memory as Src (of parts: as the own part of Src or Dst that it stands for; of an AllToAll: as the part of the same
// member), or memory apart from it.
type Args struct {
	Kind     Kind
	DType    reduce.DType // any of the right size will do for kinds that do not reduce
	Op       reduce.Op
	Root     int    // member index
	Seq      uint64 // number of the operation, the same at all members
	Src, Dst [][]byte
}

// Op is an operation under way. It is over once Poll has said so, or has returned an error, and must not be polled again then:
// its memory is the next operation's.
type Op interface {
	Poll() (done bool, err error)
}

// Progress is a number that grows whenever anything moves in an operation.
func (c *Comm) Progress() uint64 { return c.progress }

// Start begins an operation. Nothing happens before the first Poll, which also tells what is wrong with a.
func (c *Comm) Start(a Args) Op { _ = a; return nil }

// Layout is what a room for operations of n members on one host should have: tracks for inputs, results and notices.
func Layout(n int) shm.Layout {
	_ = n
	return shm.Layout{Tracks: 3, Slots: 8, SlotBytes: 128 << 10}
}
