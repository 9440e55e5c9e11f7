package node

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
	"larder/tiering/ssd"
)

// fakeBuffer retires when its writer has let go of it.
type fakeBuffer struct {
	mu      sync.Mutex
	retired bool
	stuck   bool
}

func (b *fakeBuffer) Retire(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retired = true
	if b.stuck {
		return errors.New("a peer is in the middle of a copy")
	}
	return nil
}

func (b *fakeBuffer) hold(stuck bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stuck = stuck
}

// registry is an engine for grants.
type registry struct {
	buffers []*fakeBuffer
	full    bool
}

func (r *registry) register(offset, _ uint64) (buffer, protocol.Endpoint, error) {
	if r.full {
		return nil, protocol.Endpoint{}, errors.New("too many buffers")
	}
	b := &fakeBuffer{}
	r.buffers = append(r.buffers, b)
	return b, protocol.Endpoint{Engine: "e", Buffer: uint64(len(r.buffers)), Offset: offset}, nil
}

func push(region, epoch, offset uint64) *protocol.GrantPush {
	return &protocol.GrantPush{RegionID: region, Epoch: epoch, Offset: offset, Length: 100}
}

func TestGrantIsRegisteredOnce(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	a, err := g.grant(t.Context(), push(1, 5, 0))
	require.NoError(t, err)
	again, err := g.grant(t.Context(), push(1, 5, 0))
	require.NoError(t, err)
	require.Equal(t, a, again, "a new leader is told the same handle")
	require.Len(t, r.buffers, 1)
	b, err := g.grant(t.Context(), push(2, 6, 100))
	require.NoError(t, err)
	require.NotEqual(t, a.Buffer, b.Buffer)
	require.EqualValues(t, 100, b.Offset)
	_, err = g.grant(t.Context(), &protocol.GrantPush{RegionID: 1, Epoch: 5, Offset: 0, Length: 50})
	require.Error(t, err, "one region has one extent")
}

func TestGrantOfALaterEpochEndsTheEarlier(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	for epoch := uint64(1); epoch <= 3; epoch++ {
		_, err := g.grant(t.Context(), push(1, epoch, 0))
		require.NoError(t, err)
	}
	require.True(t, r.buffers[0].retired)
	require.True(t, r.buffers[1].retired)
	require.False(t, r.buffers[2].retired)
	_, err := g.grant(t.Context(), push(1, 2, 0))
	require.ErrorIs(t, err, errFenced, "a grant that comes late is refused")
	_, err = g.grant(t.Context(), push(9, 4, 50))
	require.NoError(t, err, "other regions took the place of the first")
	require.True(t, r.buffers[2].retired)
	_, err = g.grant(t.Context(), push(1, 3, 0))
	require.ErrorIs(t, err, errFenced)
}

// unused is a stretch of a region.
func unused(region, epoch, offset, length uint64) client.Unused {
	return client.Unused{Region: region, Epoch: epoch, Offset: offset, Length: length}
}

func TestDiscardsNeedAGrantOfTheirEpoch(t *testing.T) {
	g := newGrants((&registry{}).register)
	_, err := g.grant(t.Context(), push(1, 5, 1000))
	require.NoError(t, err)
	_, err = g.grant(t.Context(), push(2, 6, 3000))
	require.NoError(t, err)
	var got []ssd.Extent
	forget := func(list []ssd.Extent) error {
		got = list
		return nil
	}
	refused, err := g.discard([]client.Unused{
		unused(1, 5, 0, 10), unused(1, 4, 10, 10), unused(1, 6, 20, 10), unused(2, 6, 90, 10), unused(2, 6, 91, 10),
		unused(1, 5, 101, 0), unused(1, 5, 1, 1<<64-1), unused(3, 5, 0, 10),
	}, forget)
	require.NoError(t, err)
	require.Equal(t, []ssd.Extent{{Off: 1000, Len: 10}, {Off: 3090, Len: 10}}, got)
	require.Equal(t, 6, refused)

	_, err = g.grant(t.Context(), push(1, 7, 1000)) // the same place is somebody else's
	require.NoError(t, err)
	require.NoError(t, g.fence(t.Context(), 2, 6))
	got = nil
	refused, err = g.discard([]client.Unused{unused(1, 5, 0, 10), unused(2, 6, 0, 10)}, forget)
	require.NoError(t, err)
	require.Equal(t, 2, refused)
	require.Empty(t, got)
	failure := errors.New("the disk is gone")
	_, err = g.discard([]client.Unused{unused(1, 7, 0, 10)}, func([]ssd.Extent) error { return failure })
	require.ErrorIs(t, err, failure)
	require.NoError(t, g.close(t.Context()))
	refused, err = g.discard([]client.Unused{unused(1, 7, 0, 10)}, forget)
	require.NoError(t, err)
	require.Equal(t, 1, refused)
}

func TestFenceWaitsForDiscards(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	_, err := g.grant(t.Context(), push(1, 5, 0))
	require.NoError(t, err)
	begun, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = g.discard([]client.Unused{unused(1, 5, 0, 10), unused(1, 5, 20, 10)}, func([]ssd.Extent) error {
			close(begun)
			<-end
			return nil
		})
	}()
	<-begun
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, g.fence(short, 1, 5), context.DeadlineExceeded)
	require.False(t, r.buffers[0].retired)
	short, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = g.grant(short, push(2, 6, 50))
	require.ErrorIs(t, err, errUnsettled, "nor is the place another's")
	fenced := make(chan error, 1)
	go func() { fenced <- g.fence(t.Context(), 1, 5) }()
	close(end)
	require.NoError(t, <-fenced)
	<-ended
	require.True(t, r.buffers[0].retired)
	_, err = g.grant(t.Context(), push(2, 6, 50))
	require.NoError(t, err)
	live, retiring := g.count()
	require.Equal(t, 1, live)
	require.Zero(t, retiring)
}

