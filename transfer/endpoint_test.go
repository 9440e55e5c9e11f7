package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// in runs a test in virtual time with a NIC of a pool of queue pairs.
func in(t *testing.T, pool int, cfg EndpointConfig, run func(c *carrier)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		run(newCarrier(t, newSimNIC("mlx5_0", pool, &fleet{}), cfg))
	})
}

// TestEndpointIsShared: whoever wants a peer's endpoint gets the same one, and it is made once.
func TestEndpointIsShared(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		got := make(chan *Endpoint)
		for range 10 {
			go func() {
				e, _ := c.store.Acquire(t.Context(), "a")
				got <- e
			}()
		}
		first := <-got
		for range 9 {
			require.Same(t, first, <-got)
		}
		require.Equal(t, int32(10), first.refs.Load())
		for range 10 {
			first.Release()
		}
		require.Equal(t, "a", first.Peer())
		require.Equal(t, 2, c.nic.allocated())
		require.Panics(t, first.Release)
		first.refs.Store(0)
	})
}

// TestPostSpreadsAndIsBounded: work goes to the queue pair with the least, and no further than its depth.
func TestPostSpreadsAndIsBounded(t *testing.T) {
	in(t, 100, EndpointConfig{QueueDepth: 8}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", dead)
		for range 4 {
			require.NoError(t, c.send(t.Context(), "a", 4))
		}
		require.ErrorIs(t, c.send(t.Context(), "a", 1), ErrQueueFull)
		require.Equal(t, 16, c.outstanding())
		e := c.endpoint("a")
		require.Equal(t, 8, e.Depth(0).Outstanding())
		require.Equal(t, 8, e.Depth(1).Outstanding())
		c.nic.fleet.set("a", healthy)
		time.Sleep(time.Second)
		require.Zero(t, c.outstanding())
		require.NoError(t, c.send(t.Context(), "a", 4))
		n, err := e.Post(1, make([]WorkRequest, 0))
		require.NoError(t, err)
		require.Zero(t, n)
	})
}

// TestFailedEndpointDrainsFirst: one that fails takes nothing any more, and its queue pairs are destroyed when what was
// outstanding has flushed, not earlier and not much later, though nobody inserts anything.
func TestFailedEndpointDrainsFirst(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", stuck)
		e, err := c.store.Acquire(t.Context(), "a")
		require.NoError(t, err)
		require.NoError(t, c.send(t.Context(), "a", 3))
		c.store.Fail("a", 1<<23, errors.New("another's queue pair"))
		require.Zero(t, c.store.Stats().Waiting)
		c.store.Fail("a", e.queues[0].qpn, errors.New("test"))
		_, err = e.Post(0, make([]WorkRequest, 1))
		require.ErrorIs(t, err, ErrRetired)
		time.Sleep(2500 * time.Millisecond)
		c.check()
		require.Equal(t, 2, c.nic.allocated())
		s := c.store.Stats()
		require.Equal(t, 1, s.Waiting)
		require.Equal(t, 3, s.Outstanding)
		require.Equal(t, uint64(1), s.Deletions)
		require.InDelta(t, 2.5, s.WaitingOldestSeconds, 0.1)
		require.Less(t, s.LastReclaimSeconds, 1.0)
		c.nic.fleet.set("a", healthy)
		require.NoError(t, e.toError()) // it flushes now
		time.Sleep(20 * time.Millisecond)
		c.check()
		require.Zero(t, c.nic.allocated())
		e.Release() // a holder keeps nobody from destroying it
	})
}

