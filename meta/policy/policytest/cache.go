package policytest

import (
	"larder/meta/policy"
)

// Cache counts the hits of a cache of fixed capacity that a policy governs: the
// way to judge a policy on a trace. It stands for one client whose lookups and
// stores are each a decision of their own.
type Cache struct {
	Pool     *Pool
	Capacity int // entries
	Hits     int
	Accesses int

	slots map[uint64]policy.Slot
	keys  map[policy.Slot]uint64
}

// NewCache makes an empty cache.
func NewCache(name string, cfg policy.Config, capacity int) (*Cache, error) {
	pool, err := NewPool(name, cfg)
	if err != nil {
		return nil, err
	}
	return &Cache{
		Pool: pool, Capacity: capacity,
		slots: make(map[uint64]policy.Slot), keys: make(map[policy.Slot]uint64),
	}, nil
}

// Request accesses the blocks of one request in order, at a time in
// milliseconds, and stores those that miss.
func (c *Cache) Request(now uint64, blocks []uint64) {
	var parent uint64
	for i, key := range blocks {
		c.access(now, key, parent, uint32(i))
		parent = key + 1
	}
}

// access looks up one block; parent is one above its predecessor's key, 0 if
// there is none.
func (c *Cache) access(now, key, parent uint64, index uint32) {
	c.Accesses++
	if s, hit := c.slots[key]; hit {
		c.Hits++
		c.Pool.Touch(s, 1)
		return
	}
	if len(c.slots) >= c.Capacity {
		for _, s := range c.Pool.Plan(now, 1, nil) {
			delete(c.slots, c.keys[s])
			delete(c.keys, s)
			c.Pool.Evict(s)
		}
	}
	info := Entry{Info: policy.Info{Bytes: 1, AddedMS: now, Index: index}, KeyHash: key + 1, Parent: policy.None}
	if parent != 0 {
		if s, ok := c.slots[parent-1]; ok {
			info.Parent = s
		}
	}
	s := c.Pool.Add(info)
	c.slots[key], c.keys[s] = s, key
}

// Ratio is hits by accesses, 0 before the first.
func (c *Cache) Ratio() float64 {
	if c.Accesses == 0 {
		return 0
	}
	return float64(c.Hits) / float64(c.Accesses)
}
