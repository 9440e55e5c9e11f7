package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"larder/cxl"
	"larder/protocol"
)

// maxValue is the length of the longest value in bytes: the pool keeps lengths in 32 bits.
const maxValue = 1<<32 - 1

// MaxShards bounds the shards of a block: how many a PrefixMatch can demand.
const MaxShards = 1024

// Attrs is what a store may say of an entry besides its bytes.
type Attrs struct {
	// Context scopes the prefix hash, and CLEAR. It must not change while a call uses it.
	Context *PrefixContext
	// HasPrefix says that Hash, Parent and Index are set: the rolling hash of the block (see PrefixHashes), that of the
	// block before it (0 for the first), and the block's place in its request.
	HasPrefix           bool
	Hash, Parent, Index uint64
	// Member and Members make the entry one shard of a block that Members ranks hold together, if Members is not 0:
	// PrefixMatch can demand all of them. Members is at most MaxShards, and Member is below it.
	Member, Members uint16
	// Replicas is on how many nodes the value is stored, see WithReplicas. 0: Config.Replicas.
	Replicas int
	// TTL is the entry's time to live under the ttl policy. 0: the pool's default.
	TTL time.Duration
}

// StoreOption changes the Attrs of a store.
type StoreOption func(*Attrs)

// WithAttrs sets all attributes at once.
func WithAttrs(a Attrs) StoreOption { return func(to *Attrs) { *to = a } }

// WithPrefix says which prefix block of a context the value is.
func WithPrefix(context *PrefixContext, hash, parent, index uint64) StoreOption {
	return func(a *Attrs) {
		a.Context, a.HasPrefix, a.Hash, a.Parent, a.Index = context, true, hash, parent, index
	}
}

// WithTTL sets the entry's time to live under the ttl policy.
func WithTTL(ttl time.Duration) StoreOption { return func(a *Attrs) { a.TTL = ttl } }

// WithShard makes the value one of several shards of a block, at most MaxShards.
func WithShard(member, members uint16) StoreOption {
	return func(a *Attrs) { a.Member, a.Members = member, members }
}

// Item is one value of PutBatch. Key and Value are not kept.
type Item struct {
	Key   []byte
	Value []byte
	Attrs Attrs
}

// PutResult says what became of one value.
type PutResult struct {
	// Stored says that the value is a new entry. If it is false and Err is nil the key was held already, and counts as
	// used; the value was not compared.
	Stored bool
	// HeldAs is the other key under which the same prefix block is held; nil unless that is why nothing was stored.
	HeldAs []byte
	// Err says why the value is not held.
	Err error
}

// Put stores a copy of value under key. If the key is held already nothing changes but its recency: keys name content.
// It makes room by eviction when it must, and goes on through leader changes, revoked regions and new sessions until
// ctx is over, or, if that has no deadline, Config.Timeout has passed. When it fails the value may be held or not, but
// nothing of the client's is lost by that. It does not allocate when it finds a free page.
//
// When ctx is over while a node that has stopped answering is being sent the value, Put comes back within some tenths of a
// second. The value is not read after that.
func (c *Client) Put(ctx context.Context, key, value []byte, opts ...StoreOption) (PutResult, error) {
	op := c.newStore()
	defer c.freeStore(op)
	op.one[0] = Item{Key: key, Value: value}
	for _, o := range opts {
		o(&op.one[0].Attrs)
	}
	op.res[0] = PutResult{}
	if err := op.checkItem(&op.one[0]); err != nil {
		return PutResult{}, fail("put", key, err)
	}
	if err := op.chunk(ctx, op.one[:], op.res[:]); err != nil {
		return PutResult{}, fail("put", key, err)
	}
	return op.res[0], fail("put", key, op.res[0].Err)
}

// PutBatch stores copies of many values as Put does, with one exchange that asks which are held, or makes room, and
// one that registers the others. Results are in the order of the items, which is also the order of their recency in
// the pool. The error is that of the first item that failed; the results say which did.
func (c *Client) PutBatch(ctx context.Context, items []Item) ([]PutResult, error) {
	res := make([]PutResult, len(items))
	return res, c.PutBatchInto(ctx, items, res)
}

