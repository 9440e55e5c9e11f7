package simtest

import (
	"slices"

	"larder/meta"
	"larder/protocol"
)

// States of a page of a client's region.
const (
	pageFree    = iota // may be given to a store
	pageTaken          // is being written, or its REGISTER is not answered
	pageUsed           // holds an entry
	pageResting        // the entry is gone, but somebody may hold a lease
)

// share is a client's share of the pool: its regions and the state of their pages. It keeps the rules of the client
// package's pool.
type share struct {
	c       *client
	list    []*cregion
	resting []rest
	asking  int // REQUEST_ALLOCs whose outcomes are not known
	gone    map[uint64]uint64
	dying   []*cregion
	latest  run // that came free: some clients use it again first
	// doubtful says that pages may count as used that are free: see the client package.
	doubtful bool
}

type rest struct {
	due int64
	run run
}

// cregion is a region as its owner knows it.
type cregion struct {
	id, epoch, generation uint64
	offset, length        uint64
	mem                   *memory
	state                 []byte
	key                   []string // that begins there, or is about to
	early                 map[int]int64
	changed               []bool // since the HANDSHAKE on its way was sent; nil if none is
	copies                int
	lost                  bool
	far                   bool // written by transfer: held from when its home has granted that
	hold                  *holding
}

// run is pages in a row.
type run struct {
	r       *cregion
	page, n int
}

func (r *cregion) note(page, n int) {
	if r.changed != nil {
		for i := range n {
			r.changed[page+i] = true
		}
	}
}

func (r *cregion) set(t run, state byte) {
	for i := range t.n {
		r.state[t.page+i] = state
	}
	r.note(t.page, t.n)
}

// at is the page of the memory where page i of the region lies.
func (r *cregion) at(i int) uint64 { return r.offset/pageSize + uint64(i) }

func (p *share) region(id uint64) *cregion {
	for _, r := range p.list {
		if r.id == id {
			return r
		}
	}
	return nil
}

// free counts the free pages, in runs of n.
func (p *share) free(n int) (pages int) {
	for _, r := range p.list {
		in := 0
		for _, st := range r.state {
			if st != pageFree {
				in = 0
				continue
			}
			if in++; in == n {
				pages += n
				in = 0
			}
		}
	}
	return pages
}

func (p *share) take(n int) (run, bool) {
	if t := p.latest; t.n >= n && !t.r.lost && t.r.state[t.page] == pageFree && p.c.rng.IntN(2) == 0 {
		whole := true
		for i := range n {
			whole = whole && t.r.state[t.page+i] == pageFree
		}
		if whole {
			t.n = n
			t.r.set(t, pageTaken)
			return t, true
		}
	}
	for _, r := range p.list {
		in := 0
		for i, st := range r.state {
			if st != pageFree {
				in = 0
				continue
			}
			if in++; in == n {
				t := run{r, i - n + 1, n}
				r.set(t, pageTaken)
				return t, true
			}
		}
	}
	return run{}, false
}

func (p *share) release(t run) {
	if t.n == 0 || t.r.lost {
		return
	}
	t.r.set(t, pageFree)
	t.r.key[t.page] = ""
	p.latest = t
}

// retire puts pages into quarantine.
func (p *share) retire(t run, forMS uint64) {
	if forMS == 0 {
		p.release(t)
		return
	}
	if t.r.lost {
		return
	}
	t.r.key[t.page] = ""
	p.rest(t, p.restEnd(forMS))
}

func (p *share) restEnd(forMS uint64) int64 {
	d := int64(forMS) * ms
	return p.c.clock.steady() + d + margin(d)
}

func (p *share) rest(t run, due int64) {
	t.r.set(t, pageResting)
	p.resting = append(p.resting, rest{due, t})
}

// wake releases the pages whose quarantine is over.
func (p *share) wake() {
	now := p.c.clock.steady()
	left := p.resting[:0]
	for _, q := range p.resting {
		if q.due <= now {
			p.release(q.run)
		} else {
			left = append(left, q)
		}
	}
	p.resting = left
}

func (p *share) use(t run) {
	if t.r.lost {
		return
	}
	if due, ok := t.r.early[t.page]; ok {
		delete(t.r.early, t.page)
		if due <= p.c.clock.steady() {
			p.release(t)
			return
		}
		t.r.key[t.page] = ""
		p.rest(t, due)
		return
	}
	t.r.set(t, pageUsed)
}

// freed is the news that an entry is gone.
func (p *share) freed(pg *protocol.Page) {
	r := p.region(pg.RegionID)
	if r == nil {
		if p.c.node != nil {
			p.c.node.early = append(p.c.node.early, *pg)
		}
		return
	}
	page, n := int(pg.KVOffset/pageSize), int((pg.KVLength+pageSize-1)/pageSize)
	if page+n > len(r.state) || r.state[page] == pageFree || r.key[page] == "" ||
		len(pg.Key) > 0 && r.key[page] != string(pg.Key) && r.key[page] != anyOldKey {
		return
	}
	if r.state[page] != pageUsed {
		if len(pg.Key) > 0 { // its REGISTER has worked, and the answer is not here yet
			due := int64(0)
			if pg.FreeAfterMS > 0 {
				due = p.restEnd(pg.FreeAfterMS)
			}
			if r.early == nil {
				r.early = map[int]int64{}
			}
			r.early[page] = due
		}
		return
	}
	p.retire(run{r, page, n}, pg.FreeAfterMS)
}

