package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"larder/internal/workload"
	"larder/meta/policy"
)

// Scenario is all that a run depends on: the same scenario gives the same result. [Default] has the values that the papers
// used.
type Scenario struct {
	Name string `json:"name,omitempty"`

	// Trace is the requests in the order of their arrival. Speed is how many times as fast as their timestamps they arrive.
	Trace workload.Trace `json:"-"`
	Speed float64        `json:"speed"`

	// Prefill and Decode are the nodes of a disaggregated cluster; Coupled are the instances, a node each, of one whose
	// instances do both. Either the former are set or the latter.
	Prefill int `json:"prefill,omitempty"`
	Decode  int `json:"decode,omitempty"`
	Coupled int `json:"coupled,omitempty"`
	// CoupledPrefix gives coupled instances a prefix cache in what is left of their KV memory, CoupledChunk has them
	// compute so many tokens of prompts beside each decode step instead of whole prompts between two of them; 0: whole.
	CoupledPrefix bool `json:"coupled_prefix,omitempty"`
	CoupledChunk  int  `json:"coupled_chunk,omitempty"`

	// What the scheduler is told, by the papers' names; see package sched.
	Policy                    string        `json:"policy"`
	Variant                   string        `json:"variant"`
	Overload                  string        `json:"overload"`
	KVCacheBalancingThreshold float64       `json:"kvcache_balancing_threshold"`
	DecodeTime                time.Duration `json:"decode_time"` // t_d
	TTFTSLO                   time.Duration `json:"ttft_slo"`    // 0: no limit
	TBTSLO                    time.Duration `json:"tbt_slo"`     // 0: no limit
	TBTLimit                  string        `json:"tbt_limit"`   // which TBT the limit is compared with: mean_longest_10pct or p90
	LengthHints               bool          `json:"length_hints,omitempty"`
	DynamicRoles              bool          `json:"dynamic_roles,omitempty"`

	PrefillChunk      int  `json:"prefill_chunk"`       // tokens
	PipelineGroupSize int  `json:"pipeline_group_size"` // prefill nodes that are one instance
	BlockSize         int  `json:"block_size"`          // tokens
	Serial            bool `json:"serial,omitempty"`    // load, compute and store one after the other instead of layer by layer

	// CacheTokens is what the memory of each node caches, SSDTokens its disks behind that. With Pool all nodes' lie
	// together, in reach of each. EvictionPolicy is one of meta/policy's.
	CacheTokens    int    `json:"cache_tokens"`
	SSDTokens      int    `json:"ssd_tokens,omitempty"`
	Pool           bool   `json:"pool,omitempty"`
	EvictionPolicy string `json:"eviction_policy"`

	Model    Model    `json:"model"`
	Hardware Hardware `json:"hardware"`

	Sample time.Duration `json:"sample"` // between two points of the series
	Seed   uint64        `json:"seed"`

	// Progress is told now and then how many requests have ended, if it is set.
	Progress func(ended, all int) `json:"-"`
}

// The TBT of a request that a limit is compared with.
const (
	MeanLongest10 = "mean_longest_10pct" // mean of its longest 10% of gaps, as FAST'25 has it
	P90           = "p90"                // the 90th percentile of its gaps
)

// Default is a cluster of 8 and 8 nodes as the papers' experiments have it, without a trace. The papers do not tell t_d: 30 s
// is what the conversation trace's 343 tokens take somewhat below the TBT limit.
func Default() Scenario {
	model, _ := FindModel("llama3-70b")
	hardware, _ := FindHardware("a800")
	return Scenario{
		Speed: 1, Prefill: 8, Decode: 8,
		Policy: "kvcache-centric", Variant: "fast25", Overload: "early",
		KVCacheBalancingThreshold: 1.5, DecodeTime: 30 * time.Second,
		TTFTSLO: 30 * time.Second, TBTSLO: 100 * time.Millisecond, TBTLimit: MeanLongest10,
		PrefillChunk: 2048, PipelineGroupSize: 1, BlockSize: 512,
		CacheTokens: 3_000_000, EvictionPolicy: policy.Default,
		Model: model, Hardware: hardware,
		Sample: 10 * time.Second, Seed: 1,
	}
}

// ErrScenario is wrapped by errors of scenarios that cannot be run.
var ErrScenario = errors.New("sim: this cannot be simulated")

// Bounds of scenarios, far above what experiments need, so that a slip of a digit is told instead of filling the memory.
const (
	maxNodes  = 4096
	maxTokens = 1 << 40
	maxLength = 1 << 24 // tokens of one request
	minSample = time.Millisecond
)

