package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
)

// completion is a request whose answer begins.
type completion struct {
	q       *request
	rt      route
	s       *stream
	metered bool // the prefill instance has told what it had of the prompt

	computed progress // what is reported of a prompt that another instance computes
}

// serveCompletion routes a request and passes the answer on.
func (p *Proxy) serveCompletion(w http.ResponseWriter, r *http.Request) {
	began := now()
	status := http.StatusServiceUnavailable
	defer func() { p.metrics.answered(status) }()
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	default:
		unavailable(status, "overloaded", "the proxy has as many requests as it takes at once").write(w)
		return
	}
	var c *completion
	q, e := readRequest(w, r, &p.cfg)
	if e == nil {
		c, e = p.begun(r.Context(), q)
	}
	if e != nil {
		status = e.status
		p.deadline(http.NewResponseController(w))
		e.write(w)
		return
	}
	defer c.s.close()
	status = c.s.answer.StatusCode
	p.metrics.began(now().Sub(began))
	err := p.relay(w, c)
	if err == nil {
		return
	}
	p.failed(&c.rt, c.rt.decode)
	if r.Context().Err() != nil || errors.Is(err, errGone) {
		status = errGone.status
		return
	}
	p.blame(r.Context(), c.rt.decode, err)
	status = http.StatusBadGateway
	panic(http.ErrAbortHandler) // the client sees the answer break off, and not end
}

// begun routes a request, has its prompt computed, and waits for its answer to begin.
func (p *Proxy) begun(ctx context.Context, q *request) (*completion, *apiError) {
	rt, e := p.route(ctx, q)
	if e != nil {
		return nil, e
	}
	c := &completion{q: q, rt: rt}
	last := call{q: q, path: q.path, body: q.body, at: rt.decode, role: both, rt: &c.rt}
	if rt.prefill != rt.decode {
		params, e := p.prefill(ctx, c)
		if e != nil {
			return nil, e
		}
		if e := p.admitted(ctx, c); e != nil {
			return nil, e
		}
		last.body, last.role = q.decodeBody(params), decode
	}
	var err error
	if c.s, err = p.begin(ctx, last); err != nil {
		return nil, p.noAnswer(ctx, err)
	}
	coupled := rt.prefill == rt.decode
	if c.rt.decode = c.s.at; coupled && c.s.at != rt.prefill {
		c.rt.prefill, c.rt.prefixLen = c.s.at, -1
	}
	if c.s.answer.StatusCode != http.StatusOK {
		p.failed(&c.rt, c.s.at)
		return c, nil
	}
	if coupled {
		done := progress{Event: eventPrefillDone}
		if q.stream { // else the answer has been made, too
			done.Seconds = c.s.seconds()
		}
		p.progress(&c.rt, c.s.at, done)
		p.progress(&c.rt, c.s.at, progress{Event: eventDecodeStart})
	}
	return c, nil
}

// prefill has an instance compute the prompt, and gives what a decode instance needs to fetch its KV cache.
func (p *Proxy) prefill(ctx context.Context, c *completion) (json.RawMessage, *apiError) {
	if c.q.prompts > 1 {
		p.failed(&c.rt, c.rt.prefill)
		return nil, invalid("prompt", "prompt: one prompt in a request, where prompts are computed by other instances than answers")
	}
	planned := c.rt.prefill
	a, j, err := p.exchange(ctx, call{q: c.q, path: c.q.path, body: c.q.prefillBody(), at: planned, role: prefill, rt: &c.rt})
	if err != nil {
		return nil, p.noAnswer(ctx, err)
	}
	if a.status != http.StatusOK {
		p.failed(&c.rt, j.at)
		return nil, &apiError{status: a.status, relayed: a}
	}
	if c.rt.prefill = j.at; j.at != planned {
		c.rt.prefixLen = -1
	}
	var v struct {
		Params json.RawMessage `json:"kv_transfer_params"`
		Usage  usage           `json:"usage"`
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		return nil, p.noAnswer(ctx, fmt.Errorf("%s answers what is no JSON: %w", j.at.id, err))
	}
	c.computed = progress{RequestID: c.rt.scheduled, Event: eventPrefillDone, Seconds: j.seconds(), Cached: v.Usage.cached()}
	p.hits(c, v.Usage)
	if string(v.Params) == "null" {
		return nil, nil
	}
	return v.Params, nil
}

// admitted asks whether the decode instance still has room, now that the prompt has been computed: that is when the conductor
// decides. Without it there is room.
func (p *Proxy) admitted(ctx context.Context, c *completion) *apiError {
	id := c.rt.scheduled
	if id == "" {
		return nil
	}
	_, err := p.conductor.report(ctx, c.rt.prefill.id, p.cfg.TenantID, c.computed)
	var answer reported
	if err == nil {
		answer, err = p.conductor.report(ctx, c.rt.decode.id, p.cfg.TenantID, progress{RequestID: id, Event: eventDecodeStart})
	}
	if err != nil {
		p.metrics.lostReports.Inc()
		p.log.LogAttrs(ctx, slog.LevelDebug, "the conductor takes no report", slog.Any("error", err))
	}
	if !slices.Contains(answer.Rejected, id) {
		return nil
	}
	p.metrics.rejections.Inc()
	c.rt.scheduled = "" // it has forgotten the request
	return rejection(&conductorError{Message: "the decode instance has no room any more", Reason: "decode", Stage: "decode"})
}

