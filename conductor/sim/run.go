package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"larder/conductor"
	"larder/internal/workload"
	"larder/meta/policy"
)

// Run simulates a scenario until every request has ended. It fails for a scenario that cannot be, and when ctx ends. Several
// may run at a time.
func Run(ctx context.Context, s *Scenario) (*Result, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	m, err := newSim(s)
	if err != nil {
		return nil, err
	}
	if err := m.run(ctx); err != nil {
		return nil, err
	}
	return m.result(), nil
}

// sim is the state of a run.
type sim struct {
	s      *Scenario
	cost   Cost
	nic    float64 // bytes a second that are reached
	rng    *rand.Rand
	now    time.Duration
	events events
	reqs   []request // as the trace
	ended  int

	// Either of nodes, each of which has a place in both lists whatever its role is, or of coupled instances.
	prefills []prefill
	decodes  []decode
	coupled  []coupled
	pool     *cache // of all nodes, nil if each has its own

	net         network
	index       *conductor.Index
	scope       conductor.Scope
	sched       *scheduler
	lastArrival time.Duration
	wasted      time.Duration // of prefill
	reasons     map[string]int
	replicated  int
	roleChanges int
	series      []Sample
	rejected    int // since the last point
	uses        []int32
	names       []uint64 // scratch
}

// request is the state of a request.
type request struct {
	arrival     time.Duration
	firstToken  time.Duration // -1 until it comes
	endedAt     time.Duration
	queued      time.Duration // before its computation began
	prefillTook time.Duration // of nodes
	tbt, tbtP90 time.Duration
	input       int
	output      int
	prefix      int32 // tokens that were not computed
	fetched     int32 // tokens that came, or come, from elsewhere
	prefill     int32 // instances, -1 if none
	decode      int32
	end         End
	late        time.Duration // since when its computation waits for its prefix, 0 if it does not
	fetching    bool          // its prefix is on its way to the prefill instance
	streamed    bool          // its KV cache has arrived at the decode instance
}

// instances is how many there are.
func (s *Scenario) instances() int {
	if s.Coupled > 0 {
		return s.Coupled
	}
	return s.Prefill/s.PipelineGroupSize + s.Decode
}

func newSim(s *Scenario) (*sim, error) {
	m := &sim{
		s: s, cost: NewCost(&s.Model, &s.Hardware), nic: s.Hardware.NIC * s.Hardware.LinkShare,
		rng: newRand(s.Seed, 0x72756e), reasons: map[string]int{},
	}
	m.reqs = make([]request, len(s.Trace))
	most := uint32(0)
	for i := range m.reqs {
		q := &s.Trace[i]
		m.reqs[i] = request{
			arrival:    time.Duration(float64(q.TimeMS) / s.Speed * float64(time.Millisecond)),
			firstToken: -1, input: q.Input, output: q.Output, prefill: -1, decode: -1,
		}
		for _, b := range q.Blocks {
			most = max(most, b+1)
		}
	}
	m.uses = make([]int32, most)
	m.lastArrival = m.reqs[len(m.reqs)-1].arrival
	if s.Coupled > 0 {
		return m, m.makeCoupled()
	}
	return m, m.makeNodes()
}

func (m *sim) makeCoupled() error {
	m.coupled = make([]coupled, m.s.Coupled)
	for i := range m.coupled {
		c := &m.coupled[i]
		c.prompt, c.idle, c.batch.cost = -1, true, &m.cost
		if !m.s.CoupledPrefix {
			continue
		}
		var err error
		if c.cache, err = workload.NewCache(m.s.EvictionPolicy, policy.Config{}, m.cost.capacity/m.s.BlockSize); err != nil {
			return err //nolint:wrapcheck // it names the policies already
		}
	}
	return nil
}

func (m *sim) makeNodes() (err error) {
	s := m.s
	n := s.instances()
	m.scope = conductor.Scope{Model: s.Model.Name, BlockSize: s.BlockSize}
	m.index = conductor.NewIndex(conductor.IndexConfig{Seed: s.Seed})
	m.prefills, m.decodes = make([]prefill, n), make([]decode, n)
	widths := make([]int, n)
	for i := range n {
		widths[i] = 1
		if i < s.Prefill/s.PipelineGroupSize {
			widths[i] = s.PipelineGroupSize
		}
		m.decodes[i].batch.cost = &m.cost
		p := &m.prefills[i]
		p.stages = make([]time.Duration, widths[i])
		if s.Pool {
			continue
		}
		if p.cache, err = newCache(s, widths[i], m.index, conductor.Source{Instance: instanceName(i), Scope: m.scope}); err != nil {
			return err
		}
	}
	if s.Pool {
		if m.pool, err = newCache(s, s.Prefill+s.Decode, nil, conductor.Source{}); err != nil {
			return err
		}
	}
	m.net = newNetwork(widths, m.nic)
	m.sched, err = newScheduler(m)
	return err
}

