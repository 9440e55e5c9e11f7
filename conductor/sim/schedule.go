package sim

import (
	"math"
	"time"
)

// INTERIM
type scheduler struct {
	free  []time.Duration // prefill free at
	count []int
}

func newScheduler(m *sim) (*scheduler, error) {
	return &scheduler{free: make([]time.Duration, len(m.prefills)), count: make([]int, len(m.prefills))}, nil
}

func (x *scheduler) prefillDone(m *sim, r int32) {
	x.count[m.reqs[r].decode]++
}
func (x *scheduler) admit(m *sim, r int32) bool {
	d := &m.decodes[m.reqs[r].decode]
	if m.s.TBTSLO > 0 && m.cost.Step(len(d.batch.active)+1, d.batch.tokens+m.reqs[r].input) > m.s.TBTSLO {
		m.reasons["tbt"]++
		return false
	}
	return true
}
func (x *scheduler) decodeDone(m *sim, r int32) {}

func (m *sim) schedule(r int32) {
	q := &m.reqs[r]
	x := m.sched
	G := m.s.Prefill / m.s.PipelineGroupSize
	m.names = m.names[:0]
	for _, b := range m.s.Trace[r].Blocks {
		m.names = append(m.names, name(b))
	}
	local := make([]int, G)
	best, bi := 0, -1
	for _, y := range m.index.QueryNames(m.scope, m.names) {
		var i int
		for i = range G {
			if instanceName(i) == y.Instance {
				break
			}
		}
		local[i] = min(y.Longest, q.input-1)
		if local[i] > best {
			best, bi = local[i], i
		}
	}
	pi, pl, pt := 0, time.Duration(math.MaxInt64), 0
	for i := range G {
		queue := max(0, x.free[i]-m.now)
		var t time.Duration
		use := 0
		switch m.s.Policy {
		case "random":
		case "load-balance":
			t = queue
		case "lb-count":
			t = time.Duration(len(m.prefills[i].queue) + m.prefills[i].running)
		case "cache-aware":
			t = queue + m.cost.Prefill(q.input, local[i])
		default:
			t = queue + m.cost.Prefill(q.input, local[i])
			if i != bi && float64(best) > float64(local[i])*m.s.KVCacheBalancingThreshold {
				t = queue + m.cost.Prefill(q.input, best) + seconds(m.cost.bytes*float64(best-local[i])/m.nic)
				use = best
			}
		}
		if t < pl {
			pi, pl, pt = i, t, use
		}
	}
	if m.s.Policy == "random" {
		pi = m.rng.IntN(G)
	}
	if queue := max(0, x.free[pi]-m.now); m.s.TTFTSLO > 0 && queue+m.cost.Prefill(q.input, max(local[pi], pt)) > m.s.TTFTSLO {
		m.reasons["ttft"]++
		m.reject(r, RejectedBefore)
		return
	}
	x.free[pi] = max(m.now, x.free[pi]) + m.cost.Prefill(q.input, max(local[pi], pt))
	q.prefill = int32(pi)
	d := G
	for i := G; i < len(m.decodes); i++ {
		if m.decodes[i].batch.tokens < m.decodes[d].batch.tokens {
			d = i
		}
	}
	q.decode = int32(d)
	p := &m.prefills[pi]
	if pt > 0 {
		q.fetching = true
		m.start(flow{from: int32(bi), to: int32(pi), left: m.cost.bytes * float64(best-local[pi]), limit: math.Inf(1), purpose: toPrefill, request: r, tokens: int32(best)})
	}
	p.queue = append(p.queue, r)
	m.compute(int32(pi))
}

func (m *sim) drained(id int32) {}

func (x *scheduler) roles(m *sim) (func(int) bool, func(int) bool) {
	G := m.s.Prefill / m.s.PipelineGroupSize
	return func(i int) bool { return i < G }, func(i int) bool { return i >= G }
}
func (x *scheduler) load(m *sim) (a, b float64) {
	return
}
