package sched

import (
	"cmp"
	"slices"
	"time"
)

// decoding is what an instance decodes. Its sequences get a token at every step; how many steps there have been follows from
// the clock and from what a step is predicted to take.
type decoding struct {
	batch  int
	inputs int64         // tokens of the sequences' prompts
	steps  int64         // since the batch was empty, in stepParts of a step
	starts int64         // the sum over the sequences of the steps at their beginning
	at     time.Duration // up to which steps are counted

	running       []sequence
	coming        []sequence // requests that will be decoded here once they are prefilled
	pendingTokens int64      // of their prompts

	// What a report said beyond what is known here, for reportLife.
	otherBatch  int
	otherTokens int64
	reportedAt  time.Duration

	classes   []int32       // how many sequences each class has
	strictest time.Duration // the least limit of TBT among them; 0: none has one
}

const (
	stepParts = 1024
	// reportLife is how long a report of what others have an instance decode is believed: three are missed at the usual ten
	// seconds between them.
	reportLife = 30 * time.Second
)

// advance counts the steps up to now.
func (x *decoding) advance(now time.Duration, m *Model) {
	if now-x.reportedAt > reportLife {
		x.otherBatch, x.otherTokens = 0, 0
	}
	if x.batch == 0 || now <= x.at {
		x.at = max(x.at, now)
		return
	}
	batch, tokens := x.load()
	step := m.step(batch, tokens) * float64(time.Second)
	if step <= 0 {
		x.at = now
		return
	}
	parts := int64(float64(now-x.at) / step * stepParts)
	x.steps += parts
	x.at = min(now, x.at+time.Duration(float64(parts)*step/stepParts)) // the rest counts next time
}

// tokens is the KV of the sequences that are known here.
func (x *decoding) tokens() int64 { return x.inputs + (int64(x.batch)*x.steps-x.starts)/stepParts }

// load is the batch and its KV, what was reported with it.
func (x *decoding) load() (batch, tokens float64) {
	return float64(max(0, x.batch+x.otherBatch)), float64(max(0, x.tokens()+x.otherTokens))
}

// expect and unexpect change what is to come.
func (x *decoding) expect(b *book, slot int32, due time.Duration) {
	x.coming = b.list(x.coming, slot, due, 0)
	x.pendingTokens += int64(b.slots[slot].input)
}

func (x *decoding) unexpect(b *book, slot int32) {
	x.coming, _ = b.unlist(x.coming, slot)
	x.pendingTokens -= int64(b.slots[slot].input)
}

// join and leave change the batch; advance has been called.
func (x *decoding) join(b *book, slot int32, now time.Duration, limits []Limits) {
	r := &b.slots[slot]
	x.running = b.list(x.running, slot, now, x.steps)
	x.batch++
	x.inputs += int64(r.input)
	x.starts += x.steps
	if x.classes == nil {
		x.classes = make([]int32, len(limits))
	}
	if x.classes[r.class]++; x.classes[r.class] == 1 {
		x.limit(limits)
	}
}

func (x *decoding) leave(b *book, slot int32, limits []Limits) {
	r := &b.slots[slot]
	var q sequence
	x.running, q = b.unlist(x.running, slot)
	x.batch--
	x.inputs -= int64(r.input)
	x.starts -= q.steps
	if x.batch == 0 {
		x.steps, x.starts = 0, 0
	}
	if x.classes[r.class]--; x.classes[r.class] == 0 {
		x.limit(limits)
	}
}

func (x *decoding) limit(limits []Limits) {
	x.strictest = 0
	for i, n := range x.classes {
		if n > 0 {
			x.strictest = stricter(x.strictest, limits[i].TBTSLO)
		}
	}
}

