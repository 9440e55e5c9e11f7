package server

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"

	"larder/meta"
	"larder/protocol"
)

// promoteBurst is for how long a client that has copied nothing to faster tiers lately is asked to, however fast it does: what
// it copies in that time beyond its rate it is not asked for afterwards.
const promoteBurst = time.Second

// pace bounds what one client is asked to copy to faster tiers. What counts is what it has copied, not what it was asked for:
// it may decline, or be asked again while it is at it.
type pace struct {
	paid atomic.Int64 // when all that it has copied is what its rate allows
}

// ready reports whether the client may be asked for more.
func (p *pace) ready(now int64) bool { return p.paid.Load()-now < int64(promoteBurst) }

// spend counts bytes at a rate per second.
func (p *pace) spend(n, rate uint64, now int64) {
	took := costOf(n, rate)
	for {
		old := p.paid.Load()
		if p.paid.CompareAndSwap(old, max(old, now)+took) {
			return
		}
	}
}

// costOf is the time in which so many bytes are copied at a rate: at most a minute, since rates change.
func costOf(n, rate uint64) int64 {
	if rate == 0 {
		return 0
	}
	hi, lo := bits.Mul64(n, uint64(time.Second))
	if hi >= rate {
		return int64(time.Minute)
	}
	ns, _ := bits.Div64(hi, lo, rate)
	return int64(min(ns, uint64(time.Minute)))
}

// mayPromote reports whether a connection is asked to copy what it reads to faster tiers. The caller holds state.
func (m *Master) mayPromote(c *Client, now int64) bool {
	s := c.sess.Load()
	return s == nil || m.machine.Settings().PromoteRate == 0 || s.promotes.ready(now)
}

// copying counts the copies that a client registers of what it has read toward its rate. Those that are stored together with
// their entries, and those of a device's home, are others' wishes.
func (m *Master) copying(c *Client, entries []protocol.RegisterEntry, now int64) {
	s := c.sess.Load()
	if s == nil || s.home {
		return
	}
	size := uint64(0)
	for i := range entries {
		if e := &entries[i]; e.Copy && e.Of != 0 {
			size += min(e.KVLength, math.MaxUint32)
		}
	}
	if size == 0 {
		return
	}
	m.state.RLock()
	rate := m.machine.Settings().PromoteRate
	m.state.RUnlock()
	s.promotes.spend(size, rate, now)
}

// wanted reports whether an entry is to be copied to a faster tier by who reads it, who may be asked to if ready. The caller
// holds state.
func (m *Master) wanted(slot meta.Slot, ready bool) bool {
	if !m.machine.Wanted(slot) {
		return false
	}
	if !ready {
		m.n.PromotionsPaced.Add(1)
	}
	return ready
}
