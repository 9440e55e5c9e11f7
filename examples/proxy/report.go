package main

import (
	"context"
	"log/slog"
)

const (
	maxReports = 4096 // that wait: four for each of the requests that there may be at once; what is more is dropped, and counted
	maxBatch   = 256  // of one call
)

// reporter tells the conductor how requests go, those of an instance in the order in which it is told, and keeps nobody waiting.
type reporter struct {
	p     *Proxy
	queue chan report
	done  chan struct{}
}

// report is something that happened at an instance.
type report struct {
	instance string
	progress progress
}

// newReporter starts to report, until the context ends.
func newReporter(ctx context.Context, p *Proxy) *reporter {
	r := &reporter{p: p, queue: make(chan report, maxReports), done: make(chan struct{})}
	go r.run(ctx)
	return r
}

// tell queues a report.
func (r *reporter) tell(x report) {
	select {
	case r.queue <- x:
	default:
		r.p.metrics.lostReports.Inc()
	}
}

func (r *reporter) run(ctx context.Context) {
	defer close(r.done)
	for {
		select {
		case first := <-r.queue:
			r.send(ctx, first)
		case <-ctx.Done():
			return
		}
	}
}

// send sends what waits, one call for each instance.
func (r *reporter) send(ctx context.Context, first report) {
	batches := map[string][]progress{first.instance: {first.progress}}
	for n := 1; n < maxBatch && len(r.queue) > 0; n++ {
		x := <-r.queue
		batches[x.instance] = append(batches[x.instance], x.progress)
	}
	for instance, requests := range batches {
		if _, err := r.p.conductor.report(ctx, instance, r.p.cfg.TenantID, requests...); err != nil {
			r.p.metrics.lostReports.Add(float64(len(requests)))
			r.p.log.LogAttrs(ctx, slog.LevelDebug, "the conductor takes no report",
				slog.String("instance", instance), slog.Any("error", err))
		}
	}
}
