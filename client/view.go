package client

import (
	"context"
	"math"
	"sync/atomic"

	"larder/cxl"
	"larder/protocol"
)

// View is the bytes of one entry, in place. They are under a lease, which is renewed until Close, and they count only
// if Close returns nil. It is for one goroutine; the bytes may be read by many.
type View struct{ set Views }

// View looks key up and returns its bytes without copying them. The error is ErrNotFound as with Get.
func (c *Client) View(ctx context.Context, key []byte) (*View, error) {
	if err := c.checkKey(key); err != nil {
		return nil, fail("view", key, err)
	}
	m := c.newLookup()
	defer c.freeLookup(m)
	m.forOne(key)
	v := &View{set: Views{c: c}}
	if err := v.set.open(ctx, m); err != nil {
		return nil, fail("view", key, err)
	}
	if !v.set.items[0].found {
		v.set.discard()
		return nil, fail("view", key, ErrNotFound)
	}
	return v, nil
}

// Bytes are the entry's bytes. They must not be written to, and not be touched after Close.
func (v *View) Bytes() []byte { return v.set.items[0].data }

// Close ends the view. Its error is ErrLease, or one that matches it, if what was read may be wrong.
func (v *View) Close() error { return v.set.Close() }

// Views are the bytes of several entries, in place, as those of View. It can be used again for another ViewBatch.
type Views struct {
	hold
	c      *Client
	items  []viewItem
	copies [][]byte // private memory, for entries that are not mapped here
	isOpen bool
}

type viewItem struct {
	found      bool
	data       []byte
	lease      uint64
	generation uint64
	dev        *device // nil if data is a copy
	region     uint64  // where it lies first
	offset     uint64
}

// hold is leases that the keeper renews from Client.keep to Client.letGo.
type hold struct {
	leases   []uint64
	leaseMS  uint64       // the longest of them
	deadline atomic.Int64 // of the lease that ends first; the holder stops before
	broken   atomic.Bool  // one has ended
	renewing atomic.Bool
	turn     uint64 // tells one use from the next: an answer to a renewal may come that late; under Client.viewMu
}

// begin makes h a hold on nothing, which never ends.
func (h *hold) begin() {
	h.leases, h.leaseMS = h.leases[:0], 0
	h.broken.Store(false)
	h.deadline.Store(math.MaxInt64)
}

// add takes a lease that was asked for at sentAt.
func (h *hold) add(r *protocol.LookupResult, sentAt int64) {
	h.leases = append(h.leases, r.Lease)
	h.leaseMS = max(h.leaseMS, r.LeaseMS)
	h.deadline.Store(min(h.deadline.Load(), leaseEnd(r, sentAt)))
}

// over reports whether a lease may have ended by now.
func (h *hold) over(now int64) bool { return now >= h.deadline.Load() || h.broken.Load() }

// keep has the leases of h renewed. h must not change until letGo.
func (c *Client) keep(h *hold) {
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	h.turn++
	h.renewing.Store(false)
	c.holds[h] = struct{}{}
}

// letGo ends that.
func (c *Client) letGo(h *hold) {
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	delete(c.holds, h)
}

// ViewBatch looks keys up with one exchange and returns their bytes without copying them. With stopAtMiss the walk
// ends at the first key that is not found, as prefix blocks want, and Len says how far it came. At most
// protocol.MaxBatch keys.
func (c *Client) ViewBatch(ctx context.Context, keys [][]byte, stopAtMiss bool) (*Views, error) {
	v := new(Views)
	if err := c.ViewInto(ctx, v, keys, stopAtMiss); err != nil {
		return nil, err
	}
	return v, nil
}

// ViewInto is ViewBatch into Views that were closed, or never used, whose memory is used again.
func (c *Client) ViewInto(ctx context.Context, v *Views, keys [][]byte, stopAtMiss bool) error {
	for _, k := range keys {
		if err := c.checkKey(k); err != nil {
			return fail("view batch", k, err)
		}
	}
	v.c, v.items, v.isOpen = c, v.items[:0], false
	if len(keys) == 0 {
		return nil
	}
	m := c.newLookup()
	defer c.freeLookup(m)
	m.forMany(keys, stopAtMiss)
	return fail("view batch", nil, v.open(ctx, m))
}

