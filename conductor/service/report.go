package service

import (
	"math"
	"time"

	"larder/conductor/sched"
)

// event is something that became of a request.
type event struct {
	RequestID    string  `json:"request_id"`
	Event        string  `json:"event"`
	Seconds      float64 `json:"seconds"`
	OutputTokens int     `json:"output_tokens"`
	Cached       *int    `json:"cached_tokens"`
	Predicted    *int    `json:"predicted_tokens"`
}

// maxEvents bounds the events of a report.
const maxEvents = 4096

// queueState is an instance's own prefill queue.
type queueState struct {
	Requests int      `json:"requests"`
	Tokens   int      `json:"tokens"`
	Seconds  *float64 `json:"seconds"`
}

// decodeState is an instance's own decoding.
type decodeState struct {
	Batch    *int    `json:"batch"`
	KVTokens *int    `json:"kv_tokens"`
	TBT      float64 `json:"tbt"`
}

// reported is what /report answers.
type reported struct {
	Accepted int      `json:"accepted"`
	Unknown  int      `json:"unknown"`
	Rejected []string `json:"rejected"`
}

// report takes note of what became of requests, and of how an instance is.
func (s *Service) report(r *call) (any, error) {
	req, tenant, err := r.begin([]string{"instance_id"},
		append([]string{"instance_id", "model", "tenant_id", "requests", "queue", "decode"}, capacityFields...)...)
	if err != nil {
		return nil, err
	}
	var instance, model string
	if err := req.texts(map[string]*string{"instance_id": &instance, "model": &model}); err != nil {
		return nil, err
	}
	events, err := readEvents(req)
	if err != nil {
		return nil, err
	}
	state, told, err := readState(req)
	if err != nil {
		return nil, err
	}
	sc, err := s.reporter(req, tenant, model, instance)
	if err != nil {
		return nil, err
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if id, there := sc.ids[instance]; there && told {
		sc.lib.Report(now(), id, state)
	}
	answer := &reported{Rejected: []string{}}
	for i := range events {
		s.happened(sc, engine{tenant, instance}, &events[i], answer)
	}
	return answer, nil
}

// reporter is the scheduler that knows an instance; one that is new to it and says its model is added.
func (s *Service) reporter(req *request, tenant, model, instance string) (*scheduler, error) {
	var found *scheduler
	for _, sc := range s.schedulers.list() {
		if sc.key.tenant != tenant || model != "" && sc.key.model != model {
			continue
		}
		sc.mu.Lock()
		_, there := sc.ids[instance]
		sc.mu.Unlock()
		if there {
			if found != nil {
				return nil, bad("missing", "model", "instance %.64q serves several models: say which", instance)
			}
			found = sc
		}
	}
	capacity, err := readCapacity(req)
	if err != nil {
		return nil, err
	}
	if found != nil && capacity == (Capacity{}) {
		found.hear(instance)
		return found, nil
	}
	if found == nil && model == "" {
		return nil, bad("missing", "model", "instance %.64q is not known: register it, or say which model it serves", instance)
	}
	if found == nil {
		if found, err = s.schedulers.make(schedulerKey{tenant, model}); err != nil {
			return nil, err
		}
		found.mu.Lock()
		found.heard[instance] = now()
		found.mu.Unlock()
	}
	found.mu.Lock()
	defer found.mu.Unlock()
	if found.gone {
		return nil, errGone
	}
	return found, found.add(instance, capacity)
}

// hear notes that an instance that is known by its reports alone has sent one.
func (sc *scheduler) hear(instance string) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if _, alone := sc.heard[instance]; alone {
		sc.heard[instance] = now()
	}
}

