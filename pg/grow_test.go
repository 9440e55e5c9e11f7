package pg

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/member"
	"larder/pg/reduce"
)

// A group of two is given room for four. The new places are inactive, and nothing changes for those who are there, until processes
// have come, asked to join and been activated.
func TestExtend(t *testing.T) {
	j := newJob(t, 2, nil)
	groups := j.groups(GroupConfig{}, 0, 1)
	refused := func(err error, text string) {
		t.Helper()
		require.ErrorContains(t, err, text)
	}
	_, err := groups[0].PeerState(2)
	refused(err, "rank 2 is not of the group, which has 2 slots")
	epoch := groups[0].Epoch()
	for _, g := range groups { // twice does no harm
		require.NoError(t, g.Extend(t.Context(), 4))
		require.NoError(t, g.Extend(t.Context(), 3))
		require.Equal(t, 4, g.Capacity())
		require.Equal(t, 2, g.Size())
		require.Equal(t, []int{0, 1}, g.Active().Ranks())
		states, err := g.PeerState(1, 2, 3)
		require.NoError(t, err)
		require.Equal(t, []bool{true, false, false}, states)
	}
	refused(groups[0].Extend(t.Context(), member.MaxCap+1), "1 to 1024 slots")
	refused(groups[0].Extend(t.Context(), 0), "1 to 1024 slots")
	settled(t, groups, 3)
	require.Equal(t, epoch, groups[0].Epoch(), "room is no view")

	j.add(nil)
	j.add(nil)
	_, err = j.worlds[2].Group(t.Context(), GroupConfig{ID: "world", Ranks: []int{0, 1, 9, 9, 2}, Capacity: 5, Extension: true})
	require.Error(t, err)
	for rank := 2; rank < 4; rank++ {
		g, err := j.worlds[rank].Group(t.Context(), GroupConfig{ID: "world", Ranks: upTo(rank + 1), Capacity: 4, Extension: true})
		require.NoError(t, err)
		require.Equal(t, rank, g.Rank())
		letIn(t, g, groups[0])
		groups = append(groups, g)
		settled(t, groups, float32(int(1)<<(rank+1)-1))
		require.Equal(t, rank+1, groups[0].Size())
	}
	each(t, groups, func(g *Group) error { return allKinds(t, g, 4, 1000) })
}

// A joiner is isolated, which is to compute alone, until it joins; then it is quiescing, which is to compute nothing, until it is
// activated.
func TestJoinerIsAloneThenQuiet(t *testing.T) {
	j := newJob(t, 3, nil)
	groups := j.groups(GroupConfig{Capacity: 3}, 0, 1)
	g, err := j.worlds[2].Group(t.Context(), GroupConfig{ID: "world", Ranks: upTo(3), Capacity: 3, Extension: true})
	require.NoError(t, err)
	require.Equal(t, 3, g.Size(), "what it was said to have, for buffers")
	for _, c := range []Call{ // each of them is its own result
		Barrier(), Broadcast(floats(4), reduce.F32, 2), AllGather([][]byte{nil, nil, make([]byte, 4)}, floats(4), reduce.F32),
	} {
		_, err := g.Do(c)
		require.NoError(t, err)
	}
	settled(t, []*Group{g}, 4)
	var away *PeerError
	_, err = g.Do(Broadcast(floats(4), reduce.F32, 0))
	require.ErrorAs(t, err, &away, "a root that it has nothing to do with yet")

	work := g.Start(Recv(make([]byte, 4), 0, 0)) // is waited for before it joins
	ctx, cancel := context.WithCancel(t.Context())
	joined := make(chan error, 1)
	go func() { joined <- g.Join(ctx) }()
	until(t, "it is joining", func() bool { _, err := sums(g); return err != nil })
	for _, c := range []Call{Barrier(), AllReduce(floats(1), floats(1), reduce.F32, reduce.Sum), Send(floats(1), 0, 0)} {
		_, err := g.Do(c)
		require.ErrorIs(t, err, ErrJoining)
		_, err = g.Start(c).Wait(t.Context())
		require.ErrorIs(t, err, ErrJoining)
	}
	require.ErrorIs(t, g.Join(ctx), ErrJoining, "one is enough")
	_, err = groups[0].Do(Send(floats(1), 2, 0))
	require.NoError(t, err)
	_, err = work.Wait(t.Context())
	require.NoError(t, err)
	until(t, "it waits", func() bool { states, err := groups[0].PeerState(2); return err == nil && states[0] })
	cancel() // and is no longer waited for
	require.ErrorIs(t, <-joined, context.Canceled)
	until(t, "it does not", func() bool { states, err := groups[0].PeerState(2); return err == nil && !states[0] })
	settled(t, groups, 3)
	settled(t, []*Group{g}, 4)
	letIn(t, g, groups[1])
	settled(t, append(groups, g), 7)
	require.ErrorIs(t, g.Join(t.Context()), member.ErrActive)
}

