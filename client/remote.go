package client

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

const (
	// avoidFirst and avoidMost bound for how long a device is passed over, if there is a choice, after a transfer failed:
	// as long as a connection takes to come back, and not so long that a node that was started again stays idle.
	avoidFirst = time.Second
	avoidMost  = 30 * time.Second
	// slowest is the rate, in bytes a second, below which a transfer is given up: a busy disk is faster.
	slowest = 32 << 20
)

// carrier moves bytes to and from devices that are not mapped. It makes an engine of its own when one is needed and
// the caller has given none.
type carrier struct {
	cfg *Config

	mu       sync.Mutex
	engine   *transfer.Engine
	own      bool
	closed   bool
	segments map[string]*segment
	closing  sync.WaitGroup
}

// segment is the memory of a node, which several devices and regions may share.
type segment struct {
	*transfer.Segment
	key   string
	users int // under carrier.mu
}

func newCarrier(cfg *Config) *carrier {
	return &carrier{cfg: cfg, engine: cfg.Transfer, segments: make(map[string]*segment)}
}

// open returns the segment that an endpoint lies in, for one more user.
func (t *carrier) open(e *protocol.Endpoint) (*segment, error) {
	return t.openDescriptor(transfer.Descriptor{Engine: e.Engine, Host: e.Host, Rails: e.Rails, NICs: e.NICs})
}

func (t *carrier) openDescriptor(d transfer.Descriptor) (*segment, error) {
	d.Rails, d.NICs = slices.Clone(d.Rails), slices.Clone(d.NICs)
	key := d.Engine + " " + d.Host + " " + strings.Join(d.Rails, " ") + " " + strings.Join(d.NICs, " ")
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.segments[key]; s != nil {
		s.users++
		return s, nil
	}
	if t.closed {
		return nil, ErrClosed
	}
	if t.engine == nil {
		engine, err := transfer.New(transfer.Config{
			Name: transferName(t.cfg), Token: t.cfg.TransferToken, StallTimeout: t.cfg.CallTimeout,
			AbortTimeout: t.cfg.CallTimeout, Logger: t.cfg.Logger,
		})
		if err != nil {
			return nil, err //nolint:wrapcheck // says what to do
		}
		t.engine, t.own = engine, true
	}
	seg, err := t.engine.OpenDescriptor(d)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the peer
	}
	s := &segment{Segment: seg, key: key, users: 1}
	t.segments[key] = s
	return s, nil
}

// transferName is what a client's own engine calls itself: names of instances may be longer than an engine's.
func transferName(cfg *Config) string { return cfg.Instance[:min(len(cfg.Instance), 128)] }

// drop ends a use of a segment. After the last its connections are closed, by another goroutine: callers hold locks.
func (t *carrier) drop(s *segment) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.users--; s.users > 0 {
		return
	}
	delete(t.segments, s.key)
	if t.closed {
		go s.Close() //nolint:errcheck // it cannot fail, and close has waited for those before
		return
	}
	t.closing.Go(func() { _ = s.Close() }) // it cannot fail
}

// submit begins transfers, which are given up after timeout.
func (t *carrier) submit(reqs []transfer.Request, timeout time.Duration) (*transfer.Batch, error) {
	t.mu.Lock()
	engine := t.engine
	t.mu.Unlock()
	if engine == nil {
		return nil, ErrClosed
	}
	return engine.Submit(reqs, timeout) //nolint:wrapcheck // typed
}

// close waits for segments that are being closed, and ends the engine if it is the client's own.
func (t *carrier) close() {
	t.mu.Lock()
	t.closed = true
	engine, own := t.engine, t.own
	t.mu.Unlock()
	t.closing.Wait()
	if own {
		if err := engine.Close(); err != nil {
			t.cfg.Logger.Warn("the transfer engine ended badly", slog.Any("error", err))
		}
	}
}

// transferTime is how long a transfer of n bytes may take.
func (c *Client) transferTime(n uint64) time.Duration {
	return c.cfg.CallTimeout + time.Duration(min(n, math.MaxInt64/uint64(time.Second))*uint64(time.Second)/slowest)
}

// remote is how a device is reached that is not mapped here.
type remote struct {
	carrier    *carrier
	seg        *segment
	endpoint   protocol.Endpoint
	buffer     transfer.Handle
	size       uint64 // of the device
	generation uint64
	rank       int
	stale      atomic.Bool // the node does not have the buffer any more

	took   atomic.Int64 // what latency said last
	lookAt atomic.Int64 // when it looks again, on Config.Clock
}

