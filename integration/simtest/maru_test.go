package simtest

import (
	"fmt"
	"maps"
	"slices"

	"github.com/vmihailenco/msgpack/v5"

	"larder/maru"
)

const (
	maruPlaces = 100     // the number of the first of Maru's clients
	maruWait   = 2 * sec // for a reply, as in Maru's client
	maruLease  = 2 * sec
	maruGrace  = 3 * sec
	maruHaste  = 50 * ms // mean time that is left for a request which has waited for long
	maruBusy   = 5       // times as many requests as a native client's
	maruKeys   = 12
	maruWork   = 2  // things that a client does at a time
	maruTrusts = 50 // of 100 failures to register, those after which a client uses the page again, as Maru's handler does
)

// maruClient is one life of an engine with a client of Maru's. It has no session, and can be told nothing: it keeps what
// Maru's handler keeps, a region and which of its pages are in use.
type maruClient struct {
	*client
	i      int
	region *cregion
	asking bool           // for a region
	mine   map[string]int // what it has registered in the region, and in which page
}

// maruOp is a REGISTER_KV, named for ever by the length that it registers, which nobody checks.
type maruOp struct {
	owner   *maruClient
	key     string
	arrived int64 // in true time, at the first member that got it; 0 = never
	stalls  int64 // for how long members stood still on its way, and did not notice
	// applied is when the first member applied what made the key, of a term; 0 = nobody has.
	applied int64
	term    uint64
	// givenUp says that the client has concluded that it was not registered, and uses the page again.
	givenUp bool
}

// newMaru starts one of Maru's clients.
func (s *sim) newMaru(i int) {
	c := &maruClient{client: s.newProcess(maruPlaces+i, ""), i: i, mine: map[string]int{}}
	c.instance = fmt.Sprintf("maru%d-%d", i, c.pid)
	c.next = c.rng.IntN(len(c.known))
	s.marus[i] = c
	for range maruWork {
		c.life.spawn(c.work)
	}
}

// maruAlive implements server.MasterConfig.OwnerAlive: what members tell each other of their connections is not simulated.
func (s *sim) maruAlive(instance, _ string) bool {
	return slices.ContainsFunc(s.marus, func(c *maruClient) bool {
		return c != nil && !c.life.dead && c.instance == instance
	})
}

// restartMaru has an engine end, and another one begin.
func (s *sim) restartMaru(c *maruClient, after int64) {
	c.crash()
	s.after(after, s.world, func() {
		if s.marus[c.i] == c {
			s.newMaru(c.i)
		}
	})
}

// loseMarus ends those that write to a memory whose bytes are lost, as its host takes its engines with it: nothing in Maru's
// protocol would tell them, and there is no generation in its handles.
func (s *sim) loseMarus(mem *memory) {
	for _, c := range s.marus {
		if c != nil && !c.life.dead && (mem == nil || c.region != nil && c.region.mem == mem) {
			s.restartMaru(c, s.rngFaults.Int64N(5*sec))
		}
	}
}

// maruBeside is the one of Maru's clients that goes with a native one, where faults are concerned: nil if there is none.
func (s *sim) maruBeside(c *client) *maruClient {
	if c.n < len(s.marus) && s.marus[c.n] != nil && !s.marus[c.n].life.dead && !s.marus[c.n].life.paused {
		return s.marus[c.n]
	}
	return nil
}

func (c *maruClient) work(p *proc) {
	s := c.s
	for {
		p.sleep(int64(c.rng.ExpFloat64() * float64(s.mix.think) / maruBusy))
		if s.quiet {
			return
		}
		c.busy++
		key := s.maruKeys[c.rng.IntN(len(s.maruKeys))]
		switch n := c.rng.IntN(100); {
		case n < 40:
			c.store(p, key)
		case n < 65:
			c.read(p, key, c.rng.IntN(2) == 0)
		case n < 85:
			c.drop(p, key)
		case n < 94:
			c.ask(p, maru.Exists, map[string]any{"key": key})
		default:
			c.leaveRegion(p)
		}
		c.busy--
	}
}