// Activate says of those whom nobody can activate why not.
func TestActivateInVain(t *testing.T) {
	t.Parallel()
	groups := newJob(t, 2, nil).groups(GroupConfig{Capacity: 3}, 0, 1)
	_, err := groups[0].Activate(t.Context(), 7)
	require.ErrorContains(t, err, "rank 7")
	res, err := groups[0].Activate(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, member.Rejected, res.Status)
	require.Contains(t, res.Reason, "slot 2 has no process")
	res, err = groups[0].Activate(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, member.Applied, res.Status, "it is there already")
	settled(t, groups, 3)
}

// Whatever names more ranks than there is room for is refused, at its caller alone.
func TestCapacityExceeded(t *testing.T) {
	j := newJob(t, 3, nil)
	groups := j.groups(GroupConfig{}, 0, 1)
	for name, c := range map[string]Call{
		"a root":        Broadcast(floats(1), reduce.F32, 2),
		"a receiver":    Send(floats(1), 2, 0),
		"a sender":      Recv(floats(1), 5, 0),
		"a scatterer":   Scatter(floats(1), nil, reduce.F32, 2),
		"a negative":    Gather(nil, floats(1), reduce.F32, -1),
		"a reduction's": Reduce(nil, floats(1), reduce.F32, reduce.Sum, 2),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := groups[0].Do(c)
			require.ErrorIs(t, err, ErrConfig)
		})
	}
	_, err := j.worlds[2].Group(t.Context(), GroupConfig{ID: "world", Ranks: upTo(3), Capacity: 3, Extension: true})
	require.ErrorContains(t, err, "group \"world\"", "it has room for two")
	_, err = j.worlds[2].Group(t.Context(), GroupConfig{ID: "big", Capacity: member.MaxCap + 1})
	require.ErrorContains(t, err, "up to 1024")
	for rank := range 2 {
		_, err = groups[0].Deactivate(t.Context(), rank+2)
		require.Error(t, err)
	}
	settled(t, groups, 3)
}

// A group that was closed says so, whatever is asked of it, and does not wait.
func TestUsedAfterClose(t *testing.T) {
	groups := newJob(t, 2, nil).groups(GroupConfig{}, 0, 1)
	under := groups[0].Start(Barrier())
	waiting := groups[0].Start(Recv(floats(0), 1, 0))
	g := groups[0]
	began := moment()
	require.NoError(t, g.Close())
	require.NoError(t, g.Close(), "twice does no harm")
	for _, w := range []*Work{under, waiting} {
		_, err := w.Wait(t.Context())
		require.ErrorIs(t, err, ErrClosed, "calls that were under way")
	}
	ctx := t.Context()
	for name, use := range map[string]func() error{
		"Do":         func() error { _, err := g.Do(Barrier()); return err },
		"Start":      func() error { _, err := g.Start(Send(floats(1), 1, 0)).Wait(ctx); return err },
		"Queue":      func() error { w := g.Queue(Barrier()); w.Leave(); _, err := w.Wait(ctx); return err },
		"Join":       func() error { return g.Join(ctx) },
		"Activate":   func() error { _, err := g.Activate(ctx, 1); return err },
		"Deactivate": func() error { _, err := g.Deactivate(ctx, 1); return err },
		"Sync":       func() error { _, err := g.Sync(ctx); return err },
		"Extend":     func() error { return g.Extend(ctx, 4) },
		"PeerState":  func() error { _, err := g.PeerState(1); return err },
	} {
		t.Run(name, func(t *testing.T) { require.ErrorIs(t, use(), ErrClosed) })
	}
	_ = g.Size() + g.Rank() + g.Capacity() + int(g.Epoch()) + g.Active().Len() // can still be asked for
	require.Less(t, since(began), 5*time.Second)
}

// The last one who is left goes on, also when it asks for what those who are gone had.
func TestOneIsLeft(t *testing.T) {
	j := newJob(t, 2, nil)
	groups := j.groups(GroupConfig{}, 0, 1)
	j.crash(1)
	last := groups[:1]
	settled(t, last, 1, 1)
	_, err := last[0].Do(Broadcast(floats(4), reduce.F32, 1))
	lost, ok := errors.AsType[*PeerError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []int{1}, lost.Ranks)
	settled(t, last, 1)
}

// Who is taken out of a group while it waits in a collective is told so, and its calls after that are, too.
func TestDeactivatedInTheMiddle(t *testing.T) {
	groups := newJob(t, 2, nil).groups(GroupConfig{}, 0, 1)
	waits := groups[0].Start(Barrier())
	_, err := groups[0].Deactivate(t.Context(), 0)
	require.NoError(t, err)
	_, err = waits.Wait(t.Context())
	require.Error(t, err)
	_, err = groups[0].Do(Barrier())
	require.ErrorIs(t, err, ErrInactive)
}