// TestBudget: a peer for which there is no room waits, and fails by itself with the reason; the others go on.
func TestBudget(t *testing.T) {
	for _, v := range []struct {
		name string
		pool int
		cfg  EndpointConfig
		held int // endpoints that there is room for
		err  error
	}{
		{"endpoints", 100, EndpointConfig{MaxEndpoints: 3}, 3, errNoRoom},
		{"budget", 100, EndpointConfig{QPBudget: 5}, 2, errNoRoom},
		{"ENOMEM", 5, EndpointConfig{}, 2, syscall.ENOMEM},
	} {
		t.Run(v.name, func(t *testing.T) {
			in(t, v.pool, v.cfg, func(c *carrier) {
				t := c.tb
				var held []*Endpoint
				for i := range v.held {
					e, err := c.store.Acquire(t.Context(), peerName(i))
					require.NoError(t, err)
					held = append(held, e)
				}
				begun := time.Now()
				_, err := c.store.Acquire(t.Context(), "late")
				var full *BudgetError
				require.ErrorAs(t, err, &full)
				require.ErrorIs(t, err, v.err)
				require.Equal(t, 5*time.Second, time.Since(begun))
				require.Equal(t, "late", full.Peer)
				require.Contains(t, err.Error(), "mlx5_0")
				require.NoError(t, c.send(t.Context(), peerName(0), 1))
				time.Sleep(time.Second)
				c.check()

				// Whoever waits is next as soon as one is idle.
				got := make(chan error)
				go func() { got <- c.send(t.Context(), "late", 1) }()
				time.Sleep(1300 * time.Millisecond) // between two ticks of the monitor
				held[0].Release()
				begun = time.Now()
				require.NoError(t, <-got)
				require.Less(t, time.Since(begun), 20*time.Millisecond)
				require.Equal(t, uint64(1), c.store.Stats().Evictions)
				for _, e := range held[1:] {
					e.Release()
				}
				c.check()
			})
		})
	}
}

// TestPoolOfOthers: what other processes take of a NIC is not tried for again and again, and found when it is free again.
func TestPoolOfOthers(t *testing.T) {
	in(t, 100, EndpointConfig{MaxEndpoints: 50, QPBudget: 100}, func(c *carrier) {
		t := c.tb
		c.nic.mu.Lock()
		c.nic.others = 90
		c.nic.mu.Unlock()
		for i := range 200 {
			require.NoError(t, c.send(t.Context(), peerName(i), 1))
			time.Sleep(20 * time.Millisecond)
		}
		c.check()
		require.LessOrEqual(t, c.store.Stats().NoMemory, uint64(10))
		require.Equal(t, 10, c.nic.most)
		c.nic.mu.Lock()
		c.nic.others = 0
		c.nic.mu.Unlock()
		time.Sleep(30 * time.Second)
		require.Equal(t, 100, c.store.Stats().QPLimit)
		for i := range 40 {
			require.NoError(t, c.send(t.Context(), peerName(i), 1))
		}
		require.Equal(t, 90, c.nic.allocated())
	})
}

// TestWaitingListIsBounded: retired endpoints for which it has no room keep their places, so that all together are bounded.
func TestWaitingListIsBounded(t *testing.T) {
	in(t, 100, EndpointConfig{MaxEndpoints: 4, MaxWaiting: 2, FenceAfter: time.Hour}, func(c *carrier) {
		t := c.tb
		for i := range 20 {
			c.nic.fleet.set(peerName(i), stuck)
			if c.send(t.Context(), peerName(i), 1) == nil {
				c.store.Delete(peerName(i))
			}
			c.check()
		}
		s := c.store.Stats()
		require.Equal(t, 2, s.Waiting)
		require.Equal(t, 4, s.Parked)
		require.Equal(t, 12, s.QPs)
		require.Equal(t, 6, int(s.Stuck))
	})
}

