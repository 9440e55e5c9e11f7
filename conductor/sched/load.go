package sched

import "time"

// Report is what an instance says of itself.
type Report struct {
	Queue    time.Duration // that a prefill would have to wait which comes now; below 0: unknown
	Batch    int           // sequences that are decoded, or admitted and waiting for it; below 0: unknown
	KVTokens int           // tokens of KV that they have; below 0: unknown
	Step     time.Duration // a decode step of that batch; 0: unknown
	TBT      TBT           // of requests that ended lately; 0: unknown
}

// Report takes note of an instance's own figures. They stand in for what was guessed, and the model learns from them.
func (s *Scheduler) Report(now time.Duration, id InstanceID, r Report) {
	now = s.pass(now)
	if !s.known(id) {
		return
	}
	x := &s.instances[id]
	if r.Queue >= 0 {
		x.queue.report(now, min(r.Queue, longest), s.pipeline)
	}
	if r.Batch < 0 || r.KVTokens < 0 {
		return
	}
	d := &x.decoding
	d.advance(now, s.model)
	batch, tokens := min(r.Batch, s.cfg.MaxRequests), min(int64(r.KVTokens), maxInput*int64(s.cfg.MaxRequests))
	d.otherBatch, d.otherTokens, d.reportedAt = batch-d.batch, tokens-d.tokens(), now
	if batch == 0 {
		return
	}
	if r.Step > 0 {
		s.model.LearnStep(batch, int(tokens), r.Step)
	}
	s.model.learnTail(r.TBT, s.model.step(float64(batch), float64(tokens)))
}

// Load is how loaded the two sides are. Of a default class without limits the load is what it would be with the papers'
// limits: 30 s for TTFT and 100 ms for TBT.
type Load struct {
	Prefill, PrefillMax  float64       // T_queue over the limit of TTFT: the mean of the prefill instances, and the highest
	Decode, DecodeMax    float64       // TBT over its limit: the mean of the decode instances, and the highest
	Queue                time.Duration // the mean
	TBT                  TBT           // the mean
	Batch, KVTokens      int           // of all decode instances
	Prefilling, Decoding int           // requests that are remembered
}

const (
	papersTTFT = 30 * time.Second
	papersTBT  = 100 * time.Millisecond
)

// Load tells how loaded both sides are.
func (s *Scheduler) Load(now time.Duration) Load {
	now = s.pass(now)
	s.advanceDecoding(now)
	limits := s.defaults()
	var l Load
	var queues, steps float64
	for i := range s.instances {
		x, id := &s.instances[i], InstanceID(i)
		if !x.live {
			continue
		}
		l.Prefilling += x.queue.len()
		l.Decoding += x.decoding.batch
		if s.is(id, Prefill) {
			q := x.queue.waiting(now, s.pipeline)
			queues += q.Seconds()
			l.PrefillMax = max(l.PrefillMax, q.Seconds()/limits.TTFTSLO.Seconds())
		}
		if s.is(id, Decode) {
			batch, tokens := x.decoding.load()
			l.Batch, l.KVTokens = l.Batch+int(batch), l.KVTokens+int(tokens)
			step := s.idleOrStep(batch, tokens)
			steps += step
			l.DecodeMax = max(l.DecodeMax, s.over(step, limits.TBTSLO))
		}
	}
	queues, steps = queues/float64(max(1, s.count(Prefill))), steps/float64(max(1, s.count(Decode)))
	l.Queue, l.TBT = seconds(queues), s.model.tbt(steps)
	l.Prefill, l.Decode = queues/limits.TTFTSLO.Seconds(), s.over(steps, limits.TBTSLO)
	return l
}

// defaults are the limits of the default class, or the papers'.
func (s *Scheduler) defaults() Limits {
	l := s.classes[s.byClass[""]].limits
	l.TTFTSLO, l.TBTSLO = either(l.TTFTSLO, papersTTFT), either(l.TBTSLO, papersTBT)
	return l
}

// idleOrStep is the time of a step, 0 of an instance that decodes nothing.
func (s *Scheduler) idleOrStep(batch, tokens float64) float64 {
	if batch == 0 {
		return 0
	}
	return s.model.step(batch, tokens)
}
