package node

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

	"larder/client"
	"larder/tiering/ssd"
	"larder/transfer"
)

// Node contributes devices until it is closed. Its methods may be called concurrently.
type Node struct {
	cfg     Config
	engine  *transfer.Engine
	devices []*device
	// directory is where others find the engine's addresses.
	directory *client.Directory
	bucket    *bucket
	places    chan struct{} // chunksAtOnce: taken by what copies

	closing  sync.Once
	closeErr error
}

// New makes a node: its transfer engine listens, and nothing else happens before Run.
func New(cfg Config) (*Node, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	numa, err := hostMemory.nodeFor(&cfg)
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, directory: client.NewDirectory()}
	engine := transfer.Config{
		Name: "node/" + cfg.Host, Listen: cfg.Listen, Advertise: cfg.Advertise, Token: cfg.Token, Logger: cfg.Logger,
		NICs: cfg.NICs, Endpoints: cfg.Endpoints, Topology: cfg.Topology, Transports: cfg.Transports,
		ZeroCopy: cfg.ZeroCopy,
	}
	if cfg.published {
		engine.Directory = addresses{n.directory}
	}
	if n.engine, err = transfer.New(engine); err != nil {
		return nil, err //nolint:wrapcheck // says what to do
	}
	n.bucket, n.places = newBucket(cfg.clock, cfg.Bandwidth), make(chan struct{}, chunksAtOnce)
	if cfg.DRAM > 0 {
		n.add("dram", &dram{size: cfg.DRAM, prefault: cfg.Prefault, numa: numa, log: cfg.Logger})
	}
	for _, s := range cfg.SSD {
		n.add("ssd "+s.Dir, newSSD(s, cfg.Logger))
	}
	for _, c := range cfg.CXL {
		n.add("cxl "+c.Path, &cxlMedium{cfg: c, prefault: cfg.Prefault})
	}
	for _, path := range cfg.Expose {
		n.add("exposed "+path, &exposed{path: path})
	}
	return n, nil
}

func (n *Node) add(name string, m medium) { n.devices = append(n.devices, newDevice(n, name, m)) }

// Addresses are those that peers are told.
func (n *Node) Addresses() []string { return n.engine.Addresses() }

// Run serves the devices until ctx is over, then says goodbye and gives them up. A device that cannot be used in the first
// place ends it, with an error that says what to do. If a medium fails later the other devices go on, and its error is
// returned at the end; if none is left, at once.
func (n *Node) Run(ctx context.Context) error {
	n.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "the node starts", slog.String("host", n.cfg.Host),
		slog.String("transfer", strings.Join(n.engine.Addresses(), " ")), slog.Int("devices", len(n.devices)))
	ctx, cancel := context.WithCancel(ctx)
	errs := make([]error, len(n.devices))
	var wg, published sync.WaitGroup
	defer published.Wait()
	defer cancel()
	if n.cfg.published {
		published.Go(func() { n.publish(ctx) })
	}
	for i, d := range n.devices {
		wg.Go(func() {
			if errs[i] = d.run(ctx); errs[i] != nil && d.counts.attached.Load() == 0 {
				cancel()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Close ends the transfer engine, after Run has returned.
func (n *Node) Close() error {
	n.closing.Do(func() { n.closeErr = n.engine.Close() })
	return n.closeErr
}

// deviceCounts are what a device counts.
type deviceCounts struct {
	attached, granted, refused, fenced, leaked atomic.Uint64
	copied, skipped, failedCopies, copiedBytes atomic.Uint64
	undiscarded                                atomic.Uint64
}

func (c *deviceCounts) add(got *copied) {
	c.copied.Add(got.copied)
	c.skipped.Add(got.skipped)
	c.failedCopies.Add(got.failed)
	c.copiedBytes.Add(got.bytes)
}

// Status is how a node is.
type Status struct {
	Host      string         `json:"host"`
	Addresses []string       `json:"addresses"`
	Devices   []DeviceStatus `json:"devices"`
}

// DeviceStatus is how a device is. Counters count from the node's start.
type DeviceStatus struct {
	Name       string `json:"name"`
	State      State  `json:"state"`
	Why        string `json:"why,omitempty"` // it is not ready
	ID         uint64 `json:"id"`
	UUID       string `json:"uuid"`
	Tier       string `json:"tier"`
	Size       uint64 `json:"size"`
	Generation uint64 `json:"generation"`
	Session    uint64 `json:"session"`

	Granted  int `json:"granted"`  // regions that their owners write to by transfer
	Retiring int `json:"retiring"` // those that were taken back, and may still be written to

	Attached      uint64 `json:"attached_total"` // ATTACHes that made it ready
	Grants        uint64 `json:"grants_total"`
	GrantsRefused uint64 `json:"grants_refused_total"`
	Fences        uint64 `json:"fences_total"`
	Leaked        uint64 `json:"leaked_total"` // memories that stay mapped for somebody who may still write there
	Copied        uint64 `json:"tasks_copied_total"`
	Skipped       uint64 `json:"tasks_skipped_total"`
	FailedCopies  uint64 `json:"tasks_failed_total"`
	CopiedBytes   uint64 `json:"tasks_copied_bytes_total"`
	Undiscarded   uint64 `json:"undiscarded_total"` // free stretches that keep their bytes until they are written to

	Store *ssd.Stats `json:"store,omitempty"` // of an SSD
}

// storeStats is a medium that counts what it does.
type storeStats interface{ stats() *ssd.Stats }

// Ready reports whether all devices are.
func (s *Status) Ready() bool {
	for i := range s.Devices {
		if s.Devices[i].State != StateReady {
			return false
		}
	}
	return true
}

// Status says how the node is.
func (n *Node) Status() Status {
	s := Status{Host: n.cfg.Host, Addresses: n.engine.Addresses()}
	for _, d := range n.devices {
		s.Devices = append(s.Devices, d.status())
	}
	return s
}

func (d *device) status() DeviceStatus {
	s, g := d.present()
	if m, ok := d.medium.(storeStats); ok {
		s.Store = m.stats()
	}
	if g != nil {
		s.Granted, s.Retiring = g.count() // without d.mu: who grants a region holds the grants, and asks the device
	}
	return s
}

// present is the status without what others than the device know, and its grants.
func (d *device) present() (DeviceStatus, *grants) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := &d.counts
	s := DeviceStatus{
		Name: d.name, State: d.state, ID: d.id, UUID: hexID(d.uuid), Tier: d.about.Tier, Size: d.about.Size, Generation: d.shown,
		Session: d.session, Attached: c.attached.Load(), Grants: c.granted.Load(), GrantsRefused: c.refused.Load(),
		Fences: c.fenced.Load(), Leaked: c.leaked.Load(), Copied: c.copied.Load(), Skipped: c.skipped.Load(),
		FailedCopies: c.failedCopies.Load(), CopiedBytes: c.copiedBytes.Load(),
		Undiscarded: c.undiscarded.Load(),
	}
	if d.why != nil {
		s.Why = d.why.Error()
	}
	return s, d.grants
}
