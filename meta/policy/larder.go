package policy

import (
	"fmt"
	"math/bits"
)

func init() {
	Register("larder", func(cfg Config, t Table) (Policy, error) {
		limit := cfg.MaxGhosts
		if limit == 0 {
			limit = DefaultMaxGhosts
		}
		if limit > ghostsHardLimit {
			return nil, fmt.Errorf("max ghosts is %d: choose at most %d", limit, ghostsHardLimit)
		}
		p := &larder{t: t, window: NewQueue(), past: newHistory(uint64(limit))}
		p.patience, p.studied = patienceLeast, 2*larderClasses
		p.flushed = p.header()
		for c := range p.queues {
			p.queues[c] = NewQueue()
		}
		return p, nil
	})
}

// Values of Order.List in larder.
const (
	larderSettled = iota // in the queue of its class
	larderWindow         // among the latest uses
)

// Order.Aux in larder. An entry that was evicted and came back has its uses
// before, as long as they are remembered.
const (
	auxUses       = 15     // uses after the first, saturating
	auxInner      = 1 << 4 // it has been continued
	auxLate       = 1 << 5 // between its last two uses lay more than as many as there are entries
	auxSampled    = 1 << 6 // its uses are in the history
	auxChainShift = 7      // uses of what it belongs to, saturating at auxUses
	auxChain      = auxUses << auxChainShift
)

const (
	// larderClasses: never used again and the start of something; never used again
	// and the continuation of something that was; used again once or twice; more
	// often and the last time soon; that and late. Each of an entry that is the end
	// of its request, and of one that is not.
	larderClasses = 10
	// windowShare is the part of all entries that are in the window: those used
	// last, whose class is not known before what continues them has come.
	windowShare = 64
	// branches is how often a block is continued before what continues it
	// inherits less than all of its uses: a conversation leaves the partial last
	// block of the turn before behind, and goes on.
	branches = 2
)

// larder keeps what is most likely to be used soon, by what it has learned of
// entries alike: docs/POLICIES.md has the reasons.
//
// Entries are of few classes, each a queue by recency. For each class it learns
// how likely an entry that was not used for so long is used within so much more
// (see model), from a history of uses that reaches far beyond what is held (see
// history). From that follows, for every class and age, the best rate of hits
// that keeping an entry for some time yields. The entry with the lowest is
// evicted. Only the two ends of each queue are looked at: the rate rises to the
// usual time between two uses and falls after, so that the lowest is at an end.
//
// What would have been hit by LRU is known from the same history. Where larder
// falls behind, as after a sudden change of all that is used, it does what LRU
// does for a while.
type larder struct {
	t      Table
	queues [larderClasses]Queue
	window Queue
	past   history
	model  model
	n      int
	now    int64 // stamp of the latest use
	full   bool  // something was evicted: what is hit depends on the policy

	flushed [headerNumbers]uint64 // the header as it was written
	studied uint64                // of the lesson under way: classes weighed, and then faded
	duel
}

// duel compares larder with LRU.
type duel struct {
	judged   uint64 // number of the history's next use when they were last compared
	ours     uint64 // hits since then
	lrus     uint64
	deficit  uint64 // hits that LRU is ahead, none when it fell behind
	noise    uint64 // since it is ahead: the sum of the squares of what they were apart
	yielding uint64 // comparisons for which LRU still decides
	patience uint64 // for how many it will the next time
}

const (
	duelShare     = 8   // comparisons are an eighth of the entries' number of uses apart
	duelLeast     = 128 // and at least so many
	deficitShare  = 32  // LRU decides when it is ahead by a thirty-second of the entries
	deficitLeast  = 16  // and more than that
	deficitNoise  = 3   // and by what chance would bring about in three times as many comparisons
	noiseMost     = 1 << 60
	patienceLeast = 16
	patienceMost  = 128
)

func larderClass(aux uint32) int {
	uses := aux & auxUses
	c := uint32(0)
	switch {
	case uses > 2:
		c = 3 + aux&auxLate/auxLate
	case uses > 0:
		c = 2
	case aux&auxChain != 0:
		c = 1
	}
	return int(2*c + aux&auxInner/auxInner)
}

