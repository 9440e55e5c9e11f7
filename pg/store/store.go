package store

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"larder/protocol"
)

// Limits that all implementations have in common.
const (
	// MaxKeyBytes bounds a key: a path of a few parts. It leaves room for a prefix in the 512 bytes that names of the masters have.
	MaxKeyBytes = 256
	// MaxValueBytes bounds a value: how a process is reached, or who is in a group of a thousand.
	MaxValueBytes = protocol.MaxNameValueBytes
	// MaxEntries and MaxBytes bound what is in a store, and the bytes of its keys and values: what a server keeps in memory for
	// whoever asks. The masters have limits of their own, which are no smaller, for all that a tenant has.
	MaxEntries = 16384
	MaxBytes   = 32 << 20
	// MinLease and MaxLease bound a lease. A shorter one would end whenever a busy host does not run a process for a moment.
	MinLease = 200 * time.Millisecond
	MaxLease = time.Hour
	// DefaultLease is what a lease of 0 stands for.
	DefaultLease = 3 * time.Second
	// callTime bounds a call whose context has no deadline.
	callTime = 10 * time.Second
	// beats is how many times a lease is renewed within its duration.
	beats = 3
)

// Errors that all implementations have in common. Compare with errors.Is.
var (
	// ErrNotFound says that there is no entry of that key.
	ErrNotFound = errors.New("no such entry")
	// ErrConflict says that the entry has another revision than the call asked for: somebody else was first.
	ErrConflict = errors.New("the entry has another revision")
	// ErrLimit says that something is larger than, or there are more than, the store takes.
	ErrLimit = errors.New("a limit of the store")
	// ErrInvalid says that an argument cannot be used.
	ErrInvalid = errors.New("invalid argument")
	// ErrClosed says that the store has been closed.
	ErrClosed = errors.New("the store is closed")
)

// UnavailableError says that the store could not be reached in time. What was to be changed has changed, or will soon, or not:
// read it.
type UnavailableError struct {
	Where string // the URL of the store
	Err   error  // the last attempt's, or the context's
}

// Error describes e for people.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("the store at %s cannot be reached: %v", e.Where, e.Err)
}

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Entry is a key and its value.
type Entry struct {
	Key      string `msgpack:"key"`
	Value    []byte `msgpack:"value,omitempty"`
	Created  uint64 `msgpack:"created"`  // the revision that made it; another one if it was deleted and made again
	Modified uint64 `msgpack:"modified"` // the one that set it last; revisions of a store grow from change to change
}

// Change is what has become of an entry. Of one that was deleted there is no Value, and Modified is when that was known.
type Change struct {
	Entry

	Deleted bool `msgpack:"deleted,omitempty"`
}

// Option changes what Put and Delete do.
type Option func(o *options)

type options struct {
	check, lease bool
	revision     uint64
}

// IfRevision has the call fail with ErrConflict unless the entry's Modified is revision; 0 stands for an entry that must not be
// there.
func IfRevision(revision uint64) Option {
	return func(o *options) { o.check, o.revision = true, revision }
}

// IfAbsent is IfRevision(0).
func IfAbsent() Option { return IfRevision(0) }

// Leased has an entry end with the present lease of the Store that puts it.
func Leased() Option { return func(o *options) { o.lease = true } }

// allows reports whether an entry whose Modified is modified, 0 if it is not there, is one that the call is about.
func (o *options) allows(modified uint64) bool { return !o.check || o.revision == modified }

