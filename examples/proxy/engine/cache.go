package engine

import (
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// name is a block's hash. It is chained: it tells all tokens up to the block's end from others.
type name uint64

// scope is what the blocks of a request can be shared within, beside their tokens.
type scope struct {
	lora string
	salt string // in the first block alone, as in vLLM
}

// cache is a prefix cache of whole blocks. Those that requests hold stay; of the others the one that was used least lately
// makes room. Since whoever uses a block uses all before it, a block goes before its parent does.
//
// Its methods, but names, must not be called concurrently.
type cache struct {
	size     int // tokens of a block
	capacity int // blocks
	none     name
	blocks   map[name]*block
	free     *list.List // *block that nobody holds, coldest first
}

// block is in the cache as long as it is in the map.
type block struct {
	name name
	refs int
	free *list.Element // nil while it is held
}

func newCache(capacity, size int, seed string) *cache {
	sum := sha256.Sum256([]byte(seed))
	none := name(binary.BigEndian.Uint64(sum[24:]))
	return &cache{size: size, capacity: capacity, none: none, blocks: map[name]*block{}, free: list.New()}
}

// names are those of the whole blocks of a prompt.
func (c *cache) names(tokens []uint32, s scope) []name {
	names := make([]name, 0, len(tokens)/c.size)
	parent := c.none
	buf := make([]byte, 0, 8+4*c.size+len(s.lora)+len(s.salt)+2)
	for ; len(tokens) >= c.size; tokens = tokens[c.size:] {
		buf = binary.BigEndian.AppendUint64(buf[:0], uint64(parent))
		for _, t := range tokens[:c.size] {
			buf = binary.BigEndian.AppendUint32(buf, t)
		}
		buf = append(append(buf, s.lora...), 0)
		if len(names) == 0 {
			buf = append(buf, s.salt...)
		}
		sum := sha256.Sum256(buf)
		parent = name(binary.BigEndian.Uint64(sum[24:])) // the low 64 bits, as vLLM publishes them
		names = append(names, parent)
	}
	return names
}

func (c *cache) len() int { return len(c.blocks) }

// hold gives the blocks from the first that are cached, up to the first that is not.
func (c *cache) hold(names []name) []*block {
	held := make([]*block, 0, len(names))
	for _, n := range names {
		b := c.blocks[n]
		if b == nil {
			break
		}
		held = append(held, c.take(b))
	}
	return held
}

func (c *cache) take(b *block) *block {
	if b.refs++; b.free != nil {
		c.free.Remove(b.free)
		b.free = nil
	}
	return b
}

// store adds what is not there of the blocks after those that are held, until others hold all room. It gives what is held
// then, and what made room.
func (c *cache) store(held []*block, names []name) (all []*block, evicted []name) {
	for _, n := range names[len(held):] {
		b := c.blocks[n]
		if b == nil {
			if len(c.blocks) >= c.capacity {
				coldest := c.free.Front()
				if coldest == nil {
					break
				}
				evicted = append(evicted, c.evict(coldest))
			}
			b = &block{name: n}
			c.blocks[n] = b
		}
		held = append(held, c.take(b))
	}
	return held, evicted
}

func (c *cache) evict(e *list.Element) name {
	b := c.free.Remove(e).(*block)
	delete(c.blocks, b.name)
	return b.name
}

// release gives blocks back, the last first: it is the coldest.
func (c *cache) release(held []*block) {
	for _, b := range slices.Backward(held) {
		if b.refs--; b.refs == 0 {
			b.free = c.free.PushBack(b)
		}
	}
}

// clear forgets all blocks, unless some are held.
func (c *cache) clear() bool {
	if c.free.Len() < len(c.blocks) {
		return false
	}
	clear(c.blocks)
	c.free.Init()
	return true
}
