package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// takes takes dirty pages until there are none, and returns how many there were of each call.
func takes(p *pool) (all []int) {
	for {
		runs := p.takeDirty()
		if len(runs) == 0 {
			return all
		}
		n := 0
		for _, t := range runs {
			n += t.n
		}
		p.cleaned(runs)
		all = append(all, n)
	}
}

func TestPagesAreDirtyUntilTheyAreDiscarded(t *testing.T) {
	now := int64(1e9)
	p := newPool(func() int64 { return now }, true)
	r := testRegion(1, 128)
	p.watchDirt(r)
	p.add(r)
	require.True(t, p.hasDirt())
	require.Equal(t, []int{64, 64}, takes(p), "half of the free pages stay free")
	require.False(t, p.hasDirt())
	require.Equal(t, 128, p.nfree)

	a, _ := p.takeRun(3)
	r.keys[a.page] = keyHash([]byte("a"))
	p.use(a)
	b, _ := p.takeRun(2)
	require.Empty(t, takes(p), "pages that are used, or about to be")
	p.release(b)
	require.Equal(t, []int{2}, takes(p), "whether anything was written to them is not known")
	p.freed(&protocol.Page{Key: []byte("a"), RegionID: 1, KVLength: 3 * 4096, FreeAfterMS: 50})
	require.Empty(t, takes(p), "in quarantine")
	require.True(t, p.hasDirt(), "soon")
	now += 60e6
	runs := p.takeDirty()
	require.Len(t, runs, 1)
	require.Equal(t, run{r, a.page, 3}, runs[0])
	require.Equal(t, 125, p.nfree)
	c, _ := p.takeRun(1)
	require.Equal(t, 3, c.page, "what is being discarded is not given out")
	p.release(c)
	p.cleaned(runs)
	require.Zero(t, p.busy+p.cleaning)
	c, _ = p.takeRun(1)
	require.Zero(t, c.page)
	p.release(c)

	p.queue = append(p.queue, &want{keys: [][]byte{nil}, pages: []int{200}, found: []bool{false}, runs: []run{{}}})
	require.Empty(t, takes(p), "while a store waits for pages none are kept from it")
	p.queue = nil
	require.Equal(t, []int{2}, takes(p))
}

func TestDiscardsAreBounded(t *testing.T) {
	p := newPool(func() int64 { return 0 }, true)
	r := testRegion(1, 1000)
	p.watchDirt(r)
	p.add(r)
	takes(p)
	for range 1000 {
		one, _ := p.takeRun(1)
		p.use(one)
	}
	for page := 0; page < 1000; page += 2 {
		p.retire(run{r, page, 1}, 0)
	}
	require.Equal(t, []int{120, 120, 120, 120, 20}, takes(p))
	second := testRegion(2, 8)
	second.second = true
	p.watchDirt(second)
	p.add(second)
	require.Empty(t, takes(p), "regions for replicas are somebody else's disks")
	require.False(t, p.hasDirt())
}

func TestWhatAMasterFindsOccupiedIsNotDirty(t *testing.T) {
	p := newPool(func() int64 { return 0 }, true)
	r := testRegion(1, 4)
	p.watchDirt(r)
	p.add(r)
	p.noteChanges()
	p.reconcile([]protocol.OwnedRegion{{
		Region: protocol.Region{Handle: protocol.Handle{RegionID: 1}, Epoch: 1}, Occupied: []uint64{4096, 2 * 4096},
	}}, 10)
	runs := p.takeDirty()
	require.Equal(t, []run{{r, 0, 1}}, runs)
	p.cleaned(runs)
	require.Equal(t, []int{1}, takes(p))

	// What is being discarded while it is taken away is not given out again, and not the new owner's yet.
	p.release(run{r, 1, 2})
	runs = p.takeDirty()
	require.NotEmpty(t, runs)
	given := make(chan struct{})
	go func() {
		defer close(given)
		_ = p.giveUp(r, ErrRevoked)
	}()
	select {
	case <-given:
		t.Error("a region was given up while its pages were being discarded")
	case <-time.After(20 * time.Millisecond):
	}
	p.cleaned(runs)
	<-given
	require.Zero(t, p.nfree)
	require.Empty(t, takes(p))
}

// shredder is a Config.Discard that overwrites what it is told of, as late as it can.
type shredder struct {
	n     *fakeNode
	delay time.Duration
	enter chan struct{} // if not nil: sent to when a call begins
	leave chan struct{} // if not nil: received from before it ends

	mu     sync.Mutex
	calls  int
	total  uint64
	active bool
	fault  error
}

func (d *shredder) discard(ctx context.Context, list []Unused) error {
	d.mu.Lock()
	twice := d.active
	d.active = true
	d.calls++
	err := d.fault
	d.mu.Unlock()
	if twice || len(list) > maxDiscards {
		d.n.f.t.Errorf("%d extents at once, in two calls: %v", len(list), twice)
	}
	if d.enter != nil {
		d.enter <- struct{}{}
	}
	if d.leave != nil {
		select {
		case <-d.leave:
		case <-ctx.Done():
		}
	}
	if d.delay > 0 {
		time.Sleep(d.delay)
	}
	d.n.f.mu.Lock()
	for _, u := range list {
		reg := d.n.f.regions[u.Region]
		if reg == nil || reg.Epoch != u.Epoch || u.Length == 0 || u.Offset+u.Length > reg.Length {
			d.n.f.t.Errorf("a place that is none: %+v", u)
			continue
		}
		clear(d.n.mem[reg.Offset+u.Offset:][:u.Length])
	}
	d.n.f.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, u := range list {
		d.total += u.Length
	}
	d.active = false
	return err
}

