package client

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"

	"larder/protocol"
	"larder/transfer"
)

// fetch is the reads of one call from devices that are not mapped: one batch of transfers, under leases that are renewed
// until it ends. It is reused.
type fetch struct {
	c     *Client
	hold  hold
	reqs  []transfer.Request
	parts []part
	bytes uint64
	flight
}

// part is one read of a fetch.
type part struct {
	index int // of the call's keys
	dev   *device
}

func (c *Client) newFetch() *fetch {
	f := c.fetches.Get().(*fetch) //nolint:forcetypeassert // the pool holds nothing else
	f.c = c
	f.hold.begin()
	return f
}

// add plans to read a location into dst, which is as long as it. The fetch takes the hold on the device over.
func (f *fetch) add(index int, dev *device, r *protocol.LookupResult, sentAt int64, dst []byte) {
	at, _ := dev.far.within(&r.Location) // checked by resolve
	f.reqs = append(f.reqs, transfer.Request{
		Op: transfer.Read, Segment: dev.far.seg.Segment, Buffer: dev.far.buffer, Offset: at, Local: dst,
	})
	f.parts = append(f.parts, part{index, dev})
	f.bytes += uint64(len(dst))
	f.hold.add(r, sentAt)
}

// start sends the reads out.
func (f *fetch) start(ctx context.Context) {
	f.c.keep(&f.hold)
	f.flight = f.c.submit(ctx, f.reqs, f.bytes)
}

// wait returns when all reads have ended, and nothing lands in the callers' memory any more.
func (f *fetch) wait(ctx context.Context) { f.flight.wait(ctx) }

// outcome tells whether the j-th read, which r asked for, brought what was stored.
func (f *fetch) outcome(j int, r *protocol.LookupResult) int {
	c, dev, dst := f.c, f.parts[j].dev, f.reqs[j].Local
	switch _, err := f.status(j); {
	case errors.Is(err, transfer.ErrCanceled):
		if f.slow() {
			dev.failed(c.cfg.Clock(), err)
		}
		return bad
	case errors.Is(err, transfer.ErrMissing): // the device has answered: nothing is wrong but with this location
		c.counters.remoteFaults.Add(1)
		if dev.generation() == r.Generation && !f.hold.over(c.cfg.Clock()) {
			return damaged
		}
		return bad
	case err != nil:
		c.counters.remoteFaults.Add(1)
		c.failed(dev, err)
		if dev.far.stale.Load() {
			return stale
		}
		return bad
	case dev.generation() != r.Generation:
		c.counters.generationMisses.Add(1)
		return stale
	case f.hold.over(c.cfg.Clock()):
		c.counters.late.Add(1)
		return late
	case c.cfg.Checksums && r.Checksum != 0 && checksum(dst) != r.Checksum:
		c.counters.checksumFaults.Add(1)
		return damaged
	}
	dev.worked()
	c.counters.remoteReads.Add(1)
	c.counters.readFrom(dev)
	c.counters.bytesRead.Add(uint64(len(dst)))
	return good
}

// freeFetch gives a fetch back that has ended.
func (c *Client) freeFetch(f *fetch) {
	c.letGo(&f.hold)
	for i := range f.parts {
		f.parts[i].dev.drop()
	}
	clear(f.parts)
	clear(f.reqs)
	f.reqs, f.parts, f.bytes, f.flight = f.reqs[:0], f.parts[:0], 0, flight{}
	c.fetches.Put(f)
}

// copyFar is copyOut for a device that is not mapped, whose hold it takes over.
func (c *Client) copyFar(ctx context.Context, dev *device, r *protocol.LookupResult, sentAt int64, dst []byte) ([]byte, int) {
	f := c.newFetch()
	defer c.freeFetch(f)
	dst = sized(dst, r.KVLength)
	f.add(0, dev, r, sentAt, dst)
	f.start(ctx)
	f.wait(ctx)
	return dst, f.outcome(0, r)
}

// fetchFar begins to read those results of a lookup whose best location is not mapped, into dst. It returns nil if there
// are none.
func (c *Client) fetchFar(ctx context.Context, results []protocol.LookupResult, sentAt int64, dst [][]byte) *fetch {
	var f *fetch
	for i := range results {
		r := &results[i]
		if !r.Found {
			continue
		}
		c.prefer(ctx, r)
		if c.devices.mapped(r.Device) {
			continue
		}
		dev, _ := c.resolve(ctx, &r.Location)
		if dev == nil || dev.far == nil {
			if dev != nil {
				dev.drop()
			}
			continue // mapped by now, or not to be had: copyAny finds out
		}
		if f == nil {
			f = c.newFetch()
		}
		dst[i] = sized(dst[i], r.KVLength)
		f.add(i, dev, r, sentAt, dst[i])
	}
	if f != nil {
		f.start(ctx)
	}
	return f
}

// has reports whether the fetch reads the index-th key. Parts are in the order of the keys: at is the first that is not
// before it.
func (f *fetch) has(index int, at *int) bool {
	if f == nil || *at == len(f.parts) || f.parts[*at].index != index {
		return false
	}
	*at++
	return true
}

