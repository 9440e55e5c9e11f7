package sim

import "time"

// decode is a decode instance: one node.
type decode struct {
	batch    batch
	reserved int           // tokens of KV memory, of sequences in the batch, loading and ready
	waiting  []int32       // for KV memory, their KV in the node's memory
	ready    []int32       // loaded: they join before the next step
	loaded   time.Duration // when the last load that has been planned ends
	gen      uint32

	ended       int           // requests since the last report
	tbt, tbtP90 time.Duration // theirs together

	// owner says that the node's GPUs decode; otherwise they compute prompts. It changes where roles do.
	owner bool
	since time.Duration // when that changed
	owned time.Duration // before that
}

// turn has the GPUs of a node change sides. Time after until does not count.
func (d *decode) turn(owner bool, now, until time.Duration) {
	if now = min(now, until); d.owner {
		d.owned += now - d.since
	}
	d.owner, d.since = owner, now
}

// arrive is called when a request's KV cache is in the memory of its decode instance: the second check.
func (m *sim) arrive(r int32) {
	q := &m.reqs[r]
	if !m.admit(r) {
		m.reject(r, RejectedAtDecode)
		m.wasted += q.prefillTook
		return
	}
	d := &m.decodes[q.decode]
	d.waiting = append(d.waiting, r)
	m.load(q.decode)
}

// load begins to load the KV of those that wait, in their order, as far as there is memory for all their tokens: an oracle's
// answer, in the place of preempting some when it is short. A request that is larger than the memory has it alone.
func (m *sim) load(id int32) {
	d := &m.decodes[id]
	k := 0
	for ; k < len(d.waiting); k++ {
		q := &m.reqs[d.waiting[k]]
		need := q.input + q.output
		if d.reserved > 0 && d.reserved+need > m.cost.capacity {
			break
		}
		d.reserved += need
		if m.s.Serial {
			m.join(d.waiting[k]) // the load is done between two steps
			continue
		}
		d.loaded = max(d.loaded, m.now) + seconds(m.cost.load*float64(q.input))
		m.events.add(d.loaded, loadDone, d.waiting[k], 0)
	}
	d.waiting = d.waiting[:copy(d.waiting, d.waiting[k:])]
}

// join has a request whose KV is loaded join the batch before the next step.
func (m *sim) join(r int32) {
	q := &m.reqs[r]
	d := &m.decodes[q.decode]
	d.ready = append(d.ready, r)
	m.turnOver(q.decode)
	switch b := &d.batch; {
	case !b.running:
		m.decode(q.decode)
	case b.cut(m.now):
		d.gen++
		m.events.add(b.ends(), stepDone, q.decode, d.gen)
	}
}

// decode begins the next run of steps.
func (m *sim) decode(id int32) {
	d := &m.decodes[id]
	b := &d.batch
	if !d.owner || b.running {
		return
	}
	begin := m.now
	for _, r := range d.ready {
		if m.s.Serial {
			begin += seconds(m.cost.load * float64(m.reqs[r].input))
		}
	}
	for _, r := range d.ready {
		q := &m.reqs[r]
		b.join(r, q.input, q.output, q.firstToken, begin)
	}
	d.ready = d.ready[:0]
	if len(b.active) > 0 {
		d.gen++
		m.events.add(b.run(begin, maxRun), stepDone, id, d.gen)
	}
}

// maxRun bounds the steps worked out at once, so that a time stays exact to the nanosecond in 64-bit floating point.
const maxRun = 1 << 20

// stepped is called when a run of steps has ended.
func (m *sim) stepped(id int32) {
	d := &m.decodes[id]
	d.batch.ran(m.now, m.lastArrival)
	for {
		s, ok := d.batch.leave()
		if !ok {
			break
		}
		q := &m.reqs[s.request]
		d.reserved -= q.input + q.output
		longest, p90 := d.batch.tbt(&s)
		d.ended++
		d.tbt += longest
		d.tbtP90 += p90
		m.complete(s.request, longest, p90)
	}
	m.load(id)
	m.decode(id)
	m.turnOver(id)
}
