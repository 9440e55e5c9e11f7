package policy

func init() {
	Register("prefix-lru", func(_ Config, t Table) (Policy, error) {
		return &prefixLRU{t: t, leaves: NewQueue()}, nil
	})
}

// Values of Order.List in prefixLRU.
const (
	prefixOut   = iota // not held
	prefixLeaf         // in the queue of leaves
	prefixInner        // has children: counted, in no queue
)

// prefixLRU is LRU over the blocks that have no children, so that a block never
// leaves before those that continue it: a chain is eaten from its end, and what
// is left of it stays useful.
//
// A block whose last child has left becomes a leaf. Its exact place by recency
// is somewhere within the queue, and finding it would not be O(1). So it takes
// one of the two ends: the cold end if it was last used before that child
// was, which is the case when the child was the end of a chain walked from its
// start, and exact then when the child was evicted; the hot end if it was used
// after, as the stem of another request.
//
// Children count wherever they lie: a block whose child is pinned, leased or
// another owner's stays.
//
// Order.Aux is the low half of the stamp of the last use, since Stamp changes
// when a block becomes a leaf. Comparing halves is right for uses less than
// 2^31 stamps apart, and merely imprecise beyond.
type prefixLRU struct {
	Stateless

	t      Table
	leaves Queue
	inner  int
}

// usedAfter reports whether a was last used after b.
func usedAfter(a, b Order) bool { return int32(a.Aux-b.Aux) > 0 } //nolint:gosec // wraps around on purpose

// Add puts s at the hot end of the leaves, or counts it as inner when it has
// children already (it was pinned meanwhile).
func (p *prefixLRU) Add(s Slot) {
	stamp := p.t.NextStamp()
	o := Order{Stamp: stamp, Aux: uint32(stamp), List: prefixLeaf} //nolint:gosec // the low half is meant
	if p.t.Info(s).Children > 0 {
		o.List = prefixInner
		p.inner++
	}
	p.t.SetOrder(s, o)
	if o.List == prefixLeaf {
		p.leaves.PushHot(p.t, s)
	}
}

// Touch notes the use, and moves a leaf to the hot end.
func (p *prefixLRU) Touch(s Slot, _ uint32) {
	o := p.t.Order(s)
	o.Stamp = p.t.NextStamp()
	o.Aux = uint32(o.Stamp) //nolint:gosec // the low half is meant
	if o.List == prefixLeaf {
		p.leaves.Remove(p.t, s)
		p.leaves.PushHot(p.t, s)
	}
	p.t.SetOrder(s, o)
}

// Remove takes s out, whether a leaf or inner.
func (p *prefixLRU) Remove(s Slot) {
	o := p.t.Order(s)
	if o.List == prefixLeaf {
		p.leaves.Remove(p.t, s)
	} else {
		p.inner--
	}
	o.List = prefixOut
	p.t.SetOrder(s, o)
}

// Evict takes s out.
func (p *prefixLRU) Evict(s Slot) { p.Remove(s) }

// ChildAdded takes the parent out of the queue.
func (p *prefixLRU) ChildAdded(parent Slot) {
	o := p.t.Order(parent)
	if o.List != prefixLeaf {
		return
	}
	p.leaves.Remove(p.t, parent)
	p.inner++
	o.List = prefixInner
	p.t.SetOrder(parent, o)
}

// ChildGone queues the parent when that was its last child.
func (p *prefixLRU) ChildGone(parent Slot, child Order) {
	o := p.t.Order(parent)
	if o.List != prefixInner || p.t.Info(parent).Children > 0 {
		return
	}
	p.inner--
	o.List = prefixLeaf
	if usedAfter(o, child) {
		o.Stamp = p.t.NextStamp()
		p.leaves.PushHot(p.t, parent)
	} else {
		o.Stamp = p.t.ColdStamp()
		p.leaves.PushCold(p.t, parent)
	}
	p.t.SetOrder(parent, o)
}

// Victims offers the leaves from the cold end, and each parent at the place
// that it gets once all its children were taken. Entries with a child that
// stays are not offered.
func (p *prefixLRU) Victims(_ uint64, yield func(Slot) Verdict) {
	v := prefixWalk{leaf: p.leaves.Coldest()}
	for {
		var s Slot
		switch {
		case len(v.cold) > 0:
			s, v.cold = v.cold[len(v.cold)-1], v.cold[:len(v.cold)-1]
		case v.leaf != None:
			s, v.leaf = v.leaf, p.t.Links(v.leaf).Hotter
		case len(v.hot) > 0:
			s, v.hot = v.hot[0], v.hot[1:]
		default:
			return
		}
		switch yield(s) {
		case Take:
			p.release(&v, s)
		case Stop:
			return
		case Skip:
		}
	}
}

// prefixWalk is the state of one walk of Victims.
type prefixWalk struct {
	leaf Slot            // next of the real queue
	cold []Slot          // parents that became leaves at the cold end: a stack
	hot  []Slot          // those at the hot end: a queue
	left map[Slot]uint32 // children left, of parents that lost some but not all
}

// release notes that s was taken, and its parent as a leaf if it was the last
// child.
func (p *prefixLRU) release(v *prefixWalk, s Slot) {
	parent := p.t.Parent(s)
	if parent == None || p.t.Order(parent).List != prefixInner {
		return
	}
	n, seen := v.left[parent]
	if !seen {
		n = p.t.Info(parent).Children
	}
	if n > 1 {
		if v.left == nil {
			v.left = make(map[Slot]uint32)
		}
		v.left[parent] = n - 1
		return
	}
	if usedAfter(p.t.Order(parent), p.t.Order(s)) {
		v.hot = append(v.hot, parent)
	} else {
		v.cold = append(v.cold, parent)
	}
}

// Restore takes s back as the leaf or the inner block that it was.
func (p *prefixLRU) Restore(s Slot) {
	switch p.t.Order(s).List {
	case prefixLeaf:
		p.leaves.PushHot(p.t, s)
	case prefixInner:
		p.inner++
	}
}

// Len is the number of entries held, leaves and inner blocks.
func (p *prefixLRU) Len() int { return p.leaves.Len() + p.inner }