// forget takes a region out of the books.
func (p *share) forget(r *cregion) {
	if r.lost {
		return
	}
	r.lost = true
	p.list = slices.DeleteFunc(p.list, func(x *cregion) bool { return x == r })
	p.resting = slices.DeleteFunc(p.resting, func(q rest) bool { return q.run.r == r })
	p.dying = append(p.dying, r)
}

// giveUp makes sure that nothing writes to a region any more.
func (p *share) giveUp(w *proc, r *cregion) {
	p.forget(r)
	w.wait(func() bool { return r.copies == 0 })
	p.dying = slices.DeleteFunc(p.dying, func(x *cregion) bool { return x == r })
	if r.hold != nil {
		r.hold.end()
		r.hold = nil
	}
}

// beginCopy enters a section in which the memory of a region is written.
func (p *share) beginCopy(r *cregion) bool {
	if r.lost {
		return false
	}
	r.copies++
	return true
}

func (p *share) endCopy(r *cregion) {
	if r.copies--; r.copies == 0 && r.lost {
		p.c.wakeAll()
	}
}

// add takes a region that a master gave. It waits until nothing writes under an earlier epoch, and until the device
// shows the region's generation.
func (p *share) add(w *proc, ss *csession, given *protocol.Region) bool {
	c := p.c
	old := p.region(given.RegionID)
	for _, r := range p.dying {
		if r.id == given.RegionID {
			old = r
		}
	}
	if epoch, gone := p.gone[given.RegionID]; gone && epoch >= given.Epoch || old != nil && old.epoch >= given.Epoch {
		return true
	}
	if old != nil {
		p.giveUp(w, old)
	}
	mem := c.patient(w, given.Device, given.Generation)
	if mem == nil {
		c.later(func(w *proc) { c.returnRegion(w, ss, given.RegionID, given.Epoch) })
		return false
	}
	if epoch, gone := p.gone[given.RegionID]; gone && epoch >= given.Epoch || ss.ended {
		return true
	}
	p.enter(given, mem)
	return true
}

// enter enters a region into the books, with all its pages free.
func (p *share) enter(given *protocol.Region, mem *memory) *cregion {
	c := p.c
	n := int(given.Length / pageSize)
	r := &cregion{
		id: given.RegionID, epoch: given.Epoch, generation: given.Generation, offset: given.Offset, length: given.Length,
		mem: mem, state: make([]byte, n), key: make([]string, n),
	}
	if r.far = c.far(c.s.deviceOf(mem)); !r.far {
		r.hold = c.s.hold(c, r)
	}
	p.list = append(p.list, r)
	return r
}

// noteChanges begins to record which pages change while a HANDSHAKE is on its way.
func (p *share) noteChanges() {
	p.doubtful = false
	for _, r := range p.list {
		r.changed = make([]bool, len(r.state))
	}
}

// reconcile compares the books with what a master says.
func (p *share) reconcile(owned []protocol.OwnedRegion, quarantineMS uint64) (dropped, revoking []*cregion) {
	for _, r := range slices.Clone(p.list) {
		var o *protocol.OwnedRegion
		for i := range owned {
			if owned[i].RegionID == r.id {
				o = &owned[i]
			}
		}
		switch {
		case r.changed == nil:
		case o == nil || o.Epoch != r.epoch:
			p.forget(r)
			dropped = append(dropped, r)
		case o.Revoking:
			revoking = append(revoking, r)
		default:
			p.compare(r, o.Occupied, quarantineMS)
		}
		r.changed = nil
	}
	return dropped, revoking
}

func (p *share) compare(r *cregion, occupied []uint64, quarantineMS uint64) {
	there := make([]bool, len(r.state))
	for i := 0; i+1 < len(occupied); i += 2 {
		for j := occupied[i] / pageSize; j < (occupied[i]+occupied[i+1]+pageSize-1)/pageSize; j++ {
			there[j] = true
		}
	}
	for i, is := range there {
		switch {
		case r.changed[i]:
		case is && r.state[i] == pageFree:
			r.state[i] = pageUsed
		case !is && r.state[i] == pageUsed:
			p.retire(run{r, i, 1}, quarantineMS)
		}
	}
}

// patient finds the memory of a device that shows a generation; it may be about to be written.
func (c *client) patient(w *proc, id, generation uint64) *memory {
	until := c.clock.Boottime() + 10*sec
	for {
		if mem := c.mapped(id, generation); mem != nil {
			return mem
		}
		if c.clock.Boottime() > until {
			return nil
		}
		w.sleep(50 * ms)
	}
}

// mapped returns the memory that this process uses for a device under a generation: what it has mapped, or else what
// the device is now. nil = the device is another.
func (c *client) mapped(id, generation uint64) *memory {
	if d := c.s.device(deviceID(id)); c.far(d) { // it is not, and is read by transfer
		if !c.reaches(d) || d.mem.generation != generation {
			return nil
		}
		return d.mem
	}
	if mem := c.maps[id]; mem != nil && mem.generation == generation {
		return mem
	}
	d := c.s.device(meta.DeviceID(id))
	if d == nil || d.mem.generation != generation {
		return nil
	}
	c.maps[id] = d.mem
	return d.mem
}

// margin is how much earlier the holder's end of a duration is than the granter's.
func margin(d int64) int64 { return d/100 + 2*ms }
