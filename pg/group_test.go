package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

func upTo(n int) []int {
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// shapes are how ranks may lie on hosts.
var shapes = map[string]func(*Config){
	"one host": nil,
	"two hosts": func(c *Config) {
		c.Host, c.Listen = fmt.Sprint("host", c.Rank%2), []string{"127.0.0.1:0"}
	},
	"a host each":  func(c *Config) { c.Host, c.Listen = fmt.Sprint("host", c.Rank), []string{"127.0.0.1:0"} },
	"Unix sockets": func(c *Config) { c.Transports = []string{"unix"} },
}

func TestCollectives(t *testing.T) {
	const n = 4
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			groups := newJob(t, n, shape).groups(GroupConfig{}, upTo(n)...)
			for _, count := range []int{1, 1000, 300_000} {
				each(t, groups, func(g *Group) error { return allKinds(t, g, n, count) })
			}
		})
	}
}

// allKinds calls each collective once and compares the first and last elements.
func allKinds(t *testing.T, g *Group, n, count int) error {
	t.Helper()
	me := float32(g.Rank())
	buf := fill(me+1, count)
	if _, err := g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum)); err != nil {
		return err
	}
	require.Equal(t, fill(10, count), buf)
	if g.Rank() != 2 {
		buf = fill(0, count)
	}
	if _, err := g.Do(Broadcast(buf, reduce.F32, 2)); err != nil {
		return err
	}
	require.Equal(t, fill(10, count), buf)
	if _, err := g.Do(Reduce(buf, fill(me, count), reduce.F32, reduce.Max, 1)); err != nil {
		return err
	}
	if g.Rank() == 1 {
		require.Equal(t, fill(3, count), buf)
	}
	parts := make([][]byte, n)
	for i := range parts {
		parts[i] = make([]byte, 4*count)
	}
	if _, err := g.Do(AllGather(parts, fill(me, count), reduce.F32)); err != nil {
		return err
	}
	for i := range parts {
		require.Equal(t, fill(float32(i), count), parts[i])
	}
	if _, err := g.Do(ReduceScatter(buf, parts, reduce.F32, reduce.Sum)); err != nil {
		return err
	}
	require.Equal(t, fill(float32(n)*me, count), buf)
	for i := range parts {
		parts[i] = fill(10*me+float32(i), count)
	}
	got := make([][]byte, n)
	for i := range got {
		got[i] = make([]byte, 4*count)
	}
	if _, err := g.Do(AllToAll(got, parts, reduce.F32)); err != nil {
		return err
	}
	for i := range got {
		require.Equal(t, fill(10*float32(i)+me, count), got[i])
	}
	if _, err := g.Do(Gather(got, fill(me, count), reduce.F32, 3)); err != nil {
		return err
	}
	if _, err := g.Do(Scatter(buf, got, reduce.F32, 3)); err != nil {
		return err
	}
	require.Equal(t, fill(me, count), buf)
	_, err := g.Do(Barrier())
	return err
}

func TestStartedCallsRunInOrder(t *testing.T) {
	const n, calls = 3, 200
	groups := newJob(t, n, nil).groups(GroupConfig{}, upTo(n)...)
	each(t, groups, func(g *Group) error {
		works, bufs := make([]*Work, calls), make([][]byte, calls)
		for i := range works {
			bufs[i] = fill(float32(i), 1+i*i)
			works[i] = g.Start(AllReduce(bufs[i], bufs[i], reduce.F32, reduce.Sum))
		}
		for i, w := range works {
			if _, err := w.Wait(t.Context()); err != nil {
				return err
			}
			require.Equal(t, fill(float32(n*i), 1+i*i), bufs[i])
		}
		return nil
	})
}

// A call that nobody waits for goes on all the same.
func TestStartedCallIsNotForgotten(t *testing.T) {
	groups := newJob(t, 2, nil).groups(GroupConfig{}, 0, 1)
	a, b := floats(1), floats(2)
	w := groups[0].Start(AllReduce(a, a, reduce.F32, reduce.Sum))
	_, err := groups[1].Do(AllReduce(b, b, reduce.F32, reduce.Sum))
	require.NoError(t, err)
	require.Eventually(t, w.Done, 5*time.Second, time.Millisecond)
	require.Equal(t, floats(3), a)
}

