package policy

import (
	"encoding/binary"
	"fmt"
)

func init() {
	Register("sieve", func(_ Config, t Table) (Policy, error) {
		return &sieve{Base: NewBase(t), hand: None}, nil
	})
}

// sieve is SIEVE (Zhang et al., NSDI 2024): one queue in order of registration
// and a hand that moves from its cold end to its hot end and around again. The
// hand clears the visited bit of what it passes and evicts the first entry
// without one. Uses set the bit and move nothing, so that a use writes at most
// once per round.
//
// Order.Aux is the visited bit. The hand is persisted as the stamp of the entry
// under it, 0 when it stands at the cold end.
type sieve struct {
	Base

	hand     Slot  // None: at the cold end
	flushed  int64 // hand as FlushState last wrote it
	restored int64 // hand as RestoreState read it
}

// Touch sets the visited bit.
func (p *sieve) Touch(s Slot, _ uint32) {
	if o := p.T.Order(s); o.Aux == 0 {
		o.Aux = 1
		p.T.SetOrder(s, o)
	}
}

// Remove takes s out. A hand that stood on it moves on.
func (p *sieve) Remove(s Slot) {
	if p.hand == s {
		p.hand = p.T.Links(s).Hotter
	}
	p.Q.Remove(p.T, s)
}

// Evict moves the hand to s and past it, clearing the bits on its way. An entry
// used after it was chosen, and one that is left because all others stay, is
// evicted where it stands.
func (p *sieve) Evict(s Slot) {
	for h := p.start(); h != s; h = p.following(h) {
		if o := p.T.Order(h); o.Aux != 0 {
			o.Aux = 0
			p.T.SetOrder(h, o)
		}
	}
	p.hand = p.T.Links(s).Hotter
	p.Q.Remove(p.T, s)
}

// Victims walks where the hand would go: entries without the bit in its first
// round, and in its second those whose bit the first would have cleared.
func (p *sieve) Victims(_ uint64, yield func(Slot) Verdict) {
	start := p.start()
	if start == None {
		return
	}
	for visited := range uint32(2) {
		for s := start; ; {
			if p.T.Order(s).Aux == visited && yield(s) == Stop {
				return
			}
			if s = p.following(s); s == start {
				break
			}
		}
	}
}

// start is where the hand stands, None in an empty queue.
func (p *sieve) start() Slot {
	if p.hand == None {
		return p.Q.Coldest()
	}
	return p.hand
}

// following is the entry after s on the hand's way.
func (p *sieve) following(s Slot) Slot {
	if next := p.T.Links(s).Hotter; next != None {
		return next
	}
	return p.Q.Coldest()
}

// Restore puts s at the hot end, under the hand if it stood there.
func (p *sieve) Restore(s Slot) {
	p.Base.Restore(s)
	if p.restored != 0 && p.T.Order(s).Stamp == p.restored {
		p.hand = s
	}
}

func (p *sieve) handStamp() int64 {
	if p.hand == None {
		return 0
	}
	return p.T.Order(p.hand).Stamp
}

// RestoreState reads the stamp of the entry under the hand.
func (p *sieve) RestoreState(page uint32, data []byte) error {
	if page != 0 {
		return errPage(page)
	}
	if len(data) != 8 {
		return fmt.Errorf("sieve: the hand has %d bytes instead of 8: %w", len(data), errPage(page))
	}
	p.restored = int64(binary.BigEndian.Uint64(data)) //nolint:gosec // written from int64
	p.flushed = p.restored
	return nil
}

// FlushState writes the stamp of the entry under the hand if it changed, or with
// all in any case. A hand at the cold end has no page.
func (p *sieve) FlushState(all bool, put func(page uint32, data []byte)) {
	at := p.handStamp()
	if !all && at == p.flushed {
		return
	}
	p.flushed = at
	if at == 0 {
		put(0, nil)
		return
	}
	put(0, binary.BigEndian.AppendUint64(nil, uint64(at))) //nolint:gosec // bits, read back as int64
}

// StateHash is that of the hand, 0 when it stands at the cold end.
func (p *sieve) StateHash() uint64 {
	if p.hand == None {
		return 0
	}
	return mix64(uint64(p.handStamp())) //nolint:gosec // bits, not a number
}

// mix64 scatters the bits of x (the finaliser of SplitMix64, Steele, Lea and
// Flood, OOPSLA 2014).
func mix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
