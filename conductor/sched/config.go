package sched

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Policy is how a prefill instance is chosen.
type Policy string

// The policies that the papers compare. All but KVCacheCentric use only what an instance itself holds of the prompt.
const (
	Random         Policy = "random"
	LoadBalance    Policy = "load-balance" // the shortest queue
	CacheAware     Policy = "cache-aware"  // the shortest queue and prefill
	KVCacheCentric Policy = "kvcache-centric"
)

// Variant is a form of Algorithm 1, the policy KVCacheCentric. The package's comment tells them apart.
type Variant string

// The papers' forms.
const (
	FAST25 Variant = "fast25"
	ArXiv  Variant = "arxiv"
)

// Overload is when the load of decoding is looked at. In all modes [Scheduler.AdmitDecode] looks at it after prefill, too.
type Overload string

// The modes of the arXiv report, section 4.2.6.
const (
	None       Overload = "none"       // after prefill only
	Early      Overload = "early"      // before prefill, too: the load of then
	Predictive Overload = "predictive" // before prefill, too: the load expected for when prefill is through
)

// Measure is one number for the gaps between a request's tokens.
type Measure string

// The papers' measures: FAST'25 limits the mean of the longest tenth of the gaps, the arXiv report their 90th percentile.
const (
	MeanLongest10 Measure = "mean_longest_10pct"
	P90           Measure = "p90"
)

// Role is what an instance does.
type Role uint8

// The roles; an instance may have both.
const (
	Prefill Role = 1 << iota
	Decode
	Both = Prefill | Decode
)

func (r Role) String() string {
	switch r {
	case Prefill:
		return "prefill"
	case Decode:
		return "decode"
	case Both:
		return "both"
	}
	return "none"
}

// Limits are what is promised to a class of requests. A limit of 0 is none.
type Limits struct {
	TTFTSLO  time.Duration `json:"ttft_slo" yaml:"ttft_slo"` // until the first token
	TBTSLO   time.Duration `json:"tbt_slo" yaml:"tbt_slo"`   // between tokens, by Config.TBTLimit
	Priority int           `json:"priority" yaml:"priority"` // 0 to 7, the highest; see Config.Headroom
}

// Config is how requests are scheduled. Of the zero value every field stands for its default.
type Config struct {
	Policy   Policy   `json:"policy" yaml:"policy"`     // kvcache-centric
	Variant  Variant  `json:"variant" yaml:"variant"`   // fast25
	Overload Overload `json:"overload" yaml:"overload"` // predictive
	// KVCacheBalancingThreshold is how many times longer the longest prefix has to be than an instance's own for the instance
	// to fetch it; 1.5. The papers give no number.
	KVCacheBalancingThreshold float64 `json:"kvcache_balancing_threshold" yaml:"kvcache_balancing_threshold"`
	// MigrateTokens is how many tokens the longest prefix has to exceed for the last step of the arXiv form. That compares
	// them with kvcache_balancing_threshold, a ratio; so does 0, and any prefix is migrated then.
	MigrateTokens     int `json:"migrate_tokens" yaml:"migrate_tokens"`
	PrefillChunk      int `json:"prefill_chunk" yaml:"prefill_chunk"`             // tokens that go through a pipeline together; 8192
	PipelineGroupSize int `json:"pipeline_group_size" yaml:"pipeline_group_size"` // nodes of one prefill instance; 1
	BlockSize         int `json:"block_size" yaml:"block_size"`                   // tokens; 512
	// LayerWise has a prefix loaded while it is computed with, layer by layer: of loading and computing only the longer one
	// counts. Without it a prefill takes their sum, as in Algorithm 1.
	LayerWise bool `json:"layer_wise" yaml:"layer_wise"`
	// PoolBandwidth is what the pool gives all instances together, in bytes a second; 0: their own NICs are the only bound.
	PoolBandwidth float64 `json:"pool_bandwidth" yaml:"pool_bandwidth"`
	// DecodeTime is t_d, how long the system-level prediction takes every request to decode; 10 s, some 300 tokens.
	DecodeTime time.Duration     `json:"decode_time" yaml:"decode_time"`
	Classes    map[string]Limits `json:"classes" yaml:"classes"`     // by name; "" is that of requests whose class is not here
	TBTLimit   Measure           `json:"tbt_limit" yaml:"tbt_limit"` // what tbt_slo bounds; mean_longest_10pct
	// Headroom is the share of every limit that each priority leaves to the next higher one that has asked lately, so that
	// the lowest is rejected first; 0.1. Below 0 is none.
	Headroom float64 `json:"headroom" yaml:"headroom"`
	// Presume has a prefill taken as done when it was predicted to be, and a decode when its expected length is, for
	// instances that report nothing. Without it only what is reported, and RequestTTL, ends them.
	Presume    bool          `json:"presume" yaml:"presume"`
	RequestTTL time.Duration `json:"request_ttl" yaml:"request_ttl"` // without a word of it a request is forgotten; 10 minutes
	// MaxRequests and MaxInstances bound what is remembered: 262,144 of some 200 bytes, and 4096.
	MaxRequests  int    `json:"max_requests" yaml:"max_requests"`
	MaxInstances int    `json:"max_instances" yaml:"max_instances"`
	Seed         uint64 `json:"seed" yaml:"seed"` // of what is left to chance
}

