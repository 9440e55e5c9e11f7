package paper

import (
	"context"
	"fmt"

	"larder/conductor/sim"
	"larder/internal/plot"
	"larder/meta/policy"
)

var policyGrid = Experiment{
	Name:   "policy-grid",
	Title:  "Hit ratio by eviction policy and capacity",
	Source: "arXiv report, table 1; the exact ratios of the conversation trace were computed independently",
	Theirs: "on the report's own trace LRU hits from 30% (1,000 blocks) to 51% (unbounded), and is a little better than LFU and " +
		"length-aware.",
	run: runPolicyGrid,
}

// ownPolicy is the eviction policy that is Larder's own.
const ownPolicy = "larder"

// gridCapacities are the report's, in blocks, and 3M tokens; 0 is unbounded.
var gridCapacities = []int{1000, 5859, 10_000, 30_000, 50_000, 100_000, 0}

// exact are ratios on the published conversation trace that a right implementation gives, to four digits.
var exact = map[string]map[int]float64{
	"lru":       {1000: 0.0445, 5859: 0.1355, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, 0: 0.3664},
	"sieve":     {1000: 0.0481, 5859: 0.0966, 10_000: 0.1318, 30_000: 0.2759, 50_000: 0.3438, 0: 0.3664},
	sim.Optimum: {1000: 0.1906, 5859: 0.3531, 10_000: 0.3664, 30_000: 0.3664, 50_000: 0.3664, 100_000: 0.3664, 0: 0.3664},
}

// reported are the report's, on a trace that is not published.
var reported = map[string]map[int]float64{
	"lru":          {0: 0.51, 100_000: 0.51, 50_000: 0.50, 30_000: 0.48, 10_000: 0.40, 1000: 0.30},
	"lfu":          {0: 0.51, 100_000: 0.51, 50_000: 0.49, 30_000: 0.43, 10_000: 0.35, 1000: 0.30},
	"length-aware": {0: 0.51, 100_000: 0.50, 50_000: 0.48, 30_000: 0.42, 10_000: 0.35, 1000: 0.30},
}

func runPolicyGrid(ctx context.Context, l *lab, f *Finding) error {
	t, name, err := l.anyTrace()
	if err != nil {
		return err
	}
	policies := append(policy.Names(), sim.Optimum)
	grid := make([][]sim.HitRatio, len(policies))
	if err := l.each(ctx, len(policies), func(_ context.Context, i int) (err error) {
		grid[i], err = sim.HitRatios(t, policies[i:i+1], gridCapacities)
		l.progress(int(l.runs.Add(1)))
		return err //nolint:wrapcheck // says all
	}); err != nil {
		return err
	}
	ratio := make(map[string]map[int]float64)
	table := Table{Title: "Hit ratio by block, capacities in blocks of 512 tokens:", Headings: []string{"policy"}}
	for _, c := range gridCapacities {
		table.Headings = append(table.Headings, blocksText(c))
	}
	d := &plot.Lines{
		Title: "Hit ratio by capacity", X: plot.Axis{Label: "blocks", Log: true}, Y: plot.Axis{Label: "hit ratio", Unit: plot.Share},
	}
	for i, p := range policies {
		ratio[p] = make(map[int]float64)
		cells := []string{p}
		s := plot.Series{Name: p, Dots: true}
		for k, c := range gridCapacities {
			r := grid[i][k].Ratio
			ratio[p][c] = r
			cells = append(cells, Value(r).text(Ratio))
			if c > 0 {
				s.X, s.Y = append(s.X, float64(c)), append(s.Y, r)
			}
		}
		table.Rows = append(table.Rows, cells)
		d.Series = append(d.Series, s)
	}
	f.Setup = "Each block of " + name + " one access, in order, through one cache."
	f.Tables = append(f.Tables, table)
	f.draw("", d.Title, d)
	f.compareExact(l.published && !l.cfg.Quick, ratio)
	f.compareReported(ratio)
	return nil
}

// compareExact checks the ratios that are known, where the trace is the published one.
func (f *Finding) compareExact(known bool, ratio map[string]map[int]float64) {
	if !known {
		f.say("The exact ratios are known for the published trace alone, which this is not in whole.")
		return
	}
	equal, n := true, 0
	for _, p := range []string{"lru", "sieve", sim.Optimum} {
		for _, c := range gridCapacities {
			if want, ok := exact[p][c]; ok {
				f.beside(p+", "+blocksText(c), Ratio, ratio[p][c], want)
				equal = equal && fmt.Sprintf("%.4f", ratio[p][c]) == fmt.Sprintf("%.4f", want)
				n++
			}
		}
	}
	if f.check(equal, "all %d known ratios of LRU, SIEVE and the optimum on this trace, to four digits", n) {
		f.say("All %d ratios that are known exactly are equal.", n)
	} else {
		f.say("Ratios that are known exactly differ: an implementation is wrong.")
	}
}

// compareReported sets the shape of the report's table beside this trace's: what share of all hits there are is hit.
func (f *Finding) compareReported(ratio map[string]map[int]float64) {
	best := true
	for _, c := range []int{1000, 10_000, 30_000, 50_000, 100_000} {
		for _, p := range []string{"lru", "lfu", "length-aware"} {
			f.beside(p+" at "+blocksText(c)+" of unbounded", Share, ratio[p][c]/max(1e-9, ratio[p][0]), reported[p][c]/reported[p][0])
		}
		if c > 1000 { // where the report has all three the same
			best = best && ratio["lru"][c] >= ratio["lfu"][c] && ratio["lru"][c] >= ratio["length-aware"][c]
		}
	}
	f.check(best, "from 10,000 blocks on LRU is as good as LFU and length-aware or better")
	f.check(ratio["lru"][50_000] > 0.9*ratio["lru"][0], "50,000 blocks hit nearly all that there is to hit")
	at := ratio["lru"][1000] / max(1e-9, ratio["lru"][0])
	f.say("With 1,000 blocks LRU hits %s of what there is to hit, on the report's own trace 59%%:", percent(at))
	if at < 0.59 {
		f.say("here less is used again soon. The report's trace is another one, whose most popular prompts fit into 1,000 blocks.")
	} else {
		f.say("more of this trace is used again soon than of the report's.")
	}
	gap := ratio[sim.Optimum][10_000] - ratio["lru"][10_000]
	if won := ratio[ownPolicy][10_000] - ratio["lru"][10_000]; gap > 0 {
		f.say("At 10,000 blocks our own policy (%s) covers %s of the way from LRU to the optimum.", ownPolicy, percent(won/gap))
	}
}

// blocksText names a capacity.
func blocksText(c int) string {
	if c == 0 {
		return "unbounded"
	}
	return grouped(c)
}
