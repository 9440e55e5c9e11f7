package client

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

// Defaults of Config.
const (
	DefaultPageSize    = 64 << 10
	DefaultRegionSize  = 64 << 20
	DefaultTTL         = 10 * time.Second
	DefaultTimeout     = 30 * time.Second
	DefaultCallTimeout = 2 * time.Second
	// MinPageSize is the smallest page that servers take, in bytes.
	MinPageSize = 4096
	// MaxConns bounds the connections of one client: one is enough for latency, and four saturate a server.
	MaxConns = 16
	// slowTier is the tier that values are promoted from.
	slowTier = "ssd"
)

// Config says where the masters are and how a client behaves. Only Addrs is needed.
type Config struct {
	// Addrs are masters, "host:port" or "unix:/path". Any one of them is enough: it names the others and the leader.
	Addrs []string
	// Instance names the client to the pool: regions belong to it. One process at a time may use a name. Empty: made of
	// the host's name, the process id and its start time.
	Instance string
	// Tenant is whose entries these are. Empty: "default".
	Tenant string
	// PageSize is the granularity of stores, in bytes: a multiple of 4 KiB. 0: DefaultPageSize. A value takes
	// whole pages, in one run if it is longer than one.
	PageSize uint64
	// RegionSize is how much is asked for at a time when the client has no page left, in bytes. 0: DefaultRegionSize.
	RegionSize uint64
	// TTL is how long the pool keeps the session of a client that it does not hear from. 0: DefaultTTL. The server
	// clamps it.
	TTL time.Duration
	// Checksums stores an XXH3-64 of each value, and verifies each value read that has one.
	Checksums bool
	// Prefault maps memory completely when it is mapped, so that no later copy waits for a page fault.
	Prefault bool
	// Tier is the tier of memory that this client's regions are preferred to lie in: cxl, dram or ssd. Where that has no
	// room they come from another. Empty: any.
	Tier string
	// Replicas is on how many nodes each value is stored, as far as they have room. 0: one. WithReplicas overrides it.
	// WriteThrough, if not empty, is the tier where one of the replicas lies: with it each value is stored at least there and
	// where the client's regions are. What PutLayers stores in regions that are not mapped here is read back for its replicas,
	// into memory of this process.
	Replicas     int
	WriteThrough string
	// Near are names of hosts, of their NUMA nodes (host/0), or of devices (#3) where this client's regions are to lie
	// if there is room, the first of them most. Empty: this host. Avoid are those that are taken only if nothing else will
	// do. At most protocol.MaxPlaces each.
	Near, Avoid []string
	// Device is the only device where this client's regions may lie. 0: any.
	Device uint64
	// NoPromote declines to copy values to this client's own memory that were read from a slow tier and that the leader
	// wants in a faster one.
	NoPromote bool
	// Transfer is the engine by which devices are reached that are not mapped here; it stays the caller's, who closes it
	// after the client. One with NICs reads and writes by RDMA, where the node has NICs, too. nil: the client makes one that
	// listens nowhere, and has none, when it needs it.
	Transfer *transfer.Engine
	// TransferToken is what nodes demand to know of the client's own engine; Transfer has been given one of its own.
	TransferToken string
	// OnRevoke, if not nil, hears once of each region that was taken away, after the client has given it up. It must not
	// block, nor call Close, which waits for it. What Close returns to the pool is not taken away.
	OnRevoke func(Revoked)
	// OnClear, if not nil, hears of each CLEAR that dropped entries of the tenant, this client's own included: what a
	// program keeps of them beside the pool it may drop as well. It is told once the CLEAR is applied, from a goroutine for
	// each, so that two may come in any order. It is news and no more: one that is lost with a connection or a leader is not
	// repeated, though nothing of what was cleared is served in any case. It must not block, nor call Close.
	OnClear func(Cleared)
	// Home makes the sessions those of a device's home, see docs/TIERS.md: what a node serves. Regions that the instance had
	// in an earlier session stay its own.
	Home bool
	// OnSession, if not nil, hears of each connection to a leader but the first one, which Open waits for: a leader that has
	// just been elected knows what a home has attached only when it is told again. resumed is false if the session is another
	// one. Calls do not overlap; connections that are made during a call are one more call. It must not call Close.
	OnSession func(resumed bool)
	// OnGrant, OnFence and OnTasks, if not nil, hear of what a home is asked to do, in goroutines of their own; Granted and
	// Fenced answer. At most maxPushes of a kind are carried out at a time. They must not call Close.
	OnGrant func(protocol.GrantPush)
	OnFence func(protocol.FencePush)
	OnTasks func(protocol.TasksPush)
	// Discard, if not nil, hears of stretches of the client's regions, but those that are for replicas alone, that hold nothing
	// any more and that nobody may read any more, and forgets what lies there. Nothing is stored to these until it has returned:
	// then nothing of it may happen any more, also if it failed or ctx was over. What it did not do it is not asked for again
	// before something has lain there anew. Calls do not overlap, and have at most maxDiscards stretches. It must not call Close.
	Discard func(ctx context.Context, list []Unused) error
	// Timeout bounds a call whose context has no deadline, retries included. 0: DefaultTimeout.
	Timeout time.Duration
	// CallTimeout bounds one attempt: a master that does not answer for so long is taken for lost. 0:
	// DefaultCallTimeout.
	CallTimeout time.Duration
	// Conns is the number of connections to the leader. 0: one.
	Conns int
	// Logger hears of what a person should know. nil: nobody does.
	Logger *slog.Logger
	// Clock reads CLOCK_BOOTTIME in nanoseconds. nil: the host's. Tests replace it.
	Clock func() int64
}

