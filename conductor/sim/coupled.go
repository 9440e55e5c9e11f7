package sim

import (
	"time"

	"larder/internal/workload"
)

// coupled is an instance that computes prompts and decodes on the same GPUs, as vLLM does: whole prompts come before decode
// steps, which stand still meanwhile; or, with chunks, each step computes a piece of a prompt beside.
type coupled struct {
	batch    batch
	cache    *workload.Cache // in KV memory, nil if prefixes are not cached
	waiting  []int32
	joining  []int32 // computed: they join before the next step
	owed     int     // tokens in and out of requests that have not ended: the router's measure of load
	reserved int     // tokens of KV memory, of sequences that are computed or in the batch
	fresh    int     // of these, tokens that are not of prompts
	prompt   int32   // that is computed, -1 if none
	computed int     // of its tokens
	idle     bool
	busy     time.Duration // computing prompts
	gen      uint32
}

// maxCoupledBatch is vLLM's max_num_seqs.
const maxCoupledBatch = 256

// route gives a request to the instance with the least to do, or to any one.
func (m *sim) route(r int32) {
	q := &m.reqs[r]
	id := 0
	if m.s.Policy == "random" {
		id = m.rng.IntN(len(m.coupled))
	} else {
		for i := range m.coupled {
			if m.coupled[i].owed < m.coupled[id].owed {
				id = i
			}
		}
	}
	c := &m.coupled[id]
	q.prefill, q.decode = int32(id), int32(id)
	c.owed += q.input + q.output
	c.waiting = append(c.waiting, r)
	switch {
	case c.idle:
		m.turn(q.prefill)
	case c.prompt < 0 && c.batch.cut(m.now):
		m.again(q.prefill, c.batch.ends())
	}
}

// turn decides what an idle instance does next: a prompt if there is one and memory for it, else decode steps.
func (m *sim) turn(id int32) {
	c := &m.coupled[id]
	if c.prompt < 0 {
		m.begin(id)
	}
	if c.prompt < 0 || m.s.CoupledChunk > 0 {
		m.joinAll(c)
	}
	c.idle = false
	switch b := &c.batch; {
	case c.prompt >= 0 && m.s.CoupledChunk > 0:
		m.mix(id)
	case c.prompt >= 0:
		q := &m.reqs[c.prompt]
		took := m.cost.Prefill(q.input, int(q.prefix))
		m.spend(c, q, took)
		m.again(id, m.now+took)
	case len(b.active) > 0:
		m.again(id, b.run(m.now, maxRun))
	default:
		c.idle = true
	}
}

// joinAll has those whose prompts are computed join the batch.
func (m *sim) joinAll(c *coupled) {
	for _, r := range c.joining {
		q := &m.reqs[r]
		c.batch.join(r, q.input, q.output, q.firstToken, m.now)
	}
	c.joining = c.joining[:0]
}

// again plans the next turn.
func (m *sim) again(id int32, at time.Duration) {
	c := &m.coupled[id]
	c.gen++
	m.events.add(at, stepDone, id, c.gen)
}

// spend counts time of an instance for a prompt.
func (m *sim) spend(c *coupled, q *request, took time.Duration) {
	q.prefillTook += took
	c.busy += max(0, min(m.now+took, m.lastArrival)-m.now)
}

// begin takes in the next prompt that waits, if there is memory for all its tokens. The memory of cached prefixes is what
// is left; blocks of running requests count as cached ones, which were used just now.
func (m *sim) begin(id int32) {
	c := &m.coupled[id]
	if len(c.waiting) == 0 || len(c.batch.active)+len(c.joining) >= maxCoupledBatch {
		return
	}
	r := c.waiting[0]
	q := &m.reqs[r]
	need := q.input + q.output
	if c.reserved > 0 && c.reserved+need > m.cost.capacity {
		return
	}
	c.waiting = c.waiting[:copy(c.waiting, c.waiting[1:])]
	c.reserved += need
	c.prompt, q.queued = r, m.now-q.arrival
	c.fresh += q.output
	if c.cache != nil {
		n := min(c.cache.Prefix(m.s.Trace[r].Blocks)*m.s.BlockSize, q.input-1)
		q.prefix = int32(n) //nolint:gosec // below the input
		c.cache.Resize(m.ms(), max(0, m.cost.capacity-c.fresh)/m.s.BlockSize)
	}
	c.computed = int(q.prefix)
}

// mix runs one step that computes a piece of a prompt beside the batch: the pieces' computation hides the reading of the
// weights or the other way round.
func (m *sim) mix(id int32) {
	c := &m.coupled[id]
	q := &m.reqs[c.prompt]
	b := &c.batch
	to := min(q.input, c.computed+m.s.CoupledChunk)
	piece := m.cost.prefill(to, c.computed)
	c.computed = to
	m.spend(c, q, seconds(piece))
	if len(b.active) == 0 {
		m.again(id, m.now+seconds(piece))
		return
	}
	b.run(m.now, 1)
	b.base = piece + m.cost.linear*float64(len(b.active)) + m.cost.kv*float64(b.tokens)
	m.again(id, b.ends())
}

// turned is called when a prompt, a step with a piece of one, or a run of decode steps has ended.
func (m *sim) turned(id int32) {
	c := &m.coupled[id]
	if c.batch.running {
		c.batch.ran(m.now, m.lastArrival)
		m.leave(c)
	}
	if r := c.prompt; r >= 0 && (m.s.CoupledChunk == 0 || c.computed == m.reqs[r].input) {
		m.computedPrompt(c, r)
	}
	m.turn(id)
}

// computedPrompt is called when the first token of a request has come.
func (m *sim) computedPrompt(c *coupled, r int32) {
	q := &m.reqs[r]
	c.prompt = -1
	q.firstToken = m.now
	if c.cache != nil {
		c.cache.Request(m.ms(), m.s.Trace[r].Blocks)
	}
	if q.output == 1 {
		m.freed(c, q)
		m.complete(r, 0, 0)
		return
	}
	c.joining = append(c.joining, r)
}

// leave completes the requests that have all their tokens.
func (m *sim) leave(c *coupled) {
	for {
		s, ok := c.batch.leave()
		if !ok {
			return
		}
		longest, p90 := c.batch.tbt(&s)
		m.freed(c, &m.reqs[s.request])
		m.complete(s.request, longest, p90)
	}
}

// freed gives back a request's memory.
func (m *sim) freed(c *coupled, q *request) {
	need := q.input + q.output
	c.owed -= need
	c.reserved -= need
	c.fresh -= q.output
}
