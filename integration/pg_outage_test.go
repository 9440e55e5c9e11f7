package integration

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/integration/cluster"
	"larder/pg"
	"larder/pg/reduce"
)

// TestGroupsOutliveTheMasters has all masters away while ranks compute. For less than a lease nobody notices. For longer ranks stop, since
// nobody knows what the others decide, and go on when the masters are back: nothing was decided, and who is alive is still a member.
func TestGroupsOutliveTheMasters(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	ranks := joinGroups(t, c, 4)
	if t.Failed() {
		return
	}
	var wg sync.WaitGroup
	each := func(f func(n *cluster.Node)) {
		for _, n := range c.Nodes {
			f(n)
		}
	}
	epoch := ranks[0].g.Epoch()
	require.Zero(t, lockstep(t, ranks, func() {
		each(func(n *cluster.Node) { n.Signal(syscall.SIGSTOP) })
		time.Sleep(1500 * time.Millisecond)
		each(func(n *cluster.Node) { n.Signal(syscall.SIGCONT) })
	}), "calls that failed")
	require.Equal(t, epoch, ranks[0].g.Epoch())
	failed := lockstep(t, ranks, func() {
		each((*cluster.Node).Kill)
		time.Sleep(5 * time.Second)
		each((*cluster.Node).Start) // one alone is not ready
		each((*cluster.Node).Ready)
		c.Leader().Ready()
	})
	require.Positive(t, failed, "longer than their leases")
	require.Equal(t, []int{0, 1, 2, 3}, ranks[3].g.Active().Ranks())
	for _, r := range ranks {
		wg.Go(func() { r.close(t) })
	}
	wg.Wait()
}

// lockstep has ranks call all-reduces while something happens, and until all succeed for a while after that. It returns how many calls
// have failed, all of them because a rank was cut off from the store, or waited for one that was.
func lockstep(t *testing.T, ranks []*rank, meanwhile func()) (failed int64) {
	t.Helper()
	const last = 1024 // is added by rank 0 to say so
	var over atomic.Bool
	var failures atomic.Int64
	sums := make([]atomic.Int64, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() {
			for began := time.Now(); time.Since(began) < 40*time.Second; {
				x := float32(int(1) << r.g.Rank())
				if r.g.Rank() == 0 && over.Load() {
					x += last
				}
				buf := binary.NativeEndian.AppendUint32(nil, math.Float32bits(x))
				_, err := r.g.Do(pg.AllReduce(buf, buf, reduce.F32, reduce.Sum))
				var peer *pg.PeerError
				switch sum := math.Float32frombits(binary.NativeEndian.Uint32(buf)); {
				case errors.Is(err, pg.ErrIsolated) || errors.As(err, &peer):
					failures.Add(1)
					time.Sleep(5 * time.Millisecond) // do not ask again at once
				case err != nil:
					t.Errorf("rank %d: %v", r.g.Rank(), err)
					return
				case sum == 15+last:
					return
				case sum != 15:
					t.Errorf("rank %d: a sum of %v", r.g.Rank(), sum)
					return
				default:
					sums[i].Add(1)
				}
			}
			t.Errorf("rank %d does not compute again", r.g.Rank())
		})
	}
	meanwhile()
	// The last call must not succeed for some and fail for others, who would wait for those for ever.
	const calm, look = 2 * time.Second, 50 * time.Millisecond
	for began, since := time.Now(), time.Now(); time.Since(since) < calm && time.Since(began) < 30*time.Second; {
		before := failures.Load()
		all := make([]int64, len(sums))
		for i := range sums {
			all[i] = sums[i].Load()
		}
		time.Sleep(look)
		for i := range sums {
			if sums[i].Load() == all[i] || failures.Load() != before {
				since = time.Now()
			}
		}
	}
	over.Store(true)
	wg.Wait()
	return failures.Load()
}
