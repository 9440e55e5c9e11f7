package paper

import (
	"context"
	"fmt"
	"slices"

	"larder/conductor/sim"
	"larder/internal/plot"
)

var endToEnd = Experiment{
	Name:   "end-to-end",
	Title:  "3P+1D and 2P+2D against 4 vLLM instances",
	Source: "arXiv report, figures 11 and 12, LLaMA2-70B",
	Theirs: "3P+1D carries 20% more than vLLM on ArXiv summarisation, 40% more on L-Eval, and 50% to 525% more on simulated long " +
		"contexts; 2P+2D has a lower TBT and a higher TTFT than 3P+1D.",
	run: runEndToEnd,
}

// limits of the report, in multiples of the times of an idle cluster.
const ttftMultiple, tbtMultiple = 10, 5

// against4 is the systems of 4 nodes that the report compares.
var against4 = []system{disaggregated("3P+1D", 3, 1), disaggregated("2P+2D", 2, 2), coupled("vLLM x4", 4, false, 0)}

// datasets of the report's table 2, and what it says is carried by what vLLM carries: by 3P+1D, or where it does not say so
// by either.
var datasets = []dataset{
	{name: "arxiv", low: 1.2, high: 1.2},
	{name: "l-eval", low: 1.4, high: 1.4},
	{name: "simulated-16k", either: true, low: 1.5, high: 6.25},
	{name: "simulated-32k", either: true, low: 1.5, high: 6.25},
	{name: "simulated-64k", either: true, low: 1.5, high: 6.25},
	{name: "simulated-128k", either: true, low: 1.5, high: 6.25},
}

type dataset struct {
	name      string
	either    bool
	low, high float64
}

// ours is what is carried of a dataset by the systems that the report compares with vLLM.
func (d *dataset) ours(all []carried) float64 {
	if d.either {
		return max(all[0].rate, all[1].rate)
	}
	return all[0].rate
}

// probe is what a search saw at a rate.
type probe struct{ rate, ttft, tbt float64 } // P90, by their limits

// carried is what a system carries of a dataset.
type carried struct {
	rate   float64
	result *sim.Result // at that rate
	probes []probe
}

// measures of the TBT of a request. The report speaks of P90 alone, over requests or over gaps; FAST'25, of the same authors,
// defines the TBT of a request as the first of these, which is the one that counts here.
var measures = []string{sim.MeanLongest10, sim.P90}

func runEndToEnd(ctx context.Context, l *lab, f *Finding) error {
	sets := pick(l, datasets...)
	found := make([]carried, len(measures)*len(sets)*len(against4))
	at := func(measure, dataset int) []carried {
		first := (measure*len(sets) + dataset) * len(against4)
		return found[first : first+len(against4)]
	}
	err := l.each(ctx, len(found), func(ctx context.Context, i int) (err error) {
		n := len(against4)
		found[i], err = l.carry(ctx, sets[i/n%len(sets)].name, &against4[i%n], measures[i/n/len(sets)])
		return err
	})
	if err != nil {
		return err
	}
	f.Setup = fmt.Sprintf("Generated requests with the means and cache ratios of the report's table 2, Poisson arrivals, nothing "+
		"rejected. Throughput is the largest rate at which P90 of TTFT is under %d times and P90 of TBT under %d times that of an idle "+
		"cluster; the TBT of a request is the mean of the longest tenth of its gaps, in the last rows their 90th percentile. "+
		"Coupled instances have neither prefix cache nor chunks, as vLLM had then.", ttftMultiple, tbtMultiple)
	better, ttftWorse, tbtLower, measured := 0, 0, 0, 0
	for k := range sets {
		all := at(0, k)
		f.carriedRows(&sets[k], all, "")
		if sets[k].ours(all) > all[2].rate {
			better++
		}
		if a, b, ok := sameRate(&all[0], &all[1]); ok {
			measured++
			if b.ttft > a.ttft {
				ttftWorse++
			}
			if b.tbt < a.tbt {
				tbtLower++
			}
		}
		f.drawProbes(sets[k].name, all)
	}
	var fewer []string
	for k := range sets {
		all := at(1, k)
		f.carriedRows(&sets[k], all, ", P90 of gaps")
		if sets[k].ours(all) <= all[2].rate {
			fewer = append(fewer, sets[k].name)
		}
	}
	f.check(better == len(sets), "more than vLLM on every dataset (3P+1D, on simulated contexts the better of both)")
	f.check(len(fewer) == 0, "the same where the TBT of a request is the 90th percentile of its gaps")
	f.check(tbtLower*2 > measured, "2P+2D has the lower TBT on most (at about the same rate)")
	f.check(ttftWorse*2 > measured, "2P+2D has the higher TTFT on most")
	f.sayEndToEnd(sets, at)
	if len(fewer) > 0 {
		f.say("By the 90th percentile of gaps vLLM carries as much or more on %s: prompts of others that fall into fewer than a tenth "+
			"of a "+
			"request's gaps do not count by that measure.", list(fewer))
	}
	f.sayEither(sets, at)
	f.say("At about the same rate 2P+2D has the higher TTFT on %d of %d datasets and the lower TBT on %d.", ttftWorse, measured, tbtLower)
	return nil
}

