package policytest

import (
	"errors"
	"fmt"
	"slices"

	"larder/meta/policy"
)

// ErrContract is wrapped by the errors of Check.
var ErrContract = errors.New("policytest: the policy breaks its contract")

const (
	// checkSteps is how many random calls Check makes: enough for every pair of
	// calls to meet many times, and done within a second.
	checkSteps = 4000
	// checkEntries is the size at which Check lets entries go: small enough to
	// look at all of them after each call.
	checkEntries = 48
)

// Check drives a registered policy through random calls, the same for the same
// seed, and returns an error where it breaks what every Policy must keep:
//
//   - Victims offers entries that are held, each at most once, and changes
//     nothing: asked again it offers the same;
//   - an entry offered can be evicted, and Len counts what is held;
//   - rebuilt from its orders and state pages it has the same StateHash and
//     offers the same entries.
//
// It does not require that every entry is offered: a policy may hold some back
// while others stay.
func Check(name string, cfg policy.Config, seed uint64) error {
	pool, err := NewPool(name, cfg)
	if err != nil {
		return err
	}
	c := &checker{pool: pool, state: seed}
	for step := range checkSteps {
		if err := c.step(); err != nil {
			return fmt.Errorf("%w: %s, seed %d, step %d: %w", ErrContract, name, seed, step, err)
		}
	}
	return nil
}

type checker struct {
	pool  *Pool
	state uint64 // of a linear congruential generator: Check is repeatable
	now   uint64
}

func (c *checker) below(n int) int {
	c.state = c.state*6364136223846793005 + 1442695040888963407
	return int(c.state >> 33 % uint64(n)) //nolint:gosec // below n
}

func (c *checker) any() (policy.Slot, bool) {
	live := c.pool.Live()
	if len(live) == 0 {
		return policy.None, false
	}
	return live[c.below(len(live))], true
}

func (c *checker) step() error {
	c.now += uint64(c.below(1000)) //nolint:gosec // not negative
	if c.pool.Policy.Len() > checkEntries {
		return c.evict()
	}
	s, ok := c.any()
	switch k := c.below(100); {
	case !ok || k < 30:
		c.add(s, ok)
	case k < 70:
		c.pool.Touch(s, uint32(1+c.below(3))) //nolint:gosec // 1 to 3
	case k < 75:
		c.pool.Pin(s)
	case k < 82:
		c.pool.Unpin(s)
	case k < 86:
		c.pool.Delete(s)
	case k < 94:
		return c.evict()
	default:
		return c.rebuild()
	}
	_, err := c.plan()
	return err
}

func (c *checker) add(parent policy.Slot, known bool) {
	hash := uint64(1 + c.below(200)) //nolint:gosec // 1 to 200
	info := Entry{Info: policy.Info{Bytes: 1, AddedMS: c.now}, KeyHash: hash, Parent: policy.None}
	if known && c.below(4) > 0 {
		info.Parent, info.Index = parent, c.pool.Table.Info(parent).Index+1
	}
	c.pool.Add(info)
}

// plan asks for all victims twice and compares.
func (c *checker) plan() ([]policy.Slot, error) {
	skipped := c.below(5)
	stays := func(s policy.Slot) bool { return skipped > 0 && int(s)%5 == skipped }
	plan := c.pool.Plan(c.now, len(c.pool.held), stays)
	if again := c.pool.Plan(c.now, len(c.pool.held), stays); !slices.Equal(plan, again) {
		return nil, fmt.Errorf("Victims changed something: first %v, then %v", plan, again)
	}
	offered := make(map[policy.Slot]bool, len(plan))
	for _, s := range plan {
		if !c.pool.Held(s) || offered[s] {
			return nil, fmt.Errorf("slot %d was offered twice or is not held: %v", s, plan)
		}
		offered[s] = true
	}
	held := 0
	for _, s := range c.pool.Live() {
		if c.pool.Held(s) {
			held++
		}
	}
	if n := c.pool.Policy.Len(); n != held {
		return nil, fmt.Errorf("the policy's Len is %d, but %d entries are held", n, held)
	}
	return plan, nil
}

func (c *checker) evict() error {
	plan, err := c.plan()
	if err != nil {
		return err
	}
	for _, s := range plan[:min(len(plan), 1+c.below(8))] {
		c.pool.Evict(s)
	}
	return nil
}

func (c *checker) rebuild() error {
	hash, plan := c.pool.Policy.StateHash(), c.pool.Plan(c.now, len(c.pool.held), nil)
	if err := c.pool.Rebuild(); err != nil {
		return fmt.Errorf("rebuilding: %w", err)
	}
	if after := c.pool.Policy.StateHash(); after != hash {
		return fmt.Errorf("rebuilt, StateHash is %x instead of %x", after, hash)
	}
	if after := c.pool.Plan(c.now, len(c.pool.held), nil); !slices.Equal(plan, after) {
		return fmt.Errorf("rebuilt, the victims are %v instead of %v", after, plan)
	}
	return nil
}
