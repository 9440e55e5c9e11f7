package policy

// Queue is a list of entries from coldest to hottest. Its links live in the
// table, so it holds no memory per entry. The zero Queue is not usable: make
// one with NewQueue.
//
// Invariant: Order.Stamp rises strictly from Coldest to Hottest.
type Queue struct {
	coldest, hottest Slot
	n                int
}

// NewQueue returns an empty queue.
func NewQueue() Queue { return Queue{coldest: None, hottest: None} }

// Len is the number of entries in the queue.
func (q *Queue) Len() int { return q.n }

// Coldest is the entry at the cold end, None when the queue is empty.
func (q *Queue) Coldest() Slot { return q.coldest }

// Hottest is the entry at the hot end, None when the queue is empty.
func (q *Queue) Hottest() Slot { return q.hottest }

// PushHot links s at the hot end. Its Order must already carry a stamp above
// all in the queue.
func (q *Queue) PushHot(t Table, s Slot) {
	*t.Links(s) = Links{Colder: q.hottest, Hotter: None}
	if q.hottest == None {
		q.coldest = s
	} else {
		t.Links(q.hottest).Hotter = s
	}
	q.hottest = s
	q.n++
}

// PushCold links s at the cold end. Its Order must already carry a stamp below
// all in the queue.
func (q *Queue) PushCold(t Table, s Slot) {
	*t.Links(s) = Links{Colder: None, Hotter: q.coldest}
	if q.coldest == None {
		q.hottest = s
	} else {
		t.Links(q.coldest).Colder = s
	}
	q.coldest = s
	q.n++
}

// Remove unlinks s, which must be in the queue.
func (q *Queue) Remove(t Table, s Slot) {
	l := *t.Links(s)
	if l.Colder == None {
		q.coldest = l.Hotter
	} else {
		t.Links(l.Colder).Hotter = l.Hotter
	}
	if l.Hotter == None {
		q.hottest = l.Colder
	} else {
		t.Links(l.Hotter).Colder = l.Colder
	}
	q.n--
}

// Victims offers the queue from its cold end, and reports whether it came to
// the hot end without a Stop.
func (q *Queue) Victims(t Table, yield func(Slot) Verdict) bool {
	for s := q.coldest; s != None; s = t.Links(s).Hotter {
		if yield(s) == Stop {
			return false
		}
	}
	return true
}

// Stateless is the part of a Policy that most do without: embed it for a
// policy that keeps nothing beyond Order and does not care about prefixes.
type Stateless struct{}

// ChildAdded does nothing.
func (Stateless) ChildAdded(Slot) {}

// ChildGone does nothing.
func (Stateless) ChildGone(Slot, Order) {}

// RestoreState refuses every page: there is no state.
func (Stateless) RestoreState(page uint32, _ []byte) error { return errPage(page) }

// FlushState writes nothing.
func (Stateless) FlushState(bool, func(uint32, []byte)) {}

// StateHash is always 0.
func (Stateless) StateHash() uint64 { return 0 }

// Base is a complete policy of one queue: entries come in at the hot end,
// nothing moves them, and they leave from the cold end (first in, first out).
// Embed it and override what differs.
type Base struct {
	Stateless

	T Table
	Q Queue
}

// NewBase returns an empty Base over t.
func NewBase(t Table) Base { return Base{T: t, Q: NewQueue()} }

// Add puts s at the hot end.
func (b *Base) Add(s Slot) { b.PushHot(s, 0) }

// Touch does nothing.
func (*Base) Touch(Slot, uint32) {}

// Remove takes s out.
func (b *Base) Remove(s Slot) { b.Q.Remove(b.T, s) }

// Evict takes s out.
func (b *Base) Evict(s Slot) { b.Q.Remove(b.T, s) }

// Victims offers the queue from its cold end.
func (b *Base) Victims(_ uint64, yield func(Slot) Verdict) { b.Q.Victims(b.T, yield) }

// Restore puts s, whose Order is there already, at the hot end.
func (b *Base) Restore(s Slot) { b.Q.PushHot(b.T, s) }

// Len is the number of entries held.
func (b *Base) Len() int { return b.Q.Len() }

// PushHot gives s, which is in no queue, a new stamp and aux and links it at
// the hot end.
func (b *Base) PushHot(s Slot, aux uint32) {
	b.T.SetOrder(s, Order{Stamp: b.T.NextStamp(), Aux: aux})
	b.Q.PushHot(b.T, s)
}

// MoveHot moves s, which is in the queue, to its hot end. An entry that is
// there already keeps its stamp, which saves a write.
func (b *Base) MoveHot(s Slot, aux uint32) {
	if b.Q.Hottest() == s && b.T.Order(s).Aux == aux {
		return
	}
	b.Q.Remove(b.T, s)
	b.PushHot(s, aux)
}
