package conductor

import (
	"runtime"
	"sync/atomic"
)

// table maps names (64-bit hashes, never 0) to a few words each. One goroutine writes at a time, whom the owner's lock keeps
// apart from others; any number read meanwhile, and neither waits for the other: what a reader sees of a key is what was there
// at some moment of its look. There are no pointers in it: the garbage collector does not look.
type table struct {
	shards [tableShards]shard
}

const (
	tableShards = 64
	shardShift  = 64 - 6 // a name's highest bits choose its shard, its lowest the place there
	shardLeast  = 16     // places of a shard that holds something
	// A shard is at most 13/16 full: runs of taken places stay short, and a block takes less than twice its words.
	fullNum, fullDen = 13, 16
)

// shard is an open-addressed table with linear probing. Readers look again when moves has changed, or is odd: then keys are
// being moved. All else changes in steps that a reader may see one by one.
type shard struct {
	moves atomic.Uint64
	n     atomic.Int64
	slab  atomic.Pointer[slab]
}

// slab is a shard's memory. keys[i] == 0 says that the place is free, with words of 0; else they are words[i*width:][:width].
type slab struct {
	width int
	keys  []uint64
	words []uint64
}

func (t *table) shard(key uint64) *shard { return &t.shards[key>>shardShift] }

// find is where a key is, or the free place where it would be, of which there is always one. It is for who writes.
func (b *slab) find(key uint64) (at int, there bool) {
	mask := uint64(len(b.keys) - 1) //nolint:gosec // positive
	for i := key & mask; ; i = (i + 1) & mask {
		switch b.keys[i] {
		case key:
			return int(i), true //nolint:gosec // within the table
		case 0:
			return int(i), false //nolint:gosec // within the table
		}
	}
}

// read copies the words of a key, and says how many: 0 if it is not there. It is for anybody.
func (s *shard) read(key uint64, words []uint64) (n int) {
	for tries := 0; ; tries++ {
		if moves := s.moves.Load(); moves&1 == 0 {
			n = s.slab.Load().copy(key, words)
			if s.moves.Load() == moves {
				return n
			}
		}
		if tries > 16 { // whoever moves keys may have lost its processor
			runtime.Gosched()
		}
	}
}

func (b *slab) copy(key uint64, words []uint64) int {
	if b == nil {
		return 0
	}
	mask := uint64(len(b.keys) - 1) //nolint:gosec // positive
	for i, left := key&mask, len(b.keys); left > 0; i, left = (i+1)&mask, left-1 {
		switch atomic.LoadUint64(&b.keys[i]) {
		case key:
			n := min(b.width, len(words))
			for k := range n {
				words[k] = atomic.LoadUint64(&b.words[int(i)*b.width+k]) //nolint:gosec // within the table
			}
			return n
		case 0:
			return 0
		}
	}
	return 0 // keys are being moved
}

// touch has the memory of a key brought near: whoever is about to write several does so for all of them first.
func (s *shard) touch(key uint64) uint64 {
	b := s.slab.Load()
	if b == nil {
		return 0
	}
	return b.keys[key&uint64(len(b.keys)-1)] //nolint:gosec // positive
}

// set sets bits of one word of a key, which is added if it is not there. It returns the word as it was.
func (s *shard) set(key uint64, word int, bits uint64) (was uint64, fresh bool) {
	b := s.slab.Load()
	n := s.n.Load()
	if b == nil || b.width <= word || (int(n)+1)*fullDen > len(b.keys)*fullNum {
		b = s.grow(b, int(n)+1, word+1)
	}
	at, there := b.find(key)
	w := &b.words[at*b.width+word]
	was = *w
	if was|bits != was {
		atomic.StoreUint64(w, was|bits)
	}
	if !there {
		atomic.StoreUint64(&b.keys[at], key) // after its words: from here on it is seen
		s.n.Store(n + 1)
	}
	return was, !there
}

// put gives a key one word.
func (s *shard) put(key, value uint64) {
	b := s.slab.Load()
	if b != nil {
		if at, there := b.find(key); there {
			if b.words[at] != value {
				atomic.StoreUint64(&b.words[at], value)
			}
			return
		}
	}
	s.set(key, 0, value)
}

// get is the first word of a key, for who writes.
func (s *shard) get(key uint64) (value uint64, there bool) {
	b := s.slab.Load()
	if b == nil {
		return 0, false
	}
	at, there := b.find(key)
	return b.words[at*b.width], there
}