// carriedRows sets what the systems carry of a dataset beside theirs.
func (f *Finding) carriedRows(d *dataset, all []carried, note string) {
	for i, sys := range against4 {
		f.row(d.name+": "+sys.name+note, PerSecond, all[i].rate)
	}
	vllm := all[2].rate
	if vllm == 0 {
		return
	}
	if d.either {
		f.between(d.name+": the better of both by vLLM"+note, Times, d.ours(all)/vllm, d.low, d.high)
		f.row(d.name+": 3P+1D by vLLM"+note, Times, all[0].rate/vllm)
		return
	}
	f.between(d.name+": 3P+1D by vLLM"+note, Times, all[0].rate/vllm, d.low, d.high)
	f.row(d.name+": 2P+2D by vLLM"+note, Times, all[1].rate/vllm)
}

// carry searches for the largest rate of a dataset that a system carries.
func (l *lab) carry(ctx context.Context, dataset string, sys *system, measure string) (carried, error) {
	w := workloadOf(dataset)
	w.Requests, w.Rate = 1000, 1
	t, err := l.generated(w)
	if err != nil {
		return carried{}, err
	}
	s := scenario(dataset + ", " + sys.name)
	s.Trace, s.Overload, s.TTFTSLO, s.TBTSLO, s.TBTLimit = t, "none", 0, 0, measure
	if s.Model, err = sim.FindModel("llama2-70b"); err != nil {
		return carried{}, err //nolint:wrapcheck // says all
	}
	sys.apply(&s)
	in, out := means(&s)
	ttft, tbt := sim.Unloaded(&s, in, out)
	limitTTFT, limitTBT := ttftMultiple*ttft.Seconds(), tbtMultiple*tbt.Seconds()
	alone := 1 / ttft.Seconds() // what one node prefills without a cache
	var c carried
	c.rate, c.result, err = l.capacity(ctx, &s, alone/100, alone*40, func(r *sim.Result) bool {
		p := probe{r.Scenario.Speed, r.TTFT.P90 / limitTTFT, r.TBT.P90 / limitTBT}
		if measure == sim.P90 {
			p.tbt = r.TBTP90.P90 / limitTBT
		}
		c.probes = append(c.probes, p)
		return p.ttft <= 1 && p.tbt <= 1
	})
	slices.SortFunc(c.probes, func(a, b probe) int { return sign(a.rate - b.rate) })
	return c, err
}

// means are the mean lengths of a scenario's requests.
func means(s *sim.Scenario) (in, out int) {
	for i := range s.Trace {
		in += s.Trace[i].Input
		out += s.Trace[i].Output
	}
	n := max(1, len(s.Trace))
	return in / n, out / n
}

func sign(x float64) int {
	switch {
	case x < 0:
		return -1
	case x > 0:
		return 1
	}
	return 0
}

