package paper

import (
	"context"
	"fmt"
	"time"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var pdRatio = Experiment{
	Name:   "pd-ratio",
	Title:  "Ratio of prefill to decode nodes",
	Source: "FAST'25, synthetic",
	Theirs: "of 16 nodes, with TTFT under 10 s and TBT under 100 ms, about as many for prefill as for decode carry the most.",
	run:    runPDRatio,
}

func runPDRatio(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("synthetic")
	if err != nil {
		return err
	}
	const nodes = 16
	splits := pick(l, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	base := make([]sim.Scenario, 0, len(splits)+1)
	for _, p := range splits {
		s := scenario(fmt.Sprintf("%dP+%dD", p, nodes-p))
		s.Trace, s.Prefill, s.Decode, s.TTFTSLO, s.TBTSLO = loads[0].trace, p, nodes-p, 10*time.Second, 100*time.Millisecond
		base = append(base, s)
	}
	dynamic := base[len(splits)/2]
	dynamic.DynamicRoles, dynamic.Name = true, dynamic.Name+", dynamic roles"
	base = append(base, dynamic)
	speeds, results := make([]float64, len(base)), make([]*sim.Result, len(base))
	err = l.each(ctx, len(base), func(ctx context.Context, i int) (err error) {
		speeds[i], results[i], err = l.capacity(ctx, &base[i], slowest, 4*fastest,
			func(r *sim.Result) bool { return r.Attainment >= enough })
		return err
	})
	if err != nil {
		return err
	}
	s := plot.Series{Name: "fixed roles", Dots: true}
	for i, p := range splits {
		s.X, s.Y = append(s.X, float64(p)), append(s.Y, speeds[i])
	}
	for i := range base {
		f.row(base[i].Name, PerSecond, speeds[i])
	}
	d := &plot.Lines{
		Title: "Requests a second carried by 16 nodes", X: plot.Axis{Label: "prefill nodes"}, Y: plot.Axis{Label: "requests a second"},
		Series: []plot.Series{s}, Rules: []plot.Rule{{Name: "dynamic roles", At: speeds[len(splits)]}},
	}
	f.draw("", d.Title, d)
	best := splits[greatest(speeds[:len(splits)])]
	f.Setup = fmt.Sprintf("Largest rate of the generated synthetic workload of which %s of the requests are within TTFT 10 s and TBT "+
		"100 ms.", percent(enough))
	middle := f.check(best >= 7 && best <= 9, "best near 1:1 (7 to 9 of 16 for prefill)")
	f.say("Best is %d prefill to %d decode nodes; dynamic roles, from %s on, carry %s against %s of that split when it is "+
		"fixed.", best, nodes-best,
		base[len(splits)/2].Name, Value(speeds[len(splits)]).text(PerSecond), Value(speeds[len(splits)/2]).text(PerSecond))
	if r := results[greatest(speeds[:len(splits)])]; !middle && r != nil {
		f.say("A request takes %s of a prefill node in the mean, and a decode node holds what keeps its steps below the limit: where "+
			"the balance lies is set by the calibrated speeds of both, of which the paper gives "+
			"none.", Value(r.PrefillSeconds).text(Seconds))
	}
	return nil
}
