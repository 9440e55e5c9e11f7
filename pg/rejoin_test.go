package pg

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/member"
	"larder/pg/reduce"
)

// comeBack has a rank that others took for dead join again in its place, when it can, and all compute.
func comeBack(t *testing.T, groups []*Group, rank int) {
	t.Helper()
	g, by := groups[rank], groups[(rank+1)%len(groups)]
	joined := make(chan error, 1)
	go func() {
		err := g.Join(t.Context())
		for errors.Is(err, ErrIsolated) || errors.Is(err, member.ErrLeaseLost) { // it is not announced yet
			pause(5*time.Millisecond, nil)
			err = g.Join(t.Context())
		}
		joined <- err
	}()
	until(t, "it may be activated", func() bool {
		states, err := by.PeerState(rank)
		return err == nil && states[0]
	})
	res, err := by.Activate(t.Context(), rank)
	require.NoError(t, err)
	require.Equal(t, member.Applied, res.Status, res.Reason)
	require.NoError(t, <-joined)
	settled(t, groups, 7)
	each(t, groups, func(g *Group) error { return allThree(t, g) })
}

// allThree passes messages around, and reduces something long.
func allThree(t *testing.T, g *Group) error {
	t.Helper()
	if err := passOn(t, g, 3, 100_000); err != nil {
		return err
	}
	buf := fill(1, 300_000)
	_, err := g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum))
	require.Equal(t, fill(3, 300_000), buf)
	return err
}

// A rank that is cut off from the store cannot know whether others count on its death: it stops when its lease is over, whoever else it
// reaches. They go on without it, once its lease is over at the store; it joins again when it is back.
func TestRankWithoutStoreStops(t *testing.T) {
	j, _, stores := gatedJob(t, 3, nil)
	groups := j.groups(GroupConfig{Retry: true}, 0, 1, 2)
	settled(t, groups, 7)
	stores[2].set(gateMute)
	began := moment()
	until(t, "it stops", func() bool { g := groups[2]; g.mu.Lock(); defer g.mu.Unlock(); return g.stopped != nil })
	require.Less(t, since(began), 3*testLease)
	for _, c := range []Call{Barrier(), Send(floats(1), 0, 0)} {
		_, err := groups[2].Do(c)
		require.ErrorIs(t, err, ErrIsolated)
	}
	epoch := groups[2].Epoch()
	settled(t, groups[:2], 3, 2)
	require.Less(t, since(began), 10*testLease)
	require.Equal(t, []int{0, 1}, groups[0].Active().Ranks())
	require.Equal(t, epoch, groups[2].Epoch(), "alone it makes no view")
	stores[2].set(gateOpen)
	comeBack(t, groups, 2)
}

// While nobody reaches the store ranks compute as long as their leases may last, then all stop; none of them makes a view. When it is
// back they go on, with nobody lost: nothing was decided meanwhile.
func TestStoreIsAway(t *testing.T) {
	j, _, stores := gatedJob(t, 3, nil)
	groups := j.groups(GroupConfig{}, 0, 1, 2)
	settled(t, groups, 7)
	away := func(d time.Duration) {
		for _, s := range stores {
			s.set(gateMute)
		}
		pause(d, nil)
	}
	back := func() {
		for _, s := range stores {
			s.set(gateOpen)
		}
	}
	t.Run("for less than a lease", func(t *testing.T) {
		epoch := groups[0].Epoch()
		away(0)
		for began := moment(); since(began) < testLease/2; {
			settled(t, groups, 7)
		}
		back()
		settled(t, groups, 7)
		require.Equal(t, epoch, groups[0].Epoch())
	})
	t.Run("and a rank is lost meanwhile", func(t *testing.T) {
		away(0)
		j.crash(1)
		_, err := groups[0].Start(Barrier()).Wait(t.Context()) // nobody can decide: it waits, until it has to stop
		require.ErrorIs(t, err, ErrIsolated)
		require.Equal(t, []int{0, 1, 2}, groups[2].Active().Ranks())
		back()
		left := []*Group{groups[0], groups[2]}
		for _, g := range left {
			until(t, "it is let in again", func() bool {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.stopped == nil
			})
		}
	})
}

// A rank to which no lane can be made is left out, though it answers: those who can reach each other go on. It comes back when it can
// be reached.
func TestRankWithoutLanes(t *testing.T) {
	j, peers, _ := gatedJob(t, 3, nil)
	groups := j.groups(GroupConfig{Retry: true}, 0, 1, 2)
	settled(t, groups, 7)
	peers[0].set(gateShut) // the others dial it
	settled(t, groups[1:], 6, 0)
	require.Equal(t, []int{1, 2}, groups[2].Active().Ranks())
	peers[0].set(gateOpen)
	until(t, "it has learned of it", func() bool { return groups[0].Epoch() == groups[1].Epoch() })
	comeBack(t, groups, 0)
}
