package collective

import (
	"encoding/binary"
	"fmt"
	"time"

	"larder/pg/reduce"
)

// who are the members at one end of a track.
type who uint8

const (
	nobody who = iota
	all
	rootOnly
	others // all but the root
)

func (w who) has(pos, root int) bool {
	switch w {
	case all:
		return true
	case rootOnly:
		return pos == root
	case others:
		return pos != root
	case nobody:
	}
	return false
}

// shape is how a flow goes: who sends to whom on each track, and what is done with inputs.
type shape struct {
	from, to [2]who
	split    bool // of inputs each receiver gets a piece of its own
	reduce   bool // inputs are reduced, not copied
	uneven   bool // parts differ, and begin with their length
}

// The shapes. See the package's documentation.
var (
	reduceAll     = shape{from: [2]who{all}, to: [2]who{all}, reduce: true}
	reduceSegment = shape{from: [2]who{all, all}, to: [2]who{all, all}, reduce: true, split: true}
	reduceRoot    = shape{from: [2]who{others}, to: [2]who{rootOnly}, reduce: true}
	reduceCollect = shape{from: [2]who{all, others}, to: [2]who{all, rootOnly}, reduce: true, split: true}
	reduceParts   = shape{from: [2]who{all}, to: [2]who{all}, reduce: true, split: true}
	spread        = shape{from: [2]who{rootOnly}, to: [2]who{others}}
	spreadSegment = shape{from: [2]who{rootOnly, others}, to: [2]who{others, others}, split: true}
	spreadParts   = shape{from: [2]who{rootOnly}, to: [2]who{others}, split: true}
	gatherAll     = shape{from: [2]who{all}, to: [2]who{all}}
	gatherRoot    = shape{from: [2]who{others}, to: [2]who{rootOnly}}
	exchange      = shape{from: [2]who{all}, to: [2]who{all}, split: true, uneven: true}
)

// region is memory by position: one buffer for all, one that is cut into segments, or one for each member.
type region struct {
	whole   []byte
	segment int // bytes; 0 if whole is not cut
	skip    int // the position that has no segment, plus 1; 0 if all have one
	parts   [][]byte
	via     []int // the members whose parts are meant, by position; nil for the fabric's
}

// of is a position's memory, of which list gives the members.
func (r *region) of(pos int, list []int) []byte {
	switch {
	case r.parts != nil && r.via != nil:
		return r.parts[r.via[pos]]
	case r.parts != nil:
		return r.parts[list[pos]]
	case r.segment > 0:
		if r.skip > 0 && pos > r.skip-1 {
			pos--
		}
		return cut(r.whole, pos, r.segment)
	default:
		return r.whole
	}
}

// cut is the i-th piece of so many bytes of b: less at the end, and nothing beyond.
func cut(b []byte, i, bytes int) []byte {
	return b[min(i*bytes, len(b)):min((i+1)*bytes, len(b))]
}

// flow is an operation, or a stage of one, over one fabric: see the package's documentation. Its memory is used again.
//
// What is received in a block b replaces what was sent in it and not before, since they may be the same memory: block b of
// inputs is taken when the own block b has been sent.
type flow struct {
	c *Comm
	f fabric
	shape
	seq, sig uint64
	dt       reduce.DType
	op       reduce.Op
	root     int // position
	divide   int // ends an average over so many members; 0 if this is none, or does not end here

	long int // bytes for one receiver: the same at all members but for uneven parts, where it is the most that this one sends

	src region // what is sent, by receiver; what is reduced is the own part
	dst region // where inputs of each position go, unless they are reduced
	own []byte // what inputs are reduced to, or, of a broadcast, received to; what is sent as results
	out region // where results of each position go

	keep, keepTo []byte // what this member has for itself, and where it goes

	list  []int // members of the fabric by position
	me    int
	piece int    // bytes of data in a block for one receiver
	total [2]int // blocks that this member sends
	sent  [2]int
	ready int      // blocks of results that may be sent
	want  [2][]int // by position: blocks that are still to be taken; -1 when not known yet
	got   [2][]int // by position: those that were
	late  int      // position whose inputs are waited for
	srcs  [][]byte // operands of a block

	scratch []byte // results of a reduction that are for the root alone

	begun bool
	stuck int       // polls in a row that moved nothing
	since time.Time // about the first of them
	told  bool      // others what this one waits in
	err   error
}