// used is aux after n more uses, the last one ago.
func (p *larder) used(aux, n uint32, ago int64) uint32 {
	uses := min(aux&auxUses+min(n, auxUses), auxUses)
	chain := max(aux&auxChain>>auxChainShift, uses)
	aux = aux&(auxInner|auxSampled) | uses | chain<<auxChainShift
	if ago > int64(p.n) {
		aux |= auxLate
	}
	return aux
}

// inherited is the aux of a new entry: what continues something used often is
// used often, unless it is but one of many continuations.
func (p *larder) inherited(s Slot) uint32 {
	parent := p.t.Parent(s)
	if parent == None {
		return 0
	}
	chain := p.t.Order(parent).Aux & auxChain >> auxChainShift
	chain = min(chain, branches*chain/(1+min(p.t.Info(parent).Children, 1<<16)))
	return chain << auxChainShift
}

// Add takes in s as used now. One that was pinned goes on as what it was.
func (p *larder) Add(s Slot) {
	o := p.t.Order(s)
	p.n++
	p.now = p.t.NextStamp()
	if o.Stamp == 0 {
		o.Aux = p.inherited(s)
		if key := p.t.KeyHash(s); p.past.samples(key) {
			if number, found := p.past.find(key); found {
				r := p.past.cell(number)
				o.Aux = p.used(o.Aux|r.uses(), 1, p.now-r.stamp())
			}
			o.Aux |= auxSampled
			p.note(key, o.Aux, false)
		}
	}
	p.push(s, o.Aux)
}

// Touch notes the uses and puts s into the window.
func (p *larder) Touch(s Slot, n uint32) {
	o := p.t.Order(s)
	p.pull(s, o)
	p.now = p.t.NextStamp()
	aux := p.used(o.Aux, n, p.now-o.Stamp)
	if aux&auxSampled != 0 {
		if key := p.t.KeyHash(s); p.past.samples(key) {
			p.note(key, aux, true)
		} else {
			aux &^= auxSampled
		}
	}
	p.push(s, aux)
}

// push puts s, which is in no queue, into the window, and what has become too
// old for that into the queue of its class. Both take it at their hot ends: all
// uses pass through the window.
func (p *larder) push(s Slot, aux uint32) {
	p.t.SetOrder(s, Order{Stamp: p.now, Aux: aux, List: larderWindow})
	p.window.PushHot(p.t, s)
	for p.window.Len() > max(1, p.n/windowShare) {
		x := p.window.Coldest()
		p.window.Remove(p.t, x)
		o := p.t.Order(x)
		o.List = larderSettled
		p.t.SetOrder(x, o)
		p.queues[larderClass(o.Aux)].PushHot(p.t, x)
	}
}

func (p *larder) pull(s Slot, o Order) {
	if o.List == larderWindow {
		p.window.Remove(p.t, s)
	} else {
		p.queues[larderClass(o.Aux)].Remove(p.t, s)
	}
}

// Remove takes s out. The history keeps what it knows.
func (p *larder) Remove(s Slot) {
	p.n--
	p.pull(s, p.t.Order(s))
}

// Evict takes s out.
func (p *larder) Evict(s Slot) {
	p.full = true
	p.Remove(s)
}

// ChildAdded makes the parent an inner block. That it was continued is a use,
// unless it was used just now.
func (p *larder) ChildAdded(parent Slot) {
	o := p.t.Order(parent)
	if o.Aux&auxInner != 0 {
		return
	}
	if o.List == larderWindow {
		o.Aux |= auxInner
		p.t.SetOrder(parent, o)
		if o.Aux&auxSampled != 0 {
			p.past.reclass(p.t.KeyHash(parent), larderClass(o.Aux))
		}
		return
	}
	p.pull(parent, o)
	o.Aux |= auxInner
	p.now = p.t.NextStamp()
	if o.Aux&auxSampled != 0 {
		if key := p.t.KeyHash(parent); p.past.samples(key) {
			p.note(key, o.Aux, true)
		}
	}
	p.push(parent, o.Aux)
}

