package sim

import (
	"fmt"
	"math"
	"time"

	"larder/conductor/sched"
)

// scheduler is the real one, and what a run keeps to talk to it. Ids of its requests are places in the trace.
type scheduler struct {
	*sched.Scheduler

	ids     []sched.InstanceID // of nodes and groups
	nodes   []int32            // by id
	named   map[string]int32   // by the name that the index has
	roles   []sched.Role
	request sched.Request // reused
}

// reportEvery is how often instances tell the scheduler their own figures.
const reportEvery = time.Second

// config is what the scheduler of a scenario is told.
func (s *Scenario) config() sched.Config {
	return sched.Config{
		Policy: sched.Policy(s.Policy), Variant: sched.Variant(s.Variant), Overload: sched.Overload(s.Overload),
		KVCacheBalancingThreshold: s.KVCacheBalancingThreshold,
		PrefillChunk:              s.PrefillChunk, PipelineGroupSize: s.PipelineGroupSize, BlockSize: s.BlockSize,
		DecodeTime: s.DecodeTime, LayerWise: !s.Serial,
		Classes:  map[string]sched.Limits{"": {TTFTSLO: s.TTFTSLO, TBTSLO: s.TBTSLO}},
		TBTLimit: sched.Measure(s.TBTLimit),
		// Nothing is lost on the way here, however long it waits.
		RequestTTL: 10000 * time.Hour, MaxRequests: min(len(s.Trace)+1, 1<<24),
		Seed: s.Seed,
	}
}

// newScheduler makes the scheduler of a run. Its model begins with the true costs of whole prompts, as if fitted to
// measurements made before, and goes on learning from what is reported.
func newScheduler(m *sim) (*scheduler, error) {
	s, c := m.s, &m.cost
	model, err := sched.NewModel(sched.Costs{
		Prefill: c.overhead, PrefillToken: c.linear, PrefillSquare: c.quadratic,
		Step: c.overhead + c.weights, StepKVToken: c.kv,
		TransferShare: s.Hardware.LinkShare, BytesPerToken: c.BytesPerToken(),
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrScenario, err)
	}
	r, err := sched.New(s.config(), model)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrScenario, err)
	}
	y := &scheduler{Scheduler: r, named: map[string]int32{}}
	groups := s.Prefill / s.PipelineGroupSize
	for i := range int32(s.instances()) { //nolint:gosec // bounded by maxNodes
		in := sched.Instance{Name: instanceName(int(i)), Role: sched.Prefill, KVCapacity: c.capacity}
		in.Bandwidth = s.Hardware.NIC * float64(s.PipelineGroupSize)
		if int(i) >= groups {
			in.Role, in.Bandwidth = sched.Decode, s.Hardware.NIC
			m.decodes[i].owner = true
		}
		id, err := r.Add(in)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrScenario, err)
		}
		for len(y.nodes) <= int(id) {
			y.nodes = append(y.nodes, -1)
		}
		y.ids, y.roles, y.named[in.Name], y.nodes[id] = append(y.ids, id), append(y.roles, in.Role), i, i
	}
	return y, nil
}

// schedule has the scheduler decide on a request that has come in, and does what it says.
func (m *sim) schedule(r int32) {
	x, q := m.sched, &m.reqs[r]
	x.request = sched.Request{ID: uint64(r), Input: q.input, Matches: x.request.Matches[:0], BytesPerToken: m.cost.BytesPerToken()} //nolint:gosec // an index
	if m.s.LengthHints {
		x.request.Output = q.output
	}
	m.match(r)
	d := x.Schedule(m.now, &x.request)
	if !d.Accepted {
		m.reasons[string(d.Reason)]++
		m.reject(r, RejectedBefore)
		return
	}
	q.prefill, q.decode = x.nodes[d.Prefill], x.nodes[d.Decode]
	if d.TransferLen > 0 {
		m.fetch(r, &d)
	}
	if c := d.Replicate; c.Tokens > 0 {
		m.replicated++
		if c.From != d.TransferFrom || c.To != d.Prefill || d.TransferLen == 0 {
			m.start(flow{
				from: x.nodes[c.From], to: x.nodes[c.To], bytes: m.cost.bytes * float64(c.Tokens), limit: math.Inf(1),
				purpose: toCache, request: r, tokens: x.held(c.From),
			})
		}
	}
	p := &m.prefills[q.prefill]
	p.queue = append(p.queue, r)
	m.turnOver(q.prefill)
	m.compute(q.prefill)
}

