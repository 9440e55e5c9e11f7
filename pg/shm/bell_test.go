package shm

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// twins is a bell, and the same as another process has it.
func twins(tb testing.TB) (own, peers *Bell) {
	tb.Helper()
	own, err := NewBell()
	require.NoError(tb, err)
	peers, err = OpenBell(own.File())
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, own.Close())
		require.NoError(tb, peers.Close())
	})
	return own, peers
}

func never() bool { return false }

// Two that wake each other as fast as they can. Sleeps are not bounded here, so that a wake-up that is lost is not made up for.
func TestNoWakeUpIsLost(t *testing.T) {
	for name, spin := range map[string]time.Duration{"asleep": 0, "at the edge": time.Microsecond, "spinning": 20 * time.Microsecond} {
		t.Run(name, func(t *testing.T) {
			var turn atomic.Int64
			var wg sync.WaitGroup
			var bells, peers [2]*Bell
			for i := range 2 {
				bells[i], peers[i] = twins(t)
				bells[i].longest = time.Hour
			}
			rounds := int64(100_000)
			if testing.Short() {
				rounds = 10_000
			}
			for i := range 2 {
				wg.Go(func() {
					for {
						if !bells[i].Wait(func() bool { return turn.Load()&1 == int64(i) }, spin, 30*time.Second) {
							t.Error("a wake-up was lost")
							return
						}
						if turn.Add(1); turn.Load() > rounds {
							peers[1-i].Ring()
							return
						}
						peers[1-i].Ring()
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestOneRingWakesAllSleepers(t *testing.T) {
	own, peers := twins(t)
	own.longest = time.Hour
	const sleepers = 50
	var up atomic.Bool
	var woken sync.WaitGroup
	for range sleepers {
		woken.Go(func() {
			if !own.Wait(up.Load, 0, 30*time.Second) {
				t.Error("a sleeper was not woken")
			}
		})
	}
	count := word32(own.page.Load().b, bellSleepers)
	require.Eventually(t, func() bool { return count.Load() == sleepers }, 10*time.Second, time.Millisecond)
	up.Store(true)
	peers.Ring()
	woken.Wait()
	require.Zero(t, count.Load())
}

func TestAWaitEndsAtItsLimit(t *testing.T) {
	own, _ := twins(t)
	for _, spin := range []time.Duration{0, time.Hour} {
		start := time.Now()
		require.False(t, own.Wait(never, spin, 20*time.Millisecond))
		require.GreaterOrEqual(t, time.Since(start), 20*time.Millisecond)
	}
	require.False(t, own.Wait(never, 0, 0))
	require.False(t, own.Wait(never, 0, -time.Second))
	require.True(t, own.Wait(func() bool { return true }, 0, 0), "what is ready needs no time")
}

// A peer that was killed between what it did and ringing.
func TestASleeperLooksWithoutBeingRung(t *testing.T) {
	own, _ := twins(t)
	var up atomic.Bool
	stop := time.AfterFunc(10*time.Millisecond, func() { up.Store(true) })
	defer stop.Stop()
	require.True(t, own.Wait(up.Load, 0, 30*time.Second))
}

func TestABellMayBeClosedWhileItIsInUse(t *testing.T) {
	own, peers := twins(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10_000 {
				peers.Ring()
			}
		})
		wg.Go(func() { own.Wait(never, 0, time.Hour) })
	}
	require.NoError(t, peers.Close())
	require.NoError(t, own.Close())
	require.NoError(t, own.Close())
	wg.Wait()
}

// The counts are a peer's to garble. It gains that sleepers wake for nothing, or late.
func TestABellThatAPeerGarbles(t *testing.T) {
	own, peers := twins(t)
	page := peers.page.Load().b
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			word32(page, bellTurn).Add(12345)
			word32(page, bellSleepers).Store(0)
		}
	})
	require.False(t, own.Wait(never, 0, 30*time.Millisecond))
	require.True(t, own.Wait(func() bool { return true }, 0, 0))
	stop.Store(true)
	wg.Wait()
}

// The peer acts at the worst moment: just after the sleeper's last look.
func TestARingBetweenTheLastLookAndSleep(t *testing.T) {
	own, peers := twins(t)
	own.longest = time.Hour
	up, looked := false, 0
	start := time.Now()
	require.True(t, own.Wait(func() bool {
		was := up
		if looked++; looked == 2 { // the first is before the sleeper counts itself
			up = true
			peers.Ring()
		}
		return was
	}, 0, 10*time.Second))
	require.Less(t, time.Since(start), 10*time.Second)
	require.Equal(t, 3, looked)
}
