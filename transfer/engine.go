package transfer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"larder/cxl"
)

// Config is what an engine is made of. The zero value listens nowhere and can only reach others.
type Config struct {
	// Name of the segment, for others to read: an instance's, say.
	Name string
	// Listen are the addresses, host:port, at which others reach this process: one for each rail. A port of 0 takes a
	// free one.
	Listen []string
	// Advertise are what others are told instead of the addresses that were bound, one for each of Listen.
	Advertise []string
	// From are the local addresses, without ports, from which rails leave; none means as the system routes. There is a
	// rail from each to each address of the peer.
	From []string
	// SliceSize is how many bytes are moved at once: 64 KiB if it is 0; 4 KiB to 16 MiB.
	SliceSize int
	// Connections of each rail; 2 if it is 0.
	Connections int
	// Timeout is how long a batch may take whose submitter named no time; 30 s if it is 0.
	Timeout time.Duration
	// StallTimeout is how long a connection may have work and move no byte; 5 s if it is 0. It is closed then, and the
	// work goes elsewhere.
	StallTimeout time.Duration
	// AbortTimeout is how long a peer may take to confirm that a connection is closed; 5 s if it is 0.
	AbortTimeout time.Duration
	// IdleTimeout is how long a connection stays open without work; 60 s if it is 0.
	IdleTimeout time.Duration
	// Retries is how often a slice is tried again before its request fails; 8 if it is 0.
	Retries int
	// ZeroCopy says on which connections over TCP long bodies are not copied by the kernel: ZeroCopyAuto if it is empty.
	ZeroCopy string
	// Checksums has each slice carry the XXH3 of its bytes.
	Checksums bool
	// Token must be the same in both processes.
	Token string
	// NICs are those that rails over RDMA use, one engine each. The engine does not close them. With Checksums they are not
	// used: whoever is written to by a NIC cannot check what has come.
	NICs []NIC
	// Endpoints are those of each NIC; the engine sets Exchange, Lost and Logger.
	Endpoints EndpointConfig
	// BounceBytes is how much memory is registered with the NICs for requests whose own is not; 32 MiB if it is 0.
	BounceBytes int
	// Transports are those that may be used, in both directions: local, shm, rdma, tcp; none means all.
	Transports []string
	// MaxPeers bounds the connections that others may have to this process; 4096 if it is 0.
	MaxPeers int
	// StagingBytes bounds the memory through which bytes go to and from storage; 64 MiB if it is 0, 16 MiB at least.
	StagingBytes int64
	// Topology tells which NICs are close to which memory; nil reads it from this host's sysfs.
	Topology *Topology
	// Directory is where the engine looks up others by name, and is published under its own if it has one and listens; nil
	// for none. PublishEvery is how often, besides when its buffers change; 10 s if it is 0.
	Directory    Directory
	PublishEvery time.Duration
	// Logger gets what an operator may want to know; nil for nothing.
	Logger *slog.Logger

	remote bool // of tests: every peer counts as one on another host
}

func (c *Config) withDefaults() error {
	def := func(d *time.Duration, v time.Duration) { *d = cmp.Or(*d, v) }
	def(&c.Timeout, 30*time.Second)
	def(&c.StallTimeout, 5*time.Second)
	def(&c.AbortTimeout, 5*time.Second)
	def(&c.IdleTimeout, time.Minute)
	def(&c.PublishEvery, 10*time.Second)
	c.SliceSize = cmp.Or(c.SliceSize, 64<<10)
	c.Connections = cmp.Or(c.Connections, 2)
	c.Retries = cmp.Or(c.Retries, 8)
	c.MaxPeers = cmp.Or(c.MaxPeers, 4096)
	c.StagingBytes = cmp.Or(c.StagingBytes, defaultStaging)
	c.BounceBytes = cmp.Or(c.BounceBytes, 32<<20)
	c.ZeroCopy = cmp.Or(c.ZeroCopy, ZeroCopyAuto)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	for _, name := range c.Transports {
		if !slices.Contains(Transports, name) {
			return fmt.Errorf("transfer: %.20q is no transport: %s", name, strings.Join(Transports, ", "))
		}
	}
	if c.Topology == nil {
		c.Topology = hostTopology()
	}
	switch {
	case c.Topology.check() != nil:
		return c.Topology.check()
	case c.SliceSize < minSlice || c.SliceSize > maxSlice:
		return fmt.Errorf("transfer: a slice size of %d bytes: from %d to %d", c.SliceSize, minSlice, maxSlice)
	case c.Connections < 1 || c.Connections > maxConnections:
		return fmt.Errorf("transfer: %d connections a rail: from 1 to %d", c.Connections, maxConnections)
	case len(c.Listen) > maxRails || len(c.From) > maxRails:
		return fmt.Errorf("transfer: at most %d addresses", maxRails)
	case len(c.Advertise) > 0 && len(c.Advertise) != len(c.Listen):
		return fmt.Errorf("transfer: %d addresses to advertise for %d to listen at: one for each", len(c.Advertise), len(c.Listen))
	case c.StagingBytes < maxSlice:
		return fmt.Errorf("transfer: %d bytes of staging memory: at least %d, which a slice may have", c.StagingBytes, maxSlice)
	case len(c.Name) > maxName:
		return fmt.Errorf("transfer: the name has %d bytes, at most %d fit", len(c.Name), maxName)
	case min(c.Timeout, c.StallTimeout, c.AbortTimeout, c.IdleTimeout, c.PublishEvery) < 0 || c.Retries < 0 || c.MaxPeers < 1 ||
		c.BounceBytes < 0:
		return errors.New("transfer: a negative time or count")
	}
	return cmp.Or(c.checkZeroCopy(), c.checkNICs())
}