// PutBatchInto is PutBatch with results in memory of the caller's, as long as items.
func (c *Client) PutBatchInto(ctx context.Context, items []Item, res []PutResult) error {
	if len(res) != len(items) {
		return fail("put batch", nil, fmt.Errorf("%w: %d results for %d items", ErrConfig, len(res), len(items)))
	}
	op := c.newStore()
	defer c.freeStore(op)
	for i := range items {
		res[i] = PutResult{}
		if err := op.checkItem(&items[i]); err != nil {
			return fail("put batch", items[i].Key, err)
		}
	}
	limit := protocol.MaxBatch
	if c.replicates(items) {
		limit /= 1 + protocol.MaxCopies // an entry of the request for each location
	}
	for from := 0; from < len(items); {
		n := sameContext(items[from:min(len(items), from+limit)])
		err := op.chunk(ctx, items[from:from+n], res[from:from+n])
		if errors.Is(err, ErrNoSpace) && n > 1 {
			limit = n / 2 // the batch is larger than what can be had at once: its first part makes room for the rest
			continue
		}
		if err != nil {
			for i := from; i < len(items); i++ {
				if !res[i].Stored && res[i].Err == nil {
					res[i].Err = err
				}
			}
			return fail("put batch", items[from].Key, err)
		}
		from += n
	}
	for i := range res {
		if res[i].Err != nil {
			return fail("put batch", items[i].Key, res[i].Err)
		}
	}
	return nil
}

// sameContext returns how many items from the first on share its context: one REGISTER has one.
func sameContext(items []Item) int {
	first := items[0].Attrs.Context
	for i := range items {
		if c := items[i].Attrs.Context; c != first && (c == nil || first == nil || *c != *first) {
			return i
		}
	}
	return len(items)
}

// storeOp is the state of one Put or PutBatch. It is reused.
type storeOp struct {
	replyBuf
	c    *Client
	one  [1]Item
	res  [1]PutResult
	want want

	items []Item
	out   []PutResult
	todo  []int // items that are neither held nor refused yet
	keys  [][]byte
	pages []int
	again []int // those of todo that have to be tried once more

	typ     protocol.Type
	req     protocol.RegisterRequest
	rep     protocol.RegisterReply
	extras  []extra
	entries []placed // per entry of req
	far     sending
	left    bool // the runs were handed to the background
	sends   int  // how often REGISTER was sent

	of      []CopyItem // per item, the entry that it is a copy of; nil for new entries
	skips   []bool     // per item, whether the leader said that there is nothing to copy
	skipped []bool     // of which skips is a part
	spare   bool       // take pages that nobody misses, and do without if there are none
	exists  keysMsg
}

// placed says what an entry of a request is.
type placed struct {
	k    int  // its place in todo
	t    *run // where it lies; the zero run if it is only touched. Whoever ends it puts the zero run there
	sent int  // its write in storeOp.far, plus 1; 0 if its region is mapped
	bad  bool // that failed
	copy bool // it is a replica of the entry before
}

func (c *Client) newStore() *storeOp {
	op := c.stores.Get().(*storeOp) //nolint:forcetypeassert // the pool holds nothing else
	op.c = c
	return op
}

// freeStore gives an op back, without what it knows of the caller's memory.
func (c *Client) freeStore(op *storeOp) {
	op.one[0] = Item{}
	op.items, op.out = nil, nil
	op.of, op.skips, op.skipped, op.spare = nil, nil, nil, false
	clear(op.keys)
	clear(op.req.Entries)
	clear(op.entries)
	clear(op.extras)
	op.extras = op.extras[:0]
	op.far.reset()
	op.want.keys = nil
	c.stores.Put(op)
}

func (op *storeOp) appendTo(b []byte) []byte {
	op.sends++
	return op.req.AppendAs(b, op.typ)
}

func (op *storeOp) mutation() *protocol.Mutation { return &op.req.Mutation }

func (op *storeOp) decode(p *[]byte) (*protocol.Error, error) {
	return &op.rep.Error, op.rep.DecodeAs(op.own(p), op.typ)
}