func TestWaitEndsWithItsContext(t *testing.T) {
	groups := newJob(t, 2, nil).groups(GroupConfig{}, 0, 1)
	w := groups[0].Start(Barrier())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := w.Wait(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = groups[1].Do(Barrier())
	require.NoError(t, err)
	_, err = w.Wait(t.Context())
	require.NoError(t, err)
}

func TestMessages(t *testing.T) {
	const n = 3
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			groups := newJob(t, n, shape).groups(GroupConfig{}, upTo(n)...)
			for _, count := range []int{0, 1, 100_000} {
				each(t, groups, func(g *Group) error { // a ring, with the receive after the send
					buf := make([]byte, 4*count)
					s := g.Start(Send(fill(float32(g.Rank()), count), (g.Rank()+1)%n, 7))
					res, err := g.Do(Recv(buf, (g.Rank()+n-1)%n, 7))
					if err != nil {
						return err
					}
					require.Equal(t, Result{From: (g.Rank() + n - 1) % n, Tag: 7, Bytes: 4 * count}, res)
					require.Equal(t, fill(float32((g.Rank()+n-1)%n), count), buf)
					_, err = s.Wait(t.Context())
					return err
				})
			}
			each(t, groups, func(g *Group) error { // all to rank 0, from anybody
				if g.Rank() != 0 {
					_, err := g.Do(Send(floats(float32(g.Rank())), 0, uint64(g.Rank())))
					return err
				}
				seen := map[int]float32{}
				for range n - 1 {
					buf := floats(0)
					res, err := g.Do(Recv(buf, Any, AnyTag))
					if err != nil {
						return err
					}
					seen[res.From] = float32At(buf, 0)
				}
				require.Equal(t, map[int]float32{1: 1, 2: 2}, seen)
				return nil
			})
		})
	}
}

func TestSubgroups(t *testing.T) {
	j := newJob(t, 4, nil)
	world := j.groups(GroupConfig{}, upTo(4)...)
	even, odd := j.groups(GroupConfig{ID: "even"}, 0, 2), j.groups(GroupConfig{ID: "odd"}, 3, 1)
	require.Equal(t, 1, odd[1].Rank())
	sum := func(want float32) func(g *Group) error {
		return func(g *Group) error {
			buf := floats(float32(g.w.Rank() + 1))
			_, err := g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum))
			require.Equal(t, floats(want), buf)
			return err
		}
	}
	each(t, even, sum(4))
	each(t, odd, sum(6))
	each(t, world, sum(10))
	for _, g := range even {
		require.NoError(t, g.Close())
	}
	each(t, world, sum(10))
	each(t, j.groups(GroupConfig{ID: "even-again"}, 0, 2), sum(4))
}

// What a rank has completed before it leaves, the others complete after it has.
func TestLeaving(t *testing.T) {
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			groups := newJob(t, 3, shape).groups(GroupConfig{}, 0, 1, 2)
			each(t, groups, func(g *Group) error {
				if g.Rank() > 0 {
					pause(time.Duration(g.Rank())*50*time.Millisecond, nil)
				}
				buf := floats(float32(g.Rank() + 1))
				_, err := g.Do(Broadcast(buf, reduce.F32, 0))
				require.Equal(t, floats(1), buf)
				return errors.Join(err, g.Close())
			})
		})
	}
}

