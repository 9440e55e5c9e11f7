package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

// Alloc is memory of the pool that the caller fills in place and then stores. Where the pool's memory is not mapped here
// it is memory of this process, which Store sends there. It is for one goroutine at a time; its bytes may be written by
// many.
type Alloc struct {
	c    *Client
	s    *session
	key  []byte
	size int
	run  run

	sent bool   // its bytes are in the pool's memory, which is not mapped here
	sum  uint64 // their checksum; 0 = none

	mu    sync.Mutex
	bytes []byte
	done  bool
}

// Alloc reserves size bytes for the value of key. Every Alloc ends with Store or Abort.
//
// The region that it lies in may be taken away while the caller writes: Store then fails with ErrRevoked (or
// ErrSessionExpired), and what the caller has written, and still writes, goes nowhere. Repeat Alloc then.
func (c *Client) Alloc(ctx context.Context, key []byte, size int) (*Alloc, error) {
	a, err := c.alloc(ctx, key, size, true)
	return a, fail("alloc", key, err)
}

// AllocBatch reserves memory for several values, of these sizes in bytes, with one exchange that makes room for all of them. Their
// keys are named when they are stored: see StoreAs. Either all are reserved or none is.
func (c *Client) AllocBatch(ctx context.Context, sizes []int) ([]*Alloc, error) {
	if len(sizes) == 0 {
		return nil, nil
	}
	if len(sizes) > protocol.MaxBatch {
		return nil, fail("alloc batch", nil, fmt.Errorf("%w: %d values, at most %d", ErrConfig, len(sizes), protocol.MaxBatch))
	}
	for _, n := range sizes {
		if n <= 0 || n > maxValue {
			return nil, fail("alloc batch", nil, fmt.Errorf("%w: a value has 1 to %d bytes", ErrConfig, uint64(maxValue)))
		}
	}
	all, err := c.allocAll(ctx, nil, sizes, true)
	return all, fail("alloc batch", nil, err)
}

// alloc reserves memory for one value. Where the pool's is not mapped here there are bytes to fill only if staging.
func (c *Client) alloc(ctx context.Context, key []byte, size int, staging bool) (*Alloc, error) {
	if err := c.checkKey(key); err != nil {
		return nil, err
	}
	if size <= 0 || size > maxValue {
		return nil, fmt.Errorf("%w: a value has 1 to %d bytes", ErrConfig, uint64(maxValue))
	}
	all, err := c.allocAll(ctx, key, []int{size}, staging)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// allocAll reserves memory for values of these sizes, all of them for one key if there is any.
func (c *Client) allocAll(ctx context.Context, key []byte, sizes []int, staging bool) ([]*Alloc, error) {
	for {
		s, err := c.session(ctx)
		if err != nil {
			return nil, err
		}
		if err := c.writable(ctx, s); errors.Is(err, ErrSessionExpired) {
			continue
		} else if err != nil {
			return nil, err
		}
		runs, err := c.acquireAll(ctx, sizes)
		if err != nil {
			return nil, err
		}
		if runs == nil {
			continue // a region went while its run was on its way
		}
		all := make([]*Alloc, len(sizes))
		for i, size := range sizes {
			t := runs[i]
			a := &Alloc{c: c, s: s, key: append([]byte(nil), key...), size: size, run: t}
			switch {
			case t.r.far && !staging:
			case t.r.far:
				a.bytes = make([]byte, size)
			default:
				a.bytes = t.bytes(size)
			}
			all[i] = a
		}
		return all, nil
	}
}

// acquireAll gets runs, each counted as an open Alloc of its region; nil if one was given up meanwhile. They are asked for by the
// number of pages, not by key: the caller wants memory even if the key is held, which Store tells.
func (c *Client) acquireAll(ctx context.Context, sizes []int) ([]run, error) {
	var w want
	pages := make([]int, len(sizes))
	for i, n := range sizes {
		pages[i] = c.pagesOf(n)
	}
	w.init(nil, pages)
	w.same = 0
	if err := c.acquire(ctx, &w); err != nil {
		return nil, err
	}
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy -= w.need // the user may take any time with it
	for _, t := range w.runs {
		if t.r == nil || t.r.lost != nil {
			for _, t := range w.runs {
				p.release(t)
			}
			return nil, nil
		}
	}
	for _, t := range w.runs {
		t.r.allocs++
	}
	return w.runs, nil
}

// Region returns where the memory lies: the number of the region, which is this client's, the offset there and the region's length in
// bytes.
func (a *Alloc) Region() (id, offset, length uint64) {
	return a.run.r.id, a.run.offset(), a.run.r.length
}

// Bytes is the memory to fill: its length is the size asked for, and its contents are arbitrary. It must not be touched
// after Store or Abort.
func (a *Alloc) Bytes() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bytes
}

