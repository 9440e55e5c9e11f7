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
	c := &cache{slots: make([]policy.Slot, t.end()), entries: make([]cached, capacity)}
	for i := range c.slots {
		c.slots[i] = policy.None
	}
	for i := range c.entries {
		c.free = append(c.free, policy.Slot(capacity-1-i)) //nolint:gosec // a capacity is small
	}
	p, err := policy.New(name, cfg, c)
	if err != nil {
		return Result{}, err //nolint:wrapcheck // it names the policy already
	}
	c.policy = p
	for _, q := range t {
		c.request(q)
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

// cache is a policy.Table of fixed size and what calls the policy as the
// machine does.
type cache struct {
	Result

	policy  policy.Policy
	slots   []policy.Slot // by block
	entries []cached
	free    []policy.Slot
	births  uint64
	hot     int64
	cold    int64
	victim  policy.Slot
}

func (c *cache) request(q Request) {
	parent, whole := policy.None, true
	for i, b := range q.Blocks {
		c.Accesses++
		s := c.slots[b]
		if s != policy.None {
			c.Hits++
			if whole {
				c.Prefix++
			}
			c.policy.Touch(s, 1)
		} else {
			whole = false
			s = c.store(q.TimeMS, b, uint32(i), parent)
		}
		parent = s
	}
}

func (c *cache) store(now uint64, b, index uint32, parent policy.Slot) policy.Slot {
	if len(c.free) == 0 {
		c.policy.Victims(now, func(s policy.Slot) policy.Verdict {
			c.victim = s
			return policy.Stop
		})
		c.evict(c.victim)
	}
	s := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
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
	return s
}

func (c *cache) evict(s policy.Slot) {
	c.policy.Evict(s)
	e := &c.entries[s]
	order, parent := e.order, c.Parent(s)
	e.live = false
	c.slots[e.block] = policy.None
	c.free = append(c.free, s)
	if parent != policy.None {
		c.entries[parent].children--
		c.policy.ChildGone(parent, order)
	}
}

// Order implements policy.Table, as do the following.
func (c *cache) Order(s policy.Slot) policy.Order { return c.entries[s].order }

// SetOrder replaces it.
func (c *cache) SetOrder(s policy.Slot, o policy.Order) { c.entries[s].order = o }

// Links returns the links of s.
func (c *cache) Links(s policy.Slot) *policy.Links { return &c.entries[s].links }

// Info returns what is known of s.
func (c *cache) Info(s policy.Slot) policy.Info {
	e := &c.entries[s]
	return policy.Info{Bytes: 1, AddedMS: e.added, Index: e.index, Children: e.children}
}

// KeyHash scatters the number of the block.
func (c *cache) KeyHash(s policy.Slot) uint64 {
	h := (uint64(c.entries[s].block) + 1) * 0x9e3779b97f4a7c15
	return (h ^ h>>32) * 0xd6e8feb86659fd93
}

// Parent returns the block before s if it is still there.
func (c *cache) Parent(s policy.Slot) policy.Slot {
	p := c.entries[s].parent
	if p == policy.None || !c.entries[p].live || c.entries[p].birth > c.entries[s].birth {
		return policy.None
	}
	return p
}

// NextStamp counts up.
func (c *cache) NextStamp() int64 { c.hot++; return c.hot }

// ColdStamp counts down.
func (c *cache) ColdStamp() int64 { c.cold--; return c.cold }

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
