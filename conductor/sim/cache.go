package sim

import (
	"larder/conductor"
	"larder/conductor/kvevent"
	"larder/internal/workload"
	"larder/meta/policy"
)

// cache is the KV caches of one prefill instance, or the pool of all: memory, and disks behind it that take what memory
// evicts. Block ids are the trace's. What comes and goes is told to the index as an engine's events are.
type cache struct {
	dram, ssd *workload.Cache // ssd is nil if there is none
	index     *conductor.Index
	source    conductor.Source

	stored, evicted, demoted, dropped []uint64 // names, since the last publish
	event                             kvevent.Event
	gone                              []uint32 // evicted from memory, on their way to disk
}

// name is a block's in the index: scattered, as hashes are.
func name(block uint32) uint64 {
	x := (uint64(block) + 1) * 0x9e3779b97f4a7c15
	return x ^ x>>31
}

// newCache makes the caches of an instance of so many nodes.
func newCache(s *Scenario, nodes int, index *conductor.Index, source conductor.Source) (*cache, error) {
	c := &cache{index: index, source: source}
	var err error
	if c.dram, err = workload.NewCache(s.EvictionPolicy, policy.Config{}, nodes*s.CacheTokens/s.BlockSize); err != nil {
		return nil, err //nolint:wrapcheck // it names the policies already
	}
	c.dram.Stored = func(b uint32) { c.stored = append(c.stored, name(b)) }
	c.dram.Evicted = func(b uint32) {
		c.evicted = append(c.evicted, name(b))
		c.gone = append(c.gone, b)
	}
	if s.SSDTokens == 0 {
		return c, nil
	}
	if c.ssd, err = workload.NewCache(s.EvictionPolicy, policy.Config{}, nodes*s.SSDTokens/s.BlockSize); err != nil {
		return nil, err //nolint:wrapcheck // it names the policies already
	}
	c.ssd.Stored = func(b uint32) { c.demoted = append(c.demoted, name(b)) }
	c.ssd.Evicted = func(b uint32) { c.dropped = append(c.dropped, name(b)) }
	return c, nil
}

// prefix is how many blocks at the beginning of a prompt are cached, and how many of these are on disk alone.
func (c *cache) prefix(blocks []uint32) (n, onDisk int) {
	n = c.dram.Prefix(blocks)
	if c.ssd == nil {
		return n, 0
	}
	for n < len(blocks) {
		if k := c.dram.Prefix(blocks[n:]); k > 0 {
			n += k
		} else if c.ssd.Prefix(blocks[n:n+1]) == 1 {
			n++
			onDisk++
		} else {
			break
		}
	}
	return n, onDisk
}

// use takes note that the blocks of a prompt were used, and stores those that are missing.
func (c *cache) use(nowMS uint64, blocks []uint32) {
	c.dram.Request(nowMS, blocks)
	if c.ssd != nil {
		for _, b := range blocks {
			c.ssd.Drop(b) // it has come back to memory
		}
		for i := range c.gone {
			c.ssd.Request(nowMS, c.gone[i:i+1])
		}
	}
	c.gone = c.gone[:0]
	c.publish()
}

// publish tells the index.
func (c *cache) publish() {
	c.stored = c.tell(kvevent.Stored, kvevent.CPU, c.stored)
	c.evicted = c.tell(kvevent.Removed, kvevent.CPU, c.evicted)
	c.demoted = c.tell(kvevent.Stored, kvevent.Disk, c.demoted)
	c.dropped = c.tell(kvevent.Removed, kvevent.Disk, c.dropped)
}

func (c *cache) tell(what kvevent.Kind, medium kvevent.Medium, names []uint64) []uint64 {
	if len(names) > 0 && c.index != nil {
		c.event = kvevent.Event{Kind: what, Medium: medium, Rank: kvevent.NoRank, Hashes: names, Standard: true, BaseBlock: -1}
		if err := c.index.Apply(&c.source, &c.event, kvevent.NoRank); err != nil {
			panic("sim: the index does not take what an instance tells it: " + err.Error()) // the scenario was checked
		}
	}
	return names[:0]
}

// holds reports whether a block is cached.
func (c *cache) holds(block uint32) bool {
	n, _ := c.prefix([]uint32{block})
	return n == 1
}