// TestBackoff: a peer that fails is left alone, longer each time, and others are not; jitter spreads those that failed
// together; what is remembered is bounded and passes.
func TestBackoff(t *testing.T) {
	draw := 0.0
	cfg := EndpointConfig{MaxBackoffs: 8, Jitter: func() float64 { return draw }}
	in(t, 100, cfg, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("bad", refusing)
		for i, want := range []int64{50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 15000, 15000} {
			err := c.send(t.Context(), "bad", 1)
			require.ErrorIs(t, err, errRefused)
			require.NotErrorAs(t, err, new(*BackoffError))
			var back *BackoffError
			require.ErrorAs(t, c.send(t.Context(), "bad", 1), &back)
			require.ErrorIs(t, back, errRefused)
			require.Equal(t, i+1, back.Failures)
			require.Equal(t, want, back.Left.Milliseconds())
			require.NoError(t, c.send(t.Context(), "good", 1))
			time.Sleep(back.Left)
		}
		c.nic.fleet.set("bad", healthy)
		require.NoError(t, c.send(t.Context(), "bad", 1))
		require.Equal(t, 1, c.store.Stats().BackingOff)
		time.Sleep(time.Minute)
		require.Zero(t, c.store.Stats().BackingOff)

		draw = 0.5
		for i := range 20 {
			c.nic.fleet.set(peerName(i), refusing)
			require.Error(t, c.send(t.Context(), peerName(i), 1))
		}
		var back *BackoffError
		require.ErrorAs(t, c.send(t.Context(), peerName(19), 1), &back)
		require.Equal(t, 75*time.Millisecond, back.Left)
		require.ErrorIs(t, c.send(t.Context(), peerName(0), 1), errRefused, "it has been forgotten")
		require.Equal(t, 8, c.store.Stats().BackingOff)
		c.check()
	})
}

// TestDeadPeersLeaveRoom: however many dead peers are asked for, they hold a bounded number of queue pairs, and a healthy
// one connects.
func TestDeadPeersLeaveRoom(t *testing.T) {
	in(t, 1000, EndpointConfig{MaxEndpoints: 200, BackoffFirst: time.Millisecond, BackoffMost: time.Millisecond},
		func(c *carrier) {
			t := c.tb
			for i := range 1000 {
				c.nic.fleet.set(peerName(i), refusing)
				require.Error(t, c.send(t.Context(), peerName(i), 1))
				c.nic.fleet.set(peerName(i), hanging)
			}
			time.Sleep(time.Millisecond)
			var refused counter
			for i := range 400 { // that are remembered
				go func() {
					if errors.As(c.send(t.Context(), peerName(600+i), 1), new(*BudgetError)) {
						refused.next()
					}
				}()
			}
			synctest.Wait()
			require.Equal(t, maxProbing, c.store.Stats().Connecting)
			require.NoError(t, c.send(t.Context(), "good", 1))
			c.check()
			time.Sleep(10 * time.Second)
			require.GreaterOrEqual(t, refused.next(), 400-maxProbing)
			c.check()
			require.Equal(t, 2, c.nic.allocated())
		})
}

// TestPortFlap: endpoints from before a flap are stale and go; meanwhile the NIC says that it is down; it comes back by
// itself, even if the event is lost.
func TestPortFlap(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		for i := range 5 {
			require.NoError(t, c.send(t.Context(), peerName(i), 1))
		}
		c.nic.fleet.set("slow", hanging)
		got := make(chan error)
		go func() { got <- c.send(t.Context(), "slow", 1) }()
		synctest.Wait()
		old := c.endpoint(peerName(0))
		c.nic.flap(false)
		var down *NICError
		require.ErrorAs(t, <-got, &down, "who connects is told")
		require.Equal(t, NICDown, down.State)
		time.Sleep(20 * time.Millisecond)
		c.check()
		require.Zero(t, c.nic.allocated())
		require.ErrorAs(t, c.send(t.Context(), peerName(0), 1), &down)
		require.Equal(t, "down", c.store.Stats().State)

		c.nic.flap(true)
		synctest.Wait()
		require.NoError(t, c.send(t.Context(), peerName(0), 1))
		require.NotSame(t, old, c.endpoint(peerName(0)))

		c.nic.mu.Lock()
		c.nic.port = PortDown // without an event
		c.nic.mu.Unlock()
		time.Sleep(time.Second + time.Millisecond)
		require.ErrorAs(t, c.send(t.Context(), peerName(0), 1), &down)
		c.nic.mu.Lock()
		c.nic.port = PortActive
		c.nic.mu.Unlock()
		time.Sleep(time.Second + time.Millisecond)
		require.NoError(t, c.send(t.Context(), peerName(0), 1))
		c.nic.flap(true) // only the second half of a flap
		synctest.Wait()
		require.Zero(t, c.store.Stats().Endpoints)
		require.Zero(t, c.store.Stats().BackingOff, "peers have done nothing wrong")
		c.check()
	})
}

