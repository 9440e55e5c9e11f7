package link

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

type ends struct {
	p *shm.Producer
	c *shm.Consumer
}

func pairUp(t *testing.T, n *Node, group string, rank int) ends {
	t.Helper()
	p, c, err := n.Pair(within(t, wait), group, rank, uint64(rank)+100)
	require.NoError(t, err)
	return ends{p, c}
}

// TestAPairIsMadeOnce whoever asks first, both at once or one alone, and belongs to its group.
func TestAPairIsMadeOnce(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 2)
		for round := range 10 {
			group := fmt.Sprint(round)
			var a, b, again ends
			var wg sync.WaitGroup
			if round%3 != 0 {
				wg.Go(func() { a = pairUp(t, nodes[0], group, 1) })
				wg.Go(func() { again = pairUp(t, nodes[0], group, 1) })
			}
			if round%3 != 1 {
				wg.Go(func() { b = pairUp(t, nodes[1], group, 0) })
			}
			wg.Wait()
			a, b = pairUp(t, nodes[0], group, 1), pairUp(t, nodes[1], group, 0)
			if again.p != nil {
				require.Same(t, again.p, a.p)
			}
			require.NoError(t, send(nodes[0].Bell(), a.p, []byte("to "+group)))
			got := make([]byte, 4)
			require.NoError(t, receive(nodes[1].Bell(), b.c, got))
			require.Equal(t, "to "+group, string(got))
			require.NoError(t, send(nodes[1].Bell(), b.p, []byte("ack"+group)))
			require.NoError(t, receive(nodes[0].Bell(), a.c, got))
			require.Equal(t, "ack"+group, string(got))
		}
	})
}

// TestAPairThatWasClosed is read to the end at the other side, and made anew when somebody asks.
func TestAPairThatWasClosed(t *testing.T) {
	for name, closing := range map[string]func(*Node, ends){
		"by its user": func(_ *Node, e ends) { _, _ = e.p.Close(), e.c.Close() },
		"by Unpair":   func(n *Node, _ ends) { n.Unpair("g", 1) },
		"altogether":  func(n *Node, _ ends) { n.Unpair("g", -1) },
	} {
		t.Run(name, func(t *testing.T) {
			overAll(t, func(t *testing.T, kind transportKind) {
				t.Helper()
				nodes := nodesOver(t, kind, 2)
				for round := range 5 {
					a, b := pairUp(t, nodes[0], "g", 1), pairUp(t, nodes[1], "g", 0)
					text := bytes.Repeat([]byte{byte(round)}, 10000)
					require.NoError(t, send(nodes[0].Bell(), a.p, text))
					closing(nodes[0], a)
					got := make([]byte, len(text))
					require.NoError(t, receive(nodes[1].Bell(), b.c, got))
					require.Equal(t, text, got)
					require.Error(t, receive(nodes[1].Bell(), b.c, got))
					require.Eventually(t, func() bool { return b.p.Err() != nil }, wait, time.Millisecond)
				}
			})
		})
	}
}

// TestPairsOfAProcessThatGoes fail, are left to who has them, and are made anew with the process that comes after it.
func TestPairsOfAProcessThatGoes(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 2)
		a := pairUp(t, nodes[0], "g", 1)
		pairUp(t, nodes[1], "other", 0) // which rank 0 has not asked for
		cfg := kind.cfg(t, 1)
		cfg.Rank, cfg.Incarnation = 1, 555
		next, _ := node(t, cfg)
		nodes[1].mu.Lock()
		nodes[1].peers[0].c.fail(ErrLost)
		nodes[1].mu.Unlock()
		require.Error(t, receive(nodes[0].Bell(), a.c, make([]byte, 1)))
		require.Eventually(t, func() bool { return a.p.Err() != nil }, wait, time.Millisecond)
		require.NotPanics(t, func() { a.p.Free(); a.c.Ready() }, "their user still has them")
		require.Eventually(t, func() bool { return !nodes[0].Connected(1, 101) }, wait, time.Millisecond)
		_, _, err := nodes[0].Pair(t.Context(), "g", 1, 101)
		require.ErrorIs(t, err, ErrNotConnected)
		connect(t, nodes[0], next)
		p, _, err := nodes[0].Pair(within(t, wait), "g", 1, 555)
		require.NoError(t, err)
		_, c, err := next.Pair(within(t, wait), "g", 0, 100)
		require.NoError(t, err)
		require.NoError(t, send(nodes[0].Bell(), p, []byte("!")))
		require.NoError(t, receive(next.Bell(), c, make([]byte, 1)))
		nodes[0].mu.Lock()
		defer nodes[0].mu.Unlock()
		require.Len(t, nodes[0].pairs, 1)
	})
}

// TestPairsThatNobodyAskedFor are bounded.
func TestPairsThatNobodyAskedFor(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 2)
	for i := range maxPairs {
		_, _, err := nodes[1].Pair(within(t, wait), fmt.Sprint(i), 0, 100)
		require.NoError(t, err)
	}
	_, _, err := nodes[1].Pair(within(t, wait), "too many", 0, 100)
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, RefusedBusy, refused.Code)
	pairUp(t, nodes[0], "5", 1)
	require.Eventually(t, func() bool {
		_, _, err := nodes[1].Pair(within(t, wait), "one more", 0, 100)
		return err == nil
	}, wait, time.Millisecond)
}

// TestWaitingForAPair ends with the caller's patience, and when it is closed.
func TestWaitingForAPair(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 2)
	nodes[1].mu.Lock() // so that it does not answer
	_, _, err := nodes[0].Pair(within(t, 20*time.Millisecond), "g", 1, 101)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	done := make(chan error, 1)
	go func() {
		_, _, err := nodes[0].Pair(t.Context(), "g", 1, 101)
		done <- err
	}()
	time.Sleep(10 * time.Millisecond)
	nodes[0].Unpair("g", 1)
	require.ErrorIs(t, <-done, ErrClosed)
	nodes[1].mu.Unlock()
	pairUp(t, nodes[0], "g", 1)
	require.NoError(t, nodes[0].Close())
	_, _, err = nodes[0].Pair(t.Context(), "g", 1, 101)
	require.ErrorIs(t, err, ErrClosed)
}
