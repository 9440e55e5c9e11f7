package simtest

import (
	"slices"

	"larder/protocol"
)

// Of views.
const (
	maxViews  = 2       // that a client has open at a time
	viewKeys  = 3       // that one has at most
	viewSpan  = 6       // leases' lengths that it is open for, at most
	keepAgain = 10 * ms // until a renewal that did nothing is tried again, as by the client package's keeper
)

// view is entries whose bytes a client reads in place, for longer than a lease lasts. It keeps the rules of the client
// package's Views: the leases are renewed, all with one request, from when half of their time is over, and what was read
// counts only if they had not ended when the view is closed.
type view struct {
	c        *client
	items    []*viewItem
	leaseMS  uint64
	deadline int64 // on the client's clock
	broken   bool
	open     bool
}

type viewItem struct {
	key        string
	op         *operation
	seen       int64 // when the lookup was answered
	token      uint64
	mem        *memory
	generation uint64
	from, n    uint64
	held       *lease
	got        []stamp // what was read, one page at a time
}

// view reads some entries in place. It is counted in views and, while it lasts, in busy.
func (c *client) view(p *proc) {
	c.busy++
	defer func() {
		c.busy--
		c.views--
	}()
	v := c.openView(p)
	if v == nil {
		return
	}
	c.later(v.keep)
	length := int64(v.leaseMS) * ms
	end := c.s.now + c.rng.Int64N(viewSpan*length+1)
	for {
		v.read()
		c.standStill(p, length)
		if c.s.now >= end {
			break
		}
		p.sleep(c.rng.Int64N(length/2 + ms))
	}
	v.close()
}

// openView looks keys up, until it was answered with time left on the leases. The result is nil if none is held.
func (c *client) openView(p *proc) *view {
	keys := make([]string, 1+c.rng.IntN(viewKeys)*c.rng.IntN(2))
	for i := range keys {
		keys[i] = c.anyKey()
	}
	leaseMS := 20 + c.rng.Uint64N(uint64(electionSpan/ms))
	for range 8 {
		ops := make([]*operation, len(keys))
		for i, key := range keys {
			ops[i] = c.s.linear.begin(c, opGet, key, 0)
		}
		results, sentAt, e := c.lookupAll(p, keys, leaseMS)
		c.s.cover.op("view", e)
		if e != nil {
			for _, op := range ops {
				c.s.linear.cancel(op)
			}
			return nil
		}
		v := &view{c: c, open: true}
		v.fill(keys, ops, results, sentAt)
		switch {
		case len(v.items) == 0:
			return nil
		case c.clock.Boottime() < v.deadline:
			return v
		}
		v.discard()
		c.s.cover.Late++
		leaseMS = 2 * max(v.leaseMS, 1)
	}
	return nil
}

// fill takes the results of a lookup. The deadline is that of the lease which ends first.
func (v *view) fill(keys []string, ops []*operation, results []protocol.LookupResult, sentAt int64) {
	c := v.c
	v.deadline = 1 << 62
	for i := range results {
		r := &results[i]
		if !r.Found {
			c.s.linear.end(ops[i], output{})
			continue
		}
		mem := c.mapped(r.Device, r.Generation)
		if mem == nil {
			c.s.linear.cancel(ops[i])
			c.giveLease(r.Lease)
			continue
		}
		v.items = append(v.items, &viewItem{
			key: keys[i], op: ops[i], seen: c.s.now, token: r.Lease, mem: mem, generation: r.Generation,
			from: (r.Offset + r.KVOffset) / pageSize, n: (r.KVLength + pageSize - 1) / pageSize,
		})
		d := int64(r.LeaseMS) * ms
		v.deadline = min(v.deadline, sentAt+d-margin(d))
		v.leaseMS = max(v.leaseMS, r.LeaseMS)
	}
	for _, it := range v.items {
		it.held = c.s.leaseBegins(c, it.mem, it.from, it.n, v.deadline, it.key)
	}
}

// read looks at one page of each entry.
func (v *view) read() {
	for _, it := range v.items {
		it.got = append(it.got, it.mem.pages[it.from+v.c.rng.Uint64N(it.n)])
	}
}

// standStill is a point between two steps of a view, where the process may be stopped for about as long as a lease lasts.
func (c *client) standStill(p *proc, length int64) {
	s := c.s
	if !s.faulty(clientPause) || c.rng.IntN(30) != 0 {
		return
	}
	d := c.rng.Int64N(2*length + 1)
	if !s.fires(clientPause) {
		return
	}
	life := c.life
	life.paused = true
	s.after(d, s.world, life.resume)
	p.sleep(0) // the pause begins here
}

// keep renews the leases in time, until the view is closed.
func (v *view) keep(p *proc) {
	half := int64(v.leaseMS) * ms / 2
	for v.open && !v.broken {
		if left := v.deadline - v.c.clock.Boottime(); left > half {
			p.sleep(left - half)
			continue
		}
		v.renew(p)
		p.sleep(keepAgain)
	}
}

// renew asks for more time. Only an answer that arrives before the deadline counts: it then shows that no lease ended in
// between. One that says no ends nothing either: a new leader does not know the leases, which last to their end.
func (v *view) renew(p *proc) {
	c, s := v.c, v.c.s
	req := protocol.LeasesRequest{LeaseMS: v.leaseMS}
	for _, it := range v.items {
		req.Leases = append(req.Leases, it.token)
	}
	var rep protocol.LeasesReply
	sentAt, _, e := c.roundTrip(p, nil, protocol.TypeRenew, func() []byte { return req.Append(nil) }, 0, c.answerIn,
		func(b []byte) (*protocol.Error, error) {
			rep = protocol.LeasesReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		})
	s.cover.op("renew", e)
	if e != nil {
		return
	}
	if len(rep.Results) != len(req.Leases) {
		s.fail("wire", "a RENEW of %d leases has %d results", len(req.Leases), len(rep.Results))
	}
	late := c.clock.Boottime() >= v.deadline
	switch {
	case slices.Contains(rep.Results, false):
		s.cover.RenewalsRefused++
		v.broken = late
	case late:
		s.cover.RenewalsLate++
		v.broken = true
	case v.open:
		s.cover.Renewals++
		d := int64(v.leaseMS) * ms
		v.deadline = max(v.deadline, sentAt+d-margin(d))
		for _, it := range v.items {
			s.leaseRenewed(it.held, v.deadline)
		}
	}
}

// close ends the view, and takes what was read for good if it may.
func (v *view) close() {
	c, s := v.c, v.c.s
	sound := c.clock.Boottime() < v.deadline && !v.broken
	for _, it := range v.items {
		sound = sound && it.mem.generation == it.generation
	}
	if !sound {
		s.cover.ViewsVoid++
		v.discard()
		return
	}
	s.cover.ViewsGood++
	for _, it := range v.items {
		version := s.accepted(c, it.key, it.got)
		s.linear.endAt(it.op, output{done: true, version: version}, it.seen)
	}
	v.discard()
}

// discard gives up what the view holds. What it has seen counts no more, if it does not already.
func (v *view) discard() {
	v.open = false
	for _, it := range v.items {
		v.c.s.leaseEnds(it.held)
		v.c.giveLease(it.token)
		if !it.op.over {
			v.c.s.linear.cancel(it.op)
		}
	}
}

// giveLease gives a lease back, with the next lookup or by itself.
func (c *client) giveLease(token uint64) {
	if token != 0 && len(c.releases) < 64 {
		c.releases = append(c.releases, token)
	}
}