// clear clears a bit of a key, and drops it if it was the last one. It returns whether the bit was set.
func (s *shard) clear(key uint64, bit int) (was, dropped bool) {
	b := s.slab.Load()
	if b == nil || b.width <= bit/64 {
		return false, false
	}
	at, there := b.find(key)
	if !there {
		return false, false
	}
	words := b.words[at*b.width:][:b.width]
	was = words[bit/64]&(1<<(bit%64)) != 0
	atomic.StoreUint64(&words[bit/64], words[bit/64]&^(1<<(bit%64)))
	for _, w := range words {
		if w != 0 {
			return was, false
		}
	}
	s.dropAt(b, at)
	return was, true
}

// grow makes room for n keys, with so many words each.
func (s *shard) grow(old *slab, n, width int) *slab {
	size := shardLeast
	if old != nil {
		size, width = len(old.keys), max(width, old.width)
	}
	for n*fullDen > size*fullNum {
		size *= 2
	}
	return s.rebuild(old, size, width)
}

// rebuild moves all keys to new memory. Readers see the old one, which does not change any more, until they see the new one.
func (s *shard) rebuild(old *slab, size, width int) *slab {
	b := &slab{width: width, keys: make([]uint64, size), words: make([]uint64, size*width)}
	if old != nil {
		for i, key := range old.keys {
			if key != 0 {
				at, _ := b.find(key)
				b.keys[at] = key
				copy(b.words[at*width:][:width], old.words[i*old.width:][:old.width])
			}
		}
	}
	s.slab.Store(b)
	return b
}

// drop removes a key, if it is there.
func (s *shard) drop(key uint64) {
	if b := s.slab.Load(); b != nil {
		if at, there := b.find(key); there {
			s.dropAt(b, at)
		}
	}
}

// dropAt removes the key at a place. Those behind it move up, so that none of them is behind a free place.
func (s *shard) dropAt(b *slab, hole int) {
	s.moves.Add(1)
	mask := len(b.keys) - 1
	for at := (hole + 1) & mask; b.keys[at] != 0; at = (at + 1) & mask {
		home := int(b.keys[at]) & mask //nolint:gosec // masked
		if (at-home)&mask < (at-hole)&mask {
			continue // it would come before its place
		}
		b.move(at, hole)
		hole = at
	}
	atomic.StoreUint64(&b.keys[hole], 0)
	for k := range b.width {
		atomic.StoreUint64(&b.words[hole*b.width+k], 0)
	}
	s.moves.Add(1)
	n := s.n.Add(-1)
	if size := len(b.keys); size > shardLeast && int(n)*8 < size { // give memory back when most has gone
		s.rebuild(b, size/2, b.width)
	}
}

// move copies a key and its words to another place.
func (b *slab) move(from, to int) {
	for k := range b.width {
		atomic.StoreUint64(&b.words[to*b.width+k], b.words[from*b.width+k])
	}
	atomic.StoreUint64(&b.keys[to], b.keys[from])
}

// sweep clears bits of all keys, and drops those that have none left. It returns how many those are.
func (s *shard) sweep(gone mask) int {
	b := s.slab.Load()
	if b == nil {
		return 0
	}
	var dead []uint64
	for i, key := range b.keys {
		if key != 0 && b.sweepWords(i, gone) {
			dead = append(dead, key)
		}
	}
	if len(dead) == int(s.n.Load()) { // all of it
		s.n.Store(0)
		s.slab.Store(nil)
		return len(dead)
	}
	for _, key := range dead {
		s.drop(key)
	}
	return len(dead)
}

// sweepWords clears bits of one key, and reports whether none is left. Nobody looks at these any more.
func (b *slab) sweepWords(at int, gone mask) (dead bool) {
	left := uint64(0)
	words := b.words[at*b.width:][:b.width]
	for k, w := range words[:min(len(words), len(gone))] {
		if w&gone[k] != 0 {
			atomic.StoreUint64(&words[k], w&^gone[k])
		}
	}
	for _, w := range words {
		left |= w
	}
	return left == 0
}

// len is how many keys there are.
func (t *table) len() (n int) {
	for i := range t.shards {
		n += int(t.shards[i].n.Load())
	}
	return n
}
