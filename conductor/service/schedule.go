package service

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"larder/conductor"
	"larder/conductor/sched"
)

// decision is what /schedule answers.
type decision struct {
	RequestID    string       `json:"request_id"`
	Prefill      string       `json:"prefill"`
	Decode       string       `json:"decode"`
	PrefixLen    int          `json:"prefix_len"`    // tokens that need not be computed
	TransferFrom string       `json:"transfer_from"` // instance, or poolName, "" if nothing is transferred
	TransferLen  int          `json:"transfer_len"`
	TTFT         float64      `json:"ttft"` // seconds
	TBT          float64      `json:"tbt"`
	Reason       string       `json:"reason"`
	Replicate    *replication `json:"replicate,omitempty"`
}

// replication is a hot prefix that is copied for later requests.
type replication struct {
	From   string `json:"from"`
	To     string `json:"to"`
	Tokens int    `json:"tokens"`
}

// stages are where a request may be rejected.
var stages = [...]string{sched.Admitted: "", sched.AtPrefill: "prefill", sched.AtDecode: "decode"}

// maxPriority is the highest; see sched.Request.
const maxPriority = 7

// PoolInstance is what the pool is called among instances.
const PoolInstance = "pool"

// wanted is a request that is to be scheduled.
type wanted struct {
	scoped

	id       string
	class    string
	priority int
	output   int
	input    int
	tokens   []uint32 // of the prompt,
	names    []uint64 // or what its blocks are called
	matches  []conductor.Match
}

// prefix is what the first blocks of the prompt are called. It is worked out for those that are copied alone: lookups stop at the
// first block that nobody has.
func (w *wanted) prefix(blocks int, seed uint64) []uint64 {
	if w.tokens == nil {
		return w.names[:min(blocks, len(w.names))]
	}
	return conductor.Names(nil, seed, w.tokens[:min(blocks*w.BlockSize, len(w.tokens))], w.BlockSize, []byte(w.salt))
}

// schedule says which engines serve a request.
func (s *Service) schedule(r *call) (any, error) {
	req, err := r.cut("model", "token_ids", "seq_hashes", "block_size", "lora_name", "lora_id", "tenant_id", "cache_salt", "additionalsalt",
		"request_id", "class", "priority", "output_length", "input_length")
	if err != nil {
		return nil, err
	}
	w, err := s.readWanted(r, req)
	if err != nil {
		return nil, err
	}
	sc := s.schedulers.find(schedulerKey{w.Tenant, w.Model})
	if sc == nil {
		return nil, &apiError{
			status: fasthttp.StatusNotFound, Reason: "not_found", Field: "model",
			Message: fmt.Sprintf("no engine of tenant %q is known for model %q: POST /register, or /report with model", w.Tenant, w.Model),
		}
	}
	return s.decide(sc, w)
}

// readWanted reads a request, and looks up what is known of its prompt.
func (s *Service) readWanted(r *call, req *request) (w *wanted, err error) {
	w = &wanted{}
	if w.scoped, err = r.scopeOf(req); err != nil {
		return nil, err
	}
	if err := req.texts(map[string]*string{"request_id": &w.id, "class": &w.class}); err != nil {
		return nil, err
	}
	if w.output, err = req.number("output_length", 0, maxTokens, 0); err != nil {
		return nil, err
	}
	if w.priority, err = req.number("priority", 0, maxPriority, 0); err != nil {
		return nil, err
	}
	if w.BlockSize == 0 { // the engines', if they all have the same
		if w.BlockSize = s.schedulers.blockSize(schedulerKey{w.Tenant, w.Model}); w.BlockSize == 0 {
			return nil, bad("missing", "block_size", "block_size is required: the engines of this model have several, or none")
		}
	}
	return w, s.lookUp(req, w)
}