// Names of transports.
const (
	TransportLocal = "local" // a copy within the process
	TransportShm   = "shm"   // memory that both processes of a host have mapped
	TransportRDMA  = "rdma"  // work requests of NICs
	TransportTCP   = "tcp"
)

// Transports are all transports, in the order in which they are preferred.
var Transports = []string{TransportLocal, TransportShm, TransportRDMA, TransportTCP}

// allows reports whether a transport may be used.
func (c *Config) allows(transport string) bool {
	return len(c.Transports) == 0 || slices.Contains(c.Transports, transport)
}

const (
	// maxRails bounds the rails to one peer: a slice remembers in a word on which it has failed.
	maxRails = 64
	// maxConnections bounds those of a rail: eight fill any NIC.
	maxConnections = 64
)

// Engine is one process's end of transfers. Its methods may be called concurrently.
type Engine struct {
	cfg      Config
	id       [16]byte // of this engine, for ever
	clock    func() int64
	topology *Topology
	choosy   bool // it makes a difference where local memory lies
	buffers  bufferTable
	staging  *staging
	inbox    inbox
	counters *counters
	batches  sync.Pool // those that were released
	target   *target
	sharer   *sharer         // nil if nobody can reach this engine
	rdma     *rdma           // nil if it has no NICs
	ctx      context.Context //nolint:containedctx // it ends what the engine has begun
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	lastCon  atomic.Uint64 // connections, numbered
	ticks    chan struct{} // wakes the keeper
	news     chan struct{} // wakes the publisher

	published, unpublished atomic.Uint64 // attempts, by outcome

	mu         sync.Mutex
	closed     bool
	lastBuffer uint32
	slots      int // that buffers have had
	registered int // buffers
	listed     int // those in the descriptor
	freeSlots  []int
	segments   map[*Segment]struct{}
}

