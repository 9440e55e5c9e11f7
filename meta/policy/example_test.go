package policy_test

import (
	"fmt"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// secondChance is a policy of one's own: first in, first out, but entries that
// were used go after those that were not. policy.Base has everything else.
type secondChance struct{ policy.Base }

// Touch notes the use in Order.Aux, which is persisted.
func (p *secondChance) Touch(s policy.Slot, _ uint32) {
	o := p.T.Order(s)
	o.Aux = 1
	p.T.SetOrder(s, o)
}

// Victims goes over the queue twice and changes nothing.
func (p *secondChance) Victims(_ uint64, yield func(policy.Slot) policy.Verdict) {
	for used := range uint32(2) {
		for s := p.Q.Coldest(); s != policy.None; s = p.T.Links(s).Hotter {
			if p.T.Order(s).Aux == used && yield(s) == policy.Stop {
				return
			}
		}
	}
}

func init() {
	policy.Register("second-chance", func(_ policy.Config, t policy.Table) (policy.Policy, error) {
		return &secondChance{policy.NewBase(t)}, nil
	})
}

// A program registers its policy before it starts the server, and tests it with
// policytest.
func Example() {
	if err := policytest.Check("second-chance", policy.Config{}, 1); err != nil {
		fmt.Println(err)
		return
	}
	cache, err := policytest.NewCache("second-chance", policy.Config{}, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, block := range []uint64{1, 2, 1, 3, 1} { // 2 leaves for 3, as 1 was used
		cache.Request(0, []uint64{block})
	}
	fmt.Printf("%d hits of %d\n", cache.Hits, cache.Accesses)

	_, err = policy.New("clock", policy.Config{}, nil)
	fmt.Println(err)
	// Output:
	// 2 hits of 5
	// policy: unknown eviction policy "clock": choose one of fifo, larder, length-aware, lfu, lru, none, prefix-lru, s3fifo, second-chance, sieve, ttl
}
