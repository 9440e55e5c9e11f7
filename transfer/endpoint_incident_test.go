package transfer

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The incident that this replays: Mooncake's endpoint store reclaimed only after it had inserted. Peers died, their
// endpoints were deleted, nothing was inserted any more, and so queue pairs that nobody used stayed allocated: 22,000 on
// each of the four NICs that led to the peers, 6,000 on the other four. From then on no peer could connect.
const (
	incidentMany  = 22000 / 2 // endpoints on each of NICs 0 to 3
	incidentFew   = 6000 / 2  // on each of NICs 4 to 7
	incidentAlive = 64        // of them on each NIC, whose peers stay healthy
	incidentPool  = 22000     // queue pairs of a NIC
)

// incident has peers connect and die. It returns with what was outstanding flushed and nothing inserted since.
func incident(t *testing.T, monitored bool) (nics []*carrier) {
	t.Helper()
	cfg := EndpointConfig{MaxEndpoints: incidentMany, MaxWaiting: incidentMany, QPBudget: incidentPool, FenceAfter: time.Minute}
	for i := range 8 {
		n := newSimNIC(fmt.Sprintf("mlx5_%02d", i), incidentPool, &fleet{})
		n.every = 250 * time.Millisecond
		var c *carrier
		if monitored {
			c = newCarrier(t, n, cfg)
		} else {
			c = unmonitored(t, n, cfg)
			c.store.reclaimOnInsert = true
		}
		nics = append(nics, c)
		count := incidentMany
		if i >= 4 {
			count = incidentFew
		}
		for p := range count {
			if p >= incidentAlive {
				n.fleet.set(peerName(p), dead)
			}
			require.NoError(t, c.send(t.Context(), peerName(p), 1))
		}
	}
	for i, c := range nics {
		require.Equal(t, []int{22000, 6000}[i/4], c.store.Stats().QPs)
	}
	time.Sleep(retryTime + time.Second + reclaimEvery)
	for _, c := range nics {
		require.Zero(t, c.outstanding(), "all has flushed")
	}
	return nics
}

// bounded says what is wrong with a NIC after the incident.
func bounded(t *testing.T, c *carrier) (wrong []string) {
	t.Helper()
	s := c.store.Stats()
	if want := incidentAlive * 2; s.QPs != want || c.nic.allocated() != want {
		wrong = append(wrong, fmt.Sprintf("%d queue pairs, %d in use", s.QPs, want))
	}
	if s.Waiting > 0 {
		wrong = append(wrong, fmt.Sprintf("%d endpoints wait, the oldest for %.0f s", s.Waiting, s.WaitingOldestSeconds))
	}
	if s.LastReclaimSeconds > reclaimEvery.Seconds() {
		wrong = append(wrong, fmt.Sprintf("the last reclaim was %.0f s ago", s.LastReclaimSeconds))
	}
	if err := c.send(t.Context(), peerName(0), 1); err != nil {
		wrong = append(wrong, fmt.Sprintf("a healthy peer that is connected: %v", err))
	}
	if err := c.send(t.Context(), "new", 1); err != nil {
		wrong = append(wrong, fmt.Sprintf("a healthy peer that connects: %v", err))
	}
	return wrong
}

// TestIncident: a second after the last work has flushed only the queue pairs of healthy peers are left, and they are served.
func TestIncident(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nics := incident(t, true)
		for i, c := range nics {
			s := c.store.Stats()
			require.Equal(t, uint64([]int{incidentMany, incidentFew}[i/4]-incidentAlive), s.Deletions, "whose peers died is seen")
			require.Equal(t, s.QPsCreated-s.QPsDestroyed, uint64(s.QPs))
			require.Empty(t, bounded(t, c), s.NIC)
			c.check()
		}
		// The dead are asked for again and again: they get no more than the peers that may connect at once.
		for range 20 {
			var all sync.WaitGroup
			for i := range 8 {
				for p := range 1000 {
					if nics[i].nic.fleet.set(peerName(p+incidentAlive), hanging); p%100 == 0 {
						all.Go(func() { _ = nics[i].send(t.Context(), peerName(p+incidentAlive), 1) })
					}
				}
			}
			time.Sleep(time.Second)
			for i, c := range nics {
				c.check()
				require.LessOrEqual(t, c.nic.allocated(), 2*(incidentAlive+1+maxConnecting))
				require.NoError(t, c.send(t.Context(), peerName(i), 1))
			}
			all.Wait()
		}
	})
}

