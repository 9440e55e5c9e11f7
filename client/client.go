package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"larder/protocol"
)

// instances numbers the clients of this process that were not given a name.
var instances atomic.Uint64

// Client is a client of a pool. Its methods may be called concurrently, also with Close, after which all of them return
// ErrClosed. It must not be copied.
type Client struct {
	cfg  Config
	life context.Context //nolint:containedctx // the client's own life, which its goroutines share
	end  context.CancelFunc
	wg   sync.WaitGroup
	// readers are the goroutines of connections, which end after those that use them.
	readers sync.WaitGroup

	spawnMu  sync.Mutex    // orders spawn before the wait of Close
	ended    chan struct{} // closed when nothing of the client is left
	shutOnce sync.Once

	sess       atomic.Pointer[session]
	opening    uint64 // see openingSecret; the connector's
	link       atomic.Pointer[link]
	lastAnswer atomic.Int64 // when the last answered request was sent
	needLink   chan struct{}
	keepNow    chan struct{}

	linkMu        sync.Mutex
	linkChanged   chan struct{} // closed when link changes
	addrs         []string
	nextAddrIndex int
	hint          string // where the leader is said to be; used once
	left          string // the master that was left last: the others come first; used once
	members       []protocol.Member
	poolID        [16]byte
	incarnation   uint64
	leader        uint64 // the member that was connected to last; 0 = none yet
	lastErr       error

	devices      *devices
	pool         *pool
	revoking     []uint64 // regions whose REVOKE is being carried out; under pool.mu
	quarantineMS atomic.Uint64

	leases  leaseBag
	viewMu  sync.Mutex
	holds   map[*hold]struct{}
	lookups sync.Pool // of *lookupMsg
	fetches sync.Pool // of *fetch
	stores  sync.Pool // of *storeOp

	only atomic.Uint64 // see UseDevice

	kept       keptNames
	counters   counters
	handlers   handlers
	promotions promotions
	seconds    seconds
	news       sessionNews // under linkMu
}

// Open connects to a pool and opens a session. It waits until a leader has answered, or ctx is over, or, if ctx has no
// deadline, cfg.Timeout has passed.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fail("open", nil, err)
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	c := &Client{
		cfg: cfg, life: life, end: end, addrs: cfg.Addrs,
		ended: make(chan struct{}), needLink: make(chan struct{}, 1), keepNow: make(chan struct{}, 1), linkChanged: make(chan struct{}),
		devices: newDevices(&cfg), pool: newPool(cfg.Clock, cfg.Discard != nil), holds: make(map[*hold]struct{}),
	}
	c.promotions.queue = make(chan promotion, maxPromotions)
	c.lookups.New = func() any { return new(lookupMsg) }
	c.fetches.New = func() any { return new(fetch) }
	c.stores.New = func() any { return new(storeOp) }
	c.only.Store(cfg.Device)
	c.needLink <- struct{}{}
	c.wg.Add(4)
	go c.promoter()
	go c.connector() //nolint:contextcheck // lives as long as the client, not as the call
	go c.keeper()    //nolint:contextcheck // the same
	go c.allocator()
	if cfg.Discard != nil {
		c.wg.Add(1)
		go c.discarder() //nolint:contextcheck // lives as long as the client, not as the call
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
	}
	if _, err := c.conn(ctx); err != nil {
		c.linkMu.Lock()
		last := c.lastErr
		c.linkMu.Unlock()
		c.shut(errors.Join(err, last))
		if last != nil {
			err = fmt.Errorf("%w (the last attempt: %w)", err, last)
		}
		return nil, fail("open", nil, err)
	}
	return c, nil
}

// Close returns the client's regions to the pool, where its entries stay readable, ends its session and frees what the
// client holds. It waits for stores that are writing. Open Allocs fail; open Views stay readable until they are
// closed. When ctx is over first, or no master answers, it stops without the goodbye, whose error it returns: the pool
// then finds out by the session's TTL. What is left to free then is freed in the background: another Close waits for it.
func (c *Client) Close(ctx context.Context) error {
	if c.life.Err() != nil {
		select {
		case <-c.ended:
			return nil
		case <-ctx.Done():
			return fail("close", nil, ctx.Err())
		}
	}
	s := c.sess.Load()
	c.flushReleases()
	_, safe := c.pool.retireAll(ErrClosed)
	var err error
	if safe {
		err = c.goodbye(ctx, s)
	}
	c.stop()
	go c.shut(ErrClosed)
	select {
	case <-c.ended:
	case <-ctx.Done():
		err = cmp.Or(err, ctx.Err())
	}
	return fail("close", nil, err)
}

// goodbye ends the session.
func (c *Client) goodbye(ctx context.Context, s *session) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.cfg.CallTimeout)
		defer cancel()
	}
	err := c.mutate(ctx, s, protocol.TypeGoodbye, new(goodbyeMsg), 0)
	if errors.Is(err, ErrSessionExpired) {
		return nil // it had ended already
	}
	return err
}

// stop has nothing begin any more.
func (c *Client) stop() {
	c.spawnMu.Lock()
	defer c.spawnMu.Unlock()
	c.end()
}

// shut ends the client's goroutines and connections.
func (c *Client) shut(why error) {
	c.stop()
	if l := c.link.Load(); l != nil {
		l.close(why)
	}
	c.wg.Wait()
	if l := c.link.Swap(nil); l != nil { // made while the connector was ending
		l.close(why)
	}
	c.readers.Wait()
	c.pool.retireAll(ErrClosed)
	c.devices.close()
	c.shutOnce.Do(func() { close(c.ended) })
}

// Instance returns the name under which the pool knows this client.
func (c *Client) Instance() string { return c.cfg.Instance }

// Session returns the number of the present session.
func (c *Client) Session() uint64 { return c.sess.Load().id }

// Pool returns the id of the pool and its incarnation, as the leader that was connected to last named them. The incarnation
// changes when the pool was restored to an earlier state.
func (c *Client) Pool() (id [16]byte, incarnation uint64) {
	c.linkMu.Lock()
	defer c.linkMu.Unlock()
	return c.poolID, c.incarnation
}

// UseDevice names the only device where regions are to lie that the client asks for from now on, in place of Config.Device.
// 0: any. Regions that it has stay.
func (c *Client) UseDevice(id uint64) { c.only.Store(id) }

// PageSize returns the granularity of stores in bytes.
func (c *Client) PageSize() uint64 { return c.cfg.PageSize }

// Leader returns the address of the master that the client talks to now; empty if it is looking for one.
func (c *Client) Leader() string {
	if l := c.link.Load(); l != nil {
		return l.conns[0].addr
	}
	return ""
}

// Members returns the masters as the last one that was connected to named them.
func (c *Client) Members() []protocol.Member {
	c.linkMu.Lock()
	defer c.linkMu.Unlock()
	return append([]protocol.Member(nil), c.members...)
}
