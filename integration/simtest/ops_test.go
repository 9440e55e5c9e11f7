package simtest

import (
	"larder/protocol"
)

// worker does one operation after the other.
func (c *client) worker(p *proc) {
	s := c.s
	for {
		c.rest(p)
		if s.quiet {
			return // no more is begun in the end
		}
		p.wait(func() bool { return c.sess != nil })
		if now := c.clock.Boottime(); now < c.silentTo {
			p.sleep(c.silentTo - now)
			continue
		}
		key := c.anyKey()
		c.busy++
		if len(s.mix.nodes) > 0 && c.rng.IntN(20) == 0 {
			c.copyTo(p)
		}
		if s.mix.names && c.rng.IntN(4) == 0 {
			c.nameOp(p)
		}
		put, remove := c.shares()
		switch n := c.rng.IntN(100); {
		case n < put:
			c.put(p, key)
		case n < put+remove:
			c.remove(p, key)
		case n < 88 && c.rng.IntN(100) < c.s.mix.views && c.views < maxViews:
			c.views++
			c.later(c.view)
		case n < 88:
			c.get(p, key)
		case n < 93:
			c.exists(p, key)
		case n < 97:
			c.pin(p, key)
		case n == 97 && c.rng.IntN(4) == 0:
			c.clear(p)
		case n == 98 && c.rng.IntN(3) == 0:
			if len(c.pool.list) > 0 {
				c.giveBack(p, c.pool.list[c.rng.IntN(len(c.pool.list))])
			}
		case n == 99 && c.rng.IntN(6) == 0:
			c.goodbye(p)
		}
		c.busy--
	}
}

// restStep is how soon a worker that does nothing sees that there is more to do.
const restStep = 500 * ms

// rest does nothing for a while.
func (c *client) rest(p *proc) {
	left := int64(c.rng.ExpFloat64() * float64(c.s.mix.think))
	for ; left > 0 && !c.s.busy(); left -= restStep {
		p.sleep(min(left, restStep))
	}
	if c.s.busy() {
		p.sleep(int64(c.rng.ExpFloat64() * float64(busyThink)))
	}
}

// busyThink is the mean pause of a worker while there is much to do.
const busyThink = 100 * ms

// busy says that clients do much with few keys.
func (s *sim) busy() bool { return s.now < s.busyTo }

// shares are how many of 100 operations store and delete.
func (c *client) shares() (put, remove int) {
	switch s := c.s; {
	case !s.busy():
		return s.mix.putShare, s.mix.deleteShare
	case c.reads:
		return 0, 0
	default:
		return 40, 40
	}
}

// anyKey draws a key: some are used more than others.
func (c *client) anyKey() string {
	n := len(c.s.keys)
	switch {
	case (c.s.mix.hot || c.s.busy()) && c.rng.IntN(3) > 0:
		n = 3
	case c.rng.IntN(3) == 0:
		n = 5
	}
	return c.s.keys[c.rng.IntN(n)]
}

// eager stores something soon after pages came free, as a busy client does.
func (c *client) eager() {
	if c.s.quiet || !c.s.mix.hot && c.rng.IntN(3) != 0 {
		return
	}
	c.later(func(p *proc) {
		c.busy++
		c.put(p, c.anyKey())
		c.busy--
	})
}

// put stores a value of one to three pages.
func (c *client) put(p *proc, key string) {
	s := c.s
	n := 1 + c.rng.IntN(3)*c.rng.IntN(2)
	s.versions++
	v := stamp{key: key, version: s.versions, writer: c.pid}
	op := s.linear.begin(c, opPut, key, v.version)
	for round := 0; ; round++ {
		if round > 0 {
			p.sleep(c.backoff(round))
		}
		ss := c.sess
		t, found, e := c.acquire(p, ss, key, n)
		if e != nil {
			if e.Code == codeExpired && round < 20 {
				continue
			}
			s.linear.cancel(op) // nothing of it was ever registered
			s.cover.op("put", e)
			return
		}
		stored, again, e := c.store(p, ss, t, op, v, n, found)
		if again && round < 20 {
			continue
		}
		s.cover.op("put", e)
		switch {
		case e != nil && answeredNo(e) || again:
			s.linear.cancel(op)
		case e != nil:
			s.linear.unknown(op)
		default:
			s.linear.end(op, output{done: stored, version: v.version})
		}
		return
	}
}

