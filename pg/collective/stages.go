package collective

import (
	"fmt"
	"slices"

	"larder/pg/reduce"
)

// maxStages bounds the stages of an operation: their number has stageBits, and one for each host is too many of them anyway.
const maxStages = 64

// setUpStages makes what operations in stages need: the room of this host, and for each place in a host the lanes of one
// member of every host, the one at that place, or the last if there are fewer.
func (c *Comm) setUpStages() error {
	c.hosts, c.host, c.across = nil, nil, nil
	longest := 0
	for _, h := range c.Hosts {
		c.hosts = append(c.hosts, slices.Sorted(slices.Values(h)))
		longest = max(longest, len(h))
	}
	slices.SortFunc(c.hosts, slices.Compare)
	if longest < 2 || len(c.hosts) < 2 || len(c.hosts) > maxStages-2 {
		c.hosts = nil
		return nil
	}
	i := slices.IndexFunc(c.hosts, func(h []int) bool { return slices.Contains(h, c.Me) })
	if i < 0 || len(slices.Concat(c.hosts...)) != c.N || len(c.hosts[i]) > 1 && !slices.Equal(c.hosts[i], c.Local) {
		return fmt.Errorf("%w: hosts %v of %d members, with room for %v at member %d", ErrComm, c.Hosts, c.N, c.Local, c.Me)
	}
	c.staged = staged{c: c, host: i, place: slices.Index(c.hosts[i], c.Me), even: true}
	for _, h := range c.hosts {
		c.staged.even = c.staged.even && len(h) == longest
	}
	if len(c.hosts[i]) > 1 {
		var err error
		if c.host, err = newInRoom(c); err != nil {
			return err
		}
	}
	for place := range longest {
		var list []int
		for _, h := range c.hosts {
			list = append(list, h[min(place, len(h)-1)])
		}
		var lanes *onLanes
		if list[i] == c.Me {
			var err error
			if lanes, err = newOnLanes(c, list, i); err != nil {
				return err
			}
		}
		c.across = append(c.across, lanes)
	}
	return nil
}

// staged is an operation as a row of flows, each over this host's room or between hosts. A member takes no part in some.
type staged struct {
	c     *Comm
	host  int  // which this one is
	place int  // of this member in it
	even  bool // all hosts have as many members

	a        Args
	seq, sig uint64
	at       int  // stage
	cut      bool // the operand is cut among the members of a host; otherwise one of each does it all
	runs     bool // the flow of this stage is under way
	scratch  []byte
}

// inStages reports whether an operation goes in stages.
func (c *Comm) inStages(a *Args) bool {
	if c.hosts == nil {
		return false
	}
	switch a.Kind {
	case AllReduce, Broadcast, Reduce, Barrier:
		return true
	case AllGather, ReduceScatter:
		return c.staged.even
	case AllToAll, Gather, Scatter:
	}
	return false
}

// stage begins an operation in stages.
func (c *Comm) stage(a *Args, seq, sig uint64) Op {
	s := &c.staged
	s.a, s.seq, s.sig, s.at, s.runs = *a, seq, sig, 0, false
	s.cut = a.Kind == AllReduce && s.even && len(a.Src[0]) >= c.Table.Stage
	return s
}

// Poll implements [Op].
func (s *staged) Poll() (bool, error) {
	for {
		if !s.runs {
			o, more := s.enter()
			if !more {
				s.c.busy, s.a = false, Args{}
				return true, nil
			}
			if s.runs = o != nil; !s.runs {
				s.at++
				continue
			}
			o.begin()
		}
		done, err := s.c.flow.poll()
		if err != nil {
			s.c.fail(s.c.flow.seq, s.sig, err)
			return false, err
		}
		if !done {
			return false, nil
		}
		s.runs = false
		s.at++
	}
}

// partial is memory for what is reduced but not yet by all. It stays as it is from stage to stage.
func (s *staged) partial(n int) []byte {
	s.scratch = fit(s.scratch, n)
	return s.scratch
}

// enter lays out the flow of the present stage, nil if this member has no part in it. more is false when all stages are over.
func (s *staged) enter() (o *flow, more bool) {
	if s.at == s.stages() {
		return nil, false
	}
	switch s.a.Kind {
	case AllReduce:
		if s.cut {
			return s.allReduceCut(), true
		}
		return s.allReduceWhole(), true
	case Broadcast:
		return s.broadcast(), true
	case Reduce:
		return s.reduce(), true
	case AllGather:
		return s.allGather(), true
	case ReduceScatter:
		return s.reduceScatter(), true
	case Barrier, AllToAll, Gather, Scatter: // the last three do not go in stages
	}
	return s.barrier(), true
}

// stages is how many stages the operation has.
func (s *staged) stages() int {
	switch s.a.Kind {
	case Broadcast, Reduce:
		return 2
	case AllGather, ReduceScatter:
		return 1 + len(s.c.hosts)
	default:
		return 3
	}
}

