package simtest

import (
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"larder/protocol"
)

// nodePlaces is the number of the first node among the clients: nodes speak as clients do.
const nodePlaces = 1000

// nodeEvery is how often a node looks for what it has to do, when nobody tells it.
const nodeEvery = 500 * ms

// node is what a client process has that is the home of a device: it contributes the device, lets owners on other hosts
// write to their regions there, and carries out tasks.
type node struct {
	c        *client
	d        *device
	id       uint64      // of the device
	attached *clientConn // over which its leader was told
	grants   map[uint64]uint64
	fenced   map[uint64]uint64 // by region: up to which epoch nothing is granted any more
	early    []protocol.Page   // that came free in regions which a HANDSHAKE on its way is to tell of
	told     bool              // that there are tasks
}

// newNode starts a node's process. DRAM is as young as the process.
func (s *sim) newNode(i int) {
	d := s.nodeDevice(i)
	c := s.newProcess(nodePlaces+i, "node/host/"+d.uuid)
	c.node = &node{c: c, d: d, grants: map[uint64]uint64{}, fenced: map[uint64]uint64{}}
	d.home = c
	if d.tier == tierDRAM {
		d.mem = newMemory(d.size)
	}
	s.nodes[i] = c
	c.life.spawn(c.connector)
	c.life.spawn(c.keeper)
	c.life.spawn(c.node.serve)
}

func (s *sim) nodeDevice(i int) *device { return s.devices[s.mix.devices+i] }

// serve attaches the device to whoever leads, and does what there is to do.
func (n *node) serve(p *proc) {
	c := n.c
	for {
		p.wait(func() bool { return c.conn != nil && c.sess != nil && !c.sess.ended })
		if n.attached != c.conn && !n.attach(p, c.conn, c.sess) {
			p.sleep(100 * ms)
			continue
		}
		n.told = false
		n.tasks(p, c.sess)
		p.waitFor(func() bool { return n.told || c.conn == nil }, nodeEvery)
	}
}

// attach tells the leader what the device is, and once more when it shows what the leader asks for.
func (n *node) attach(p *proc, x *clientConn, ss *csession) bool {
	c, d := n.c, n.d
	for range 3 {
		req := &protocol.AttachRequest{
			UUID: d.uuid, Node: "host of " + d.uuid, Tier: d.tier, Coherence: "hardware", Size: d.size, DataOffset: headerSpan, Align: pageSize,
			Volatile: d.tier == tierDRAM, BootID: hostBoot, Generation: d.mem.generation,
			Ready: n.id != 0 && d.mem.generation != 0, Endpoint: protocol.Endpoint{Engine: fmt.Sprintf("%032x", c.pid), Buffer: 1},
		}
		if d.tier == tierDRAM {
			req.Path = "/node/" + d.uuid
		}
		var rep protocol.AttachReply
		_, _, e := c.roundTrip(p, ss, protocol.TypeAttach, func() []byte { return req.Append(nil) }, 0, 5*sec,
			func(b []byte) (*protocol.Error, error) {
				rep = protocol.AttachReply{}
				err := rep.Decode(b)
				return &rep.Error, err
			})
		c.s.cover.op("attach", e)
		if e != nil || ss.ended || c.conn != x {
			return false
		}
		n.id = rep.Device
		if req.Ready && rep.Generation == req.Generation {
			n.attached = x
			c.s.cover.Attached++
			return true
		}
		if rep.Generation != d.mem.generation {
			n.show(p, rep.Generation)
		}
	}
	return false
}

// show writes a generation to the device. What lay there is given up, and whoever may still write there writes to memory
// that nobody reads.
func (n *node) show(p *proc, generation uint64) {
	d := n.d
	n.retire()
	mem := newMemory(d.size)
	d.mem = mem
	p.sleep(n.c.rng.Int64N(20 * ms))
	mem.generation = generation
	n.c.s.trace("node shows", n.c.pid, generation)
}

// retire ends all that others may write with.
func (n *node) retire() {
	for region, epoch := range n.grants {
		n.fence(region, epoch)
	}
	clear(n.grants)
}

// sessionEnded gives DRAM up: its leader has, or will. What lies on a disk stays.
func (n *node) sessionEnded() {
	n.attached = nil
	n.retire()
	if n.d.tier == tierDRAM {
		n.d.mem = newMemory(n.d.size)
	}
}

