package collective

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"time"

	"larder/pg/reduce"
)

// Rates are what tables are made of: how long things take at the slowest member.
type Rates struct {
	Step    time.Duration `json:"step"`     // one exchange of next to nothing among all members
	Message time.Duration `json:"message"`  // sending one message over a lane; 0 if there are none
	Copy    time.Duration `json:"copy"`     // copying a MiB
	Reduce  time.Duration `json:"reduce"`   // reducing a MiB of operands
	LaneMiB time.Duration `json:"lane_mib"` // sending a MiB over lanes; 0 if there are none
}

const mib = 1 << 20

// probeTimes is how often a probe is repeated: the median of so many is not that of a moment.
const probeTimes = 9

// median is the median time of several runs.
func median(run func() error) (time.Duration, error) {
	var list [probeTimes]time.Duration
	for i := range list {
		begin := now()
		if err := run(); err != nil {
			return 0, err
		}
		list[i] = since(begin)
	}
	slices.Sort(list[:])
	return list[len(list)/2], nil
}

// MeasureLocal measures what needs no other member, in about a millisecond.
func MeasureLocal() Rates {
	a, b := make([]byte, mib), make([]byte, mib)
	half := a[:mib/2]
	copying, _ := median(func() error { copy(a, b); return nil })                                                    // cannot fail
	reducing, _ := median(func() error { reduce.Reduce(reduce.Sum, reduce.F32, half, half, b[:mib/2]); return nil }) // neither
	return Rates{Copy: copying, Reduce: reducing}
}

// Measure measures a mesh, as its members' operations from number seq on, whose number it gives back. wait polls an operation until it
// is over. All members call it at the same point, and all get the same rates: the slowest one's.
func (c *Comm) Measure(seq uint64, wait func(Op) error) (r Rates, next uint64, err error) {
	run := func(a Args) func() error {
		return func() error {
			a.Seq = seq
			seq++
			return wait(c.Start(a))
		}
	}
	r = MeasureLocal()
	if r.Step, err = median(run(Args{Kind: Barrier})); err != nil {
		return r, seq, err
	}
	// A MiB to each of the others, and next to nothing: the difference is bytes.
	src := make([]byte, mib)
	dst := make([]byte, mib*c.N)
	var parts, small [][]byte
	for i := range c.N {
		parts, small = append(parts, dst[i*mib:][:mib]), append(small, dst[i*mib:][:leastChunk])
	}
	long, err := median(run(Args{Kind: AllGather, DType: reduce.U8, Src: [][]byte{src}, Dst: parts}))
	if err != nil {
		return r, seq, err
	}
	short, err := median(run(Args{Kind: AllGather, DType: reduce.U8, Src: [][]byte{src[:leastChunk]}, Dst: small}))
	if err != nil {
		return r, seq, err
	}
	if !c.shared() && c.N > 1 {
		others := time.Duration(c.N - 1)
		r.LaneMiB = max(long-short, 0) / others
		r.Message = max(short-r.Step/2, 0) / others
	}
	err = agree(&r, run)
	return r, seq, err
}

// agree makes all members' rates those of the slowest.
func agree(r *Rates, run func(Args) func() error) error {
	list := []*time.Duration{&r.Step, &r.Message, &r.Copy, &r.Reduce, &r.LaneMiB}
	b := make([]byte, 8*len(list))
	for i, d := range list {
		binary.NativeEndian.PutUint64(b[8*i:], uint64(*d)) //nolint:gosec // not negative
	}
	if err := run(Args{Kind: AllReduce, DType: reduce.U64, Op: reduce.Max, Src: [][]byte{b}, Dst: [][]byte{b}})(); err != nil {
		return err
	}
	for i, d := range list {
		*d = time.Duration(binary.NativeEndian.Uint64(b[8*i:])) //nolint:gosec // it was one
	}
	return nil
}

// bytesIn is how many bytes take as long as t at so much time for a MiB; most if that is next to none.
func bytesIn(t, perMiB time.Duration, least, most int) int {
	if t <= 0 {
		return least
	}
	if perMiB <= 0 {
		return most
	}
	return min(max(int(float64(t)/float64(perMiB)*mib), least), most)
}

// Table chooses for n members. With L for Step, o for Message, and c, r and b for the times of a byte copied, reduced and sent:
//
//   - All of an operand S reduced by each of n members takes L + S c + n S r, a segment each 2L + (2n-1)/n S c + S r. They are equal at
//     S (n-1) = L / (r - c/n). Over lanes: L + (n-1) S b and 2L + 2 (n-1)/n S b, equal at S (n-1) = L / (b (1 - 2/n)).
//   - A broadcast by the root alone takes L + (n-1) S b, in segments about 2L + S b: equal at S = L / (b (n-2)). The same holds for stages.
//   - A tree takes log2(n) L, direct messages L + (n-1) o: a tree is for so many members that it takes less.
//   - A chunk takes 20 times what its message does: so that costs 5 %.
//
// What was measured while others used the machine can be far off: every size stays within a factor of eight or so of the default.
func (r Rates) Table(n int) Table {
	t := DefaultTable
	n = max(n, 2)
	t.OneShot = bytesIn(r.Step, r.Reduce-r.Copy/time.Duration(n), 32<<10, 256<<10)
	if r.LaneMiB == 0 {
		return t
	}
	t.LaneOneShot = 1 << 20
	if n > 2 {
		t.LaneOneShot = bytesIn(r.Step, r.LaneMiB*time.Duration(n-2)/time.Duration(n), 16<<10, 1<<20)
	}
	t.Split = bytesIn(r.Step, r.LaneMiB*time.Duration(max(n-2, 1)), 64<<10, 2<<20)
	t.Stage = bytesIn(r.Step, r.LaneMiB, 16<<10, 1<<20)
	t.LaneChunk = 1 << bits.Len(uint(bytesIn(20*r.Message, r.LaneMiB, 32<<10, 255<<10)))
	for t.Tree = 4; t.Tree < maxMembers; t.Tree++ {
		if time.Duration(t.Tree-1)*r.Message > time.Duration(bits.Len(uint(t.Tree-1))-1)*r.Step {
			break
		}
	}
	return t
}