// readEvents reads and checks the events of a report.
func readEvents(req *request) (events []event, err error) {
	if err = req.decode("requests", &events); err != nil {
		return nil, err
	}
	if len(events) > maxEvents {
		return nil, bad("out_of_range", "requests",
			"requests has %d elements, at most %d: send the rest in another report", len(events), maxEvents)
	}
	for i := range events {
		e := &events[i]
		switch e.Event {
		case "prefill_done", "decode_start", "decode_done", "failed", "hit":
		default:
			return nil, badAt("invalid_value", "requests", i,
				"event %.40q: prefill_done, decode_start, decode_done, failed or hit", e.Event)
		}
		if e.RequestID == "" && e.Event != "hit" {
			return nil, badAt("missing", "requests", i, "request_id is missing")
		}
		if !(e.Seconds >= 0 && e.Seconds <= maxSeconds) || e.OutputTokens < 0 || e.OutputTokens > maxTokens ||
			!tokensIn(e.Cached) || !tokensIn(e.Predicted) {
			return nil, badAt("out_of_range", "requests", i,
				"seconds is from 0 to %g; output_tokens, cached_tokens and predicted_tokens are from 0 to %d",
				float64(maxSeconds), maxTokens)
		}
	}
	return events, nil
}

// maxSeconds bounds what somebody may say that something took.
const maxSeconds = 3600

func tokensIn(n *int) bool { return n == nil || *n >= 0 && *n <= maxTokens }

// readState reads what an instance says of itself. told says that it says something.
func readState(req *request) (state sched.Report, told bool, err error) {
	var q *queueState
	var d *decodeState
	if err = req.decode("queue", &q); err != nil {
		return state, false, err
	}
	if err = req.decode("decode", &d); err != nil {
		return state, false, err
	}
	state = sched.Report{Queue: -1, Batch: -1, KVTokens: -1}
	if q != nil && q.Seconds != nil {
		if !(*q.Seconds >= 0 && *q.Seconds <= maxSeconds) {
			return state, false, bad("out_of_range", "queue", "queue.seconds is from 0 to %g", float64(maxSeconds))
		}
		state.Queue = duration(*q.Seconds)
	}
	if d != nil {
		if d.Batch != nil {
			state.Batch = *d.Batch
		}
		if d.KVTokens != nil {
			state.KVTokens = *d.KVTokens
		}
		if !(d.TBT >= 0 && d.TBT <= maxSeconds) || state.Batch > maxBatch || state.KVTokens > maxKVCapacity {
			return state, false, bad("out_of_range", "decode",
				"decode.tbt is seconds up to %g, batch and kv_tokens are what an instance can have", float64(maxSeconds))
		}
		state.Step = duration(d.TBT)
	}
	return state, q != nil || d != nil, nil
}

func duration(seconds float64) time.Duration {
	return time.Duration(math.Round(seconds * float64(time.Second)))
}

// happened takes note of one event. sc.mu is held.
func (s *Service) happened(sc *scheduler, from engine, e *event, answer *reported) {
	p := sc.pending[e.RequestID]
	s.compare(p, from, e)
	if p == nil {
		if e.Event == "hit" {
			answer.Accepted++
		} else {
			answer.Unknown++
		}
		return
	}
	answer.Accepted++
	switch e.Event {
	case "prefill_done":
		cached := -1
		if e.Cached != nil {
			cached = *e.Cached
		}
		sc.lib.PrefillDone(now(), p.id, duration(e.Seconds), cached)
	case "decode_start":
		ok, reason := sc.lib.AdmitDecode(now(), p.id)
		if reason == sched.ReasonUnknown { // it was presumed to be through: that is no reason to turn it away
			answer.Accepted--
			answer.Unknown++
			delete(sc.pending, e.RequestID)
		} else if !ok {
			answer.Rejected = append(answer.Rejected, e.RequestID)
			s.metrics.rejected.WithLabelValues(stages[sched.AtDecode], string(reason)).Inc()
			delete(sc.pending, e.RequestID)
		}
	case "decode_done":
		sc.lib.DecodeDone(now(), p.id, e.OutputTokens)
		delete(sc.pending, e.RequestID)
	case "failed":
		sc.lib.Forget(now(), p.id)
		delete(sc.pending, e.RequestID)
	}
}

// compare sets what an engine has found of a prompt against what was predicted.
func (s *Service) compare(p *pending, from engine, e *event) {
	if e.Cached == nil {
		return
	}
	switch {
	case e.Predicted != nil:
		s.drift.note(now(), from, *e.Predicted, *e.Cached)
	case p != nil && p.prefill == from.instance:
		s.drift.note(now(), from, p.predicted, *e.Cached)
	}
}
