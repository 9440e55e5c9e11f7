package policy

import "math/bits"

// buckets is an ordered set of queues by number, the lowest evicted first. The
// set of numbers in use is a tree of 64-bit words, one bit per child, so that
// every step is a fixed number of map look-ups: O(1) for a number of fixed
// width. (A word tree of this kind is what van Emde Boas trees become at
// machine word size.) The maps are never ranged over.
//
// Memory is that of the queues that are not empty, never of the number range.
type buckets struct {
	t      Table
	queues map[uint64]Queue
	levels []map[uint64]uint64 // levels[l][i] says which of 64*i.. exist at level l
	n      int
}

// bitsPerLevel is what one machine word resolves.
const bitsPerLevel = 6

// newBuckets makes an empty set for numbers below 1<<width.
func newBuckets(t Table, width int) buckets {
	b := buckets{t: t, queues: make(map[uint64]Queue)}
	for range (width + bitsPerLevel - 1) / bitsPerLevel {
		b.levels = append(b.levels, make(map[uint64]uint64))
	}
	return b
}

// pushHot links s, whose stamp is set, at the hot end of queue number key.
func (b *buckets) pushHot(key uint64, s Slot) {
	q, ok := b.queues[key]
	if !ok {
		q = NewQueue()
		b.mark(key)
	}
	q.PushHot(b.t, s)
	b.queues[key] = q
	b.n++
}

// remove unlinks s from queue number key, where it must be.
func (b *buckets) remove(key uint64, s Slot) {
	q := b.queues[key]
	q.Remove(b.t, s)
	b.n--
	if q.Len() > 0 {
		b.queues[key] = q
		return
	}
	delete(b.queues, key)
	b.unmark(key)
}

func (b *buckets) mark(key uint64) {
	for _, level := range b.levels {
		node, bit := key>>bitsPerLevel, uint64(1)<<(key&63)
		old := level[node]
		level[node] = old | bit
		if old != 0 {
			return // the levels above know this node already
		}
		key = node
	}
}

func (b *buckets) unmark(key uint64) {
	for _, level := range b.levels {
		node, bit := key>>bitsPerLevel, uint64(1)<<(key&63)
		if rest := level[node] &^ bit; rest != 0 {
			level[node] = rest
			return
		}
		delete(level, node)
		key = node
	}
}

// from returns the lowest number in use that is not below key.
func (b *buckets) from(key uint64) (uint64, bool) {
	for l := 0; l < len(b.levels); l++ {
		node := key >> bitsPerLevel
		word := b.levels[l][node] >> (key & 63) << (key & 63)
		if word == 0 {
			key = node + 1
			continue
		}
		key = node<<bitsPerLevel | uint64(bits.TrailingZeros64(word)) //nolint:gosec // 0..63
		for l--; l >= 0; l-- {
			key = key<<bitsPerLevel | uint64(bits.TrailingZeros64(b.levels[l][key])) //nolint:gosec // 0..63
		}
		return key, true
	}
	return 0, false
}

// victims offers every entry: queues by number, each from its cold end.
func (b *buckets) victims(yield func(Slot) Verdict) {
	for key, ok := b.from(0); ok; key, ok = b.from(key + 1) {
		q := b.queues[key]
		if !q.Victims(b.t, yield) {
			return
		}
	}
}