// sized returns dst with n bytes, in its own memory if that suffices.
func sized(dst []byte, n uint64) []byte {
	if uint64(cap(dst)) < n {
		return make([]byte, n)
	}
	return dst[:n]
}

// prefer puts the location of a result first that costs the least to read. Of those that cost the same each reader takes any,
// so that not all come to one node.
func (c *Client) prefer(ctx context.Context, r *protocol.LookupResult) {
	if len(r.Copies) == 0 {
		return
	}
	now := c.cfg.Clock()
	costs := append(make([]cost, 0, 1+protocol.MaxCopies), c.cost(ctx, &r.Location, now))
	for i := range r.Copies {
		if costs[0].rank == rankMapped {
			return
		}
		costs = append(costs, c.cost(ctx, &r.Copies[i], now))
	}
	if at := cheapest(costs, rand.Uint64()); at > 0 { //nolint:gosec // no secret
		r.Location, r.Copies[at-1] = r.Copies[at-1], r.Location
	}
}

// cost is what it costs to read a location.
type cost struct {
	rank    int
	latency int64 // ns; 0 = not known
}

// cost says what it costs to read a location now.
func (c *Client) cost(ctx context.Context, l *protocol.Location, now int64) cost {
	dev := c.device(ctx, l.Device, l.Generation)
	if dev == nil {
		return cost{rank: rankNone}
	}
	defer dev.drop()
	if dev.far == nil {
		return cost{rank: dev.rank(now)}
	}
	return cost{dev.rank(now), dev.far.latency(now)}
}

const (
	// slower is how much longer than the fastest a location may take, of those of one rank, and be as good: what is measured
	// is an average of reads of all sizes, and if all took the fastest it would not be for long.
	slower = 2
	// lookAgain is how many reads take one of those that are slower, and see whether it still is: one of so many.
	lookAgain = 16
)

// cheapest chooses one of the costs. Chance, any number, chooses among those that are as good.
func cheapest(costs []cost, chance uint64) (at int) {
	least, fastest := costs[0].rank, int64(math.MaxInt64)
	for _, x := range costs[1:] {
		least = min(least, x.rank)
	}
	for _, x := range costs {
		if x.rank == least && x.latency > 0 {
			fastest = min(fastest, x.latency)
		}
	}
	most := fastest
	if most <= math.MaxInt64/slower {
		most *= slower
	}
	if chance%lookAgain == 0 {
		most = math.MaxInt64
	}
	good, chance := uint64(0), chance/lookAgain
	for _, x := range costs {
		if x.rank == least && x.latency <= most {
			good++
		}
	}
	for nth := chance % good; ; at++ {
		if x := costs[at]; x.rank != least || x.latency > most {
			continue
		}
		if nth == 0 {
			return at
		}
		nth--
	}
}

// copyAny is copyOut from the best location that can be read, all under the same lease.
func (c *Client) copyAny(
	ctx context.Context, key []byte, r *protocol.LookupResult, sentAt int64, dst []byte, total uint64,
) ([]byte, int) {
	c.prefer(ctx, r)
	value, got := c.copyOut(ctx, r, sentAt, dst, total)
	if got == good || got == late {
		return value, got
	}
	return c.copyNext(ctx, key, r, sentAt, value, total, got)
}

// copyNext reads a result of which one location turned out to be unreadable, from the others. When there is none, and the
// node of that one has another buffer by now, the leader is asked where that is. Without a key no location is condemned.
func (c *Client) copyNext(
	ctx context.Context, key []byte, r *protocol.LookupResult, sentAt int64, dst []byte, total uint64, got int,
) ([]byte, int) {
	first, again := r.Location, got == stale
	for got != good && got != late {
		if got == damaged {
			if len(key) > 0 {
				c.condemn(ctx, key, &r.Location)
			}
			got = bad
		}
		if len(r.Copies) == 0 {
			break
		}
		c.counters.fallovers.Add(1)
		r.Location, r.Copies = r.Copies[0], r.Copies[1:]
		dst, got = c.copyOut(ctx, r, sentAt, dst, total)
	}
	if again && got != good && got != late {
		r.Location = first
		dst, got = c.copyOut(ctx, r, sentAt, dst, total)
	}
	if got == stale || got == damaged {
		got = bad
	}
	return dst, got
}

// condemn has the leader drop a location at which something else lies than was stored, or nothing: the entry would be a miss
// to all its readers until it is evicted, and a store of the same key would change nothing. The caller holds a lease on the
// entry, so that no other bytes of its can have come to lie there. What fails is left to the next reader.
func (c *Client) condemn(ctx context.Context, key []byte, l *protocol.Location) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CallTimeout)
	defer cancel()
	was, err := c.remove(ctx, protocol.KeysRequest{Keys: [][]byte{key}, RegionID: l.RegionID, KVOffset: l.KVOffset})
	if err != nil || !was[0] {
		return // somebody else was faster, it is pinned, or the masters are of another release
	}
	c.counters.condemned.Add(1)
	c.cfg.Logger.Warn("bytes of the pool are damaged: the leader has dropped them", slog.Uint64("device", l.Device),
		slog.Uint64("region_id", l.RegionID), slog.Uint64("offset", l.KVOffset), slog.Uint64("bytes", l.KVLength))
}