func TestFence(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	_, err := g.grant(t.Context(), push(1, 5, 0))
	require.NoError(t, err)
	require.NoError(t, g.fence(t.Context(), 1, 4))
	require.False(t, r.buffers[0].retired, "a later epoch's grant stays")
	require.NoError(t, g.fence(t.Context(), 1, 5))
	require.True(t, r.buffers[0].retired)
	_, err = g.grant(t.Context(), push(1, 5, 0))
	require.ErrorIs(t, err, errFenced)
	require.NoError(t, g.fence(t.Context(), 1, 3), "a fence may be repeated")
	_, err = g.grant(t.Context(), push(1, 4, 0))
	require.ErrorIs(t, err, errFenced, "and takes nothing back")
	_, err = g.grant(t.Context(), push(1, 6, 0))
	require.NoError(t, err)
	require.NoError(t, g.fence(t.Context(), 7, 9), "of what was never granted")
	_, err = g.grant(t.Context(), push(7, 9, 200))
	require.ErrorIs(t, err, errFenced)
}

func TestFenceThatDoesNotSettleHolds(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	_, err := g.grant(t.Context(), push(1, 5, 0))
	require.NoError(t, err)
	r.buffers[0].hold(true)
	require.Error(t, g.fence(t.Context(), 1, 5), "somebody still writes there")
	_, err = g.grant(t.Context(), push(1, 6, 0))
	require.ErrorIs(t, err, errUnsettled, "nobody else gets the bytes")
	_, err = g.grant(t.Context(), push(2, 7, 99))
	require.ErrorIs(t, err, errUnsettled, "nor a part of them")
	require.Error(t, g.fence(t.Context(), 1, 5))
	live, retiring := g.count()
	require.Equal(t, []int{0, 1}, []int{live, retiring})
	r.buffers[0].hold(false)
	require.NoError(t, g.fence(t.Context(), 1, 5))
	_, err = g.grant(t.Context(), push(1, 6, 0))
	require.NoError(t, err)
}

func TestEndOfASessionEndsItsGrants(t *testing.T) {
	r := &registry{}
	g := newGrants(r.register)
	for region := range uint64(3) {
		_, err := g.grant(t.Context(), push(region+1, region+1, region*100))
		require.NoError(t, err)
	}
	require.NoError(t, g.fence(t.Context(), 3, 3))
	r.buffers[1].hold(true)
	require.Error(t, g.retireAll(t.Context()))
	require.True(t, r.buffers[0].retired)
	r.buffers[1].hold(false)
	require.NoError(t, g.retireAll(t.Context()))
	_, err := g.grant(t.Context(), push(1, 1, 0))
	require.NoError(t, err, "the leader says under which epochs the next session has the regions")
	_, err = g.grant(t.Context(), push(3, 3, 200))
	require.ErrorIs(t, err, errFenced, "what was fenced stays so")
}

func TestGrantThatCannotBeRegisteredSaysWhy(t *testing.T) {
	g := newGrants((&registry{full: true}).register)
	_, err := g.grant(t.Context(), push(1, 5, 0))
	require.ErrorContains(t, err, "too many buffers")
}

func TestFencesAreBounded(t *testing.T) {
	g := newGrants((&registry{}).register)
	for region := range uint64(maxFenced + 10) {
		require.NoError(t, g.fence(t.Context(), region+1, 1))
	}
	require.Len(t, g.fenced, maxFenced)
	require.Len(t, g.order, maxFenced)
	_, err := g.grant(t.Context(), push(maxFenced+10, 1, 0))
	require.ErrorIs(t, err, errFenced)
}

// TestGrantsAndFencesAtOnce: whatever the order in which they come, nothing is live under an epoch whose fence has returned.
func TestGrantsAndFencesAtOnce(t *testing.T) {
	var mu sync.Mutex
	r := &registry{}
	g := newGrants(func(offset, length uint64) (buffer, protocol.Endpoint, error) {
		mu.Lock()
		defer mu.Unlock()
		return r.register(offset, length)
	})
	for epoch := uint64(1); epoch <= 200; epoch++ {
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { _, _ = g.grant(t.Context(), push(1, epoch, 0)) }) // refused if the fence was faster
		}
		wg.Go(func() {
			if err := g.fence(t.Context(), 1, epoch); err != nil {
				t.Error(err)
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.live[1] != nil {
				t.Error("granted under a fenced epoch")
			}
		})
		wg.Wait()
	}
	for _, b := range r.buffers {
		require.True(t, b.retired)
	}
}

// TestStatusDuringAGrant: who looks at a device while a region is being registered holds nothing that the other one needs.
func TestStatusDuringAGrant(t *testing.T) {
	n, err := New(Config{Masters: []string{"fake:1"}, DRAM: 4 << 20})
	require.NoError(t, err)
	defer func() { require.NoError(t, n.Close()) }()
	d := n.devices[0]
	r := &registry{}
	d.grants = newGrants(func(offset, length uint64) (buffer, protocol.Endpoint, error) {
		looking := make(chan struct{})
		go func() {
			close(looking)
			d.status()
		}()
		<-looking
		for range 100 {
			runtime.Gosched()
			d.number()
		}
		return r.register(offset, length)
	})
	ended := make(chan error, 1)
	go func() {
		var err error
		for i := range uint64(100) {
			_, e := d.grants.grant(t.Context(), push(i+1, 1, i*100))
			err = errors.Join(err, e)
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(patience):
		require.Fail(t, "a grant and a status wait for each other")
	}
	require.Equal(t, 100, d.status().Granted)
}
