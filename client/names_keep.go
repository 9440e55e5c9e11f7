package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// keepTime bounds one attempt to put a kept name again.
const keepTime = 10 * time.Second

// KeptName is a leased name that outlives sessions: when the masters have given one up, after a pause of this process or of
// the network, the client puts the name again with the next one. It ends with Drop, or with the client. Its methods may be
// called concurrently.
type KeptName struct {
	c   *Client
	key string

	mu       sync.Mutex // held while a request is made: they go one after the other
	value    []byte
	put      *session // that it was put in last
	revision uint64   // by which
	dropped  bool     // it is not to be put again
}

// keptNames are those of a client.
type keptNames struct {
	mu  sync.Mutex
	set map[*KeptName]struct{}
}

// KeepName sets a name as PutName does with Leased, and keeps it. Whoever puts the same name afterwards has it, until this
// client's session is another one: names that several processes may want are for PutName with IfAbsent.
func (c *Client) KeepName(ctx context.Context, key string, value []byte) (*KeptName, error) {
	k := &KeptName{c: c, key: key}
	c.kept.mu.Lock()
	if c.kept.set == nil {
		c.kept.set = make(map[*KeptName]struct{})
	}
	c.kept.set[k] = struct{}{} // before it is put, so that no session that begins meanwhile passes it over
	c.kept.mu.Unlock()
	if err := k.Set(ctx, value); err != nil {
		c.unkeep(k)
		return nil, err
	}
	return k, nil
}

func (c *Client) unkeep(k *KeptName) {
	c.kept.mu.Lock()
	delete(c.kept.set, k)
	c.kept.mu.Unlock()
}

// Key is the name's.
func (k *KeptName) Key() string { return k.key }

// Set changes the name's value. If it fails the value may have changed or not, and is set with the next session at the latest.
func (k *KeptName) Set(ctx context.Context, value []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dropped {
		return fail("keep name", []byte(k.key), ErrNotFound)
	}
	k.value = append([]byte(nil), value...)
	return fail("keep name", []byte(k.key), k.set(ctx))
}

// set puts the name in the present session. The caller holds mu.
func (k *KeptName) set(ctx context.Context) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, k.c.cfg.Timeout)
		defer cancel()
	}
	for n := 0; ; n++ {
		s, err := k.c.session(ctx)
		if err != nil {
			return err
		}
		x, err := k.c.putName(ctx, s, k.key, k.value, Leased())
		if err == nil {
			k.put, k.revision = s, x.Modified
			return nil
		}
		if !errors.Is(fail("", nil, err), ErrSessionExpired) {
			return err
		}
		if err := sleep(ctx, backoff(n)); err != nil {
			return timedOut(err, ErrSessionExpired)
		}
	}
}

// Drop removes the name, unless somebody else has set it meanwhile. It is not put again, also if Drop fails: then it goes with
// the session, or when Drop is called again.
func (k *KeptName) Drop(ctx context.Context) error {
	k.c.unkeep(k)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dropped = true
	s := k.put
	if s == nil || s.ended() {
		return nil // it went with that
	}
	err := k.c.deleteName(ctx, s, k.key, IfRevision(k.revision))
	if f := fail("drop name", []byte(k.key), err); f != nil && !errors.Is(f, ErrConflict) && !errors.Is(f, ErrNotFound) &&
		!errors.Is(f, ErrSessionExpired) {
		return f
	}
	k.put = nil
	return nil
}

// putKept puts the kept names again in a new session.
func (c *Client) putKept(s *session) {
	c.kept.mu.Lock()
	list := make([]*KeptName, 0, len(c.kept.set))
	for k := range c.kept.set {
		list = append(list, k)
	}
	c.kept.mu.Unlock()
	for _, k := range list {
		for n := 0; !k.again(s); n++ {
			if sleep(c.life, backoff(n)) != nil {
				return
			}
		}
	}
}

// again puts the name in a session, unless it is there or the session is over. It reports false if that is to be tried again.
func (k *KeptName) again(s *session) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dropped || k.put == s || k.put == nil || s.ended() { // the first time is its maker's
		return true
	}
	ctx, cancel := context.WithTimeout(k.c.life, keepTime)
	defer cancel()
	err := k.set(ctx)
	if err != nil && k.c.life.Err() == nil {
		k.c.cfg.Logger.Warn("a kept name is not there yet", slog.String("name", k.key), slog.Any("error", err))
	}
	return err == nil || !passing(err)
}
