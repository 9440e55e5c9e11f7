package client

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/zeebo/xxh3"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

const (
	// maxLayers bounds the layers of a value: models have a few hundred.
	maxLayers = 4096
	// copiers bounds the copies that one LayerWriter or LayerReader has under way: two saturate memory, and as many more hide
	// the way to a node.
	copiers = 4
)

// layout is how the layers of a value lie in it: one behind the other.
type layout struct {
	sizes   []int
	offsets []int
	total   int
}

func newLayout(sizes []int) (*layout, error) {
	l := &layout{sizes: append([]int(nil), sizes...)}
	if len(sizes) == 0 || len(sizes) > maxLayers {
		return nil, fmt.Errorf("%w: a value has 1 to %d layers", ErrConfig, maxLayers)
	}
	for i, n := range sizes {
		if n <= 0 || n > maxValue-l.total {
			return nil, fmt.Errorf("%w: layer %d of %d bytes: all of them together have at most %d", ErrConfig, i, n, uint64(maxValue))
		}
		l.offsets = append(l.offsets, l.total)
		l.total += n
	}
	return l, nil
}

// layer is what has become of one.
type layer struct {
	launched bool
	done     chan struct{} // closed when err is known
	err      error
	batch    *transfer.Batch // that sent it, if it may still land; else nil
	dst      []byte          // of a LayerReader
}

// errEnded says that a layer was launched, and not begun before everything ended.
var errEnded = errors.New("everything has ended before its turn")

// layers are those of one value, some of which are under way.
type layers struct {
	*layout
	room chan struct{}           // a token for each copy
	ctx  context.Context         //nolint:containedctx // of what is under way
	stop context.CancelCauseFunc // ends it: what has not begun then does not begin

	mu     sync.Mutex
	all    []layer
	open   sync.WaitGroup
	closed bool
}

func (l *layers) init(c *Client, o *layout) {
	l.ctx, l.stop = context.WithCancelCause(c.life)
	l.layout, l.room, l.all = o, make(chan struct{}, copiers), make([]layer, len(o.sizes))
	for i := range l.all {
		l.all[i].done = make(chan struct{})
	}
}

// launch begins with layer i, whose memory has n bytes: move is called in a goroutine of its own, once there is room.
func (l *layers) launch(i, n int, move func(ctx context.Context, x *layer) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case i < 0 || i >= len(l.all):
		return fmt.Errorf("%w: layer %d of %d", ErrConfig, i, len(l.all))
	case n != l.sizes[i]:
		return fmt.Errorf("%w: layer %d has %d bytes, not %d", ErrConfig, i, l.sizes[i], n)
	case l.closed || l.all[i].launched:
		return fmt.Errorf("%w: layer %d was launched before, or everything has ended", ErrConfig, i)
	}
	x := &l.all[i]
	x.launched = true
	l.open.Go(func() {
		defer close(x.done)
		select {
		case l.room <- struct{}{}:
			defer func() { <-l.room }()
		case <-l.ctx.Done():
		}
		if x.err = context.Cause(l.ctx); x.err == nil {
			x.err = move(l.ctx, x)
		}
	})
	return nil
}