// store registers a key in a page of its own, which is written first.
func (c *maruClient) store(p *proc, key string) {
	s := c.s
	r, page := c.page(p)
	if r == nil {
		return
	}
	s.versions++
	op := &maruOp{owner: c, key: key}
	version := s.versions
	s.maruOps[version] = op
	c.dally(p)
	s.write(c.client, r, page, stamp{key: key, version: version, writer: c.pid})
	reply := c.askAs(p, op, maru.Register, map[string]any{
		"key": key, "region_id": r.id, "kv_offset": page * pageSize, "kv_length": version,
	})
	if r.lost {
		return
	}
	isNew, answered := reply["is_new"].(bool)
	switch {
	case isNew:
		s.maruTold(op)
		r.state[page], r.key[page] = pageUsed, key
		c.mine[key] = page
	case answered:
		r.state[page] = pageFree // somebody else was first
	case c.rng.IntN(100) < maruTrusts:
		op.givenUp = true
		r.state[page] = pageFree
	default: // it may be registered, and is not used as long as there is the region
		r.state[page] = pageResting
	}
}

// page takes a free page, and asks for a region if there is none, or returns one that is full.
func (c *maruClient) page(p *proc) (*cregion, int) {
	if c.region == nil {
		c.ownRegion(p)
	}
	r := c.region
	if r == nil {
		return nil, 0
	}
	if page := slices.Index(r.state, pageFree); page >= 0 {
		r.state[page] = pageTaken
		return r, page
	}
	if c.rng.IntN(4) == 0 {
		c.leaveRegion(p)
	}
	return nil, 0
}

// ownRegion asks for a region. One that it was given and not told of is its own until it dies.
func (c *maruClient) ownRegion(p *proc) {
	if c.asking {
		return
	}
	c.asking = true
	defer func() { c.asking = false }()
	log := c.s.log
	reply := c.ask(p, maru.RequestAlloc, map[string]any{"instance_id": c.instance, "size": 8 * pageSize})
	handle, _ := reply["handle"].(map[string]any)
	if handle == nil || log != c.s.log {
		return
	}
	id := number(handle["region_id"])
	info, ok := log.state.Region(regionID(id))
	if !ok {
		c.s.fail("maru", "client %d is given region %d, which is not there", c.n, id)
		return
	}
	d := c.s.device(info.Device)
	if d.mem.generation != info.Generation {
		return // its bytes are lost already
	}
	n := int(info.Length / pageSize)
	r := &cregion{
		id: id, epoch: info.Epoch, generation: info.Generation, offset: info.Offset, length: info.Length, mem: d.mem,
		state: make([]byte, n), key: make([]string, n),
	}
	r.hold = c.s.hold(c.client, r)
	c.region, c.pool.list = r, []*cregion{r}
}

// leaveRegion returns the region. Keys in it stay until somebody deletes them, or the pool is full.
func (c *maruClient) leaveRegion(p *proc) {
	r := c.region
	if r == nil || slices.Contains(r.state, pageTaken) {
		return // some page may be written to
	}
	r.hold.end()
	r.hold, r.lost = nil, true
	c.region, c.pool.list = nil, nil
	clear(c.mine)
	c.ask(p, maru.ReturnAlloc, map[string]any{"instance_id": c.instance, "region_id": r.id})
}

// drop deletes a key. Of one of its own the page is free then.
func (c *maruClient) drop(p *proc, key string) {
	r := c.region
	page, own := c.mine[key]
	if !own && c.rng.IntN(8) > 0 {
		return
	}
	reply := c.ask(p, maru.Delete, map[string]any{"key": key})
	if done, _ := reply["success"].(bool); !done || !own || r.lost || c.mine[key] != page {
		return
	}
	delete(c.mine, key)
	r.state[page], r.key[page] = pageFree, ""
}