// Store registers what was written, without copying it. It ends the Alloc in any case.
func (a *Alloc) Store(ctx context.Context, opts ...StoreOption) (PutResult, error) {
	if err := a.c.checkKey(a.key); err != nil && !errors.Is(err, ErrClosed) {
		a.Abort()
		return PutResult{}, fail("store", a.key, err)
	}
	op := a.c.newStore()
	defer a.c.freeStore(op)
	op.one[0] = Item{Key: a.key}
	for _, o := range opts {
		o(&op.one[0].Attrs)
	}
	if err := op.one[0].Attrs.check(); err != nil {
		a.Abort()
		return PutResult{}, fail("store", a.key, err)
	}
	if !a.finish() {
		return PutResult{}, fail("store", a.key, fmt.Errorf("%w: the Alloc has ended", ErrConfig))
	}
	res, err := op.register(ctx, a)
	return res, fail("store", a.key, err)
}

// StoreAs is Store under a key that is named only now.
func (a *Alloc) StoreAs(ctx context.Context, key []byte, opts ...StoreOption) (PutResult, error) {
	a.key = append([]byte(nil), key...)
	return a.Store(ctx, opts...)
}

// Abort gives the memory back unused. It does nothing after Store.
func (a *Alloc) Abort() {
	if !a.finish() {
		return
	}
	p := a.c.pool
	p.mu.Lock()
	p.release(a.run)
	p.mu.Unlock()
	p.endAlloc(a.run.r)
}

// finish ends the user's part. It reports false if that was over before.
func (a *Alloc) finish() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.done
	a.done = true
	return !was
}

// register makes the REGISTER of an Alloc. The region counts the Alloc until the bytes are published, so that it is
// not unmapped before.
func (op *storeOp) register(ctx context.Context, a *Alloc) (PutResult, error) {
	c, r := a.c, a.run.r
	e := protocol.RegisterEntry{Key: a.key}
	err := c.seal(ctx, a, &e)
	c.pool.endAlloc(r)
	t := a.run
	op.items, op.out, op.todo = op.one[:], op.res[:], append(op.todo[:0], 0)
	op.res[0] = PutResult{}
	op.again, op.left, op.sends = op.again[:0], false, 0
	op.want.runs = append(op.want.runs[:0], t)
	c.pool.mu.Lock()
	c.pool.busy += t.n
	c.pool.mu.Unlock()
	if err == nil {
		op.one[0].Attrs.describe(&e)
		op.req.Context = op.one[0].Attrs.Context
		op.req.Entries, op.entries = append(op.req.Entries[:0], e), append(op.entries[:0], placed{t: &op.want.runs[0]})
		op.typ = protocol.TypeBatchRegister
		op.replicateAlloc(ctx, a, &op.req.Entries[0])
		op.announce()
		if err = c.mutate(ctx, a.s, op.typ, op, 0); err == nil {
			err = op.outcome()
		}
	}
	if !op.left {
		c.pool.putBack(&op.want)
		op.putExtras()
	}
	switch {
	case err != nil:
		return PutResult{}, err
	case len(op.again) > 0:
		return PutResult{}, ErrRevoked
	}
	return op.res[0], op.res[0].Err
}

