package cmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/term"

	"larder/conductor/sim"
	"larder/internal/plot"
	"larder/internal/workload"
)

// simCmd is larder sim.
type simCmd struct {
	Run   simRunCmd   `cmd:"" default:"withargs" help:"Simulate one cluster under one workload (the default)."`
	Paper simPaperCmd `cmd:"" help:"Run the papers' experiments, and write a report with ours beside theirs."`
}

// simRunCmd is larder sim run. Its defaults are those of sim.Default, which a test compares.
type simRunCmd struct {
	Trace    string  `type:"existingfile" group:"Workload" help:"Trace in the published format, one JSON object a line: timestamp, input_length, output_length, hash_ids."`
	Generate string  `placeholder:"NAME" group:"Workload" help:"Generate a workload instead: arxiv, l-eval, real, simulated-16k, -32k, -64k or -128k, conversation, tool-agent, synthetic, talk, system-prompts (default conversation)."`
	Requests int     `group:"Workload" help:"Only the first so many requests of the trace, or so many generated ones; 0: all, or as many as in the papers."`
	Rate     float64 `group:"Workload" help:"Arrivals a second of a generated workload; 0: its own."`
	Speed    float64 `default:"1" group:"Workload" help:"How many times as fast as their timestamps requests arrive (default 1)."`
	Seed     uint64  `default:"1" group:"Workload" help:"Of all that is left to chance (default 1)."`

	Prefill       int  `default:"8" group:"Cluster" help:"Prefill nodes (default 8)."`
	Decode        int  `default:"8" group:"Cluster" help:"Decode nodes (default 8)."`
	Coupled       int  `group:"Cluster" help:"Instances that do both, as vLLM's, instead of prefill and decode nodes."`
	CoupledPrefix bool `group:"Cluster" help:"Coupled instances cache prefixes in what is left of their KV memory."`
	CoupledChunk  int  `placeholder:"TOKENS" group:"Cluster" help:"Coupled instances compute so many tokens of prompts beside each decode step (chunked prefill); 0: whole prompts, while decoding stands still."`
	DynamicRoles  bool `group:"Cluster" help:"Nodes change between prefill and decode as load does."`

	Policy                    string        `default:"kvcache-centric" enum:"random,load-balance,cache-aware,kvcache-centric" group:"Scheduler" help:"How a prefill instance is chosen: random, load-balance, cache-aware, kvcache-centric (the default)."`
	Variant                   string        `default:"fast25" enum:"fast25,arxiv" group:"Scheduler" help:"Form of kvcache-centric (Algorithm 1): fast25 (the default), arxiv."`
	Overload                  string        `default:"early" enum:"none,early,predictive" group:"Scheduler" help:"When decode load is looked at before prefill: none (only after it), early (the default), predictive."`
	KVCacheBalancingThreshold float64       `name:"kvcache-balancing-threshold" default:"1.5" group:"Scheduler" help:"How many times longer the longest prefix has to be than an instance's own to be fetched (default 1.5)."`
	DecodeTime                time.Duration `default:"30s" group:"Scheduler" help:"t_d: how long predictive takes each request to decode (default 30s)."`
	LengthHints               bool          `group:"Scheduler" help:"Tell the scheduler how many tokens each answer will have."`
	TTFTSLO                   time.Duration `name:"ttft-slo" default:"30s" group:"Scheduler" help:"Limit of the time to the first token; 0: none (default 30s)."`
	TBTSLO                    time.Duration `name:"tbt-slo" default:"100ms" group:"Scheduler" help:"Limit of the time between tokens; 0: none (default 100ms)."`
	TBTLimit                  string        `name:"tbt-limit" default:"mean_longest_10pct" enum:"mean_longest_10pct,p90" group:"Scheduler" help:"What that limits of a request: mean_longest_10pct of its gaps (the default), p90."`
	RelativeSLO               bool          `name:"relative-slo" group:"Scheduler" help:"Limits of 10 and 5 times what a request of the workload's mean lengths gets from an idle cluster, instead."`

	PrefillChunk      int    `default:"2048" placeholder:"TOKENS" group:"Engine" help:"Tokens of a prompt that are computed together (default 2048)."`
	PipelineGroupSize int    `default:"1" group:"Engine" help:"Prefill nodes through which the chunks of a prompt pass (default 1)."`
	BlockSize         int    `default:"512" placeholder:"TOKENS" group:"Engine" help:"Tokens of a block, as the trace has them (default 512)."`
	Serial            bool   `group:"Engine" help:"Load, compute and store KV caches one after the other instead of layer by layer at once."`
	CacheTokens       int    `default:"3000000" group:"Engine" help:"Tokens that the memory of each node caches (default 3000000)."`
	SSDTokens         int    `name:"ssd-tokens" group:"Engine" help:"Tokens that the disks of each node cache behind that."`
	Pool              bool   `group:"Engine" help:"The caches of all nodes are one pool, in reach of each."`
	EvictionPolicy    string `default:"lru" placeholder:"NAME,..." group:"Engine" help:"Eviction policy of the caches (default lru); with --capacity-blocks any number of them, and optimum."`

	Model     string        `default:"llama3-70b" group:"Costs" help:"llama2-70b, llama3-70b (the default)."`
	Hardware  string        `default:"a800" group:"Costs" help:"Node: a800, h800, eight GPUs each (default a800)."`
	MFU       float64       `name:"mfu" group:"Costs" help:"Share of its FLOPS that prefill reaches; 0: the calibrated one."`
	KVReads   float64       `name:"kv-reads" group:"Costs" help:"Share of its memory bandwidth that reading KV caches reaches in decode steps; 0: the calibrated one."`
	NIC       float64       `name:"nic" placeholder:"GBPS" group:"Costs" help:"Bandwidth of a node's network in Gbit/s; 0: the hardware's."`
	Sample    time.Duration `default:"10s" group:"Output" help:"Time between two points of series (default 10s)."`
	Attain    float64       `placeholder:"SHARE" group:"Output" help:"Search the largest rate, or speed of a trace, at which so large a share of requests is served within the limits."`
	Precision float64       `default:"0.02" group:"Output" help:"Relative, of that search (default 0.02)."`

	CapacityBlocks []int `placeholder:"BLOCKS,..." group:"Output" help:"No serving: the hit ratios of one cache of each of these capacities; 0: unbounded."`

	Plot  string `placeholder:"DIR" group:"Output" help:"Draw distributions and series as SVG files into this directory; made if it is not there."`
	JSON  bool   `group:"Output" help:"Print JSON."`
	Quiet bool   `group:"Output" help:"Show no progress."`
}