// read looks a key up and copies it: pinned, or within the lease that every LOOKUP_KV is.
func (c *maruClient) read(p *proc, key string, pinned bool) {
	s := c.s
	if pinned {
		reply := c.ask(p, maru.Pin, map[string]any{"key": key})
		if there, _ := reply["exists"].(bool); !there {
			return
		}
		defer c.ask(p, maru.Unpin, map[string]any{"key": key})
	}
	log, begun := s.log, s.now
	end := c.clock.Boottime() + maruLease
	x := c.exchange(p, nil, maru.Lookup, map[string]any{"key": key})
	found, answered := x.fields["found"].(bool)
	if !answered || log != s.log {
		return
	}
	version := number(x.fields["kv_length"])
	s.maruRead(key, begun, x.term, version)
	if !found {
		return
	}
	handle, _ := x.fields["handle"].(map[string]any)
	c.copyMaru(p, &maruCopy{
		key: key, version: version, region: number(handle["region_id"]), page: number(x.fields["kv_offset"]) / pageSize,
		log: log, end: end, pinned: pinned,
	})
}

// maruCopy is what is to be copied.
type maruCopy struct {
	key          string
	version      uint64
	region, page uint64
	log          *history
	end          int64 // of the lease, on the client's clock
	pinned       bool
}

// copyMaru copies a page, which takes a while.
func (c *maruClient) copyMaru(p *proc, x *maruCopy) {
	s := c.s
	info, ok := x.log.state.Region(regionID(x.region))
	if !ok {
		return // emptied by a lost device while the reply was on its way
	}
	d := s.device(info.Device)
	mem, at := d.mem, info.Offset/pageSize+x.page
	whole := func() bool {
		return s.log == x.log && s.device(info.Device) == d && d.mem == mem && mem.generation == info.Generation
	}
	if x.pinned && whole() {
		l := s.leaseBegins(c.client, mem, at, 1, x.end, x.key)
		l.maru = s.maruOps[x.version]
		defer s.leaseEnds(l)
	}
	p.sleep(c.rng.Int64N(max(1, (x.end-c.clock.Boottime())*11/10)))
	if !whole() || !x.pinned && c.clock.Boottime() >= x.end {
		return
	}
	s.maruCopied(c, x, mem.pages[at])
}

// number reads an integer of msgpack's.
func number(v any) (n uint64) {
	_, _ = fmt.Sscan(fmt.Sprint(v), &n) // 0 of what is none
	return n
}

// ask sends a request and waits for the reply: an empty one if there is none, or an error.
func (c *maruClient) ask(p *proc, t maru.Type, fields map[string]any) map[string]any {
	return c.askAs(p, nil, t, fields)
}

func (c *maruClient) askAs(p *proc, op *maruOp, t maru.Type, fields map[string]any) map[string]any {
	return c.exchange(p, op, t, fields).fields
}

// exchange is a request with its reply, as its client knows it.
func (c *maruClient) exchange(p *proc, op *maruOp, t maru.Type, fields map[string]any) *maruExchange {
	s := c.s
	x := &maruExchange{op: op, p: p}
	if c.rng.IntN(8) == 0 { // some for almost as long as they may
		x.queued = max(0, int64(maru.Patience)-int64(c.rng.ExpFloat64()*float64(maruHaste)))
	}
	payload, err := msgpack.Marshal(fields)
	if err == nil {
		err = x.q.Decode(maru.Header{Type: t}, payload)
	}
	if err != nil {
		s.fail("maru", "a %v does not decode: %v", t, err)
		return x
	}
	if ids := slices.Sorted(maps.Keys(s.members)); len(ids) > 0 {
		x.send(c, s.members[ids[c.next%len(ids)]])
	}
	wait := c.clock.length(maruWait)
	if !p.waitFor(func() bool { return x.done }, wait) {
		c.next++ // it asks another
		s.cover.op("maru-"+t.String(), &errMaruLost)
		return x
	}
	if len(x.reply) == 0 {
		s.cover.op("maru-"+t.String(), &errMaruFailed)
		return x
	}
	if err := msgpack.Unmarshal(x.reply, &x.fields); err != nil {
		s.fail("maru", "the reply to a %v does not decode: %v", t, err)
	}
	s.cover.op("maru-"+t.String(), nil)
	return x
}
