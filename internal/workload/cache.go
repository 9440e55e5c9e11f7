package workload

import (
	"container/heap"
	"math"

	"larder/meta/policy"
)

// Result is what a cache hit.
type Result struct {
	Accesses int
	Hits     int // blocks that were there
	Prefix   int // of those, the ones before the first block of their request that was not
}

// Ratio is hits by accesses.
func (r Result) Ratio() float64 { return float64(r.Hits) / float64(max(1, r.Accesses)) }

// PrefixRatio is hits of use to an engine, which needs all blocks before one, by
// accesses.
func (r Result) PrefixRatio() float64 { return float64(r.Prefix) / float64(max(1, r.Accesses)) }

// Play runs a trace through a cache of a number of blocks under a registered
// policy. As for policytest.Cache each block is an access of its own, in order,
// and a block that is missed is stored.
func Play(t Trace, name string, cfg policy.Config, capacity int) (Result, error) {
	c, err := NewCache(name, cfg, capacity)
	if err != nil {
		return Result{}, err
	}
	for _, q := range t {
		c.Request(q.TimeMS, q.Blocks)
	}
	return c.Result, nil
}

// cached is one entry of a cache.
type cached struct {
	order    policy.Order
	birth    uint64
	added    uint64
	links    policy.Links
	parent   policy.Slot // valid while its birth is below this one's
	block    uint32
	index    uint32
	children uint32
	live     bool
}

// Cache is a cache of blocks under a registered policy, which it calls as the
// machine does.
type Cache struct {
	Result

	// Stored and Evicted are told of each block that comes and goes, if they are
	// set. They must not call the cache.
	Stored, Evicted func(block uint32)

	capacity int
	policy   policy.Policy
	slots    []policy.Slot // by block
	entries  []cached
	free     []policy.Slot
	births   uint64
	hot      int64
	cold     int64
	victim   policy.Slot
	take     func(policy.Slot) policy.Verdict // the first victim offered
}

// NewCache makes an empty cache of a number of blocks.
func NewCache(name string, cfg policy.Config, capacity int) (*Cache, error) {
	c := &Cache{capacity: capacity}
	c.take = func(s policy.Slot) policy.Verdict {
		c.victim = s
		return policy.Stop
	}
	p, err := policy.New(name, cfg, (*table)(c))
	c.policy = p
	return c, err //nolint:wrapcheck // it names the policy already
}

// Len is the number of blocks held.
func (c *Cache) Len() int { return len(c.entries) - len(c.free) }

// Prefix is how many blocks are held before the first that is not. It is no use
// of them.
func (c *Cache) Prefix(blocks []uint32) int {
	for i, b := range blocks {
		if c.slot(b) == policy.None {
			return i
		}
	}
	return len(blocks)
}

// Request uses the blocks of a prompt in order, and stores those that are
// missed.
func (c *Cache) Request(now uint64, blocks []uint32) {
	parent, whole := policy.None, true
	for i, b := range blocks {
		c.Accesses++
		s := c.slot(b)
		if s != policy.None {
			c.Hits++
			if whole {
				c.Result.Prefix++
			}
			c.policy.Touch(s, 1)
		} else {
			whole = false
			s = c.store(now, b, uint32(i), parent)
		}
		parent = s
	}
}

// Resize changes how many blocks there is room for; those that have none are
// evicted.
func (c *Cache) Resize(now uint64, capacity int) {
	for c.capacity = capacity; c.Len() > capacity; {
		c.evict(now)
	}
}

// Drop takes out a block for a reason of somebody else's.
func (c *Cache) Drop(b uint32) {
	if s := c.slot(b); s != policy.None {
		c.policy.Remove(s)
		c.leave(s)
	}
}

func (c *Cache) slot(b uint32) policy.Slot {
	if int(b) >= len(c.slots) {
		return policy.None
	}
	return c.slots[b]
}

func (c *Cache) store(now uint64, b, index uint32, parent policy.Slot) policy.Slot {
	if c.capacity == 0 {
		return policy.None
	}
	if c.Len() >= c.capacity {
		c.evict(now)
	}
	s := c.room(b)
	c.births++
	if parent != policy.None && !c.entries[parent].live {
		parent = policy.None // the block before this one was the one to leave for it
	}
	c.entries[s] = cached{
		birth: c.births, added: now, links: policy.Links{Colder: policy.None, Hotter: policy.None},
		parent: parent, block: b, index: index, live: true,
	}
	c.slots[b] = s
	c.policy.Add(s)
	if parent != policy.None {
		c.entries[parent].children++
		c.policy.ChildAdded(parent)
	}
	if c.Stored != nil {
		c.Stored(b)
	}
	return s
}

// room is a free slot for a block.
func (c *Cache) room(b uint32) policy.Slot {
	for int(b) >= len(c.slots) {
		c.slots = append(c.slots, policy.None)
	}
	if n := len(c.free); n > 0 {
		s := c.free[n-1]
		c.free = c.free[:n-1]
		return s
	}
	c.entries = append(c.entries, cached{})
	return policy.Slot(len(c.entries) - 1) //nolint:gosec // a capacity is small
}