// replicateAlloc writes the replicas of what the user wrote, which is to be registered as e and stays where it is meanwhile.
func (op *storeOp) replicateAlloc(ctx context.Context, a *Alloc, e *protocol.RegisterEntry) {
	p, r := op.c.pool, a.run.r
	if !op.c.replicates(op.one[:]) {
		return
	}
	if r.far && a.bytes == nil {
		if a.bytes = op.c.readBack(ctx, a); a.bytes == nil {
			return
		}
		if op.c.cfg.Checksums {
			e.Checksum = checksum(a.bytes) // layers that came out of order have left none
		}
	}
	if !r.far {
		if !p.beginCopy(r) {
			return
		}
		defer p.endCopy(r)
	}
	op.pages, op.want.found = append(op.pages[:0], a.run.n), append(op.want.found[:0], false)
	op.replicate(ctx, a.s)
	op.writeExtras(0, &Item{Key: a.key, Value: a.bytes})
	op.finish(ctx)
}

// readBack reads what was written layer by layer to a region that is not mapped: the layers are their owner's again, and the
// replicas need them. It returns nil if it cannot, or if that is not what was written.
func (c *Client) readBack(ctx context.Context, a *Alloc) []byte {
	p, r := c.pool, a.run.r
	p.mu.Lock()
	w := r.access
	p.mu.Unlock()
	if w == nil {
		return nil
	}
	size := uint64(a.size) //nolint:gosec // positive
	ctx, cancel := c.half(ctx, size)
	defer cancel()
	b := make([]byte, a.size)
	f := c.submit(ctx, []transfer.Request{{
		Op: transfer.Read, Segment: w.seg.Segment, Buffer: w.buffer, Offset: w.base + a.run.offset(), Local: b,
	}}, size)
	f.wait(ctx)
	if _, err := f.status(0); err != nil {
		c.counters.remoteFaults.Add(1)
		c.cfg.Logger.Info("a value is stored without replicas: it cannot be read back", slog.Any("error", err))
		return nil
	}
	if a.sum != 0 && checksum(b) != a.sum {
		c.counters.checksumFaults.Add(1)
		return nil
	}
	return b
}

// seal makes what the user wrote readable by others and says where it lies.
func (c *Client) seal(ctx context.Context, a *Alloc, e *protocol.RegisterEntry) error {
	t := a.run
	if err := c.writable(ctx, a.s); err != nil {
		return err
	}
	if t.r.far {
		return c.sealFar(ctx, a, e)
	}
	if !c.pool.beginCopy(t.r) {
		return c.whyLost(t.r)
	}
	b := t.bytes(a.size)
	err := c.publish(t, b)
	if err == nil && c.cfg.Checksums {
		err = cxl.Guard(func() { e.Checksum = checksum(b) })
	}
	c.pool.endCopy(t.r)
	if err != nil {
		c.disown(t.r)
		return fmt.Errorf("publish on device %d: %w", t.r.dev.id, err)
	}
	t.place(e, a.size)
	c.counters.bytesWritten.Add(uint64(a.size)) //nolint:gosec // positive
	return nil
}

// sealFar sends what the user wrote to a region that is not mapped.
func (c *Client) sealFar(ctx context.Context, a *Alloc, e *protocol.RegisterEntry) error {
	if a.sent {
		if !c.pool.beginCopy(a.run.r) {
			return c.whyLost(a.run.r)
		}
		c.pool.endCopy(a.run.r)
		e.Checksum = a.sum
		a.run.place(e, a.size)
		return nil
	}
	var o sending
	if !o.add(c.pool, a.run, a.bytes) {
		return c.whyLost(a.run.r)
	}
	if c.cfg.Checksums {
		e.Checksum = checksum(a.bytes)
	}
	o.run(ctx, c)
	a.run.place(e, a.size)
	switch o.fate(c, 0) {
	case written:
		return nil
	case loose:
		a.run = run{} // its pages are not the store's any more
	}
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // callers wrap
	}
	return ErrRevoked // the region was given back: another Alloc gets another one
}

// whyLost says why a region is not the client's any more.
func (c *Client) whyLost(r *region) error {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	if errors.Is(r.lost, ErrSessionExpired) {
		return ErrSessionExpired
	}
	return ErrRevoked
}