// Revoked says which region was taken away.
type Revoked struct {
	Region uint64 // id
	Bytes  uint64 // its length
	Reason error  // ErrRevoked, or ErrSessionExpired if the session ended
}

// Cleared says which of the tenant's entries a CLEAR has dropped: all of them, those whose keys have a prefix, or those of
// a context. One of the three is set.
type Cleared struct {
	Index   uint64         // of the log entry that did it: it grows from CLEAR to CLEAR, unless one entry did several
	All     bool           // also if the master named a scope that this release does not know
	Prefix  []byte         // of keys
	Context *PrefixContext // empty fields match everything
}

// withDefaults fills in what is not set, and refuses what cannot be.
func (cfg Config) withDefaults() (Config, error) {
	setDefault(&cfg.PageSize, DefaultPageSize)
	setDefault(&cfg.RegionSize, max(DefaultRegionSize/max(cfg.PageSize, 1), 1)*cfg.PageSize)
	setDefault(&cfg.TTL, DefaultTTL)
	setDefault(&cfg.Timeout, DefaultTimeout)
	setDefault(&cfg.CallTimeout, DefaultCallTimeout)
	setDefault(&cfg.Conns, 1)
	setDefault(&cfg.Tenant, "default")
	if cfg.Instance == "" {
		cfg.Instance = ownName()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if len(cfg.Near) == 0 && cfg.Device == 0 {
		cfg.Near = []string{cxl.HostName()}
	}
	if cfg.Clock == nil {
		cfg.Clock = cxl.Boottime
	}
	var wrong []string
	say := func(bad bool, text string, args ...any) {
		if bad {
			wrong = append(wrong, fmt.Sprintf(text, args...))
		}
	}
	say(len(cfg.Addrs) == 0, "Addrs is empty: name at least one master")
	say(cfg.PageSize < MinPageSize || cfg.PageSize%MinPageSize != 0 || cfg.PageSize > 1<<40,
		"PageSize %d is not a multiple of %d below 1 TiB", cfg.PageSize, MinPageSize)
	say(cfg.PageSize == 0 || cfg.RegionSize < cfg.PageSize || cfg.RegionSize%cfg.PageSize != 0,
		"RegionSize %d is not a multiple of the page size %d", cfg.RegionSize, cfg.PageSize)
	say(cfg.Conns < 0 || cfg.Conns > MaxConns, "Conns %d is not in 1..%d", cfg.Conns, MaxConns)
	say(cfg.TTL < 0 || cfg.Timeout < 0 || cfg.CallTimeout < 0, "TTL, Timeout and CallTimeout must not be negative")
	say(len(cfg.Instance) > protocol.MaxNameBytes || len(cfg.Tenant) > protocol.MaxNameBytes,
		"Instance and Tenant are at most %d bytes", protocol.MaxNameBytes)
	say(cfg.Tier != "" && protocol.TierRank(cfg.Tier) < 0,
		"Tier %q is none of cxl, dram, ssd: leave it empty for any", cfg.Tier)
	say(len(cfg.Near) > protocol.MaxPlaces || len(cfg.Avoid) > protocol.MaxPlaces, "Near and Avoid name at most %d places each",
		protocol.MaxPlaces)
	say(cfg.Replicas < 0 || cfg.Replicas > 1+protocol.MaxCopies, "Replicas %d is not in 1..%d", cfg.Replicas, 1+protocol.MaxCopies)
	say(cfg.WriteThrough != "" && protocol.TierRank(cfg.WriteThrough) < 0,
		"WriteThrough %q is none of cxl, dram, ssd: leave it empty for none", cfg.WriteThrough)
	for _, a := range cfg.Addrs {
		say(!strings.HasPrefix(a, unixScheme) && !strings.Contains(a, ":"),
			"address %q is neither host:port nor unix:/path", a)
	}
	if len(wrong) > 0 {
		return cfg, fmt.Errorf("%w: %s", ErrConfig, strings.Join(wrong, "; "))
	}
	return cfg, nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// ownName is a name that no other process of any host has at the same time.
func ownName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	pid := os.Getpid()
	start, _, err := cxl.ProcessStart(pid)
	if err != nil {
		start = uint64(max(cxl.Boottime(), 0)) // no /proc: the time does as well
	}
	return fmt.Sprintf("%.128s-%d-%d-%d", host, pid, start, instances.Add(1))
}
