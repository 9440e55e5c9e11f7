package sched

import "time"

// decoding is what an instance decodes. Its sequences get a token at every step; how many steps there have been follows from
// the clock and from what a step is predicted to take.
type decoding struct {
	batch  int
	inputs int64         // tokens of the sequences' prompts
	steps  int64         // since the batch was empty, in stepParts of a step
	starts int64         // the sum over the sequences of the steps at their beginning
	at     time.Duration // up to which steps are counted

	pending       int   // requests that will be decoded here once they are prefilled
	pendingTokens int64 // of their prompts

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

// join and leave change the batch; advance has been called.
func (x *decoding) join(r *remembered, limits []Limits) {
	r.steps = x.steps
	x.batch++
	x.inputs += int64(r.input)
	x.starts += r.steps
	if x.classes == nil {
		x.classes = make([]int32, len(limits))
	}
	if x.classes[r.class]++; x.classes[r.class] == 1 {
		x.limit(limits)
	}
}

func (x *decoding) leave(r *remembered, limits []Limits) {
	x.batch--
	x.inputs -= int64(r.input)
	x.starts -= r.steps
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

// fits tells what speaks against decoding a request at an instance now, and the load that it would have.
func (s *Scheduler) fits(x *instance, q *demand) (step, over float64, why Reason) {
	batch, tokens := x.decoding.load()
	step = s.model.step(batch+1, tokens+float64(q.input))
	over = s.over(step, stricter(q.limit, x.decoding.strictest))
	switch {
	case !x.room(batch, tokens, q) && batch > 0: // one that is larger than all memory can be had alone
		why = ReasonFull
	case over > 1:
		why = ReasonTBT
	}
	return step, over, why
}

// choice is a decode instance for a request.
type choice struct {
	instance InstanceID
	step     float64 // seconds, with the request
	over     float64 // TBT over the limit
	why      Reason  // that speaks against it
}

// chooseDecode is SelectDecodingInstance: the one with the least predicted TBT, those counted that will be decoded there
// once they are prefilled, or else requests that come while none has been prefilled would all go to the same.
//
// Which one has room just now is not looked at: by the time that the request is there another one will, and whoever comes
// meanwhile would crowd on it.
func (s *Scheduler) chooseDecode(q *demand) choice {
	best, least, short := NoInstance, 0.0, false
	for i := range s.instances {
		x := &s.instances[i]
		id := InstanceID(i)
		if !s.is(id, Decode) {
			continue
		}
		if x.KVCapacity > 0 && q.input > x.KVCapacity {
			short = true
			continue
		}
		batch, tokens := x.decoding.load()
		cost := s.model.step(batch+float64(x.decoding.pending)+1, tokens+float64(x.decoding.pendingTokens)+float64(q.input))
		if best == NoInstance || cost < least {
			best, least = id, cost
		}
	}
	switch {
	case best != NoInstance:
		c := choice{instance: best}
		c.step, c.over, c.why = s.fits(&s.instances[best], q)
		return c
	case short:
		return choice{instance: NoInstance, why: ReasonTooLong}
	default:
		return choice{instance: NoInstance, why: ReasonNoDecode}
	}
}

// advanceDecoding brings all decode instances up to date.
func (s *Scheduler) advanceDecoding(now time.Duration) {
	for i := range s.instances {
		if s.instances[i].live {
			s.instances[i].decoding.advance(now, s.model)
		}
	}
}