func (d *shredder) bytes() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.total
}

// diskFake is a fake whose regions lie on the disk of a node, and what discards there.
func diskFake(t *testing.T, pages int) (*fake, *shredder) {
	t.Helper()
	f := newFake(t, 16*4096, 1)
	n := f.addNode(t, "ssd", pages*4096)
	n.first = true
	f.limit = 1
	return f, &shredder{n: n}
}

func TestFreePagesAreDiscarded(t *testing.T) {
	f, d := diskFake(t, 16)
	d.fault = errors.New("what could not be discarded is not asked for again")
	c := f.open(t, func(cfg *Config) { cfg.Discard = d.discard })
	put(t, c, "a", 3*4096)
	put(t, c, "b", 4096)
	require.Eventually(t, func() bool { return d.bytes() == 12*4096 }, 5*time.Second, time.Millisecond, "of who had the region before")
	f.do(func() { f.restMS = 300 })
	gone := time.Now()
	ok, err := c.Delete(t.Context(), []byte("a"))
	require.NoError(t, err)
	require.Equal(t, []bool{true}, ok)
	require.Eventually(t, func() bool { return d.bytes() == 15*4096 }, 5*time.Second, time.Millisecond)
	require.GreaterOrEqual(t, time.Since(gone), 300*time.Millisecond, "a reader may have held a lease")
	requireValue(t, c, "b", 4096)
	require.Eventually(t, func() bool { return c.Stats().FreePages == 15 }, 5*time.Second, time.Millisecond)
	time.Sleep(2 * discardEvery)
	require.EqualValues(t, 15*4096, d.bytes(), "once")
}

// A store that wants for pages waits for those that are being discarded rather than have entries evicted.
func TestAStoreWaitsForPagesThatAreBeingDiscarded(t *testing.T) {
	f, d := diskFake(t, 2)
	d.enter, d.leave = make(chan struct{}), make(chan struct{})
	c := f.open(t, func(cfg *Config) { cfg.Discard, cfg.RegionSize = d.discard, 2*4096 })
	put(t, c, "a", 4096)
	<-d.enter // of page 1
	put1 := make(chan error, 1)
	go func() {
		_, err := c.Put(context.Background(), []byte("b"), []byte("written after what was discarded"))
		put1 <- err
	}()
	select {
	case err := <-put1:
		require.Fail(t, "written while it is being discarded", "%v", err)
	case <-time.After(50 * time.Millisecond):
	}
	d.leave <- struct{}{}
	require.NoError(t, <-put1)
	got, err := c.Get(t.Context(), []byte("b"), nil)
	require.NoError(t, err)
	require.Equal(t, "written after what was discarded", string(got))
	require.Zero(t, c.Stats().Evicted)
	requireValue(t, c, "a", 4096)
}

// A REVOKE is answered when nothing of the region is being discarded any more.
func TestARevokeWaitsForDiscards(t *testing.T) {
	f, d := diskFake(t, 16)
	d.enter, d.leave = make(chan struct{}), make(chan struct{})
	c := f.open(t, func(cfg *Config) { cfg.Discard = d.discard })
	put(t, c, "a", 4096)
	<-d.enter
	c.pool.mu.Lock()
	r := c.pool.list[0]
	c.pool.mu.Unlock()
	f.do(func() {
		f.sessions[c.Session()].push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.id, Epoch: r.epoch}).Append(nil))
	})
	require.Eventually(t, func() bool { return c.Stats().Regions == 0 }, 5*time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	require.Zero(t, f.count(protocol.TypeRevokeDone))
	d.leave <- struct{}{}
	require.Eventually(t, func() bool { return f.count(protocol.TypeRevokeDone) == 1 }, 5*time.Second, time.Millisecond)
}

// Stores, deletes and evictions, while whatever is free is overwritten with zeros: no value ever loses a byte.
func TestNothingThatIsStoredIsDiscarded(t *testing.T) {
	f, d := diskFake(t, 64)
	d.delay = 5 * time.Millisecond
	c := f.open(t, func(cfg *Config) { cfg.Discard, cfg.RegionSize, cfg.Checksums = d.discard, 64*4096, true })
	var wg sync.WaitGroup
	until := time.Now().Add(3 * time.Second)
	for part := range 3 {
		rng := rand.New(rand.NewPCG(uint64(part), 1))
		wg.Go(func() {
			for n := 0; time.Now().Before(until); n++ {
				key, size := []byte(fmt.Sprint(part, "-", rng.IntN(30))), 1+rng.IntN(3*4096)
				switch rng.IntN(4) {
				case 0:
					_, _ = c.Delete(t.Context(), key)
				case 1:
					if _, err := c.Get(t.Context(), key, nil); err != nil && !errors.Is(err, ErrNotFound) {
						t.Error(err)
					}
				default:
					if _, err := c.Put(t.Context(), key, value(string(key), size)); err != nil {
						t.Error(err)
					}
				}
				time.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond)
			}
		})
	}
	wg.Wait()
	s := c.Stats()
	require.Zero(t, s.ChecksumFaults)
	require.Positive(t, d.bytes())
	require.Positive(t, s.Evicted)
	require.Positive(t, s.Hits)
}
