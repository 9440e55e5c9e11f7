package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"larder/protocol"
	"larder/transfer"
)

// accessWait is how long the leader may take to have a node register a region: a grant goes to the node and back. A node
// that needs longer is as good as gone.
const accessWait = 3 * time.Second

// maxPages bounds the pages of a region that is not mapped, so that a master's mistake costs no more than 256 MiB of books:
// no server gives out as many.
const maxPages = 1 << 24

// errNoAccess says that a region was given that this client cannot write to.
var errNoAccess = errors.New("no way to write to the region")

// access is the right to write to a region by transfer.
type access struct {
	carrier *carrier
	seg     *segment
	buffer  transfer.Handle
	base    uint64 // where the region begins in the buffer
}

func (a *access) drop() { a.carrier.drop(a.seg) }

type accessMsg struct {
	req protocol.AccessRequest
	rep protocol.AccessReply
}

func (m *accessMsg) appendTo(b []byte) []byte                  { return m.req.Append(b) }
func (m *accessMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }

// askAccess asks for the right to write to a region of a device that is not mapped here.
func (c *Client) askAccess(ctx context.Context, s *session, id, epoch, offset uint64) (*access, error) {
	ctx, cancel := context.WithTimeout(ctx, accessWait+c.cfg.CallTimeout)
	defer cancel()
	m := &accessMsg{req: protocol.AccessRequest{RegionID: id, Epoch: epoch}}
	if _, _, err := c.roundTrip(ctx, s, protocol.TypeAccess, m, accessWait.Nanoseconds()); err != nil {
		return nil, fmt.Errorf("%w %d: %w", errNoAccess, id, err)
	}
	e := &m.rep.Endpoint
	if e.Engine == "" || e.Offset > offset {
		return nil, fmt.Errorf("%w %d: its node names no buffer for it", errNoAccess, id)
	}
	seg, err := c.devices.carrier.open(e)
	if err != nil {
		return nil, fmt.Errorf("%w %d: %w", errNoAccess, id, err)
	}
	return &access{carrier: c.devices.carrier, seg: seg, buffer: handleOf(e), base: offset - e.Offset}, nil
}

// openRegion makes a region that was given writable. The region holds the device from then on.
func (c *Client) openRegion(s *session, given *protocol.Region, dev *device) (*region, error) {
	if dev.far == nil {
		return newRegion(given, c.cfg.PageSize, dev, c.cfg.Prefault)
	}
	if err := checkRegion(given, c.cfg.PageSize); err != nil {
		return nil, err
	}
	if size := dev.far.size; given.Offset > size || given.Length > size-given.Offset || given.Length/given.PageSize > maxPages {
		return nil, fmt.Errorf("%w: the master gave region %d of %d bytes at %d, of a device of %d",
			ErrConfig, given.RegionID, given.Length, given.Offset, size)
	}
	a, err := c.askAccess(c.life, s, given.RegionID, given.Epoch, given.Offset)
	if err != nil {
		c.failed(dev, err)
		return nil, err
	}
	r := emptyRegion(given, dev)
	r.far, r.offset, r.access = true, given.Offset, a
	return r, nil
}

// sending is the writes of one store to regions that are not mapped: one batch of transfers. It is reused.
type sending struct {
	runs  []run // the region of each is counted as being written until settle
	reqs  []transfer.Request
	bytes uint64
	flight

	stopped bool   // a region that it writes to was given up; under pool.mu
	stop    func() // ends the wait for it; nil if it has not begun; under pool.mu
}

// add plans to write a value into a run. It reports false if the region was given up.
func (o *sending) add(p *pool, t run, value []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := t.r
	if r.lost != nil || r.access == nil {
		return false
	}
	r.copies++
	p.sends[o] = struct{}{}
	o.runs = append(o.runs, t)
	o.reqs = append(o.reqs, transfer.Request{
		Op: transfer.Write, Segment: r.access.seg.Segment, Buffer: r.access.buffer, Offset: r.access.base + t.offset(), Local: value,
	})
	o.bytes += uint64(len(value))
	return true
}

// run carries the writes out, until ctx is over or a region of theirs is given up. When it returns all have ended: none reads
// the callers' memory any more.
func (o *sending) run(ctx context.Context, c *Client) {
	if len(o.reqs) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := c.pool
	p.mu.Lock()
	if o.stop = cancel; o.stopped {
		cancel()
	}
	p.mu.Unlock()
	o.flight = c.submit(ctx, o.reqs, o.bytes)
	o.wait(ctx)
	p.mu.Lock()
	delete(p.sends, o)
	o.stop, o.stopped = nil, false
	p.mu.Unlock()
}

