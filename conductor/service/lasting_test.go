package service

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor"
)

// TestLasting: what an engine holds lasts for half of the time in which it turns its cache over, at its rate of the last half
// minute or so; what one that evicts nothing holds, stays.
func TestLasting(t *testing.T) {
	var l lasting
	e := engine{"default", "a"}
	removed := uint64(0)
	look := func(n int, rate uint64) {
		for range n {
			removed += rate * 5
			l.look(l.at+lastingEvery, []conductor.ScopeView{
				{Scope: conductor.Scope{Tenant: "default"}, Instances: []conductor.InstanceView{{Instance: "a", Blocks: 600, Removed: removed}}},
				{Scope: conductor.Scope{Tenant: "default", LoRA: "l"}, Instances: []conductor.InstanceView{{Instance: "a", Blocks: 400}}},
			})
		}
	}
	require.Zero(t, l.of(e))
	look(10, 0)
	require.Zero(t, l.of(e))
	look(60, 10)
	require.InDelta(t, 50*time.Second, l.of(e), float64(time.Second), "1000 blocks at 10 a second, and half of that")
	look(60, 100)
	require.InDelta(t, 5*time.Second, l.of(e), float64(time.Second/10))
	removed = 0 // it was restarted
	look(1, 0)
	require.Zero(t, l.of(e))
	l.look(l.at+lastingEvery, nil)
	require.Empty(t, l.by)
}
