package server

import (
	"bytes"
	"cmp"
	"context"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// ClearScope says what Clear drops. Exactly one of All, Prefix and Context is set.
type ClearScope struct {
	All     bool
	Prefix  []byte
	Tenant  string        // with Prefix: of this tenant's keys only; empty: of all tenants'
	Context *meta.Context // empty fields match everything
}

// Clear drops everything in scope, of all tenants unless it names one; nothing of it is served any more when it
// returns nil. Leader only.
func (s *Server) Clear(ctx context.Context, scope ClearScope) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := s.do(ctx, scope.command())
	return err
}

// command makes the command for an operator's CLEAR.
func (s *ClearScope) command() *meta.Clear {
	cmd := &meta.Clear{All: s.All, Prefix: s.Prefix, Context: s.Context}
	if len(s.Prefix) > 0 && s.Tenant != "" {
		cmd.Context = &meta.Context{Tenant: s.Tenant}
	}
	return cmd
}

// clearCommand makes the command for CLEAR by a client of a tenant.
func clearCommand(req *protocol.ClearRequest, tenant string) (*meta.Clear, *cleared, error) {
	if req.Tenant != "" && req.Tenant != tenant {
		return nil, nil, &protocol.Error{
			Code: protocol.CodeForbidden,
			Message: "a client clears entries of its own tenant only: connect as the tenant that is named, or let an operator " +
				"run larder ctl clear --tenant",
		}
	}
	cmd := &meta.Clear{All: req.All || req.Tenant != "", Prefix: req.Prefix}
	if x := req.Context; x != nil {
		cmd.Context = new(meta.ContextOf(tenant, x))
	}
	told := clearedBy(cmd)
	told.tenant = cmp.Or(tenant, meta.DefaultTenant)
	return cmd, told, nil
}

// cleared is a CLEAR as those are told of it whom it concerns.
type cleared struct {
	tenant string // "" = all of them
	push   protocol.ClearedPush
}

// clearedBy says what is to be told of an operator's CLEAR. It keeps nothing of the command's bytes.
func clearedBy(c *meta.Clear) *cleared {
	told := &cleared{push: protocol.ClearedPush{All: c.All}}
	x := c.Context
	if c.All || x == nil {
		x = &meta.Context{}
	}
	told.tenant = x.Tenant
	switch {
	case c.All:
	case len(c.Prefix) > 0:
		told.push.Prefix = bytes.Clone(c.Prefix)
	case *x == meta.Context{Tenant: x.Tenant} && x.Tenant != "":
		told.push.All = true // to those of the tenant it is everything
	default:
		told.push.Context = &protocol.Context{
			Model: x.Model, LoRA: x.LoRA, Salt: x.Salt, BlockSize: x.BlockSize, Seed: x.Seed,
		}
	}
	return told
}

// maxUntold CLEARs of one tenant are told each by itself; if more come before the next Tick, they are told as one of
// everything. So a client that does nothing but clear costs its fellows eight short pushes a Tick, and others nothing.
const maxUntold = 8

// pushCleared has the sessions that a CLEAR concerns told of it, by the next Tick. It is called when the CLEAR is
// delivered: by the goroutine that applies, right after its log entry. Nobody answers the push and it is never repeated:
// who misses it is served nothing of what was cleared either.
func (m *Master) pushCleared(told *cleared) {
	m.state.RLock()
	told.push.Index = m.machine.Applied()
	m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	same := func(x *cleared) bool { return x.tenant == told.tenant }
	n := 0
	for _, x := range m.untold {
		if same(x) {
			n++
		}
	}
	if n >= maxUntold {
		m.untold = slices.DeleteFunc(m.untold, same)
		told = &cleared{tenant: told.tenant, push: protocol.ClearedPush{Index: told.push.Index, All: true}}
	}
	m.untold = append(m.untold, told)
}

// tellCleared pushes what has been cleared since the last Tick.
func (m *Master) tellCleared() {
	m.mu.Lock()
	untold := m.untold
	m.untold = nil
	if len(untold) == 0 || !m.leading {
		m.mu.Unlock()
		return
	}
	to := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		to = append(to, s)
	}
	sortBy(to, func(s *session) uint64 { return uint64(s.id) }) // so that a simulation repeats exactly
	clients := make([]*Client, len(to))
	for i, s := range to {
		clients[i] = s.pushTo()
	}
	m.mu.Unlock()
	for i, c := range clients {
		if c == nil {
			continue
		}
		told := false
		for _, x := range untold {
			if !x.concerns(to[i].tenant) {
				continue
			}
			told = true
			b, mark := protocol.BeginFrame(c.peer.Lock(), protocol.TypeCleared, 0)
			c.peer.Unlock(protocol.EndFrame(x.push.Append(b), mark))
		}
		if told {
			c.peer.Flush()
		}
	}
}

// concerns reports whether a CLEAR is to be told to sessions of a tenant; no name is the default's.
func (x *cleared) concerns(tenant string) bool {
	return x.tenant == "" || x.tenant == cmp.Or(tenant, meta.DefaultTenant)
}
