package node

import (
	"errors"
	"fmt"
	"log/slog"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

// Defaults of Config.
const (
	// DefaultBandwidth bounds tier work: far below what a disk and a network carry, which serve readers first.
	DefaultBandwidth = 256 << 20
	// DefaultPageSize and DefaultRegionSize are those of the regions that a device's own home takes for copies.
	DefaultPageSize   = 64 << 10
	DefaultRegionSize = 64 << 20
)

// Config says what a node contributes, and to whom. Masters and at least one device are needed.
type Config struct {
	Masters []string // as client.Config.Addrs
	Host    string   // name of the host, as placements name it; "" = HostName
	// Listen are the addresses, host:port, at which others reach this node's devices, one for each rail; Advertise what
	// they are told instead. Without any, nobody of another host can use them.
	Listen, Advertise []string
	Token             string // what peers of the transfer engine must know
	// NICs, Endpoints, Topology and Transports are as transfer.Config says. The caller closes the NICs, after the node.
	NICs       []transfer.NIC
	Endpoints  transfer.EndpointConfig
	Topology   *transfer.Topology
	Transports []string
	// ZeroCopy is as well: what is sent over TCP is not copied first.
	ZeroCopy string

	DRAM   uint64   // bytes of this process's memory, header included; 0 = none
	NUMA   *int     // NUMA node that it comes from; nil = that of the host if it has one alone, or that this process is bound to
	SSD    []SSD    // stores
	CXL    []CXL    // CXL memory, which this node claims
	Expose []string // paths of devices that masters of this host serve, to be reached by transfer from others

	Bandwidth  uint64 // bytes per second of tier work, of all devices; 0 = DefaultBandwidth
	PageSize   uint64 // of the regions for copies; a copy takes whole pages; 0 = DefaultPageSize
	RegionSize uint64 // bytes of such a region; 0 = DefaultRegionSize
	Prefault   bool   // have all memory now, not when it is first touched
	// NoMap has processes of this host map nothing either: all access is by transfer, so that a fence ends any of it.
	NoMap bool

	Logger *slog.Logger // nil = nobody hears

	clock clock  // tests only
	open  opener // tests only
	// published says that the masters, which are real, tell others where this node is.
	published bool
}

// ErrConfig says that a Config cannot be used.
var ErrConfig = errors.New("node: configuration")

// withDefaults fills in what is not set, and refuses what cannot be.
func (cfg Config) withDefaults() (Config, error) {
	def := func(v *uint64, d uint64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&cfg.Bandwidth, DefaultBandwidth)
	def(&cfg.PageSize, DefaultPageSize)
	def(&cfg.RegionSize, max(DefaultRegionSize/cfg.PageSize, 1)*cfg.PageSize)
	if cfg.Host == "" {
		cfg.Host = cxl.HostName()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.clock == nil {
		cfg.clock = hostClock{}
	}
	if cfg.open == nil {
		cfg.open, cfg.published = openClient, true
	}
	return cfg, cfg.check()
}

// maxHost leaves room for the rest of an instance's name.
const maxHost = 128

// sizeUnit is what sizes of memory devices are multiples of: every host's page.
const sizeUnit = 64 << 10

func (cfg Config) check() error {
	var errs []error
	say := func(bad bool, text string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf("%w: "+text, append([]any{ErrConfig}, args...)...))
		}
	}
	say(len(cfg.Masters) == 0, "no masters: name at least one address")
	say(cfg.DRAM == 0 && len(cfg.SSD) == 0 && len(cfg.CXL) == 0 && len(cfg.Expose) == 0,
		"nothing to contribute: give it DRAM, an SSD directory or CXL memory")
	say(len(cfg.Host) > maxHost, "the host's name has %d bytes, at most %d fit", len(cfg.Host), maxHost)
	memory := func(what string, size uint64) {
		say(size%sizeUnit != 0 || size > 1<<50, "%s of %d bytes: a multiple of 64 KiB, at most 1 PiB", what, size)
	}
	memory("DRAM", cfg.DRAM)
	say(cfg.DRAM != 0 && cfg.DRAM <= cxl.HeaderSpan, "DRAM of %d bytes: the header alone takes %d", cfg.DRAM, cxl.HeaderSpan)
	seen := map[string]bool{}
	for _, s := range cfg.SSD {
		say(s.Dir == "" || seen[s.Dir], "SSD directory %q: each needs one of its own", s.Dir)
		say(s.Size != 0 && s.Size <= cxl.HeaderSpan || s.Size%sizeUnit != 0 || s.Size > 1<<60,
			"SSD of %d bytes: a multiple of 64 KiB, above 2 MiB", s.Size)
		seen[s.Dir] = true
	}
	for _, c := range cfg.CXL {
		say(c.Path == "" || seen[c.Path], "CXL path %q: each device once", c.Path)
		memory("CXL memory", c.Size)
		seen[c.Path] = true
	}
	say(len(cfg.NICs) > protocol.MaxNICs, "%d NICs: at most %d", len(cfg.NICs), protocol.MaxNICs)
	say(len(cfg.SSD) > 0 && len(cfg.Listen) == 0, "an SSD is reached by transfer alone: name an address to listen at")
	return errors.Join(errs...)
}