// Run implements the command.
func (c *simRunCmd) Run(e *env) error {
	if err := c.check(); err != nil {
		return usageError(err)
	}
	trace, err := c.workload()
	if err != nil {
		return simError(err)
	}
	if len(c.CapacityBlocks) > 0 {
		return c.hitRatios(e, trace)
	}
	s, err := c.scenario(trace)
	if err != nil {
		return simError(err)
	}
	s.Progress = c.progress(e)
	var load float64
	var result *sim.Result
	if c.Attain > 0 {
		load, result, err = c.search(e, s)
	} else {
		result, err = sim.Run(e.ctx, s)
	}
	if err != nil {
		return simError(err)
	}
	if result == nil {
		return fmt.Errorf("sim: not even a load of %g serves a share of %g within the limits", minLoad, c.Attain)
	}
	if c.Plot != "" {
		if err := plotResult(c.Plot, result); err != nil {
			return err
		}
	}
	if c.JSON {
		return printJSON(e.stdout, struct {
			Load float64 `json:"largest_load,omitempty"`
			*sim.Result
		}{load, result})
	}
	if load > 0 {
		fmt.Fprintf(e.stdout, "The largest %s at which %.0f%% are served within the limits is %.3g.\n\n", c.load(), 100*c.Attain, load)
	}
	return printSim(e.stdout, result)
}

// check refuses flags that do not go together.
func (c *simRunCmd) check() error {
	switch {
	case c.Trace != "" && c.Generate != "":
		return errors.New("sim: either --trace or --generate")
	case c.Trace != "" && c.Rate > 0:
		return errors.New("sim: --rate is of generated workloads; a trace has timestamps: change their --speed")
	case c.Requests < 0:
		return errors.New("sim: --requests is not negative")
	case c.Attain < 0 || c.Attain > 1 || c.Precision <= 0 || c.Precision >= 1:
		return errors.New("sim: --attain and --precision are shares, from 0 to 1")
	case len(c.CapacityBlocks) == 0 && strings.Contains(c.EvictionPolicy, ","):
		return errors.New("sim: several eviction policies are compared with --capacity-blocks alone")
	}
	return nil
}

