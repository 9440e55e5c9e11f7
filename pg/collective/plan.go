package collective

import "larder/pg/reduce"

// plan chooses how an operation goes, and begins it. All members choose the same.
func (c *Comm) plan(a *Args) Op {
	c.busy = true
	seq, sig := a.Seq<<stageBits, a.signature(c.Me).pack()
	if c.inStages(a) {
		return c.stage(a, seq, sig)
	}
	if c.byTree(a) {
		return c.plant(a, seq, sig)
	}
	o := c.begin(c.flat, seq, sig, a)
	o.kind(a)
	o.begin()
	return o
}

// begin is the Comm's flow, without what the kind says. Its scratch memory is used again.
func (c *Comm) begin(f fabric, seq, sig uint64, a *Args) *flow {
	o := &c.flow
	*o = flow{c: c, f: f, seq: seq, sig: sig, dt: a.DType, op: a.Op, want: o.want, got: o.got, srcs: o.srcs, scratch: o.scratch}
	o.list, o.me = f.members()
	return o
}

// kind lays out what a says, among all members.
func (o *flow) kind(a *Args) {
	o.divide = 0
	if a.Op == reduce.Avg {
		o.divide = o.c.N
	}
	for pos, member := range o.list {
		if member == a.Root {
			o.root = pos
		}
	}
	switch a.Kind {
	case AllReduce:
		o.allReduce(a.Dst[0], a.Src[0])
	case Broadcast:
		o.broadcast(first(a.Dst), first(a.Src))
	case Reduce:
		o.reduceTo(first(a.Dst), a.Src[0])
	case AllGather:
		o.allGather(region{parts: a.Dst}, a.Src[0], len(a.Src[0]))
	case ReduceScatter:
		o.reduceScatter(a.Dst[0], region{parts: a.Src}, len(a.Dst[0]))
	case AllToAll:
		o.allToAll(region{parts: a.Dst}, region{parts: a.Src})
	case Gather:
		o.gather(region{parts: a.Dst}, a.Src[0])
	case Scatter:
		o.scatter(first(a.Dst), region{parts: a.Src})
	case Barrier:
		o.allGather(region{}, nil, 0)
	}
}

// first is the one buffer of a side, nil if it has none.
func first(list [][]byte) []byte {
	if len(list) == 0 {
		return nil
	}
	return list[0]
}

// segment is how long the segments of so many bytes for n members are. The last ones may be shorter or empty.
func segment(bytes, n int) int {
	return max((bytes+n*leastChunk-1)/(n*leastChunk), 1) * leastChunk
}

// allReduce: everybody reduces everything, or each its segment.
func (o *flow) allReduce(dst, src []byte) {
	n := len(o.list)
	most := o.c.Table.OneShot
	if !o.f.shares() {
		most = o.c.Table.LaneOneShot
	}
	if n == 1 || len(src)*(n-1) <= most {
		o.shape, o.long, o.src.whole, o.own = reduceAll, len(src), src, dst
		return
	}
	seg := segment(len(src), n)
	o.shape, o.long, o.src, o.out = reduceSegment, seg, region{whole: src, segment: seg}, region{whole: dst, segment: seg}
	o.own = cut(dst, o.me, seg)
}

// splits reports whether a broadcast or reduction of so many bytes is cut into segments. In a room a broadcast is written once
// anyway, and a reduction by the root alone copies less.
func (o *flow) splits(bytes int, reduce bool) bool {
	t := &o.c.Table
	if o.f.shares() {
		return reduce && len(o.list) >= t.SplitMembers && bytes >= t.Split
	}
	return len(o.list) > 2 && bytes >= t.Split
}

// reduceTo: the root reduces everything, or each its segment, which the root collects.
func (o *flow) reduceTo(dst, src []byte) {
	if o.me != o.root {
		dst = nil
	}
	if !o.splits(len(src), true) {
		o.shape, o.long, o.src.whole, o.own = reduceRoot, len(src), src, dst
		return
	}
	seg := segment(len(src), len(o.list))
	o.shape, o.long, o.src, o.out = reduceCollect, seg, region{whole: src, segment: seg}, region{whole: dst, segment: seg}
	if o.me == o.root {
		o.own = cut(dst, o.me, seg)
	} else {
		o.scratch = fit(o.scratch, len(cut(src, o.me, seg)))
		o.own = o.scratch
	}
}

// broadcast: the root sends everything to all, or to each its segment, which goes on to the rest.
func (o *flow) broadcast(dst, src []byte) {
	bytes := len(dst)
	if o.me == o.root {
		o.keep, o.keepTo, bytes = src, dst, len(src)
	}
	if !o.splits(bytes, false) {
		o.shape, o.long, o.src.whole, o.dst.whole = spread, bytes, src, dst
		return
	}
	seg := segment(bytes, len(o.list)-1)
	o.shape, o.long = spreadSegment, seg
	o.src, o.out = region{whole: src, segment: seg, skip: o.root + 1}, region{whole: dst, segment: seg, skip: o.root + 1}
	if o.me != o.root {
		o.own = o.out.of(o.me, o.list)
		o.dst.whole = o.own
	}
}

// allGather: parts of so many bytes, of which src may be a shorter one.
func (o *flow) allGather(dst region, src []byte, bytes int) {
	o.shape, o.long, o.src.whole, o.dst = gatherAll, bytes, src, dst
	if bytes > 0 {
		o.keep, o.keepTo = src, dst.of(o.me, o.list)
	}
}

// reduceScatter: parts of so many bytes, of which dst may be a shorter one.
func (o *flow) reduceScatter(dst []byte, src region, bytes int) {
	o.shape, o.long, o.src, o.own = reduceParts, bytes, src, dst
}

func (o *flow) gather(dst region, src []byte) {
	o.shape, o.long, o.src.whole = gatherRoot, len(src), src
	if o.me == o.root {
		o.dst, o.keep, o.keepTo = dst, src, dst.of(o.me, o.list)
	}
}

func (o *flow) scatter(dst []byte, src region) {
	o.shape, o.long, o.dst.whole = spreadParts, len(dst), dst
	if o.me == o.root {
		o.src, o.keep, o.keepTo = src, src.of(o.me, o.list), dst
	}
}

func (o *flow) allToAll(dst, src region) {
	o.shape, o.src, o.dst = exchange, src, dst
	o.keep, o.keepTo = src.of(o.me, o.list), dst.of(o.me, o.list)
	for k := range o.list {
		if k != o.me {
			o.long = max(o.long, len(src.of(k, o.list)))
		}
	}
}
