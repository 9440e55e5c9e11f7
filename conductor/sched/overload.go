package sched

import "time"

// headroomWindow is how long a priority is kept room for after it has asked last: a pause between two requests of a user is
// no end of them, and an hour without any should not cost the others a tenth of all.
const headroomWindow = time.Minute

// share is how much of every limit a request may use: each priority above its own that has asked lately has a part of it.
// When load grows, the lowest priority is the first that finds its limit reached, and what is then served less is its own:
// nothing that was accepted is taken back, which would throw prefills away.
func (s *Scheduler) share(now time.Duration, priority int) float64 {
	s.asked[priority] = now + 1 // 0: never
	share := 1.0
	for p := priority + 1; p < priorities; p++ {
		if at := s.asked[p]; at > 0 && now-at < headroomWindow {
			share *= 1 - s.cfg.Headroom
		}
	}
	return share
}

// lessen is limits of which only a share may be used.
func lessen(l Limits, share float64) Limits {
	l.TTFTSLO = time.Duration(float64(l.TTFTSLO) * share)
	l.TBTSLO = time.Duration(float64(l.TBTSLO) * share)
	return l
}

// decodeLoad is what overload control says before prefill of a request that would be decoded at c: nothing in mode None, else
// what speaks against it.
func (s *Scheduler) decodeLoad(now, prefilled time.Duration, q *demand, c *choice) verdict {
	x := &s.instances[c.instance]
	switch s.cfg.Overload {
	case Early:
		return s.fits(x, q)
	case Predictive:
		if v := s.expectedLoad(now, prefilled, q); v.why != Accepted {
			return v
		}
		return s.judge(&x.Instance, x.decoding.strictest, c.batch, c.tokens, q, ReasonLoad)
	default:
		v := s.fits(x, q)
		v.why = Accepted
		return v
	}
}

// expectedLoad is the system-level prediction of the arXiv report, section 4.2.6.3, for the time at which the request's
// prefill would be through: what is prefilled by then is added to the decode instances evenly, what will have been decoded
// for t_d is taken away, and the mean TBT over the limit is the load. As a step's time is linear in batch and KV, the mean
// of all instances' is that of their mean batch and KV. Where answers' lengths are known, by a hint or by their
// distribution, they stand in for t_d.
func (s *Scheduler) expectedLoad(now, by time.Duration, q *demand) verdict {
	e := s.expect(now, by)
	return s.judge(&Instance{MaxBatch: e.maxBatch, KVCapacity: e.capacity}, e.strictest, e.batch, e.tokens, q, ReasonLoad)
}

// leastStep bounds how many steps are foreseen, in seconds: no hardware is quicker, whatever has been learned.
const leastStep = 1e-6

// foresee is the same for one instance: what of its batch will be left at a time, and what comes there till then. The mean of
// all says whether the system is overloaded; this, where a request finds least of it. It looks at each sequence.
func (s *Scheduler) foresee(now, by time.Duration, x *decoding) (batch, tokens float64) {
	come, comeInputs := s.arrivals.overtaking(now, by, s.cfg.DecodeTime)
	d := float64(s.count(Decode))
	batch, tokens = float64(x.otherBatch)+come/d, float64(x.otherTokens)+comeInputs/d
	grow := (by - now).Seconds() / max(s.model.step(x.load()), leastStep)
	for i := range x.running {
		r := &x.running[i]
		got := float64(x.steps-r.steps) / stepParts
		stay := s.stay(r, by, got, got+grow)
		batch += stay
		tokens += stay * (float64(r.input) + got + grow)
	}
	for i := range x.coming {
		if r := &x.coming[i]; r.at <= by {
			batch++
			tokens += float64(r.input)
		}
	}
	return max(0, batch), max(0, tokens)
}

// stay is how likely a sequence that has got some tokens will get more than a later number, the one that it would have then.
func (s *Scheduler) stay(r *sequence, by time.Duration, got, later float64) float64 {
	if r.output > 0 {
		if later < float64(r.output) {
			return 1
		}
		return 0
	}
	if l := s.classes[r.class].lengths; l.known() {
		return l.stays(got, later)
	}
	if by-r.at < s.cfg.DecodeTime {
		return 1
	}
	return 0
}

