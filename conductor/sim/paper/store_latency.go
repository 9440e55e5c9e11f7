package paper

import (
	"context"
	"strconv"

	"larder/conductor/sim"
	"larder/internal/plot"
	"larder/internal/workload"
)

var storeLatency = Experiment{
	Name:   "store-latency",
	Title:  "Latency of storing KV caches by length",
	Source: "arXiv report, figure 7",
	Theirs: "serial storing adds latency in proportion to the length, most at 128k tokens; layer by layer beside the computation it " +
		"adds little.",
	run: runStoreLatency,
}

// freeLink is a host-to-device bandwidth at which storing takes no time.
const freeLink = 1e21

func runStoreLatency(ctx context.Context, l *lab, f *Finding) error {
	var scenarios []sim.Scenario
	var lengths []int
	for n := 8 << 10; n <= 128<<10; n *= 2 {
		lengths = append(lengths, n)
		for _, kind := range []string{"none", "serial", "layer-wise"} {
			s := scenario("store " + kind + " " + strconv.Itoa(n))
			s.Trace = workload.Trace{{Input: n, Output: 1}}
			s.TTFTSLO, s.TBTSLO = 0, 0
			s.Serial = kind == "serial"
			if kind == "none" {
				s.Hardware.HostToDevice = freeLink
			}
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	serial, layered := plot.Series{Name: "serial", Dots: true}, plot.Series{Name: "layer-wise", Dots: true}
	proportional, little := true, true
	for i, n := range lengths {
		none := results[3*i].TTFT.Mean
		a, b := results[3*i+1].TTFT.Mean-none, results[3*i+2].TTFT.Mean-none
		serial.X, serial.Y = append(serial.X, float64(n)), append(serial.Y, a)
		layered.X, layered.Y = append(layered.X, float64(n)), append(layered.Y, b)
		tokens := strconv.Itoa(n>>10) + "k tokens, "
		f.row(tokens+"serial", Seconds, a)
		f.row(tokens+"layer-wise", Seconds, b)
		proportional = proportional && near(a/float64(n), serial.Y[0]/float64(lengths[0]), 0.1)
		little = little && b < a/10
	}
	d := &plot.Lines{
		Title: "Latency that storing adds to a prefill", X: plot.Axis{Label: "length, tokens", Unit: plot.Tokens, Log: true},
		Y: plot.Axis{Label: "added", Unit: plot.Seconds}, Series: []plot.Series{serial, layered},
	}
	f.draw("", d.Title, d)
	f.Setup = "One request on an idle prefill instance of one node, chunks of " + grouped(scenarios[0].PrefillChunk) + " tokens; what " +
		"its TTFT is above that of the same request where storing takes no time. The figure in the report has no axis values that " +
		"survived, so its shape is compared."
	f.check(proportional, "serial latency grows in proportion to the length")
	f.check(little, "layer-wise latency is under a tenth of it")
	last := len(lengths) - 1
	f.say("At 128k tokens serial storing adds %s and layer-wise %s: the last layer of each chunk is all that is waited for.",
		Value(serial.Y[last]).text(Seconds), Value(layered.Y[last]).text(Seconds))
	return nil
}
