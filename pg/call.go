package pg

import (
	"fmt"

	"larder/pg/collective"
	"larder/pg/p2p"
	"larder/pg/reduce"
)

// DType is the type of a call's elements.
type DType = reduce.DType

// Op is the operation of a reduction.
type Op = reduce.Op

// Kind is what a call does.
type Kind = collective.Kind

// Any as the rank of a [Recv] takes the next message of any rank, AnyTag one with any tag.
const (
	Any    = p2p.Any
	AnyTag = p2p.AnyTag
)

// Call is an operation of a group: see the functions that make one. Where a call has parts for each rank there are as many as
// [Group.Size]; those of ranks that are not active are left as they are.
type Call struct {
	Kind  Kind
	DType DType
	Op    Op
	Root  int    // of the rank that others receive from, or send to
	Tag   uint64 // of a Send or Recv

	Src, Dst           []byte
	SrcParts, DstParts [][]byte // by rank, in place of Src or Dst

	p2p direction
}

// direction tells a Send and a Recv from a collective.
type direction uint8

const (
	none direction = iota
	send
	recv
)

// AllReduce gives every rank the reduction of all ranks' src, in dst, which may be the same memory.
func AllReduce(dst, src []byte, dt DType, op Op) Call {
	return Call{Kind: collective.AllReduce, DType: dt, Op: op, Dst: dst, Src: src}
}

// Reduce gives root the reduction of all ranks' src. The dst of others is not used.
func Reduce(dst, src []byte, dt DType, op Op, root int) Call {
	return Call{Kind: collective.Reduce, DType: dt, Op: op, Root: root, Dst: dst, Src: src}
}

// Broadcast gives every rank what is in root's buf.
func Broadcast(buf []byte, dt DType, root int) Call {
	return Call{Kind: collective.Broadcast, DType: dt, Root: root, Dst: buf, Src: buf}
}

// AllGather gives every rank all ranks' src, by rank. All have the same length. This rank's part of dst may be src.
func AllGather(dst [][]byte, src []byte, dt DType) Call {
	return Call{Kind: collective.AllGather, DType: dt, DstParts: dst, Src: src}
}

// ReduceScatter gives every rank the reduction of all ranks' part of src that is its own. All parts have the same length.
func ReduceScatter(dst []byte, src [][]byte, dt DType, op Op) Call {
	return Call{Kind: collective.ReduceScatter, DType: dt, Op: op, Dst: dst, SrcParts: src}
}

// AllToAll sends the parts of src to the ranks, and receives in dst what they sent to this one. Parts may differ in length: what a
// rank has for another must be as long as that expects.
func AllToAll(dst, src [][]byte, dt DType) Call {
	return Call{Kind: collective.AllToAll, DType: dt, DstParts: dst, SrcParts: src}
}

// Gather gives root all ranks' src, by rank. The dst of others is not used.
func Gather(dst [][]byte, src []byte, dt DType, root int) Call {
	return Call{Kind: collective.Gather, DType: dt, Root: root, DstParts: dst, Src: src}
}

// Scatter gives every rank its part of root's src. The src of others is not used.
func Scatter(dst []byte, src [][]byte, dt DType, root int) Call {
	return Call{Kind: collective.Scatter, DType: dt, Root: root, Dst: dst, SrcParts: src}
}

// Barrier ends when every rank has come to it.
func Barrier() Call { return Call{Kind: collective.Barrier} }

// Send sends buf to a rank. It is done when buf may be used again: a short message may not have been received by then.
func Send(buf []byte, to int, tag uint64) Call { return Call{p2p: send, Src: buf, Root: to, Tag: tag} }

// Recv receives a message of a rank, or of [Any], with a tag, or with [AnyTag], into buf. [Result] says whose it was and how long.
func Recv(buf []byte, from int, tag uint64) Call {
	return Call{p2p: recv, Dst: buf, Root: from, Tag: tag}
}

// String is the call as errors name it.
func (c *Call) String() string {
	switch {
	case c.p2p == send:
		return fmt.Sprintf("send(%d bytes to rank %d, tag %d)", len(c.Src), c.Root, c.Tag)
	case c.p2p == recv && c.Root == Any:
		return fmt.Sprintf("recv(%d bytes from any rank)", len(c.Dst))
	case c.p2p == recv:
		return fmt.Sprintf("recv(%d bytes from rank %d)", len(c.Dst), c.Root)
	default:
		return fmt.Sprintf("%v(%d bytes of %v)", c.Kind, c.bytes(), c.DType)
	}
}

// bytes is about how much the call moves at this rank: whether it is small.
func (c *Call) bytes() int {
	n := max(len(c.Src), len(c.Dst))
	for _, p := range c.SrcParts {
		n += len(p)
	}
	for _, p := range c.DstParts {
		n += len(p)
	}
	return n
}