// sameRate is what two systems were seen to do at the highest rate that both carry or nearly so: that at most a tenth apart.
func sameRate(a, b *carried) (pa, pb probe, ok bool) {
	for _, x := range a.probes {
		for _, y := range b.probes {
			if x.rate <= max(a.rate, b.rate) && near(x.rate, y.rate, 0.1) && x.rate > pa.rate {
				pa, pb, ok = x, y, true
			}
		}
	}
	return pa, pb, ok
}

// drawProbes draws TTFT and TBT by rate.
func (f *Finding) drawProbes(dataset string, found []carried) {
	for _, what := range []string{"TTFT", "TBT"} {
		d := &plot.Lines{
			Title: "P90 " + what + " by rate, " + dataset, X: plot.Axis{Label: "requests a second"},
			Y: plot.Axis{Label: "by its limit", Limit: 3}, Rules: []plot.Rule{{Name: "limit", At: 1}},
		}
		most := 0.0
		for i := range found {
			most = max(most, found[i].rate)
		}
		d.X.Limit = 1.5 * most
		for i, sys := range against4 {
			s := plot.Series{Name: sys.name, Dots: true}
			for _, p := range found[i].probes {
				y := p.ttft
				if what == "TBT" {
					y = p.tbt
				}
				if p.rate <= 1.5*most {
					s.X, s.Y = append(s.X, p.rate), append(s.Y, y)
				}
			}
			d.Series = append(d.Series, s)
		}
		f.draw(dataset+"-"+what, d.Title, d)
	}
}

// breaks is which limit breaks first beyond the rate that is carried; nothing if none was seen to.
func (c *carried) breaks() string {
	i := slices.IndexFunc(c.probes, func(p probe) bool { return p.rate > c.rate })
	switch {
	case i < 0:
		return ""
	case c.probes[i].tbt > 1:
		return "TBT"
	default:
		return "TTFT"
	}
}

// sayEndToEnd explains what binds each system.
func (f *Finding) sayEndToEnd(sets []dataset, at func(measure, dataset int) []carried) {
	var ttft, tbt []string
	for k := range sets {
		switch at(0, k)[2].breaks() {
		case "TBT":
			tbt = append(tbt, sets[k].name)
		case "TTFT":
			ttft = append(ttft, sets[k].name)
		}
	}
	if len(tbt) > 0 {
		f.say("vLLM's TBT breaks first on %s: a prompt is computed between two decode steps of all requests of its instance.", list(tbt))
	}
	if len(ttft) > 0 {
		f.say("Its TTFT breaks first on %s.", list(ttft))
	}
	for k := range sets {
		d, vllm := &sets[k], &at(0, k)[2]
		more := d.ours(at(0, k)) / vllm.rate
		switch {
		case vllm.rate == 0:
			f.say("%s: vLLM carries none.", capital(d.name))
		case more > d.high*1.1:
			f.say("%s: %s of what vLLM carries, above theirs; %s of the prompts are reused.", capital(d.name), Value(more).text(Times),
				percent(reused(&at(0, k)[0])))
		case more < d.low*0.9:
			f.say("%s: %s of what vLLM carries, below theirs.", capital(d.name), Value(more).text(Times))
		}
	}
}

// sayEither tells on which datasets that the report gives no configuration for 3P+1D alone would not do.
func (f *Finding) sayEither(sets []dataset, at func(measure, dataset int) []carried) {
	var below []string
	for k := range sets {
		if all := at(0, k); sets[k].either && all[0].rate < sets[k].low*all[2].rate && all[0].breaks() == "TBT" {
			below = append(below, sets[k].name)
		}
	}
	if len(below) > 0 {
		f.say("Of the two 3P+1D alone stays below theirs on %s, where the TBT of its one decode node breaks first.", list(below))
	}
}

// reused is the share of prompts that a system did not compute at the rate that it carries.
func reused(c *carried) float64 {
	if c.result == nil {
		return 0
	}
	return c.result.PrefixRatio
}
