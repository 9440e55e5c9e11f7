package client

import (
	"context"
	"errors"
	"fmt"

	"larder/cxl"
	"larder/protocol"
)

const (
	// maxLate is how often a read whose lease ended too early is repeated, each time with a longer lease wanted.
	maxLate = 8
	// getBatch is how many keys GetBatch looks up at a time, so that their copies end within one lease.
	getBatch = 128
	// streamTotal is the size of a read, in bytes, from which it is copied past the caches: the second-level cache of a
	// core does not hold it in any case.
	streamTotal = 1 << 20
)

// lookupMsg is a LOOKUP or BATCH_LOOKUP.
type lookupMsg struct {
	typ protocol.Type
	req protocol.LookupRequest
	rep protocol.LookupReply
	one [1][]byte
}

func (m *lookupMsg) appendTo(b []byte) []byte { return m.req.AppendAs(b, m.typ) }

func (m *lookupMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.DecodeAs(*p, m.typ)
}

func (c *Client) newLookup() *lookupMsg {
	m := c.lookups.Get().(*lookupMsg) //nolint:forcetypeassert // the pool holds nothing else
	m.req = protocol.LookupRequest{Release: m.req.Release[:0]}
	return m
}

func (c *Client) freeLookup(m *lookupMsg) {
	m.one[0], m.req.Keys = nil, nil
	c.lookups.Put(m)
}

// forOne makes m the lookup of one key.
func (m *lookupMsg) forOne(key []byte) {
	m.typ, m.one[0] = protocol.TypeLookup, key
	m.req.Keys = m.one[:]
}

// forMany makes m the lookup of many keys.
func (m *lookupMsg) forMany(keys [][]byte, stopAtMiss bool) {
	m.typ, m.req.Keys, m.req.Packed, m.req.StopAtMiss = protocol.TypeBatchLookup, keys, true, stopAtMiss
}

// lookup asks where entries lie, and gives back leases on the way. sentAt is when the leases begin.
func (c *Client) lookup(ctx context.Context, m *lookupMsg) (sentAt int64, err error) {
	m.req.Release = c.leases.take(m.req.Release[:0], ridingReleases)
	sentAt, _, err = c.roundTrip(ctx, nil, m.typ, m, 0)
	if err == nil && (len(m.rep.Results) > len(m.req.Keys) ||
		!m.req.StopAtMiss && len(m.rep.Results) != len(m.req.Keys)) {
		err = refused(protocol.CodeInternal, "the master answered for another number of keys than were asked for")
	}
	return sentAt, err
}

// giveBack gives a lease back with the next lookup.
func (c *Client) giveBack(leases ...uint64) {
	if n := c.leases.add(leases...); n > 0 {
		c.counters.leasesDropped.Add(uint64(n))
	}
}

// leaseEnd is until when the bytes of a result may be used, if it was asked for at sentAt.
func leaseEnd(r *protocol.LookupResult, sentAt int64) int64 {
	d := millis(r.LeaseMS)
	return sentAt + d - margin(d)
}

// Get reads the value of key into dst, which is grown if it is too short, and returns it: len(dst) does not matter, as
// in append(dst[:0], value...). The error is ErrNotFound if the key is not held or its bytes did not survive. The bytes
// returned are those that were stored, whole: a copy that outlived its lease is repeated. It does not allocate if dst
// has the capacity.
func (c *Client) Get(ctx context.Context, key, dst []byte) ([]byte, error) {
	return c.get(ctx, key, dst, nil)
}

// GetWith is Get for callers who bring memory when they know how much: room is told the value's length, and returns memory of
// that capacity. It may be called more than once. Its error ends the call, whose error wraps it. The value's lease does not wait for
// room: a value that it was too slow for is looked up again.
func (c *Client) GetWith(ctx context.Context, key []byte, room func(size int) ([]byte, error)) ([]byte, error) {
	return c.get(ctx, key, nil, room)
}

