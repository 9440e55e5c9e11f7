package paper

import (
	"context"

	"larder/conductor/sim"
	"larder/internal/plot"
	"larder/internal/workload"
)

var cacheCapacity = Experiment{
	Name:   "cache-capacity",
	Title:  "Hits by cache capacity",
	Source: "FAST'25",
	Theirs: "3M tokens, what a node's memory holds, give less than half of the possible hits in most workloads; 50M tokens nearly all.",
	run:    runCacheCapacity,
}

// load is a workload by name.
type load struct {
	name  string
	trace workload.Trace
}

func runCacheCapacity(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "tool-agent", "synthetic")
	if err != nil {
		return err
	}
	const block, local, global = 512, 3_000_000, 50_000_000
	capacities := pick(l, 300_000, 1_000_000, local, 10_000_000, 20_000_000, global, 100_000_000)
	blocks := make([]int, 0, len(capacities)+3)
	for _, c := range capacities {
		blocks = append(blocks, c/block)
	}
	blocks = append(blocks, local/block, global/block, 0)
	at := len(capacities) // of local, global, unbounded
	grid := make([][]sim.HitRatio, len(loads))
	if err := l.each(ctx, len(loads), func(_ context.Context, i int) (err error) {
		grid[i], err = sim.HitRatios(loads[i].trace, []string{"lru", ownPolicy}, blocks)
		l.progress(int(l.runs.Add(1)))
		return err //nolint:wrapcheck // says all
	}); err != nil {
		return err
	}
	d := &plot.Lines{
		Title: "Share of the possible hits, LRU", X: plot.Axis{Label: "tokens of cache", Log: true},
		Y: plot.Axis{Label: "of unbounded", Unit: plot.Share, Max: 1},
	}
	under, nearly := 0, 0
	for i, w := range loads {
		share := func(policyIndex, k int) float64 {
			row := grid[i][policyIndex*len(blocks):]
			return row[k].Ratio / max(1e-9, row[len(blocks)-1].Ratio)
		}
		s := plot.Series{Name: w.name, Dots: true}
		for k, c := range capacities {
			s.X, s.Y = append(s.X, float64(c)), append(s.Y, share(0, k))
		}
		d.Series = append(d.Series, s)
		f.between(w.name+", 3M tokens, LRU", Share, share(0, at), 0, 0.5)
		f.row(w.name+", 3M tokens, "+ownPolicy, Share, share(1, at))
		f.between(w.name+", 50M tokens, LRU", Share, share(0, at+1), 0.9, 1)
		if share(0, at) < 0.5 {
			under++
		}
		if share(0, at+1) > 0.9 {
			nearly++
		}
	}
	f.draw("", d.Title, d)
	f.Setup = "One cache for all requests of a workload, blocks of 512 tokens: " + l.describe(loads) + "."
	f.check(2*under > len(loads), "3M tokens give less than half of the possible hits in most workloads")
	f.check(nearly == len(loads), "50M tokens give nearly all")
	f.say("3M tokens give less than half of the possible hits in %d of %d workloads, 50M over 90%% in %d.", under, len(loads), nearly)
	if l.hasGenerated(loads) {
		f.say("Generated workloads have the papers' lengths and hit ratios; how long blocks wait for their next use, on which this " +
			"depends, the papers do not give for them: requests of a session lie about a minute apart.")
	}
	return nil
}
