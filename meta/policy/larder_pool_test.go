package policy_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// TestLarderRebuilt: of two pools with the same calls, one is rebuilt again and
// again from what it has persisted, over lessons, a history that goes around and
// keys that are thinned out. Their states and victims stay the same.
func TestLarderRebuilt(t *testing.T) {
	for seed, ghosts := range []uint32{0, 3000, 700, 1} {
		rng := rand.New(rand.NewPCG(uint64(seed), 4))
		var pools [2]*policytest.Pool
		for i := range pools {
			p, err := policytest.NewPool("larder", policy.Config{MaxGhosts: ghosts})
			require.NoError(t, err)
			pools[i] = p
		}
		slots := map[uint64]policy.Slot{}
		keys := map[policy.Slot]uint64{}
		last := policy.None
		for step := range 30_000 {
			key := 1 + uint64(rng.ExpFloat64()*float64(200+step/50))
			if s, held := slots[key]; held {
				for _, p := range pools {
					p.Touch(s, 1)
				}
				last = s
			} else {
				if len(slots) >= 250 {
					plan := pools[0].Plan(0, 8, nil)
					require.Equal(t, plan, pools[1].Plan(0, 8, nil), "ghosts %d, step %d", ghosts, step)
					for _, s := range plan {
						delete(slots, keys[s])
						for _, p := range pools {
							p.Evict(s)
						}
						if s == last {
							last = policy.None
						}
					}
				}
				entry := policytest.Entry{KeyHash: key * 0x9e3779b97f4a7c15, Parent: policy.None}
				if rng.IntN(3) > 0 {
					entry.Parent = last
				}
				var s policy.Slot
				for _, p := range pools {
					s = p.Add(entry)
				}
				slots[key], keys[s], last = s, key, s
			}
			switch rng.IntN(300) {
			case 0:
				pools[1].Flush()
			case 1:
				require.NoError(t, pools[1].Rebuild())
			}
			require.Equal(t, pools[0].Policy.StateHash(), pools[1].Policy.StateHash(), "ghosts %d, step %d", ghosts, step)
		}
		require.LessOrEqual(t, len(pools[1].Pages), 1+10+int(max(1<<14, ghosts))/256+3, "bounded state")
	}
}

// TestLarderAllocatesNothing in the steady state.
func TestLarderAllocatesNothing(t *testing.T) {
	pool, err := policytest.NewPool("larder", policy.Config{MaxGhosts: 2000})
	require.NoError(t, err)
	next := uint64(0)
	add := func() policy.Slot {
		next++
		return pool.Table.Insert(policytest.Entry{KeyHash: next * 0x9e3779b97f4a7c15, Parent: policy.None})
	}
	for range 300 {
		pool.Policy.Add(add())
	}
	var victim policy.Slot
	yield := func(s policy.Slot) policy.Verdict { victim = s; return policy.Stop }
	cycle := func() {
		pool.Policy.Victims(0, yield)
		pool.Policy.Evict(victim)
		pool.Table.Delete(victim)
		pool.Policy.Add(add())
		pool.Policy.Touch(victim, 1)
	}
	for range 20_000 {
		cycle()
	}
	require.Zero(t, testing.AllocsPerRun(5000, cycle))
}
