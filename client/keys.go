package client

import (
	"context"
	"fmt"

	"larder/protocol"
)

// Exists reports whether key is held. It grants no lease and counts as no use, and any master answers it.
func (c *Client) Exists(ctx context.Context, key []byte) (bool, error) {
	held, err := c.ExistsBatch(ctx, [][]byte{key})
	if err != nil {
		return false, fail("exists", key, err)
	}
	return held[0], nil
}

// ExistsBatch reports for each key whether it is held.
func (c *Client) ExistsBatch(ctx context.Context, keys [][]byte) ([]bool, error) {
	held := make([]bool, 0, len(keys))
	err := c.inBatches(keys, func(part [][]byte) error {
		m := &keysMsg{typ: protocol.TypeBatchExists, req: protocol.KeysRequest{Keys: part}}
		if _, _, err := c.roundTrip(ctx, nil, m.typ, m, 0); err != nil {
			return err
		}
		return m.collect(&held)
	})
	return held, fail("exists", nil, err)
}

// Delete removes keys, of whatever client, and reports for each whether it was held. The owner reuses the pages when
// no reader can hold a lease any more. A pinned key is not removed.
func (c *Client) Delete(ctx context.Context, keys ...[]byte) ([]bool, error) {
	was := make([]bool, 0, len(keys))
	err := c.inBatches(keys, func(part [][]byte) error {
		some, err := c.remove(ctx, protocol.KeysRequest{Keys: part})
		was = append(was, some...)
		return err
	})
	return was, fail("delete", nil, err)
}

// remove is DELETE, and reports for each key whether something went.
func (c *Client) remove(ctx context.Context, req protocol.KeysRequest) (was []bool, err error) {
	m := &keysMsg{typ: protocol.TypeBatchDelete, req: req}
	m.told = func(payload []byte, _ bool) {
		if late := (&keysMsg{typ: m.typ}); payload != nil && late.rep.DecodeAs(payload, late.typ) == nil {
			c.reclaim(late.rep.Freed)
		}
	}
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.mutate(ctx, s, m.typ, m, 0); err != nil {
		return nil, err
	}
	c.reclaim(m.rep.Freed)
	err = m.collect(&was)
	return was, err
}

// reclaim takes back pages whose entries this client has deleted.
func (c *Client) reclaim(freed []protocol.Page) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	for i := range freed {
		c.pool.freed(&freed[i])
	}
}

// PinKind says how long a pin lasts.
type PinKind string

// Kinds of pins.
const (
	PinSession PinKind = "session" // until it is undone or the session ends; a pinned entry is never evicted
	PinDurable PinKind = "durable" // the same, under an owner's name, until it is undone or its TTL is over
	PinSoft    PinKind = "soft"    // evicted last, but before a store fails, until the TTL is over
)

// PinSpec says what kind of pin: the zero value is a session's.
type PinSpec = protocol.PinSpec

// Pin pins keys and reports for each whether it was held, and so is pinned now.
func (c *Client) Pin(ctx context.Context, spec PinSpec, keys ...[]byte) ([]bool, error) {
	return c.pins(ctx, protocol.TypeBatchPin, "pin", spec, keys)
}

// Unpin undoes a Pin with the same spec, and reports for each key whether there was one.
func (c *Client) Unpin(ctx context.Context, spec PinSpec, keys ...[]byte) ([]bool, error) {
	return c.pins(ctx, protocol.TypeBatchUnpin, "unpin", spec, keys)
}

func (c *Client) pins(ctx context.Context, t protocol.Type, op string, spec PinSpec, keys [][]byte) ([]bool, error) {
	done := make([]bool, 0, len(keys))
	err := c.inBatches(keys, func(part [][]byte) error {
		s, err := c.session(ctx)
		if err != nil {
			return err
		}
		m := &keysMsg{typ: t, req: protocol.KeysRequest{Keys: part, Pin: spec}, told: nothing}
		if err := c.mutate(ctx, s, t, m, 0); err != nil {
			return err
		}
		return m.collect(&done)
	})
	return done, fail(op, nil, err)
}