// writable waits until stores of a session may go on.
func (c *client) writable(p *proc, ss *csession) bool {
	for !ss.ended && !ss.alive(c.clock.Boottime()) {
		c.s.cover.Suspended++
		p.sleep(20 * ms)
	}
	return !ss.ended
}

// store writes a value into its pages and registers it. again says that it was not, for a reason that passes.
func (c *client) store(p *proc, ss *csession, t run, op *operation, v stamp, n int, found bool) (
	stored, again bool, e *protocol.Error,
) {
	key := v.key
	entry := protocol.RegisterEntry{Key: []byte(key), Touch: found}
	if !c.writable(p, ss) {
		c.pool.release(t)
		return false, true, nil
	}
	if !found {
		if !c.write(p, t, v) {
			return false, true, nil
		}
		if len(c.s.mix.nodes) > 0 {
			entry.Checksum, entry.Replicas = v.sum(), c.rng.Uint64N(4)
		}
		entry.RegionID, entry.Epoch, entry.KVOffset = t.r.id, t.r.epoch, uint64(t.page)*pageSize
		entry.KVLength = uint64(n-1)*pageSize + 1 + c.rng.Uint64N(pageSize)
		t.r.key[t.page] = key
		t.r.note(t.page, t.n)
	}
	if !c.writable(p, ss) {
		c.pool.release(t)
		return false, true, nil
	}
	req := &protocol.RegisterRequest{Entries: []protocol.RegisterEntry{entry}}
	var rep protocol.RegisterReply
	read := func(b []byte) (*protocol.Error, error) {
		err := rep.DecodeAs(b, protocol.TypeBatchRegister)
		return &rep.Error, err
	}
	m := &mutation{
		typ: protocol.TypeBatchRegister, mut: &req.Mutation, what: []string{key}, op: op, read: read,
		body:   func() []byte { return req.AppendAs(nil, protocol.TypeBatchRegister) },
		orphan: func(b []byte, canceled bool) { c.lateStore(t, b, canceled) },
	}
	e = c.mutate(p, ss, m)
	if m.left {
		return false, false, e
	}
	if e != nil {
		c.pool.release(t)
		return false, false, e
	}
	return c.outcome(t, &rep.Results[0])
}

// outcome acts on the answer to a REGISTER.
func (c *client) outcome(t run, r *protocol.RegisterResult) (stored, again bool, e *protocol.Error) {
	switch r.Code {
	case protocol.CodeOK, protocol.CodeDuplicate:
		if r.IsNew {
			c.pool.use(t)
			return true, false, nil
		}
		c.pool.release(t)
		return false, false, nil
	case protocol.CodeStaleEpoch, protocol.CodeStaleGeneration, protocol.CodeRevoking, protocol.CodeNotOwner:
		if t.n > 0 {
			c.disown(t.r)
		}
		return false, true, nil
	case protocol.CodeOverlap:
		c.pool.doubtful = true
		return false, true, nil // something unknown lies there: the pages stay taken until a reconnect tells
	case protocol.CodeNotFound:
		return false, true, nil
	default:
		c.pool.release(t)
		return false, false, &protocol.Error{Code: r.Code}
	}
}