// TestStuckQueuePair: one that does not drain is reported, then its NIC is fenced off and reset, and carries again. Work
// that was outstanding is handed back.
func TestStuckQueuePair(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", stuck)
		require.NoError(t, c.send(t.Context(), "a", 3))
		require.NoError(t, c.send(t.Context(), "b", 3))
		time.Sleep(retryTime + 100*time.Millisecond)
		require.Equal(t, 1, c.store.Stats().Waiting)
		time.Sleep(7 * time.Second)
		require.Equal(t, uint64(1), c.store.Stats().Stuck)
		require.NoError(t, c.send(t.Context(), "b", 3), "others go on")
		c.nic.mu.Lock()
		c.nic.resetErr = errors.New("the firmware does not answer")
		c.nic.mu.Unlock()
		time.Sleep(35 * time.Second)
		s := c.store.Stats()
		require.Equal(t, "fenced", s.State)
		require.Equal(t, 2, s.QPs, "healthy endpoints have drained")
		var fenced *NICError
		require.ErrorAs(t, c.send(t.Context(), "b", 1), &fenced)
		require.Equal(t, NICFenced, fenced.State)
		c.nic.mu.Lock()
		c.nic.resetErr = nil
		c.nic.mu.Unlock()
		time.Sleep(resetPauseMost)
		require.NoError(t, c.send(t.Context(), "b", 1))
		s = c.store.Stats()
		require.Equal(t, uint64(1), s.Resets)
		require.Equal(t, uint64(1), s.Fences)
		require.Equal(t, uint64(2), s.QPsReset)
		require.Equal(t, 2, c.lost)
		c.check()
	})
}

// TestFenceWithoutReset: a queue pair that drains after all ends the fence by itself.
func TestFenceWithoutReset(t *testing.T) {
	in(t, 100, EndpointConfig{FenceAfter: 10 * time.Second, StuckAfter: 5 * time.Second}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", stuck)
		require.NoError(t, c.send(t.Context(), "a", 3))
		e := c.endpoint("a")
		time.Sleep(retryTime + 11*time.Second)
		require.Equal(t, "fenced", c.store.Stats().State)
		c.nic.fleet.set("a", healthy)
		require.NoError(t, e.toError())
		time.Sleep(2 * time.Second)
		s := c.store.Stats()
		require.Equal(t, "active", s.State)
		require.Zero(t, s.Resets)
		require.Zero(t, s.QPs)
	})
}

// TestFatalEvent: a device that failed is reset.
func TestFatalEvent(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		require.NoError(t, c.send(t.Context(), "a", 3))
		c.nic.events <- EventFatal
		time.Sleep(2 * time.Second)
		require.Equal(t, uint64(1), c.store.Stats().Resets)
		require.NoError(t, c.send(t.Context(), "a", 3))
	})
}

// TestCallersThatLeave: whoever does not wait any more has no hold on the endpoint that is made.
func TestCallersThatLeave(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", hanging)
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			require.ErrorIs(t, c.send(ctx, "a", 1), context.DeadlineExceeded)
			cancel()
		}
		require.Equal(t, 1, c.store.Stats().Connecting)
		time.Sleep(5 * time.Second)
		require.Zero(t, c.store.Stats().Connecting)
		require.Equal(t, 1, c.store.Stats().BackingOff)
		c.check()
		require.Zero(t, c.nic.allocated())
		for _, made := range []bool{false, true} {
			c.nic.fleet.set("s", slow)
			p, e, err := c.store.join("s")
			require.NoError(t, err)
			require.Nil(t, e)
			if made {
				<-p.done
			}
			c.store.withdraw(p)
			time.Sleep(2 * slowTime)
			require.Zero(t, c.endpoint("s").refs.Load())
			c.store.Delete("s")
		}
	})
}

