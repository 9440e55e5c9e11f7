package paper

import (
	"context"
	"fmt"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var hotKeys = Experiment{
	Name:   "hot-keys",
	Title:  "Replicas of hot keys",
	Source: "FAST'25",
	Theirs: "the 100 keys that are used most end up replicated on almost every prefill instance.",
	run:    runHotKeys,
}

func runHotKeys(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "system-prompts")
	if err != nil {
		return err
	}
	var scenarios []sim.Scenario
	for _, w := range loads {
		for _, policy := range []string{"kvcache-centric", "cache-aware"} {
			s := scenario(w.name + ", " + policy)
			s.Trace, s.Policy, s.Overload, s.TTFTSLO, s.TBTSLO = w.trace, policy, "none", 0, 0
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	nodes := scenarios[0].Prefill
	f.Setup = fmt.Sprintf("Replay at the workloads' own speed on %s; where the 100 keys that were used most lie when it ends. %s: "+
		"conversations below many system prompts, a few of which are used by most.", cluster(&scenarios[0]), capital(l.describe(loads)))
	d := &plot.Lines{
		Title: "Replicas of the 100 keys used most", X: plot.Axis{Label: "rank by uses"},
		Y: plot.Axis{Label: "prefill instances that hold it", Max: float64(nodes)},
	}
	for i, w := range loads {
		central, local := replicas(results[2*i], w.name+", KVCache-centric"), replicas(results[2*i+1], w.name+", cache-aware")
		d.Series = append(d.Series, central, local)
		f.between(central.Name, Plain, mean(central.Y), float64(nodes)-2, float64(nodes))
		f.row(local.Name, Plain, mean(local.Y))
		f.row(w.name+": replications of hot prefixes", Plain, float64(results[2*i].Replications))
		f.check(mean(central.Y) >= float64(nodes)-2, "%s: on almost every prefill instance (%d of %d or more in the "+
			"mean)", w.name, nodes-2, nodes)
		f.check(mean(central.Y) > mean(local.Y), "%s: migration makes more replicas than choosing by local caches does", w.name)
		if hot := results[2*i].HotKeys; len(hot) > 0 {
			first, last := hot[0], hot[len(hot)-1]
			f.say("%s: the most used key is used %s times and has %d replicas, the hundredth %s times and %d.", capital(w.name),
				grouped(first.Uses), first.Replicas, grouped(last.Uses), last.Replicas)
			if gone := count(central.Y, 0); gone > 0 {
				f.say("%d of the 100 are cached nowhere at the end: their uses were over before, and they have been evicted.", gone)
			}
		}
	}
	f.draw("", d.Title, d)
	return nil
}

// count is how many values are the given one.
func count(values []float64, value float64) (n int) {
	for _, v := range values {
		if v == value {
			n++
		}
	}
	return n
}

// replicas is how many instances hold each of the keys used most, at the end of a run.
func replicas(r *sim.Result, name string) plot.Series {
	s := plot.Series{Name: name, Step: true}
	for k, h := range r.HotKeys {
		s.X, s.Y = append(s.X, float64(k+1)), append(s.Y, float64(h.Replicas))
	}
	return s
}
