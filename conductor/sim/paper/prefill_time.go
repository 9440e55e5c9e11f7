package paper

import (
	"context"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var prefillTime = Experiment{
	Name:   "prefill-time",
	Title:  "Mean prefill GPU time against vLLM",
	Source: "FAST'25",
	Theirs: "36% less than vLLM on conversation and 64% less on synthetic; vLLM with prefix caching takes 1.43 and 2.59 times as long " +
		"as theirs.",
	traced: true,
	run:    runPrefillTime,
}

func runPrefillTime(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "synthetic")
	if err != nil {
		return err
	}
	systems := against16[:3]
	var scenarios []sim.Scenario
	for _, w := range loads {
		for _, sys := range systems {
			s := scenario(w.name + ", " + sys.name)
			s.Trace, s.Overload, s.TTFTSLO, s.TBTSLO = w.trace, "none", 0, 0
			sys.apply(&s)
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	theirSaving, theirCached := []float64{0.36, 0.64}, []float64{1.43, 2.59}
	d := &plot.Bars{Title: "Mean prefill GPU time of a request", Y: plot.Axis{Label: "seconds of a node", Unit: plot.Seconds}}
	for _, sys := range systems {
		d.Series = append(d.Series, plot.BarSeries{Name: sys.name})
	}
	var saved, cached []float64
	for w := range loads {
		d.Groups = append(d.Groups, loads[w].name)
		ours, plain, prefix := results[3*w], results[3*w+1], results[3*w+2]
		for i := range systems {
			d.Series[i].Values = append(d.Series[i].Values, results[3*w+i].PrefillSeconds)
		}
		saved = append(saved, 1-ours.PrefillSeconds/plain.PrefillSeconds)
		cached = append(cached, prefix.PrefillSeconds/ours.PrefillSeconds)
		f.beside(loads[w].name+": less than vLLM", Share, saved[w], theirSaving[w])
		f.beside(loads[w].name+": vLLM with prefix caching by ours", Times, cached[w], theirCached[w])
		f.row(loads[w].name+": prefix of prompts reused, ours", Share, ours.PrefixRatio)
		f.row(loads[w].name+": prefix of prompts reused, vLLM with prefix caching", Share, prefix.PrefixRatio)
	}
	f.draw("", d.Title, d)
	f.Setup = "At the workloads' own speed, 8 prefill and 8 decode nodes against 16 coupled instances, nothing rejected. " +
		"" + capital(l.describe(loads)) + "."
	f.check(saved[0] > 0 && saved[1] > 0, "less than vLLM on both")
	f.check(saved[1] > saved[0], "more is saved on synthetic than on conversation")
	f.check(cached[0] > 1 && cached[1] > 1, "vLLM with prefix caching takes longer than ours on both")
	f.say("Ours reuses %s and %s of the prompts; what it saves differs from that since what is left is the dearer part, which attends "+
		"to all before it. vLLM's own cache is what its KV memory leaves on each of 16 instances that do not know of each other, and "+
		"reuses %s and %s.",
		percent(results[0].PrefixRatio), percent(results[3].PrefixRatio), percent(results[2].PrefixRatio), percent(results[5].PrefixRatio))
	return nil
}
