package collective

import (
	"fmt"
	"slices"

	"larder/pg/reduce"
	"larder/pg/shm"
)

// Comm is a mesh for operations: N members, of which this process is Me. One goroutine at a time may use it.
//
// Its fields are set before the first operation and not changed, but for the table, which all may change between two. A member that
// is alone needs neither lanes nor a room.
type Comm struct {
	N, Me int
	// Lane gives the two rings to and from another member. It is asked for those that are needed, again and again.
	Lane func(i int) (*shm.Producer, *shm.Consumer)
	// Room is that of this process's host, nil if it has none, and Local its members, by their index in the room.
	Room  *shm.Room
	Local []int
	// Hosts are all members, those together that share a room. All members must say the same. With nil nothing is done in stages.
	Hosts [][]int
	// Table must be the same at all members. The zero value stands for [DefaultTable].
	Table Table

	ready    bool
	table    Table // that fabrics were made for
	err      error // why nothing can be started
	over     error // why nothing can be started any more: an operation has failed
	busy     bool  // an operation is under way
	progress uint64

	flat   fabric      // of all members
	host   *inRoom     // of this host's, if it is shared and there are other hosts
	taken  [2][]uint64 // by track and room index: chunks that were released
	hosts  [][]int     // as Hosts, sorted
	across []*onLanes  // by place in a host: of one member of each host; nil for those that this one is not in
	flow   flow
	staged staged
	tree   tree
	failed failed
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

// shared reports whether all members are in the room.
func (c *Comm) shared() bool { return c.flat.shares() }

// Progress is a number that grows whenever anything moves in an operation.
func (c *Comm) Progress() uint64 { return c.progress }

// failed is an operation that cannot begin.
type failed struct{ err error }

// Poll implements [Op].
func (f *failed) Poll() (bool, error) { return false, f.err }

// Start begins an operation. Nothing happens before the first Poll, which also tells what is wrong with a.
func (c *Comm) Start(a Args) Op {
	if err := c.check(&a); err != nil {
		c.failed.err = err
		return &c.failed
	}
	return c.plan(&a)
}

// check refuses what cannot be started.
func (c *Comm) check(a *Args) error {
	if c.over != nil {
		return c.over
	}
	if c.busy {
		return fmt.Errorf("%w: one operation at a time", ErrComm)
	}
	if !c.ready || c.Table != c.table {
		c.err = c.setUp()
		c.ready, c.table = true, c.Table
	}
	if c.err != nil {
		return c.err
	}
	return a.Check(c.N, c.Me)
}

// setUp checks the fields and makes the fabrics.
func (c *Comm) setUp() (err error) {
	if c.N < 1 || c.N > maxMembers || c.Me < 0 || c.Me >= c.N {
		return fmt.Errorf("%w: member %d of %d, the most is %d", ErrComm, c.Me, c.N, maxMembers)
	}
	if c.Table, err = c.Table.check(); err != nil {
		return err
	}
	everyone := make([]int, c.N)
	for i := range everyone {
		everyone[i] = i
	}
	shared := c.Room != nil && c.Room.Len() > 1
	if shared && (!slices.Contains(c.Local, c.Me) || c.Local[c.Room.Me()] != c.Me) {
		return fmt.Errorf("%w: member %d is not number %d of its room", ErrComm, c.Me, c.Room.Me())
	}
	if shared && !slices.IsSorted(c.Local) {
		return fmt.Errorf("%w: the members of a room are in order, not %v", ErrComm, c.Local)
	}
	if shared && len(c.Local) == c.N {
		c.flat, err = newInRoom(c)
		return err
	}
	if c.flat, err = newOnLanes(c, everyone, c.Me); err != nil {
		return err
	}
	return c.setUpStages()
}

// fail ends an operation with an error, tells all others why, and lets no other begin: channels may be anywhere.
func (c *Comm) fail(seq, sig uint64, err error) {
	c.notify(noticeOf(seq, sig, err))
	c.over = fmt.Errorf("%w: it has failed: %w", ErrComm, err)
}

// notify tells all others.
func (c *Comm) notify(n notice) {
	c.flat.notify(n)
	if c.host != nil {
		c.host.notify(n)
	}
}

// Check tells whether member me of n can carry out a: what [Comm.Start] would refuse.
func (a *Args) Check(n, me int) error {
	switch {
	case !a.Kind.Valid():
		return fmt.Errorf("%w: no kind is number %d", ErrArgs, uint8(a.Kind))
	case a.Kind == Barrier:
		return nil
	case !a.DType.Valid():
		return fmt.Errorf("%w: no dtype is number %d", ErrArgs, uint8(a.DType))
	case a.Kind.Rooted() && (a.Root < 0 || a.Root >= n):
		return fmt.Errorf("%w: root %d of %d members", ErrArgs, a.Root, n)
	}
	if a.Kind.Reduces() {
		if err := reduce.Check(a.Op, a.DType); err != nil {
			return fmt.Errorf("%w: %w", ErrArgs, err)
		}
	}
	return a.checkBuffers(n, me)
}

// buffers is how many buffers a kind has on each side at a member; 0 if they are not looked at.
func (a *Args) buffers(n, me int) (src, dst int) {
	root := a.Root == me
	switch a.Kind {
	case AllReduce:
		return 1, 1
	case Broadcast:
		if root {
			return 1, 0
		}
		return 0, 1
	case Reduce:
		if root {
			return 1, 1
		}
		return 1, 0
	case AllGather:
		return 1, n
	case Gather:
		if root {
			return 1, n
		}
		return 1, 0
	case Scatter:
		if root {
			return n, 1
		}
		return 0, 1
	case ReduceScatter:
		return n, 1
	case AllToAll:
		return n, n
	case Barrier:
	}
	return 0, 0
}

func (a *Args) checkBuffers(n, me int) error {
	src, dst := a.buffers(n, me)
	if src > 0 && len(a.Src) != src || dst > 0 && len(a.Dst) != dst {
		return fmt.Errorf("%w: %v of %d members has %d and %d buffers in Src and Dst, not %d and %d",
			ErrArgs, a.Kind, n, src, dst, len(a.Src), len(a.Dst))
	}
	size, bytes := a.DType.Size(), a.bytes(me)
	for _, list := range [2][][]byte{a.Src[:src], a.Dst[:dst]} {
		for i, b := range list {
			if len(b)%size != 0 {
				return fmt.Errorf("%w: %d bytes are no array of %v", ErrArgs, len(b), a.DType)
			}
			if a.Kind != AllToAll && len(b) != bytes {
				return fmt.Errorf("%w: buffer %d of %v has %d bytes where others have %d", ErrArgs, i, a.Kind, len(b), bytes)
			}
			if u64(len(b)/size) >= maxCount {
				return fmt.Errorf("%w: %d bytes are too many", ErrArgs, len(b))
			}
		}
	}
	if a.Kind == AllToAll && len(a.Src[me]) != len(a.Dst[me]) {
		return fmt.Errorf("%w: member %d sends itself %d bytes, and expects %d", ErrArgs, me, len(a.Src[me]), len(a.Dst[me]))
	}
	if a.Kind == Broadcast && a.Root == me && len(a.Dst) > 0 && len(a.Dst[0]) > 0 && len(a.Dst[0]) != bytes {
		return fmt.Errorf("%w: the root's Dst has %d bytes, its Src %d", ErrArgs, len(a.Dst[0]), bytes)
	}
	return nil
}

// bytes is how long operands and parts are. Those of an AllToAll differ: 0.
func (a *Args) bytes(me int) int {
	switch a.Kind {
	case AllToAll, Barrier:
		return 0
	case Broadcast:
		if a.Root != me {
			return len(a.Dst[0])
		}
		return len(a.Src[0])
	case Scatter, ReduceScatter:
		return len(a.Dst[0])
	default:
		return len(a.Src[0])
	}
}

// signature is what members must agree on.
func (a *Args) signature(me int) Signature {
	s := Signature{Kind: a.Kind, Seq: a.Seq}
	if a.Kind == Barrier {
		return s
	}
	s.DType, s.Count = a.DType, u64(a.bytes(me)/a.DType.Size())
	if a.Kind.Reduces() {
		s.Op = a.Op
	}
	if a.Kind.Rooted() {
		s.Root = a.Root
	}
	return s
}

// Each member gets its piece of a slot. Measured with two and four members, pieces of 64 KiB and more take the same time for a byte:
// they are long enough to be copied at full speed, and slots are short enough to stay in a cache that cores share. A room
// of many members is to stay within 16 MiB of each, and has smaller pieces for it.
const (
	goodPiece = 64 << 10
	leastSlot = 128 << 10
	mostSlot  = 512 << 10
)

// Layout is what a room for operations of n members on one host should have: tracks for inputs, results and notices. Of eight slots
// four would do for two members that run at once; more let one go on while the other does not have a core.
func Layout(n int) shm.Layout {
	return shm.Layout{Tracks: tracks, Slots: 8, SlotBytes: min(max(leastSlot, n*goodPiece), mostSlot)}
}