// Ranks that call different things learn what, and go on with what they call next.
func TestMismatch(t *testing.T) {
	sum := func(n int, dt DType, op Op) Call { return AllReduce(fill(1, n), fill(1, n), dt, op) }
	for name, calls := range map[string]func() [2]Call{
		"kind":  func() [2]Call { return [2]Call{Barrier(), sum(1, reduce.F32, reduce.Sum)} },
		"dtype": func() [2]Call { return [2]Call{sum(1, reduce.F32, reduce.Sum), sum(1, reduce.I32, reduce.Sum)} },
		"op":    func() [2]Call { return [2]Call{sum(1, reduce.F32, reduce.Max), sum(1, reduce.F32, reduce.Sum)} },
		"count": func() [2]Call { return [2]Call{sum(9, reduce.F32, reduce.Sum), sum(1, reduce.F32, reduce.Sum)} },
		"root": func() [2]Call {
			return [2]Call{Broadcast(floats(1), reduce.F32, 0), Broadcast(floats(1), reduce.F32, 1)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 3
			groups := newJob(t, n, nil).groups(GroupConfig{}, upTo(n)...)
			var seen atomic.Int32
			each(t, groups, func(g *Group) error {
				c := calls()[min(g.Rank(), 1)]
				buf := floats(0)
				// A root, say, has done what it had to before it learns: it does so with the next call.
				for range 5 {
					_, err := g.Do(c)
					var mismatch *MismatchError
					var lost *PeerError
					switch {
					case errors.As(err, &mismatch):
						seen.Add(1)
						require.NotEqual(t, mismatch.Mine, mismatch.Theirs)
						require.NotEqual(t, g.Rank(), mismatch.Rank)
					case err != nil && !errors.As(err, &lost): // the others have gone on
						return err
					case err == nil && bytes.Equal(buf, floats(n)):
						return nil
					}
					buf = floats(1)
					c = AllReduce(buf, buf, reduce.F32, reduce.Sum)
				}
				return errors.New("no call succeeds any more")
			})
			require.Positive(t, seen.Load())
		})
	}
}

func TestTimeoutNamesThoseWhoAreLate(t *testing.T) {
	groups := newJob(t, 2, func(c *Config) { c.Deadline = 200 * time.Millisecond }).
		groups(GroupConfig{Timeout: 3500 * time.Millisecond}, 0, 1)
	_, err := groups[0].Do(Barrier())
	var late *TimeoutError
	require.ErrorAs(t, err, &late)
	require.Equal(t, []int{1}, late.Late)
}

func TestWrongCalls(t *testing.T) {
	groups := newJob(t, 2, nil).groups(GroupConfig{}, 0, 1)
	for name, c := range map[string]Call{
		"bytes are no elements": AllReduce(make([]byte, 5), make([]byte, 5), reduce.F32, reduce.Sum),
		"no such root":          Broadcast(floats(1), reduce.F32, 2),
		"bits of floats":        AllReduce(floats(1), floats(1), reduce.F32, reduce.Band),
		"no dtype":              AllReduce(floats(1), floats(1), 0, reduce.Sum),
		"to itself":             Send(floats(1), 0, 0),
		"to nobody":             Send(floats(1), 2, 0),
		"with any tag":          Send(floats(1), 1, AnyTag),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := groups[0].Do(c)
			require.ErrorIs(t, err, ErrConfig)
		})
	}
	each(t, groups, func(g *Group) error { _, err := g.Do(Barrier()); return err }) // they have cost nobody anything
	require.NoError(t, groups[0].Close())
	_, err := groups[0].Do(Barrier())
	require.ErrorIs(t, err, ErrClosed)
	_, err = groups[0].Start(Send(floats(1), 1, 0)).Wait(t.Context())
	require.ErrorIs(t, err, ErrClosed)
}

func TestWrongGroups(t *testing.T) {
	j := newJob(t, 1, nil)
	for name, cfg := range map[string]GroupConfig{
		"no ID":            {Ranks: []int{0}},
		"without this one": {ID: "x", Ranks: []int{1, 2}},
		"too small":        {ID: "x", Ranks: []int{0, 1, 2}, Capacity: 2},
		"policy":           {ID: "x", Failures: 9},
		"timeout":          {ID: "x", Timeout: -1},
		"twice":            {ID: "x", Ranks: []int{0, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := j.worlds[0].Group(t.Context(), cfg)
			require.Error(t, err)
		})
	}
	_, err := New(t.Context(), Config{})
	require.ErrorIs(t, err, ErrConfig)
}

func TestSmallCallsAllocateNothing(t *testing.T) {
	g := newJob(t, 1, nil).groups(GroupConfig{}, 0)[0]
	buf := floats(1, 2, 3)
	c := AllReduce(buf, buf, reduce.F32, reduce.Sum)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if _, err := g.Do(c); err != nil {
			t.Error(err)
		}
	}))
}