// simError gives scenarios that cannot be the exit code of wrong flags.
func simError(err error) error {
	if errors.Is(err, sim.ErrScenario) {
		return usageError(err)
	}
	return err
}

// workload reads the trace or generates one.
func (c *simRunCmd) workload() (workload.Trace, error) {
	if c.Trace == "" {
		w := sim.Workload{Name: c.Generate, Requests: c.Requests, Rate: c.Rate, BlockSize: c.BlockSize, Seed: c.Seed}
		if w.Name == "" {
			w.Name = "conversation"
		}
		return sim.Generate(w) //nolint:wrapcheck // says all
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	t, err := sim.ReadTrace(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("sim: %s: %w", c.Trace, err)
	}
	if c.Requests > 0 {
		t = t[:min(len(t), c.Requests)]
	}
	return t, nil
}

// scenario is what the flags say.
func (c *simRunCmd) scenario(trace workload.Trace) (*sim.Scenario, error) {
	model, err := sim.FindModel(c.Model)
	if err != nil {
		return nil, err //nolint:wrapcheck // says all
	}
	hardware, err := sim.FindHardware(c.Hardware)
	if err != nil {
		return nil, err //nolint:wrapcheck // says all
	}
	if c.MFU != 0 {
		hardware.MFU = c.MFU
	}
	if c.KVReads != 0 {
		hardware.KVReads = c.KVReads
	}
	if c.NIC != 0 {
		hardware.NIC = c.NIC * 1e9 / 8
	}
	s := &sim.Scenario{
		Name: c.Generate, Trace: trace, Speed: c.Speed, Prefill: c.Prefill, Decode: c.Decode, Coupled: c.Coupled,
		CoupledPrefix: c.CoupledPrefix, CoupledChunk: c.CoupledChunk, DynamicRoles: c.DynamicRoles,
		Policy: c.Policy, Variant: c.Variant, Overload: c.Overload, KVCacheBalancingThreshold: c.KVCacheBalancingThreshold,
		DecodeTime: c.DecodeTime, LengthHints: c.LengthHints, TTFTSLO: c.TTFTSLO, TBTSLO: c.TBTSLO, TBTLimit: c.TBTLimit,
		PrefillChunk: c.PrefillChunk, PipelineGroupSize: c.PipelineGroupSize, BlockSize: c.BlockSize, Serial: c.Serial,
		CacheTokens: c.CacheTokens, SSDTokens: c.SSDTokens, Pool: c.Pool, EvictionPolicy: c.EvictionPolicy,
		Model: model, Hardware: hardware, Sample: c.Sample, Seed: c.Seed,
	}
	if c.Trace != "" {
		s.Name = filepath.Base(c.Trace)
	}
	if c.Coupled > 0 {
		s.Prefill, s.Decode = 0, 0 // their defaults: a cluster is of one kind
	}
	if c.RelativeSLO {
		s.RelativeLimits(10, 5)
	}
	return s, nil
}

// progress tells how far a run is, on a terminal.
func (c *simRunCmd) progress(e *env) func(ended, all int) {
	f, ok := e.stderr.(*os.File)
	if c.Quiet || !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	const often = 200 * time.Millisecond
	last := time.Now()
	return func(ended, all int) {
		if ended < all && time.Since(last) < often {
			return
		}
		last = time.Now()
		fmt.Fprintf(f, "\r%d of %d requests\x1b[K", ended, all)
		if ended == all {
			fmt.Fprint(f, "\r\x1b[K")
		}
	}
}

// Loads between which a capacity is searched: arrivals a second of a generated workload, or speeds of a trace.
const (
	minLoad = 0.01
	maxLoad = 1000
)

// load is what a search changes.
func (c *simRunCmd) load() string {
	if c.Trace != "" {
		return "speed"
	}
	return "rate"
}

// search finds the largest load.
func (c *simRunCmd) search(e *env, s *sim.Scenario) (float64, *sim.Result, error) {
	own := s.Speed // at which a generated workload has its own rate
	if c.Trace == "" {
		own = float64(s.Trace[len(s.Trace)-1].TimeMS) / 1000 / float64(len(s.Trace))
	}
	load, result, err := sim.Capacity(e.ctx, &sim.Search{
		Low: minLoad, High: maxLoad, Precision: c.Precision,
		At: func(x float64) (*sim.Scenario, error) {
			at := *s
			at.Speed = x * own
			return &at, nil
		},
		Holds: func(r *sim.Result) bool { return r.Attainment >= c.Attain },
	})
	return load, result, err //nolint:wrapcheck // says all
}

// hitRatios prints what caches hit, by policy and capacity.
func (c *simRunCmd) hitRatios(e *env, trace workload.Trace) error {
	policies := strings.Split(c.EvictionPolicy, ",")
	all, err := sim.HitRatios(trace, policies, c.CapacityBlocks)
	if err != nil {
		return usageError(err)
	}
	if c.JSON {
		return printJSON(e.stdout, all)
	}
	headings := []string{"POLICY"}
	for _, n := range c.CapacityBlocks {
		if n == 0 {
			headings = append(headings, "-UNBOUNDED")
		} else {
			headings = append(headings, fmt.Sprintf("-%d", n))
		}
	}
	fmt.Fprintf(e.stdout, "Hit ratios of %d accesses to %d blocks, by capacity in blocks.\n\n", trace.Accesses(), trace.Distinct())
	t := newTable(headings...)
	for len(all) > 0 {
		row := []any{all[0].Policy}
		for i := range c.CapacityBlocks {
			row = append(row, fmt.Sprintf("%.4f", all[i].Ratio))
		}
		t.row(row...)
		all = all[len(c.CapacityBlocks):]
	}
	return t.print(e.stdout)
}

// plotResult draws a result.
func plotResult(dir string, r *sim.Result) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // plots are for everybody
		return fmt.Errorf("sim: %w", err)
	}
	for name, figure := range figures(r) {
		if err := os.WriteFile(filepath.Join(dir, name+".svg"), figure.SVG(), 0o644); err != nil { //nolint:gosec // plots are for everybody
			return fmt.Errorf("sim: %w", err)
		}
	}
	return nil
}