// lateStore hears of a REGISTER that was given up.
func (c *client) lateStore(t run, body []byte, canceled bool) {
	var rep protocol.RegisterReply
	known := body != nil && rep.DecodeAs(body, protocol.TypeBatchRegister) == nil && len(rep.Results) == 1
	switch {
	case t.n == 0:
	case canceled, known && !rep.Results[0].IsNew && rep.Results[0].Code != protocol.CodeOverlap:
		c.pool.release(t)
	case known && rep.Results[0].IsNew:
		c.pool.use(t)
	}
}

// disown gives up a region in which a store was refused.
func (c *client) disown(r *cregion) {
	if r.lost {
		return
	}
	c.pool.forget(r)
	c.later(func(p *proc) { c.pool.giveUp(p, r) })
}

// write copies a value into its pages, one after the other.
func (c *client) write(p *proc, t run, v stamp) bool {
	if !c.access(p, t.r) {
		c.disown(t.r)
		c.later(func(p *proc) { c.returnRegion(p, c.sess, t.r.id, t.r.epoch) })
		return false
	}
	if !c.pool.beginCopy(t.r) {
		return false
	}
	defer c.pool.endCopy(t.r)
	for i := range t.n {
		if t.r.hold == nil { // its home lets nothing land there any more
			return false
		}
		c.s.write(c, t.r, t.page+i, v)
		c.dally(p)
	}
	return true
}

// dally takes the time that copying a page takes: seldom very long.
func (c *client) dally(p *proc) {
	d := c.rng.Int64N(ms / 2)
	if c.rng.IntN(50) == 0 {
		d = c.rng.Int64N(300 * ms)
	}
	p.sleep(d)
}

// acquire gets pages: free ones, or what a master gives. found says that the key is held already.
func (c *client) acquire(p *proc, ss *csession, key string, n int) (t run, found bool, e *protocol.Error) {
	for stuck := 0; ; stuck++ {
		if ss.ended {
			return run{}, false, &protocol.Error{Code: codeExpired}
		}
		c.pool.wake()
		t, ok := c.pool.take(n)
		if ok {
			return t, false, nil
		}
		if c.allocating {
			if !p.waitFor(func() bool { return !c.allocating }, 5*sec) {
				continue
			}
			continue
		}
		if stuck > 5 {
			return run{}, false, &protocol.Error{Code: protocol.CodeNoSpace}
		}
		found, e := c.alloc(p, ss, key, n, stuck%3 == 2)
		if found || e != nil && (e.Code == codeExpired || e.Code == codeQuit) {
			return run{}, found, e
		}
		if e != nil || stuck > 0 {
			p.sleep(c.backoff(stuck+3) + 5*ms)
		}
	}
}

// alloc makes one REQUEST_ALLOC.
func (c *client) alloc(p *proc, ss *csession, key string, n int, whole bool) (found bool, e *protocol.Error) {
	c.allocating = true
	defer func() {
		c.allocating = false
		c.wakeAll()
	}()
	req := &protocol.AllocRequest{
		InstanceID: c.instance, PageSize: pageSize, Size: 8 * pageSize, RunPages: uint64(n), Evict: true,
		Whole: whole && n > 1, FreePages: uint64(c.pool.free(n)), TimeoutMS: 500 + c.rng.Uint64N(2000),
	}
	switch {
	case c.node != nil:
		req.Device = c.node.id
	case len(c.s.mix.nodes) > 0 && c.rng.IntN(6) == 0:
		req.Tier = []string{tierDRAM, tierSSD}[c.rng.IntN(2)]
	}
	if c.rng.IntN(2) == 0 && !req.Whole && c.node == nil {
		req.Keys = [][]byte{[]byte(key)}
	} else {
		req.NeedPages = uint64(n)
	}
	rep, e := c.request(p, ss, req)
	return e == nil && len(rep.Found) == 1 && rep.Found[0], e
}

