package client

import (
	"sync"

	"larder/protocol"
)

const (
	// maxReleases bounds the leases that wait to be given back. More are forgotten: they end by themselves.
	maxReleases = 4096
	// ridingReleases is how many leases are given back with one lookup, so that it stays small.
	ridingReleases = 64
	// idleRelease is how long, in ns, a lease may wait for a lookup to ride on: a fraction of a lease, since what is
	// leased cannot be evicted.
	idleRelease = 20e6
)

// leaseBag holds leases that are no longer needed until they are given back.
type leaseBag struct {
	mu    sync.Mutex
	list  []uint64
	since int64 // when the keeper first saw that there are any; 0 = not yet
}

func (b *leaseBag) add(leases ...uint64) (dropped int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range leases {
		if l == 0 {
			continue
		}
		if len(b.list) == maxReleases {
			dropped++
			continue
		}
		b.list = append(b.list, l)
	}
	return dropped
}

// take moves at most limit leases to dst.
func (b *leaseBag) take(dst []uint64, limit int) []uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := min(limit, len(b.list))
	rest := len(b.list) - n
	dst = append(dst, b.list[rest:]...)
	b.list = b.list[:rest]
	if rest == 0 {
		b.since = 0
	}
	return dst
}

// idle reports whether leases have waited for longer than idleRelease.
func (b *leaseBag) idle(now int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.list) > 0 && b.since == 0 {
		b.since = now
	}
	return len(b.list) > 0 && now-b.since > idleRelease
}

func (b *leaseBag) empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list) == 0
}

// flushReleases gives back all leases that wait for it, ahead of whatever is sent next.
func (c *Client) flushReleases() {
	for {
		l := c.link.Load()
		if l == nil {
			return
		}
		m := new(leasesMsg)
		if m.req.Leases = c.leases.take(nil, protocol.MaxBatch); len(m.req.Leases) == 0 {
			return
		}
		for _, cn := range l.conns[:1] {
			cn.post(protocol.TypeRelease, m)
		}
	}
}

// releaseIdle gives leases back that found no lookup to ride on.
func (c *Client) releaseIdle(now int64) {
	if c.leases.idle(now) {
		c.flushReleases()
	}
}

// leasesPending reports whether the keeper has to look often.
func (c *Client) leasesPending() bool {
	if !c.leases.empty() {
		return true
	}
	c.viewMu.Lock()
	defer c.viewMu.Unlock()
	return len(c.holds) > 0
}
