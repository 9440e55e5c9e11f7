package sim

import (
	"math"
	"time"
)

// nobody is the other end of a transfer whose load is spread over all nodes.
const nobody = -1

// flow is a transfer under way.
type flow struct {
	from, to int32   // NICs
	bytes    float64 // of a prefix, 0 for what is new
	left     float64 // bytes, as of since
	limit    float64 // bytes a second that its source makes or its target takes
	rate     float64 // bytes a second, now
	since    time.Duration
	gen      uint32
	live     bool
	purpose  purpose
	request  int32 // that waits for it
	tokens   int32 // of its prompt, that the target caches
}

// purpose is what is done when a flow ends.
type purpose uint8

const (
	toPrefill purpose = iota // a prefix that a prefill instance waits for
	toDecode                 // a prompt's KV cache on its way to the decode instance
	toCache                  // a hot prefix that is replicated
	toPool                   // what the pool is given
)

// side is one direction of a NIC.
type side struct {
	bandwidth float64
	flows     []int32
}

// network is the NICs of all nodes. Flows share a NIC fairly: those that cannot use their share leave the rest to the
// others. A flow runs at the smaller of its shares at both ends; what it leaves at the other is given to nobody, which
// errs on the side of congestion.
type network struct {
	out, in []side
	flows   []flow
	free    []int32
	changed []int32 // scratch
	bytes   float64 // of prefixes, moved between caches
}

// newNetwork is NICs of the same bandwidth for nodes; width is how many each instance has.
func newNetwork(widths []int, bandwidth float64) network {
	n := network{out: make([]side, len(widths)), in: make([]side, len(widths))}
	for i, w := range widths {
		n.out[i].bandwidth, n.in[i].bandwidth = float64(w)*bandwidth, float64(w)*bandwidth
	}
	return n
}

// share is the rate of which no flow of a side gets more.
func (s *side) share(flows []flow) float64 {
	level := s.bandwidth / float64(max(1, len(s.flows)))
	for range len(s.flows) { // each pass finds at least one more that is below, or ends
		left, greedy := s.bandwidth, 0
		for _, f := range s.flows {
			if flows[f].limit <= level {
				left -= flows[f].limit
			} else {
				greedy++
			}
		}
		if greedy == 0 {
			return math.Inf(1)
		}
		next := left / float64(greedy)
		if next <= level*(1+1e-12) {
			break
		}
		level = next
	}
	return level
}

// start begins a transfer of bytes.
func (m *sim) start(f flow) {
	n := &m.net
	f.left = max(f.left, f.bytes)
	id := int32(len(n.flows)) //nolint:gosec // bounded by the requests under way
	if k := len(n.free); k > 0 {
		id = n.free[k-1]
		n.free = n.free[:k-1]
	} else {
		n.flows = append(n.flows, flow{})
	}
	f.gen, f.live, f.since = n.flows[id].gen, true, m.now
	n.flows[id] = f
	if f.from != nobody {
		n.out[f.from].flows = append(n.out[f.from].flows, id)
	}
	if f.to != nobody {
		n.in[f.to].flows = append(n.in[f.to].flows, id)
	}
	m.share(f.from, f.to)
}

// finish takes out a transfer that has arrived.
func (m *sim) finish(id int32) flow {
	n := &m.net
	f := n.flows[id]
	n.flows[id].live = false
	n.flows[id].gen++
	n.free = append(n.free, id)
	if f.from != nobody {
		n.out[f.from].drop(id)
	}
	if f.to != nobody {
		n.in[f.to].drop(id)
	}
	m.share(f.from, f.to)
	return f
}

func (s *side) drop(id int32) {
	for i, f := range s.flows {
		if f == id {
			s.flows = append(s.flows[:i], s.flows[i+1:]...)
			return
		}
	}
}

// share works out the rates of the flows that share a NIC with one that began or ended.
func (m *sim) share(from, to int32) {
	n := &m.net
	n.changed = n.changed[:0]
	if from != nobody {
		n.changed = append(n.changed, n.out[from].flows...)
	}
	if to != nobody {
		n.changed = append(n.changed, n.in[to].flows...)
	}
	for _, id := range n.changed {
		f := &n.flows[id]
		rate := f.limit
		if f.from != nobody {
			rate = min(rate, n.out[f.from].share(n.flows))
		}
		if f.to != nobody {
			rate = min(rate, n.in[f.to].share(n.flows))
		}
		if rate == f.rate {
			continue // it arrives when it was going to
		}
		f.left = max(0, f.left-f.rate*(m.now-f.since).Seconds())
		f.rate, f.since = rate, m.now
		f.gen++
		m.events.add(m.now+seconds(f.left/rate), flowDone, id, f.gen)
	}
}