// get is Get, or, if room is not nil, GetWith.
func (c *Client) get(ctx context.Context, key, dst []byte, room func(size int) ([]byte, error)) ([]byte, error) {
	if err := c.checkKey(key); err != nil {
		return nil, fail("get", key, err)
	}
	m := c.newLookup()
	defer c.freeLookup(m)
	m.forOne(key)
	for range maxLate {
		sentAt, err := c.lookup(ctx, m)
		if err != nil {
			return nil, fail("get", key, err)
		}
		r := &m.rep.Results[0]
		if !r.Found {
			c.counters.misses.Add(1)
			return nil, fail("get", key, ErrNotFound)
		}
		if room != nil && uint64(cap(dst)) < r.KVLength {
			if dst, err = room(int(r.KVLength)); err != nil { //nolint:gosec // bounded by maxValue
				c.giveBack(r.Lease)
				return nil, fail("get", key, err)
			}
		}
		value, got := c.copyAny(ctx, key, r, sentAt, dst, r.KVLength)
		c.giveBack(r.Lease)
		switch got {
		case good:
			c.counters.hits.Add(1)
			if r.Promote {
				c.promote(key, r, value)
			}
			return value, nil
		case bad:
			if err := ctx.Err(); err != nil {
				return nil, fail("get", key, err)
			}
			c.counters.misses.Add(1)
			return nil, fail("get", key, ErrNotFound)
		}
		dst = value
		m.req.LeaseMS = 2 * max(r.LeaseMS, 1)
	}
	return nil, fail("get", key, ErrLease)
}

// outcomes of a read.
const (
	good    = iota
	bad     // the bytes are not what was stored: a miss
	late    // the lease ended first
	stale   // the device has another generation or another buffer than was known: as bad, unless the leader knows more
	damaged // as bad, and will be for every reader: see condemn
)

// copyOut copies the bytes of a location, and tells whether they count. total is how many bytes the whole read has.
func (c *Client) copyOut(ctx context.Context, r *protocol.LookupResult, sentAt int64, dst []byte, total uint64) ([]byte, int) {
	dev, src := c.resolve(ctx, &r.Location)
	if dev == nil {
		return dst, bad
	}
	if dev.far != nil {
		return c.copyFar(ctx, dev, r, sentAt, dst)
	}
	defer dev.drop()
	dst = sized(dst, r.KVLength)
	sound := true
	err := dev.read.Refresh(src)
	if err == nil {
		sound, err = c.copyChecked(dst, src, r.Checksum, total)
	}
	switch {
	case err != nil:
		c.counters.truncated.Add(1)
		return dst, bad
	case dev.generation() != r.Generation:
		c.counters.generationMisses.Add(1)
		return dst, bad
	case c.cfg.Clock() >= leaseEnd(r, sentAt):
		c.counters.late.Add(1)
		return dst, late
	case !sound:
		c.counters.checksumFaults.Add(1)
		return dst, damaged
	}
	c.counters.bytesRead.Add(uint64(len(dst)))
	c.counters.readFrom(dev)
	return dst, good
}

// copyChecked copies src into dst, in the way that is best for a read of total bytes. With checksums on it reports whether
// sum, if it is not 0, is that of the bytes in dst.
func (c *Client) copyChecked(dst, src []byte, sum, total uint64) (sound bool, err error) {
	switch {
	case c.cfg.Checksums && sum != 0:
		h, err := cxl.CopyOutSum(dst, src, total >= streamTotal)
		return err == nil && asChecksum(h) == sum, err
	case total < streamTotal:
		return true, cxl.CopyOut(dst, src)
	default:
		return true, cxl.CopyOutStream(dst, src)
	}
}

// resolve returns the device of a location and, if it is mapped, the bytes; nil if they are not to be had. The caller drops
// the device.
func (c *Client) resolve(ctx context.Context, l *protocol.Location) (*device, []byte) {
	dev := c.device(ctx, l.Device, l.Generation)
	if dev == nil {
		c.counters.generationMisses.Add(1)
		return nil, nil
	}
	if dev.far != nil {
		if _, ok := dev.far.within(l); ok {
			return dev, nil
		}
	} else if b := dev.bytes(l); b != nil {
		return dev, b
	}
	c.counters.generationMisses.Add(1)
	dev.drop()
	return nil, nil
}

// GetBatch reads many values. The result has one element per key, nil for those that are not held; element i is made
// of dst[i] where dst has it and its capacity suffices. dst may be nil, or shorter than keys.
func (c *Client) GetBatch(ctx context.Context, keys, dst [][]byte) ([][]byte, error) {
	return c.getBatch(ctx, keys, dst, nil)
}

// GetBatchWith is GetBatch for callers who bring memory when they know how much: room is told the lengths of the values of some
// keys, from the given one on, 0 for those that are not held, and puts memory of that capacity into dst for each of the others. It
// may be called more than once, in the order of the keys, and is otherwise as that of GetWith.
func (c *Client) GetBatchWith(ctx context.Context, keys [][]byte, room func(from int, sizes []int, dst [][]byte) error) ([][]byte, error) {
	return c.getBatch(ctx, keys, nil, room)
}