// noAnswer is what a client is told when no instance could answer. What exactly went wrong is for the log.
func (p *Proxy) noAnswer(ctx context.Context, err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	p.log.LogAttrs(ctx, slog.LevelError, "no instance answers", slog.Any("error", err))
	if f, ok := errors.AsType[*fault](err); ok {
		return &apiError{status: f.answer.status, relayed: f.answer}
	}
	return unavailable(http.StatusBadGateway, "no_engine", "no engine could answer: they are down, or broke off")
}

// progress reports what happens to a request that the conductor knows of.
func (p *Proxy) progress(rt *route, at *instance, x progress) {
	if rt != nil && rt.scheduled != "" {
		x.RequestID = rt.scheduled
		p.reporter.tell(report{at.id, x})
	}
}

// failed reports that an instance is through with a request, for bad. The conductor does not know of what follows.
func (p *Proxy) failed(rt *route, at *instance) {
	p.progress(rt, at, progress{Event: eventFailed})
	if rt != nil {
		rt.scheduled = ""
	}
}

// hits counts what was cached of a prompt beside what was expected.
func (p *Proxy) hits(c *completion, u usage) {
	if c.metered || u.Details == nil || c.rt.prefixLen < 0 {
		return
	}
	c.metered = true
	hit := report{c.rt.prefill.id, progress{RequestID: c.rt.scheduled, Event: eventHit, Cached: u.cached()}}
	switch {
	case c.rt.by == byQuery:
		hit.progress.Predicted = &c.rt.prefixLen
		p.reporter.tell(hit)
	case c.rt.scheduled != "" && c.computed.Event == "":
		p.reporter.tell(hit)
	}
	p.metrics.predicted.WithLabelValues(c.rt.prefill.id).Add(float64(c.rt.prefixLen))
	p.metrics.cached.WithLabelValues(c.rt.prefill.id).Add(float64(u.Details.CachedTokens))
}

// relayed are the headers that clients get from engines.
var relayed = []string{"Content-Type", "Content-Length", "Cache-Control", "Retry-After"}

// relay passes an answer on, piece by piece as it comes. errGone means that the client does not take it.
func (p *Proxy) relay(w http.ResponseWriter, c *completion) error {
	h, from := w.Header(), c.s.answer.Header
	for _, name := range relayed {
		if v := from.Get(name); v != "" {
			h.Set(name, v)
		}
	}
	h.Set("X-Request-Id", c.q.header.Get("X-Request-Id"))
	if p.cfg.RouteHeaders {
		c.rt.tell(h)
	}
	w.WriteHeader(c.s.answer.StatusCode)
	began := now()
	m := meter{streamed: c.q.stream}
	rc := http.NewResponseController(w)
	for {
		m.add(c.s.buf)
		if err := p.pass(w, rc, c.s.buf); err != nil {
			return errGone
		}
		err := c.s.next(p.cfg.StallTimeout)
		if errors.Is(err, io.EOF) || m.ended {
			break // a client may go once it has read that this is all
		}
		if err != nil {
			return err
		}
	}
	tokens := m.tokens()
	p.hits(c, m.usage)
	p.progress(&c.rt, c.rt.decode, progress{Event: eventDecodeDone, Seconds: now().Sub(began).Seconds(), OutputTokens: tokens})
	return nil
}

// pass writes a piece to the client, which has some time to take it.
func (p *Proxy) pass(w io.Writer, rc *http.ResponseController, b []byte) error {
	p.deadline(rc)
	if _, err := w.Write(b); err != nil {
		return err
	}
	return rc.Flush()
}

// deadline gives the client time from now to take what is written.
func (p *Proxy) deadline(rc *http.ResponseController) {
	_ = rc.SetWriteDeadline(now().Add(p.cfg.ClientTimeout)) // if the connection is gone it cannot be written
}

// tell says in an answer where it comes from.
func (rt *route) tell(h http.Header) {
	h.Set("X-Larder-Route", rt.by)
	h.Set("X-Larder-Prefill", rt.prefill.id)
	h.Set("X-Larder-Decode", rt.decode.id)
	if rt.prefixLen >= 0 {
		h.Set("X-Larder-Prefix-Len", strconv.Itoa(rt.prefixLen))
	}
	for name, v := range map[string]string{"X-Larder-Reason": rt.reason, "X-Larder-Transfer-From": rt.transferFrom} {
		if v != "" {
			h.Set(name, v)
		}
	}
}
