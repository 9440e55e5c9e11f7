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
	q, d, err := readState(req)
	if err != nil {
		return nil, err
	}
	sc, err := s.reporter(req, tenant, model, instance)
	if err != nil {
		return nil, err
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if id, there := sc.ids[instance]; there && (q != nil || d != nil) {
		sc.lib.Report(now(), id, sc.reportOf(q, d))
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
	if found == nil && model == "" {
		return nil, bad("missing", "model", "instance %.64q is not known: register it, or say which model it serves", instance)
	}
	var err error
	if found == nil {
		if found, err = s.schedulers.make(schedulerKey{tenant, model}); err != nil {
			return nil, err
		}
	}
	return found, found.hear(instance, req)
}

// hear takes note of an instance that reports: that it is there, if that is all that is known of it, and what it says of itself.
func (sc *scheduler) hear(instance string, req *request) error {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.gone {
		return errGone
	}
	capacity, err := readCapacity(req, sc.caps[instance])
	if err != nil {
		return err
	}
	_, there := sc.ids[instance]
	if _, alone := sc.heard[instance]; alone || !there {
		sc.heard[instance] = now()
	}
	return sc.add(instance, capacity)
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
		if !inTime(e.Seconds) || e.OutputTokens < 0 || e.OutputTokens > maxTokens ||
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

func tokensIn(n *int) bool { return within(n, maxTokens) }

// readState reads what an instance says of itself: nil for what it does not.
func readState(req *request) (q *queueState, d *decodeState, err error) {
	if err = req.decode("queue", &q); err != nil {
		return nil, nil, err
	}
	if err = req.decode("decode", &d); err != nil {
		return nil, nil, err
	}
	if q != nil && (!tokensIn(&q.Requests) || !within(&q.Tokens, maxKVCapacity) || q.Seconds != nil && !inTime(*q.Seconds)) {
		return nil, nil, bad("out_of_range", "queue",
			"queue.seconds is from 0 to %g, queue.requests to %d, queue.tokens to %d", float64(maxSeconds), maxTokens, maxKVCapacity)
	}
	if d != nil && (!inTime(d.TBT) || !within(d.Batch, maxBatch) || !within(d.KVTokens, maxKVCapacity)) {
		return nil, nil, bad("out_of_range", "decode",
			"decode.tbt is from 0 to %g seconds, decode.batch to %d, decode.kv_tokens to %d", float64(maxSeconds), maxBatch, maxKVCapacity)
	}
	return q, d, nil
}

func inTime(seconds float64) bool { return seconds >= 0 && seconds <= maxSeconds }

func within(n *int, most int) bool { return n == nil || *n >= 0 && *n <= most }

// reportOf is that for the library, below 0 for what is not known. Tokens that wait without a time take what the model says of so
// many prompts of their mean length. mu is held.
func (sc *scheduler) reportOf(q *queueState, d *decodeState) sched.Report {
	r := sched.Report{Queue: -1, Batch: -1, KVTokens: -1}
	switch {
	case q == nil:
	case q.Seconds != nil:
		r.Queue = duration(*q.Seconds)
	default:
		n := max(q.Requests, 1)
		r.Queue = min(time.Duration(n)*sc.model.Prefill(q.Tokens/n, 0), maxSeconds*time.Second)
		if q.Tokens == 0 {
			r.Queue = 0
		}
	}
	if d == nil {
		return r
	}
	if d.Batch != nil {
		r.Batch = *d.Batch
	}
	if d.KVTokens != nil {
		r.KVTokens = *d.KVTokens
	}
	r.Step = duration(d.TBT)
	return r
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