// getBatch is GetBatch, or, if room is not nil, GetBatchWith.
func (c *Client) getBatch(
	ctx context.Context, keys, dst [][]byte, room func(from int, sizes []int, dst [][]byte) error,
) ([][]byte, error) {
	for _, k := range keys {
		if err := c.checkKey(k); err != nil {
			return nil, fail("get batch", k, err)
		}
	}
	for len(dst) < len(keys) {
		dst = append(dst, nil)
	}
	dst = dst[:len(keys)]
	m := c.newLookup()
	defer c.freeLookup(m)
	for from := 0; from < len(keys); from += getBatch {
		to := min(from+getBatch, len(keys))
		var some func(sizes []int) error
		if room != nil {
			some = func(sizes []int) error { return room(from, sizes, dst[from:to]) }
		}
		if err := c.getSome(ctx, m, keys[from:to], dst[from:to], some); err != nil {
			return nil, fail("get batch", nil, err)
		}
	}
	return dst, nil
}

// getSome reads values with one lookup. Those whose lease ended before their turn are read one by one. room, if it is not nil,
// puts memory into dst.
func (c *Client) getSome(ctx context.Context, m *lookupMsg, keys, dst [][]byte, room func(sizes []int) error) error {
	m.forMany(keys, false)
	sentAt, err := c.lookup(ctx, m)
	if err != nil {
		return err
	}
	if room != nil {
		if err := room(lengths(m.rep.Results)); err != nil {
			for i := range m.rep.Results {
				c.giveBack(m.rep.Results[i].Lease)
			}
			return err
		}
	}
	total := uint64(0)
	for i := range m.rep.Results {
		total += m.rep.Results[i].KVLength
	}
	var again []int
	ended := func(i, got int) {
		r := &m.rep.Results[i]
		c.giveBack(r.Lease)
		switch got {
		case good:
			c.counters.hits.Add(1)
			if r.Promote {
				c.promote(keys[i], r, dst[i])
			}
		case late:
			again = append(again, i)
		default:
			c.counters.misses.Add(1)
			dst[i] = nil
		}
	}
	if c.readAll(ctx, keys, m.rep.Results, sentAt, dst, total, ended) && ctx.Err() != nil {
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	for _, i := range again {
		value, err := c.Get(ctx, keys[i], dst[i])
		if err != nil && !isMiss(err) {
			return err
		}
		dst[i] = value
	}
	return nil
}

// lengths are those of the values that a lookup has found, 0 for others.
func lengths(results []protocol.LookupResult) []int {
	sizes := make([]int, len(results))
	for i := range results {
		if results[i].Found {
			sizes[i] = int(results[i].KVLength) //nolint:gosec // bounded by maxValue
		}
	}
	return sizes
}

// readAll reads the results of a lookup into dst, of total bytes in all, and tells ended of each how that went: bad if it
// was not found. What is not mapped here is read in one batch of transfers, while the rest is copied. It reports whether
// there was such a batch.
func (c *Client) readAll(ctx context.Context, keys [][]byte, results []protocol.LookupResult, sentAt int64, dst [][]byte,
	total uint64, ended func(i, got int),
) bool {
	far, at := c.fetchFar(ctx, results, sentAt, dst), 0
	for i := range results {
		r, got := &results[i], bad
		if far.has(i, &at) {
			continue
		}
		if r.Found {
			dst[i], got = c.copyAny(ctx, keys[i], r, sentAt, dst[i], total)
		}
		ended(i, got)
	}
	if far == nil {
		return false
	}
	defer c.freeFetch(far)
	far.wait(ctx)
	for j, p := range far.parts {
		r := &results[p.index]
		got := far.outcome(j, r)
		if got != good && got != late {
			dst[p.index], got = c.copyNext(ctx, keys[p.index], r, sentAt, dst[p.index], total, got)
		}
		ended(p.index, got)
	}
	return true
}

func isMiss(err error) bool { return errors.Is(err, ErrNotFound) }

func (c *Client) checkKey(key []byte) error {
	if c.life.Err() != nil {
		return ErrClosed
	}
	if len(key) == 0 || len(key) > protocol.MaxKeyBytes {
		return fmt.Errorf("%w: a key has 1 to %d bytes", ErrConfig, protocol.MaxKeyBytes)
	}
	return nil
}