// ChildGone does nothing: that it was continued stays true.
func (*larder) ChildGone(Slot, Order) {}

// note enters a use of a sampled key into the history, with what it tells.
func (p *larder) note(key uint64, aux uint32, hit bool) {
	h := &p.past
	if number, found := h.find(key); found {
		r := h.cell(number)
		p.model.end(r.class(), p.now-r.stamp(), true)
		if p.full && !h.thinning {
			if number >= h.lru {
				p.lrus++
			}
			if hit {
				p.ours++
			}
		}
	}
	h.push(key, packRecord(p.now, larderClass(aux), aux&auxUses))
	held := uint64(p.n) >> h.shift //nolint:gosec // not negative
	for k := 0; k < forgetStep && h.next-h.first > h.span(held); k++ {
		if r, last := h.forget(); last {
			p.model.end(r.class(), p.now-r.stamp(), false)
		}
	}
	h.follow(held)
	if h.next-p.judged >= max(duelLeast, held/duelShare) {
		p.judge(held)
		p.judged = h.next
	}
	p.study(held)
}

// study does a part of the lesson under way, or begins one if there is enough
// new: it counts what waits in the history, a few uses at a time, then works out
// the rates of one class after the other, and then lets fade what was counted.
func (p *larder) study(held uint64) {
	switch h := &p.past; {
	case h.swept < h.lesson:
		if h.sweep(func(r *record) { p.model.wait(r.class(), p.now-r.stamp()) }) {
			p.studied = 0
		}
	case p.studied < larderClasses:
		p.model.weigh(int(p.studied))
		p.studied++
	case p.studied < 2*larderClasses:
		p.model.fade(int(p.studied - larderClasses))
		p.studied++
	case h.due():
		if h.begin(held) {
			p.model.halve()
		}
	}
}

// judge decides who decides. LRU's lead is summed up, as one that lasts is no
// chance: hits come by the request, so that a few of them make a lead that means
// nothing. A cache that LRU takes over needs time to become LRU's.
func (d *duel) judge(held uint64) {
	ours, lrus := d.ours, d.lrus
	d.ours, d.lrus = 0, 0
	if d.yielding > 0 {
		d.yielding--
		return
	}
	d.deficit += lrus
	d.deficit -= min(d.deficit, ours)
	apart := max(ours, lrus) - min(ours, lrus)
	if d.noise = min(d.noise+apart*apart, noiseMost); d.deficit == 0 {
		d.noise = 0
	}
	switch {
	case d.deficit > held/deficitShare+deficitLeast && d.deficit*d.deficit > deficitNoise*d.noise:
		d.yielding, d.deficit, d.noise = d.patience, 0, 0
		d.patience = min(2*d.patience, patienceMost)
	case d.deficit == 0 && d.patience > patienceLeast:
		d.patience--
	}
}

// worth is an entry and what keeping it would yield.
type worth struct {
	slot  Slot
	stamp int64
	rate  uint64
}

func (p *larder) worth(class int, s Slot) worth {
	stamp := p.t.Order(s).Stamp
	w := worth{slot: s, stamp: stamp}
	if p.yielding == 0 {
		w.rate = p.model.rate(class, p.now-stamp)
	}
	return w
}

// Victims offers, again and again, the least worth of the entries at both ends
// of each queue; among equals, the one used longest ago. The window comes last.
func (p *larder) Victims(_ uint64, yield func(Slot) Verdict) {
	var cold, hot [larderClasses]worth
	var left [larderClasses]int
	for c := range p.queues {
		if left[c] = p.queues[c].Len(); left[c] > 0 {
			cold[c], hot[c] = p.worth(c, p.queues[c].Coldest()), p.worth(c, p.queues[c].Hottest())
		}
	}
	for {
		best, at := (*worth)(nil), 0
		for c := range left {
			if left[c] == 0 {
				continue
			}
			if best == nil || cold[c].before(best) {
				best, at = &cold[c], c
			}
			if hot[c].before(best) {
				best, at = &hot[c], c
			}
		}
		if best == nil {
			p.window.Victims(p.t, yield)
			return
		}
		s := best.slot
		if left[at]--; left[at] > 0 {
			next := p.t.Links(s).Hotter
			if best == &hot[at] {
				next = p.t.Links(s).Colder
			}
			*best = p.worth(at, next)
		}
		if yield(s) == Stop {
			return
		}
	}
}

