package paper

import (
	"context"
	"time"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var overload = Experiment{
	Name:   "overload",
	Title:  "Rejections at twice the speed",
	Source: "arXiv report, table 3 and figures 9 and 10",
	Theirs: "of 23,608 requests 4,183 are rejected without early rejection, 3,771 with it and 3,589 with prediction; early rejection " +
		"makes the loads of prefill and decode swing against each other, prediction flattens that.",
	run: runOverload,
}

// modes of overload control, in the order of the paper's table.
var modes = []string{"none", "early", "predictive"}

// swing says how the loads of a run move.
type swing struct {
	correlation       float64 // of prefill and decode load; near -1: in anti-phase
	prefill, decode   float64 // means
	swingP, swingD    float64 // standard deviations by the means
	prefills, decodes plot.Series
}

// Of the analysis of load.
const (
	smoothed = 10.0 // seconds: a single request is no swing
	least    = 1e-6 // load that a mean is taken to have at least
	settled  = 0.05 // share of a run at its beginning that does not count: the cluster fills up
)

// swingOf measures a run up to its last arrival.
func swingOf(r *sim.Result) swing {
	var at, p, d []float64
	end := 0.0
	for i := range r.Outcomes {
		end = max(end, r.Outcomes[i].Arrival.Seconds())
	}
	for _, s := range r.Series {
		if s.At <= end && s.At >= settled*end {
			at, p, d = append(at, s.At), append(p, s.PrefillLoad), append(d, s.DecodeLoad)
		}
	}
	every := r.Scenario.Sample.Seconds()
	p, d = movingMean(p, int(smoothed/every)), movingMean(d, int(smoothed/every))
	w := swing{prefills: plot.Series{Name: "prefill", X: at, Y: p}, decodes: plot.Series{Name: "decode", X: at, Y: d}}
	w.correlation, w.prefill, w.decode = correlation(p, d), mean(p), mean(d)
	w.swingP, w.swingD = deviation(p)/max(least, w.prefill), deviation(d)/max(least, w.decode)
	return w
}

func runOverload(ctx context.Context, l *lab, f *Finding) error {
	loads, err := l.loads("conversation", "real")
	if err != nil {
		return err
	}
	if l.trace == nil {
		loads = loads[1:] // one generated workload is enough
	}
	var scenarios []sim.Scenario
	for _, w := range loads {
		for _, mode := range modes {
			s := scenario(w.name + " " + mode)
			s.Trace, s.Speed, s.Overload, s.Sample = w.trace, 2, mode, 2*time.Second
			scenarios = append(scenarios, s)
		}
	}
	results, err := l.run(ctx, scenarios...)
	if err != nil {
		return err
	}
	f.Setup = "Replay at twice the speed on " + cluster(&scenarios[0]) + ", TTFT limit " + scenarios[0].TTFTSLO.String() + ", TBT limit " +
		scenarios[0].TBTSLO.String() + ", t_d " + scenarios[0].DecodeTime.String() + "; " + l.describe(loads) + ". Load is the " +
		"predicted time by its limit, the mean of the instances; it swings by its standard deviation, as a share of its mean over time."
	for i, w := range loads {
		f.overloaded(w, results[i*len(modes):(i+1)*len(modes)])
	}
	return nil
}

// overloaded tells of one workload's three runs.
func (f *Finding) overloaded(w load, results []*sim.Result) {
	theirs := []float64{4183, 3771, 3589}
	const theirRequests = 23_608
	table := Table{Title: "Of " + w.name + ":", Headings: []string{
		"mode", "rejected before prefill", "of these for TTFT", "at decode", "prefill wasted", "within limits", "correlation of loads",
		"prefill load", "swings by", "decode load", "swings by",
	}}
	rejected := make([]float64, len(modes))
	swings := make([]swing, len(modes))
	for i, r := range results {
		rejected[i], swings[i] = float64(r.Rejected()), swingOf(r)
		f.beside(w.name+", "+modes[i]+": rejected", Share, rejected[i]/float64(r.Requests), theirs[i]/theirRequests)
		f.drawLoad(w.name, modes[i], &swings[i])
		x := &swings[i]
		table.Rows = append(table.Rows, []string{
			modes[i], grouped(r.RejectedBefore), grouped(r.Reasons["ttft"]), grouped(r.RejectedAtDecode),
			Value(r.WastedSeconds).text(Seconds),
			percent(r.Attainment), digits(x.correlation), digits(x.prefill), percent(x.swingP), digits(x.decode), percent(x.swingD),
		})
	}
	for i, r := range results {
		f.row(w.name+", "+modes[i]+": wasted prefill", Seconds, r.WastedSeconds)
	}
	for i := 1; i < len(modes); i++ {
		f.beside(w.name+", "+modes[i]+" by none", Times, rejected[i]/max(1, rejected[0]), theirs[i]/theirs[0])
	}
	f.Tables = append(f.Tables, table)
	f.sayRejected(w.name, results, rejected)
	f.saySwings(w.name, swings)
}

// sayRejected compares the numbers of rejections.
func (f *Finding) sayRejected(name string, results []*sim.Result, rejected []float64) {
	none, early := results[0], results[1]
	f.check(falling(rejected...), "%s: rejections fall from none to early to predictive", name)
	f.say("%s: %s requests are rejected without overload control, %s with early rejection and %s with prediction; prefill of %s, %s and "+
		"%s is wasted.",
		capital(name), grouped(none.Rejected()), grouped(early.Rejected()), grouped(results[2].Rejected()),
		Value(none.WastedSeconds).text(Seconds),
		Value(early.WastedSeconds).text(Seconds), Value(results[2].WastedSeconds).text(Seconds))
	if rejected[1] >= rejected[0] {
		f.say("Early rejection saves prefill and not requests here: it refuses %s for the decode load of the moment, of which only %s "+
			"fewer fail at "+
			"decode, since the load is another one when they would have been "+
			"prefilled.", grouped(early.RejectedBefore-early.Reasons["ttft"]),
			grouped(none.RejectedAtDecode-early.RejectedAtDecode))
	}
}

// saySwings compares how loads move.
func (f *Finding) saySwings(name string, swings []swing) {
	none, early, predicted := &swings[0], &swings[1], &swings[2]
	anti := f.check(early.correlation < min(-0.2, none.correlation),
		"%s: early rejection makes the loads swing in anti-phase (correlation below -0.2, and below that without it)", name)
	flatP := f.check(predicted.swingP < early.swingP && predicted.correlation > early.correlation,
		"%s: prediction flattens prefill load and lessens the anti-phase", name)
	flatD := f.check(predicted.swingD < early.swingD, "%s: prediction flattens decode load", name)
	f.say("Under early the correlation of the loads is %.2f and they swing by %s (prefill) and %s (decode) of their means, under "+
		"predictive "+
		"%.2f, %s and %s:", early.correlation, percent(early.swingP), percent(early.swingD), predicted.correlation,
		percent(predicted.swingP), percent(predicted.swingD))
	if a, b := early.swingP*early.prefill, predicted.swingP*predicted.prefill; b >= a {
		f.say("(Not by their means, prefill load swings by %.3f under early and by %.3f under predictive: early keeps it low.)", a, b)
	}
	switch {
	case anti && flatP && flatD:
		f.say("anti-phase, and flatter with prediction, as theirs.")
	case anti && flatP:
		f.say("anti-phase as theirs, and flatter with prediction in prefill. What a decode instance admits bounds its load in every " +
			"mode, which leaves " +
			"it little to swing by.")
	case anti:
		f.say("anti-phase as theirs, which prediction does not flatten.")
	default:
		f.say("no anti-phase as theirs.")
	}
}

func (f *Finding) drawLoad(name, mode string, s *swing) {
	d := &plot.Lines{
		Title: "Load over time, " + name + " at twice the speed, " + mode, X: plot.Axis{Label: "time", Unit: plot.Seconds},
		Y: plot.Axis{Label: "load: predicted time by its limit"}, Series: []plot.Series{s.prefills, s.decodes},
	}
	f.draw(name+"-"+mode, d.Title, d)
}