// Validate checks all, and tells all that is wrong.
func (s *Scenario) Validate() error {
	var errs []error
	bad := func(when bool, format string, args ...any) {
		if when {
			errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrScenario}, args...)...))
		}
	}
	bad(len(s.Trace) == 0, "there are no requests: give a trace, or generate one")
	bad(!positive(s.Speed), "speed %v: it is a factor above 0", s.Speed)
	s.checkNodes(bad)
	bad(s.PrefillChunk < 1 || s.BlockSize < 1, "prefill_chunk %d and block_size %d are tokens, 1 or more", s.PrefillChunk, s.BlockSize)
	bad(s.CacheTokens < 0 || s.SSDTokens < 0 || s.CacheTokens > maxTokens || s.SSDTokens > maxTokens,
		"caches of %d tokens and %d on disk: from 0 to %d", s.CacheTokens, s.SSDTokens, maxTokens)
	bad(s.CacheTokens == 0 && s.SSDTokens > 0, "disks are behind memory: cache_tokens has to be above 0 too")
	bad(!policy.Known(s.EvictionPolicy), "eviction policy %q: choose one of %s", s.EvictionPolicy, strings.Join(policy.Names(), ", "))
	bad(s.TTFTSLO < 0 || s.TBTSLO < 0 || s.DecodeTime < 0, "limits and decode_time are not negative; a limit of 0 is none")
	bad(s.TBTLimit != MeanLongest10 && s.TBTLimit != P90, "tbt_limit %q: choose %s or %s", s.TBTLimit, MeanLongest10, P90)
	bad(s.Sample < minSample, "sample %v: the time between two points is %v or more", s.Sample, minSample)
	if err := s.config().Validate(); err != nil {
		errs = append(errs, fmt.Errorf("%w: %w", ErrScenario, err))
	}
	errs = append(errs, s.Model.validate(), s.Hardware.validate(), checkTrace(s.Trace, s.BlockSize))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	last := float64(s.Trace[len(s.Trace)-1].TimeMS) / 1000 / s.Speed
	bad(last > maxSeconds, "at speed %g the last request comes in more than a year: raise it", s.Speed)
	cost := NewCost(&s.Model, &s.Hardware)
	bad(cost.capacity < 1, "%s does not fit into the %g bytes of GPU memory of a node of %s",
		s.Model.Name, s.Hardware.HBMBytes, s.Hardware.Name)
	return errors.Join(errs...)
}

func (s *Scenario) checkNodes(bad func(bool, string, ...any)) {
	bad(s.Coupled == 0 && (s.Prefill < 1 || s.Decode < 1),
		"%d prefill and %d decode nodes: at least one of each, or coupled ones instead", s.Prefill, s.Decode)
	bad(s.Coupled > 0 && (s.Prefill > 0 || s.Decode > 0), "a cluster is either of coupled instances or of prefill and decode nodes")
	bad(min(s.Prefill, s.Decode, s.Coupled) < 0 || max(s.Prefill, s.Decode, s.Coupled) > maxNodes, "nodes are from 0 to %d", maxNodes)
	bad(s.CoupledChunk < 0, "coupled_chunk %d: tokens, or 0 for whole prompts", s.CoupledChunk)
	bad(s.PipelineGroupSize < 1 || s.Prefill%max(1, s.PipelineGroupSize) != 0,
		"pipeline_group_size %d: the %d prefill nodes are divided into groups of so many", s.PipelineGroupSize, s.Prefill)
	bad(s.DynamicRoles && s.PipelineGroupSize > 1, "dynamic roles are of single nodes: pipeline_group_size has to be 1")
}

// checkTrace tells the first request that cannot be.
func checkTrace(t workload.Trace, blockSize int) error {
	if !slices.IsSortedFunc(t, func(a, b workload.Request) int { return compare(a.TimeMS, b.TimeMS) }) {
		return fmt.Errorf("%w: the requests are not in the order of their timestamps", ErrScenario)
	}
	for i := range t {
		q := &t[i]
		if q.Input < 1 || q.Output < 1 || q.Input > maxLength || q.Output > maxLength {
			return fmt.Errorf("%w: request %d has %d tokens in and %d out: both are from 1 to %d",
				ErrScenario, i, q.Input, q.Output, maxLength)
		}
		if most := (q.Input + blockSize - 1) / max(1, blockSize); len(q.Blocks) > most {
			return fmt.Errorf("%w: request %d has %d blocks for %d tokens, for which %d of %d are enough: is the block size another one?",
				ErrScenario, i, len(q.Blocks), q.Input, most, blockSize)
		}
	}
	return nil
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func positive(x float64) bool { return x > 0 && !math.IsInf(x, 1) }