// halt ends the writes to a region that was given up, and those beside them, which are tried again.
func (p *pool) halt(r *region) {
	for o := range p.sends {
		if !slices.ContainsFunc(o.runs, func(t run) bool { return t.r == r }) {
			continue
		}
		if o.stopped = true; o.stop != nil {
			o.stop()
		}
	}
}

// fates of a write.
const (
	written = iota
	failed  // nothing of it lands any more
	loose   // some of it may still land: the pages are out of use until it cannot, and not the store's any more
)

// fate ends the j-th write.
func (o *sending) fate(c *Client, j int) int {
	t := o.runs[j]
	state, err := o.status(j)
	if state == transfer.Unsettled {
		c.loosen(t, o.batch)
	}
	c.pool.endCopy(t.r)
	if state == transfer.Done {
		t.r.dev.worked()
		c.counters.bytesWritten.Add(uint64(len(o.reqs[j].Local)))
		return written
	}
	switch {
	case !errors.Is(err, transfer.ErrCanceled):
		c.sendFailed(t.r, err)
	case o.slow():
		t.r.dev.failed(c.cfg.Clock(), err)
	}
	if state == transfer.Unsettled {
		return loose
	}
	return failed
}

// reset forgets what has been sent. What a batch may still look at is not used again.
func (o *sending) reset() {
	if o.batch != nil {
		select {
		case <-o.batch.Settled():
		default:
			o.reqs = nil
		}
	}
	clear(o.runs)
	clear(o.reqs)
	o.runs, o.reqs, o.bytes, o.flight = o.runs[:0], o.reqs[:0], 0, flight{}
}

// loosen takes pages out of use to which a transfer may still write, until it cannot.
func (c *Client) loosen(t run, batches ...*transfer.Batch) {
	p := c.pool
	p.mu.Lock()
	t.r.loose++
	p.mu.Unlock()
	c.spawn(func() {
		for _, b := range batches {
			select {
			case <-b.Settled():
			case <-c.life.Done(): // nobody uses them any more
				return
			}
		}
		p.settled(t)
	})
}

// settled puts pages back into use to which nothing is written any more.
func (p *pool) settled(t run) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(t)
	r := t.r
	if r.loose--; r.loose == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
		p.harmless(r)
	}
}

// sendFailed acts on a write to a region that failed. A node that was started again has the bytes, but another buffer;
// otherwise there is no way there now, and the region is given back: its entries stay, and stores go elsewhere.
func (c *Client) sendFailed(r *region, err error) {
	c.counters.remoteFaults.Add(1)
	if errors.Is(err, transfer.ErrStale) {
		c.regain(r)
		return
	}
	c.failed(r.dev, err)
	c.abandon(r, err)
}

// regain asks for the right to write to a region anew, in the background and once at a time. Stores that take its pages
// meanwhile fail and begin again.
func (c *Client) regain(r *region) {
	p, s := c.pool, c.sess.Load()
	p.mu.Lock()
	busy := r.regaining || r.lost != nil
	r.regaining = true
	p.mu.Unlock()
	if busy {
		return
	}
	c.spawn(func() {
		a, err := c.askAccess(c.life, s, r.id, r.epoch, r.offset)
		p.mu.Lock()
		r.regaining = false
		old := r.access
		if err == nil && r.lost == nil {
			r.access = a
		} else {
			old = a
		}
		p.mu.Unlock()
		if old != nil {
			old.drop()
		}
		if err != nil {
			c.abandon(r, err)
		}
	})
}

// abandon gives a region back to the pool that this client cannot write to.
func (c *Client) abandon(r *region, why error) {
	s := c.sess.Load()
	c.pool.mu.Lock()
	known := c.pool.regions[r.id] == r
	c.pool.forget(r, ErrRevoked)
	c.pool.mu.Unlock()
	if !known {
		return
	}
	c.cfg.Logger.Warn("cannot write to a region", slog.Uint64("region_id", r.id), slog.Any("error", why))
	c.spawn(func() {
		if c.surrender(r) {
			c.returnRegion(s, protocol.Region{Handle: protocol.Handle{RegionID: r.id}, Epoch: r.epoch})
			c.announce(r)
		}
	})
}

// avoided are the places where no region is wanted: those of Config.Avoid, and devices to which transfers have failed
// lately.
func (c *Client) avoided() []string {
	list := append([]string(nil), c.cfg.Avoid...)
	now := c.cfg.Clock()
	for id, dev := range *c.devices.table.Load() {
		if dev.avoid.Load() > now && len(list) < protocol.MaxPlaces {
			list = append(list, "#"+strconv.FormatUint(id, 10))
		}
	}
	return list
}