func (op *storeOp) checkItem(it *Item) error {
	switch {
	case op.c.life.Err() != nil:
		return ErrClosed
	case len(it.Key) == 0 || len(it.Key) > protocol.MaxKeyBytes:
		return fmt.Errorf("%w: a key has 1 to %d bytes", ErrConfig, protocol.MaxKeyBytes)
	case len(it.Value) == 0 || len(it.Value) > maxValue:
		return fmt.Errorf("%w: a value has 1 to %d bytes", ErrConfig, uint64(maxValue))
	}
	return it.Attrs.check()
}

// check refuses attributes that no server takes, or that PrefixMatch could never ask for.
func (a *Attrs) check() error {
	switch {
	case a.Members > MaxShards:
		return fmt.Errorf("%w: a block has at most %d shards, not %d", ErrConfig, MaxShards, a.Members)
	case a.Replicas < 0 || a.Replicas > 1+protocol.MaxCopies:
		return fmt.Errorf("%w: %d replicas are not 1 to %d", ErrConfig, a.Replicas, 1+protocol.MaxCopies)
	case a.Members != 0 && a.Member >= a.Members:
		return fmt.Errorf("%w: shard %d of %d: the first is 0", ErrConfig, a.Member, a.Members)
	}
	return nil
}

// chunk stores items that fit one batch and share a context.
func (op *storeOp) chunk(ctx context.Context, items []Item, out []PutResult) error {
	c := op.c
	op.items, op.out, op.todo = items, out, op.todo[:0]
	for i := range items {
		if out[i].Err == nil && !out[i].Stored && (op.of == nil || !op.skips[i]) {
			op.todo = append(op.todo, i)
		}
	}
	var deadline int64
	for n := 0; len(op.todo) > 0; n++ {
		if n > 0 {
			c.counters.restarts.Add(1)
			if deadline == 0 {
				deadline = c.cfg.Clock() + c.cfg.Timeout.Nanoseconds()
			}
			if err := sleep(ctx, backoff(n-1)); err != nil {
				return err
			}
			if c.cfg.Clock() > deadline {
				return refused(protocol.CodeTimeout, "regions were taken away, or the session ended, again and again")
			}
		}
		s, err := c.session(ctx)
		if err != nil {
			return err
		}
		err = op.round(ctx, s)
		if err != nil && !errors.Is(err, ErrSessionExpired) && protocol.CodeOf(err) != protocol.CodeSessionExpired {
			return err
		}
	}
	return nil
}

// session returns the present session, once there is one that has not ended.
func (c *Client) session(ctx context.Context) (*session, error) {
	if c.life.Err() != nil {
		return nil, ErrClosed
	}
	if s := c.sess.Load(); !s.ended() {
		return s, nil
	}
	cn, err := c.conn(ctx)
	if err != nil {
		return nil, err
	}
	return cn.sess.Load(), nil
}

// round tries to store everything in todo, and leaves there what has to be tried again.
func (op *storeOp) round(ctx context.Context, s *session) error {
	c, w := op.c, &op.want
	op.keys, op.pages, op.again, op.left, op.sends = op.keys[:0], op.pages[:0], op.again[:0], false, 0
	for _, i := range op.todo {
		op.keys = append(op.keys, op.items[i].Key)
		op.pages = append(op.pages, c.pagesOf(len(op.items[i].Value)))
	}
	w.init(op.keys, op.pages)
	if op.of != nil {
		w.keys, w.same = nil, 0 // that they are held is known
	}
	if op.spare {
		if !c.takeFast(ctx, s, w) {
			op.todo = op.todo[:0]
			return nil
		}
	} else if err := c.acquire(ctx, w); err != nil {
		return err
	}
	err := op.fill(ctx, s)
	if err == nil {
		op.typ = protocol.TypeBatchRegister // also for one: only a batch tells the entry's code from the request's
		if len(op.req.Entries) > 0 {
			if err = c.mutate(ctx, s, op.typ, op, 0); err == nil {
				err = op.outcome()
			}
		}
	}
	if op.left {
		return err
	}
	c.pool.putBack(w)
	op.putExtras()
	if err == nil {
		op.todo = append(op.todo[:0], op.again...)
	}
	return err
}

