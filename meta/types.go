package meta

import (
	"larder/meta/policy"
	"larder/protocol"
)

// Slot is the dense id of an entry: the lowest one that was free when the entry was registered. A slot is
// reused; (Slot, Birth) never is.
type Slot = policy.Slot

// None is no slot.
const None = policy.None

// SessionID names a session for ever. 0 is no session.
type SessionID uint64

// RegionID names a region for ever. 0 is no region.
type RegionID uint64

// DeviceID names a device for ever. 0 is no device.
type DeviceID uint32

// ContextID names an interned Context within one pool.
type ContextID uint32

// Limits of the state machine. Each bounds what one command, session or tenant can make the index hold or do.
const (
	// MaxSessions bounds sessions, live or kept because regions of theirs remain.
	MaxSessions = 65536
	// MaxRegions bounds regions, since planning walks them.
	MaxRegions = 65536
	// MaxRegionPages bounds the pages of one region, and with them its occupancy bitmap (2 MiB).
	MaxRegionPages = 1 << 24
	// MaxDevices bounds devices.
	MaxDevices = 4096
	// MaxContexts bounds interned contexts, which are kept in memory.
	MaxContexts = 65536
	// MaxClearMarks bounds the CLEARs in progress, since every lookup compares them: of a prefix, a context or a tenant.
	MaxClearMarks = 64
	// MaxTenantMarks bounds those of one tenant, so that there is room for others'.
	MaxTenantMarks = MaxClearMarks / 4
	// MaxSessionPins bounds a session's own pins, since they are undone in one command when it ends.
	MaxSessionPins = 4096
	// MaxDurablePins bounds durable and soft pins of one tenant, and what SetTenant can limit its pins to.
	MaxDurablePins = 65536
	// MaxDropPerCommand bounds the entries that one command removes: as many as one REQUEST_ALLOC may need pages for.
	MaxDropPerCommand = 4096
	// MaxChorePerCommand bounds those that Sweep or EmptyRegion removes, or hands to another policy: about 3 ms of the
	// leader's time where nothing of them is in a cache, so that no lookup waits longer.
	MaxChorePerCommand = 1024
	// MaxRemembered bounds the bytes of remembered replies of one session.
	MaxRemembered = 4 << 20
	// MinPageSize is the smallest page, and the alignment of extents.
	MinPageSize = 4096
	// MaxIncarnation bounds the number of an incarnation, so that ids can begin with it.
	MaxIncarnation = 1<<41 - 1
	// MaxEntryBytes bounds one entry: lengths are kept in 32 bits.
	MaxEntryBytes = 1<<32 - 1
)

// RegionState says who may write to a region.
type RegionState uint8

// Region states.
const (
	// RegionOwned: the owner's session is open, or closed but its process may still write.
	RegionOwned RegionState = iota + 1
	// RegionOrphaned: the owner's session has ended and its process is not known to be dead: fenced, skipped.
	RegionOrphaned
	// RegionDeparted: nobody writes there any more (returned, or the owner is proven dead); its entries are served.
	RegionDeparted
	// RegionMarked: taken from a live owner, whose acknowledgement is awaited.
	RegionMarked
	// RegionDraining: empty and unowned; freed once no reader can hold a lease in it.
	RegionDraining
)

var regionStates = [...]string{"", "owned", "orphaned", "departed", "marked", "draining"}

// String returns the state's name as `larder ctl regions` shows it.
func (s RegionState) String() string { return regionStates[s] }

// Class of an entry, as eviction sees it.
type Class uint8

// Classes.
const (
	ClassNormal Class = iota // evicted in the policy's order
	ClassSoft                // soft-pinned: evicted last, but before a store fails
	ClassHard                // pinned: never evicted
)

// String returns the class's name.
func (c Class) String() string { return [...]string{"normal", "soft", "hard"}[c] }

// Context scopes prefix hashes and CLEAR.
type Context struct {
	Tenant    string
	Model     string
	LoRA      string
	Salt      string
	BlockSize uint64
	Seed      uint64
}

// ContextOf is a context of the wire, which names no tenant, as one of a tenant.
func ContextOf(tenant string, c *protocol.Context) Context {
	return Context{Tenant: tenant, Model: c.Model, LoRA: c.LoRA, Salt: c.Salt, BlockSize: c.BlockSize, Seed: c.Seed}
}

