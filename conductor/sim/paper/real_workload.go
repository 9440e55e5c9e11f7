package paper

import (
	"context"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var realWorkload = Experiment{
	Name:   "real-workload",
	Title:  "10P+10D against 20 vLLM instances on the real workload",
	Source: "arXiv report, figure 13",
	Theirs: "TTFT is nearly the same and within 30 s for almost all; TBT is within 0.1 s for about 100% of requests against 57% of " +
		"vLLM's; 75% more requests within both limits.",
	run: runRealWorkload,
}

func runRealWorkload(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("real")
	if err != nil {
		return err
	}
	systems := []system{disaggregated("10P+10D", 10, 10), coupled("vLLM x20", 20, false, 0)}
	scenarios := make([]sim.Scenario, len(systems))
	for i, sys := range systems {
		s := scenario(sys.name)
		s.Trace = loads[0].trace
		if s.Model, err = sim.FindModel("llama2-70b"); err != nil {
			return err //nolint:wrapcheck // says all
		}
		sys.apply(&s)
		scenarios[i] = s
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	speeds := make([]float64, len(systems))
	if err := l.each(ctx, len(systems), func(ctx context.Context, i int) (err error) {
		speeds[i], _, err = l.capacity(ctx, &scenarios[i], slowest, fastest, func(r *sim.Result) bool { return r.Attainment >= enough })
		return err
	}); err != nil {
		return err
	}
	for _, what := range []string{"TTFT", "TBT"} {
		d := &plot.Lines{
			Title: what + " on the real workload", X: plot.Axis{Label: what + " by its " +
				"limit", Limit: 3}, Y: plot.Axis{Label: "requests", Unit: plot.Share, Max: 1},
		}
		for i, r := range results {
			values, limit := ttfts(r), scenarios[i].TTFTSLO.Seconds()
			if what == "TBT" {
				values, limit = tbts(r), scenarios[i].TBTSLO.Seconds()
			}
			for k := range values {
				values[k] /= limit
			}
			d.Series = append(d.Series, plot.CDF(systems[i].name, values))
		}
		f.draw(what, d.Title, d)
	}
	ours, vllm := results[0], results[1]
	f.beside("10P+10D: TTFT within 30 s", Share, ours.TTFTMet, 1)
	f.beside("vLLM: TTFT within 30 s", Share, vllm.TTFTMet, 1)
	f.beside("10P+10D: TBT within 0.1 s", Share, ours.TBTMet, 1)
	f.beside("vLLM: TBT within 0.1 s", Share, vllm.TBTMet, 0.57)
	f.beside("requests within both limits, 10P+10D by vLLM", Times, ours.Attainment/max(1e-9, vllm.Attainment), 1.75)
	f.row("10P+10D: speed carried", Times, speeds[0])
	f.row("vLLM: speed carried", Times, speeds[1])
	f.Setup = "The generated workload of the report's real data (" + grouped(len(loads[0].trace)) + " requests in an hour) at its own " +
		"speed; TTFT limit 30 s, TBT limit 0.1 s. Carried is the speed at which " + percent(enough) + " are within both limits."
	f.check(ours.TTFTMet > 0.95 && vllm.TTFTMet > 0.95, "almost all are within the TTFT limit, of both")
	f.check(ours.TBTMet > 0.95, "almost all of 10P+10D's are within the TBT limit")
	f.check(vllm.TBTMet < 0.9, "far fewer of vLLM's are")
	f.check(ours.Attainment > vllm.Attainment, "more requests within both limits than vLLM")
	f.say("Within the TBT limit are %s of ours and %s of vLLM's.", percent(ours.TBTMet), percent(vllm.TBTMet))
	switch {
	case vllm.TBTMet < 0.5:
		f.say("vLLM does worse than theirs: here every prompt is computed whole between two decode steps, at the calibrated speed for "+
			"%s in the mean, and the mean of the longest tenth of a request's gaps is compared with the "+
			"limit.", Value(vllm.PrefillSeconds).text(Seconds))
	case vllm.TBTMet > 0.65:
		f.say("vLLM does better than theirs.")
	default:
		f.say("That is near theirs.")
	}
	return nil
}
