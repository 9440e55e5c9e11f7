package sim

import (
	"math"
	"time"
)

// prefill is a prefill instance: a group of nodes, each of which computes a part of the layers of every chunk of a prompt.
type prefill struct {
	cache   *cache          // nil with a pool
	queue   []int32         // requests, in the order in which they are computed
	stages  []time.Duration // when each stage is free
	taken   bool            // the first stage computes, or
	stalled bool            // waits for a prefix
	current int32           // request whose chunks the first stage computes
	running int             // prompts in the stages
	busy    time.Duration   // of the first stage, up to the last arrival
}

// chunk is the seconds that each stage spends on tokens from to up to of a prompt, whose prefix is of p tokens. Layer by
// layer, the prefix is loaded while the first chunk is computed and what a chunk adds is stored while it is, so that the
// longer of them counts, and beside it the first layer's load and the last one's store; serially it is their sum.
func (m *sim) chunk(from, to, p int, load float64) float64 {
	x := float64(m.s.PipelineGroupSize)
	compute := m.cost.prefill(to, from) / x
	store := m.cost.load * float64(to-from) / x
	if from > p {
		load = 0
	}
	load /= x
	if m.s.Serial {
		return compute + load + store
	}
	layers := float64(m.s.Model.Layers) / x
	return max(compute, load, store) + (load+store)/max(1, layers)
}

// pass sends a prompt's chunks through the stages of an instance, from now. It returns when the first stage is free again,
// when the last chunk leaves the last stage, and how many seconds of nodes it takes.
func (m *sim) pass(p *prefill, n, prefix int, load float64) (free, done time.Duration, took float64) {
	border := float64(min(n-prefix, m.s.PrefillChunk)) * float64(m.s.Model.Dim*m.s.Model.ElementBytes) / m.nic
	p.stages[0] = max(p.stages[0], m.now)
	for from := prefix; from < n; from += m.s.PrefillChunk {
		t := m.chunk(from, min(n, from+m.s.PrefillChunk), prefix, load)
		took += t * float64(len(p.stages))
		step := seconds(t)
		for i := range p.stages {
			begin := p.stages[i]
			if i > 0 {
				begin = max(begin, p.stages[i-1]+seconds(border))
			}
			p.stages[i] = begin + step
		}
	}
	return p.stages[0], p.stages[len(p.stages)-1], took
}

// compute begins the prompt at the head of an instance's queue, if it can.
func (m *sim) compute(id int32) {
	p := &m.prefills[id]
	if p.taken || len(p.queue) == 0 || m.decodes[id].owner || m.s.Serial && m.reqs[p.queue[0]].fetching {
		return
	}
	r := p.queue[0]
	p.queue = p.queue[:copy(p.queue, p.queue[1:])]
	q := &m.reqs[r]
	prefix, load := m.reuse(p, r)
	free, done, took := m.pass(p, q.input, prefix, load)
	q.prefix, q.prefillTook, q.queued = int32(prefix), seconds(took), m.now-q.arrival //nolint:gosec // below the input
	p.taken, p.current = true, r
	p.running++
	p.busy += max(0, min(free, m.lastArrival)-m.now)
	m.events.add(free, prefillFree, id, 0)
	m.events.add(done, prefillDone, r, 0)
	if q.output > 1 && !m.s.Serial {
		m.stream(r, done-m.now)
	}
}

// reuse is the prefix of a request that need not be computed, as it is when the computation begins, and the seconds to load
// it. At least the last token is always computed: its logits are the first answer.
func (m *sim) reuse(p *prefill, r int32) (prefix int, load float64) {
	blocks := m.s.Trace[r].Blocks
	q := &m.reqs[r]
	if m.pool != nil {
		n := min(int(q.fetched), q.input-1)
		return n, m.cost.load * float64(n)
	}
	n, onDisk := p.cache.prefix(blocks)
	prefix = min(n*m.s.BlockSize, q.input-1)
	if q.fetching {
		prefix = max(prefix, min(int(q.fetched), q.input-1))
	}
	read := m.cost.bytes / (m.s.Hardware.SSD * m.s.Hardware.LinkShare) // seconds a token from disk
	return prefix, m.cost.load*float64(prefix) + read*float64(min(prefix, onDisk*m.s.BlockSize))
}

// stream begins to send the KV cache of a prompt to its decode instance: layer by layer as it is computed within a time, or
// at once if that is 0.
func (m *sim) stream(r int32, within time.Duration) {
	q := &m.reqs[r]
	bytes := m.cost.bytes * float64(q.input)
	limit := math.Inf(1)
	if within > 0 {
		limit = bytes / within.Seconds()
	}
	m.start(flow{from: q.prefill, to: q.decode, left: bytes, limit: limit, purpose: toDecode, request: r})
}

// passed is called when a prompt's last chunk leaves the last stage. Layer by layer a prefix is loaded while the rest is
// computed, wherever it comes from: if it has not all come yet, that is waited for.
func (m *sim) passed(r int32) {
	q := &m.reqs[r]
	if q.fetching {
		q.late = m.now
		return
	}
	m.prefilled(r)
}

// vacated is called when the first stage of an instance could take the next prompt.
func (m *sim) vacated(id int32) {
	p := &m.prefills[id]
	if p.stalled = m.reqs[p.current].fetching; p.stalled {
		return
	}
	p.taken = false
	m.turnOver(id)
	m.compute(id)
}

// fetched is called when the prefix has come that a prefill waits for, or will.
func (m *sim) fetched(f flow) {
	q := &m.reqs[f.request]
	p := &m.prefills[f.to]
	q.fetching = false
	m.sched.TransferDone(m.now, uint64(f.request), m.now-q.arrival) //nolint:gosec // an index
	if m.pool == nil {
		m.cached(f)
	}
	if p.stalled && p.current == f.request {
		m.vacated(f.to)
	}
	if q.late > 0 {
		q.prefillTook += m.now - q.late
		p.busy += max(0, min(m.now, m.lastArrival)-q.late)
		m.prefilled(f.request)
	}
	m.compute(f.to)
}

// prefilled is called when a prompt is computed.
func (m *sim) prefilled(r int32) {
	q := &m.reqs[r]
	p := &m.prefills[q.prefill]
	p.running--
	q.firstToken = m.now
	blocks := m.s.Trace[r].Blocks
	if m.pool != nil {
		m.start(flow{
			from: q.prefill, to: nobody, left: max(1, m.cost.bytes*float64(q.input-int(q.prefix))), limit: math.Inf(1),
			purpose: toPool, request: r,
		})
	} else {
		p.cache.use(m.ms(), blocks)
	}
	m.sched.PrefillDone(m.now, uint64(r), m.now-q.arrival-q.queued, int(q.prefix)) //nolint:gosec // an index
	switch {
	case q.output == 1:
		m.complete(r, 0, 0)
	case m.s.Serial:
		m.stream(r, 0)
	default:
		m.handOver(r)
	}
	m.turnOver(q.prefill)
}

// handOver gives a request to its decode instance once it is computed and its KV cache has arrived.
func (m *sim) handOver(r int32) {
	if q := &m.reqs[r]; q.firstToken >= 0 && q.streamed {
		m.arrive(r)
	}
}
