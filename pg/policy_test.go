package pg

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/member"
	"larder/pg/reduce"
)

// failure is what ranks see of one that has died in the middle of a collective, by policy.
type failure struct {
	policy Policy
	retry  bool

	interrupted bool      // the collective fails; else it is run by those who are left
	meanwhile   bool      // so do those after it, until somebody calls Sync
	active      []int     // before that
	failed      []int     // who Results say has failed, from then on
	sync        [2]string // what Sync says, and what it says the second time
	after       []int     // who is active then
}

func TestPolicies(t *testing.T) {
	for name, want := range map[string]failure{
		"Automatic": {
			policy: Automatic, interrupted: true,
			active: []int{0, 2}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 2},
		},
		"Automatic, Retry": {
			policy: Automatic, retry: true,
			active: []int{0, 2}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 2},
		},
		"Deferred": {
			policy: Deferred, interrupted: true, meanwhile: true,
			active: []int{0, 1, 2}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 2},
		},
		"Deferred, Retry": {
			policy: Deferred, retry: true, interrupted: true, meanwhile: true,
			active: []int{0, 1, 2}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 2},
		},
		"Manual": {
			policy: Manual, interrupted: true,
			active: []int{0, 1, 2}, failed: []int{1}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 1, 2},
		},
		"Manual, Retry": {
			policy: Manual, retry: true,
			active: []int{0, 1, 2}, failed: []int{1}, sync: [2]string{"reconciled", "no pending"}, after: []int{0, 1, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want.check(t)
		})
	}
}

// check has rank 1 of three die when the others have come to their first collective.
func (want failure) check(t *testing.T) {
	t.Helper()
	j := newJob(t, 3, nil)
	groups := j.groups(GroupConfig{Failures: want.policy, Retry: want.retry}, upTo(3)...)
	left := []*Group{groups[0], groups[2]}
	buf := [2][]byte{floats(1), floats(4)}
	var works []*Work
	for i, g := range left {
		works = append(works, g.Start(AllReduce(buf[i], buf[i], reduce.F32, reduce.Sum)))
	}
	pause(20*time.Millisecond, nil)
	j.crash(1)
	for i, w := range works {
		res, err := w.Wait(t.Context())
		if want.interrupted {
			peer, ok := errors.AsType[*PeerError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, []int{1}, peer.Ranks)
			require.Zero(t, peer.Seq)
			require.Equal(t, "all_reduce(4 bytes of float32)", peer.Call)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []int{1}, res.Failed.Ranks())
		require.Equal(t, floats(5), buf[i])
	}
	if want.meanwhile {
		for range 3 {
			each(t, left, func(g *Group) error {
				began := moment()
				_, err := sums(g)
				peer, ok := errors.AsType[*PeerError](err)
				require.True(t, ok, "%v", err)
				require.Equal(t, []int{1}, peer.Ranks)
				require.Less(t, since(began), time.Second, "it does not wait for anything")
				return nil
			})
		}
	} else {
		want.goesOn(t, left)
	}
	for _, g := range left {
		require.Equal(t, want.active, g.Active().Ranks())
		until(t, "it knows that rank 1 is lost, and nobody else", func() bool {
			states, err := g.PeerState(0, 1, 2)
			return err == nil && slices.Equal([]bool{true, false, true}, states)
		})
	}
	each(t, left, func(g *Group) error {
		for _, say := range want.sync {
			res, err := g.Sync(t.Context())
			require.NoError(t, err)
			require.Equal(t, say, string(res.Status), "rank %d", g.Rank())
		}
		return nil
	})
	require.Equal(t, want.after, groups[0].Active().Ranks())
	want.goesOn(t, left)
	each(t, left, func(g *Group) error { // both say so, which does no harm
		res, err := g.Deactivate(t.Context(), 1)
		require.Equal(t, member.Applied, res.Status)
		return err
	})
	want.failed = nil
	want.goesOn(t, left)
	require.Equal(t, []int{0, 2}, groups[2].Active().Ranks())
}

// goesOn has those who are left call a collective among them, and look at whom it says is missing.
func (want failure) goesOn(t *testing.T, left []*Group) {
	t.Helper()
	each(t, left, func(g *Group) error {
		b := floats(float32(int(1) << g.Rank()))
		res, err := g.Do(AllReduce(b, b, reduce.F32, reduce.Sum))
		require.Equal(t, want.failed, res.Failed.Ranks())
		require.Equal(t, floats(5), b)
		return err
	})
}

// Whoever is deactivated by others, or by itself, is refused until it has joined again; the others do not wait for it.
func TestDeactivate(t *testing.T) {
	groups := newJob(t, 3, nil).groups(GroupConfig{}, upTo(3)...)
	settled(t, groups, 7)
	for name, by := range map[string]int{"others": 0, "itself": 2} {
		t.Run(name, func(t *testing.T) {
			before := groups[0].Epoch()
			res, err := groups[by].Deactivate(t.Context(), 2)
			require.NoError(t, err)
			require.Equal(t, member.Applied, res.Status)
			require.Greater(t, res.Epoch, before)
			settled(t, groups[:2], 3)
			until(t, "it learns of it", func() bool { return groups[2].Epoch() >= res.Epoch })
			_, err = sums(groups[2])
			require.ErrorIs(t, err, ErrInactive)
			require.Equal(t, 2, groups[0].Size(), "one more than the highest active rank")
			require.Equal(t, []int{0, 1}, groups[1].Active().Ranks())
			each(t, groups, func(g *Group) error { return passOn(t, g, 3, 10) }) // messages do not care
			letIn(t, groups[2], groups[1])
			settled(t, groups, 7)
			require.Equal(t, 3, groups[0].Size())
		})
	}
}
