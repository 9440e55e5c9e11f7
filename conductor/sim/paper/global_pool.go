package paper

import (
	"context"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var globalPool = Experiment{
	Name:   "global-pool",
	Title:  "A global pool against local caches",
	Source: "FAST'25, section 5.3",
	Theirs: "with 10 prefill nodes of 3M tokens each, up to 2.36 times the hits of local caches, and down to 0.52 times the prefill GPU time.",
	run:    runGlobalPool,
}

func runGlobalPool(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "tool-agent", "synthetic")
	if err != nil {
		return err
	}
	var scenarios []sim.Scenario
	for _, w := range loads {
		for _, kind := range []string{"local", "pool"} {
			s := scenario(w.name + ", " + kind)
			s.Trace, s.Prefill, s.Decode, s.CacheTokens = w.trace, 10, 6, 3_000_000
			s.Overload, s.TTFTSLO, s.TBTSLO = "none", 0, 0
			s.Policy = "load-balance" // each node uses what it has itself
			if s.Pool = kind == "pool"; s.Pool {
				s.Policy = "kvcache-centric"
			}
			s.EvictionPolicy = "lru" // as theirs
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	d := &plot.Bars{Title: "Hit ratio", Y: plot.Axis{Label: "blocks of prompts", Unit: plot.Share}, Series: []plot.BarSeries{{Name: "local"}, {Name: "pool"}}}
	most, least := 0.0, 1e9
	for i, w := range loads {
		local, pool := results[2*i], results[2*i+1]
		hits, took := pool.HitRatio/max(1e-9, local.HitRatio), pool.PrefillSeconds/local.PrefillSeconds
		most, least = max(most, hits), min(least, took)
		f.row(w.name+": hit ratio, local", Share, local.HitRatio)
		f.row(w.name+": hit ratio, pool", Share, pool.HitRatio)
		f.between(w.name+": hits, pool by local", Times, hits, 1, 2.36)
		f.between(w.name+": prefill GPU time, pool by local", Times, took, 0.52, 1)
		d.Groups = append(d.Groups, w.name)
		d.Series[0].Values = append(d.Series[0].Values, local.HitRatio)
		d.Series[1].Values = append(d.Series[1].Values, pool.HitRatio)
	}
	f.draw("", d.Title, d)
	f.Setup = "10 prefill and 6 decode nodes, 3M tokens of cache each, LRU as theirs: once as local caches behind a balancer of load, once as one pool. " +
		capital(l.describe(loads)) + "."
	f.check(most > 1, "a pool hits more than local caches")
	f.check(least < 1, "prefill takes less GPU time with a pool")
	f.check(near(most, 2.36, 0.5), "up to about 2.36 times the hits (within half)")
	f.say("A pool hits up to %.2f times as much as local caches and takes down to %.2f of the prefill time.", most, least)
	if most > 2.36*1.1 {
		f.say("More than theirs: behind a balancer of load alone a prompt meets its own earlier turn on one node in ten; " +
			"their local caches had a scheduler that is not described.")
	}
	return nil
}