// TestCloseDrains: nothing can land when Close has returned, with a reset if need be.
func TestCloseDrains(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		c.nic.fleet.set("a", stuck)
		c.nic.fleet.set("h", hanging)
		require.NoError(t, c.send(t.Context(), "a", 3))
		require.NoError(t, c.send(t.Context(), "b", 3))
		got := make(chan error)
		go func() { got <- c.send(t.Context(), "h", 3) }()
		synctest.Wait()
		require.NoError(t, c.store.Close())
		require.ErrorIs(t, <-got, ErrClosed)
		require.ErrorIs(t, c.send(t.Context(), "b", 1), ErrClosed)
		require.Equal(t, 1, c.nic.resets)
		require.Equal(t, 3, c.lost)
		require.Zero(t, c.outstanding())
		require.NoError(t, c.store.Close())
	})
}

// TestEvictionOrder: fifo forgets who was acquired, sieve spares them; neither evicts one that is in use.
func TestEvictionOrder(t *testing.T) {
	for _, v := range []struct {
		policy string
		gone   []int
	}{{"fifo", []int{0, 2, 3}}, {"sieve", []int{2, 3, 5}}} {
		t.Run(v.policy, func(t *testing.T) {
			in(t, 100, EndpointConfig{MaxEndpoints: 6, Eviction: v.policy}, func(c *carrier) {
				t := c.tb
				acquire := func(i int) *Endpoint {
					e, err := c.store.Acquire(t.Context(), peerName(i))
					require.NoError(t, err)
					return e
				}
				for i := range 6 {
					acquire(i).Release()
				}
				acquire(0).Release()
				acquire(4).Release()
				held := acquire(1)
				for i := range 3 {
					acquire(10 + i).Release()
				}
				var gone []int
				for i := range 6 {
					if c.endpoint(peerName(i)) == nil {
						gone = append(gone, i)
					}
				}
				require.Equal(t, v.gone, gone)
				held.Release()
				c.check()
			})
		})
	}
	_, err := NewEndpointStore(newSimNIC("n", 1, &fleet{}), EndpointConfig{Exchange: (&fleet{}).exchange, Eviction: "lru"})
	require.ErrorContains(t, err, "fifo, sieve")
}

// TestConfigOfEndpoints refuses what cannot be right.
func TestConfigOfEndpoints(t *testing.T) {
	x := (&fleet{}).exchange
	for name, cfg := range map[string]EndpointConfig{
		"Exchange": {}, "MaxEndpoints": {Exchange: x, MaxEndpoints: -1}, "queue pairs an endpoint": {Exchange: x, QPsPerEndpoint: 65},
		"budget": {Exchange: x, QPBudget: 1}, "depth": {Exchange: x, QueueDepth: 1 << 20}, "FenceAfter": {Exchange: x, FenceAfter: 1},
	} {
		_, err := NewEndpointStore(newSimNIC("n", 1, &fleet{}), cfg)
		require.ErrorContains(t, err, name)
	}
}

// TestEndpointEvidence: what an operator sees, as JSON and as metrics.
func TestEndpointEvidence(t *testing.T) {
	in(t, 100, EndpointConfig{}, func(c *carrier) {
		t := c.tb
		require.NoError(t, c.send(t.Context(), "a", 3))
		text, err := json.Marshal(c.store.Stats())
		require.NoError(t, err)
		require.Contains(t, string(text), `"nic":"mlx5_0","state":"active","qps":2,"qp_budget":24576`)
		r := prometheus.NewPedanticRegistry()
		require.NoError(t, r.Register(NewEndpointCollector(func() []EndpointStats { return []EndpointStats{c.store.Stats()} })))
		families, err := r.Gather()
		require.NoError(t, err)
		require.Len(t, families, len(endpointMetrics))
		for _, f := range families {
			require.Regexp(t, "^larder_transfer_[a-z_]+$", f.GetName())
			require.Len(t, f.GetMetric(), 1)
			require.Equal(t, "nic", f.GetMetric()[0].GetLabel()[0].GetName())
			if f.GetName() == "larder_transfer_queue_pairs" {
				require.InDelta(t, 2, f.GetMetric()[0].GetGauge().GetValue(), 0)
			}
		}
	})
}

