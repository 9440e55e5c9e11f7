package policy_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

func TestRegistry(t *testing.T) {
	require.IsIncreasing(t, policy.Names())
	for _, name := range []string{
		"lru", "lfu", "fifo", "sieve", "s3fifo", "ttl", "length-aware", "prefix-lru", "larder", "none", policy.Default,
	} {
		require.True(t, policy.Known(name), name)
	}
	require.False(t, policy.Known("LRU"), "names are exact")
	_, err := policy.New("", policy.Config{}, nil)
	require.ErrorIs(t, err, policy.ErrUnknown)
	require.ErrorContains(t, err, "lfu, lru, none", "the error lists what there is")
	_, err = policy.New("s3fifo", policy.Config{MaxGhosts: math.MaxUint32}, nil)
	require.ErrorContains(t, err, "choose at most")

	f := func(policy.Config, policy.Table) (policy.Policy, error) { return nil, nil }
	require.Panics(t, func() { policy.Register("lru", f) }, "taken")
	require.Panics(t, func() { policy.Register("", f) })
	require.Panics(t, func() { policy.Register("nil", nil) })
}

func TestContract(t *testing.T) {
	for _, name := range policy.Names() {
		for seed := range uint64(4) {
			require.NoError(t, policytest.Check(name, policy.Config{TTLMS: 20_000}, seed))
		}
	}
}

// TestNoneOverManyChunks: slots far apart come out in order, whatever the order
// in which they came and went.
func TestNoneOverManyChunks(t *testing.T) {
	p, err := policy.New("none", policy.Config{}, nil)
	require.NoError(t, err)
	order := func() (out []slot) {
		p.Victims(0, func(s slot) policy.Verdict { out = append(out, s); return policy.Take })
		return out
	}
	for _, s := range []slot{5000, 3, 100_000, 4095, 4096} {
		p.Add(s)
	}
	require.Equal(t, []slot{3, 4095, 4096, 5000, 100_000}, order())
	p.Evict(3)
	p.Remove(4095)
	p.Evict(4096)
	require.Equal(t, []slot{5000, 100_000}, order())
	p.Add(7)
	p.Add(200_000)
	require.Equal(t, []slot{7, 5000, 100_000, 200_000}, order())
	require.Equal(t, 4, p.Len())
}

// TestGeneratedTrace compares hit counts on a small generated trace, on which
// the policies differ, with those of the references.
func TestGeneratedTrace(t *testing.T) {
	const capacity = 60
	rng := rand.New(rand.NewPCG(5, 5))
	zipf := rand.NewZipf(rng, 1.1, 4, 400)
	requests := make([][]uint64, 3000)
	fresh := uint64(1000)
	for i := range requests {
		blocks := []uint64{zipf.Uint64() + uint64(i/500)*30} // what is popular drifts
		if i/750%2 == 0 && rng.IntN(4) == 0 {                // a scan of blocks never used again
			blocks = append(blocks, fresh, fresh+1)
			fresh += 2
		}
		requests[i] = blocks
	}
	hits := map[string]int{}
	for _, name := range []string{"lru", "lfu", "fifo", "sieve", "s3fifo", "ttl", "length-aware", "prefix-lru"} {
		c, err := policytest.NewCache(name, policy.Config{TTLMS: referenceTTLMS}, capacity)
		require.NoError(t, err)
		for i, blocks := range requests {
			c.Request(uint64(i)*100, blocks)
		}
		hits[name] = c.Hits
		require.Equal(t, naiveHits(newReference(name), capacity, requests), c.Hits, name)
	}
	require.NotEqual(t, hits["sieve"], hits["lfu"], "the trace tells them apart")
	require.Greater(t, hits["s3fifo"], hits["fifo"], "the trace rewards scan resistance")
}

// naiveHits plays requests against a reference. Slots are keys.
func naiveHits(ref reference, capacity int, requests [][]uint64) int {
	live, hits := map[slot]bool{}, 0
	for i, blocks := range requests {
		parent := policy.None
		for j, block := range blocks {
			s := slot(block)
			if live[s] {
				hits++
				ref.touch(s, 1)
				parent = s
				continue
			}
			if len(live) >= capacity {
				victim := ref.victims(nil)[0]
				ref.evict(victim)
				delete(live, victim)
			}
			info := known{Info: policy.Info{AddedMS: uint64(i) * 100, Index: uint32(j)}, KeyHash: block + 1, Parent: policy.None}
			if live[parent] {
				info.Parent = parent
			}
			ref.add(s, info)
			live[s] = true
			parent = s
		}
	}
	return hits
}
