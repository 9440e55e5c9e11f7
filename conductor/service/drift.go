package service

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"time"
)

// What makes the index of an engine count as wrong: of so many reports lately, what the engines found differs by so much from
// what was predicted. A conductor that has lost events, or an engine whose blocks cannot be named alike, shows in no other way.
const (
	driftReports  = 64               // to judge by; fewer are chance
	driftFade     = 1 - 1.0/256      // what each report leaves of the ones before it
	driftMost     = 0.5              // of the larger of both
	driftPause    = time.Minute      // from one resync of an engine to the next
	driftPauseMax = time.Hour        // which doubles up to this: what a resync does not mend, the next one does not either
	driftKeep     = 24 * time.Hour   // an engine that is not heard of is forgotten
	driftEngines  = 1 << 16          // at once
	driftForget   = 10 * time.Minute // between two looks for those
)

// engine is an instance of a tenant.
type engine struct{ tenant, instance string }

// drift compares what was predicted of engines with what they found.
type drift struct {
	logger *slog.Logger
	resync func(instance string) int

	mu    sync.Mutex
	by    map[engine]*hits
	swept time.Duration
}

// hits are predicted and actual ones of an engine, in tokens.
type hits struct {
	predicted, actual uint64  // of all reports
	p, a              float64 // of those lately
	reports           int     // since the last resync
	resyncs           uint64
	last, heard       time.Duration
	pause             time.Duration
}

func newDrift(logger *slog.Logger, resync func(string) int) *drift {
	return &drift{logger: logger, resync: resync, by: map[engine]*hits{}}
}

// note takes note of what an engine has found of a prompt, and has it tell everything again if that is not what is predicted.
func (d *drift) note(now time.Duration, e engine, predicted, actual int) {
	if d.add(now, e, predicted, actual) {
		n := d.resync(e.instance)
		d.logger.LogAttrs(context.Background(), slog.LevelWarn,
			"an engine finds other than predicted: asked it for all of its events; if this goes on, they get lost",
			slog.String("instance", e.instance), slog.String("tenant", e.tenant), slog.Int("sources", n))
	}
}

// add reports whether the engine is to be asked for everything.
func (d *drift) add(now time.Duration, e engine, predicted, actual int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now-d.swept > driftForget {
		d.swept = now
		for k, h := range d.by {
			if now-h.heard > driftKeep {
				delete(d.by, k)
			}
		}
	}
	h := d.by[e]
	if h == nil {
		if len(d.by) >= driftEngines {
			return false
		}
		h = &hits{pause: driftPause, last: -driftPause}
		d.by[e] = h
	}
	h.heard = now
	h.predicted += uint64(predicted) //nolint:gosec // not negative
	h.actual += uint64(actual)       //nolint:gosec // not negative
	h.p, h.a = h.p*driftFade+float64(predicted), h.a*driftFade+float64(actual)
	h.reports++
	if h.reports < driftReports || math.Abs(h.p-h.a) <= driftMost*max(h.p, h.a) || now-h.last < h.pause {
		return false
	}
	if h.resyncs > 0 && now-h.last < 4*h.pause {
		h.pause = min(2*h.pause, driftPauseMax)
	} else {
		h.pause = driftPause
	}
	h.resyncs++
	h.last, h.reports, h.p, h.a = now, 0, 0, 0
	return true
}

// collect emits the metrics.
func (d *drift) collect(e emitter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, h := range d.by {
		labels := []string{"instance", k.instance, "tenant", k.tenant}
		e.counter("predicted_hit_tokens_total", "Tokens that the index said an engine holds of its prompts.", h.predicted, labels...)
		e.counter("actual_hit_tokens_total", "Tokens that the engine found of these.", h.actual, labels...)
		e.counter("drift_resyncs_total", "Times that both differed so much that the engine was asked for everything.", h.resyncs, labels...)
	}
}