func readOptions(opts []Option) (o options) {
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// Store is a small map from keys to values that processes share, and one process's end of it. Its methods may be called
// concurrently, also with Close. A call whose ctx has no deadline takes at most ten seconds; one that does not succeed in its
// time fails with an *[UnavailableError], which wraps the context's error if that was over.
//
// # Leases
//
// A Store has a lease, which it renews in the background. When the process ends, or the store has not heard of it for Lease, the
// entries that it has put with [Leased], and that nobody else has put since, are deleted: at most Lease and a second later,
// usually at once if the process died on the same host.
//
// A process may lose its lease and live: it was stopped, or could not reach the store. The Store then takes a new one as soon as it
// can, and does not put anything again by itself. Lost tells so; in short, whoever announces himself does
//
//	for {
//		lost := s.Lost()
//		announce(s) // Put with Leased
//		<-lost      // and select whatever else there is to wait for
//	}
type Store interface {
	// Get reads an entry. It sees every change that was acknowledged before the call. The error is ErrNotFound if it is not there.
	Get(ctx context.Context, key string) (Entry, error)

	// Put sets an entry, and returns it with its new revision. Without IfRevision the last one who sets it has it; without Leased it
	// stays until it is deleted, also if it was leased before. With ErrConflict the result is the entry as it is by now, a zero one
	// if it is not there.
	Put(ctx context.Context, key string, value []byte, opts ...Option) (Entry, error)

	// Delete removes an entry, whoever has set it. The error is ErrNotFound if it is not there, and ErrConflict as with Put.
	Delete(ctx context.Context, key string, opts ...Option) error

	// List reads the entries whose keys begin with prefix, in the order of their keys. The revision is one that all of it is at
	// least as new as.
	List(ctx context.Context, prefix string) ([]Entry, uint64, error)

	// Watch tells fn of the entries whose keys begin with prefix until ctx is over or the store is closed, whose error it returns,
	// or fn returns an error, which it returns. The first call of fn has those that are there, perhaps none; every other what
	// has changed since. Of one key the changes come in their order. A watch may miss a value that was soon replaced by another, but
	// never the last one, nor that an entry is another one now: its Created has changed. It goes on when the store could not be
	// reached for a while, then telling what has changed meanwhile.
	//
	// fn is called by this goroutine; what it is given is its own.
	Watch(ctx context.Context, prefix string, fn func(changes []Change) error) error

	// Lease is how long the store keeps the lease of a process that it does not hear of. It may differ from what was asked for.
	Lease() time.Duration

	// Confirmed is how long ago the latest request was sent by whose answer the store is known to have renewed the present lease. While
	// it is less than Lease, the entries of the lease are there; beyond it others may take this process for dead already.
	Confirmed() time.Duration

	// Lost returns a channel that is closed when the present lease is over: the store has given it up, so that what was put with it
	// is gone or about to go, or the Store was closed. The next call returns that of the next lease. Lost is closed before
	// Confirmed tells of the new lease.
	Lost() <-chan struct{}

	// Close ends the lease: leased entries are deleted at once, or, if the store cannot be reached, when the lease is over.
	Close() error
}

// checkKey refuses what is no key.
func checkKey(key string) error {
	if key == "" || !utf8.ValidString(key) {
		return fmt.Errorf("%w: the key %.64q is empty or no UTF-8", ErrInvalid, key)
	}
	if len(key) > MaxKeyBytes {
		return fmt.Errorf("%w: the key %.64q... has %d bytes, of at most %d", ErrLimit, key, len(key), MaxKeyBytes)
	}
	return nil
}

// checkPrefix refuses what no key begins with.
func checkPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	return checkKey(prefix)
}

// checkPut refuses what no implementation takes.
func checkPut(key string, value []byte) error {
	if len(value) > MaxValueBytes {
		return fmt.Errorf("%w: the value of %q has %d bytes, of at most %d", ErrLimit, key, len(value), MaxValueBytes)
	}
	return checkKey(key)
}

// checkLease fills in the default, and refuses what is no lease.
func checkLease(lease time.Duration) (time.Duration, error) {
	if lease == 0 {
		lease = DefaultLease
	}
	if lease < MinLease || lease > MaxLease {
		return 0, fmt.Errorf("%w: a lease of %v: choose one of %v to %v, or 0 for %v", ErrInvalid, lease, MinLease, MaxLease, DefaultLease)
	}
	return lease, nil
}

// withCallTime gives a call that has no deadline its own.
func withCallTime(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, callTime)
}
