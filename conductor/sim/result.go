package sim

import "time"

// End is how a request ended.
type End uint8

// Every request ends exactly once, in one of these ways.
const (
	Pending          End = iota
	Completed            // all its tokens came
	RejectedBefore       // before prefill: a limit was predicted to break
	RejectedAtDecode     // after prefill, by the second check at the decode instance
)

// Outcome is what became of one request. Times are -1 if they never came.
type Outcome struct {
	Arrival   time.Duration
	TTFT      time.Duration // from arrival to the first token
	TBT       time.Duration // mean of the longest 10% of the gaps between its tokens
	TBTP90    time.Duration // 90th percentile of them
	Ended     time.Duration
	Queue     time.Duration // before its prefill began
	Prefilled time.Duration // time that its prefill took of a node's GPUs
	Input     int32
	Output    int32
	Prefix    int32 // tokens of Input that were not computed
	Prefill   int16 // instance, -1 if none
	Decode    int16
	End       End
	Good      bool // completed within the limits
}

// Distribution is of times, in seconds.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

// Sample is one point of the series over time.
type Sample struct {
	At          float64 `json:"at"`           // seconds
	PrefillLoad float64 `json:"prefill_load"` // predicted TTFT over its limit, mean of the instances
	DecodeLoad  float64 `json:"decode_load"`  // predicted TBT over its limit, mean of the instances
	PrefillBusy float64 `json:"prefill_busy"` // share of instances that compute prompts
	Queued      int     `json:"queued"`       // requests that wait for prefill
	Batch       float64 `json:"batch"`        // sequences in a decode instance's batch, mean
	KV          float64 `json:"kv"`           // share of decode memory that is used, mean
	Rejected    int     `json:"rejected"`     // since the last point
	Prefills    int     `json:"prefill_instances"`
	Decodes     int     `json:"decode_instances"`
}

// HotKey is a block that was used often.
type HotKey struct {
	Block    uint32 `json:"block"`
	Uses     int    `json:"uses"`
	Replicas int    `json:"replicas"` // instances that hold it at the end
}

// Result is what came of a run.
type Result struct {
	Scenario Scenario `json:"scenario"`

	Requests         int            `json:"requests"`
	Completed        int            `json:"completed"`
	RejectedBefore   int            `json:"rejected_before_prefill"`
	RejectedAtDecode int            `json:"rejected_at_decode"`
	Reasons          map[string]int `json:"reasons,omitempty"` // of rejections
	Seconds          float64        `json:"seconds"`           // of virtual time, to the last end

	TTFT       Distribution `json:"ttft"`       // of requests whose first token came
	TBT        Distribution `json:"tbt"`        // mean of the longest 10% of gaps, of completed requests with 2 tokens or more
	TBTP90     Distribution `json:"tbt_p90"`    // 90th percentile of gaps, of the same
	Throughput float64      `json:"throughput"` // completed requests a second
	Goodput    float64      `json:"goodput"`    // of those, within the limits
	Attainment float64      `json:"attainment"` // share of all requests that completed within the limits
	TTFTMet    float64      `json:"ttft_met"`   // share of all requests whose first token came within the limit
	TBTMet     float64      `json:"tbt_met"`    // share of all requests that completed with their TBT within the limit

	HitRatio         float64 `json:"hit_ratio"`       // blocks of prompts that were not computed, of all of prefilled prompts
	PrefixRatio      float64 `json:"prefix_ratio"`    // the same in tokens
	PrefillSeconds   float64 `json:"prefill_seconds"` // of nodes, mean of the prefilled requests
	WastedSeconds    float64 `json:"wasted_seconds"`  // of nodes, all prefill of requests that were rejected after it
	PrefillBusy      float64 `json:"prefill_busy"`    // utilisation up to the last arrival
	DecodeBusy       float64 `json:"decode_busy"`
	TransferredBytes float64 `json:"transferred_bytes"` // of prefixes, between caches
	Replications     int     `json:"replications"`      // of hot prefixes
	RoleChanges      int     `json:"role_changes,omitempty"`

	Series  []Sample `json:"series"`
	HotKeys []HotKey `json:"hot_keys,omitempty"` // the 100 used most

	Outcomes []Outcome `json:"-"` // in the order of arrival
}

// Rejected counts rejections of both stages.
func (r *Result) Rejected() int { return r.RejectedBefore + r.RejectedAtDecode }
