package policytest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
)

// forgetful does not come back from a restart; greedy changes what it plans.
type (
	forgetful struct{ policy.Base }
	greedy    struct{ policy.Base }
)

func (*forgetful) Restore(policy.Slot) {}

func (p *greedy) Victims(_ uint64, yield func(policy.Slot) policy.Verdict) {
	if s := p.Q.Coldest(); s != policy.None {
		p.MoveHot(s, 1)
		yield(s)
	}
}

// TestCheckBites: Check finds policies that break the contract.
func TestCheckBites(t *testing.T) {
	policy.Register("forgetful", func(_ policy.Config, tb policy.Table) (policy.Policy, error) {
		return &forgetful{policy.NewBase(tb)}, nil
	})
	policy.Register("greedy", func(_ policy.Config, tb policy.Table) (policy.Policy, error) {
		return &greedy{policy.NewBase(tb)}, nil
	})
	require.ErrorIs(t, Check("forgetful", policy.Config{}, 1), ErrContract)
	require.ErrorIs(t, Check("greedy", policy.Config{}, 1), ErrContract)
	require.NoError(t, Check("fifo", policy.Config{}, 1))
	require.ErrorIs(t, Check("no such", policy.Config{}, 1), policy.ErrUnknown)
}