// inBatches calls f for parts of keys that one request can carry.
func (c *Client) inBatches(keys [][]byte, f func(part [][]byte) error) error {
	for _, k := range keys {
		if err := c.checkKey(k); err != nil {
			return err
		}
	}
	for len(keys) > 0 {
		n := min(len(keys), protocol.MaxBatch)
		if err := f(keys[:n]); err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

// collect appends the results of a batch.
func (m *keysMsg) collect(to *[]bool) error {
	if len(m.rep.Results) != len(m.req.Keys) {
		return refused(protocol.CodeInternal, "the master answered for another number of keys than were named")
	}
	*to = append(*to, m.rep.Results...)
	return nil
}

// PrefixMatch returns how many of hashes, from the first on, are held in a context: the longest prefix that need not be
// computed. members, if not 0, demands that all of so many shards of a block are held. With wantKeys it returns the
// keys of those blocks too. At most protocol.MaxBatch hashes and MaxShards members.
func (c *Client) PrefixMatch(ctx context.Context, context PrefixContext, hashes []uint64, members int, wantKeys bool) (
	matched int, keys [][]byte, err error,
) {
	if len(hashes) > protocol.MaxBatch || members < 0 || members > MaxShards {
		return 0, nil, fail("prefix match", nil, fmt.Errorf("%w: %d hashes, of at most %d; %d members, of 0 to %d",
			ErrConfig, len(hashes), protocol.MaxBatch, members, MaxShards))
	}
	if c.life.Err() != nil {
		return 0, nil, ErrClosed
	}
	m := &matchMsg{req: protocol.PrefixMatchRequest{
		Context: context, Hashes: hashes, Members: uint64(members), WantKeys: wantKeys,
	}}
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypePrefixMatch, m, 0); err != nil {
		return 0, nil, fail("prefix match", nil, err)
	}
	for _, k := range m.rep.Keys {
		keys = append(keys, append([]byte(nil), k...))
	}
	return int(min(m.rep.Matched, uint64(len(hashes)))), keys, nil //nolint:gosec // bounded
}

// Scope says what Clear drops. Exactly one field is set.
type Scope struct {
	All     bool
	Prefix  []byte         // keys that begin with it
	Context *PrefixContext // entries of a context; its empty fields match everything
	// Tenant is everything of the client's own tenant, see Config. Any other is refused with protocol.CodeForbidden: connect
	// as that tenant, or have an operator run larder ctl clear.
	Tenant string
}

// Clear drops entries: nothing of the scope is served after it has returned nil. Its cost does not depend on how many
// there are.
func (c *Client) Clear(ctx context.Context, scope Scope) error {
	s, err := c.session(ctx)
	if err == nil {
		m := &clearMsg{req: protocol.ClearRequest{
			All: scope.All, Prefix: scope.Prefix, Context: scope.Context, Tenant: scope.Tenant,
		}}
		err = c.mutate(ctx, s, protocol.TypeClear, m, 0)
	}
	return fail("clear", nil, err)
}

// KeyInfo describes one entry.
type KeyInfo = protocol.KeyInfo

// ListKeys returns a page of the keys that begin with prefix, in no particular order. cursor is 0 for the first page,
// and then what the last one returned, which is 0 at the end. A page may be empty and yet not the last.
func (c *Client) ListKeys(ctx context.Context, prefix []byte, cursor uint64, limit int) ([]KeyInfo, uint64, error) {
	if c.life.Err() != nil {
		return nil, 0, ErrClosed
	}
	m := &listMsg{req: protocol.ListKeysRequest{
		Prefix: prefix, Cursor: cursor, Limit: uint64(max(1, min(limit, protocol.MaxBatch))),
	}}
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypeListKeys, m, 0); err != nil {
		return nil, 0, fail("list keys", nil, err)
	}
	for i := range m.rep.Keys {
		m.rep.Keys[i].Key = append([]byte(nil), m.rep.Keys[i].Key...)
	}
	return m.rep.Keys, m.rep.Cursor, nil
}

// BlockInfo describes a prefix block; see [WithPrefix].
type BlockInfo = protocol.BlockInfo

// ListBlocks returns a page of the prefix blocks that the client's tenant holds, in no particular order, and their contexts,
// which the blocks name by number. cursor is as in ListKeys. A block may come twice, and a page may be empty and yet not the last.
func (c *Client) ListBlocks(ctx context.Context, cursor uint64, limit int) ([]BlockInfo, []PrefixContext, uint64, error) {
	if c.life.Err() != nil {
		return nil, nil, 0, ErrClosed
	}
	m := &blocksMsg{req: protocol.ListBlocksRequest{Cursor: cursor, Limit: uint64(max(1, min(limit, protocol.MaxBatch)))}}
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypeListBlocks, m, 0); err != nil {
		return nil, nil, 0, fail("list blocks", nil, err)
	}
	return m.rep.Blocks, m.rep.Contexts, m.rep.Cursor, nil
}

// Lookup says where an entry lies. The bytes may move as soon as it returns: it is for people and tools. Get and View
// read them.
func (c *Client) Lookup(ctx context.Context, key []byte) (protocol.Location, error) {
	if err := c.checkKey(key); err != nil {
		return protocol.Location{}, fail("lookup", key, err)
	}
	m := c.newLookup()
	defer c.freeLookup(m)
	m.forOne(key)
	if _, err := c.lookup(ctx, m); err != nil {
		return protocol.Location{}, fail("lookup", key, err)
	}
	r := &m.rep.Results[0]
	if !r.Found {
		return protocol.Location{}, fail("lookup", key, ErrNotFound)
	}
	c.giveBack(r.Lease)
	return r.Location, nil
}

// LookupBatch says for each key whether it is held, and counts a use of each that is. With stopAtMiss it ends at the
// first that is not. It is the lookup alone, without its bytes.
func (c *Client) LookupBatch(ctx context.Context, keys [][]byte, stopAtMiss bool) (found int, err error) {
	asked := 0
	err = c.inBatches(keys, func(part [][]byte) error {
		if stopAtMiss && found < asked {
			return nil // an earlier part has a miss
		}
		asked += len(part)
		m := c.newLookup()
		defer c.freeLookup(m)
		m.forMany(part, stopAtMiss)
		if _, err := c.lookup(ctx, m); err != nil {
			return err
		}
		for i := range m.rep.Results {
			if r := &m.rep.Results[i]; r.Found {
				found++
				c.giveBack(r.Lease)
			}
		}
		return nil
	})
	return found, fail("lookup", nil, err)
}

// Usage returns what instances hold, and how much of the pool is free.
func (c *Client) Usage(ctx context.Context) (*protocol.GetUsageReply, error) {
	m := new(usageMsg)
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypeGetUsage, m, 0); err != nil {
		return nil, fail("usage", nil, err)
	}
	return &m.rep, nil
}

// ServerStats returns the master's counters.
func (c *Client) ServerStats(ctx context.Context) (*protocol.GetStatsReply, error) {
	m := new(statsMsg)
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypeGetStats, m, 0); err != nil {
		return nil, fail("server stats", nil, err)
	}
	return &m.rep, nil
}
