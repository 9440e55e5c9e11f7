package collective

import (
	"fmt"
	"strings"

	"larder/pg/reduce"
)

// Signature is what members must agree on. Count is the number of elements of one member's operand or part; of an all-to-all, whose
// parts differ, it is that of the part in question, or 0.
type Signature struct {
	Kind  Kind
	DType reduce.DType
	Op    reduce.Op
	Root  int // member index
	Count uint64
	Seq   uint64
}

// A signature but for Seq fits into 64 bits, so that it can be read back from what a peer has sent:
//
//	0 kind 4 | 4 dtype 6 | 10 op 4 | 14 root 10 | 24 count 40
const (
	sigDType = 4
	sigOp    = 10
	sigRoot  = 14
	sigCount = 24

	// stageBits of what goes as a sequence number tell the stages of an operation apart; the rest is Seq.
	stageBits = 8

	maxMembers = 1 << (sigCount - sigRoot)
	maxCount   = 1 << (64 - sigCount) // elements: a tebi
)

// pack gives the 64 bits.
func (s Signature) pack() uint64 {
	return uint64(s.Kind) | uint64(s.DType)<<sigDType | uint64(s.Op)<<sigOp | u64(s.Root)<<sigRoot | s.Count<<sigCount
}

// unpack reads them back, with a sequence number as it goes over channels. Any bits give a signature, which may name what there is not.
func unpack(seq, bits uint64) Signature {
	return Signature{
		Kind: Kind(bits & 15), DType: reduce.DType(bits >> sigDType & 63), Op: reduce.Op(bits >> sigOp & 15),
		Root: int(bits >> sigRoot & (maxMembers - 1)), Count: bits >> sigCount, Seq: seq >> stageBits,
	}
}

// String is the call as errors name it, such as "all_reduce(1024 float32, sum), number 7".
func (s Signature) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v(", s.Kind)
	sep := ""
	if s.DType != 0 {
		fmt.Fprintf(&b, "%d %v", s.Count, s.DType)
		sep = ", "
	}
	if s.Kind.Reduces() {
		fmt.Fprintf(&b, "%s%v", sep, s.Op)
		sep = ", "
	}
	if s.Kind.Rooted() {
		fmt.Fprintf(&b, "%sroot %d", sep, s.Root)
	}
	fmt.Fprintf(&b, "), number %d", s.Seq)
	return b.String()
}