// latencyEvery is how often, in ns, the engine is asked how long the node takes.
const latencyEvery = 50e6

// latency is how long a slice of a transfer from the device takes on the fastest way there, in ns; 0 if none has come yet.
func (f *remote) latency(now int64) int64 {
	if due := f.lookAt.Load(); now < due || !f.lookAt.CompareAndSwap(due, now+latencyEvery) {
		return f.took.Load()
	}
	least := int64(0)
	for _, p := range f.seg.Paths() {
		if p.Latency > 0 && p.Storage == f.endpoint.Storage && (least == 0 || int64(p.Latency) < least) {
			least = int64(p.Latency)
		}
	}
	f.took.Store(least)
	return least
}

// Ranks of locations: readers take the lowest first.
const (
	rankMapped    = iota // plain memory
	rankNeighbour        // memory of another process of this host
	rankRemote           // memory of another host
	rankStorage          // a disk
	rankAvoided          // whatever has failed lately
	rankNone             // not to be had
)

// openFar makes a device that is reached by transfer. Nothing is sent yet.
func (t *carrier) openFar(info *protocol.Device) (*device, error) {
	e := info.Endpoint
	if e == nil || e.Engine == "" || e.Buffer > math.MaxUint32 {
		return nil, fmt.Errorf("device %d: %w: it is not mapped here, and the master names no node that serves it", info.ID, ErrConfig)
	}
	seg, err := t.open(e)
	if err != nil {
		return nil, fmt.Errorf("device %d: %w", info.ID, err)
	}
	rank := rankRemote
	switch {
	case e.Storage:
		rank = rankStorage
	case e.Host != "" && e.Host == cxl.BootName():
		rank = rankNeighbour
	}
	d := &device{id: info.ID, tier: info.Tier, node: info.Node, far: &remote{
		carrier: t, seg: seg, endpoint: *e, buffer: handleOf(e), size: info.Size, generation: info.Generation, rank: rank,
	}}
	d.refs.Store(1)
	return d, nil
}

// handleOf is the buffer that an endpoint names.
func handleOf(e *protocol.Endpoint) transfer.Handle {
	return transfer.Handle{ID: uint32(e.Buffer), Generation: e.BufferGeneration} //nolint:gosec // checked when opened
}

// is reports whether the device is still described as it was when it was opened.
func (f *remote) is(info *protocol.Device) bool {
	e := info.Endpoint
	return e != nil && info.Generation == f.generation && e.Engine == f.endpoint.Engine && e.Host == f.endpoint.Host &&
		handleOf(e) == f.buffer && e.Offset == f.endpoint.Offset && slices.Equal(e.Rails, f.endpoint.Rails) &&
		slices.Equal(e.NICs, f.endpoint.NICs)
}

// within converts a location to a place in the device's buffer.
func (f *remote) within(l *protocol.Location) (offset uint64, ok bool) {
	switch {
	case l.Offset < f.endpoint.Offset || l.Offset > f.size || l.Length > f.size-l.Offset:
		return 0, false
	case l.KVOffset > l.Length || l.KVLength > l.Length-l.KVOffset:
		return 0, false
	}
	return l.Offset - f.endpoint.Offset + l.KVOffset, true
}

// rank says how much a read from the device costs now, and how likely it is to fail.
func (d *device) rank(now int64) int {
	switch {
	case d.avoid.Load() > now:
		return rankAvoided
	case d.far != nil:
		return d.far.rank
	}
	return rankMapped
}

// failed notes that a transfer to or from the device failed, so that other devices are preferred for a while.
func (d *device) failed(now int64, err error) {
	if errors.Is(err, transfer.ErrStale) {
		d.far.stale.Store(true)
		return
	}
	if d.avoid.Load() > now {
		return // many reads of one batch fail for one reason
	}
	pause := min(avoidFirst<<min(d.failures.Add(1)-1, 10), avoidMost)
	d.avoid.Store(now + int64(pause))
}

// worked notes that a transfer succeeded.
func (d *device) worked() {
	if d.failures.Load() != 0 {
		d.failures.Store(0)
		d.avoid.Store(0)
	}
}