// pagesOf is how many pages a value of size bytes takes.
func (c *Client) pagesOf(size int) int {
	return int((uint64(size) + c.cfg.PageSize - 1) / c.cfg.PageSize) //nolint:gosec // bounded by maxValue
}

// fill copies the values that are missing into their pages, and makes the request that registers them.
func (op *storeOp) fill(ctx context.Context, s *session) error {
	c, w := op.c, &op.want
	if op.of == nil && !w.known && len(op.todo) > 1 {
		if err := op.ask(ctx); err != nil {
			return err
		}
	}
	if op.of == nil && c.replicates(op.items) {
		op.replicate(ctx, s)
	}
	op.req.Context = op.items[op.todo[0]].Attrs.Context
	op.req.Entries, op.entries = op.req.Entries[:0], op.entries[:0]
	if err := c.writable(ctx, s); err != nil {
		return err
	}
	for k, i := range op.todo {
		it := &op.items[i]
		e := protocol.RegisterEntry{Key: it.Key, Touch: w.found[k]}
		if n := c.replicas(&it.Attrs); n > 1 && op.of == nil {
			e.Replicas = uint64(n)
		}
		if !e.Touch {
			ok, err := op.write(&w.runs[k], k, it.Value, &e)
			if err != nil {
				op.finish(ctx)
				return err
			}
			if !ok {
				op.again = append(op.again, i)
				continue
			}
			it.Attrs.describe(&e)
			if op.of != nil {
				op.of[i].describe(&e)
			}
		} else {
			op.entries = append(op.entries, placed{k: k, t: &w.runs[k]})
		}
		op.req.Entries = append(op.req.Entries, e)
		op.writeExtras(k, it)
	}
	op.finish(ctx)
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // callers wrap
	}
	op.announce()
	return c.writable(ctx, s) // a copy that ended after the deadline is not registered before the session is confirmed
}

// writeExtras writes the replicas of an item, and puts them behind its entry. One that cannot be written is left out.
func (op *storeOp) writeExtras(k int, it *Item) {
	for i := range op.extras {
		if op.extras[i].k != k {
			continue
		}
		e := protocol.RegisterEntry{Key: it.Key, Copy: true}
		if ok, err := op.write(&op.extras[i].run, k, it.Value, &e); ok && err == nil {
			op.entries[len(op.entries)-1].copy = true
			op.req.Entries = append(op.req.Entries, e)
		}
	}
}

// write copies a value into its run, or plans to send it there, and fills in where it lies.
func (op *storeOp) write(t *run, k int, value []byte, e *protocol.RegisterEntry) (ok bool, err error) {
	c, at := op.c, placed{k: k, t: t}
	if t.n > 0 && t.r.far {
		if !op.far.add(c.pool, *t, value) {
			return false, nil
		}
		if at.sent = len(op.far.runs); c.cfg.Checksums {
			e.Checksum = checksum(value)
		}
		t.place(e, len(value))
	} else if ok, err = c.write(*t, value, e); err != nil || !ok {
		return false, err
	}
	op.entries = append(op.entries, at)
	return true, nil
}

// finish sends the values to regions that are not mapped, and strikes those out that did not arrive: they are tried again
// elsewhere.
func (op *storeOp) finish(ctx context.Context) {
	if len(op.far.runs) == 0 {
		return
	}
	c := op.c
	if len(op.extras) > 0 {
		var cancel context.CancelFunc
		ctx, cancel = c.half(ctx, op.far.bytes)
		defer cancel()
	}
	op.far.run(ctx, c)
	for j := range op.entries {
		x := &op.entries[j]
		if x.sent == 0 {
			continue
		}
		fate := op.far.fate(c, x.sent-1)
		x.bad = fate != written
		if fate == loose {
			c.pool.mu.Lock()
			c.pool.busy -= x.t.n
			c.pool.mu.Unlock()
			*x.t = run{}
		}
	}
	op.far.reset()
	kept, without := 0, -1
	for j, x := range op.entries {
		if x.bad && !x.copy {
			op.again = append(op.again, op.todo[x.k])
			without = x.k
		}
		if x.bad || x.k == without { // a replica alone is nothing
			continue
		}
		op.entries[kept], op.req.Entries[kept] = x, op.req.Entries[j]
		kept++
	}
	op.entries, op.req.Entries = op.entries[:kept], op.req.Entries[:kept]
}

