package policy

import "math/bits"

// buckets is an ordered set of queues by number, the lowest evicted first. The
// set of numbers in use is a tree of 64-bit words, one bit per child, so that
// every step is a fixed number of look-ups: O(1) for a number of fixed width.
// (A word tree of this kind is what van Emde Boas trees become at machine word
// size.) The tree changes only when a queue appears or has gone, and an entry
// with neighbours on both sides leaves without a look-up.
//
// The queue that emptied last stays, hollow, until another does: where all else
// was used more often, what is new takes the place of what came before it, in a
// queue of one, which would come and go with each.
//
// Memory is that of the most queues there have been at once, never of the number range.
type buckets struct {
	t      Table
	queues numbers[ends]
	words  numbers[uint64] // number level<<levelShift|i says which of 64*i.. exist at a level
	levels uint64
	lowest uint64 // the lowest number in use, if there is any
	hollow uint64 // number of the queue that is kept though it is empty, or noQueue
	n      int
}

// ends are those of a queue, None of an empty one. What lies between, by rising stamps, is in the links of the entries.
type ends struct{ coldest, hottest Slot }

const (
	bitsPerLevel = 6  // what one machine word resolves
	levelShift   = 58 // above the numbers, which are narrower
	noQueue      = ^uint64(0)
)

// newBuckets makes an empty set for numbers below 1<<width.
func newBuckets(t Table, width int) buckets {
	return buckets{t: t, levels: uint64((width + bitsPerLevel - 1) / bitsPerLevel), hollow: noQueue} //nolint:gosec // a few
}

// pushHot links s, whose stamp is set, at the hot end of queue number key.
func (b *buckets) pushHot(key uint64, s Slot) {
	b.n++
	q := b.queues.find(key)
	if q == nil {
		q = b.queues.add(key)
		q.hottest = None
		b.mark(key)
	}
	*b.t.Links(s) = Links{Colder: q.hottest, Hotter: None}
	if q.hottest != None {
		b.t.Links(q.hottest).Hotter = s
	} else {
		q.coldest = s
		if key == b.hollow {
			b.hollow = noQueue
		}
	}
	q.hottest = s
}

// removeInner unlinks s if it is at neither end of its queue, whose number need not be known for that, and reports
// whether it did.
func (b *buckets) removeInner(s Slot) bool {
	l := *b.t.Links(s)
	if l.Colder == None || l.Hotter == None {
		return false
	}
	b.t.Links(l.Colder).Hotter = l.Hotter
	b.t.Links(l.Hotter).Colder = l.Colder
	b.n--
	return true
}

// removeEnd unlinks s from queue number key, at an end of which it must be.
func (b *buckets) removeEnd(key uint64, s Slot) {
	b.n--
	q := b.queues.find(key)
	switch l := *b.t.Links(s); {
	case l.Hotter != None:
		q.coldest = l.Hotter
		b.t.Links(l.Hotter).Colder = None
	case l.Colder != None:
		q.hottest = l.Colder
		b.t.Links(l.Colder).Hotter = None
	default:
		*q = ends{None, None}
		b.drop(b.hollow)
		b.hollow = key
	}
}

// drop forgets a queue that is empty.
func (b *buckets) drop(key uint64) {
	if key == noQueue {
		return
	}
	b.queues.drop(key)
	b.unmark(key)
	if key == b.lowest {
		b.lowest, _ = b.from(key)
	}
}

func (b *buckets) mark(key uint64) {
	if key < b.lowest || b.queues.n == 1 {
		b.lowest = key
	}
	for level := range b.levels {
		node, bit := key>>bitsPerLevel, uint64(1)<<(key&63)
		if word := b.words.find(level<<levelShift | node); word != nil {
			*word |= bit
			return // the levels above know this node already
		}
		*b.words.add(level<<levelShift | node) = bit
		key = node
	}
}

func (b *buckets) unmark(key uint64) {
	for level := range b.levels {
		node, bit := key>>bitsPerLevel, uint64(1)<<(key&63)
		word := b.words.find(level<<levelShift | node)
		if *word &^= bit; *word != 0 {
			return
		}
		b.words.drop(level<<levelShift | node)
		key = node
	}
}

// word says which children of a node at a level exist.
func (b *buckets) word(level, node uint64) uint64 {
	if word := b.words.find(level<<levelShift | node); word != nil {
		return *word
	}
	return 0
}

// from returns the lowest number in use that is not below key.
func (b *buckets) from(key uint64) (uint64, bool) {
	for level := range b.levels {
		node := key >> bitsPerLevel
		word := b.word(level, node) >> (key & 63) << (key & 63)
		if word == 0 {
			key = node + 1
			continue
		}
		key = node<<bitsPerLevel | uint64(bits.TrailingZeros64(word)) //nolint:gosec // 0..63
		for ; level > 0; level-- {
			key = key<<bitsPerLevel | uint64(bits.TrailingZeros64(b.word(level-1, key))) //nolint:gosec // 0..63
		}
		return key, true
	}
	return 0, false
}

// victims offers every entry: queues by number, each from its cold end.
func (b *buckets) victims(yield func(Slot) Verdict) {
	for key, ok := b.lowest, b.queues.n > 0; ok; key, ok = b.from(key + 1) {
		for s := b.queues.find(key).coldest; s != None; s = b.t.Links(s).Hotter {
			if yield(s) == Stop {
				return
			}
		}
	}
}
