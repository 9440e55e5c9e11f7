package paper

import (
	"context"
	"math"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var globalPool = Experiment{
	Name:   "global-pool",
	Title:  "A global pool against local caches",
	Source: "FAST'25",
	Theirs: "with 10 prefill nodes of 3M tokens each, up to 2.36 times the hits of local caches, and down to 0.52 times the prefill GPU " +
		"time.",
	run: runGlobalPool,
}

func runGlobalPool(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "tool-agent", "synthetic")
	if err != nil {
		return err
	}
	kinds := []struct{ name, policy string }{{"local, by load", "load-balance"}, {"local, by " +
		"cache", "cache-aware"}, {"pool", "kvcache-centric"}}
	var scenarios []sim.Scenario
	for _, w := range loads {
		for _, kind := range kinds {
			s := scenario(w.name + ", " + kind.name)
			s.Trace, s.Prefill, s.Decode, s.CacheTokens = w.trace, 10, 6, 3_000_000
			s.Overload, s.TTFTSLO, s.TBTSLO = "none", 0, 0
			s.Policy, s.Pool = kind.policy, kind.name == "pool"
			s.EvictionPolicy = "lru" // as theirs
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	d := &plot.Bars{Title: "Hit ratio", Y: plot.Axis{Label: "blocks of prompts", Unit: plot.Share}}
	for _, kind := range kinds {
		d.Series = append(d.Series, plot.BarSeries{Name: kind.name})
	}
	const theirHits, theirTime = 2.36, 0.52
	most, least := make([]float64, 2), []float64{math.Inf(1), math.Inf(1)} // against each kind of local caches
	for i, w := range loads {
		runs := results[i*len(kinds) : (i+1)*len(kinds)]
		pool := runs[2]
		d.Groups = append(d.Groups, w.name)
		for k, kind := range kinds {
			f.row(w.name+", "+kind.name+": hit ratio", Share, runs[k].HitRatio)
			d.Series[k].Values = append(d.Series[k].Values, runs[k].HitRatio)
		}
		for k, kind := range kinds[:2] {
			hits, took := pool.HitRatio/max(1e-9, runs[k].HitRatio), pool.PrefillSeconds/runs[k].PrefillSeconds
			most[k], least[k] = max(most[k], hits), min(least[k], took)
			f.between(w.name+": hits, pool by "+kind.name, Times, hits, 1, theirHits)
			f.between(w.name+": prefill GPU time, pool by "+kind.name, Times, took, theirTime, 1)
		}
	}
	f.draw("", d.Title, d)
	f.Setup = "10 prefill and 6 decode nodes, 3M tokens of cache each, LRU as theirs: as local caches behind a balancer of load, as " +
		"local caches behind a scheduler that knows them, and as one pool. " + capital(l.describe(loads)) + "."
	f.check(least[0] < 1 && least[1] < 1 && most[1] > 1, "a pool hits more and takes less GPU time than local caches of either kind")
	f.check(most[1] <= theirHits && theirHits <= most[0], "2.36 times the hits lies between the two kinds of local caches")
	f.check(least[0] <= theirTime && theirTime <= least[1], "and so does 0.52 times the GPU time")
	f.say("A pool hits up to %.2f times as much as local caches behind a balancer of load and %.2f times as much as those whose "+
		"scheduler knows them, and takes down to %.2f and %.2f of their prefill time. How requests came to the local caches of theirs "+
		"is not described.", most[0], most[1], least[0], least[1])
	return nil
}
