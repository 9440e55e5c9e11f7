package model

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
)

// TestEvictionsGoOnCountingAfterRestarts: a machine that is rebuilt from its records now and then has evicted, by phase,
// what the model has counted from the log alone.
func TestEvictionsGoOnCountingAfterRestarts(t *testing.T) {
	var seen [4]uint64
	for seed := range uint64(6) {
		p := newPool(t)
		g := newGenerator(p, seed, 60)
		s := meta.DefaultSettings()
		s.MinRegionAgeMS = 100
		p.apply(nil, command{Command: &meta.SetSettings{Settings: s}})
		p.device("d0", 64)
		for i := range 400 {
			g.step()
			if i%25 == 24 {
				p.restart()
				require.Equal(t, p.model.worlds[0].counts.Evictions, p.m.Stats().Evictions, "seed %d, step %d", seed, i)
			}
		}
		for phase, n := range p.m.Stats().Evictions {
			seen[phase] += n
		}
	}
	for phase := 1; phase < len(seen); phase++ { // 0 evicts nothing, unless a nonsensical command says so
		require.NotZero(t, seen[phase], "phase %d did not come up: give it more steps", phase)
	}
}
