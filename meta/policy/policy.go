package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Slot names one entry: a dense index into the machine's table, reused after
// the entry has left.
type Slot = uint32

// None is the Slot of no entry.
const None = ^Slot(0)

// MaxLists bounds Order.List: policies use lists 0 to MaxLists-1. The bits
// above are the machine's own and never reach a policy.
const MaxLists = 16

// Order is what a policy remembers of one entry. The machine persists it and
// hands it back exactly, so a policy keeps no memory of its own per entry.
//
// The machine zeroes it when the entry is registered and when a pool changes
// its policy. It survives Remove followed by Add (an entry pinned and
// unpinned), so that, for example, a frequency is not forgotten.
type Order struct {
	Stamp int64  // place within its list: lists are ordered by it, coldest first
	Aux   uint32 // the policy's own: a frequency, a visited bit, a time of use
	List  uint8  // which of the policy's lists, below MaxLists
}

// Links are an entry's neighbours in its list. They are not persisted: Restore
// rebuilds them.
type Links struct {
	Colder, Hotter Slot
}

// Info is what a policy may know of an entry at little cost. All but Children is
// fixed when the entry is registered.
type Info struct {
	Bytes     uint64 // length of the entry's page run
	AddedMS   uint64 // log time of registration, milliseconds
	ExpiresMS uint64 // log time at which it expires, milliseconds; 0: not given
	Index     uint32 // index of the block in the request that stored it
	Context   uint32 // the context (model, adapter, tenant) it belongs to
	// Children counts the entries of the pool whose parent this is, wherever
	// they lie and whether pinned or not.
	Children uint32
	Class    uint8 // the caller's class of entry (soft-pinned entries have their own)
}

// Table is the machine's side: the storage of orders and links of all
// partitions. All methods are O(1) and allocate nothing.
type Table interface {
	// Order returns what the policy last set.
	Order(s Slot) Order
	// SetOrder replaces it, marks it for persistence and updates the state hash.
	SetOrder(s Slot, o Order)
	// Links returns the entry's neighbours for reading and writing in place.
	// The pointer is good until the table grows: never kept over a call.
	Links(s Slot) *Links
	// Info returns what is known of the entry.
	Info(s Slot) Info
	// KeyHash returns a stable 64-bit hash of the entry's key, 0 when unknown. It
	// is worked out for each call.
	KeyHash(s Slot) uint64
	// Parent returns the entry of the block before this one in its prefix, None
	// when unknown, gone, or of another partition. The machine links a block only
	// when it is registered and only to an entry that existed then, so that
	// parents form a forest. It is looked up for each call.
	Parent(s Slot) Slot
	// NextStamp returns a stamp above every earlier one, for the hot end of a
	// list. It is positive, strictly increasing over the life of the pool, and
	// persisted.
	NextStamp() int64
	// ColdStamp returns a stamp below every earlier one, for the cold end of a
	// list: negative, strictly decreasing over the life of the pool, persisted.
	ColdStamp() int64
}

// Verdict is the answer to an entry that Policy.Victims offers.
type Verdict uint8

const (
	// Take means that the caller will evict the entry: what follows is the
	// order as if it had left.
	Take Verdict = iota
	// Skip means that the entry stays (leased, pinned, condemned already).
	Skip
	// Stop ends the walk.
	Stop
)

