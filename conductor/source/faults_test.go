package source

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFaults has an engine store and remove blocks, while batches are lost, connections break, replays have holes, rings are too
// short, and the engine is restarted, all by chance. Whatever happened, once something has come from the engine nothing is known
// of it that it does not have; and unless batches were lost for good, all that it has is.
func TestFaults(t *testing.T) {
	const prompts, blocks, steps = 6, 5, 120
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 7))
		w, e := newWorld(t, Config{MaxBackoff: 1}), newEngine(t)
		copies := map[[2]int]int{} // what the engine has
		w.follow(e, e.service("a"))
		hash := func(p, i int) uint64 { return uint64(p*blocks + i + 1) }
		change := func() any {
			p, i := rng.IntN(prompts), rng.IntN(blocks)
			if copies[[2]int{p, i}] > 0 && rng.IntN(2) == 0 {
				copies[[2]int{p, i}]--
				return removed(hash(p, i))
			}
			parent := any(nil)
			if i > 0 {
				if copies[[2]int{p, i - 1}] == 0 {
					return nil
				}
				parent = hash(p, i-1)
			}
			copies[[2]int{p, i}]++
			return stored(parent, seq(100*p+4*i, 100*p+4*i+4), hash(p, i))
		}
		for range steps {
			var events []any
			for range 1 + rng.IntN(3) {
				if x := change(); x != nil {
					events = append(events, x)
				}
			}
			switch op := rng.IntN(100); {
			case op < 70:
				e.publish(events...)
			case op < 85:
				e.miss(events...)
			case op < 90:
				e.publish(events...)
				require.NoError(t, e.pub.Close())
				e.again()
			case op < 94:
				e.mu.Lock()
				e.loses[e.next] = 1 + rng.IntN(2*replayTries)
				e.mu.Unlock()
				e.miss(events...)
			case op < 96:
				e.cut(events...)
			case op < 98:
				clear(copies)
				e.publish(cleared())
			default:
				clear(copies)
				e.stop()
				e.start()
			}
			if rng.IntN(8) > 0 {
				continue
			}
			w.hears(e, "a")
			st := w.of("a")
			for p := range prompts {
				has := 0
				for has < blocks && copies[[2]int{p, has}] > 0 {
					has++
				}
				found := w.longest(seq(100*p, 100*p+4*blocks))["a"] / 4
				require.LessOrEqual(t, found, has, "seed %d: it has nothing more", seed)
				if st.Stale == 0 {
					require.Equal(t, has, found, "seed %d: nothing of it is missing", seed)
				}
			}
		}
		w.Close()
	}
}
