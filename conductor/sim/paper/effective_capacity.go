package paper

import (
	"context"
	"fmt"
	"math"
	"time"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var effectiveCapacity = Experiment{
	Name:   "effective-capacity",
	Title:  "Effective request capacity against vLLM",
	Source: "FAST'25",
	Theirs: "on conversation 59% to 498% more requests within TTFT 30 s and TBT limits of 100, 200 and 300 ms than vLLM, vLLM with " +
		"prefix caching and vLLM with chunked prefill; on synthetic 40% more than vLLM at 200 ms.",
	traced: true,
	run:    runEffectiveCapacity,
}

// vllmChunk is the tokens of a step of vLLM with chunked prefill: its default at the time of the papers.
const vllmChunk = 512

// system is a kind of cluster.
type system struct {
	name  string
	apply func(*sim.Scenario)
}

// disaggregated is a cluster as the papers have theirs.
func disaggregated(name string, prefill, decode int) system {
	return system{name, func(s *sim.Scenario) { s.Prefill, s.Decode = prefill, decode }}
}

// coupled is a cluster of vLLM-like instances, behind a balancer of load. It rejects nothing.
func coupled(name string, n int, prefix bool, chunk int) system {
	return system{name, func(s *sim.Scenario) {
		s.Prefill, s.Decode, s.Coupled, s.CoupledPrefix, s.CoupledChunk = 0, 0, n, prefix, chunk
		s.Overload = "none"
	}}
}

// against16 is the systems of 16 nodes that FAST'25 compares, ours first.
var against16 = []system{
	disaggregated("Larder", 8, 8),
	coupled("vLLM", 16, false, 0),
	coupled("vLLM, prefix caching", 16, true, 0),
	coupled("vLLM, chunked prefill", 16, false, vllmChunk),
}

// tbtLimits are those of FAST'25.
var tbtLimits = []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond}

// enough is the share of requests within their limits that makes a load one that a cluster carries.
const enough = 0.9

// Bounds of the speeds that are tried for the largest one that a cluster carries.
const (
	slowest, fastest = 1.0 / 16, 16.0
	precision        = 0.04
	quickPrecision   = 0.5
)

func (l *lab) precision() float64 {
	if l.cfg.Quick {
		return quickPrecision
	}
	return precision
}

// effective is what a system gets of a workload under a limit.
type effective struct {
	good  float64 // share of requests within the limits at the trace's own speed
	speed float64 // largest at which enough are
}

// effective runs a system at a workload's own speed, and searches for the largest speed that it carries.
func (l *lab) effective(ctx context.Context, base *sim.Scenario) (effective, error) {
	own, err := l.run(ctx, *base)
	if err != nil {
		return effective{}, err
	}
	e := effective{good: own[0].Attainment}
	e.speed, _, err = l.capacity(ctx, base, slowest, fastest, func(r *sim.Result) bool { return r.Attainment >= enough })
	return e, err
}

// capacity is the largest speed at which something holds of a scenario, between two bounds.
func (l *lab) capacity(ctx context.Context, base *sim.Scenario, low, high float64, holds func(*sim.Result) bool) (float64,
	*sim.Result, error,
) {
	speed, r, err := sim.Capacity(ctx, &sim.Search{
		Low: low, High: high, Precision: l.precision(), Holds: func(r *sim.Result) bool {
			l.progress(int(l.runs.Add(1)))
			return holds(r)
		},
		At: func(x float64) (*sim.Scenario, error) {
			s := *base
			s.Speed = x
			return &s, nil
		},
	})
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", base.Name, err)
	}
	return speed, r, nil
}

