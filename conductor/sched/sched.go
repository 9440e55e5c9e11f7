// Package sched decides which instances serve a request.
package sched

import (
	"maps"
	"slices"
	"time"
)

// longest bounds every predicted time, so that the sum over all that is remembered fits 64 bits.
const longest = time.Hour

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Scheduler chooses instances. Its methods must not be called concurrently, and now must not go back.
type Scheduler struct {
	cfg   Config
	model *Model
}

// Model predicts times.
type Model struct{}

// Report is what an instance says of itself.
type Report struct {
	Queue    time.Duration // of prefills that wait or run; below 0: unknown
	Batch    int           // sequences that are decoded; below 0: unknown
	KVTokens int           // tokens of KV that they have; below 0: unknown
	Step     time.Duration // a recent decode step's; 0: unknown
	TBT      TBT           // of requests that ended lately; 0: unknown
}

// Load is how loaded the two sides are.
type Load struct {
	Prefill, PrefillMax  float64       // predicted TTFT over its limit: the mean of the prefill instances, and the highest
	Decode, DecodeMax    float64       // predicted TBT over its limit
	Queue                time.Duration // the mean
	TBT                  TBT           // the mean
	Prefilling, Decoding int           // requests
}

// New makes a scheduler.
func New(cfg Config, m *Model) (*Scheduler, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	return &Scheduler{cfg: cfg, model: m}, nil
}

// Add, Remove and SetRole change the instances.
func (s *Scheduler) Add(x Instance) (InstanceID, error)               { return NoInstance, nil }
func (s *Scheduler) Remove(now time.Duration, id InstanceID)          {}
func (s *Scheduler) SetRole(now time.Duration, id InstanceID, r Role) {}

// Schedule decides.
func (s *Scheduler) Schedule(now time.Duration, r *Request) Decision { return Decision{} }

// PrefillDone: took is the computation's time without queue and transfer, 0 if unknown; prefix is how many tokens were not
// computed, below 0 if unknown (as decided).
func (s *Scheduler) PrefillDone(now time.Duration, id uint64, took time.Duration, prefix int) {}

// TransferDone: took is the time that the decision's transfer took; optional.
func (s *Scheduler) TransferDone(now time.Duration, id uint64, took time.Duration) {}

// AdmitDecode is the second check.
func (s *Scheduler) AdmitDecode(now time.Duration, id uint64) (bool, Reason) {
	return false, ReasonUnknown
}

// DecodeDone ends a request; outputTokens 0 if unknown.
func (s *Scheduler) DecodeDone(now time.Duration, id uint64, outputTokens int) {}

// Forget ends one that failed.
func (s *Scheduler) Forget(now time.Duration, id uint64) {}

// Report overrides what was guessed of an instance.
func (s *Scheduler) Report(now time.Duration, id InstanceID, r Report) {}

// Load tells how loaded both sides are.
func (s *Scheduler) Load(now time.Duration) Load { return Load{} }

// Rebalance proposes an idle instance's new role.
func (s *Scheduler) Rebalance(now time.Duration) (InstanceID, Role, bool) {
	return NoInstance, 0, false
}

// Explain is the sentence for people.
func (d *Decision) Explain() string { return "" }