func (w *worth) before(x *worth) bool {
	return w.rate < x.rate || w.rate == x.rate && w.stamp < x.stamp
}

// Restore takes s back into the window or the queue of its class.
func (p *larder) Restore(s Slot) {
	p.n++
	o := p.t.Order(s)
	if o.List == larderWindow {
		p.window.PushHot(p.t, s)
	} else {
		p.queues[larderClass(o.Aux)].PushHot(p.t, s)
	}
}

// Len is the number of entries held.
func (p *larder) Len() int { return p.n }

const (
	ageSteps   = 2  // steps of age to a doubling
	ageFirst   = 4  // ages below 1<<ageFirst are one step
	ageBits    = 26 // and those above 1<<ageBits another
	ages       = ageSteps*(ageBits-ageFirst) + 2
	weightBits = 8 // an event weighs 1<<weightBits, so that it can fade
	weight     = 1 << weightBits
	fadeBits   = 4  // of what was counted, a sixteenth fades with each lesson
	priorUses  = 8  // what is not known yet counts as so many events
	wholeBits  = 24 // a chance of 1
	whole      = 1 << wholeBits
	rateBits   = 39      // a rate of 1: chances shifted by it fit 64 bits
	maxCount   = 1 << 38 // far above what events can add up to, and shifted by wholeBits below 2^64
)

// model is what was learned of each class: how often an entry that reached an
// age since its use was used again at that age.
//
// All is in whole numbers, so that no machine rounds otherwise than another.
type model struct {
	classes [larderClasses]lessons
	hash    uint64 // the sum of all numbers, each times one of its own
	dirty   uint32 // bit c: class c is to be written
}

type lessons struct {
	returns [ages]uint64 // used again at that age
	ends    [ages]uint64 // that, and last seen at that age
	waits   [ages]uint64 // in the history at that age, as far as the lesson under way has come
	rates   [ages]uint64 // what follows, at the last lesson
}

// cells are the numbers of a class, in the order in which they are written.
func (l *lessons) cells() [4]*[ages]uint64 {
	return [4]*[ages]uint64{&l.returns, &l.ends, &l.waits, &l.rates}
}

// ageOf is the step of an age in stamps.
func ageOf(d int64) int {
	if d < 1<<ageFirst {
		return 0
	}
	log := bits.Len64(uint64(d)) - 1
	return min(1+ageSteps*(log-ageFirst)+int(d>>(log-1)&1), ages-1)
}

// ageAt is the least age of a step.
func ageAt(step int) uint64 {
	if step == 0 {
		return 0
	}
	step--
	return uint64(ageSteps+step%ageSteps) << (step/ageSteps + ageFirst - 1)
}

func ageWidth(step int) uint64 { return ageAt(step+1) - ageAt(step) }

// set changes one number of a class, the i-th of its kind.
func (m *model) set(class, kind, i int, cell *uint64, v uint64) {
	if v != *cell {
		m.hash += (v - *cell) * (mix64(uint64((class*4+kind)*ages+i)) | 1) //nolint:gosec // not negative
		*cell = v
		m.dirty |= 1 << class
	}
}

// end counts an entry of a class that was used again at an age, or was
// forgotten without.
func (m *model) end(class int, age int64, returned bool) {
	l, step := &m.classes[class], ageOf(age)
	if returned {
		m.set(class, 0, step, &l.returns[step], l.returns[step]+weight)
	}
	m.set(class, 1, step, &l.ends[step], l.ends[step]+weight)
}

// wait counts an entry of a class that was not used again yet.
func (m *model) wait(class int, age int64) {
	l, step := &m.classes[class], ageOf(age)
	m.set(class, 2, step, &l.waits[step], l.waits[step]+weight)
}