func runEffectiveCapacity(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "synthetic")
	if err != nil {
		return err
	}
	found := make([]effective, len(loads)*len(tbtLimits)*len(against16))
	at := func(w, limit, sys int) *effective { return &found[(w*len(tbtLimits)+limit)*len(against16)+sys] }
	err = l.each(ctx, len(found), func(ctx context.Context, i int) (err error) {
		w, limit, sys := i/len(against16)/len(tbtLimits), i/len(against16)%len(tbtLimits), i%len(against16)
		s := scenario(loads[w].name + ", " + against16[sys].name)
		s.Trace, s.TBTSLO = loads[w].trace, tbtLimits[limit]
		against16[sys].apply(&s)
		*at(w, limit, sys), err = l.effective(ctx, &s)
		return err
	})
	if err != nil {
		return err
	}
	f.Setup = fmt.Sprintf("Larder on 8 prefill and 8 decode nodes against 16 coupled instances; TTFT limit 30 s. Capacity is the "+
		"largest multiple of the workload's own speed at which %s of the requests are within both limits; beside it the share that is "+
		"at its own speed. %s.",
		percent(enough), capital(l.describe(loads)))
	for w := range loads {
		f.effectiveOf(loads[w].name, w, at)
	}
	f.sayEffective(at)
	return nil
}

// effectiveOf tells of one workload.
func (f *Finding) effectiveOf(name string, w int, at func(w, limit, sys int) *effective) {
	table := Table{Title: "Speed carried, and share within the limits at the own speed, of " + name + ":", Headings: []string{"TBT limit"}}
	d := &plot.Bars{
		Title: "Speed of " + name + " at which " + percent(enough) + " of requests are within the limits", X: plot.Axis{Label: "TBT limit"},
		Y: plot.Axis{Label: "times the trace's own speed"},
	}
	for _, sys := range against16 {
		table.Headings = append(table.Headings, sys.name)
		d.Series = append(d.Series, plot.BarSeries{Name: sys.name})
	}
	for k, limit := range tbtLimits {
		cells := append(make([]string, 0, 1+len(against16)), limit.String())
		d.Groups = append(d.Groups, limit.String())
		for i := range against16 {
			e := at(w, k, i)
			cells = append(cells, Value(e.speed).text(Times)+", "+percent(e.good))
			d.Series[i].Values = append(d.Series[i].Values, e.speed)
		}
		table.Rows = append(table.Rows, cells)
		for i := 1; i < len(against16); i++ {
			what := name + " at " + limit.String() + ": Larder by " + against16[i].name
			more := at(w, k, 0).speed / at(w, k, i).speed
			switch {
			case at(w, k, i).speed == 0:
				f.row(what+", which carries none", Times, math.NaN())
			case name == given:
				f.between(what, Times, more, 1.59, 5.98)
			case i == 1 && limit == 200*time.Millisecond:
				f.beside(what, Times, more, 1.40)
			default:
				f.row(what, Times, more)
			}
		}
	}
	f.Tables = append(f.Tables, table)
	f.draw(name, d.Title, d)
}

// sayEffective compares the directions.
func (f *Finding) sayEffective(at func(w, limit, sys int) *effective) {
	for w, name := range []string{"conversation", "synthetic"} {
		wins, of := 0, 0
		for k := range tbtLimits {
			for i := 1; i < len(against16); i++ {
				of++
				if at(w, k, 0).speed > at(w, k, i).speed {
					wins++
				}
			}
		}
		if w == 0 {
			f.check(wins == of, "%s: more than each of vLLM's three forms under each limit", name)
		} else {
			f.check(at(w, 1, 0).speed > at(w, 1, 1).speed, "%s: more than vLLM at 200 ms", name)
		}
		f.say("%s: Larder carries more than vLLM in %d of %d comparisons.", capital(name), wins, of)
	}
	f.say("In vLLM a whole prompt is computed between two decode steps of all requests of its instance, and with chunked prefill %d "+
		"tokens beside one: these gaps are among the longest tenth, whose mean is compared with the limit.", vllmChunk)
	f.say("On synthetic the paper gives no rate. At 1 request/s and 200 ms %s of ours and %s of vLLM's are within both limits; what is "+
		"compared here are the rates at which %s are, and so the multiple is that of the loads.",
		percent(at(1, 1, 0).good), percent(at(1, 1, 1).good), percent(enough))
}