// Policy orders the entries of one partition (the entries of one owner
// instance, one page size and one class) by how little they would be missed.
//
// A policy is deterministic: its state and its order of victims are functions
// of the calls made, of Info, and of nothing else. It is not safe for
// concurrent use, except that Victims may run beside other readers.
//
// All methods but Victims and FlushState are O(1) amortised and allocate nothing
// in the steady state.
type Policy interface {
	// Add takes in an entry that was registered or unpinned.
	Add(s Slot)
	// Touch reports n uses, n >= 1, since the last decision.
	Touch(s Slot, n uint32)
	// Remove takes out an entry that left for a reason of somebody else's:
	// deleted, dropped, pinned.
	Remove(s Slot)
	// Evict takes out an entry by the policy's own decision. Victims of one
	// plan are evicted in the order in which Victims offered them; some may
	// meanwhile have been removed or touched, and are then missing or evicted
	// all the same. Entries that leave for another reason than their place in
	// that order, as when a region is emptied whole, leave by Remove.
	Evict(s Slot)
	// Victims offers entries in the order in which they should leave at log
	// time now (milliseconds), each at most once, until yield answers Stop. It
	// changes nothing: evicting what was taken is a later, logged decision. It
	// is lazy, O(1) amortised per entry offered, where walking over entries
	// that have earned another round counts towards the eviction that follows.
	Victims(now uint64, yield func(Slot) Verdict)
	// ChildAdded reports that Info(parent).Children has grown. It is called
	// for a parent that is in this policy, after the table says so.
	ChildAdded(parent Slot)
	// ChildGone reports that Info(parent).Children has shrunk; child is the
	// order that the child had when it left. It is called after the child's
	// own Remove or Evict, for a parent that is in this policy.
	ChildGone(parent Slot, child Order)
	// Restore takes in an entry of a pool being rebuilt, with its Order as it
	// was. It is called after every RestoreState, once per entry, by ascending
	// Order.Stamp.
	Restore(s Slot)
	// RestoreState takes back one page that FlushState wrote, by ascending
	// number and before the first Restore. An error means that the page is not
	// this policy's.
	RestoreState(page uint32, data []byte) error
	// FlushState hands out the pages of state, beyond Order, that changed
	// since the last call, or with all every page. put owns data only during
	// the call; no data means that the page is to be deleted. A page is at
	// most MaxStatePage bytes.
	FlushState(all bool, put func(page uint32, data []byte))
	// StateHash is a hash of all that FlushState(true) would write, in O(1):
	// it belongs into the machine's state hash, and its change says that there
	// is something to flush.
	StateHash() uint64
	// Len is the number of entries held.
	Len() int
}

// MaxStatePage bounds one page of a policy's state, so that writing the change
// of one eviction stays small: 512 numbers of 64 bits.
const MaxStatePage = 4096

// DefaultMaxGhosts is used for Config.MaxGhosts 0: 2^20 remembered keys cost
// about 40 MB in a partition that large, and cover a million cached pages.
const DefaultMaxGhosts = 1 << 20

// Config holds what the shipped policies can be told. It must be the same on
// every replica: the machine takes it from the log, not from a flag.
type Config struct {
	// TTLMS is the life of an entry that was registered without its own, in
	// milliseconds from registration; 0: such entries never expire and leave
	// last. Used by "ttl".
	TTLMS uint64
	// MaxGhosts bounds the keys of evicted entries that are remembered per
	// partition; 0: DefaultMaxGhosts. Used by "s3fifo".
	MaxGhosts uint32
}

// Factory makes an empty policy for one partition over t.
type Factory func(cfg Config, t Table) (Policy, error)

// ErrUnknown is wrapped by New for a name that nobody registered.
var ErrUnknown = errors.New("policy: unknown eviction policy")

// Default is the name of the policy of a pool for which none was chosen.
const Default = "lru"

type registration struct {
	name    string
	factory Factory
}

// registered is kept sorted by name.
var registered []registration

func find(name string) (int, bool) {
	return slices.BinarySearchFunc(registered, name, func(r registration, n string) int {
		return strings.Compare(r.name, n)
	})
}

// Register makes a policy known under a name. Call it before the server
// starts, from an init function or the top of main: it is not safe for
// concurrent use. Every member of a cluster must register the same policies
// under the same names. It panics when the name is empty or taken.
func Register(name string, f Factory) {
	i, taken := find(name)
	if name == "" || f == nil || taken {
		panic(fmt.Sprintf("policy: cannot register %q: the name is empty or taken, or the factory is nil", name))
	}
	registered = slices.Insert(registered, i, registration{name, f})
}

// New makes an empty policy of a registered name for one partition. The error
// for an unknown name wraps ErrUnknown and lists those known.
func New(name string, cfg Config, t Table) (Policy, error) {
	i, ok := find(name)
	if !ok {
		return nil, fmt.Errorf("%w %q: choose one of %s", ErrUnknown, name, strings.Join(Names(), ", "))
	}
	p, err := registered[i].factory(cfg, t)
	if err != nil {
		return nil, fmt.Errorf("policy %q: %w", name, err)
	}
	return p, nil
}

// Known reports whether a policy is registered under name.
func Known(name string) bool {
	_, ok := find(name)
	return ok
}

// Names lists the registered policies in alphabetical order.
func Names() []string {
	names := make([]string, len(registered))
	for i, r := range registered {
		names[i] = r.name
	}
	return names
}
