package client

import (
	"context"
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
	c        *Client
	items    []viewItem
	deadline atomic.Int64
	broken   atomic.Bool
	renewing atomic.Bool
	leaseMS  uint64
	isOpen   bool
}

type viewItem struct {
	found      bool
	data       []byte
	lease      uint64
	generation uint64
	dev        *device
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

// open looks up what m asks for, until it was answered with time left on the leases.
func (v *Views) open(ctx context.Context, m *lookupMsg) error {
	c := v.c
	for range maxLate {
		v.broken.Store(false)
		sentAt, err := c.lookup(ctx, m)
		if err != nil {
			return err
		}
		v.fill(ctx, m, sentAt)
		if c.cfg.Clock() < v.deadline.Load() {
			v.count()
			v.isOpen = true
			c.viewMu.Lock()
			c.views[v] = struct{}{}
			c.viewMu.Unlock()
			return nil
		}
		v.discard()
		c.counters.late.Add(1)
		m.req.LeaseMS = 2 * max(v.leaseMS, 1)
	}
	return ErrLease
}

// fill takes the results of a lookup. The deadline is that of the lease which ends first.
func (v *Views) fill(ctx context.Context, m *lookupMsg, sentAt int64) {
	c := v.c
	end := sentAt + millis(1<<63) // nothing found: nothing ends
	v.items, v.leaseMS = v.items[:0], 0
	for i := range m.rep.Results {
		r := &m.rep.Results[i]
		var it viewItem
		if r.Found {
			it = v.item(ctx, r)
		}
		if !it.found && m.req.StopAtMiss {
			for ; i < len(m.rep.Results); i++ {
				c.giveBack(m.rep.Results[i].Lease)
			}
			break
		}
		if it.found {
			end = min(end, leaseEnd(r, sentAt))
			v.leaseMS = max(v.leaseMS, r.LeaseMS)
		} else {
			c.giveBack(r.Lease)
		}
		v.items = append(v.items, it)
	}
	v.deadline.Store(end)
}

// item makes the bytes of a location ready to be read; they are a miss if they are not what was stored.
func (v *Views) item(ctx context.Context, r *protocol.LookupResult) viewItem {
	c := v.c
	dev, data := c.resolve(ctx, &r.Location)
	if dev == nil {
		return viewItem{}
	}
	err := dev.read.Refresh(data)
	sound := true
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
	default:
		return viewItem{found: true, data: data, lease: r.Lease, generation: r.Generation, dev: dev}
	}
	dev.drop()
	return viewItem{}
}

// count enters what was found in the counters.
func (v *Views) count() {
	n := &v.c.counters
	for i := range v.items {
		if v.items[i].found {
			n.hits.Add(1)
			n.bytesRead.Add(uint64(len(v.items[i].data)))
		} else {
			n.misses.Add(1)
		}
	}
}

// discard gives up what v holds.
func (v *Views) discard() {
	c := v.c
	c.viewMu.Lock()
	delete(c.views, v)
	c.viewMu.Unlock()
	for i := range v.items {
		if it := &v.items[i]; it.dev != nil {
			c.giveBack(it.lease)
			it.dev.drop()
			v.items[i] = viewItem{}
		}
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
	sound := v.c.cfg.Clock() < v.deadline.Load() && !v.broken.Load()
	for i := range v.items {
		it := &v.items[i]
		sound = sound && (!it.found || it.dev.generation() == it.generation)
	}
	v.discard()
	if !sound {
		v.c.counters.late.Add(1)
		return fail("close view", nil, ErrLease)
	}
	return nil
}

// Guard runs f, which reads the views' bytes, and returns an error instead of crashing if the memory behind them is
// gone because the device's file was truncated.
func (v *Views) Guard(f func()) error { return cxl.Guard(f) } //nolint:wrapcheck // says what to do

// Guard runs f, which reads the view's bytes, as Views.Guard does.
func (v *View) Guard(f func()) error { return v.set.Guard(f) }

// renewViews asks for more time for the views of which half the lease is over.
func (c *Client) renewViews(now int64) {
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	for v := range c.views {
		if v.deadline.Load()-now > millis(v.leaseMS)/2 || v.broken.Load() || v.renewing.Swap(true) {
			continue
		}
		m := new(leasesMsg)
		m.req.LeaseMS = v.leaseMS
		for i := range v.items {
			if v.items[i].found {
				m.req.Leases = append(m.req.Leases, v.items[i].lease)
			}
		}
		if len(m.req.Leases) == 0 || !c.spawn(func() { c.renew(v, m) }) {
			v.renewing.Store(false)
		}
	}
}

// renew extends one view. Only an answer that arrives before the deadline counts: it then shows that the lease never
// ended in between.
func (c *Client) renew(v *Views, m *leasesMsg) {
	ctx, cancel := context.WithTimeout(c.life, c.cfg.CallTimeout)
	defer cancel()
	sentAt, _, err := c.roundTrip(ctx, nil, protocol.TypeRenew, m, 0)
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	defer v.renewing.Store(false)
	if _, open := c.views[v]; !open || err != nil {
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