// adopt takes over a region of the session before, if its bytes are still there. Whatever was free there may be leased
// still.
func (n *node) adopt(ss *csession, given *protocol.OwnedRegion, quarantineMS uint64) {
	c := n.c
	if given.Revoking || n.d.mem.generation != given.Generation {
		id, epoch := given.RegionID, given.Epoch
		c.later(func(p *proc) { c.returnRegion(p, ss, id, epoch) })
		return
	}
	r := c.pool.enter(&given.Region, n.d.mem)
	for i := range r.state {
		held := false
		for j := 0; j+1 < len(given.Occupied); j += 2 {
			held = held || uint64(i)*pageSize >= given.Occupied[j] && uint64(i)*pageSize < given.Occupied[j]+given.Occupied[j+1]
		}
		if held {
			r.state[i], r.key[i] = pageUsed, anyOldKey
		} else {
			c.pool.rest(run{r, i, 1}, c.pool.restEnd(quarantineMS))
		}
	}
	for i := range n.early {
		if n.early[i].RegionID == r.id {
			c.pool.freed(&n.early[i])
		}
	}
}

// anyOldKey stands for the key of an entry that was there before the process.
const anyOldKey = "?"

// pushed handles what masters ask of homes alone.
func (n *node) pushed(x *clientConn, t protocol.Type, body []byte) {
	switch t {
	case protocol.TypeGrant:
		var push protocol.GrantPush
		if err := push.Decode(body); err != nil {
			n.c.s.fail("wire", "a GRANT does not decode: %v", err)
		}
		n.grant(x, &push)
	case protocol.TypeFence:
		var push protocol.FencePush
		if err := push.Decode(body); err != nil {
			n.c.s.fail("wire", "a FENCE does not decode: %v", err)
		}
		n.fence(push.RegionID, push.Epoch)
		n.c.s.cover.Fences++
		req := protocol.FencedRequest(push)
		x.post(protocol.TypeFenced, req.Append(nil))
	case protocol.TypeTasksPush:
		n.told = true
		n.c.wakeAll()
	default:
	}
}

// grant lets the owner of a region write there.
func (n *node) grant(x *clientConn, push *protocol.GrantPush) {
	req := protocol.GrantedRequest{ID: push.ID, Fault: "it is fenced, or not there"}
	epoch, fenced := n.fenced[push.RegionID]
	if n.attached == x && push.Device == n.id && (!fenced || epoch < push.Epoch) {
		n.grants[push.RegionID] = max(n.grants[push.RegionID], push.Epoch)
		req = protocol.GrantedRequest{ID: push.ID, Endpoint: protocol.Endpoint{Engine: fmt.Sprintf("%032x", n.c.pid), Buffer: push.RegionID}}
		n.c.s.cover.Grants++
	}
	x.post(protocol.TypeGranted, req.Append(nil))
}

// fence ends what was granted of a region under an epoch and those before: nothing lands there any more.
func (n *node) fence(region, epoch uint64) {
	n.fenced[region] = max(n.fenced[region], epoch)
	if n.grants[region] <= epoch {
		delete(n.grants, region)
	}
	for _, h := range slices.Clone(n.d.mem.owners) {
		if h.r.id == region && h.r.epoch <= epoch && h.r.far {
			h.end()
			h.r.hold = nil
		}
	}
}

// far reports whether a process reaches a device by transfer alone: nobody maps a disk, and memory is mapped on its own
// host.
func (c *client) far(d *device) bool {
	return d != nil && d.tier != "" && d.home != c && (d.tier == tierSSD || c.remote)
}

// reaches reports whether a process can read a device now.
func (c *client) reaches(d *device) bool {
	return !c.far(d) || d.home != nil && !d.home.life.dead && !d.home.life.paused && d.home.node.attached != nil
}

// access asks for a handle to write to a region by transfer, unless the process has one.
func (c *client) access(p *proc, r *cregion) bool {
	if !r.far || r.hold != nil {
		return true
	}
	req := &protocol.AccessRequest{RegionID: r.id, Epoch: r.epoch}
	var rep protocol.AccessReply
	_, _, e := c.roundTrip(p, c.sess, protocol.TypeAccess, func() []byte { return req.Append(nil) }, 0, 3*sec,
		func(b []byte) (*protocol.Error, error) {
			rep = protocol.AccessReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		})
	c.s.cover.op("access", e)
	d := c.s.deviceOf(r.mem)
	if e != nil || r.lost || d == nil || d.home.life.dead || d.home.node.grants[r.id] != r.epoch || r.hold != nil {
		return r.hold != nil
	}
	r.hold = c.s.hold(c, r)
	return true
}

