// Command policy is the larder server with an eviction policy of one's own, "used-last": first in, first out, except
// that entries that were used go after all that were not. Run it like larder:
//
//	go run ./examples/policy replay --policy used-last
//	go run ./examples/policy serve --eviction-policy used-last
//
// Every member of a cluster must be built with the same policies. See package larder/meta/policy for what a policy must
// keep, and docs/POLICIES.md for how to choose one.
package main

import (
	"larder/cmd"
	"larder/meta/policy"
)

// usedLast is the policy: policy.Base is a queue, first in first out, and this overrides what differs.
type usedLast struct{ policy.Base }

// Touch notes a use in Order.Aux, which the server persists and replicates.
func (p *usedLast) Touch(s policy.Slot, _ uint32) {
	o := p.T.Order(s)
	o.Aux = 1
	p.T.SetOrder(s, o)
}

// Victims offers the entries in the order of their eviction. The leader plans with it, so it must change nothing.
func (p *usedLast) Victims(_ uint64, yield func(policy.Slot) policy.Verdict) {
	for used := range uint32(2) {
		for s := p.Q.Coldest(); s != policy.None; s = p.T.Links(s).Hotter {
			if p.T.Order(s).Aux == used && yield(s) == policy.Stop {
				return
			}
		}
	}
}

func main() {
	policy.Register("used-last", func(_ policy.Config, t policy.Table) (policy.Policy, error) {
		return &usedLast{policy.NewBase(t)}, nil
	})
	cmd.Main()
}