// wait waits for layer i, and returns what it failed with.
func (l *layers) wait(ctx context.Context, i int) error {
	if i < 0 || i >= len(l.all) {
		return fmt.Errorf("%w: layer %d of %d", ErrConfig, i, len(l.all))
	}
	select {
	case <-l.all[i].done:
		return l.all[i].err
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
}

// end lets nothing be launched any more, and waits for what was launched. When ctx is over it waits for what is under way
// alone. It reports false if that was so before.
func (l *layers) end(ctx context.Context) bool {
	l.mu.Lock()
	was := l.closed
	l.closed = true
	l.mu.Unlock()
	unwatch := context.AfterFunc(ctx, func() { l.stop(ctx.Err()) })
	l.open.Wait()
	unwatch()
	l.stop(errEnded)
	return !was
}

// leave is end for a value that is not wanted any more.
func (l *layers) leave() bool {
	l.stop(errEnded)
	return l.end(l.ctx)
}

// fault is why not all layers are there; nil if they are. Everything has ended.
func (l *layers) fault() error {
	for i := range l.all {
		if x := &l.all[i]; !x.launched {
			return fmt.Errorf("%w: layer %d was not launched", ErrConfig, i)
		} else if x.err != nil {
			return x.err
		}
	}
	return nil
}

// LayerWriter stores a value layer by layer, while later layers are being computed. Nothing of it is visible before Finish.
// Its methods may be called concurrently. Every LayerWriter ends with Finish or Abort.
type LayerWriter struct {
	layers
	c    *Client
	a    *Alloc
	opts []StoreOption

	sumMu sync.Mutex
	sum   *xxh3.Hasher // of the layers that were launched, if it is needed and they come in order
	next  int
}

// PutLayers reserves memory for the value of key, whose layers have these sizes in bytes and lie one behind the other. The
// value is an entry as any other: Get reads all of it, GetLayers its layers.
//
// The region that it lies in may be taken away meanwhile: layers then fail with ErrRevoked (or ErrSessionExpired), and so
// does Finish. Repeat PutLayers then. With Config.Checksums a value whose region is not mapped here has a checksum only if
// its layers are launched in order, or it has replicas.
func (c *Client) PutLayers(ctx context.Context, key []byte, sizes []int, opts ...StoreOption) (*LayerWriter, error) {
	o, err := newLayout(sizes)
	if err != nil {
		return nil, fail("put layers", key, err)
	}
	a, err := c.alloc(ctx, key, o.total, false)
	if err != nil {
		return nil, fail("put layers", key, err)
	}
	w := &LayerWriter{c: c, a: a, opts: opts}
	w.init(c, o)
	if c.cfg.Checksums && a.run.r.far {
		w.sum = xxh3.New()
	}
	return w, nil
}

// Launch begins to copy layer i to the pool. b, which has the layer's size, must not change until Wait has returned.
func (w *LayerWriter) Launch(i int, b []byte) error {
	if !w.a.run.r.far {
		return fail("launch layer", w.a.key, w.launch(i, len(b), func(context.Context, *layer) error {
			return cxl.CopyIn(w.a.bytes[w.offsets[i]:w.offsets[i]+len(b)], b) //nolint:wrapcheck // says what to do
		}))
	}
	err := w.launch(i, len(b), func(ctx context.Context, x *layer) error {
		return w.send(ctx, x, uint64(w.offsets[i]), b) //nolint:gosec // not negative
	})
	if err == nil {
		w.hash(i, b)
	}
	return fail("launch layer", w.a.key, err)
}

// hash takes a layer into the checksum, unless it comes out of order.
func (w *LayerWriter) hash(i int, b []byte) {
	w.sumMu.Lock()
	defer w.sumMu.Unlock()
	if w.sum == nil {
		return
	}
	if i != w.next {
		w.sum = nil
		return
	}
	w.next++
	_, _ = w.sum.Write(b) // it cannot fail
}

// send writes a layer by transfer. When one has failed the others are not wanted any more.
func (w *LayerWriter) send(ctx context.Context, x *layer, offset uint64, b []byte) error {
	err := w.sendOne(ctx, x, offset, b)
	if err != nil {
		w.stop(err)
	}
	return err
}

func (w *LayerWriter) sendOne(ctx context.Context, x *layer, offset uint64, b []byte) error {
	c, r := w.c, w.a.run.r
	var o sending
	if !o.add(c.pool, w.a.run, b) {
		return c.whyLost(r)
	}
	o.reqs[0].Offset += offset
	o.run(ctx, c)
	state, err := o.status(0)
	if state == transfer.Unsettled {
		x.batch = o.batch
		c.loosen(run{r: r}, o.batch) // the region is not given up before; of the pages see giveUp
	}
	c.pool.endCopy(r)
	switch {
	case errors.Is(err, transfer.ErrCanceled) && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, transfer.ErrCanceled):
		return c.whyLost(r)
	case err != nil:
		c.sendFailed(r, err)
		return fmt.Errorf("%w: %w", ErrRevoked, err)
	}
	r.dev.worked()
	c.counters.bytesWritten.Add(uint64(len(b)))
	return nil
}

// Wait waits until layer i, which was launched, is in the pool's memory, or could not be put there.
func (w *LayerWriter) Wait(ctx context.Context, i int) error {
	return fail("wait for layer", w.a.key, w.wait(ctx, i))
}

// Finish waits for all layers, each of which must have been launched, and registers the value. It ends the LayerWriter in
// any case, and the copies when ctx is over.
func (w *LayerWriter) Finish(ctx context.Context) (PutResult, error) {
	if !w.end(ctx) {
		return PutResult{}, fail("put layers", w.a.key, fmt.Errorf("%w: the LayerWriter has ended", ErrConfig))
	}
	if err := w.fault(); err != nil {
		w.giveUp()
		return PutResult{}, fail("put layers", w.a.key, err)
	}
	if w.a.run.r.far {
		w.a.sent = true
		if w.sum != nil {
			w.a.sum = asChecksum(w.sum.Sum64())
		}
	}
	return w.a.Store(ctx, w.opts...)
}

// Abort ends the LayerWriter, and gives its memory back unused. It waits for what is under way, but not for a node that does
// not answer. After Finish it does nothing.
func (w *LayerWriter) Abort() {
	if w.leave() {
		w.giveUp()
	}
}

// giveUp gives the pages back, or has them rest until nothing can land there.
func (w *LayerWriter) giveUp() {
	var loose []*transfer.Batch
	for i := range w.all {
		if b := w.all[i].batch; b != nil {
			loose = append(loose, b)
		}
	}
	if len(loose) > 0 {
		w.c.loosen(w.a.run, loose...)
		w.a.run.n = 0 // Abort frees nothing
	}
	w.a.Abort()
}