func (c *Cache) evict(now uint64) {
	c.policy.Victims(now, c.take)
	c.policy.Evict(c.victim)
	c.leave(c.victim)
}

// leave takes out an entry that its policy has forgotten.
func (c *Cache) leave(s policy.Slot) {
	e := &c.entries[s]
	order, parent := e.order, (*table)(c).Parent(s)
	e.live = false
	c.slots[e.block] = policy.None
	c.free = append(c.free, s)
	if parent != policy.None {
		c.entries[parent].children--
		c.policy.ChildGone(parent, order)
	}
	if c.Evicted != nil {
		c.Evicted(e.block)
	}
}

// table is what a cache's policy sees of it.
type table Cache

// Order implements policy.Table, as do the following.
func (c *table) Order(s policy.Slot) policy.Order { return c.entries[s].order }

// SetOrder replaces it.
func (c *table) SetOrder(s policy.Slot, o policy.Order) { c.entries[s].order = o }

// Links returns the links of s.
func (c *table) Links(s policy.Slot) *policy.Links { return &c.entries[s].links }

// Info returns what is known of s.
func (c *table) Info(s policy.Slot) policy.Info {
	e := &c.entries[s]
	return policy.Info{Bytes: 1, AddedMS: e.added, Index: e.index, Children: e.children}
}

// KeyHash scatters the number of the block.
func (c *table) KeyHash(s policy.Slot) uint64 {
	h := (uint64(c.entries[s].block) + 1) * 0x9e3779b97f4a7c15
	return (h ^ h>>32) * 0xd6e8feb86659fd93
}

// Parent returns the block before s if it is still there.
func (c *table) Parent(s policy.Slot) policy.Slot {
	p := c.entries[s].parent
	if p == policy.None || !c.entries[p].live || c.entries[p].birth > c.entries[s].birth {
		return policy.None
	}
	return p
}

// NextStamp counts up.
func (c *table) NextStamp() int64 { c.hot++; return c.hot }

// ColdStamp counts down.
func (c *table) ColdStamp() int64 { c.cold--; return c.cold }

const never = math.MaxInt

// nexts returns for each access when the same block is accessed next, and the
// blocks in order.
func (t Trace) nexts() (blocks []uint32, next []int) {
	for _, q := range t {
		blocks = append(blocks, q.Blocks...)
	}
	next = make([]int, len(blocks))
	at := make([]int, t.end())
	for i := range at {
		at[i] = never
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		next[i] = at[blocks[i]]
		at[blocks[i]] = i
	}
	return blocks, next
}

// Optimum is what a policy that knows the future hits (Belady's MIN): it evicts
// what is used next the latest.
func Optimum(t Trace, capacity int) Result {
	blocks, next := t.nexts()
	r := Result{Accesses: len(blocks)}
	until := make([]int, t.end()) // when a held block is used next; 0: not held
	var h latest
	held := 0
	for i, b := range blocks {
		if until[b] != 0 {
			r.Hits++
		} else {
			for held == capacity {
				x := heap.Pop(&h).(use) //nolint:forcetypeassert // it holds nothing else
				if until[x.block] == x.next {
					until[x.block] = 0
					held--
				}
			}
			held++
		}
		until[b] = next[i]
		heap.Push(&h, use{b, next[i]})
	}
	return r
}

type use struct {
	block uint32
	next  int
}

// latest is a heap of uses, the one furthest away on top.
type latest []use

func (h *latest) Len() int           { return len(*h) }
func (h *latest) Less(i, j int) bool { return (*h)[i].next > (*h)[j].next }
func (h *latest) Swap(i, j int)      { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

// Push implements heap.Interface.
func (h *latest) Push(x any) { *h = append(*h, x.(use)) } //nolint:forcetypeassert // it holds nothing else

// Pop implements heap.Interface.
func (h *latest) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// Returners is what least recently used hits if it is told one bit of each
// access: whether the block is ever used again. Those that are not, are not
// kept. A share of the answers is wrong.
func Returners(t Trace, capacity int, wrong float64) Result {
	blocks, next := t.nexts()
	rng := newRand(1, 1)
	r := Result{Accesses: len(blocks)}
	type held struct {
		block uint32
		at    int
	}
	var queue []held // by last use; stale where last differs
	last := make([]int, t.end())
	for i := range last {
		last[i] = -1
	}
	n := 0
	for i, b := range blocks {
		if last[b] >= 0 {
			r.Hits++
			n--
			last[b] = -1
		}
		if (next[i] == never) != (rng.Float64() < wrong) {
			continue
		}
		for n == capacity {
			x := queue[0]
			queue = queue[1:]
			if last[x.block] == x.at {
				last[x.block] = -1
				n--
			}
		}
		last[b] = i
		queue = append(queue, held{b, i})
		n++
	}
	return r
}