// Len is the number of entries that Bytes takes: all keys, or with stopAtMiss those up to the first miss.
func (v *Views) Len() int { return len(v.items) }

// Bytes are the bytes of entry i, nil if it was not found.
func (v *Views) Bytes(i int) []byte { return v.items[i].data }

// Region returns where entry i lies: a region's number, and the offset there in bytes.
func (v *Views) Region(i int) (id, offset uint64) { return v.items[i].region, v.items[i].offset }

// open looks up what m asks for, until it was answered with time left on the leases.
func (v *Views) open(ctx context.Context, m *lookupMsg) error {
	c := v.c
	for range maxLate {
		sentAt, err := c.lookup(ctx, m)
		if err != nil {
			return err
		}
		v.fill(ctx, m, sentAt)
		if err := ctx.Err(); err != nil {
			v.discard()
			return err //nolint:wrapcheck // callers wrap
		}
		if c.cfg.Clock() < v.deadline.Load() {
			v.count()
			v.isOpen = true
			c.keep(&v.hold)
			return nil
		}
		v.discard()
		c.counters.late.Add(1)
		m.req.LeaseMS = 2 * max(v.leaseMS, 1)
	}
	return ErrLease
}

// fill takes the results of a lookup. Those that are not mapped here are copied, and need their leases no more.
func (v *Views) fill(ctx context.Context, m *lookupMsg, sentAt int64) {
	c := v.c
	v.begin()
	v.items = v.items[:0]
	for len(v.copies) < len(m.rep.Results) {
		v.copies = append(v.copies, nil)
	}
	far, at := c.fetchFar(ctx, m.rep.Results, sentAt, v.copies), 0
	if far != nil {
		defer c.freeFetch(far)
		far.wait(ctx)
	}
	for i := range m.rep.Results {
		r := &m.rep.Results[i]
		var it viewItem
		switch {
		case far.has(i, &at):
			it = v.copied(ctx, i, m.req.Keys[i], r, sentAt, far.outcome(at-1, r))
		case r.Found:
			it = v.item(ctx, i, m.req.Keys[i], r, sentAt)
		}
		if !it.found && m.req.StopAtMiss {
			for ; i < len(m.rep.Results); i++ {
				c.giveBack(m.rep.Results[i].Lease)
			}
			break
		}
		if it.dev != nil {
			v.add(r, sentAt)
		} else {
			c.giveBack(r.Lease)
		}
		it.region, it.offset = r.RegionID, r.KVOffset
		v.items = append(v.items, it)
	}
}

// copied is the item of an entry that is not mapped, of which a copy was made, or is made now from another location.
func (v *Views) copied(ctx context.Context, i int, key []byte, r *protocol.LookupResult, sentAt int64, got int) viewItem {
	if got != good && got != late {
		v.copies[i], got = v.c.copyNext(ctx, key, r, sentAt, v.copies[i], r.KVLength, got)
	}
	if got == late {
		v.leaseMS = max(v.leaseMS, r.LeaseMS)
		v.deadline.Store(0) // open looks it up again, for longer
	}
	if got != good {
		return viewItem{}
	}
	if r.Promote {
		v.c.promote(key, r, v.copies[i])
	}
	return viewItem{found: true, data: v.copies[i]}
}

// item makes the bytes of a location ready to be read; they are a miss if they are not what was stored, there and
// elsewhere.
func (v *Views) item(ctx context.Context, i int, key []byte, r *protocol.LookupResult, sentAt int64) viewItem {
	c := v.c
	dev, data := c.resolve(ctx, &r.Location)
	if dev == nil {
		return v.copied(ctx, i, key, r, sentAt, bad)
	}
	if dev.far != nil {
		var got int
		v.copies[i], got = c.copyFar(ctx, dev, r, sentAt, v.copies[i])
		return v.copied(ctx, i, key, r, sentAt, got)
	}
	err := dev.read.Refresh(data)
	sound, got := true, bad
	if err == nil && c.cfg.Checksums && r.Checksum != 0 {
		err = cxl.Guard(func() { sound = checksum(data) == r.Checksum })
	}
	switch {
	case err != nil:
		c.counters.truncated.Add(1)
	case dev.generation() != r.Generation:
		c.counters.generationMisses.Add(1)
	case !sound:
		c.counters.checksumFaults.Add(1)
		if c.cfg.Clock() < leaseEnd(r, sentAt) {
			got = damaged
		}
	default:
		return viewItem{found: true, data: data, lease: r.Lease, generation: r.Generation, dev: dev}
	}
	dev.drop()
	return v.copied(ctx, i, key, r, sentAt, got)
}

