package policy

import "fmt"

func init() {
	Register("s3fifo", func(cfg Config, t Table) (Policy, error) {
		limit := cfg.MaxGhosts
		if limit == 0 {
			limit = DefaultMaxGhosts
		}
		if limit > ghostsHardLimit {
			return nil, fmt.Errorf("max ghosts is %d: choose at most %d", limit, ghostsHardLimit)
		}
		p := &s3fifo{t: t, ghosts: newGhosts(), maxGhosts: uint64(limit)}
		p.queues[smallQueue] = scanned{Queue: NewQueue(), scan: None}
		p.queues[mainQueue] = scanned{Queue: NewQueue(), scan: None}
		return p, nil
	})
}

const (
	smallQueue = 0 // Order.List of entries on probation
	mainQueue  = 1 // Order.List of entries that were used again
	// smallShare is the small queue's part of all entries, 1/10 in the paper.
	smallShare = 10
	// s3MaxUses is where the counter of uses saturates, 3 in the paper.
	s3MaxUses = 3
	// promoteAbove is the count above which an entry leaves the small queue for
	// the main one, 1 in the paper.
	promoteAbove = 1
)

// s3fifo is S3-FIFO (Yang et al., SOSP 2023): a small queue that takes in what
// is new, a main queue for what was used at least twice while in the small one,
// and the ghosts, keys lately evicted from the small queue: an entry whose key
// is among them goes to the main queue at once. The main queue gives an entry
// one more round for each of its last uses, three at most.
//
// The paper's cache has a fixed size; here it is what the partition holds. The
// ghosts are as many as nine tenths of the entries, within Config.MaxGhosts.
// Entries that stay (leased) keep their places.
//
// Order.Aux is the count of uses, 0 to 3, since it came into its queue.
type s3fifo struct {
	t         Table
	queues    [2]scanned
	ghosts    ghosts
	maxGhosts uint64
	// spent counts the entries of the main queue without a round left.
	spent int
}

// scanned is a queue with a place below which nothing has earned another round,
// so that the evictions of a plan that skips many entries do not walk over them
// again and again. The place changes no outcome and is not persisted.
type scanned struct {
	Queue

	scan Slot // None: nothing is known
}

func (q *scanned) remove(t Table, s Slot) {
	if q.scan == s {
		q.scan = t.Links(s).Hotter
	}
	q.Remove(t, s)
}

// start is where to look for entries that have earned a round.
func (q *scanned) start() Slot {
	if q.scan == None {
		return q.Coldest()
	}
	return q.scan
}

func (p *s3fifo) push(s Slot, list uint8, uses uint32) {
	p.t.SetOrder(s, Order{Stamp: p.t.NextStamp(), Aux: uses, List: list})
	p.link(s, list, uses)
}

func (p *s3fifo) link(s Slot, list uint8, uses uint32) {
	p.queues[list].PushHot(p.t, s)
	if list == mainQueue && uses == 0 {
		p.spent++
	}
}

func (p *s3fifo) unlink(s Slot, o Order) {
	p.queues[o.List].remove(p.t, s)
	if o.List == mainQueue && o.Aux == 0 {
		p.spent--
	}
}

// Add puts s on probation, unless its key is a ghost or it was in the main
// queue before it was pinned.
func (p *s3fifo) Add(s Slot) {
	o := p.t.Order(s)
	if !p.ghosts.empty() && p.ghosts.take(p.t.KeyHash(s)) {
		o.List = mainQueue
	}
	p.push(s, o.List, o.Aux)
}

// Touch adds n to the count of uses, up to s3MaxUses, and moves nothing.
func (p *s3fifo) Touch(s Slot, n uint32) {
	o := p.t.Order(s)
	if o.Aux == s3MaxUses {
		return
	}
	if o.List == mainQueue && o.Aux == 0 {
		p.spent--
	}
	o.Aux += min(n, s3MaxUses-o.Aux)
	p.t.SetOrder(s, o)
	if q := &p.queues[o.List]; q.scan != None && p.t.Order(q.scan).Stamp > o.Stamp {
		q.scan = s // it lies below the place, where nothing was to be found
	}
}

// Remove takes s out, and leaves no ghost.
func (p *s3fifo) Remove(s Slot) { p.unlink(s, p.t.Order(s)) }

// Evict does what the paper's eviction does until s is the one to go. An entry
// used after it was chosen is evicted all the same.
func (p *s3fifo) Evict(s Slot) {
	n := p.Len()
	o := p.t.Order(s)
	if o.List == smallQueue {
		p.promoteBelow(s, o)
		p.unlink(s, p.t.Order(s))
		p.ghosts.push(p.t.KeyHash(s), min(p.maxGhosts, uint64(max(1, n-n/smallShare))))
		return
	}
	small := &p.queues[smallQueue]
	if fromSmall(small.Len(), n) {
		// The small queue's turn came first, and gave no victim.
		for x := small.Coldest(); x != None && p.t.Order(x).Aux > promoteAbove; x = small.Coldest() {
			p.promote(x)
		}
	}
	p.requeueBelow(s, o)
	p.unlink(s, p.t.Order(s))
}

