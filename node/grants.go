package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"larder/client"
	"larder/protocol"
	"larder/tiering/ssd"
)

// Reasons why a grant is refused. The leader tells the owner, who asks again.
var (
	errFenced    = errors.New("node: the epoch was fenced: ask the leader for the region's present one")
	errUnsettled = errors.New("node: bytes of an earlier owner may still land there: ask again")
	errNotHere   = errors.New("node: this is not the home of that device")
)

// maxFenced bounds the fences that are remembered: a word for each region of a device of 4 TiB in regions of 64 MiB. What
// a fence must outlive is a grant that was on its way when it came, by some seconds.
const maxFenced = 64 << 10

// buffer is what the engine has registered.
type buffer interface {
	// Retire returns when nothing lands in the buffer any more, or ctx is over; then it is to be called again.
	Retire(ctx context.Context) error
}

// grant is a region that is registered for its owner to write to.
type grant struct {
	region, epoch  uint64
	offset, length uint64
	buffer         buffer
	endpoint       protocol.Endpoint

	discards int           // extents that are being discarded under it; under grants.mu
	idle     chan struct{} // closed when discards reaches 0; nil if nobody waits; under grants.mu
}

// overlaps reports whether two extents have bytes in common.
func (x *grant) overlaps(offset, length uint64) bool {
	return x.offset < offset+length && offset < x.offset+x.length
}

// grants are the regions of a device that are registered for writing. Its methods may be called concurrently.
type grants struct {
	register func(offset, length uint64) (buffer, protocol.Endpoint, error)

	mu       sync.Mutex
	closed   bool
	live     map[uint64]*grant // by region
	retiring []*grant          // of which bytes may still land
	fenced   map[uint64]uint64 // by region: no epoch up to this one
	order    []uint64          // the regions in fenced, the first fenced first
}

func newGrants(register func(offset, length uint64) (buffer, protocol.Endpoint, error)) *grants {
	return &grants{register: register, live: map[uint64]*grant{}, fenced: map[uint64]uint64{}}
}

// grant registers a region for the owner of its epoch. What was granted already is not registered twice. It waits, until
// ctx is over, for writes of an earlier owner of the same bytes to end: the leader gives nothing out that is another's, but
// an owner that returned its region was not fenced.
func (g *grants) grant(ctx context.Context, p *protocol.GrantPush) (protocol.Endpoint, error) {
	if err := g.supersede(p); err != nil {
		return protocol.Endpoint{}, err
	}
	if err := g.settle(ctx, func(x *grant) bool { return x.overlaps(p.Offset, p.Length) }); err != nil {
		return protocol.Endpoint{}, errors.Join(errUnsettled, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return protocol.Endpoint{}, errNotHere
	case g.fenced[p.RegionID] >= p.Epoch:
		return protocol.Endpoint{}, errFenced // meanwhile
	}
	if x := g.live[p.RegionID]; x != nil {
		return x.same(p)
	}
	for _, x := range g.live {
		if x.overlaps(p.Offset, p.Length) {
			return protocol.Endpoint{}, errUnsettled // granted meanwhile
		}
	}
	b, e, err := g.register(p.Offset, p.Length)
	if err != nil {
		return protocol.Endpoint{}, err
	}
	g.live[p.RegionID] = &grant{region: p.RegionID, epoch: p.Epoch, offset: p.Offset, length: p.Length, buffer: b, endpoint: e}
	return e, nil
}

// same answers a grant that is repeated.
func (x *grant) same(p *protocol.GrantPush) (protocol.Endpoint, error) {
	if x.epoch != p.Epoch || x.offset != p.Offset || x.length != p.Length {
		return protocol.Endpoint{}, fmt.Errorf("node: region %d is granted under epoch %d, %d bytes at %d: %w",
			x.region, x.epoch, x.length, x.offset, errUnsettled)
	}
	return x.endpoint, nil
}

// supersede takes back what was granted of the same bytes, or of the same region, under earlier epochs. Epochs are never
// given twice: a grant of an earlier one than what is there is late.
func (g *grants) supersede(p *protocol.GrantPush) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fenced[p.RegionID] >= p.Epoch {
		return errFenced
	}
	for id, x := range g.live {
		switch {
		case id != p.RegionID && !x.overlaps(p.Offset, p.Length), id == p.RegionID && x.epoch == p.Epoch:
		case x.epoch >= p.Epoch:
			return errFenced
		default:
			delete(g.live, id)
			g.retiring = append(g.retiring, x)
		}
	}
	return nil
}

