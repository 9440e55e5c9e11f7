package policy_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// twin drives a policy and its reference through the same calls.
type twin struct {
	t      *testing.T
	rng    *rand.Rand
	pool   *policytest.Pool
	ref    reference
	pinned map[slot]bool
	now    uint64
	keys   uint64 // keys come from a small range, so that ghosts return
}

func (w *twin) pick(from []slot) (slot, bool) {
	if len(from) == 0 {
		return policy.None, false
	}
	return from[w.rng.IntN(len(from))], true
}

func (w *twin) add() {
	info := known{Info: policy.Info{AddedMS: w.now, Bytes: 1}, KeyHash: 1 + w.rng.Uint64N(w.keys), Parent: policy.None}
	if w.rng.IntN(3) == 0 {
		info.ExpiresMS = w.now + w.rng.Uint64N(300_000) + 1
	}
	if s, ok := w.pick(w.pool.Live()); ok && w.rng.IntN(4) > 0 {
		info.Parent, info.Index = s, w.pool.Table.Info(s).Index+1
	}
	w.ref.add(w.pool.Add(info), info)
}

func (w *twin) held() []slot {
	return slices.DeleteFunc(w.pool.Live(), func(s slot) bool { return !w.pool.Held(s) })
}

func (w *twin) touch() {
	if s, ok := w.pick(w.held()); ok {
		n := uint32(1 + w.rng.IntN(3))
		w.pool.Touch(s, n)
		w.ref.touch(s, n)
	}
}

func (w *twin) pin() {
	if s, ok := w.pick(w.held()); ok {
		w.pool.Pin(s)
		w.ref.pin(s)
		w.pinned[s] = true
	}
}

func (w *twin) unpin() {
	if s, ok := w.pick(slices.Sorted(maps.Keys(w.pinned))); ok {
		w.pool.Unpin(s)
		w.ref.unpin(s)
		delete(w.pinned, s)
	}
}

func (w *twin) remove() {
	if s, ok := w.pick(w.pool.Live()); ok {
		w.pool.Delete(s)
		w.ref.drop(s)
		delete(w.pinned, s)
	}
}

func (w *twin) stays() map[slot]bool {
	stays := map[slot]bool{}
	if one := w.rng.IntN(6); one > 0 {
		for _, s := range w.held() {
			if w.rng.IntN(one+1) == 0 {
				stays[s] = true
			}
		}
	}
	return stays
}

// evict plans with some entries staying; sometimes others are used between the
// plan and its execution.
func (w *twin) evict() {
	stays := w.stays()
	plan := w.pool.Plan(w.now, 1+w.rng.IntN(6), func(s slot) bool { return stays[s] })
	if w.rng.IntN(4) == 0 {
		w.touch()
		w.touch()
	}
	for _, s := range plan {
		w.pool.Evict(s)
		w.ref.evict(s)
	}
}

func (w *twin) compare(step int) {
	stays := w.stays()
	got := w.pool.Plan(w.now, 1<<30, func(s slot) bool { return stays[s] })
	want := w.ref.victims(stays)
	require.True(w.t, slices.Equal(want, got), "step %d, staying %v:\nwant %v\ngot  %v", step, stays, want, got)
	require.Equal(w.t, len(w.held()), w.pool.Policy.Len())
}

// TestAgainstReference compares every shipped policy with its reference over
// random calls, the victims after each call, and rebuilds it from what is
// persisted again and again on the way.
func TestAgainstReference(t *testing.T) {
	for _, name := range policy.Names() {
		if newReference(name) == nil {
			continue // registered by an example
		}
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				pool, err := policytest.NewPool(name, policy.Config{TTLMS: referenceTTLMS})
				require.NoError(t, err)
				w := &twin{
					t: t, rng: rand.New(rand.NewPCG(seed, 7)), pool: pool, ref: newReference(name),
					pinned: map[slot]bool{}, keys: 150,
				}
				w.run(600, 20+int(seed)*2)
				if sieve, ok := w.ref.(*refSieve); ok && seed > 5 {
					require.Positive(t, sieve.rounds, "the hand must have gone around")
				}
			}
		})
	}
}

func (w *twin) run(steps, size int) {
	for step := range steps {
		w.now += w.rng.Uint64N(5000)
		for w.pool.Policy.Len() > size {
			before := w.pool.Policy.Len()
			w.evict()
			if w.pool.Policy.Len() == before {
				break
			}
		}
		switch k := w.rng.IntN(100); {
		case k < 35:
			w.add()
		case k < 70:
			w.touch()
		case k < 75:
			w.pin()
		case k < 81:
			w.unpin()
		case k < 86:
			w.remove()
		case k < 95:
			w.evict()
		case k < 97:
			w.pool.Flush()
		default:
			hash := w.pool.Policy.StateHash()
			require.NoError(w.t, w.pool.Rebuild())
			require.Equal(w.t, hash, w.pool.Policy.StateHash())
		}
		w.compare(step)
	}
}

// TestPlanIsWhatHappens: the whole plan equals evicting the first victim again
// and again, so that a leader that plans a batch decides as one that plans each.
func TestPlanIsWhatHappens(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(30) {
				rng := rand.New(rand.NewPCG(seed, 1))
				pool, err := policytest.NewPool(name, policy.Config{TTLMS: referenceTTLMS})
				require.NoError(t, err)
				for i := range 300 {
					info := known{Info: policy.Info{AddedMS: uint64(i) * 700}, KeyHash: rng.Uint64N(200) + 1, Parent: policy.None}
					if live := pool.Live(); len(live) > 0 && rng.IntN(3) > 0 {
						info.Parent = live[rng.IntN(len(live))]
					}
					pool.Add(info)
					for range rng.IntN(4) {
						live := pool.Live()
						pool.Touch(live[rng.IntN(len(live))], uint32(1+rng.IntN(2)))
					}
					if i > 150 {
						for _, s := range pool.Plan(0, 1, nil) {
							pool.Evict(s)
						}
					}
				}
				plan := pool.Plan(0, 1<<30, nil)
				require.Len(t, plan, pool.Policy.Len())
				for i, want := range plan {
					require.Equal(t, []slot{want}, pool.Plan(0, 1, nil), "victim %d", i)
					pool.Evict(want)
				}
				require.Zero(t, pool.Policy.Len())
			}
		})
	}
}