// stricter is the lesser of two limits; 0 is none.
func stricter(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// demand is what a request asks of a decode instance.
type demand struct {
	input, need int           // tokens of KV at first, and at its end
	limit       time.Duration // of TBT; 0: none
	share       float64       // of memory and batch that its priority may fill
}

// over is TBT over the limits: of the request, and of those whose steps it would make longer.
func (s *Scheduler) over(step float64, limit time.Duration) float64 {
	if limit == 0 {
		return 0
	}
	return step * s.model.tailOf(s.cfg.TBTLimit) / limit.Seconds()
}

// room reports whether an instance has place for a request beside a batch.
func (x *Instance) room(batch, tokens float64, q *demand) bool {
	return (x.MaxBatch == 0 || batch+1 <= float64(x.MaxBatch)*q.share) &&
		(x.KVCapacity == 0 || tokens+float64(q.need) <= float64(x.KVCapacity)*q.share)
}

// verdict is what decoding a request would be like.
type verdict struct {
	step float64 // seconds
	over float64 // TBT over the limit
	why  Reason  // that speaks against it
}

// judge tells what decoding a request beside a batch would be like, and what speaks against it.
func (s *Scheduler) judge(x *Instance, strictest time.Duration, batch, tokens float64, q *demand, slow Reason) verdict {
	v := verdict{step: s.model.step(batch+1, tokens+float64(q.input))}
	v.over = s.over(v.step, stricter(q.limit, strictest))
	switch {
	case !x.room(batch, tokens, q) && batch > 0: // one that is larger than all memory can be had alone
		v.why = ReasonFull
	case v.over > 1:
		v.why = slow
	}
	return v
}

// fits is what decoding a request at an instance would be like now.
func (s *Scheduler) fits(x *instance, q *demand) verdict {
	batch, tokens := x.decoding.load()
	return s.judge(&x.Instance, x.decoding.strictest, batch, tokens, q, ReasonTBT)
}

// choice is a decode instance for a request, and the batch that it is expected to find there.
type choice struct {
	instance      InstanceID
	cost          float64 // predicted step, seconds
	batch, tokens float64
}

// candidates is how many instances are looked at closely, sequence by sequence, so that the cost does not grow with all. In
// simulations of 8 decode instances 4 candidates lost half of the gain: what is busy now may be free by then.
const candidates = 16

// chooseDecode is SelectDecodingInstance: the one with the least predicted TBT, those counted that will be decoded there
// once they are prefilled, or else requests that come while none has been prefilled would all go to the same. If decode load
// is predicted, the few best of those are compared by what is foreseen.
//
// Which one has room just now is not looked at: by the time that the request is there another one will, and whoever comes
// meanwhile would crowd on it.
func (s *Scheduler) chooseDecode(now, by time.Duration, q *demand) (choice, Reason) {
	var best [candidates]choice
	n, short := 0, false
	for i := range s.instances {
		x, id := &s.instances[i], InstanceID(i)
		if !s.is(id, Decode) {
			continue
		}
		if x.KVCapacity > 0 && q.input > x.KVCapacity {
			short = true
			continue
		}
		c := choice{instance: id}
		c.batch, c.tokens = x.decoding.load()
		c.cost = s.model.step(c.batch+float64(len(x.decoding.coming))+1, c.tokens+float64(x.decoding.pendingTokens)+float64(q.input))
		n = rank(&best, n, c)
	}
	switch {
	case n == 0 && short:
		return choice{instance: NoInstance}, ReasonTooLong
	case n == 0:
		return choice{instance: NoInstance}, ReasonNoDecode
	case s.cfg.Overload == Predictive:
		return s.foreseen(now, by, q, best[:n]), Accepted
	}
	return best[0], Accepted
}

// rank puts a choice where it belongs among the best n. It returns how many they are then.
func rank(best *[candidates]choice, n int, c choice) int {
	if n == candidates && c.cost >= best[n-1].cost {
		return n
	}
	n = min(n+1, candidates)
	i := n - 1
	for ; i > 0 && c.cost < best[i-1].cost; i-- {
		best[i] = best[i-1]
	}
	best[i] = c
	return n
}

// foreseen is the choice for which the least is foreseen.
func (s *Scheduler) foreseen(now, by time.Duration, q *demand, all []choice) choice {
	for i := range all {
		c := &all[i]
		c.batch, c.tokens = s.foresee(now, by, &s.instances[c.instance].decoding)
		c.cost = s.model.step(c.batch+1, c.tokens+float64(q.input))
	}
	return slices.MinFunc(all, func(a, b choice) int { return cmp.Compare(a.cost, b.cost) })
}

// advanceDecoding brings all decode instances up to date.
func (s *Scheduler) advanceDecoding(now time.Duration) {
	for i := range s.instances {
		if s.instances[i].live {
			s.instances[i].decoding.advance(now, s.model)
		}
	}
}