// match asks the index who holds how much of a prompt.
func (m *sim) match(r int32) {
	x, blocks := m.sched, m.s.Trace[r].Blocks
	if m.pool != nil {
		n, _ := m.pool.prefix(blocks)
		x.request.Pool = min(n*m.s.BlockSize, m.reqs[r].input)
		return
	}
	m.names = m.names[:0]
	for _, b := range blocks {
		m.names = append(m.names, name(b))
	}
	for _, y := range m.index.QueryNames(m.scope, m.names) {
		if y.Longest > 0 {
			id := x.ids[x.named[y.Instance]]
			x.request.Matches = append(x.request.Matches, sched.Match{Instance: id, Tokens: min(y.Longest, m.reqs[r].input)})
		}
	}
}

// held is the tokens of the prompt at hand that an instance holds.
func (x *scheduler) held(id sched.InstanceID) int32 {
	for _, y := range x.request.Matches {
		if y.Instance == id {
			return int32(y.Tokens) //nolint:gosec // below maxLength
		}
	}
	return 0
}

// fetch begins the transfer that a prefill waits for.
func (m *sim) fetch(r int32, d *sched.Decision) {
	q := &m.reqs[r]
	q.fetching, q.fetched = true, int32(d.PrefixLen) //nolint:gosec // below maxLength
	f := flow{
		from: nobody, to: q.prefill, bytes: m.cost.bytes * float64(d.TransferLen), limit: math.Inf(1),
		purpose: toPrefill, request: r, tokens: q.fetched,
	}
	if d.TransferFrom != sched.FromPool {
		f.from = m.sched.nodes[d.TransferFrom]
	}
	m.start(f)
}

// admit is the second check, of a decode instance for a request whose KV cache it has.
func (m *sim) admit(r int32) bool {
	ok, reason := m.sched.AdmitDecode(m.now, uint64(r)) //nolint:gosec // an index
	if !ok {
		m.reasons[string(reason)]++
	}
	return ok
}

// report has every instance tell its own figures, and roles be changed where they are not fixed.
func (m *sim) report() {
	x := m.sched
	for i, id := range x.ids {
		p, d := &m.prefills[i], &m.decodes[i]
		r := sched.Report{Queue: -1, Batch: -1, KVTokens: -1}
		if x.roles[i]&sched.Decode != 0 {
			b := &d.batch
			r.Batch, r.KVTokens = len(b.active), b.tokens
			if b.running {
				r.Step = seconds(b.base)
			}
			if d.ended > 0 {
				n := time.Duration(d.ended)
				r.TBT = sched.TBT{MeanLongest10: d.tbt / n, P90: d.tbtP90 / n}
				d.ended, d.tbt, d.tbtP90 = 0, 0, 0
			}
		}
		if x.roles[i]&sched.Prefill != 0 && len(p.queue) == 0 && p.running == 0 {
			r.Queue = 0
		}
		x.Report(m.now, id, r)
	}
	if m.s.DynamicRoles {
		m.rebalance()
	}
}

// rebalance gives an instance another role if the scheduler wants that. What it has of the old one it ends first.
func (m *sim) rebalance() {
	x := m.sched
	id, role, ok := x.Rebalance(m.now)
	if !ok {
		return
	}
	m.roleChanges++
	node := x.nodes[id]
	x.roles[node] = role
	x.SetRole(m.now, id, role)
	m.turnOver(node)
}

// turnOver gives the GPUs of a node to its other side once the one that has them has nothing left to do, or, for a straggler
// that was sent to a node before it changed to prefill, between two prompts. Only where roles change have both sides of a node
// ever something.
func (m *sim) turnOver(node int32) {
	if !m.s.DynamicRoles {
		return
	}
	p, d := &m.prefills[node], &m.decodes[node]
	switch {
	case d.owner && d.reserved == 0 && len(d.waiting) == 0 && len(p.queue) > 0:
		d.turn(false, m.now, m.lastArrival)
		m.compute(node)
	case !d.owner && !p.taken && len(d.ready) > 0 && (len(p.queue) == 0 || m.sched.roles[node] == sched.Prefill):
		d.turn(true, m.now, m.lastArrival)
		m.decode(node)
	}
}