// deviceOf is the device whose bytes a memory is now, nil if it is none's.
func (s *sim) deviceOf(mem *memory) *device {
	for _, d := range s.devices {
		if d.mem == mem {
			return d
		}
	}
	return nil
}

// sum is the checksum of a value.
func (v stamp) sum() uint64 { return xxh3.HashString(fmt.Sprint(v.key, v.version)) | 1 }

// tasks carries out what the leader asks for.
func (n *node) tasks(p *proc, ss *csession) {
	req := &protocol.TasksRequest{Device: n.id}
	var rep protocol.TasksReply
	_, _, e := n.c.roundTrip(p, ss, protocol.TypeTasks, func() []byte { return req.Append(nil) }, 0, 5*sec,
		func(b []byte) (*protocol.Error, error) {
			rep = protocol.TasksReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		})
	n.c.s.cover.op("tasks", e)
	if e != nil {
		return
	}
	for i := range rep.Tasks {
		if !n.task(p, ss, &rep.Tasks[i]) {
			return
		}
	}
}

// outcome of one item of a task.
type itemOutcome int

const (
	itemCopied itemOutcome = iota
	itemSkipped
	itemFailed
	itemLater // the session has ended: it is for the next
)

// task carries one out, and tells how far it has come.
func (n *node) task(p *proc, ss *csession, t *protocol.Task) bool {
	done := &protocol.TaskDoneRequest{Task: t.ID, Done: t.Done}
	for i := range t.Items {
		it := &t.Items[i]
		switch n.item(p, ss, t, it) {
		case itemCopied:
			done.Copied++
			done.Bytes += it.KVLength
		case itemSkipped:
			done.Skipped++
		case itemFailed:
			done.Failed++
		case itemLater:
			return false
		}
		done.Done++
		if last := i == len(t.Items)-1; !last && n.c.rng.IntN(4) > 0 {
			continue
		}
		if !n.through(p, ss, done) {
			return !ss.ended
		}
		done.Copied, done.Skipped, done.Failed, done.Bytes = 0, 0, 0, 0
	}
	return true
}

// through says how far a task has come. It returns false if it is not to go on.
func (n *node) through(p *proc, ss *csession, done *protocol.TaskDoneRequest) bool {
	req := *done
	var rep protocol.SuccessReply
	e := n.c.mutate(p, ss, &mutation{
		typ: protocol.TypeTaskDone, mut: &req.Mutation, body: func() []byte { return req.Append(nil) },
		read: func(b []byte) (*protocol.Error, error) {
			rep = protocol.SuccessReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		},
	})
	n.c.s.cover.op("task-done", e)
	return e == nil && rep.Success
}

// item copies one entry.
func (n *node) item(p *proc, ss *csession, t *protocol.Task, it *protocol.TaskItem) itemOutcome {
	c := n.c
	key := string(it.Key)
	if key == "" {
		return itemSkipped
	}
	got := n.read(p, it)
	if got == nil {
		return itemFailed
	}
	to, _, e := c.acquire(p, ss, key, len(got))
	switch {
	case ss.ended:
		return itemLater
	case e != nil:
		return itemFailed
	case !c.lay(p, to, got):
		return itemFailed
	}
	return c.registerCopy(p, ss, to, protocol.RegisterEntry{
		Key: it.Key, KVLength: it.KVLength, Checksum: it.Checksum, Copy: true, Of: it.Version, Slot: it.Slot, MoveFrom: t.MoveFrom,
	})
}

// read reads the bytes of an entry from the first of its locations that can be read and has the right ones. Nothing keeps
// them there meanwhile: the checksum says whether they were.
func (n *node) read(p *proc, it *protocol.TaskItem) []stamp {
	c := n.c
	for _, l := range append([]protocol.Location{it.Location}, it.Copies...) {
		d := c.s.device(deviceID(l.Device))
		if d == nil || d.mem.generation != l.Generation || !c.reaches(d) {
			continue
		}
		mem := d.mem
		var got []stamp
		for i := range (l.KVLength + pageSize - 1) / pageSize {
			c.dally(p)
			got = append(got, mem.pages[(l.Offset+l.KVOffset)/pageSize+i])
		}
		good := d.mem == mem && mem.generation == l.Generation
		for _, g := range got {
			good = good && g == got[0] && g.sum() == l.Checksum
		}
		if good {
			return got
		}
		c.s.cover.Torn++
	}
	return nil
}

