package paper

import (
	"context"
	"slices"

	"larder/internal/plot"
	"larder/internal/workload"
)

var blockPopularity = Experiment{
	Name:   "block-popularity",
	Title:  "Popularity of blocks",
	Source: "arXiv report, figure 6",
	Theirs: "over half of all blocks are never used again, while a few are used thousands of times.",
	run:    runBlockPopularity,
}

// uses counts the accesses to each block, most first.
func uses(t workload.Trace) []int {
	count := make(map[uint32]int)
	for i := range t {
		for _, b := range t[i].Blocks {
			count[b]++
		}
	}
	all := make([]int, 0, len(count))
	for _, n := range count {
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b int) int { return b - a })
	return all
}

func runBlockPopularity(_ context.Context, l *lab, f *Finding) error {
	t, name, err := l.anyTrace()
	if err != nil {
		return err
	}
	all := uses(t)
	once := 0
	byUses := make([]float64, len(all))
	ranked := plot.Series{Name: "uses"}
	for i, n := range all {
		byUses[i] = float64(n)
		ranked.X, ranked.Y = append(ranked.X, float64(i+1)), append(ranked.Y, float64(n))
		if n == 1 {
			once++
		}
	}
	never := float64(once) / float64(max(1, len(all)))
	f.Setup = "Accesses to each block of " + name + "."
	f.between("blocks never used again", Share, never, 0.5, 1)
	f.row("uses of the most popular block", Plain, byUses[0])
	f.row("blocks used 1,000 times and "+
		"more", Plain, float64(len(all)-len(slices.DeleteFunc(slices.Clone(all), func(n int) bool { return n >= 1000 }))))
	cdf := plot.CDF("blocks", byUses)
	d := &plot.Lines{
		Title: "Blocks by how often they are " +
			"used", X: plot.Axis{Label: "uses", Log: true}, Y: plot.Axis{Label: "blocks", Unit: plot.Share, Max: 1},
		Series: []plot.Series{cdf},
	}
	f.draw("cdf", d.Title, d)
	d = &plot.Lines{
		Title: "Uses of blocks by rank", X: plot.Axis{Label: "rank", Log: true}, Y: plot.Axis{Label: "uses", Log: true},
		Series: []plot.Series{ranked},
	}
	f.draw("rank", d.Title, d)
	f.check(never > 0.5, "over half of the blocks are never used again")
	f.check(all[0] >= 1000, "a few are used thousands of times")
	f.say("%s of %s blocks are used once and the most popular one %s times.", percent(never), grouped(len(all)), grouped(all[0]))
	if all[0] < 1000 {
		f.say("Their trace has prompts that all requests begin with, this one has none or is short.")
	}
	return nil
}