// TestRandomEndpoints does random things to a store and checks its bounds after each; healthy peers are always served.
func TestRandomEndpoints(t *testing.T) {
	base := uint64(time.Now().UnixNano())
	for i := range uint64(20) {
		seed := base + i
		policy := []string{"fifo", "sieve"}[i%2]
		t.Run(policy, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { randomEndpoints(t, seed, policy) }) })
	}
}

func randomEndpoints(t *testing.T, seed uint64, policy string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 1))
	nic := newSimNIC("mlx5_0", 38, &fleet{})
	c := newCarrier(t, nic, EndpointConfig{
		MaxEndpoints: 8, MaxServed: 4, Eviction: policy, QPBudget: 40, MaxBackoffs: 10, FenceAfter: 10 * time.Second, QueueDepth: 16,
		Jitter: rand.New(rand.NewPCG(seed, 2)).Float64,
	})
	nic.fleet.set("stuck", stuck)
	var held []*Endpoint
	for range 500 {
		switch p := peerName(rng.IntN(12)); rng.IntN(13) {
		case 0:
			nic.fleet.set(p, temper(rng.IntN(int(dead)+1)))
		case 1, 2, 3:
			n := 1 + rng.IntN(8)
			go func() { _ = c.send(t.Context(), p, n) }()
		case 4:
			_ = c.send(t.Context(), "stuck", 2)
		case 5:
			c.store.Delete(p)
		case 6:
			if rng.IntN(10) == 0 {
				nic.flap(nic.port == PortDown)
			}
		case 7:
			if e := c.endpoint(p); e != nil { // nothing else runs
				e, err := c.store.Acquire(t.Context(), p)
				require.NoError(t, err)
				held = append(held, e)
			}
		case 8:
			for _, e := range held {
				e.Release()
			}
			held = nil
		case 9:
			nic.mu.Lock()
			nic.others = rng.IntN(6)
			nic.mu.Unlock()
		case 11:
			deaf := rng.IntN(4) == 0
			go func() { _, _ = c.guest(t.Context(), p, deaf) }()
		case 10:
			if len(held) < 4 {
				serve(t, c, fmt.Sprintf("healthy%d", rng.IntN(3)))
			}
		default:
			time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
		}
		c.check()
	}
	for _, e := range held {
		e.Release()
	}
	if nic.port == PortDown {
		nic.flap(true)
	}
	time.Sleep(2 * time.Minute)
	c.check()
	s := c.store.Stats()
	require.Equal(t, "active", s.State)
	require.Zero(t, s.Waiting+s.Parked+s.Connecting)
	require.Zero(t, c.outstanding())
	require.Equal(t, 2*(s.Endpoints+s.Served), s.QPs)
}