// lay writes what was read to pages of an own region.
func (c *client) lay(p *proc, t run, got []stamp) bool {
	if !c.pool.beginCopy(t.r) {
		return false
	}
	for i, v := range got {
		c.s.write(c, t.r, t.page+i, v)
		c.dally(p)
	}
	c.pool.endCopy(t.r)
	return !t.r.lost
}

// registerCopy makes pages another location of an entry.
func (c *client) registerCopy(p *proc, ss *csession, t run, entry protocol.RegisterEntry) itemOutcome {
	if !c.writable(p, ss) {
		return itemLater
	}
	entry.RegionID, entry.Epoch, entry.KVOffset = t.r.id, t.r.epoch, uint64(t.page)*pageSize
	t.r.key[t.page] = string(entry.Key)
	t.r.note(t.page, t.n)
	req := &protocol.RegisterRequest{Entries: []protocol.RegisterEntry{entry}}
	var rep protocol.RegisterReply
	m := &mutation{
		typ: protocol.TypeBatchRegister, mut: &req.Mutation,
		body: func() []byte { return req.AppendAs(nil, protocol.TypeBatchRegister) },
		read: func(b []byte) (*protocol.Error, error) {
			rep = protocol.RegisterReply{}
			err := rep.DecodeAs(b, protocol.TypeBatchRegister)
			return &rep.Error, err
		},
		orphan: func(b []byte, canceled bool) { c.lateStore(t, b, canceled) },
	}
	e := c.mutate(p, ss, m)
	c.s.cover.op("copy", e)
	switch {
	case m.left:
		return itemFailed
	case e != nil && (ss.ended || e.Code == codeExpired):
		return itemLater
	case e != nil:
		c.pool.release(t)
		return itemFailed
	}
	switch r := &rep.Results[0]; r.Code {
	case protocol.CodeOK:
		c.pool.use(t)
		c.s.cover.Copied++
		return itemCopied
	case protocol.CodeNotFound, protocol.CodeDuplicate, protocol.CodeLimit:
		c.pool.release(t)
		return itemSkipped
	case protocol.CodeOverlap:
		return itemFailed // something unknown lies there, see outcome
	default:
		c.disown(t.r)
		return itemFailed
	}
}

// promote copies what was read to a free page, or to that of an entry that lies below, too, where that is faster.
func (c *client) promote(p *proc, r *protocol.LookupResult, key string, version uint64) {
	ss := c.sess
	n := int((r.KVLength + pageSize - 1) / pageSize)
	t, ok := c.pool.take(n)
	if !ok && c.node == nil {
		_, e := c.request(p, ss, &protocol.AllocRequest{
			InstanceID: c.instance, PageSize: pageSize, Size: 8 * pageSize, NeedPages: uint64(n), RunPages: uint64(n), Promote: true,
		})
		if e == nil {
			c.s.cover.MadeRoom++
			t, ok = c.pool.take(n)
		}
	}
	if !ok {
		return
	}
	v := stamp{key: key, version: version, writer: c.pid}
	got := slices.Repeat([]stamp{v}, n)
	if t.r.far || !c.writable(p, ss) || !c.lay(p, t, got) {
		c.pool.release(t)
		return
	}
	c.registerCopy(p, ss, t, protocol.RegisterEntry{
		Key: []byte(key), KVLength: r.KVLength, Checksum: r.Checksum, Copy: true, Of: r.Version,
	})
	c.s.cover.Promoted++
}

// copyTo has entries copied or moved.
func (c *client) copyTo(p *proc) {
	req := &protocol.CopyRequest{Keys: [][]byte{[]byte(c.anyKey()), []byte(c.anyKey())}, Move: c.rng.IntN(3) == 0}
	if req.Tier = tierSSD; c.rng.IntN(2) == 0 {
		req.Tier = tierDRAM
	}
	var rep protocol.CopyReply
	_, _, e := c.roundTrip(p, nil, protocol.TypeCopy, func() []byte { return req.Append(nil) }, 0, c.patience(),
		func(b []byte) (*protocol.Error, error) {
			rep = protocol.CopyReply{}
			err := rep.Decode(b)
			return &rep.Error, err
		})
	c.s.cover.op("copy-to", e)
}
