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
	prefill, decode   float64 // standard deviations
	prefills, decodes plot.Series
}

// Windows of the analysis of load, in seconds of the replayed time.
const (
	smoothed = 10.0 // a single request is no swing
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
	w.correlation, w.prefill, w.decode = correlation(p, d), deviation(p), deviation(d)
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
		"predicted time by its limit, the mean of the instances; its swing is its standard deviation."
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
		"mode", "rejected before prefill", "at decode", "prefill wasted", "correlation of loads", "prefill load swings by", "decode " +
			"load swings by", "within limits",
	}}
	rejected := make([]float64, len(modes))
	swings := make([]swing, len(modes))
	for i, r := range results {
		rejected[i], swings[i] = float64(r.Rejected()), swingOf(r)
		f.beside(w.name+", "+modes[i]+": rejected", Share, rejected[i]/float64(r.Requests), theirs[i]/theirRequests)
		f.drawLoad(w.name, modes[i], &swings[i])
		table.Rows = append(table.Rows, []string{
			modes[i], grouped(r.RejectedBefore), grouped(r.RejectedAtDecode), Value(r.WastedSeconds).text(Seconds),
			Value(swings[i].correlation).text(Plain), Value(swings[i].prefill).text(Plain), Value(swings[i].decode).text(Plain),
			percent(r.Attainment),
		})
	}
	for i, r := range results {
		f.row(w.name+", "+modes[i]+": wasted prefill", Seconds, r.WastedSeconds)
	}
	for i := 1; i < len(modes); i++ {
		f.beside(w.name+", "+modes[i]+" by none", Times, rejected[i]/rejected[0], theirs[i]/theirs[0])
	}
	f.Tables = append(f.Tables, table)
	early, predicted := &swings[1], &swings[2]
	falls := f.check(falling(rejected...), "%s: rejections fall from none to early to predictive", w.name)
	anti := f.check(early.correlation < -0.2, "%s: under early the loads swing in anti-phase (correlation below -0.2)", w.name)
	flat := f.check(predicted.prefill < early.prefill && predicted.decode < early.decode, "%s: prediction flattens both loads", w.name)
	f.say("%s: rejections %s from none to early to predictive (%s, %s, %s);", capital(w.name), map[bool]string{true: "fall", false: "do " +
		"not fall"}[falls],
		grouped(int(rejected[0])), grouped(int(rejected[1])), grouped(int(rejected[2])))
	f.say("early rejection saves %s of the prefill that is wasted without "+
		"it.", percent(1-results[1].WastedSeconds/max(1e-9, results[0].WastedSeconds)))
	f.say("Under early the correlation of the loads is %.2f and they swing by %.2f (prefill) and %.2f (decode), under predictive %.2f, "+
		"%.2f and %.2f:",
		early.correlation, early.prefill, early.decode, predicted.correlation, predicted.prefill, predicted.decode)
	switch {
	case anti && flat:
		f.say("anti-phase, and flatter with prediction, as theirs.")
	case anti:
		f.say("anti-phase as theirs, which prediction does not flatten in both.")
	case flat:
		f.say("flatter with prediction as theirs, but no clear anti-phase.")
	default:
		f.say("neither is as theirs.")
	}
}

func (f *Finding) drawLoad(name, mode string, s *swing) {
	d := &plot.Lines{
		Title: "Load over time, " + name + " at twice the speed, " + mode, X: plot.Axis{Label: "time", Unit: plot.Seconds},
		Y: plot.Axis{Label: "load: predicted time by its limit"}, Series: []plot.Series{s.prefills, s.decodes},
	}
	f.draw(name+"-"+mode, d.Title, d)
}
