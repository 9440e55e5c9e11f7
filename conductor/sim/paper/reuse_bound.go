package paper

import (
	"context"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var reuseBound = Experiment{
	Name:   "reuse-bound",
	Title:  "Bandwidth above which reuse pays",
	Source: "FAST'25, table 1",
	Theirs: "loading a prefix of 8,192 tokens is faster than computing it above about 6 GB/s on 8xA800 and 19 GB/s on 8xH800.",
	run:    runReuseBound,
}

// reusePays is the bandwidth in bytes a second above which a prefix of p tokens is loaded faster than it is computed:
// B/G > 2 d s / (gqa (a p d + b d^2)). The paper has G as all the FLOPS of the node.
func reusePays(m *sim.Model, flops float64, p int) float64 {
	d := float64(m.Dim)
	return flops * 2 * d * float64(m.ElementBytes) / (float64(m.GQA) * (m.Quadratic*float64(p)*d + m.Linear*d*d))
}

func runReuseBound(_ context.Context, _ *lab, f *Finding) error {
	const prefix = 8192
	m, err := sim.FindModel("llama3-70b")
	if err != nil {
		return err //nolint:wrapcheck // says all
	}
	f.Setup = "The inequality of the paper with the presets of LLaMA3-70B and of both nodes, at all of their FLOPS as the paper has it " +
		"and at the MFU of the calibration."
	drawing := &plot.Lines{
		Title: "Bandwidth above which loading a prefix beats computing it", X: plot.Axis{Label: "prefix, " +
			"tokens", Unit: plot.Tokens, Log: true},
		Y: plot.Axis{Label: "GB/s"}, Rules: []plot.Rule{{Name: "network, 800 Gbps", At: 100}},
	}
	theirs := map[string]float64{"a800": 6, "h800": 19}
	agrees, network := true, true
	for _, name := range sim.HardwareNames() {
		h, err := sim.FindHardware(name)
		if err != nil {
			return err //nolint:wrapcheck // says all
		}
		s := plot.Series{Name: name}
		for p := 512; p <= 128<<10; p *= 2 {
			s.X, s.Y = append(s.X, float64(p)), append(s.Y, reusePays(&m, h.FLOPS, p)/1e9)
		}
		drawing.Series = append(drawing.Series, s)
		full, reached := reusePays(&m, h.FLOPS, prefix), reusePays(&m, h.FLOPS*h.MFU, prefix)
		f.beside("8x"+name+", all FLOPS", Bandwidth, full/1e9, theirs[name])
		f.row("8x"+name+", at the calibrated MFU", Bandwidth, reached/1e9)
		agrees = agrees && near(full/1e9, theirs[name], 0.05)
		network = network && h.NIC*h.LinkShare > full
	}
	f.draw("", drawing.Title, drawing)
	f.check(agrees, "about 6 and 19 GB/s at 8,192 tokens")
	f.check(network, "the network of a node is faster than that")
	if agrees {
		f.say("The same: both are the one formula, and theirs are rounded.")
	} else {
		f.say("The presets differ from theirs.")
	}
	f.say("GPUs that reach only a share of their FLOPS need only that share of the bandwidth.")
	return nil
}