// LayerReader reads a value layer by layer, each while those before it are being used. Its methods may be called
// concurrently. Every LayerReader ends with Close.
type LayerReader struct {
	layers
	hold
	c      *Client
	key    []byte
	found  protocol.LookupResult
	sentAt int64

	sumMu sync.Mutex
	sum   *xxh3.Hasher // of the layers that were waited for, in order; nil if it is not to be compared
	next  int
}

// GetLayers looks key up, whose value was stored with layers of these sizes, and holds it until Close. The error is
// ErrNotFound as with Get.
func (c *Client) GetLayers(ctx context.Context, key []byte, sizes []int) (*LayerReader, error) {
	o, err := newLayout(sizes)
	if err == nil {
		err = c.checkKey(key)
	}
	if err != nil {
		return nil, fail("get layers", key, err)
	}
	m := c.newLookup()
	defer c.freeLookup(m)
	m.forOne(key)
	sentAt, err := c.lookup(ctx, m)
	if err != nil {
		return nil, fail("get layers", key, err)
	}
	r := &m.rep.Results[0]
	switch {
	case !r.Found:
		c.counters.misses.Add(1)
		return nil, fail("get layers", key, ErrNotFound)
	case r.KVLength != uint64(o.total): //nolint:gosec // positive
		c.giveBack(r.Lease)
		return nil, fail("get layers", key, fmt.Errorf("%w: the value has %d bytes, its layers %d", ErrConfig, r.KVLength, o.total))
	}
	g := &LayerReader{c: c, key: append([]byte(nil), key...), found: *r, sentAt: sentAt}
	g.found.Copies = append([]protocol.Location(nil), r.Copies...)
	g.init(c, o)
	if c.cfg.Checksums && r.Checksum != 0 {
		g.sum = xxh3.New()
	}
	g.begin()
	g.add(r, sentAt)
	c.keep(&g.hold)
	return g, nil
}

// Launch begins to copy layer i into dst, which has the layer's size and must not be touched until Wait has returned.
func (g *LayerReader) Launch(i int, dst []byte) error {
	return fail("launch layer", g.key, g.launch(i, len(dst), func(ctx context.Context, x *layer) error {
		x.dst = dst
		return g.read(ctx, i, dst)
	}))
}

// read copies a layer from the first location that can be read. That the lease lasts is for Wait and Close to say.
func (g *LayerReader) read(ctx context.Context, i int, dst []byte) error {
	r := g.found
	r.LeaseMS, r.Checksum = unleased, 0
	r.Copies = append([]protocol.Location(nil), g.found.Copies...)
	place := func(l *protocol.Location) {
		l.KVOffset, l.KVLength = l.KVOffset+uint64(g.offsets[i]), uint64(len(dst)) //nolint:gosec // not negative
	}
	place(&r.Location)
	for j := range r.Copies {
		place(&r.Copies[j])
	}
	if _, got := g.c.copyAny(ctx, g.key, &r, g.sentAt, dst, uint64(g.total)); got != good { //nolint:gosec // positive
		return ErrNotFound
	}
	return nil
}

// Wait waits until layer i, which was launched, is in the memory that Launch got. The layer has the bytes that were stored
// if Wait returns nil, but for the checksum, which is of all of them: Close compares it, with Config.Checksums, if layers are
// waited for in order.
func (g *LayerReader) Wait(ctx context.Context, i int) error {
	err := g.wait(ctx, i)
	switch {
	case err != nil:
	case g.over(g.c.cfg.Clock()):
		err = ErrLease
	default:
		g.hash(i)
	}
	return fail("wait for layer", g.key, err)
}

// hash takes a layer that is here into the checksum, unless it comes out of order.
func (g *LayerReader) hash(i int) {
	g.sumMu.Lock()
	defer g.sumMu.Unlock()
	switch {
	case g.sum == nil || i < g.next:
	case i > g.next:
		g.sum = nil
	default:
		g.next++
		_, _ = g.sum.Write(g.all[i].dst) // it cannot fail
	}
}

// Close ends the reader and gives the lease back. It waits for what is under way, since that lands in the memory that Launch
// got, though no longer than Config.CallTimeout for a node that does not answer. If it returns nil, all layers that were waited
// for without an error have the bytes that were stored. Otherwise the error matches ErrLease, or ErrNotFound if the checksum
// is wrong. A second Close returns nil.
func (g *LayerReader) Close() error {
	if !g.leave() {
		return nil
	}
	c := g.c
	sound := !g.over(c.cfg.Clock())
	wrong := sound && g.sum != nil && g.next == len(g.sizes) && asChecksum(g.sum.Sum64()) != g.found.Checksum
	if wrong && len(g.found.Copies) == 0 { // of several, which one was read?
		c.condemn(c.life, g.key, &g.found.Location)
	}
	c.letGo(&g.hold)
	c.giveBack(g.found.Lease)
	switch {
	case !sound:
		c.counters.late.Add(1)
		return fail("get layers", g.key, ErrLease)
	case wrong:
		c.counters.checksumFaults.Add(1)
		return fail("get layers", g.key, errors.Join(ErrNotFound, errors.New("the checksum is wrong")))
	}
	c.counters.hits.Add(1)
	return nil
}
