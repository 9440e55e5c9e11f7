package paper

import (
	"context"
	"fmt"

	"larder/internal/plot"
)

var hotKeys = Experiment{
	Name:   "hot-keys",
	Title:  "Replicas of hot keys",
	Source: "FAST'25, section 5.3",
	Theirs: "the 100 keys that are used most end up replicated on almost every prefill instance.",
	run:    runHotKeys,
}

func runHotKeys(ctx context.Context, l *lab, f *Finding) error {
	t, name, err := l.anyTrace()
	if err != nil {
		return err
	}
	s := scenario("hot keys")
	s.Trace, s.Overload, s.TTFTSLO, s.TBTSLO = t, "none", 0, 0
	local := s
	local.Policy = "cache-aware"
	results, err := l.run(ctx, s, local)
	if err != nil {
		return err
	}
	d := &plot.Lines{
		Title: "Replicas of the 100 keys used most", X: plot.Axis{Label: "rank by uses"},
		Y: plot.Axis{Label: "prefill instances that hold it", Max: float64(s.Prefill)},
	}
	means := make([]float64, len(results))
	for i, r := range results {
		line := plot.Series{Name: r.Scenario.Policy, Step: true}
		for k, h := range r.HotKeys {
			line.X, line.Y = append(line.X, float64(k+1)), append(line.Y, float64(h.Replicas))
		}
		means[i] = mean(line.Y)
		d.Series = append(d.Series, line)
	}
	f.draw("", d.Title, d)
	f.Setup = fmt.Sprintf("Replay of %s at its own speed on %s; where the keys lie when it ends.", name, cluster(&s))
	f.between("replicas of the top 100 keys, KVCache-centric", Plain, means[0], float64(s.Prefill)-2, float64(s.Prefill))
	f.row("the same, local cache-aware", Plain, means[1])
	f.row("replications of hot prefixes", Plain, float64(results[0].Replications))
	f.check(means[0] >= float64(s.Prefill)-2, "on almost every prefill instance (%d of %d or more in the mean)", s.Prefill-2, s.Prefill)
	f.check(means[0] > means[1], "migration makes more replicas than choosing by local caches does")
	hot := results[0].HotKeys
	if len(hot) == 0 {
		f.say("No key was used.")
		return nil
	}
	f.say("The most used key is used %s times, the hundredth %s times; the former has %d replicas and the latter %d.",
		grouped(hot[0].Uses), grouped(hot[len(hot)-1].Uses), hot[0].Replicas, hot[len(hot)-1].Replicas)
	if means[0] < float64(s.Prefill)-2 {
		f.say("Keys that few conversations share need no more replicas than there are nodes that compute these; " +
			"of this trace only the first keys are shared by all: see the popularity of blocks. The paper counts keys of longer operation.")
	}
	return nil
}
