package paper

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// lab is what experiments share: traces, which are read or made once, and processors.
type lab struct {
	cfg       *Config
	published bool           // the trace is the one of FAST'25
	trace     workload.Trace // as given, or its beginning
	name      string         // of the experiment under way
	runs      atomic.Int64   // that it has finished

	mu     sync.Mutex
	traces map[sim.Workload]workload.Trace
}

// quickRequests bounds the requests of a trace where figures do not matter.
const quickRequests = 200

func newLab(cfg *Config) *lab {
	l := &lab{cfg: cfg, published: isPublished(cfg.Trace), trace: cfg.Trace, traces: make(map[sim.Workload]workload.Trace)}
	if cfg.Quick {
		l.trace = l.trace[:min(len(l.trace), quickRequests)]
	}
	return l
}

// begin is called before each experiment.
func (l *lab) begin(name string) {
	l.name = name
	l.runs.Store(0)
	l.progress(0)
}

func (l *lab) progress(runs int) {
	if l.cfg.Progress != nil {
		l.cfg.Progress(l.name, runs)
	}
}

// pick is all of a list, or where figures do not matter its ends and its middle.
func pick[T any](l *lab, all ...T) []T {
	if !l.cfg.Quick || len(all) < 4 {
		return all
	}
	return []T{all[0], all[len(all)/2], all[len(all)-1]}
}

// generated makes a workload once.
func (l *lab) generated(w sim.Workload) (workload.Trace, error) {
	if l.cfg.Quick && (w.Requests == 0 || w.Requests > quickRequests) {
		w.Requests = quickRequests
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t, ok := l.traces[w]; ok {
		return t, nil
	}
	t, err := sim.Generate(w)
	if err != nil {
		return nil, err //nolint:wrapcheck // says all
	}
	l.traces[w] = t
	return t, nil
}

// run simulates scenarios side by side and returns their results in order.
func (l *lab) run(ctx context.Context, scenarios ...sim.Scenario) ([]*sim.Result, error) {
	results := make([]*sim.Result, len(scenarios))
	err := l.each(ctx, len(scenarios), func(ctx context.Context, i int) (err error) {
		if results[i], err = sim.Run(ctx, &scenarios[i]); err != nil {
			return fmt.Errorf("%s: %w", scenarios[i].Name, err)
		}
		l.progress(int(l.runs.Add(1)))
		return nil
	})
	return results, err
}

// each calls do for 0 to n-1 on all processors, and returns the error of the lowest that failed. The others still end.
func (l *lab) each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	errs := make([]error, n)
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if errs[i] = ctx.Err(); errs[i] == nil {
					errs[i] = do(ctx, i)
				}
			}
		})
	}
	workers.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// anyTrace is the trace that was given, or else generated conversations, with what to call it.
func (l *lab) anyTrace() (workload.Trace, string, error) {
	if l.trace != nil {
		return l.trace, l.traceText(), nil
	}
	t, err := l.generated(workloadOf("conversation"))
	return t, "a generated workload of the conversation trace's lengths and hit ratio", err
}

// traceText names the trace that was given.
func (l *lab) traceText() string {
	if l.published {
		return "the published conversation trace"
	}
	return "the trace " + l.cfg.TraceName
}

// given names the workload that the trace stands for.
const given = "conversation"

// workloadOf is a generated workload as the papers have it.
func workloadOf(name string) sim.Workload { return sim.Workload{Name: name, BlockSize: 512, Seed: 1} }

// loads are workloads by name: conversations are the trace that was given if there is one, others are generated.
func (l *lab) loads(names ...string) ([]load, error) {
	var all []load
	for _, name := range names {
		if name == given && l.trace != nil {
			all = append(all, load{name, l.trace})
			continue
		}
		t, err := l.generated(workloadOf(name))
		if err != nil {
			return nil, err
		}
		all = append(all, load{name, t})
	}
	return all, nil
}

// describe tells which workloads are generated.
func (l *lab) describe(loads []load) string {
	var generated []string
	text := ""
	for _, w := range loads {
		if w.name == given && l.trace != nil {
			text = "conversation is " + l.traceText()
		} else {
			generated = append(generated, w.name)
		}
	}
	if len(generated) == 0 {
		return text
	}
	if text != "" {
		text += "; "
	}
	return text + list(generated) + " generated"
}

// hasGenerated reports whether any of some workloads is generated.
func (l *lab) hasGenerated(loads []load) bool {
	for _, w := range loads {
		if w.name != given || l.trace == nil {
			return true
		}
	}
	return false
}