// figures are the plots of a result by the names of their files.
func figures(r *sim.Result) map[string]*plot.Lines {
	var ttft, tbt, p90 []float64
	for i := range r.Outcomes {
		o := &r.Outcomes[i]
		if o.End != sim.Completed {
			continue
		}
		ttft = append(ttft, o.TTFT.Seconds())
		if o.Output > 1 {
			tbt, p90 = append(tbt, o.TBT.Seconds()), append(p90, o.TBTP90.Seconds())
		}
	}
	series := func(name string, of func(s *sim.Sample) float64) plot.Series {
		y := plot.Series{Name: name}
		for i := range r.Series {
			y.X, y.Y = append(y.X, r.Series[i].At), append(y.Y, of(&r.Series[i]))
		}
		return y
	}
	return map[string]*plot.Lines{
		"ttft": {
			Title: "Time to the first token",
			X:     plot.Axis{Label: "TTFT", Unit: plot.Seconds}, Y: plot.Axis{Label: "completed requests", Unit: plot.Share},
			Series: []plot.Series{plot.CDF("TTFT", ttft)},
		},
		"tbt": {
			Title: "Time between tokens",
			X:     plot.Axis{Label: "TBT", Unit: plot.Seconds}, Y: plot.Axis{Label: "completed requests", Unit: plot.Share},
			Series: []plot.Series{plot.CDF("mean of the longest 10%", tbt), plot.CDF("P90", p90)},
		},
		"load": {
			Title: "Load over time",
			X:     plot.Axis{Label: "simulated time", Unit: plot.Seconds}, Y: plot.Axis{Label: "predicted time by its limit"},
			Series: []plot.Series{
				series("prefill", func(s *sim.Sample) float64 { return s.PrefillLoad }),
				series("decode", func(s *sim.Sample) float64 { return s.DecodeLoad }),
			},
		},
		"instances": {
			Title: "Requests over time",
			X:     plot.Axis{Label: "simulated time", Unit: plot.Seconds}, Y: plot.Axis{Label: "requests"},
			Series: []plot.Series{
				series("queued for prefill", func(s *sim.Sample) float64 { return float64(s.Queued) }),
				series("decoded by an instance", func(s *sim.Sample) float64 { return s.Batch }),
				series("rejected since the last point", func(s *sim.Sample) float64 { return float64(s.Rejected) }),
			},
		},
	}
}