// lookUp reads a request's prompt and sees who holds how much of it.
func (s *Service) lookUp(req *request, w *wanted) (err error) {
	if req.raw("token_ids") != nil {
		tokens, err := req.tokens()
		if err != nil {
			return err
		}
		w.input, w.tokens = len(tokens), tokens
		w.matches = s.match(&w.scoped, tokens)
		return nil
	}
	if req.raw("seq_hashes") == nil {
		return bad("missing", "token_ids", "token_ids or seq_hashes is required")
	}
	if w.names, err = req.hashes("seq_hashes"); err != nil {
		return err
	}
	w.matches = s.matchHashes(&w.scoped, w.names)
	w.input, err = req.number("input_length", 1, maxTokens, max(1, len(w.names)*w.BlockSize))
	return err
}

// decide has the scheduler choose, and remembers what it chose.
func (s *Service) decide(sc *scheduler, w *wanted) (any, error) {
	sc.mu.Lock()
	if w.id == "" {
		w.id = "r" + strconv.FormatUint(sc.next, 36) + "-" + s.run
	}
	if sc.pending[w.id] == nil && len(sc.pending) >= maxPending {
		sc.mu.Unlock()
		return nil, &apiError{
			status: fasthttp.StatusServiceUnavailable, Reason: string(sched.ReasonBusy), retryAfter: 1,
			Message: fmt.Sprintf("%d scheduled requests have not ended: tell what became of them with POST /report", maxPending),
		}
	}
	req := sched.Request{ID: sc.number(w.id), Class: w.class, Priority: w.priority, Input: w.input, Output: w.output}
	predicted := map[sched.InstanceID]int{}
	for i := range w.matches {
		m := &w.matches[i]
		if m.Instance == PoolInstance {
			req.Pool = m.Longest
		} else if id, there := sc.ids[m.Instance]; there && m.Longest > 0 {
			lasts := s.lasting.of(engine{w.Tenant, m.Instance})
			req.Matches = append(req.Matches, sched.Match{Instance: id, Tokens: m.Longest, Lasting: lasts})
			predicted[id] = m.Longest
		}
	}
	d := sc.lib.Schedule(now(), &req)
	delete(sc.pending, w.id) // one that comes again is another one to the library, too
	if d.Accepted {
		sc.pending[w.id] = &pending{id: req.ID, at: now(), prefill: sc.names[d.Prefill], predicted: predicted[d.Prefill]}
	}
	answer := sc.answer(w.id, &d)
	host := sc.copyTo(&d)
	sc.mu.Unlock()
	if !d.Accepted {
		s.metrics.rejected.WithLabelValues(stages[d.Stage], string(d.Reason)).Inc()
		return nil, &apiError{
			status: fasthttp.StatusTooManyRequests, Reason: string(d.Reason), Stage: stages[d.Stage], retryAfter: 1, Message: d.Explain(),
		}
	}
	if host == "" {
		return answer, nil
	}
	if names := w.prefix(d.PrefixLen/w.BlockSize, s.x.Seed()); len(names) > 0 {
		s.copies.add(&copyOf{scope: w.Scope, names: names, host: host})
	}
	return answer, nil
}

// number is what the library knows a request by. One that comes again is the same.
func (sc *scheduler) number(id string) uint64 {
	if p := sc.pending[id]; p != nil {
		return p.id
	}
	sc.next++
	return sc.next
}

// answer is a decision with names. mu is held.
func (sc *scheduler) answer(id string, d *sched.Decision) *decision {
	a := &decision{
		RequestID: id, Prefill: sc.names[d.Prefill], Decode: sc.names[d.Decode],
		PrefixLen: d.PrefixLen, TransferFrom: sc.nameOf(d.TransferFrom), TransferLen: d.TransferLen,
		TTFT: seconds(d.TTFT), TBT: seconds(d.TBT), Reason: d.Explain(),
	}
	if d.Replicate.Tokens > 0 {
		a.Replicate = &replication{From: sc.nameOf(d.Replicate.From), To: sc.nameOf(d.Replicate.To), Tokens: d.Replicate.Tokens}
	}
	return a
}

// nameOf is an instance's name, or the pool's, or "".
func (sc *scheduler) nameOf(id sched.InstanceID) string {
	if id == sched.FromPool {
		return PoolInstance
	}
	return sc.names[id]
}

// seconds is a time as JSON has it.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e6 }