// priorities bounds the levels of priority, so that looking which have asked is quick.
const priorities = 8

// ErrConfig says that a configuration cannot be.
var ErrConfig = errors.New("sched: bad configuration")

// withDefaults is the configuration with its zero fields filled in.
func (c Config) withDefaults() Config {
	c.Policy = either(c.Policy, KVCacheCentric)
	c.Variant = either(c.Variant, FAST25)
	c.Overload = either(c.Overload, Predictive)
	c.KVCacheBalancingThreshold = either(c.KVCacheBalancingThreshold, 1.5)
	c.PrefillChunk = either(c.PrefillChunk, 8192)
	c.PipelineGroupSize = either(c.PipelineGroupSize, 1)
	c.BlockSize = either(c.BlockSize, 512)
	c.DecodeTime = either(c.DecodeTime, 10*time.Second)
	c.TBTLimit = either(c.TBTLimit, MeanLongest10)
	c.Headroom = max(0, either(c.Headroom, 0.1))
	c.RequestTTL = either(c.RequestTTL, 10*time.Minute)
	c.MaxRequests = either(c.MaxRequests, 1<<18)
	c.MaxInstances = either(c.MaxInstances, 4096)
	return c
}

func either[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

// Validate reports everything that is wrong with a configuration, zero fields standing for their defaults.
func (c Config) Validate() error {
	return c.withDefaults().check()
}

func (c Config) check() error {
	var all []error
	wrong := func(bad bool, name string, v any, want string) {
		if bad {
			all = append(all, fmt.Errorf("%w: %s is %v: %s", ErrConfig, name, v, want))
		}
	}
	oneOf(&all, "policy", c.Policy, Random, LoadBalance, CacheAware, KVCacheCentric)
	oneOf(&all, "variant", c.Variant, FAST25, ArXiv)
	oneOf(&all, "overload", c.Overload, None, Early, Predictive)
	oneOf(&all, "tbt_limit", c.TBTLimit, MeanLongest10, P90)
	wrong(!(c.KVCacheBalancingThreshold >= 1), "kvcache_balancing_threshold", c.KVCacheBalancingThreshold, "give a ratio of 1 or more")
	wrong(c.MigrateTokens < 0, "migrate_tokens", c.MigrateTokens, "give a number of tokens, or 0")
	wrong(c.PrefillChunk < 1, "prefill_chunk", c.PrefillChunk, "give a number of tokens, above 1000 as the papers do")
	wrong(c.PipelineGroupSize < 1, "pipeline_group_size", c.PipelineGroupSize, "give a number of nodes")
	wrong(c.BlockSize < 1, "block_size", c.BlockSize, "give a number of tokens")
	wrong(!(c.PoolBandwidth >= 0), "pool_bandwidth", c.PoolBandwidth, "give bytes a second, or 0 for no bound")
	wrong(c.DecodeTime < time.Millisecond || c.DecodeTime > longest, "decode_time", c.DecodeTime, "give 1ms to 1h")
	wrong(!(c.Headroom < 1), "headroom", c.Headroom, "give a share below 1")
	wrong(c.RequestTTL < time.Second, "request_ttl", c.RequestTTL, "give 1s or more")
	wrong(c.MaxRequests < 1 || c.MaxRequests > 1<<24, "max_requests", c.MaxRequests, "give 1 to 16777216")
	wrong(c.MaxInstances < 1 || c.MaxInstances > 1<<16, "max_instances", c.MaxInstances, "give 1 to 65536")
	for _, name := range sortedNames(c.Classes) {
		l := c.Classes[name]
		at := fmt.Sprintf("classes[%q].", name)
		wrong(l.TTFTSLO < 0, at+"ttft_slo", l.TTFTSLO, "give a time, or 0 for no limit")
		wrong(l.TBTSLO < 0, at+"tbt_slo", l.TBTSLO, "give a time, or 0 for no limit")
		wrong(l.Priority < 0 || l.Priority >= priorities, at+"priority", l.Priority, "give 0 to 7")
	}
	wrong(len(c.Classes) > maxClasses, "classes", len(c.Classes), "give 256 at most")
	return errors.Join(all...)
}

// maxClasses bounds the classes: each has distributions of its own, some 2 KiB, and predictions look at all.
const maxClasses = 256

func oneOf[T ~string](all *[]error, name string, v T, known ...T) {
	if slices.Contains(known, v) {
		return
	}
	*all = append(*all, fmt.Errorf("%w: %s is %q: choose one of %q", ErrConfig, name, v, known))
}

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
