package policy

func init() {
	Register("lfu", func(_ Config, t Table) (Policy, error) {
		return &frequency{t: t, b: newBuckets(t, frequencyBits)}, nil
	})
	Register("length-aware", func(_ Config, t Table) (Policy, error) {
		return &frequency{t: t, b: newBuckets(t, frequencyBits+indexBits), tieBits: indexBits}, nil
	})
}

const (
	// frequencyBits is the width of the use counter. It saturates: entries of
	// 4,095 uses and more differ by recency alone, which bounds the number of
	// queues and tells hot from cold well enough.
	frequencyBits = 12
	maxFrequency  = 1<<frequencyBits - 1
	// indexBits is the width of the block index that breaks ties: 65,535
	// blocks of 16 tokens are a request of a million tokens. Later blocks
	// count as the last.
	indexBits = 16
	maxIndex  = 1<<indexBits - 1
)

// frequency evicts the entry used least often since it was registered, its
// registration being the first use. Counters never age (plain LFU).
//
// Ties go to the entry used longest ago ("lfu"), or to the block latest in its
// request and only then to the one used longest ago ("length-aware": a late
// block is shared by fewer requests, and is useless without those before it).
// Order.Aux is the counter.
type frequency struct {
	Stateless

	t       Table
	b       buckets
	tieBits int // how much of a queue's number breaks ties: indexBits or nothing
}

// tie is what breaks ties in the numbers of the queues of s.
func (p *frequency) tie(s Slot) uint64 {
	if p.tieBits == 0 {
		return 0
	}
	return uint64(maxIndex - min(p.t.Info(s).Index, maxIndex))
}

// key is the number of the queue of s, of which the tie and the count are given.
func (p *frequency) key(tie uint64, uses uint32) uint64 { return uint64(uses)<<p.tieBits | tie }

func (p *frequency) push(s Slot, tie uint64, uses uint32) {
	p.t.SetOrder(s, Order{Stamp: p.t.NextStamp(), Aux: uses})
	p.b.pushHot(p.key(tie, uses), s)
}

// Add counts a first use, or goes on with the count of an entry that was
// pinned for a while.
func (p *frequency) Add(s Slot) {
	p.push(s, p.tie(s), max(1, p.t.Order(s).Aux))
}

// Touch adds n to the count, as far as it goes, and makes s the latest among its
// equals.
func (p *frequency) Touch(s Slot, n uint32) {
	tie, uses := p.tie(s), p.t.Order(s).Aux
	if !p.b.removeInner(s) {
		p.b.removeEnd(p.key(tie, uses), s)
	}
	p.push(s, tie, uses+min(n, maxFrequency-uses))
}

// Remove takes s out. Its count stays in its Order, for when it is added again.
func (p *frequency) Remove(s Slot) {
	if !p.b.removeInner(s) {
		p.b.removeEnd(p.key(p.tie(s), p.t.Order(s).Aux), s)
	}
}

// Evict takes s out.
func (p *frequency) Evict(s Slot) { p.Remove(s) }

// Victims offers the entries by rising count, ties in the order of the policy.
func (p *frequency) Victims(_ uint64, yield func(Slot) Verdict) { p.b.victims(yield) }

// Restore puts s back among those of its count.
func (p *frequency) Restore(s Slot) { p.b.pushHot(p.key(p.tie(s), p.t.Order(s).Aux), s) }

// Len is the number of entries held.
func (p *frequency) Len() int { return p.b.n }
