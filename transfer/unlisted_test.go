package transfer

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestManyWindows: what stands in no descriptor is bounded by memory alone, and is reached like the rest. A node has a
// buffer for each region that is written by transfer.
func TestManyWindows(t *testing.T) {
	ways(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		const many = maxListed + 100
		disk := newDisk(t, 8<<10)
		var last *Buffer
		for range many {
			onStorage(t, there, disk, 4<<10, BufferOptions{Unlisted: true})
		}
		o := BufferOptions{Unlisted: true}
		mem := memory(t, many, &o)
		for i := range many {
			last = register(t, there, mem[i:i+1], o)
			o.Offset++
		}
		require.Less(t, len(there.Describe().Buffers), 10)
		out := []byte{42}
		require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: last.Info().Handle, Local: out}))
		require.True(t, holds(last, 0, out))
		require.NoError(t, last.Retire(t.Context()))
		require.ErrorIs(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: last.Info().Handle, Local: out}), ErrStale)
	})
}

func TestListedBuffersAreBounded(t *testing.T) {
	e := engine(t, Config{})
	mem := make([]byte, 8)
	first := register(t, e, mem, BufferOptions{})
	for range maxListed - 1 {
		register(t, e, mem, BufferOptions{})
	}
	_, err := e.Register(mem, BufferOptions{})
	require.ErrorContains(t, err, "retire some")
	register(t, e, mem, BufferOptions{Unlisted: true})
	require.NoError(t, first.Retire(t.Context()))
	require.NoError(t, first.Retire(t.Context()))
	register(t, e, mem, BufferOptions{})
	_, err = e.Register(mem, BufferOptions{})
	require.Error(t, err)
}
