package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
)

// route is where a request goes.
type route struct {
	prefill *instance
	decode  *instance // the same one unless the prompt is computed elsewhere

	by           string // how it was chosen
	reason       string // the conductor's
	prefixLen    int    // tokens that the prefill instance is expected to have; -1 if nobody knows
	transferFrom string // the instance whose blocks the conductor has it fetch
	scheduled    string // the request's name at the conductor, empty if it does not know of it
}

// How routes are chosen, in metrics.
const (
	byQuery           = modeQuery
	bySchedule        = modeSchedule
	fallbackTokenize  = "fallback_tokenize"  // nobody could tell the tokens
	fallbackConductor = "fallback_conductor" // it could not be asked
	fallbackInstance  = "fallback_instance"  // it has chosen who is not here, or is down
)

// route chooses instances. Without the conductor, or without tokens to ask it about, the least busy do.
func (p *Proxy) route(ctx context.Context, q *request) (route, *apiError) {
	rt, err := p.choose(ctx, q)
	if e, ok := errors.AsType[*apiError](err); ok {
		return rt, e
	}
	if ctx.Err() != nil {
		return rt, errGone
	}
	if err != nil {
		rt = p.leastBusy(rt.by, outstanding)
		if p.warned.begin(warnAgain) {
			p.log.LogAttrs(ctx, slog.LevelWarn, "routing by outstanding requests alone", slog.String("by", rt.by), slog.Any("error", err))
		}
	}
	p.metrics.routes.WithLabelValues(rt.by).Inc()
	return rt, nil
}

// choose is route where all is well. If not the route says by what to go instead.
func (p *Proxy) choose(ctx context.Context, q *request) (route, error) {
	if q.tokens == nil {
		if err := p.tokenize(ctx, q); err != nil {
			return route{by: fallbackTokenize}, err
		}
	}
	about := prompt{
		Model: p.cfg.Model, TokenIDs: q.tokens, BlockSize: p.cfg.BlockSize, TenantID: p.cfg.TenantID, LoRAName: q.lora, CacheSalt: q.salt,
	}
	if p.cfg.Mode == modeSchedule {
		return p.schedule(ctx, q, about)
	}
	matches, err := p.conductor.query(ctx, about)
	if err != nil {
		return route{by: fallbackConductor}, err
	}
	rt := p.leastBusy(byQuery, func(x *instance) int64 {
		missing := len(q.tokens) - min(len(q.tokens), matches[x.id].LongestMatched)
		return int64(missing) + x.outstanding.Load()*int64(p.cfg.OutstandingCost)
	})
	rt.prefixLen = min(len(q.tokens), matches[rt.prefill.id].LongestMatched)
	return rt, nil
}

// leastBusy has the instance compute the prompt that costs least, and decode, too, if it can; else the least busy one does.
func (p *Proxy) leastBusy(by string, cost func(*instance) int64) route {
	rt := route{by: by, prefixLen: -1, prefill: p.fleet.pick(prefill, nil, cost)}
	rt.decode = rt.prefill
	if rt.prefill.role != both {
		rt.decode = p.fleet.pick(decode, nil, outstanding)
	}
	return rt
}

// schedule has the conductor choose. A rejection is an apiError.
func (p *Proxy) schedule(ctx context.Context, q *request, about prompt) (route, error) {
	s, err := p.conductor.schedule(ctx, scheduling{
		prompt: about, RequestID: q.id, Class: q.class, Priority: q.priority, OutputLength: q.outputLength,
	})
	if e, ok := errors.AsType[*conductorError](err); ok && e.status == http.StatusTooManyRequests {
		p.metrics.rejections.Inc()
		return route{}, rejection(e)
	}
	if err != nil {
		return route{by: fallbackConductor}, err
	}
	rt := route{
		by: bySchedule, reason: s.Reason, prefixLen: s.PrefixLen, transferFrom: s.TransferFrom, scheduled: s.RequestID,
		prefill: p.fleet.byID[s.Prefill], decode: p.fleet.byID[s.Decode],
	}
	for id, x := range map[string]*instance{s.Prefill: rt.prefill, s.Decode: rt.decode} {
		if x == nil || x.down.on() {
			p.reporter.tell(report{id, progress{RequestID: s.RequestID, Event: eventFailed}})
			return route{by: fallbackInstance}, fmt.Errorf("the conductor chooses instance %q, which is down or none of the engines", id)
		}
	}
	return rt, nil
}

// rejection is what the client of a rejected request is told.
func rejection(e *conductorError) *apiError {
	a := &apiError{
		status: http.StatusTooManyRequests, kind: "rate_limit_error", code: "rate_limit_exceeded", reason: e.Reason, stage: e.Stage,
		message: "too busy to answer in time: " + e.Message, retryAfter: e.retryAfter,
	}
	if e.Reason != "" {
		a.message += " (" + e.Reason + ")"
	}
	if a.retryAfter == "" {
		a.retryAfter = "1"
	}
	return a
}

// errNoTokenizer says that no engine tells tokens.
var errNoTokenizer = errors.New("no engine answers at /tokenize")

// tokenize asks an engine for the tokens of the prompt. What it finds wrong with the request is an apiError.
func (p *Proxy) tokenize(ctx context.Context, q *request) error {
	a, _, err := p.exchange(ctx, call{q: q, path: "/tokenize", body: q.tokenizeBody(), at: p.fleet.pick(0, nil, outstanding)})
	if err != nil {
		return fmt.Errorf("%w: %w", errNoTokenizer, err)
	}
	switch {
	case a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed || a.status >= http.StatusInternalServerError:
		return fmt.Errorf("%w, one with status %d", errNoTokenizer, a.status)
	case a.status != http.StatusOK:
		return &apiError{status: a.status, relayed: a}
	}
	var v struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		return fmt.Errorf("%w that can be read: %w", errNoTokenizer, err)
	}
	q.tokens = v.Tokens
	return nil
}