// TestIncidentWithoutClock is the same with a store that reclaims only after it has inserted. It must fail what the other
// passes, as it did in production, and show why.
func TestIncidentWithoutClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nics := incident(t, false)
		time.Sleep(time.Minute)
		for i, c := range nics {
			s := c.store.Stats()
			require.Equal(t, []int{22000, 6000}[i/4], s.QPs, "as many as ever")
			require.Equal(t, incidentAlive, s.Endpoints)
			require.Equal(t, []int{incidentMany, incidentFew}[i/4]-incidentAlive, s.Waiting)
			require.Zero(t, s.Outstanding, "they could be destroyed")
			require.Greater(t, s.WaitingOldestSeconds, 60.0)
			require.Greater(t, s.LastReclaimSeconds, 60.0)
			if i >= 4 {
				continue
			}
			wrong := bounded(t, c)
			require.Len(t, wrong, 4, "%q", wrong)
			require.Contains(t, wrong[3], "22000 of 22000 queue pairs")
			t.Logf("%s: %q", s.NIC, wrong)
		}
	})
}

// TestChurn: 10,000 peers that come and go for a minute, some of whom die, leave queue pairs at the bound and memory flat.
func TestChurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSimNIC("mlx5_0", 64<<10, &fleet{})
		c := newCarrier(t, n, EndpointConfig{MaxEndpoints: 512})
		for p := range 10000 {
			if p%50 == 0 {
				n.fleet.set(peerName(p), dead)
			}
		}
		var after []uint64
		served := 0
		for second := range 60 {
			for i := range 1000 {
				p := (second*1000 + i) * 7 % 10000
				if c.send(t.Context(), peerName(p), 1) == nil {
					served++
				}
				if i%50 == 49 {
					time.Sleep(50 * time.Millisecond)
				}
			}
			c.check()
			if second%10 == 9 {
				after = append(after, heap())
			}
		}
		s := c.store.Stats()
		require.Greater(t, served, 60*1000*95/100)
		require.InDelta(t, 512, s.Endpoints, 32) // the last to die have left places
		require.LessOrEqual(t, n.most, 2*(512+512))
		time.Sleep(retryTime + reclaimEvery) // the last to die
		c.check()
		s = c.store.Stats()
		require.Equal(t, 2*s.Endpoints, s.QPs)
		t.Logf("%d served, %d endpoints created, at most %d queue pairs, heap after each 10 s in KiB: %v", served, s.Creations, n.most,
			after)
		for _, b := range after[2:] {
			require.InDelta(t, after[1], b, 512, "KiB")
		}
	})
}

// heap is how much memory is in use, in KiB.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc >> 10
}

// TestAcquireAllocatesNothing when the endpoint is there.
func TestAcquireAllocatesNothing(t *testing.T) {
	c := newCarrier(t, newSimNIC("mlx5_0", 100, &fleet{}), EndpointConfig{})
	require.NoError(t, c.send(t.Context(), "a", 1))
	ctx := t.Context()
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		e, err := c.store.Acquire(ctx, "a")
		if err != nil {
			t.Fatal(err)
		}
		e.Release()
	}))
}

// BenchmarkAcquire is an Acquire of an endpoint that is there, and its Release.
func BenchmarkAcquire(b *testing.B) {
	c := newCarrier(b, newSimNIC("mlx5_0", 4096, &fleet{}), EndpointConfig{})
	names := make([]string, 1024)
	for i := range names {
		names[i] = peerName(i)
		require.NoError(b, c.send(b.Context(), names[i], 1))
	}
	ctx := b.Context()
	b.Run("one", func(b *testing.B) {
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			e, err := c.store.Acquire(ctx, names[i%1024])
			if err != nil {
				b.Fatal(err)
			}
			e.Release()
			i++
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for i := rand.IntN(1024); pb.Next(); i++ {
				e, err := c.store.Acquire(ctx, names[i%1024])
				if err != nil {
					b.Error(err)
					return
				}
				e.Release()
			}
		})
	})
}

// BenchmarkEviction is the share of Acquires that find their endpoint, with as many endpoints as a tenth of the peers:
// Zipf's law alone, and with a tenth of them by peers that come once.
func BenchmarkEviction(b *testing.B) {
	for _, once := range []int{0, 10} {
		for _, policy := range []string{"fifo", "sieve"} {
			b.Run(fmt.Sprintf("once=%d%%/%s", once, policy), func(b *testing.B) {
				c := newCarrier(b, newSimNIC("mlx5_0", 64<<10, &fleet{}), EndpointConfig{MaxEndpoints: 1000, Eviction: policy})
				rng := rand.New(rand.NewPCG(1, 2))
				zipf := rand.NewZipf(rng, 1.1, 1, 9999)
				names := make([]string, 10000)
				for i := range names {
					names[i] = peerName(i)
				}
				ctx, n := b.Context(), 0
				acquire := func() {
					name := names[zipf.Uint64()]
					if rng.IntN(100) < once {
						name = fmt.Sprintf("once%d", n)
					}
					e, err := c.store.Acquire(ctx, name)
					if err != nil {
						b.Fatal(err)
					}
					e.Release()
					n++
				}
				for range 20000 {
					acquire()
				}
				before := c.store.Stats().Creations
				n = 0
				for b.Loop() {
					acquire()
				}
				b.ReportMetric(100*(1-float64(c.store.Stats().Creations-before)/float64(n)), "hit%")
			})
		}
	}
}
