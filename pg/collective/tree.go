package collective

import (
	"math/bits"

	"larder/pg/reduce"
)

// byTree reports whether an operation goes by a tree: small ones, among many members, over lanes. Float16 and bfloat16 would be
// rounded at each step, and are not reduced so.
func (c *Comm) byTree(a *Args) bool {
	if c.shared() || c.N < c.Table.Tree || a.bytes(c.Me) > min(c.Table.TreeBytes, c.flat.chunk(false)) {
		return false
	}
	switch a.Kind {
	case Barrier, Broadcast:
		return true
	case AllReduce, Reduce:
		return a.DType != reduce.F16 && a.DType != reduce.BF16
	case AllGather, ReduceScatter, AllToAll, Gather, Scatter:
	}
	return false
}

// tree is an operation as steps in each of which a member sends one message, receives one, or does both.
type tree struct {
	o     flow // without blocks: it has the channels, and errors
	kind  Kind
	steps []step
	at    int
	sent  bool
	acc   []byte // what was reduced or received so far
	lanes *onLanes
}

// step is whom to send to and whom to receive from; -1 for nobody.
type step struct {
	to, from int
	replace  bool // what comes is the result, and not an operand
}

// plant begins an operation by a tree.
func (c *Comm) plant(a *Args, seq, sig uint64) Op {
	t := &c.tree
	o := &t.o
	*o = flow{c: c, f: c.flat, seq: seq, sig: sig, dt: a.DType, op: a.Op, want: o.want, got: o.got, scratch: o.scratch}
	o.list, o.me = c.flat.members()
	t.lanes = c.flat.(*onLanes)
	for i := range 2 {
		o.want[i] = fit(o.want[i], c.N)
		clear(o.want[i])
	}
	t.kind, t.steps, t.at, t.sent = a.Kind, t.steps[:0], 0, false
	switch a.Kind {
	case AllReduce:
		t.start(a.Dst[0], a.Src[0])
		t.double(c.N, c.Me)
	case Reduce:
		if c.Me == a.Root {
			t.start(a.Dst[0], a.Src[0])
		} else {
			o.scratch = fit(o.scratch, len(a.Src[0]))
			t.start(o.scratch, a.Src[0])
		}
		t.rise(c.N, c.Me, a.Root)
	case Broadcast:
		if c.Me == a.Root {
			t.start(first(a.Dst), a.Src[0])
		} else {
			t.acc = a.Dst[0]
		}
		t.fall(c.N, c.Me, a.Root)
	case Barrier, AllGather, ReduceScatter, AllToAll, Gather, Scatter: // the first alone goes by a tree
		t.acc = nil
		t.spread(c.N, c.Me)
	}
	for _, s := range t.steps {
		if s.from >= 0 {
			o.want[inputs][s.from]++
		}
	}
	if a.Op == reduce.Avg && (a.Kind == AllReduce || a.Kind == Reduce) {
		o.divide = c.N
	}
	return t
}

// start begins with an operand. A root need not receive what it broadcasts.
func (t *tree) start(dst, src []byte) {
	if len(dst) < len(src) {
		t.acc = src
		return
	}
	t.acc = dst
	if !same(dst, src) {
		copy(dst, src)
	}
}

// double is recursive doubling among the largest power of two of members; those beyond give theirs to a partner before, and get
// the result afterwards. Partners combine in the order of members, so that both have the same bits, and by that all.
func (t *tree) double(n, me int) {
	core := 1 << (bits.Len(uint(n)) - 1)
	if me >= core {
		t.steps = append(t.steps, step{to: me - core, from: -1}, step{to: -1, from: me - core, replace: true})
		return
	}
	if me+core < n {
		t.steps = append(t.steps, step{to: -1, from: me + core})
	}
	for bit := 1; bit < core; bit <<= 1 {
		t.steps = append(t.steps, step{to: me ^ bit, from: me ^ bit})
	}
	if me+core < n {
		t.steps = append(t.steps, step{to: me + core, from: -1})
	}
}

// rise is a reduction by a binomial tree: each member takes what those below have, then gives to the one above. Members count from
// the root.
func (t *tree) rise(n, me, root int) {
	v := (me - root + n) % n
	for bit := 1; bit < n; bit <<= 1 {
		if v&bit != 0 {
			t.steps = append(t.steps, step{to: (v - bit + root) % n, from: -1})
			return
		}
		if v+bit < n {
			t.steps = append(t.steps, step{to: -1, from: (v + bit + root) % n})
		}
	}
}

// fall is a broadcast by the same tree, the other way.
func (t *tree) fall(n, me, root int) {
	v := (me - root + n) % n
	bit := 1
	for ; bit < n && v&bit == 0; bit <<= 1 {
	}
	if v != 0 {
		t.steps = append(t.steps, step{to: -1, from: (v - bit + root) % n, replace: true})
	}
	for bit >>= 1; bit > 0; bit >>= 1 {
		if v+bit < n {
			t.steps = append(t.steps, step{to: (v + bit + root) % n, from: -1})
		}
	}
}

// spread is dissemination: after each step a member knows of twice as many that have come.
func (t *tree) spread(n, me int) {
	for bit := 1; bit < n; bit <<= 1 {
		t.steps = append(t.steps, step{to: (me + bit) % n, from: (me - bit + n) % n, replace: true})
	}
}

// Poll implements [Op].
func (t *tree) Poll() (bool, error) {
	o := &t.o
	for o.err == nil && t.at < len(t.steps) && t.move() {
		o.c.progress++
		o.stuck = 0
	}
	if o.err == nil && t.at < len(t.steps) {
		o.wait()
	}
	if o.err != nil {
		o.c.fail(o.seq, o.sig, o.err)
		return false, o.err
	}
	if t.at < len(t.steps) {
		return false, nil
	}
	if o.divide > 0 && len(t.acc) > 0 {
		reduce.Divide(o.dt, t.acc, o.divide)
	}
	o.c.busy, t.acc = false, nil
	return true, nil
}

// move makes half a step: sending, or receiving. What is sent is copied at once, so that it may be combined with what comes.
func (t *tree) move() bool {
	s, o := t.steps[t.at], &t.o
	if s.to >= 0 && !t.sent {
		if !t.lanes.post(o, s.to, t.acc) {
			return false
		}
		t.sent = true
	}
	if s.from >= 0 {
		p, _, ok := o.f.peek(o, inputs, s.from)
		if !ok {
			return false
		}
		if len(p) != len(t.acc) {
			o.reject(o.list[s.from], "a message of %d bytes where %d are due", len(p), len(t.acc))
			return false
		}
		t.combine(s, p)
		o.f.next(inputs, s.from)
		o.want[inputs][s.from]--
	}
	t.at, t.sent = t.at+1, false
	return true
}

// combine takes a message into what is there, in the order of members.
func (t *tree) combine(s step, p []byte) {
	o := &t.o
	switch {
	case len(p) == 0:
	case s.replace:
		copy(t.acc, p)
	case s.from < o.me:
		reduce.Reduce(o.op, o.dt, t.acc, p, t.acc)
	default:
		reduce.Reduce(o.op, o.dt, t.acc, t.acc, p)
	}
}