// halve is for a history that from now on holds half of the keys.
func (m *model) halve() {
	for c := range m.classes {
		l := &m.classes[c]
		for i := range ages {
			m.set(c, 0, i, &l.returns[i], l.returns[i]/2)
			m.set(c, 1, i, &l.ends[i], l.ends[i]/2)
		}
	}
}

// fade lets what was counted of a class fade, at the end of a lesson.
func (m *model) fade(class int) {
	l := &m.classes[class]
	for i := range ages {
		m.set(class, 0, i, &l.returns[i], l.returns[i]-l.returns[i]>>fadeBits)
		m.set(class, 1, i, &l.ends[i], l.ends[i]-l.ends[i]>>fadeBits)
		m.set(class, 2, i, &l.waits[i], 0)
	}
}

// rate is what keeping an entry yields at best.
func (m *model) rate(class int, age int64) uint64 { return m.classes[class].rates[ageOf(age)] }

// prior is the chance at each age where nothing is known: such that what was not
// used for twice as long is half as likely to be used.
var prior = func() (p [ages]uint64) {
	for i := range p {
		p[i] = whole * ageWidth(i) / (4 * ageAt(i+1))
	}
	return p
}()

// weigh works out the rates of a class from what was counted. A class of which
// little is known is taken to be like all.
func (m *model) weigh(class int) {
	var all, chances, returns, ends, rates [ages]uint64
	for c := range m.classes {
		l := &m.classes[c]
		for i := range ages {
			returns[i] += l.returns[i]
			ends[i] += l.ends[i] + l.waits[i]
		}
	}
	hazard(&all, &returns, &ends, &prior)
	l := &m.classes[class]
	for i := range ages {
		ends[i] = l.ends[i] + l.waits[i]
	}
	hazard(&chances, &l.returns, &ends, &all)
	indices(&rates, &chances)
	for i := range ages {
		m.set(class, 3, i, &l.rates[i], rates[i])
	}
}

// hazard estimates the chance that what reached an age is used again at it. Of
// those last seen at it, half are taken to have been there for all of it.
func hazard(out, returns, ends, prior *[ages]uint64) {
	older := uint64(0)
	for i := ages - 1; i >= 0; i-- {
		reached := older + returns[i] + (ends[i]-returns[i])/2
		out[i] = (returns[i]*whole + priorUses*weight*prior[i]) / (reached + priorUses*weight)
		older += ends[i]
	}
}

// stretch is some ages on end: of entries that reach the first of them, the
// chances to be used within and to be left after all, and the time spent.
type stretch struct{ hits, alive, spent, rate uint64 }

// then is a stretch followed by another.
func (a stretch) then(b *stretch) stretch {
	a.hits += part(a.alive, b.hits)
	a.spent += part(a.alive, b.spent)
	a.alive = part(a.alive, b.alive)
	a.rate = a.hits << rateBits / a.spent
	return a
}

// part is a chance of a number.
func part(chance, n uint64) uint64 {
	hi, lo := bits.Mul64(chance, n)
	return hi<<(64-wholeBits) | lo>>wholeBits
}

// indices works out for each age the highest rate of hits that keeping an entry
// until it is used, or at most for some time, yields on average: the chance of a
// use by the time spent. (It is the index of Gittins for the question which of
// many to keep: optimal for entries that return by chance, each for itself.)
//
// From the oldest age on, one that is worth less than what follows is taken
// together with it: keeping pays for the sake of that.
func indices(rates, chances *[ages]uint64) {
	var later [ages]stretch
	n := 0
	for i := ages - 1; i >= 0; i-- {
		hit := chances[i]
		s := stretch{hits: hit, alive: whole - hit, spent: (whole - hit/2) * ageWidth(i)}
		s.rate = s.hits << rateBits / s.spent
		for ; n > 0 && later[n-1].rate > s.rate; n-- {
			s = s.then(&later[n-1])
		}
		rates[i] = s.rate
		later[n] = s
		n++
	}
}
