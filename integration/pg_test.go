package integration

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
	"larder/pg"
	"larder/pg/member"
	"larder/pg/reduce"
	"larder/pg/store"
)

// rank is a process's part in a group that the masters keep.
type rank struct {
	w *pg.World
	g *pg.Group
	s store.Store
}

// joinGroup takes part in a group of four.
func joinGroup(t *testing.T, c *cluster.Cluster, number int, extension bool) *rank {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := store.Masters(ctx, client.Config{Addrs: c.Addrs()}, "job", 3*time.Second)
	require.NoError(t, err)
	w, err := pg.New(ctx, pg.Config{Rank: number, Store: s})
	require.NoError(t, err)
	g, err := w.Group(ctx, pg.GroupConfig{ID: "world", Ranks: []int{0, 1, 2, 3}, Extension: extension})
	require.NoError(t, err)
	return &rank{w, g, s}
}

func (r *rank) close(t *testing.T) {
	t.Helper()
	require.NoError(t, r.w.Close())
	require.NoError(t, r.s.Close())
}

// joinGroups makes the first n ranks of the group, at once.
func joinGroups(t *testing.T, c *cluster.Cluster, n int) []*rank {
	t.Helper()
	ranks := make([]*rank, n)
	var wg sync.WaitGroup
	for i := range ranks {
		wg.Go(func() { ranks[i] = joinGroup(t, c, i, false) })
	}
	wg.Wait()
	return ranks
}

// TestGroupsSurviveLeaders kills the masters' leader while ranks call all-reduces, which do not notice; then one of them leaves
// and another takes its place, by the new leader, which is killed in the middle of that.
func TestGroupsSurviveLeaders(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	ranks := joinGroups(t, c, 4)
	if t.Failed() {
		return
	}
	var wg sync.WaitGroup
	kill := func() {
		leader := c.Leader()
		leader.Kill()
		leader.Restart()
	}
	sums := sumForever(t, ranks)
	awaitSums(t, sums, 4, 15)
	epoch := ranks[0].g.Epoch()
	kill()
	awaitSums(t, sums, 4, 15)
	time.Sleep(4 * time.Second) // longer than a lease
	awaitSums(t, sums, 4, 15)
	require.Equal(t, epoch, ranks[0].g.Epoch(), "a leader's death is no rank's")

	c.Leader().Ready()
	wg.Go(func() { ranks[3].close(t) })
	kill()
	wg.Wait()
	awaitSums(t, sums, 3, 7)

	ranks[3] = joinGroup(t, c, 3, true)
	joined := make(chan error, 1)
	go func() { joined <- ranks[3].g.Join(t.Context()) }()
	cluster.Within(t, "rank 3 to be let in", func() error {
		if states, err := ranks[0].g.PeerState(3); err != nil || !states[0] {
			return fmt.Errorf("rank 3 is not there: %w", err)
		}
		res, err := ranks[0].g.Activate(t.Context(), 3)
		if err != nil || res.Status != member.Applied {
			return fmt.Errorf("%v: %w", res, err)
		}
		return nil
	})
	require.NoError(t, <-joined)
	go keepSumming(t, ranks[3], sums)
	awaitSums(t, sums, 4, 15)
	for _, r := range ranks {
		wg.Go(func() { r.close(t) })
	}
	wg.Wait()
}

// sum is the result of an all-reduce to which each rank has given 2^rank.
type sum struct {
	rank int
	sum  float32
}

func sumForever(t *testing.T, ranks []*rank) chan sum {
	t.Helper()
	sums := make(chan sum)
	for _, r := range ranks {
		go keepSumming(t, r, sums)
	}
	return sums
}

// keepSumming calls all-reduces until one fails.
func keepSumming(t *testing.T, r *rank, sums chan<- sum) {
	t.Helper()
	for {
		buf := binary.NativeEndian.AppendUint32(nil, math.Float32bits(float32(int(1)<<r.g.Rank())))
		_, err := r.g.Do(pg.AllReduce(buf, buf, reduce.F32, reduce.Sum))
		if err != nil {
			return // it, or all others, have left: else its sums are missed
		}
		select {
		case sums <- sum{r.g.Rank(), math.Float32frombits(binary.NativeEndian.Uint32(buf))}:
		case <-t.Context().Done():
			return
		}
	}
}

// awaitSums waits until so many ranks have that sum.
func awaitSums(t *testing.T, sums <-chan sum, ranks int, want float32) {
	t.Helper()
	seen := map[int]bool{}
	timeout := time.After(20 * time.Second)
	for len(seen) < ranks {
		select {
		case s := <-sums:
			if s.sum == want {
				seen[s.rank] = true
			}
		case <-timeout:
			t.Fatalf("only ranks %v have come to %v", seen, want)
		}
	}
}
