package sched

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

func TestZeroConfigIsTheDefault(t *testing.T) {
	require.NoError(t, Config{}.Validate())
	s := newScheduler(t, Config{})
	assert.Equal(t, KVCacheCentric, s.cfg.Policy)
	assert.Equal(t, FAST25, s.cfg.Variant)
	assert.Equal(t, Predictive, s.cfg.Overload)
	assert.Equal(t, MeanLongest10, s.cfg.TBTLimit)
	assert.Equal(t, 512, s.cfg.BlockSize)
}

// Everything that is wrong is told at once, by the name that the user has given it.
func TestBadConfig(t *testing.T) {
	err := Config{
		Policy: "best", Variant: "nsdi", Overload: "late", TBTLimit: "p99", KVCacheBalancingThreshold: math.NaN(), MigrateTokens: -1,
		PrefillChunk: -1, PipelineGroupSize: -1, BlockSize: -1, PoolBandwidth: -1, DecodeTime: -1, Headroom: 1, RequestTTL: 1,
		MaxRequests: -1, MaxInstances: -1, Classes: map[string]Limits{"chat": {-1, -1, 8}},
	}.Validate()
	for _, name := range []string{
		"policy", "variant", "overload", "tbt_limit", "kvcache_balancing_threshold", "migrate_tokens", "prefill_chunk",
		"pipeline_group_size", "block_size", "pool_bandwidth", "decode_time", "headroom", "request_ttl", "max_requests", "max_instances",
		`classes["chat"].ttft_slo`, `classes["chat"].tbt_slo`, `classes["chat"].priority`,
	} {
		require.ErrorContains(t, err, "bad configuration: "+name+" is ")
	}
	var all interface{ Unwrap() []error }
	require.ErrorAs(t, err, &all)
	assert.Len(t, all.Unwrap(), 18)
	for _, one := range all.Unwrap() {
		require.ErrorIs(t, one, ErrConfig)
	}
	_, err = New(Config{Policy: "best"}, nil)
	assert.ErrorIs(t, err, ErrConfig)
}

// The names are the papers'.
func TestConfigIsReadFromYAML(t *testing.T) {
	var c Config
	require.NoError(t, yaml.Unmarshal([]byte(`
policy: kvcache-centric
variant: arxiv
overload: early
kvcache_balancing_threshold: 2.5
prefill_chunk: 1024
pipeline_group_size: 2
block_size: 16
decode_time: 5s
tbt_limit: p90
classes:
  "": {ttft_slo: 30s, tbt_slo: 100ms}
  batch: {priority: 1}
`), &c))
	assert.Equal(t, Config{
		Policy: KVCacheCentric, Variant: ArXiv, Overload: Early, KVCacheBalancingThreshold: 2.5, PrefillChunk: 1024, PipelineGroupSize: 2,
		BlockSize: 16, DecodeTime: 5 * time.Second, TBTLimit: P90,
		Classes: map[string]Limits{"": {TTFTSLO: 30 * time.Second, TBTSLO: ms(100)}, "batch": {Priority: 1}},
	}, c)
}