// request sends a REQUEST_ALLOC and enters into the books what it brings.
func (c *client) request(p *proc, ss *csession, req *protocol.AllocRequest) (rep protocol.AllocReply, e *protocol.Error) {
	c.pool.asking++
	told := func() {
		if c.pool.asking--; c.pool.asking == 0 {
			clear(c.pool.gone)
		}
	}
	m := &mutation{
		typ: protocol.TypeRequestAlloc, mut: &req.Mutation, wait: 3 * sec,
		body: func() []byte { return req.Append(nil) },
		read: func(b []byte) (*protocol.Error, error) {
			rep = protocol.AllocReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		},
		orphan: func(b []byte, _ bool) {
			var late protocol.AllocReply
			if b != nil && late.Decode(b) == nil && late.Code == 0 {
				c.later(func(p *proc) {
					c.takeIn(p, ss, &late)
					told()
				})
				return
			}
			told()
		},
	}
	e = c.mutate(p, ss, m)
	c.s.cover.op("alloc", e)
	if m.left {
		return rep, e
	}
	defer told()
	if e != nil {
		return rep, e
	}
	c.s.cover.Phases[min(rep.Phase, 3)]++
	c.takeIn(p, ss, &rep)
	return rep, nil
}

// takeIn enters what a REQUEST_ALLOC brought into the books.
func (c *client) takeIn(p *proc, ss *csession, rep *protocol.AllocReply) {
	for i := range rep.Evicted {
		c.pool.freed(&rep.Evicted[i])
	}
	if rep.Region.Length > 0 {
		region := rep.Region
		c.pool.add(p, ss, &region)
	}
	c.wakeAll()
}

// get reads a value: it looks the key up, copies page by page, and counts the bytes only if all is well afterwards.
func (c *client) get(p *proc, key string) {
	s := c.s
	var leaseMS uint64
	for range 8 {
		op := s.linear.begin(c, opGet, key, 0)
		r, sentAt, e := c.lookup(p, key, leaseMS)
		if e != nil {
			s.linear.cancel(op)
			s.cover.op("get", e)
			return
		}
		if !r.Found {
			s.linear.end(op, output{})
			s.cover.op("miss", nil)
			return
		}
		d := int64(r.LeaseMS) * ms
		got, good := c.copyAny(p, key, r, sentAt+d-margin(d))
		c.giveLease(r.Lease)
		if good == readLate {
			s.linear.cancel(op)
			s.cover.Late++
			leaseMS = 2 * max(r.LeaseMS, 1)
			continue
		}
		if good == readBad {
			s.linear.cancel(op)
			s.cover.op("get-lost", nil)
			return
		}
		s.linear.end(op, output{done: true, version: got})
		s.cover.op("get", nil)
		if r.Promote {
			c.promote(p, r, key, got)
		}
		return
	}
	s.cover.op("get-late", nil)
}

// Outcomes of a copy.
const (
	readGood = iota
	readBad  // the bytes did not survive: a miss
	readLate // the lease ended first
)

func (c *client) lookup(p *proc, key string, leaseMS uint64) (*protocol.LookupResult, int64, *protocol.Error) {
	results, sentAt, e := c.lookupAll(p, []string{key}, leaseMS)
	if e != nil {
		return nil, 0, e
	}
	return &results[0], sentAt, nil
}

// lookupAll looks keys up with one request.
func (c *client) lookupAll(p *proc, keys []string, leaseMS uint64) ([]protocol.LookupResult, int64, *protocol.Error) {
	req := protocol.LookupRequest{LeaseMS: leaseMS}
	for _, key := range keys {
		req.Keys = append(req.Keys, []byte(key))
	}
	if leaseMS == 0 && c.rng.IntN(3) == 0 {
		req.LeaseMS = 5 + c.rng.Uint64N(900)
	}
	if c.s.mix.hot && c.rng.IntN(2) == 0 {
		req.LeaseMS = uint64(electionSpan / ms) // all there is
	}
	if c.rng.IntN(2) == 0 {
		req.Release, c.releases = c.releases, nil
	}
	typ := protocol.TypeLookup
	if c.rng.IntN(3) == 0 || len(keys) > 1 {
		typ, req.Packed = protocol.TypeBatchLookup, true
	}
	var rep protocol.LookupReply
	sentAt, _, e := c.roundTrip(p, nil, typ, func() []byte { return req.AppendAs(nil, typ) }, 0, c.patience(),
		func(b []byte) (*protocol.Error, error) {
			err := rep.DecodeAs(b, typ)
			if err == nil && rep.Code == 0 && len(rep.Results) != len(keys) {
				c.s.fail("wire", "a lookup of %d keys has %d results", len(keys), len(rep.Results))
			}
			return &rep.Error, err
		})
	if e != nil {
		return nil, 0, e
	}
	return rep.Results, sentAt, nil
}

