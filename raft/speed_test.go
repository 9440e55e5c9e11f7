package raft

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRacesFindTheSlowLeader has a leader and a follower write, each in its own time.
func TestRacesFindTheSlowLeader(t *testing.T) {
	for name, v := range map[string]struct {
		leader, follower time.Duration
		writes           int
		slow             bool
	}{
		"sound":                {300 * time.Microsecond, 400 * time.Microsecond, 1000, false},
		"slow leader":          {100 * time.Millisecond, 2 * time.Millisecond, 10, true},
		"slow follower":        {time.Millisecond, 100 * time.Millisecond, 10, false},
		"both slow":            {100 * time.Millisecond, 90 * time.Millisecond, 10, false},
		"slower, yet fast":     {5 * time.Millisecond, time.Millisecond, 100, false},
		"one slow write":       {time.Second, time.Millisecond, 1, false},
		"nobody else answers":  {100 * time.Millisecond, 0, 10, false},
		"follower half as bad": {100 * time.Millisecond, 49 * time.Millisecond, 10, true},
	} {
		t.Run(name, func(t *testing.T) {
			var r races
			var now int64 = 1000
			for i := range v.writes {
				index := uint64(i + 1)
				r.start(index, now)
				r.acked(index-1, func() int64 { return now + 1 }) // of entries before
				if v.follower > 0 && v.follower < v.leader {
					r.acked(index, func() int64 { return now + int64(v.follower) })
				}
				now += int64(v.leader)
				r.end(now)
			}
			r.acked(uint64(v.writes), func() int64 { panic("nothing is being written") })
			r.end(now)
			_, slow := r.window()
			require.Equal(t, v.slow, slow)
			_, slow = r.window()
			require.False(t, slow, "each window is judged by itself")
		})
	}
}
