package link

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// overAll runs a test over each transport.
func overAll(t *testing.T, run func(t *testing.T, kind transportKind)) {
	t.Helper()
	for _, kind := range transportKinds {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			run(t, kind)
		})
	}
}

// TestLanesCarryStreams in both directions between all members, at once, byte for byte.
func TestLanesCarryStreams(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 3)
		ms := meshOf(t, "g", 1, nodes...)
		const size = 5 << 20 // several times around
		var wg sync.WaitGroup
		for i, m := range ms {
			for k := range ms {
				p, c := m.Lane(k)
				if k == i {
					require.Nil(t, p)
					require.Nil(t, c)
					require.Empty(t, m.Transport(k))
					continue
				}
				require.Equal(t, kind.name, m.Transport(k))
				wg.Go(func() {
					if err := writeRandom(nodes[i].Bell(), p, uint64(i*8+k), size); err != nil {
						t.Error(i, k, err)
					}
				})
				wg.Go(func() {
					if err := readRandom(nodes[i].Bell(), c, uint64(k*8+i), size); err != nil {
						t.Error(i, k, err)
					}
				})
			}
		}
		wg.Wait()
		closeAll(t, ms...)
	})
}

// TestALaneThatNobodyReads takes as much as its rings and the transport hold, and goes on when somebody does.
func TestALaneThatNobodyReads(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 2)
		ms := meshOf(t, "g", 1, nodes...)
		p, _ := ms[0].Lane(1)
		_, c := ms[1].Lane(0)
		sent, block := 0, bytes.Repeat([]byte{7}, 64<<10)
		for still := time.Now(); time.Since(still) < 300*time.Millisecond; {
			if free := p.Free(); len(free) >= len(block) {
				p.Commit(copy(free, block))
				sent += len(block)
				still = time.Now()
			} else {
				time.Sleep(time.Millisecond)
			}
		}
		require.Greater(t, sent, 900<<10)
		require.Less(t, sent, 64<<20)
		got := make([]byte, sent)
		require.NoError(t, receive(nodes[1].Bell(), c, got))
		require.Equal(t, sent, bytes.Count(got, []byte{7}))
		require.NoError(t, send(nodes[0].Bell(), p, []byte("and on")))
		require.NoError(t, receive(nodes[1].Bell(), c, got[:6]))
		require.Equal(t, "and on", string(got[:6]))
	})
}

// TestWhatWasWrittenComesThoughTheMeshIsClosed right afterwards, and even the node: members still need the last bytes.
func TestWhatWasWrittenComesThoughTheMeshIsClosed(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 2)
		ms := meshOf(t, "g", 1, nodes...)
		p, _ := ms[0].Lane(1)
		q, c := ms[1].Lane(0)
		text := bytes.Repeat([]byte("last words "), 50000)
		require.NoError(t, send(nodes[1].Bell(), q, text)) // that nobody will ever read
		require.NoError(t, send(nodes[0].Bell(), p, text))
		require.NoError(t, ms[0].Close())
		require.NoError(t, ms[0].Close())
		if kind.name == TransportTCP || kind.name == TransportUnix {
			require.NoError(t, nodes[0].Close())
		}
		got := make([]byte, len(text))
		require.NoError(t, receive(nodes[1].Bell(), c, got))
		require.Equal(t, text, got)
		require.Error(t, receive(nodes[1].Bell(), c, got[:1]))
		require.Eventually(t, func() bool { return q.Err() != nil }, wait, time.Millisecond)
	})
}

// TestAMemberThatFails is read to the end, and then its lane fails with the reason that was given; other lanes go on.
func TestAMemberThatFails(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 3)
		ms := meshOf(t, "g", 1, nodes...)
		why := errors.New("too late")
		_, c := ms[0].Lane(1)
		p, _ := ms[1].Lane(0)
		require.NoError(t, send(nodes[1].Bell(), p, []byte("before")))
		require.True(t, nodes[0].Bell().Wait(func() bool { return len(c.Ready()) == 6 }, 0, wait))
		ms[0].Fail(1, why)
		ms[0].Fail(0, why) // itself: nothing happens
		got := make([]byte, 6)
		require.NoError(t, receive(nodes[0].Bell(), c, got))
		require.ErrorIs(t, receive(nodes[0].Bell(), c, got), why)
		require.Eventually(t, func() bool { return p.Err() != nil }, wait, time.Millisecond)
		if room, local := ms[0].Room(); room != nil {
			require.Equal(t, []int{0, 1, 2}, local)
			require.True(t, room.IsDown(1))
			require.False(t, room.IsDown(2))
		}
		other, _ := ms[0].Lane(2)
		_, its := ms[2].Lane(0)
		require.NoError(t, send(nodes[0].Bell(), other, []byte("hello!")))
		require.NoError(t, receive(nodes[2].Bell(), its, got))
		require.True(t, nodes[0].Connected(1, 101))
		again := meshOf(t, "g", 2, nodes...)
		q, _ := again[1].Lane(0)
		_, d := again[0].Lane(1)
		require.NoError(t, send(nodes[1].Bell(), q, []byte("afresh")))
		require.NoError(t, receive(nodes[0].Bell(), d, got))
		require.Equal(t, "afresh", string(got))
	})
}

// TestAProcessThatGoes has its lanes fail, after what it has written was read, in all meshes and pairs.
func TestAProcessThatGoes(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 3)
		one, two := meshOf(t, "one", 1, nodes...), meshOf(t, "two", 9, nodes...)
		text := bytes.Repeat([]byte("x"), 100<<10)
		for _, m := range [][]*Mesh{one, two} {
			p, _ := m[2].Lane(0)
			require.NoError(t, send(nodes[2].Bell(), p, text))
			_, c := m[0].Lane(2)
			require.True(t, nodes[0].Bell().Wait(func() bool { return len(c.Ready()) == len(text) }, 0, wait))
		}
		down := make(chan error, 2)
		nodes[0].mu.Lock()
		nodes[0].connection(2, 102).fail(io.ErrUnexpectedEOF)
		nodes[0].mu.Unlock()
		for _, m := range [][]*Mesh{one, two} {
			_, c := m[0].Lane(2)
			got := make([]byte, len(text))
			require.NoError(t, receive(nodes[0].Bell(), c, got))
			go func() { down <- receive(nodes[0].Bell(), c, got) }()
			err := <-down
			require.Error(t, err)
			p, _ := m[0].Lane(2)
			require.Eventually(t, func() bool { return p.Err() != nil }, wait, time.Millisecond)
			if room, _ := m[0].Room(); room != nil {
				require.Eventually(t, func() bool { return room.IsDown(2) }, wait, time.Millisecond)
				require.False(t, room.IsDown(1))
			}
			p, _ = m[0].Lane(1)
			require.NoError(t, p.Err())
		}
	})
}