// begin lays out a flow whose fields up to out are set.
func (o *flow) begin() {
	o.list, o.me = o.f.members()
	n := len(o.list)
	o.lay(n)
	for t := range 2 {
		o.want[t], o.got[t] = fit(o.want[t], n), fit(o.got[t], n)
		o.sent[t], o.total[t] = 0, 0
		if o.from[t].has(o.me, o.root) {
			o.total[t] = o.blocks(o.long)
		}
		for k := range n {
			o.want[t][k], o.got[t][k] = 0, 0
			if k == o.me || !o.from[t].has(k, o.root) || !o.f.shares() && !o.to[t].has(o.me, o.root) {
				continue
			}
			o.want[t][k] = o.blocks(o.long)
			if o.uneven {
				o.want[t][k] = -1
			}
		}
	}
	o.srcs = fit(o.srcs, n)
	o.ready, o.late, o.stuck, o.told, o.begun, o.err = 0, 0, 0, false, false, nil
}

// fit makes a slice n long, of the same memory if it has room.
func fit[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// lay finds how large blocks are: see Table.Blocks. All members find the same.
func (o *flow) lay(n int) {
	most := o.f.chunk(o.split)
	if o.uneven {
		o.piece = most - lengthBytes // others' parts are not known
		return
	}
	least := max(o.c.Table.MinChunk, leastChunk)
	if o.split {
		least = max(least/max(n-1, 1), leastChunk)
	}
	blocks := max((o.long+most-1)/most, min(o.c.Table.Blocks, o.long/least), 1)
	o.piece = min((((o.long+blocks-1)/blocks+leastChunk-1)/leastChunk)*leastChunk, most)
	o.piece = max(o.piece, leastChunk)
}

// leastChunk is the least that makes a block, a cache line. Blocks are multiples of it, and so of all elements.
const leastChunk = 64

// lengthBytes is what an uneven part's length takes, before each of its pieces; leastChunk keeps pieces aligned.
const lengthBytes = leastChunk

// blocks is how many blocks so many bytes for a receiver take. There is always one, which tells the others that this member has come.
func (o *flow) blocks(bytes int) int { return max((bytes+o.piece-1)/o.piece, 1) }

// left is how many blocks come after block b for a receiver.
func (o *flow) left(t, b, to int) int {
	if o.uneven {
		return o.blocks(len(o.src.of(to, o.list))) - 1 - b
	}
	return o.total[t] - 1 - b
}

// wants reports whether position to uses what from sends on a track.
func (o *flow) wants(t, from, to int) bool {
	return from != to && o.from[t].has(from, o.root) && o.to[t].has(to, o.root)
}

// block is what this member sends to position to in block b.
func (o *flow) block(t, b, to int) []byte {
	if t == results {
		return cut(o.own, b, o.piece)
	}
	return cut(o.src.of(to, o.list), b, o.piece)
}

// size is how many bytes of a block there are for a receiver, and fill writes them.
func (o *flow) size(t, b, to int) int {
	n := len(o.block(t, b, to))
	if o.uneven {
		n += lengthBytes
	}
	return n
}

func (o *flow) fill(p []byte, t, b, to int) int {
	at := 0
	if o.uneven {
		binary.LittleEndian.PutUint64(p, uint64(len(o.src.of(to, o.list))))
		at = lengthBytes
	}
	return at + copy(p[at:], o.block(t, b, to))
}

// Poll implements [Op].
func (o *flow) Poll() (bool, error) {
	done, err := o.poll()
	if err != nil {
		o.c.fail(o.seq, o.sig, err)
	}
	o.c.busy = !done
	return done, err
}

func (o *flow) poll() (bool, error) {
	for o.err == nil && o.move() {
		o.c.progress++
		o.stuck = 0
	}
	if o.err == nil && o.over() {
		o.drop()
		return true, nil
	}
	if o.err == nil {
		o.wait()
	}
	return false, o.err
}

// drop lets go of the caller's memory.
func (o *flow) drop() {
	o.src, o.dst, o.out, o.own, o.keep, o.keepTo = region{}, region{}, region{}, nil, nil, nil
}

// move does a little of everything that can be done, and reports whether there was any. What makes room for others goes
// first, but for inputs of this member if it has hardly sent any.
func (o *flow) move() bool {
	moved := false
	if !o.begun {
		o.begun, moved = true, true
		o.f.hear(o)
		if !same(o.keepTo, o.keep) {
			defer copy(o.keepTo, o.keep) // others come first
		}
	}
	if o.sent[inputs]-o.taken() < o.c.Table.Lead && o.send(inputs) {
		moved = true
	}
	if o.takeResults() {
		moved = true
	}
	if o.takeInputs() {
		moved = true
	}
	if o.sent[results] < o.ready && o.send(results) {
		moved = true
	}
	return moved || o.send(inputs)
}

// same reports whether both begin at the same address.
func same(a, b []byte) bool {
	return len(a) > 0 && len(b) > 0 && &a[0] == &b[0]
}

// taken is about how many blocks of inputs this member is through with.
func (o *flow) taken() int { return o.got[inputs][o.late] }

// send sends the next block of a track.
func (o *flow) send(t int) bool {
	if o.sent[t] == o.total[t] || !o.f.send(o, t, o.sent[t]) {
		return false
	}
	o.sent[t]++
	return true
}

func (o *flow) over() bool {
	for t := range 2 {
		if o.sent[t] < o.total[t] {
			return false
		}
		for _, left := range o.want[t] {
			if left != 0 {
				return false
			}
		}
	}
	return !o.reduces() || o.ready > 0 && o.ready == o.blocks(o.long)
}

// reduces reports whether this member reduces blocks of inputs.
func (o *flow) reduces() bool { return o.reduce && o.to[inputs].has(o.me, o.root) }

// takeInputs takes a block of inputs, of everybody at once if they are reduced.
func (o *flow) takeInputs() bool {
	if o.reduces() {
		return o.reduceBlock()
	}
	moved := false
	for k, left := range o.want[inputs] {
		b := o.got[inputs][k]
		if left == 0 || b >= o.sent[inputs] && o.sent[inputs] < o.total[inputs] {
			continue
		}
		if !o.take(inputs, k, o.dst.of(k, o.list)) {
			o.late = k
			continue
		}
		moved = true
		if o.from[results] == others && o.to[results] == others { // what comes from the root goes on
			o.ready++
		}
	}
	return moved
}

// takeResults takes a block of results of each position that has one.
func (o *flow) takeResults() bool {
	moved := false
	for k, left := range o.want[results] {
		if left != 0 && o.take(results, k, o.out.of(k, o.list)) {
			moved = true
		}
	}
	return moved
}

// take copies the next block of a position, if it is there, to where it belongs, given all memory of that position.
func (o *flow) take(t, k int, to []byte) bool {
	p, left, ok := o.f.peek(o, t, k)
	if !ok || !o.expect(t, k, left) {
		return false
	}
	if o.wants(t, k, o.me) {
		if o.uneven {
			if p, ok = o.trim(p, k, len(to)); !ok {
				return false
			}
		}
		to = cut(to, o.got[t][k], o.piece)
		if len(p) < len(to) {
			o.reject(o.list[k], "a block of %d bytes where %d are due", len(p), len(to))
			return false
		}
		copy(to, p)
	}
	o.done(t, k)
	return true
}

// expect checks how many blocks a position says are left, or learns it.
func (o *flow) expect(t, k, left int) bool {
	if o.want[t][k] < 0 {
		o.want[t][k] = left + 1
	}
	if o.want[t][k] != left+1 {
		o.reject(o.list[k], "%d blocks after one that %d are due after: its table or its room differs", left, o.want[t][k]-1)
		return false
	}
	return true
}

// trim checks the length of an uneven part that is to be as long as this member expects, and takes it off the piece.
func (o *flow) trim(p []byte, k, due int) ([]byte, bool) {
	if len(p) < lengthBytes {
		o.reject(o.list[k], "a part without its length")
		return nil, false
	}
	if has := binary.LittleEndian.Uint64(p); has != u64(due) {
		e := &MismatchError{Member: o.list[k], Want: unpack(o.seq, o.sig), Got: unpack(o.seq, o.sig)}
		e.Want.Count, e.Got.Count = u64(due/o.dt.Size()), has/u64(o.dt.Size())
		o.err = e
		return nil, false
	}
	return p[lengthBytes:], true
}

// done lets go of a position's block.
func (o *flow) done(t, k int) {
	o.f.next(t, k)
	o.got[t][k]++
	o.want[t][k]--
}

// reject fails because of nonsense from a member.
func (o *flow) reject(member int, format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf("%w: member %d: %s", ErrProtocol, member, fmt.Sprintf(format, args...))
	}
}

