package sim

import (
	"larder/internal/workload"
	"larder/meta/policy"
)

// Optimum is the name of the policy that knows the future (Belady's), in cache-only runs.
const Optimum = "optimum"

// HitRatio is what one cache of a number of blocks hits of a trace.
type HitRatio struct {
	Policy   string  `json:"policy"`
	Blocks   int     `json:"blocks"` // of capacity; 0: unbounded
	Accesses int     `json:"accesses"`
	Hits     int     `json:"hits"`
	Ratio    float64 `json:"ratio"`
	Prefix   float64 `json:"prefix_ratio"` // of use to an engine: before the first block of a prompt that was missed
}

// HitRatios plays a trace through one cache, each block an access in the order of the trace, for each policy and capacity.
// Capacity 0 stands for one that holds all.
func HitRatios(t workload.Trace, policies []string, capacities []int) ([]HitRatio, error) {
	all := make([]HitRatio, 0, len(policies)*len(capacities))
	for _, name := range policies {
		for _, blocks := range capacities {
			room := blocks
			if room == 0 {
				room = max(1, t.Distinct())
			}
			var r workload.Result
			var err error
			if name == Optimum {
				r = workload.Optimum(t, room)
				r.Prefix = r.Hits // not worked out: it is no cache for prefixes
			} else if r, err = workload.Play(t, name, policy.Config{}, room); err != nil {
				return nil, err //nolint:wrapcheck // it names the policies already
			}
			all = append(all, HitRatio{name, blocks, r.Accesses, r.Hits, r.Ratio(), r.PrefixRatio()})
		}
	}
	return all, nil
}