func instanceName(i int) string { return fmt.Sprintf("n%d", i) }

// checkEvery is how many events pass between looks at the context.
const checkEvery = 4096

// run goes from event to event. Arrivals come before what happens at the same time.
func (m *sim) run(ctx context.Context) error {
	arrived := 0
	m.events.add(0, sampleDue, 0, 0)
	if m.sched != nil {
		m.events.add(0, reportDue, 0, 0)
	}
	for n := 1; m.ended < len(m.reqs); n++ {
		if n%checkEvery == 0 {
			if err := ctx.Err(); err != nil {
				return err //nolint:wrapcheck // says all
			}
			if m.s.Progress != nil {
				m.s.Progress(m.ended, len(m.reqs))
			}
		}
		if arrived < len(m.reqs) && m.reqs[arrived].arrival <= m.events.heap[0].at {
			m.now = m.reqs[arrived].arrival
			m.arrived(int32(arrived))
			arrived++
			continue
		}
		e := m.events.next()
		m.now = e.at
		m.happen(&e)
	}
	if m.s.Progress != nil {
		m.s.Progress(m.ended, len(m.reqs))
	}
	return nil
}

// happen deals with an event.
func (m *sim) happen(e *event) {
	switch e.kind {
	case prefillFree:
		m.vacated(e.who)
	case prefillDone:
		m.passed(e.who)
	case flowDone:
		if f := &m.net.flows[e.who]; f.live && f.gen == e.gen {
			m.delivered(m.finish(e.who))
		}
	case loadDone:
		m.join(e.who)
	case stepDone:
		switch {
		case m.coupled != nil && m.coupled[e.who].gen == e.gen:
			m.turned(e.who)
		case m.coupled == nil && m.decodes[e.who].gen == e.gen:
			m.stepped(e.who)
		}
	case sampleDue:
		m.sample()
		m.events.add(m.now+m.s.Sample, sampleDue, 0, 0)
	case reportDue:
		m.report()
		m.events.add(m.now+reportEvery, reportDue, 0, 0)
	}
}

// arrived is called when a request comes in.
func (m *sim) arrived(r int32) {
	for _, b := range m.s.Trace[r].Blocks {
		m.uses[b]++
	}
	if m.coupled != nil {
		m.route(r)
		return
	}
	m.schedule(r)
}

// delivered is called when a transfer has arrived.
func (m *sim) delivered(f flow) {
	m.net.bytes += f.bytes
	switch f.purpose {
	case toPrefill:
		m.fetched(f)
	case toDecode:
		m.reqs[f.request].streamed = true
		m.handOver(f.request)
	case toCache:
		m.cached(f)
	case toPool:
		m.pool.use(m.ms(), m.s.Trace[f.request].Blocks)
	}
}

// cached takes note of a prefix that has been copied from one cache to another.
func (m *sim) cached(f flow) {
	blocks := m.s.Trace[f.request].Blocks
	blocks = blocks[:min(len(blocks), int(f.tokens)/m.s.BlockSize)]
	m.prefills[f.to].cache.use(m.ms(), blocks)
}

// ms is the time in milliseconds.
func (m *sim) ms() uint64 { return uint64(m.now.Milliseconds()) } //nolint:gosec // not negative

// complete ends a request that has all its tokens.
func (m *sim) complete(r int32, longest, p90 time.Duration) {
	q := &m.reqs[r]
	q.tbt, q.tbtP90 = longest, p90
	if m.sched != nil {
		m.sched.DecodeDone(m.now, uint64(r), q.output) //nolint:gosec // an index
	}
	m.conclude(r, Completed)
}

// reject ends a request that is not served.
func (m *sim) reject(r int32, how End) {
	m.rejected++
	m.conclude(r, how)
}

func (m *sim) conclude(r int32, how End) {
	q := &m.reqs[r]
	if q.end != Pending {
		panic("sim: a request ends twice")
	}
	q.end, q.endedAt = how, m.now
	m.ended++
}