// fence has nothing of a region land any more that was granted under an epoch up to this one, and remembers it. If ctx is
// over first the region stays fenced: call fence again.
func (g *grants) fence(ctx context.Context, region, epoch uint64) error {
	g.mu.Lock()
	g.remember(region, epoch)
	if x := g.live[region]; x != nil && x.epoch <= epoch {
		delete(g.live, region)
		g.retiring = append(g.retiring, x)
	}
	g.mu.Unlock()
	return g.settle(ctx, func(x *grant) bool { return x.region == region && x.epoch <= epoch })
}

// remember notes that an epoch is fenced. The caller holds mu.
func (g *grants) remember(region, epoch uint64) {
	if _, known := g.fenced[region]; !known {
		if len(g.order) >= maxFenced {
			delete(g.fenced, g.order[0])
			g.order = g.order[1:]
		}
		g.order = append(g.order, region)
	}
	g.fenced[region] = max(g.fenced[region], epoch)
}

// retireAll takes all grants back: the session that they were given under has ended. If ctx is over first, call it again.
func (g *grants) retireAll(ctx context.Context) error {
	g.mu.Lock()
	for id, x := range g.live {
		delete(g.live, id)
		g.retiring = append(g.retiring, x)
	}
	g.mu.Unlock()
	return g.settle(ctx, func(*grant) bool { return true })
}

// close is retireAll, and nothing is granted any more.
func (g *grants) close(ctx context.Context) error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	return g.retireAll(ctx)
}

// settle waits for the end of those that are being retired and are meant.
func (g *grants) settle(ctx context.Context, meant func(*grant) bool) error {
	g.mu.Lock()
	waiting := slices.DeleteFunc(slices.Clone(g.retiring), func(x *grant) bool { return !meant(x) })
	g.mu.Unlock()
	var errs []error
	for _, x := range waiting {
		if err := g.awaitDiscards(ctx, x); err != nil {
			errs = append(errs, fmt.Errorf("node: region %d: bytes are still being discarded: %w", x.region, err))
			continue
		}
		if err := x.buffer.Retire(ctx); err != nil {
			errs = append(errs, fmt.Errorf("node: region %d: %w", x.region, err))
			continue
		}
		g.mu.Lock()
		g.retiring = slices.DeleteFunc(g.retiring, func(y *grant) bool { return x == y })
		g.mu.Unlock()
	}
	return errors.Join(errs...)
}

// discard has forget forget stretches of regions, each under the region's grant of its epoch: whoever takes that back waits
// for the end. Stretches without such a grant are left out; it returns how many those are.
func (g *grants) discard(list []client.Unused, forget func([]ssd.Extent) error) (refused int, err error) {
	held, extents := g.hold(list)
	defer g.letGo(held)
	if len(extents) > 0 {
		err = forget(extents)
	}
	return len(list) - len(extents), err
}

// hold begins discards, and says where on the device they are.
func (g *grants) hold(list []client.Unused) (held []*grant, extents []ssd.Extent) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, u := range list {
		x := g.live[u.Region]
		if x == nil || x.epoch != u.Epoch || u.Offset > x.length || u.Length > x.length-u.Offset {
			continue
		}
		x.discards++
		held, extents = append(held, x), append(extents, ssd.Extent{Off: x.offset + u.Offset, Len: u.Length})
	}
	return held, extents
}

// letGo ends them.
func (g *grants) letGo(held []*grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, x := range held {
		if x.discards--; x.discards == 0 && x.idle != nil {
			close(x.idle)
			x.idle = nil
		}
	}
}

// awaitDiscards waits until nothing is discarded under a grant that was taken back.
func (g *grants) awaitDiscards(ctx context.Context, x *grant) error {
	g.mu.Lock()
	if x.discards == 0 {
		g.mu.Unlock()
		return nil
	}
	if x.idle == nil {
		x.idle = make(chan struct{})
	}
	idle := x.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller says which region
	}
}

// count says how many regions are granted, and of how many bytes may still land after they were taken back.
func (g *grants) count() (live, retiring int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.live), len(g.retiring)
}
