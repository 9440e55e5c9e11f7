package client

import (
	"bytes"
	"context"
	"log/slog"
	"slices"

	"larder/protocol"
)

// pushed handles what a master sends unasked. Who reads a connection calls it, so it only does what is quick. An error ends the
// connection.
func (c *Client) pushed(cn *conn, t protocol.Type, payload []byte) error {
	switch t {
	case protocol.TypeRevoke:
		var p protocol.RevokePush
		if err := p.Decode(payload); err != nil {
			return err //nolint:wrapcheck // typed
		}
		c.spawn(func() { c.revoke(p) })
	case protocol.TypeFreed:
		var p protocol.FreedPush
		if err := p.Decode(payload); err != nil {
			return err //nolint:wrapcheck // typed
		}
		c.pool.mu.Lock()
		for i := range p.Pages {
			c.pool.freed(&p.Pages[i])
		}
		c.pool.mu.Unlock()
		c.counters.freed.Add(uint64(len(p.Pages)))
		cn.post(protocol.TypeFreedAck, &freedAckMsg{ID: p.ID})
	case protocol.TypeCleared:
		var p protocol.ClearedPush
		if err := p.Decode(payload); err != nil {
			// Nothing of this client depends on it, and all clients that it is pushed to would be cut off at once.
			c.cfg.Logger.Debug("a CLEARED that does not decode is passed over", slog.Any("error", err))
			return nil
		}
		c.cleared(&p)
	case protocol.TypeGrant, protocol.TypeFence, protocol.TypeTasksPush:
		return c.pushedHome(t, payload)
	default: // a push of a later release concerns a feature that this client did not name
	}
	return nil
}

// cleared tells the program of a CLEAR. The push lies in the memory of the reader, which goes on.
func (c *Client) cleared(p *protocol.ClearedPush) {
	if c.cfg.OnClear == nil {
		return
	}
	heard := Cleared{Index: p.Index, All: p.All, Prefix: bytes.Clone(p.Prefix), Context: p.Context}
	heard.All = heard.All || len(p.Prefix) == 0 && p.Context == nil
	c.spawn(func() { c.cfg.OnClear(heard) })
}

// revoke gives a region up and says so. Masters repeat a REVOKE until it is answered, so that one which is being
// carried out already is passed over.
func (c *Client) revoke(push protocol.RevokePush) {
	p := c.pool
	p.mu.Lock()
	if slices.Contains(c.revoking, push.RegionID) {
		p.mu.Unlock()
		return
	}
	c.revoking = append(c.revoking, push.RegionID)
	r := p.regions[push.RegionID]
	if r == nil {
		r = p.dying[push.RegionID]
	}
	if r == nil || r.epoch < push.Epoch {
		p.gone[push.RegionID] = max(push.Epoch, p.gone[push.RegionID])
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		c.revoking = slices.DeleteFunc(c.revoking, func(id uint64) bool { return id == push.RegionID })
		p.mu.Unlock()
	}()
	if r != nil && r.epoch <= push.Epoch {
		if !c.surrender(r) {
			return
		}
	}
	if _, err := c.conn(c.life); err != nil {
		return
	}
	m := &revokeDoneMsg{req: protocol.RevokeDoneRequest{RegionID: push.RegionID, Epoch: push.Epoch}}
	if err := c.mutate(c.life, c.sess.Load(), protocol.TypeRevokeDone, m, 0); err != nil && c.life.Err() == nil {
		// Whoever did not hear of it repeats the REVOKE.
		c.cfg.Logger.Info("revoke is not acknowledged yet", slog.Uint64("region_id", push.RegionID), slog.Any("error", err))
	}
	if r != nil && r.epoch <= push.Epoch {
		c.announce(r)
	}
}

// surrender gives a region up, and waits until nothing writes to it any more. It reports false if the client was closed
// first.
func (c *Client) surrender(r *region) bool {
	wait := c.pool.giveUp(r, ErrRevoked)
	if wait == nil {
		return true
	}
	c.cfg.Logger.Warn("a revoked region waits for open Allocs: end them with Store or Abort",
		slog.Uint64("region_id", r.id))
	select {
	case <-wait:
		return true
	case <-c.life.Done():
		return false
	}
}

// disown gives up a region in which a store was refused because it is no longer this client's.
func (c *Client) disown(r *region) {
	c.pool.mu.Lock()
	known := c.pool.regions[r.id] == r
	c.pool.forget(r, ErrRevoked)
	c.pool.mu.Unlock()
	if known {
		c.spawn(func() { c.lose(r) })
	}
}

// reconcile acts on what the reply to a HANDSHAKE says of this client's regions.
func (c *Client) reconcile(reply *protocol.HandshakeReply) {
	dropped, revoking := c.pool.reconcile(reply.Regions, reply.QuarantineMS)
	for _, r := range dropped {
		c.spawn(func() { c.lose(r) })
	}
	for _, r := range revoking {
		c.spawn(func() { c.revoke(protocol.RevokePush{RegionID: r.id, Epoch: r.epoch}) })
	}
}

// spawn runs f in a goroutine that Close waits for. It reports false, and does nothing, if the client is closed.
func (c *Client) spawn(f func()) bool {
	c.spawnMu.Lock()
	defer c.spawnMu.Unlock()
	if c.life.Err() != nil {
		return false
	}
	c.wg.Go(func() {
		f()
	})
	return true
}

// writable waits until stores of session s may start: while the session's deadline has passed they are suspended.
func (c *Client) writable(ctx context.Context, s *session) error {
	for n := 0; ; n++ {
		if s.ended() {
			return ErrSessionExpired
		}
		if s.alive(c.cfg.Clock()) {
			return nil
		}
		c.counters.suspended.Add(1)
		c.wakeKeeper()
		if err := sleep(ctx, backoff(n)); err != nil {
			return err
		}
		if c.life.Err() != nil {
			return ErrClosed
		}
	}
}