// inside is the flow of a stage in this host's room, nil if this member is alone there.
func (s *staged) inside() *flow {
	if s.c.host == nil {
		return nil
	}
	return s.c.begin(s.c.host, s.seq+u64(s.at), s.sig, &s.a)
}

// between is the flow of a stage among the members at a place of their hosts, nil if this is not one of them. The last reduction
// ends an average.
func (s *staged) between(place int) *flow {
	lanes := s.c.across[place]
	if lanes == nil {
		return nil
	}
	o := s.c.begin(lanes, s.seq+u64(s.at), s.sig, &s.a)
	if s.a.Op == reduce.Avg {
		o.divide = s.c.N
	}
	return o
}

// allReduceCut: each member reduces its segment of the host, then of all hosts, and all collect the segments.
func (s *staged) allReduceCut() *flow {
	dst, src := s.a.Dst[0], s.a.Src[0]
	seg := segment(len(src), len(s.c.hosts[s.host]))
	own := cut(dst, s.place, seg)
	switch s.at {
	case 0:
		o := s.inside()
		o.reduceScatter(own, region{whole: src, segment: seg}, seg)
		return o
	case 1:
		o := s.between(s.place)
		o.allReduce(own, own)
		return o
	case 2:
		o := s.inside()
		o.allGather(region{whole: dst, segment: seg}, own, seg)
		return o
	}
	return nil
}

// allReduceWhole: the first member of each host reduces that of its host, then that of all hosts, and hands it out.
func (s *staged) allReduceWhole() *flow {
	dst, src := s.a.Dst[0], s.a.Src[0]
	var o *flow
	switch s.at {
	case 0:
		if o = s.inside(); o != nil {
			o.reduceTo(dst, src)
		} else if !same(dst, src) {
			copy(dst, src)
		}
	case 1:
		if o = s.between(0); o != nil {
			o.allReduce(dst, dst)
		}
	case 2:
		if o = s.inside(); o != nil {
			o.broadcast(dst, dst)
		}
	}
	return o
}

// rep is the place that stands for the hosts in an operation with a root, and the root's host: it is the root's place there.
func (s *staged) rep() (place, host int) {
	for h, list := range s.c.hosts {
		if i := slices.Index(list, s.a.Root); i >= 0 {
			return i, h
		}
	}
	return 0, 0
}

// broadcast: between hosts, then within them.
func (s *staged) broadcast() *flow {
	place, host := s.rep()
	dst, src := first(s.a.Dst), first(s.a.Src)
	if s.at == 0 {
		o := s.between(place)
		if o != nil {
			o.root = host
			o.broadcast(dst, src)
		}
		return o
	}
	o := s.inside()
	if o != nil {
		o.root = min(place, len(o.list)-1)
		if s.c.Me != s.a.Root {
			src = dst
		}
		o.broadcast(dst, src)
	}
	return o
}

// reduce: within hosts, then between them.
func (s *staged) reduce() *flow {
	place, host := s.rep()
	dst, src := first(s.a.Dst), s.a.Src[0]
	if s.c.Me != s.a.Root {
		dst = s.partial(len(src))
	}
	if s.at == 0 {
		o := s.inside()
		if o != nil {
			o.root = min(place, len(o.list)-1)
			o.reduceTo(dst, src)
		}
		return o
	}
	o := s.between(place)
	if o != nil {
		if s.c.host != nil {
			src = dst // what the host's members have reduced
		}
		o.root = host
		o.reduceTo(dst, src)
	}
	return o
}

// barrier: within hosts, between them, and within them again.
func (s *staged) barrier() *flow {
	o := s.inside()
	if s.at == 1 {
		o = s.between(0)
	}
	if o != nil {
		o.allGather(region{}, nil, 0)
	}
	return o
}

// allGather: members at the same place exchange their parts, then those of a host do, for each host.
func (s *staged) allGather() *flow {
	src := s.a.Src[0]
	if s.at == 0 {
		o := s.between(s.place)
		o.allGather(region{parts: s.a.Dst}, src, len(src))
		return o
	}
	list := s.c.hosts[s.at-1]
	o := s.inside()
	o.allGather(region{parts: s.a.Dst, via: list}, s.a.Dst[list[s.place]], len(src))
	return o
}

// reduceScatter: for each host, members reduce the part of the one at their place there; then those at the same place do.
func (s *staged) reduceScatter() *flow {
	bytes, n := len(s.a.Dst[0]), len(s.c.hosts)
	partial := s.partial(n * bytes)
	if s.at < n {
		o := s.inside()
		o.reduceScatter(partial[s.at*bytes:][:bytes], region{parts: s.a.Src, via: s.c.hosts[s.at]}, bytes)
		return o
	}
	o := s.between(s.place)
	o.reduceScatter(s.a.Dst[0], region{whole: partial, segment: max(bytes, 1)}, bytes)
	return o
}