// reduceBlock reduces a block of inputs when all are there, in the order of positions.
func (o *flow) reduceBlock() bool {
	b := o.ready
	if b == o.blocks(o.long) || b >= o.sent[inputs] && o.sent[inputs] < o.total[inputs] {
		return false
	}
	to := cut(o.own, b, o.piece)
	if !o.operand(o.late, len(to)) { // the one that was missed last time tells soonest
		return false
	}
	for k := range o.list {
		if !o.operand(k, len(to)) {
			o.late = k
			return false
		}
	}
	if len(to) > 0 {
		reduce.Reduce(o.op, o.dt, to, o.srcs...)
		if o.divide > 0 {
			reduce.Divide(o.dt, to, o.divide)
		}
	}
	o.ready++
	for k := range o.list {
		o.srcs[k] = nil
		if k != o.me {
			o.done(inputs, k)
		}
	}
	return true
}

// operand finds a position's operand of the next block, of so many bytes.
func (o *flow) operand(k, bytes int) bool {
	if k == o.me {
		o.srcs[k] = cut(o.src.of(k, o.list), o.ready, o.piece)
		return true
	}
	p, left, ok := o.f.peek(o, inputs, k)
	if !ok || !o.expect(inputs, k, left) {
		return false
	}
	if len(p) < bytes {
		o.reject(o.list[k], "a block of %d bytes where %d are due", len(p), bytes)
		return false
	}
	o.srcs[k] = p[:bytes]
	return true
}

