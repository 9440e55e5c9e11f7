package client

import (
	"context"
	"errors"
	"time"

	"larder/protocol"
)

const (
	// keepBusy is how often the keeper looks around while leases are held or wait to be given back: well below the
	// shortest election timeout that a master takes, which bounds a lease.
	keepBusy = 10 * time.Millisecond
	// keepIdle is how often it does otherwise: it bounds how late a lost connection or a due heartbeat is noticed.
	keepIdle = 50 * time.Millisecond
	// heartbeats is how many heartbeats fit a session's TTL.
	heartbeats = 3
)

// errLookAgain ends connections for a HANDSHAKE to say which pages are in use.
var errLookAgain = errors.New("this client asks anew which of its pages are in use")

func (c *Client) wakeKeeper() {
	select {
	case c.keepNow <- struct{}{}:
	default:
	}
}

// keeper keeps the session and the leases of open views alive, ends calls that take too long, and gives back leases.
func (c *Client) keeper() {
	defer c.wg.Done()
	beating := make(chan struct{}, 1)
	for {
		every := keepIdle
		if c.leasesPending() {
			every = keepBusy
		}
		ready, stop := wake(every)
		kicked := false
		select {
		case <-ready:
		case <-c.keepNow:
			kicked = true
		case <-c.life.Done():
			stop()
			return
		}
		stop()
		now := c.cfg.Clock()
		l, s := c.link.Load(), c.sess.Load()
		if l == nil || s == nil {
			continue
		}
		for _, cn := range l.conns {
			cn.expire(now, c.cfg.CallTimeout.Nanoseconds())
		}
		if s.ttl > 0 && (kicked || now-c.lastAnswer.Load() > s.ttl/heartbeats) {
			c.beat(beating)
		}
		if c.pool.doubts() && s.window.inFlight() == 0 { // or a store is sent again, and leaves the next doubt
			l.close(errLookAgain)
		}
		c.renewHolds(now)
		c.releaseIdle(now)
	}
}

// beat sends a heartbeat unless one is on its way.
func (c *Client) beat(beating chan struct{}) {
	select {
	case beating <- struct{}{}:
	default:
		return
	}
	if !c.spawn(func() {
		defer func() { <-beating }()
		ctx, cancel := context.WithTimeout(c.life, c.cfg.CallTimeout)
		defer cancel()
		_, _, _ = c.roundTrip(ctx, nil, protocol.TypeHeartbeat, new(emptyMsg), 0) // the next one tries again
	}) {
		<-beating
	}
}