// TestGuests: peers that connect to this end share its places: the one that has been there longest is asked to let go, and
// one that does not loses its place in time. One that connects again has its earlier end replaced.
func TestGuests(t *testing.T) {
	in(t, 100, EndpointConfig{MaxServed: 2}, func(c *carrier) {
		t := c.tb
		var all []*simGuest
		for i := range 8 {
			g, err := c.guest(t.Context(), peerName(i), false)
			require.NoError(t, err)
			all = append(all, g)
			c.check()
			time.Sleep(tenure)
		}
		require.Equal(t, 4, c.nic.allocated())
		require.Equal(t, uint64(6), c.store.Stats().Recalls)
		for i, g := range all {
			require.Equal(t, int64(min(1, max(0, 6-i))), g.gone.Load(), "%d of the first six have gone, once", i)
		}
		again, err := c.guest(t.Context(), peerName(7), true)
		require.NoError(t, err)
		time.Sleep(reclaimEvery)
		require.Equal(t, int64(1), all[7].gone.Load())
		require.Equal(t, 4, c.nic.allocated())
		_, err = c.guest(t.Context(), "next", true)
		require.NoError(t, err)
		begun := time.Now()
		_, err = c.guest(t.Context(), "last", true)
		require.NoError(t, err)
		require.InDelta(t, recallTime.Seconds(), time.Since(begun).Seconds(), 0.2)
		c.check()
		require.Equal(t, int64(1), again.gone.Load())
		_, err = c.store.Accept(t.Context(), "x", make([]QPAddress, 1), again)
		require.ErrorContains(t, err, "configure both processes alike")
		c.nic.flap(false)
		time.Sleep(time.Second)
		require.Zero(t, c.nic.allocated(), "what is connected is stale")
		_, err = c.guest(t.Context(), "x", false)
		require.ErrorAs(t, err, new(*NICError))
		c.nic.flap(true)
		synctest.Wait()
		g, err := c.guest(t.Context(), "x", false)
		require.NoError(t, err)
		e := <-g.e
		require.NoError(t, c.store.Dismiss(e))
		require.NoError(t, c.store.Dismiss(e), "twice")
		c.check()
	})
}

// TestBusyEndpointsYield: where all are busy all the time, whoever waits has his turn soon, and no work is flushed for it.
func TestBusyEndpointsYield(t *testing.T) {
	in(t, 100, EndpointConfig{MaxEndpoints: 2}, func(c *carrier) {
		t := c.tb
		c.nic.lags = true
		ctx, cancel := context.WithCancel(t.Context())
		var served [6]atomic.Int64
		for i := range served {
			go func() {
				for ctx.Err() == nil {
					if c.send(ctx, peerName(i), 1) == nil {
						served[i].Add(1)
					}
					time.Sleep(c.nic.every / 2)
				}
			}()
		}
		time.Sleep(10 * time.Second)
		cancel()
		time.Sleep(time.Second)
		for i := range served {
			require.Greater(t, served[i].Load(), int64(50), "peer %d", i)
		}
		require.Zero(t, c.ended[StatusFlushed])
		require.Positive(t, c.store.Stats().Yields)
		c.check()
	})
}

// serve sends to a healthy peer, which must succeed unless the NIC is out of use.
func serve(t *testing.T, c *carrier, peer string) {
	t.Helper()
	err := c.send(t.Context(), peer, 1)
	if errors.As(err, new(*NICError)) || errors.Is(err, ErrRetired) || errors.Is(err, ErrQueueFull) || c.nic.port == PortDown {
		return
	}
	if _, ok := errors.AsType[*BackoffError](err); ok { // the port was down while it was sent to
		return
	}
	require.NoError(t, err, "%+v", c.store.Stats())
}

// TestCPUList reads what the kernel writes.
func TestCPUList(t *testing.T) {
	for text, want := range map[string][]int{
		"0\n": {0}, "0-2,8": {0, 1, 2, 8}, "1023": {1023}, "": nil, "1-": nil, "3-1": nil, "1024": nil, "x": nil,
	} {
		set, err := parseCPUList(text)
		if want == nil {
			require.Error(t, err, text)
			continue
		}
		require.NoError(t, err, text)
		require.Equal(t, len(want), set.Count())
		for _, cpu := range want {
			require.True(t, set.IsSet(cpu))
		}
	}
	dir := t.TempDir()
	require.Error(t, pinToNode(dir, -1))
	require.Error(t, pinToNode(dir, 7))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "node0"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "node0", "cpulist"), []byte("0\n"), 0o600))
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- pinToNode(dir, 0)
	}()
	require.NoError(t, <-done)
}