// stallPolls is after how many polls that moved nothing others are told what this member waits in: spinning takes a good part of
// them, so it is hardly ever told of those that are merely late. One who sleeps polls a few times a second: it tells after stallTime,
// for which it looks at the clock every few polls.
const (
	stallPolls = 512
	stallTime  = 100 * time.Millisecond
	clockPolls = 4
)

// stalled reports whether nothing has moved for long, once.
func (o *flow) stalled() bool {
	switch {
	case o.stuck == clockPolls:
		o.told, o.since = false, now()
		return false
	case o.told:
		return false
	case o.stuck >= stallPolls:
		o.told = true
	case o.stuck%clockPolls == 0:
		o.told = since(o.since) > stallTime
	}
	return o.told
}

// wait looks why nothing moves.
func (o *flow) wait() {
	o.stuck++
	o.f.look(o)
	if o.c.host != nil { // others may be in another stage
		o.c.host.hear(o)
		o.c.flat.hear(o)
	}
	for k := range o.list {
		if o.err == nil && (o.want[inputs][k] != 0 || o.want[results][k] != 0) {
			o.err = o.f.dead(o, k)
		}
	}
	if o.err == nil && o.stalled() {
		o.c.notify(notice{seq: o.seq, sig: o.sig})
	}
}

// heed is what a notice means to this flow. It reports whether the notice is for a later operation: then it stays.
func (o *flow) heed(member int, n notice, err error) (later bool) {
	mine, theirs := o.seq>>stageBits, n.seq>>stageBits
	switch {
	case o.err != nil:
	case err != nil:
		o.err = err
	case theirs > mine:
		return true
	case theirs < mine && n.cause == waits: // it is over here
	case theirs == mine && n.sig != o.sig:
		o.differ(member, n.seq, n.sig)
	default: // who has given up takes no part in this one, either
		o.err = n.errorOf(member)
	}
	return false
}

// differ fails because of what a member has called.
func (o *flow) differ(member int, seq, sig uint64) {
	if o.err == nil {
		o.err = &MismatchError{Member: member, Want: unpack(o.seq, o.sig), Got: unpack(seq, sig)}
	}
}