// ask finds out which keys are held, when free pages suffice and no master was asked for others.
func (op *storeOp) ask(ctx context.Context) error {
	m := &op.exists
	m.typ = protocol.TypeBatchExists
	m.req = protocol.KeysRequest{Keys: op.keys}
	defer func() { m.req.Keys = nil }()
	if _, _, err := op.c.roundTrip(ctx, nil, m.typ, m, 0); err != nil {
		return err
	}
	copy(op.want.found, m.rep.Results)
	return nil
}

// announce notes which key each page is about to hold, so that news of its end finds it.
func (op *storeOp) announce() {
	p := op.c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	for j := range op.entries {
		if t := *op.entries[j].t; t.n > 0 {
			t.r.keys[t.page] = keyHash(op.req.Entries[j].Key)
		}
	}
}

// describe puts the attributes into an entry.
func (a *Attrs) describe(e *protocol.RegisterEntry) {
	e.HasPrefix, e.Hash, e.Parent, e.Index = a.HasPrefix, a.Hash, a.Parent, a.Index
	e.TTLMS = uint64(max(a.TTL, 0) / time.Millisecond)
	if a.Members != 0 {
		e.Group = uint64(a.Member)<<16 | uint64(a.Members)
	}
}

// write copies a value into its run and fills in where it lies. It reports false if the region was given up.
func (c *Client) write(t run, value []byte, e *protocol.RegisterEntry) (ok bool, err error) {
	if t.n == 0 || !c.pool.beginCopy(t.r) {
		return false, nil
	}
	dst := t.bytes(len(value))
	if c.cfg.Checksums {
		var sum uint64
		sum, err = cxl.CopyInSum(dst, value)
		e.Checksum = asChecksum(sum)
	} else {
		err = cxl.CopyIn(dst, value)
	}
	if err == nil {
		err = c.publish(t, dst)
	}
	c.pool.endCopy(t.r)
	if err != nil {
		c.disown(t.r)
		c.counters.truncated.Add(1)
		return false, fmt.Errorf("write to device %d: %w", t.r.dev.id, err)
	}
	t.place(e, len(value))
	c.counters.bytesWritten.Add(uint64(len(value)))
	return true, nil
}

// publish makes what was written readable by every host and, where no checksum would find out, safe from power loss.
func (c *Client) publish(t run, b []byte) error {
	if err := t.r.mapping.Publish(b); err != nil {
		return err //nolint:wrapcheck // callers wrap
	}
	if c.cfg.Checksums {
		return nil
	}
	return t.r.mapping.Persist(b) //nolint:wrapcheck // callers wrap
}

// place fills in where an entry lies.
func (t run) place(e *protocol.RegisterEntry, size int) {
	e.RegionID, e.Epoch = t.r.id, t.r.epoch
	e.KVOffset, e.KVLength = t.offset(), uint64(size) //nolint:gosec // not negative
}

// checksum is an entry's checksum.
func checksum(b []byte) uint64 { return asChecksum(xxh3.Hash(b)) }

// asChecksum is the checksum of an entry with an XXH3; 0 means none.
func asChecksum(h uint64) uint64 { return max(h, 1) }