// count enters what was found in the counters.
func (v *Views) count() {
	n := &v.c.counters
	for i := range v.items {
		if v.items[i].found {
			n.hits.Add(1)
			if v.items[i].dev != nil { // copies are counted when they are made
				n.bytesRead.Add(uint64(len(v.items[i].data)))
				n.readFrom(v.items[i].dev)
			}
		} else {
			n.misses.Add(1)
		}
	}
}

// discard gives up what v holds.
func (v *Views) discard() {
	c := v.c
	c.letGo(&v.hold)
	for i := range v.items {
		if it := &v.items[i]; it.dev != nil {
			c.giveBack(it.lease)
			it.dev.drop()
		}
		v.items[i] = viewItem{}
	}
	v.isOpen = false
}

// Close ends the views and gives their leases back. If it returns nil, all bytes read before were right. Otherwise the
// error matches ErrLease: a lease had ended, or a device had lost its bytes, while they were being read. The second
// Close of the same views returns nil.
func (v *Views) Close() error {
	if !v.isOpen {
		return nil
	}
	sound := v.sound()
	v.discard()
	if !sound {
		v.c.counters.late.Add(1)
		return fail("close view", nil, ErrLease)
	}
	return nil
}

// Err returns nil if all bytes read so far were right, and otherwise what Close is going to return.
func (v *Views) Err() error {
	if v.isOpen && !v.sound() {
		return fail("view", nil, ErrLease)
	}
	return nil
}

// sound reports whether no lease has ended, and no device has lost its bytes.
func (v *Views) sound() bool {
	if v.over(v.c.cfg.Clock()) {
		return false
	}
	for i := range v.items {
		if it := &v.items[i]; it.dev != nil && it.dev.generation() != it.generation {
			return false
		}
	}
	return true
}

// Guard runs f, which reads the views' bytes, and returns an error instead of crashing if the memory behind them is
// gone because the device's file was truncated.
func (v *Views) Guard(f func()) error { return cxl.Guard(f) } //nolint:wrapcheck // says what to do

// Guard runs f, which reads the view's bytes, as Views.Guard does.
func (v *View) Guard(f func()) error { return v.set.Guard(f) }

// renewHolds asks for more time for the holds of which half the lease is over.
func (c *Client) renewHolds(now int64) {
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	for h := range c.holds {
		if h.deadline.Load()-now > millis(h.leaseMS)/2 || h.broken.Load() || h.renewing.Swap(true) {
			continue
		}
		m, turn := new(leasesMsg), h.turn
		m.req.LeaseMS = h.leaseMS
		m.req.Leases = append(m.req.Leases, h.leases...)
		if len(m.req.Leases) == 0 || !c.spawn(func() { c.renew(h, turn, m) }) {
			h.renewing.Store(false)
		}
	}
}

// renew extends one hold. Only an answer that arrives before the deadline counts: it then shows that the lease never
// ended in between.
func (c *Client) renew(v *hold, turn uint64, m *leasesMsg) {
	ctx, cancel := context.WithTimeout(c.life, c.cfg.CallTimeout)
	defer cancel()
	sentAt, _, err := c.roundTrip(ctx, nil, protocol.TypeRenew, m, 0)
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	if _, open := c.holds[v]; !open || v.turn != turn {
		return
	}
	defer v.renewing.Store(false)
	if err != nil {
		return
	}
	for _, held := range m.rep.Results {
		if !held {
			v.broken.Store(c.cfg.Clock() >= v.deadline.Load())
			return // a new leader does not know the lease, which lasts to its end all the same
		}
	}
	d := millis(v.leaseMS)
	if c.cfg.Clock() >= v.deadline.Load() {
		v.broken.Store(true)
		return
	}
	v.deadline.Store(max(v.deadline.Load(), sentAt+d-margin(d)))
}
