package sched

import "time"

// PrefillDone takes note that a request has its first token. The model learns from took, the time that its prefill instance
// spent on it without queue and transfer, and from prefix, the tokens that it did not have to compute; took is 0 and prefix
// below 0 if they are unknown. It does nothing for a request that is not remembered, or has been prefilled before.
func (s *Scheduler) PrefillDone(now time.Duration, id uint64, took time.Duration, prefix int) {
	now = s.pass(now)
	slot := s.book.find(id)
	if slot < 0 || s.book.slots[slot].phase != prefilling {
		return
	}
	r := &s.book.slots[slot]
	if prefix < 0 {
		prefix = r.prefix
	}
	if prefix <= r.input {
		s.model.LearnPrefill(r.input, prefix, time.Duration(float64(took)/s.pipelined(r.input-prefix)))
	}
	s.prefillDone(now, slot)
}

func (s *Scheduler) prefillDone(now time.Duration, slot int32) {
	r := &s.book.slots[slot]
	s.instances[r.prefill].queue.remove(slot, now, s.pipeline)
	r.phase = prefilled
	s.prefilled++
	s.prefilledInputs += int64(r.input)
	if r.prefill != r.decode && !s.cfg.LayerWise { // layer by layer it has been sent while it was computed
		s.send(now, r.prefill, r.decode, r.kv)
	}
	s.book.postpone(slot, now+s.cfg.RequestTTL)
}

// TransferDone takes note of how long the transfer took that a request's prefill waited for. The model learns from it if
// nothing else was under way.
func (s *Scheduler) TransferDone(now time.Duration, id uint64, took time.Duration) {
	s.pass(now)
	if slot := s.book.find(id); slot >= 0 {
		if r := &s.book.slots[slot]; !r.sharing && r.bytes > 0 && r.bandwidth > 0 {
			s.model.LearnTransfer(r.bytes, r.bandwidth, took)
			r.bytes = 0
		}
	}
}

// AdmitDecode is the second check, for a request that has been prefilled and comes to its decode instance: with the load that
// this has now. If it is not admitted it is forgotten, and its prefill was in vain.
func (s *Scheduler) AdmitDecode(now time.Duration, id uint64) (bool, Reason) {
	now = s.pass(now)
	slot := s.book.find(id)
	if slot < 0 || s.book.slots[slot].phase == decoded {
		return false, ReasonUnknown
	}
	if s.book.slots[slot].phase == prefilling {
		s.prefillDone(now, slot)
	}
	r := &s.book.slots[slot]
	share := 1.0
	if s.cfg.Overload == None { // else its priority has been seen to before, and its prefill is worth more than its rank
		share = s.share(now, r.priority)
	}
	x := &s.instances[r.decode]
	x.decoding.advance(now, s.model)
	q := s.demand(r.class, r.input, r.output, lessen(s.classes[r.class].limits, share).TBTSLO, share)
	if v := s.fits(x, &q); v.why != Accepted {
		s.drop(now, slot)
		return false, v.why
	}
	s.beginDecode(now, slot)
	return true, Accepted
}

// demand is what a request asks of a decode instance, by what its answer's length is expected to be.
func (s *Scheduler) demand(class int32, input, hint int, limit time.Duration, share float64) demand {
	step := s.model.step(1, float64(input))
	return demand{input: input, need: input + s.answer(class, hint, step), limit: limit, share: share}
}

// beginDecode has a prefilled request join the batch of its decode instance.
func (s *Scheduler) beginDecode(now time.Duration, slot int32) {
	r := &s.book.slots[slot]
	x := &s.instances[r.decode].decoding
	s.prefilled--
	s.prefilledInputs -= int64(r.input)
	x.unexpect(&s.book, slot)
	x.advance(now, s.model)
	x.join(&s.book, slot, now, s.limits)
	r.phase = decoded

	step := s.model.step(x.load())
	if r.ages = &s.hinted; r.output == 0 {
		r.ages = &s.classes[r.class].ages
	}
	r.ages.advance(s.bucket(now))
	r.bucket = r.ages.change(s.bucket(s.began(now, r, step)), 1, int64(r.input))
	until := now + s.cfg.RequestTTL
	if s.cfg.Presume {
		until = now + seconds(float64(s.answer(r.class, r.output, step))*step)
	}
	s.book.postpone(slot, until)
}

// DecodeDone takes note that a request has all its tokens. How many, from which the lengths of its class's answers are
// learned, is 0 if it is unknown. A request that has only one token is through with its prefill, without AdmitDecode.
func (s *Scheduler) DecodeDone(now time.Duration, id uint64, outputTokens int) {
	now = s.pass(now)
	slot := s.book.find(id)
	if slot < 0 {
		return
	}
	if outputTokens > 0 {
		s.classes[s.book.slots[slot].class].lengths.add(outputTokens)
	}
	s.drop(now, slot)
}

// Forget takes note that a request failed, or was cancelled.
func (s *Scheduler) Forget(now time.Duration, id uint64) {
	now = s.pass(now)
	if slot := s.book.find(id); slot >= 0 {
		s.drop(now, slot)
	}
}

// drop takes a request out of all books.
func (s *Scheduler) drop(now time.Duration, slot int32) {
	r := &s.book.slots[slot]
	x := &s.instances[r.decode].decoding
	switch r.phase {
	case prefilling:
		s.instances[r.prefill].queue.remove(slot, now, s.pipeline)
	case prefilled:
		s.prefilled--
		s.prefilledInputs -= int64(r.input)
	case decoded:
		x.advance(now, s.model)
		x.leave(&s.book, slot, s.limits)
		r.ages.change(r.bucket, -1, -int64(r.input))
	default:
	}
	if r.phase != decoded {
		x.unexpect(&s.book, slot)
	}
	s.book.remove(slot)
}

// pass lets time pass: it deals with the requests whose deadlines have come, in their order. A clock that goes back stands
// still here.
func (s *Scheduler) pass(now time.Duration) time.Duration {
	s.now = max(s.now, now)
	for {
		slot := s.book.due(s.now)
		if slot < 0 {
			return s.now
		}
		r := &s.book.slots[slot]
		if at := r.deadline; s.cfg.Presume && r.phase == prefilling {
			s.prefillDone(at, slot)
			s.beginDecode(at, slot)
		} else {
			s.drop(at, slot)
		}
	}
}