// copyAny copies an entry from the first of its locations that can be read; some readers begin with another. While it lasts,
// the lease keeps all of them where they are.
func (c *client) copyAny(p *proc, key string, r *protocol.LookupResult, end int64) (version uint64, outcome int) {
	all := append([]protocol.Location{r.Location}, r.Copies...)
	for i := range r.Copies {
		l := &r.Copies[i]
		if mem := c.mapped(l.Device, l.Generation); mem != nil {
			defer c.s.leaseEnds(c.s.leaseBegins(c, mem, (l.Offset+l.KVOffset)/pageSize, (l.KVLength+pageSize-1)/pageSize, end, key))
		}
	}
	if len(all) > 1 {
		c.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	for i := range all {
		if version, outcome = c.copyOut(p, key, &all[i], end); outcome != readBad {
			break
		}
		if i < len(all)-1 {
			c.s.cover.FellOver++
		}
	}
	return version, outcome
}

// copyOut copies an entry under its lease, which ends at a time of the client's clock.
func (c *client) copyOut(p *proc, key string, r *protocol.Location, end int64) (version uint64, outcome int) {
	s := c.s
	mem := c.mapped(r.Device, r.Generation)
	if mem == nil {
		return 0, readBad
	}
	from := (r.Offset + r.KVOffset) / pageSize
	n := (r.KVLength + pageSize - 1) / pageSize
	l := s.leaseBegins(c, mem, from, n, end, key)
	defer s.leaseEnds(l)
	var got []stamp
	slow := c.rng.IntN(4) == 0 || c.s.mix.hot && c.rng.IntN(2) == 0 // some take almost as long as they may
	for i := range n {
		if slow {
			p.sleep(c.rng.Int64N(max(1, (end-c.clock.Boottime())/int64(n-i)*11/10)))
		}
		c.dally(p)
		got = append(got, mem.pages[from+i])
	}
	d := s.device(deviceID(r.Device))
	switch {
	case mem.generation != r.Generation, c.far(d) && (d.mem != mem || !c.reaches(d)):
		s.cover.GenerationMisses++
		return 0, readBad
	case c.clock.Boottime() >= end:
		return 0, readLate
	}
	return s.accepted(c, key, got), readGood
}

// exists asks whether a key is held, of any member.
func (c *client) exists(p *proc, key string) {
	s := c.s
	op := s.linear.begin(c, opExists, key, 0)
	req := protocol.KeysRequest{Keys: [][]byte{[]byte(key)}}
	var rep protocol.KeysReply
	_, _, e := c.roundTrip(p, nil, protocol.TypeBatchExists,
		func() []byte { return req.AppendAs(nil, protocol.TypeBatchExists) }, 0, c.patience(),
		func(b []byte) (*protocol.Error, error) {
			err := rep.DecodeAs(b, protocol.TypeBatchExists)
			return &rep.Error, err
		})
	s.cover.op("exists", e)
	if e != nil {
		s.linear.cancel(op)
		return
	}
	s.linear.end(op, output{done: rep.Results[0]})
}

// remove deletes a key.
func (c *client) remove(p *proc, key string) {
	s := c.s
	ss := c.sess
	op := s.linear.begin(c, opDelete, key, 0)
	req := &protocol.KeysRequest{Keys: [][]byte{[]byte(key)}}
	var rep protocol.KeysReply
	read := func(b []byte) (*protocol.Error, error) {
		rep = protocol.KeysReply{}
		err := rep.DecodeAs(b, protocol.TypeBatchDelete)
		return &rep.Error, err
	}
	reclaim := func() {
		for i := range rep.Freed {
			c.pool.freed(&rep.Freed[i])
		}
	}
	m := &mutation{
		typ: protocol.TypeBatchDelete, mut: &req.Mutation, what: []string{key}, del: true, op: op, read: read,
		body: func() []byte { return req.AppendAs(nil, protocol.TypeBatchDelete) },
		orphan: func(b []byte, _ bool) {
			if b != nil {
				if _, err := read(b); err == nil {
					reclaim()
				}
			}
		},
	}
	e := c.mutate(p, ss, m)
	s.cover.op("delete", e)
	switch {
	case e == nil:
		reclaim()
		if !rep.Results[0] {
			// It was absent, or pinned: a reply does not say which of them.
			s.linear.cancel(op)
			return
		}
		s.linear.end(op, output{done: true})
		if len(rep.Freed) > 0 {
			c.eager()
		}
	case answeredNo(e):
		s.linear.cancel(op)
	default:
		s.linear.unknown(op)
	}
}

// pin pins a key for as long as the session lasts, or undoes that.
func (c *client) pin(p *proc, key string) {
	s := c.s
	ss := c.sess
	typ := protocol.TypeBatchPin
	if c.pins[key] {
		typ = protocol.TypeBatchUnpin
	}
	if typ == protocol.TypeBatchUnpin {
		s.unpin(c, key)
		delete(c.pins, key)
	} else if len(c.pins) >= 2 {
		return
	}
	req := &protocol.KeysRequest{Keys: [][]byte{[]byte(key)}}
	var rep protocol.KeysReply
	e := c.mutate(p, ss, &mutation{
		typ: typ, mut: &req.Mutation, body: func() []byte { return req.AppendAs(nil, typ) },
		read: func(b []byte) (*protocol.Error, error) {
			rep = protocol.KeysReply{}
			err := rep.DecodeAs(b, typ)
			return &rep.Error, err
		},
	})
	s.cover.op(typ.String(), e)
	if e == nil && typ == protocol.TypeBatchPin && rep.Results[0] && c.sess == ss {
		c.pins[key] = true
		s.pinned(c, key)
	}
}

// clear drops everything whose key begins with some letter.
func (c *client) clear(p *proc) {
	req := &protocol.ClearRequest{Prefix: []byte(c.s.keys[c.rng.IntN(len(c.s.keys))][:1])}
	e := c.mutate(p, c.sess, &mutation{
		typ: protocol.TypeClear, mut: &req.Mutation, body: func() []byte { return req.Append(nil) }, read: readSuccess,
	})
	c.s.cover.op("clear", e)
}

// giveBack returns a region to the pool with what is in it.
func (c *client) giveBack(p *proc, r *cregion) {
	c.pool.giveUp(p, r)
	c.returnRegion(p, c.sess, r.id, r.epoch)
}

// goodbye ends the session, of which nothing is used from then on; the connector opens another.
func (c *client) goodbye(p *proc) {
	ss := c.sess
	x := c.conn
	if x == nil || ss.ended {
		return
	}
	c.endSession(p, ss)
	req := &protocol.GoodbyeRequest{Mutation: protocol.Mutation{Seq: ss.nextSeq, Acked: ss.acked()}}
	ss.nextSeq++
	_, e := c.attempt(p, x, protocol.TypeGoodbye, req.Append(nil), 0, readSuccess)
	c.s.cover.op("goodbye", e)
	x.lost("goodbye")
}