// fromSmall says whether the next victim is looked for in the small queue first.
func fromSmall(small, all int) bool { return small > 0 && small*smallShare >= all }

// promote moves x from the small queue to the main one, its uses spent.
func (p *s3fifo) promote(x Slot) {
	p.unlink(x, p.t.Order(x))
	p.push(x, mainQueue, 0)
}

// promoteBelow promotes what has earned it among the entries colder than s.
func (p *s3fifo) promoteBelow(s Slot, o Order) {
	q := &p.queues[smallQueue]
	x := q.start()
	if p.t.Order(x).Stamp > o.Stamp {
		return
	}
	for x != s {
		hotter := p.t.Links(x).Hotter
		if p.t.Order(x).Aux > promoteAbove {
			p.promote(x)
		}
		x = hotter
	}
	q.scan = s
}

// requeueBelow sends entries of the main queue that are colder than s and have
// rounds left to its hot end. Where every entry has, s as well goes round until
// its own are spent.
func (p *s3fifo) requeueBelow(s Slot, o Order) {
	q := &p.queues[mainQueue]
	x := q.start()
	if p.t.Order(x).Stamp > o.Stamp {
		return
	}
	rounds := p.spent == 0
	for {
		xo := p.t.Order(x)
		if x == s && (xo.Aux == 0 || !rounds) {
			q.scan = s
			return
		}
		hotter := p.t.Links(x).Hotter
		if xo.Aux > 0 {
			p.unlink(x, xo)
			p.push(x, mainQueue, xo.Aux-1)
			if hotter == None {
				hotter = x
			}
		}
		x = hotter
	}
}

// Victims plays evictions forward without doing them. It remembers the entries
// that it passed over, which are as many as the evictions will move.
func (p *s3fifo) Victims(_ uint64, yield func(Slot) Verdict) {
	v := s3Walk{
		t: p.t, yield: yield,
		small: p.queues[smallQueue].Coldest(), main: p.queues[mainQueue].Coldest(),
		inSmall: p.queues[smallQueue].Len(), n: p.Len(),
	}
	for !v.stopped {
		if fromSmall(v.inSmall, v.n) && v.nextSmall() {
			continue
		}
		if !v.nextMain() && !v.nextSmall() {
			return
		}
	}
}

// s3Walk is the state of one walk of Victims.
type s3Walk struct {
	t           Table
	yield       func(Slot) Verdict
	small, main Slot     // next entries of the real queues
	requeued    []s3Pass // what the walk put behind the real main queue
	inSmall, n  int      // lengths as they would be by now
	stopped     bool
}

type s3Pass struct {
	slot Slot
	uses uint32
}

// offer yields s, and reports whether it was taken.
func (v *s3Walk) offer(s Slot) bool {
	switch v.yield(s) {
	case Take:
		v.n--
		return true
	case Stop:
		v.stopped = true
	case Skip:
	}
	return false
}

// nextSmall goes on in the small queue until an entry was offered, and reports
// whether one was.
func (v *s3Walk) nextSmall() bool {
	for v.small != None {
		s := v.small
		v.small = v.t.Links(s).Hotter
		if v.t.Order(s).Aux > promoteAbove {
			v.inSmall--
			v.requeued = append(v.requeued, s3Pass{s, 0})
			continue
		}
		if v.offer(s) {
			v.inSmall--
		}
		return true
	}
	return false
}

// nextMain goes on in the main queue until an entry was offered, and reports
// whether one was.
func (v *s3Walk) nextMain() bool {
	for {
		var x s3Pass
		switch {
		case v.main != None:
			x = s3Pass{v.main, v.t.Order(v.main).Aux}
			v.main = v.t.Links(v.main).Hotter
		case len(v.requeued) > 0:
			x, v.requeued = v.requeued[0], v.requeued[1:]
		default:
			return false
		}
		if x.uses == 0 {
			v.offer(x.slot)
			return true
		}
		v.requeued = append(v.requeued, s3Pass{x.slot, x.uses - 1})
	}
}

// ChildAdded does nothing.
func (*s3fifo) ChildAdded(Slot) {}

// ChildGone does nothing.
func (*s3fifo) ChildGone(Slot, Order) {}

// Restore puts s at the hot end of the queue that its Order names.
func (p *s3fifo) Restore(s Slot) {
	o := p.t.Order(s)
	p.link(s, o.List, o.Aux)
}

// RestoreState takes one page of ghosts back.
func (p *s3fifo) RestoreState(page uint32, data []byte) error {
	return p.ghosts.restore(page, data, p.maxGhosts)
}

// FlushState hands out the pages of ghosts that changed, or all.
func (p *s3fifo) FlushState(all bool, put func(page uint32, data []byte)) { p.ghosts.flush(all, put) }

// StateHash is that of the ghosts, which are all the state beyond Order.
func (p *s3fifo) StateHash() uint64 { return p.ghosts.stateHash() }

// Len is the number of entries held, in both queues.
func (p *s3fifo) Len() int { return p.queues[smallQueue].Len() + p.queues[mainQueue].Len() }
