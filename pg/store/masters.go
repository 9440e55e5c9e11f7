package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"larder/client"
	"larder/protocol"
)

const (
	// minCallTimeout and maxCallTimeout bound how long a master may take to answer before another is asked: a third of the lease
	// if that lies between, so that one that hangs costs no lease.
	minCallTimeout = 500 * time.Millisecond
	maxCallTimeout = client.DefaultCallTimeout
	// maxPrefixBytes leaves room for a key.
	maxPrefixBytes = protocol.MaxNameKeyBytes - MaxKeyBytes
)

// masters is a Store of names.
type masters struct {
	c      *client.Client
	where  string
	prefix string

	mu      sync.Mutex
	session uint64        // whose end closes lost
	lost    chan struct{} // of the present lease
	closed  bool
}

// Masters opens the store that Larder's masters keep: the names, of cfg's tenant, that begin with prefix. The lease is the session of
// a client of its own, which cfg describes but for its TTL, Timeout and CallTimeout. The masters grant a second at least, and no
// more than their session_ttl. A session holds at most 4096 leased entries.
func Masters(ctx context.Context, cfg client.Config, prefix string, lease time.Duration) (Store, error) {
	lease, err := checkLease(lease)
	if err != nil {
		return nil, err
	}
	if len(prefix) > maxPrefixBytes {
		return nil, fmt.Errorf("%w: the prefix has %d bytes, of at most %d", ErrLimit, len(prefix), maxPrefixBytes)
	}
	m := &masters{where: "masters://" + strings.Join(cfg.Addrs, ","), prefix: prefix, lost: make(chan struct{})}
	cfg.TTL, cfg.Timeout = lease, callTime
	cfg.CallTimeout = min(max(lease/beats, minCallTimeout), maxCallTimeout)
	told := cfg.OnSession
	cfg.OnSession = func(resumed bool) {
		m.status()
		if told != nil {
			told(resumed)
		}
	}
	c, err := client.Open(ctx, cfg)
	if err != nil {
		return nil, m.fail("", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.c, m.session = c, c.SessionStatus().ID
	return m, nil
}

// status returns that of the present session, and takes note if it is another one.
func (m *masters) status() (s client.SessionStatus) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c == nil {
		return s // Open has not returned yet
	}
	s = m.c.SessionStatus()
	if s.ID != m.session && !m.closed {
		m.session = s.ID
		close(m.lost)
		m.lost = make(chan struct{})
	}
	return s
}

// Lease implements Store.
func (m *masters) Lease() time.Duration { return m.status().TTL }

// Confirmed implements Store.
func (m *masters) Confirmed() time.Duration { return m.status().Confirmed }

// Lost implements Store.
func (m *masters) Lost() <-chan struct{} {
	m.status()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost
}

// Get implements Store.
func (m *masters) Get(ctx context.Context, key string) (Entry, error) {
	if err := m.check(ctx, checkKey(key)); err != nil {
		return Entry{}, err
	}
	n, err := m.c.GetName(ctx, m.prefix+key)
	if err != nil {
		return Entry{}, m.fail(key, err)
	}
	return m.entry(&n), nil
}

// Put implements Store.
func (m *masters) Put(ctx context.Context, key string, value []byte, opts ...Option) (Entry, error) {
	if err := m.check(ctx, checkPut(key, value)); err != nil {
		return Entry{}, err
	}
	n, err := m.c.PutName(ctx, m.prefix+key, value, nameOptions(opts)...)
	if err == nil {
		return m.entry(&n), nil
	}
	err = m.fail(key, err)
	if !errors.Is(err, ErrConflict) || n.Modified == 0 {
		return Entry{}, err
	}
	e, again := m.Get(ctx, key) // the refusal came without the value
	if again != nil && !errors.Is(again, ErrNotFound) {
		return Entry{}, again
	}
	return e, err
}

// Delete implements Store.
func (m *masters) Delete(ctx context.Context, key string, opts ...Option) error {
	if err := m.check(ctx, checkKey(key)); err != nil {
		return err
	}
	return m.fail(key, m.c.DeleteName(ctx, m.prefix+key, nameOptions(opts)...))
}

// List implements Store.
func (m *masters) List(ctx context.Context, prefix string) ([]Entry, uint64, error) {
	if err := m.check(ctx, checkPrefix(prefix)); err != nil {
		return nil, 0, err
	}
	names, revision, err := m.c.ListNames(ctx, m.prefix+prefix)
	if err != nil {
		return nil, 0, m.fail(prefix, err)
	}
	entries := make([]Entry, len(names))
	for i := range names {
		entries[i] = m.entry(&names[i])
	}
	return entries, revision, nil
}

// Watch implements Store.
func (m *masters) Watch(ctx context.Context, prefix string, fn func(changes []Change) error) error {
	if err := checkPrefix(prefix); err != nil {
		return err
	}
	var told error
	err := m.c.WatchNames(ctx, m.prefix+prefix, func(list []client.NameChange) error {
		changes := make([]Change, len(list))
		for i := range list {
			changes[i] = Change{m.entry(&list[i].Name), list[i].Deleted}
		}
		told = fn(changes)
		return told
	})
	switch {
	case told != nil:
		return told
	case ctx.Err() != nil:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	return m.fail(prefix, err)
}

// Close implements Store.
func (m *masters) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	close(m.lost)
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), maxCallTimeout)
	defer cancel()
	return m.fail("", m.c.Close(ctx))
}

// check is the error of an argument, or else of a context that is over before anything is sent.
func (m *masters) check(ctx context.Context, wrong error) error {
	if wrong == nil && ctx.Err() != nil {
		return &UnavailableError{m.where, ctx.Err()}
	}
	return wrong
}

// entry converts a name that begins with the prefix.
func (m *masters) entry(n *client.Name) Entry {
	return Entry{Key: n.Key[len(m.prefix):], Value: n.Value, Created: n.Created, Modified: n.Modified}
}

func nameOptions(opts []Option) (list []client.NameOption) {
	o := readOptions(opts)
	if o.check {
		list = append(list, client.IfRevision(o.revision))
	}
	if o.lease {
		list = append(list, client.Leased())
	}
	return list
}

// fail makes this package's error of the client's.
func (m *masters) fail(key string, err error) error {
	if err == nil {
		return nil
	}
	e, _ := errors.AsType[*client.Error](err)
	switch {
	case errors.Is(err, client.ErrClosed):
		return ErrClosed
	case errors.Is(err, client.ErrNotFound):
		return fmt.Errorf("%w: %.64q", ErrNotFound, key)
	case errors.Is(err, client.ErrConflict):
		return fmt.Errorf("%w: %.64q", ErrConflict, key)
	case errors.Is(err, client.ErrConfig):
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	case e != nil && e.Code == protocol.CodeLimit:
		return fmt.Errorf("%w: %w", ErrLimit, err)
	default:
		return &UnavailableError{m.where, err}
	}
}
