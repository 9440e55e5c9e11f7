package paper

import (
	"context"
	"fmt"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var bandwidth = Experiment{
	Name:   "bandwidth",
	Title:  "TTFT by network bandwidth",
	Source: "FAST'25, synthetic",
	Theirs: "below 100 Gbps a node the mean TTFT rises sharply; above it stays under 2 s.",
	run:    runBandwidth,
}

func runBandwidth(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("synthetic")
	if err != nil {
		return err
	}
	gbps := pick(l, 10.0, 24, 50, 100, 200, 400, 800)
	var scenarios []sim.Scenario
	for _, pool := range []bool{true, false} {
		for _, g := range gbps {
			s := scenario(fmt.Sprintf("%v Gbps", g))
			s.Trace, s.Hardware.NIC, s.Pool = loads[0].trace, g*1e9/8, pool
			s.Overload, s.TTFTSLO, s.TBTSLO = "none", 0, 0
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	pooled, migrated := plot.Series{Name: "pool", Dots: true}, plot.Series{Name: "caches of nodes, with migration", Dots: true}
	slow, fast := 0.0, 0.0
	for i, g := range gbps {
		r := results[i]
		pooled.X, pooled.Y = append(pooled.X, g), append(pooled.Y, r.TTFT.Mean)
		migrated.X, migrated.Y = append(migrated.X, g), append(migrated.Y, results[len(gbps)+i].TTFT.Mean)
		what := fmt.Sprintf("mean TTFT at %v Gbps", g)
		if g >= 100 {
			f.between(what, Seconds, r.TTFT.Mean, 0, 2)
			fast = max(fast, r.TTFT.Mean)
		} else {
			f.row(what, Seconds, r.TTFT.Mean)
			slow = max(slow, r.TTFT.Mean)
		}
	}
	d := &plot.Lines{
		Title: "Mean TTFT by bandwidth", X: plot.Axis{Label: "Gbps a node", Log: true}, Y: plot.Axis{Label: "mean " +
			"TTFT", Unit: plot.Seconds},
		Series: []plot.Series{pooled, migrated},
	}
	f.draw("", d.Title, d)
	f.Setup = "The generated synthetic workload at 1 request/s on " + cluster(&scenarios[0]) + ": with one pool, whose hits cross the " +
		"network, and with caches of nodes. Only the network differs."
	under := f.check(fast < 2, "from 100 Gbps on the mean TTFT is under 2 s")
	sharp := f.check(slow > 2*fast, "below 100 Gbps it rises sharply (over twice what it is from there on)")
	f.say("From 100 Gbps on the mean TTFT is %s at most, below up to %s.", Value(fast).text(Seconds), Value(slow).text(Seconds))
	if under && sharp {
		f.say("As theirs.")
	} else {
		f.say("The paper does not give the rate of its synthetic requests, on which the level depends.")
	}
	return nil
}