// New makes an engine and begins to listen.
func New(cfg Config) (*Engine, error) {
	if err := cfg.withDefaults(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, clock: monotonic(), segments: map[*Segment]struct{}{},
		ticks: make(chan struct{}, 1), news: make(chan struct{}, 1),
	}
	e.staging = newStaging(cfg.StagingBytes)
	e.counters = newCounters()
	e.inbox.queue = make(chan Notification, notificationQueue)
	e.topology = cfg.Topology
	e.choosy = len(cfg.From) > 1 && e.topology.matters()
	if _, err := rand.Read(e.id[:]); err != nil {
		return nil, fmt.Errorf("transfer: draw an id: %w", err)
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	t, err := e.listen()
	if err != nil {
		e.cancel()
		return nil, err
	}
	e.target = t
	if len(cfg.Listen) > 0 && cfg.allows(TransportShm) {
		if e.sharer, err = newSharer(e); err != nil {
			e.cancel()
			return nil, errors.Join(err, t.stop())
		}
		e.sharer.begin()
	}
	if e.rdma, err = newRDMA(e); err != nil {
		e.cancel()
		return nil, errors.Join(err, t.stop(), e.unshare(nil))
	}
	t.begin()
	e.wg.Add(1)
	go e.keep()
	if cfg.Directory != nil && cfg.Name != "" && len(cfg.Listen) > 0 {
		e.wg.Go(e.publish)
	}
	return e, nil
}

// now is the engine's clock, in nanoseconds.
func (e *Engine) now() int64 { return e.clock() }

// ID names this engine, and no other one ever.
func (e *Engine) ID() string { return hex.EncodeToString(e.id[:]) }

// Addresses are those that others are told to reach this process at.
func (e *Engine) Addresses() []string { return slices.Clone(e.target.addresses) }

// Topology tells which NICs of this host are close to which memory. It must not be changed.
func (e *Engine) Topology() *Topology { return e.topology }

// NICs are the names of those that rails over RDMA use.
func (e *Engine) NICs() []string { return e.rdma.names() }

// Descriptor is what others need to know to reach this process's buffers.
type Descriptor struct {
	Engine  string       `json:"engine"` // 32 hex digits
	Name    string       `json:"name,omitempty"`
	Host    string       `json:"host,omitempty"` // the boot id of its host's kernel, if processes there may map buffers
	Rails   []string     `json:"rails"`          // addresses, host:port
	NICs    []string     `json:"nics,omitempty"` // by which it is reached over RDMA
	Buffers []BufferInfo `json:"buffers"`
	// Topology tells which of the rails are close to which buffers.
	Topology *Topology `json:"topology,omitempty"`
}

// Describe describes this process's segment as it is now.
func (e *Engine) Describe() Descriptor {
	d := Descriptor{Engine: e.ID(), Name: e.cfg.Name, Rails: e.Addresses(), NICs: e.rdma.names()}
	if len(e.topology.NICs) > 0 {
		d.Topology = e.topology
	}
	if e.sharer != nil {
		d.Host = cxl.BootName()
	}
	for b := range e.buffers.all {
		if !b.unlisted {
			d.Buffers = append(d.Buffers, b.info)
		}
	}
	slices.SortFunc(d.Buffers, func(a, b BufferInfo) int { return cmp.Compare(a.ID, b.ID) })
	return d
}

// Close ends the engine: batches that are under way fail, and when it returns nobody reads from this process's buffers or
// writes to them any more. If it returns [ErrUnsettled], a process of this host was stopped in the middle of a copy, a
// storage does not return from a call, or a NIC does not let go of what is sent from the buffers themselves.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	segments := slices.Collect(maps.Keys(e.segments))
	e.mu.Unlock()
	for _, s := range segments {
		_ = s.Close() // it cannot fail
	}
	err := e.letGo()
	e.cancel()
	e.wg.Wait()
	e.rdma.wait()
	e.inbox.close()
	e.staging.close()
	return err
}

// letGo has nobody use this process's buffers any more, as far as that is possible within AbortTimeout.
func (e *Engine) letGo() error {
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.AbortTimeout)
	defer cancel()
	stop := ctx.Done()
	// NICs first, before the target gives up its addresses: see rdmaPeer.closeLink.
	err := errors.Join(e.unshare(stop), e.retireStorage(stop), e.rdma.close())
	if !e.target.close(stop) {
		err = errors.Join(err, fmt.Errorf("transfer: close: a peer's request is in the middle of a call: %w", ErrUnsettled))
	}
	return err
}

// unshare has processes of this host copy nothing any more.
func (e *Engine) unshare(stop <-chan struct{}) error {
	if e.sharer == nil {
		return nil
	}
	for b := range e.buffers.all {
		e.sharer.publish(b, 0)
	}
	defer e.sharer.close()
	if !e.sharer.settle(stop) {
		return fmt.Errorf("transfer: close: a process of this host is in the middle of a copy: %w", ErrUnsettled)
	}
	return nil
}

// tickEvery is how often the keeper looks for what takes too long.
const tickEvery = 50 * time.Millisecond

// keep is the engine's own clock: what should end by itself ends here, whatever else happens or does not.
func (e *Engine) keep() {
	defer e.wg.Done()
	tick, stop := every(tickEvery)
	defer stop()
	for {
		select {
		case <-tick:
		case <-e.ticks:
		case <-e.ctx.Done():
			return
		}
		e.mu.Lock()
		segments := slices.Collect(maps.Keys(e.segments))
		e.mu.Unlock()
		now := e.now()
		for _, s := range segments {
			s.tick(now)
		}
		e.target.tick(now)
		e.rdma.tick(now)
	}
}

// expire has the keeper look now.
func (e *Engine) expire() {
	select {
	case e.ticks <- struct{}{}:
	default:
	}
}

// dial opens a connection of a rail and says who is there.
func (e *Engine) dial(ctx context.Context, from, to, kind string, id uint64) (*stream, string, error) {
	d := net.Dialer{KeepAlive: 15 * time.Second}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	conn, err := d.DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, "", err
	}
	tcp := conn.(*net.TCPConn) //nolint:forcetypeassert // that is what the network tcp gives
	s, err := newStream(tcp)
	if err != nil {
		return nil, "", errors.Join(err, conn.Close())
	}
	engine, err := e.greet(ctx, s, kind, id)
	if err != nil {
		return nil, "", errors.Join(err, conn.Close())
	}
	return s, engine, nil
}
