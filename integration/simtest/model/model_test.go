package model

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/meta/policy"
)

// Random logs, under every policy, with retries, restarts and nonsense: the machine answers every command as the model
// does, and looks like it.
func TestRandomLogs(t *testing.T) {
	steps := 2500
	if testing.Short() {
		steps = 300
	}
	for seed := range uint64(4) {
		for _, name := range policy.Names() {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) { randomRun(t, name, seed, steps) })
		}
	}
}

func randomRun(t *testing.T, name string, seed uint64, steps int) {
	t.Helper()
	p := newPool(t)
	g := newGenerator(p, seed, 60)
	if seed%2 == 0 {
		g.policies = []string{name} // it never changes
	}
	s := meta.DefaultSettings()
	s.Policy, s.MinRegionAgeMS = name, 100
	p.apply(nil, command{Command: &meta.SetSettings{Settings: s}})
	p.device("d0", 32)
	p.device("d1", 16)
	restarts := 0
	for i := range steps {
		g.step()
		if i%20 == 0 {
			require.NoError(t, p.model.CompareState(p.m))
		}
		if seed >= 2 && g.one(60) {
			p.restart()
			restarts++
			p.model = p.model.Clone()
		}
	}
	require.NoError(t, p.model.CompareState(p.m))
	if restarts == 0 {
		require.NoError(t, p.model.CompareCounters(p.m))
	}
	t.Logf("%d commands, %d entries left, %+v", p.count, p.m.Stats().Entries, p.model.worlds[0].counts)
}
