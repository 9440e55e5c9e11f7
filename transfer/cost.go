package transfer

import "time"

// Where more than one transport leads to a peer's memory, the first of Transports is the prior, and another is taken if it
// has been measured to be clearly cheaper. What a lane costs is measured on what it carries; those that carry nothing are
// probed, by a READ into memory of this engine's own, for which no request waits.
const (
	// clearlyCheaper is by how much another lane must be cheaper than the one that is preferred: a probe finds its lane idle,
	// and what is measured changes with the load.
	clearlyCheaper = 2
	// probeEvery is how often a lane that carries nothing is probed while others do.
	probeEvery = int64(5e9)
	// smallSlice bounds the class of small slices, whose cost is latency, in bytes; that of larger ones is bandwidth.
	smallSlice = 16 << 10
)

// costs are what slices of both classes take on a lane, in ns: a small one, and 64 KiB of a larger one, with what is carried
// beside it taken into account.
type costs [2]atomicEWMA

// sizeClass is 0 for small slices and 1 for larger ones.
func sizeClass(length uint64) int {
	if length <= smallSlice {
		return 0
	}
	return 1
}

// add takes note of a slice that took so many ns, with so many bytes under way, its own among them.
func (c *costs) add(length uint64, took, under int64) {
	n := int64(length) //nolint:gosec // at most maxSlice
	if n == 0 || under < n {
		return
	}
	share := took * n / under
	if class := sizeClass(length); class == 0 {
		c[class].add(share)
	} else {
		c[class].add(share * paceUnit / n)
	}
}

// choose is the lane that slices for storage, or memory, take: the first, unless another is clearly cheaper; nil if none
// leads there.
func (s *Segment) choose(storage bool, length uint64) *lane {
	var best *lane
	class := sizeClass(length)
	for _, l := range s.lanes {
		if l.storage != storage {
			continue
		}
		if best == nil || l.works() && l.cheaper(best, class) {
			best = l
		}
	}
	return best
}

// cheaper reports whether a lane is clearly cheaper than another. What has not been measured is not.
func (l *lane) cheaper(than *lane, class int) bool {
	own, its := l.cost[class].load(), than.cost[class].load()
	return own > 0 && its > 0 && own*clearlyCheaper < its
}

// works reports whether nothing has failed on some rail since it last carried something.
func (l *lane) works() bool {
	for _, r := range l.rails {
		if r.carries.Load() {
			return true
		}
	}
	return false
}

// next is the lane that a slice tries when those that it has tried have nothing left; nil if it has tried all.
func (s *Segment) next(sl *slice) *lane {
	for i, l := range s.lanes {
		if l.storage == sl.request.Buffer.OnStorage() && sl.tried&(1<<i) == 0 {
			return l
		}
	}
	return nil
}

// alone reports whether no other lane leads to the peer's memory.
func (l *lane) alone() bool {
	for _, o := range l.seg.lanes {
		if o != l && !o.storage {
			return false
		}
	}
	return true
}

// sample is a range that requests were for: one to probe with.
type sample struct {
	buffer Handle
	offset uint64
	length uint64
}

// sampled takes note of what requests are for, if another lane may be probed with it.
func (s *Segment) sampled(sl *slice) {
	if s.comparing && s.sample.Load() == nil && !sl.request.Buffer.OnStorage() {
		s.sample.Store(&sample{sl.request.Buffer, sl.offset(), sl.length})
	}
}

// compare reads once what requests were for, over each lane that has carried nothing lately while others have. It does not
// wait. The keeper calls it.
func (s *Segment) compare(now int64) {
	if !s.comparing || now-s.compared < probeEvery {
		return
	}
	with := s.sample.Swap(nil)
	if with == nil {
		return
	}
	s.compared = now
	for _, l := range s.lanes {
		if carried := l.carried(); l.storage || carried != l.seen {
			l.seen = carried
			continue
		}
		r := Request{Op: Read, Segment: s, Buffer: with.buffer, Offset: with.offset, Local: make([]byte, with.length)}
		b := s.e.newBatch([]Request{r}, 1, now+int64(probeTimeout))
		b.own = true
		b.cut()
		b.slices[0].tried = ^uint64(0) // no other lane
		l.push(&b.slices[0], &b.slices[0])
	}
}

// probeTimeout is how long a probe may take.
const probeTimeout = 2 * time.Second

// carried is how many slices a lane has carried.
func (l *lane) carried() (n uint64) {
	for _, r := range l.rails {
		n += r.slices.Load()
	}
	return n
}
