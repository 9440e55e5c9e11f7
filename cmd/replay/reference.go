package replay

import (
	"container/heap"
	"container/list"
	"math"
)

// Reference is what exact policies would reach with the same number of pages, each hash one access in the order of the
// file.
type Reference struct {
	Pages   int     `json:"pages"`
	LRU     float64 `json:"lru"`     // block hit ratio of exact LRU
	Optimum float64 `json:"optimum"` // of Belady's optimum, which knows the future
}

// Compare works out the reference for a trace.
func Compare(trace []Request, pages int) Reference {
	accesses := Accesses(trace)
	if len(accesses) == 0 || pages <= 0 {
		return Reference{Pages: pages}
	}
	n := float64(len(accesses))
	return Reference{
		Pages: pages, LRU: float64(LRUHits(accesses, pages)) / n, Optimum: float64(OptimumHits(accesses, pages)) / n,
	}
}

// Accesses is all hash ids of a trace in order.
func Accesses(trace []Request) []uint64 {
	var all []uint64
	for i := range trace {
		all = append(all, trace[i].HashIDs...)
	}
	return all
}

// LRUHits counts the hits of exact LRU.
func LRUHits(accesses []uint64, pages int) (hits int) {
	order := list.New() // coldest first
	at := make(map[uint64]*list.Element, pages)
	for _, id := range accesses {
		if e, ok := at[id]; ok {
			hits++
			order.MoveToBack(e)
			continue
		}
		if order.Len() == pages {
			delete(at, order.Remove(order.Front()).(uint64)) //nolint:forcetypeassert // only ids are pushed
		}
		at[id] = order.PushBack(id)
	}
	return hits
}

// OptimumHits counts the hits of Belady's optimum: on a miss with all pages in use, what is needed latest goes. The
// block that missed is always stored, as it is here.
func OptimumHits(accesses []uint64, pages int) (hits int) {
	next := make([]int, len(accesses)) // when the same id comes again
	last := make(map[uint64]int)
	for i := len(accesses) - 1; i >= 0; i-- {
		next[i] = math.MaxInt
		if j, ok := last[accesses[i]]; ok {
			next[i] = j
		}
		last[accesses[i]] = i
	}
	held := make(map[uint64]int, pages) // id to its next use
	var latest useHeap
	for i, id := range accesses {
		if _, ok := held[id]; ok {
			hits++
		} else {
			for len(held) >= pages {
				u := heap.Pop(&latest).(use) //nolint:forcetypeassert // only uses are pushed
				if at, ok := held[u.id]; ok && at == u.at {
					delete(held, u.id)
				}
			}
		}
		held[id] = next[i]
		heap.Push(&latest, use{next[i], id})
	}
	return hits
}

// use is a block's next use, as it was known when it was pushed.
type use struct {
	at int
	id uint64
}

// useHeap has the latest use first. Uses that are out of date are passed over when they come up.
type useHeap []use

// Len implements heap.Interface.
func (h *useHeap) Len() int { return len(*h) }

// Less implements heap.Interface.
func (h *useHeap) Less(i, j int) bool { return (*h)[i].at > (*h)[j].at }

// Swap implements heap.Interface.
func (h *useHeap) Swap(i, j int) { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

// Push implements heap.Interface.
func (h *useHeap) Push(x any) { *h = append(*h, x.(use)) } //nolint:forcetypeassert // only uses are pushed

// Pop implements heap.Interface.
func (h *useHeap) Pop() any {
	n := len(*h) - 1
	u := (*h)[n]
	*h = (*h)[:n]
	return u
}
