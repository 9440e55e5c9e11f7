package pg

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// newEngine makes one without NICs, which moves bytes by TCP or memory.
func newEngine(tb testing.TB) *transfer.Engine {
	tb.Helper()
	e, err := transfer.New(transfer.Config{Listen: []string{"127.0.0.1:0"}, Topology: &transfer.Topology{}})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, e.Close()) })
	return e
}

// fetched reads what a buffer of an engine has, by another engine or itself.
func fetched(ctx context.Context, e *transfer.Engine, seg *transfer.Segment, h transfer.Handle, n int) ([]byte, error) {
	got := make([]byte, n)
	b, err := e.Submit([]transfer.Request{{Op: transfer.Read, Segment: seg, Buffer: h, Local: got}}, 20*time.Second)
	if err != nil {
		return nil, err
	}
	return got, b.Wait(ctx)
}

// Worlds and groups share an engine, which goes on serving whoever else uses it: while they compute, and when they are closed.
func TestGroupsShareAnEngine(t *testing.T) {
	const n = 3
	e := newEngine(t)
	before := len(e.Describe().Buffers)
	mine := bytes.Repeat([]byte("mine"), 64<<10)
	buf, err := e.Register(mine, transfer.BufferOptions{Name: "somebody else's"})
	require.NoError(t, err)
	seg, err := e.Open(t.Context(), e.Addresses()...)
	require.NoError(t, err)
	works := func() {
		got, err := fetched(t.Context(), e, seg, buf.Info().Handle, len(mine))
		require.NoError(t, err)
		require.Equal(t, mine, got)
		require.NoError(t, seg.Notify(t.Context(), "hello", []byte("there")))
		require.Equal(t, "there", string((<-e.Notifications()).Body))
	}
	works()
	t.Run("in use", func(t *testing.T) {
		j := newJob(t, n, func(c *Config) { c.Engine, c.Transports = e, []string{"engine"} })
		all, some := j.groups(GroupConfig{}, upTo(n)...), j.groups(GroupConfig{ID: "some"}, 2, 0)
		var over atomic.Bool
		done := make(chan error, 1)
		go func() {
			for !over.Load() {
				got, err := fetched(t.Context(), e, seg, buf.Info().Handle, len(mine))
				if err != nil || !bytes.Equal(got, mine) {
					done <- err
					return
				}
			}
			done <- nil
		}()
		for range 20 {
			settled(t, all, 7)
			settled(t, some, 3)
		}
		for _, g := range some {
			require.NoError(t, g.Close())
		}
		works()
		require.NoError(t, j.worlds[1].Close())
		works()
		settled(t, []*Group{all[0], all[2]}, 5)
		over.Store(true)
		require.NoError(t, <-done)
	})
	works()
	require.Len(t, e.Describe().Buffers, before+1, "worlds take their memory back")
	require.NoError(t, seg.Close())
	require.NoError(t, buf.Retire(t.Context()))
}

// All collectives and messages over lanes that an engine carries, an engine for each rank; then a rank is lost, and another comes.
func TestEngineTransport(t *testing.T) {
	const n = 4
	change := func(c *Config) { c.Engine, c.Transports = newEngine(t), []string{"engine"} }
	j := newJob(t, n, change)
	groups := j.groups(GroupConfig{Capacity: n + 1}, upTo(n)...)
	for _, count := range []int{1, 1000, 300_000} {
		each(t, groups, func(g *Group) error { return allKinds(t, g, n, count) })
		each(t, groups, func(g *Group) error { return passOn(t, g, n, count) })
	}
	left := []*Group{groups[0], groups[2], groups[3]}
	time.AfterFunc(50*time.Millisecond, func() { j.crash(1) })
	settled(t, left, 13, 1)
	w := j.add(change)
	next, err := w.Group(t.Context(), GroupConfig{ID: "world", Ranks: upTo(n + 1), Capacity: n + 1, Extension: true})
	require.NoError(t, err)
	letIn(t, next, left[1])
	settled(t, append(left, next), 13+16)
}
