package paper

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// Config says what to run.
type Config struct {
	Trace     workload.Trace // in the published format; nil: experiments that need one are left out
	TraceName string         // as the report calls it
	Quick     bool           // the same experiments on fewer requests and points: for trying, not for figures
	Only      *regexp.Regexp // names of experiments; nil: all
	// Progress is told the name of the experiment under way and how many simulations it has finished, if it is set. It may be
	// called from several goroutines at a time.
	Progress func(name string, runs int)
}

// Experiment is one experiment of the papers.
type Experiment struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Source string `json:"source"` // paper, and what of it
	Theirs string `json:"theirs"` // what they found, in a sentence

	traced bool // it needs the trace
	run    func(ctx context.Context, l *lab, f *Finding) error
}

// experiments is all of them, in the order of the report.
var experiments = []Experiment{
	prefillPolicies, prefillPoliciesArXiv, overload,
	effectiveCapacity, prefillTime, endToEnd, realWorkload,
	globalPool, cacheCapacity, policyGrid, blockPopularity, hotKeys,
	bandwidth, pdRatio, storeLatency, reuseBound,
}

// Names are the experiments' names, in order.
func Names() []string {
	names := make([]string, len(experiments))
	for i := range experiments {
		names[i] = experiments[i].Name
	}
	return names
}

// ErrNoneChosen is wrapped by errors of a Config whose Only chooses nothing.
var ErrNoneChosen = errors.New("paper: no experiment has such a name")

// Run runs the experiments that were chosen, one after the other, and each one's simulations on all processors. It fails at
// the first that fails, with what was found before, and when ctx ends.
func Run(ctx context.Context, cfg *Config) (*Report, error) {
	r := newReport(cfg)
	l := newLab(cfg)
	chosen := false
	for i := range experiments {
		e := &experiments[i]
		if cfg.Only != nil && !cfg.Only.MatchString(e.Name) {
			continue
		}
		chosen = true
		if e.traced && cfg.Trace == nil {
			r.Left = append(r.Left, Left{e.Name, e.Title, "it needs the published conversation trace, or another in its format: give one"})
			continue
		}
		l.begin(e.Name)
		f := Finding{Experiment: *e}
		if err := e.run(ctx, l, &f); err != nil {
			return r, fmt.Errorf("paper: %s: %w", e.Name, err)
		}
		r.Findings = append(r.Findings, f)
	}
	if cfg.Only == nil {
		r.Left = append(r.Left, Left{
			"transfer-engine", "Transfer engine, 40 GB (87 GB/s on 4x200 Gbps, 190 GB/s on 8x400)",
			"it is about real network cards and not simulated: larder transfer bench measures what this machine's reach",
		})
	}
	if !chosen {
		return r, fmt.Errorf("%w as %q: choose from %s", ErrNoneChosen, cfg.Only, strings.Join(Names(), ", "))
	}
	return r, nil
}

// published is what the conversation trace is known by.
var published = struct{ requests, accesses, distinct int }{12_031, 288_500, 182_790}

// isPublished tells whether a trace is the one that FAST'25 published.
func isPublished(t workload.Trace) bool {
	return len(t) == published.requests && t.Accesses() == published.accesses && t.Distinct() == published.distinct
}

// scenario is a cluster as both papers have it, without a trace.
func scenario(name string) sim.Scenario {
	s := sim.Default()
	s.Name = name
	return s
}

// cluster names the nodes of a scenario.
func cluster(s *sim.Scenario) string {
	what := "vLLM-like instances"
	switch {
	case s.Coupled > 0 && s.CoupledPrefix:
		what += " with prefix cache"
	case s.Coupled > 0 && s.CoupledChunk > 0:
		what += " with chunked prefill"
	}
	if s.Coupled > 0 {
		return fmt.Sprintf("%d coupled %s", s.Coupled, what)
	}
	return fmt.Sprintf("%d prefill and %d decode nodes", s.Prefill, s.Decode)
}
