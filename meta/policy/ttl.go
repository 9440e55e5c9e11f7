package policy

import "math/bits"

func init() {
	Register("ttl", func(cfg Config, t Table) (Policy, error) {
		return &ttl{t: t, b: newBuckets(t, secondBits), lifeMS: cfg.TTLMS}, nil
	})
}

const (
	// secondBits is the width of an expiry in seconds: 139,000 years.
	secondBits = 42
	// never is the queue of entries without an expiry: the last.
	never = 1<<secondBits - 1
	// stepsPerLifeBits is how finely expiries are told apart, at least: to 1/512 of
	// the entry's own life, and never finer than a second. It bounds the queues
	// that unexpired entries can spread over to 1,024 for each doubling of the
	// life, whatever lives clients ask for.
	stepsPerLifeBits = 9
)

// ttl evicts what expired first, and then what expires next; among entries of
// one expiry, the one registered (or unpinned) first. The order by expiry is
// the same before and after an entry has expired, so that it needs no clock.
// Uses change nothing: a life runs from registration.
type ttl struct {
	Stateless

	t      Table
	b      buckets
	lifeMS uint64
}

// key is the second in which s expires, rounded up to the step of its life.
func (p *ttl) key(s Slot) uint64 {
	info := p.t.Info(s)
	expires := info.ExpiresMS
	if expires == 0 {
		expires = info.AddedMS + p.lifeMS
		if p.lifeMS == 0 || expires < info.AddedMS {
			return never
		}
	}
	step := uint64(1)
	if expires > info.AddedMS {
		life := (expires - info.AddedMS) / 1000
		step <<= max(0, bits.Len64(life)-1-stepsPerLifeBits)
	}
	second := expires / 1000
	if expires%1000 > 0 {
		second++
	}
	return min((second+step-1)&^(step-1), never-1)
}

// Add puts s at the hot end of the queue of its expiry.
func (p *ttl) Add(s Slot) {
	p.t.SetOrder(s, Order{Stamp: p.t.NextStamp()})
	p.b.pushHot(p.key(s), s)
}

// Touch does nothing.
func (*ttl) Touch(Slot, uint32) {}

// Remove takes s out.
func (p *ttl) Remove(s Slot) {
	if !p.b.removeInner(s) {
		p.b.removeEnd(p.key(s), s)
	}
}

// Evict takes s out.
func (p *ttl) Evict(s Slot) { p.Remove(s) }

// Victims offers the entries by expiry, those without one last.
func (p *ttl) Victims(_ uint64, yield func(Slot) Verdict) { p.b.victims(yield) }

// Restore puts s, whose Order is there already, in the queue of its expiry.
func (p *ttl) Restore(s Slot) { p.b.pushHot(p.key(s), s) }

// Len is the number of entries held.
func (p *ttl) Len() int { return p.b.n }