// Settings are the replicated settings. A zero pool takes DefaultSettings; SetSettings changes them for everybody.
type Settings struct {
	Version               uint32 // cluster version: gates commands and formats
	Policy                string // eviction policy
	TTLMS                 uint64 // default time to live under the ttl policy
	PageSize              uint64 // for requests that name none
	RegionSize            uint64 // for requests that name none
	MaxRegionsPerInstance uint64 // 0 = unlimited
	MinRegionAgeMS        uint64 // a live client's region is not taken before it is this old
	TierLow               uint64 // percent of a device in use from which on its cold end is copied to a slower tier; 100 = never
	PromoteAfter          uint64 // uses in the slowest tier after which an entry is wanted in a faster one; 0 = never
	PromoteMost           uint64 // bytes of the largest entry that is; 0 = no limit
	PromoteRate           uint64 // bytes per second for which each client is asked that; 0 = no limit
	TierLows              string // what TierLow is for some tiers and devices, see Watermarks.Named; "" = for none
}

// Defaults of settings that VersionTiers has brought.
const (
	defaultTierLow      = 70
	defaultPromoteAfter = 2
)

// Defaults of settings that VersionPromotion has brought.
const (
	defaultPromoteMost = 64 << 20
	defaultPromoteRate = 256 << 20
)

// Versions of commands and formats that the cluster may be raised to, see Settings.Version.
const (
	// VersionFirst is what a pool begins with: a log that is applied from its first entry on must lead to the same state
	// under every binary. The leader raises a new pool's at once.
	VersionFirst = 1
	// VersionTenants has SetTenant, EmptyRegion for a session, and ReturnRegion of an epoch.
	VersionTenants = 2
	// VersionTiers has devices with homes, copies, tasks, and names.
	VersionTiers = 3
	// VersionPromotion has settings that bound promotions, and watermarks of tiers and devices.
	VersionPromotion = 4
	// VersionMaru has keys of Maru's clients.
	VersionMaru = 5
	// ClusterVersion is the newest that this binary speaks.
	ClusterVersion = VersionMaru
)

// DefaultSettings returns the settings that a pool begins with.
func DefaultSettings() Settings {
	return Settings{
		Version: VersionFirst, Policy: "lru", PageSize: 64 << 10, RegionSize: 64 << 20, MinRegionAgeMS: 5000,
		TierLow: defaultTierLow, PromoteAfter: defaultPromoteAfter,
		PromoteMost: defaultPromoteMost, PromoteRate: defaultPromoteRate,
	}
}

// FeatureMaru is a feature of sessions that were opened for clients of Maru's: they never expire, and end when the last region
// is returned, or when the pool is full and nobody has heard of their clients for a while. It is none of the wire's.
const FeatureMaru = 1 << 63

// Process identifies a client's process on its host, so that a server on the same host can tell that it is dead.
type Process struct {
	BootID       string // the host's boot id
	PIDNamespace uint64
	PID          uint64
	Start        uint64 // clock ticks after boot
}

// Known reports whether the client said who it is.
func (p *Process) Known() bool { return p.BootID != "" && p.PID != 0 }

// Location is where an entry's bytes lie.
type Location struct {
	Region       RegionID
	Device       DeviceID
	RegionOffset uint64 // of the region in the device, bytes
	RegionLength uint64
	Generation   uint64 // of the device
	Epoch        uint64 // of the region
	PageSize     uint64
	Offset       uint64 // of the entry in the region
	Length       uint64
	Checksum     uint64 // XXH3-64, 0 = none
}

// Wire converts a location to the protocol's form.
func (l *Location) Wire() protocol.Location {
	return protocol.Location{
		Region: protocol.Region{
			Handle: protocol.Handle{
				RegionID: uint64(l.Region), Offset: l.RegionOffset, Length: l.RegionLength,
			},
			Device: uint64(l.Device), Generation: l.Generation, Epoch: l.Epoch, PageSize: l.PageSize,
		},
		KVOffset: l.Offset, KVLength: l.Length, Checksum: l.Checksum,
	}
}

// Page is a run of pages that an entry held and that its owner may reuse once no lease is left on it.
type Page struct {
	Key    []byte
	Slot   Slot // the entry's, for the lease table
	Region RegionID
	Owner  SessionID
	Offset uint64
	Length uint64
	// Copy says that the entry lives on elsewhere, or that more pages of it follow: leases on it hold for this page, and are
	// not over.
	Copy bool
}

// Effect is a page freed by somebody who is not its owner; the leader tells the owner.
type Effect struct {
	Page
	Reason Reason
}

// Reason says why an entry left the index.
type Reason uint8

// Reasons.
const (
	ReasonDeleted Reason = iota + 1
	ReasonEvicted
	ReasonCleared
	ReasonLost    // the device's generation was retired
	ReasonExpired // time to live
	ReasonTaken   // its region was given to somebody else
	ReasonMoved   // of pages: the entry was moved to another device
)

// Reasons counts, for metrics, the Reason values that an entry can leave for.
const Reasons = int(ReasonTaken) + 1

// String returns the reason as a metric label.
func (r Reason) String() string {
	return [...]string{"", "deleted", "evicted", "cleared", "lost", "expired", "taken", "moved"}[r]
}