// outcome reads the answer to REGISTER: which pages are in use now, and which items are to be tried again.
func (op *storeOp) outcome() error {
	c := op.c
	if len(op.rep.Results) != len(op.req.Entries) {
		return refused(protocol.CodeInternal, "the master answered for another number of entries than were registered")
	}
	var lost []*region
	c.pool.mu.Lock()
	c.pool.doubtful = c.pool.doubtful || op.sends > 1
	for j := range op.rep.Results {
		t, i := op.entries[j].t, op.todo[op.entries[j].k]
		r := &op.rep.Results[j]
		if op.entries[j].copy {
			lost = op.outcomeOfExtra(t, r, lost)
			continue
		}
		if op.of != nil && skip(r) {
			op.skips[i] = true
			continue
		}
		switch verdict(r) {
		case held:
			op.holds(t, i, r)
		case elsewhere:
			if t.n > 0 && !slices.Contains(lost, t.r) {
				lost = append(lost, t.r)
			}
			op.again = append(op.again, i)
		case occupied:
			// Something lies there that this client does not know: the pages stay taken until a reconnect tells.
			c.pool.doubtful = true
			c.pool.busy -= t.n
			*t = run{}
			op.again = append(op.again, i)
		case vanished:
			op.again = append(op.again, i)
		case no:
			op.out[i].Err = refused(r.Code, "")
		}
	}
	c.pool.mu.Unlock()
	slices.Sort(op.again)
	for _, r := range lost {
		c.disown(r)
	}
	return nil
}

// holds notes that an item is held: in t, if it is new.
func (op *storeOp) holds(t *run, i int, r *protocol.RegisterResult) {
	c := op.c
	op.out[i].Stored = r.IsNew
	if !r.IsNew {
		c.counters.deduplicated.Add(1)
		if len(r.ExistingKey) > 0 && !bytes.Equal(r.ExistingKey, op.items[i].Key) {
			op.out[i].HeldAs = slices.Clone(r.ExistingKey)
		}
		return
	}
	c.pool.busy -= t.n
	c.pool.use(*t)
	*t = run{}
	if op.of != nil {
		c.counters.copied.Add(1)
	} else {
		c.counters.stored.Add(1)
	}
}

// outcomeOfExtra reads the answer to the registration of a replica. What was refused is done without.
func (op *storeOp) outcomeOfExtra(t *run, r *protocol.RegisterResult, lost []*region) []*region {
	p := op.c.pool
	switch {
	case r.Code == protocol.CodeOK && r.IsNew:
		p.busy -= t.n
		p.use(*t)
		*t = run{}
		op.c.counters.replicas.Add(1)
	case verdict(r) == occupied:
		p.doubtful = true
		p.busy -= t.n
		*t = run{}
	case verdict(r) == elsewhere && !slices.Contains(lost, t.r):
		return append(lost, t.r)
	}
	return lost
}

// verdicts on an entry that was registered.
const (
	held      = iota // under this key, or as the same block under another
	elsewhere        // the region is no longer the client's
	occupied         // another entry lies there
	vanished         // it was held when the master was asked, and is not any more
	no               // refused for good
)

func verdict(r *protocol.RegisterResult) int {
	switch r.Code {
	case protocol.CodeOK, protocol.CodeDuplicate:
		return held
	case protocol.CodeStaleEpoch, protocol.CodeStaleGeneration, protocol.CodeRevoking, protocol.CodeNotOwner:
		return elsewhere
	case protocol.CodeOverlap:
		return occupied
	case protocol.CodeNotFound:
		return vanished
	default:
		return no
	}
}

// orphan takes the runs along: their pages are neither free nor used until it is known whether the REGISTER worked.
func (op *storeOp) orphan() outcome {
	op.left = true
	p, typ := op.c.pool, op.typ
	runs := make([]run, len(op.entries)) // per entry
	p.mu.Lock()
	for j := range op.entries {
		runs[j] = *op.entries[j].t
		*op.entries[j].t = run{}
	}
	p.mu.Unlock()
	p.putBack(&op.want) // what was not registered
	op.putExtras()
	return func(payload []byte, canceled bool) {
		var rep protocol.RegisterReply
		known := payload != nil && rep.DecodeAs(payload, typ) == nil && len(rep.Results) == len(runs)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.doubtful = true
		for j, t := range runs {
			p.busy -= t.n
			switch {
			case t.n == 0:
			case canceled, known && !rep.Results[j].IsNew && rep.Results[j].Code != protocol.CodeOverlap:
				p.release(t)
			case known && rep.Results[j].IsNew:
				p.use(t)
			}
		}
	}
}