// expectation is what the mean decode instance is expected to do at a time.
type expectation struct {
	batch, tokens      float64
	maxBatch, capacity int // 0: no bound
	strictest          time.Duration
}

// expect predicts the mean decode instance.
func (s *Scheduler) expect(now, by time.Duration) expectation {
	var e expectation
	var all totals
	var batches, capacities bounds
	for i := range s.instances {
		if x := &s.instances[i]; s.is(InstanceID(i), Decode) {
			all.add(&x.decoding)
			e.strictest = stricter(e.strictest, x.decoding.strictest)
			batches.add(x.MaxBatch)
			capacities.add(x.KVCapacity)
		}
	}
	d := float64(all.instances)
	e.maxBatch, e.capacity = batches.mean(), capacities.mean()
	step := s.model.step(float64(all.batch+all.otherBatch)/d, float64(all.tokens+all.otherTokens)/d)

	stay, inputs := s.staying(now, by, step)
	grown := 0.0 // tokens that each sequence has been answered with by then
	if all.batch > 0 {
		grown = float64(all.tokens-all.inputs) / float64(all.batch)
	}
	grown += (by - now).Seconds() / max(step, leastStep)
	join, joinInputs := s.joining(now, by)
	come, comeInputs := s.arrivals.overtaking(now, by, s.cfg.DecodeTime)
	e.batch = max(0, stay+float64(join)+come+float64(all.otherBatch)) / d
	e.tokens = max(0, inputs+stay*grown+float64(joinInputs)+comeInputs+float64(all.otherTokens)) / d
	return e
}

// bounds are those of all instances; 0, that of one that has none, makes the mean none.
type bounds struct{ sum, n, without int }

func (b *bounds) add(bound int) {
	b.sum += bound
	b.n++
	if bound == 0 {
		b.without++
	}
}

func (b *bounds) mean() int {
	if b.without > 0 || b.n == 0 {
		return 0
	}
	return b.sum / b.n
}

// totals are the sums over all decode instances.
type totals struct {
	instances, batch, otherBatch int
	inputs, tokens, otherTokens  int64
}

func (t *totals) add(x *decoding) {
	t.instances++
	t.batch += x.batch
	t.otherBatch += x.otherBatch
	t.inputs += x.inputs
	t.tokens += x.tokens()
	t.otherTokens += x.otherTokens
}

// staying is what is decoded now and will be then.
func (s *Scheduler) staying(now, by time.Duration, step float64) (n, inputs float64) {
	bucket := s.bucket(now)
	for i := range s.classes {
		c := &s.classes[i]
		c.ages.advance(bucket)
		var l *lengths
		if c.lengths.known() {
			l = c.lengths
		}
		k, in := s.remaining(&c.ages, l, now, by, step)
		n += k
		inputs += in
	}
	s.hinted.advance(bucket)
	k, in := s.remaining(&s.hinted, nil, now, by, step)
	return n + k, inputs + in
}

// joining is what will begin to be decoded by then, and will not have been for t_d.
func (s *Scheduler) joining(now, by time.Duration) (n int, inputs int64) {
	n, inputs = s.prefilled, s.prefilledInputs
	for i := range s.instances {
		x := &s.instances[i]
		if !x.live {
			continue
		}
		k, in := x.queue.finishing(now, by, s.pipeline)
		gone, goneIn := x.queue.finishing(now, by-s.cfg.DecodeTime, s.pipeline)
		n += k - gone
		inputs += in - goneIn
	}
	return n, inputs
}

// began is when a request counts as having begun to be decoded, for [ages]: if a hint says how long its answer is, so much
// before its end as the others take.
func (s *Scheduler) began(now time.Duration, r *remembered, step float64) time.Duration {
	if r.output == 0 {
		return now
	}
	return now + seconds(float64(r.output)*step) - s.cfg.DecodeTime
}

// answer is how many tokens a request is expected to be answered with.
func (s *Scheduler) answer(class int32, hint int, step float64) int {
	switch l := s.classes[class].lengths; {
	case hint > 0:
		return hint
	case l.known():
		return int(l.mean + 0.5)
	case step > 0:
		return int(s.cfg.DecodeTime.Seconds() / step)
	}
	return 0
}
