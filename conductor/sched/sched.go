package sched

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Scheduler chooses instances for requests. Its methods must not be called concurrently. Their now is the time since an
// origin of the caller's choice; one that goes back counts as standing still.
type Scheduler struct {
	cfg      Config
	pipeline bool // an instance is a group of more than one node
	model    *Model
	rng      *rand.Rand
	now      time.Duration

	instances []instance // by id
	holdings  []holding  // by id: scratch
	gone      []InstanceID
	counts    [2]int // of prefill and decode instances
	pool      nic

	classes []class // the default one first, then by name
	limits  []Limits
	byClass map[string]int32
	asked   [priorities]time.Duration // when each has last asked, and 1; 0: never

	book            book
	prefilled       int // requests between prefill and decoding
	prefilledInputs int64
	hinted          ages // requests whose answer's length is known, by their end less t_d
	balance         balance
	arrivals        arrivals
}

// class is what is known of a class of requests.
type class struct {
	limits  Limits
	lengths *lengths // the model's
	ages    ages
}

// New makes a scheduler without instances. The model is the scheduler's from then on: others may use it only between calls.
func New(cfg Config, m *Model) (*Scheduler, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Scheduler{
		cfg: cfg, pipeline: cfg.PipelineGroupSize > 1, model: m, pool: nic{bandwidth: cfg.PoolBandwidth},
		rng:     rand.New(rand.NewPCG(cfg.Seed, 0x7363686564)), //nolint:gosec // a simulation is to be repeatable
		byClass: map[string]int32{}, book: book{by: map[uint64]int32{}},
	}
	names := sortedNames(cfg.Classes)
	if !slices.Contains(names, "") {
		names = append([]string{""}, names...)
	}
	for i, name := range names {
		limits := cfg.Classes[name]
		s.classes = append(s.classes, class{limits: limits, lengths: m.lengthsOf(name)})
		s.limits = append(s.limits, limits)
		s.byClass[name] = int32(i)
	}
	return s, nil
}

// maxInput bounds a prompt's tokens, so that sums of all fit 64 bits.
const maxInput = 1 << 30

// Schedule decides where a request is served, or that it is not. An accepted one is remembered until DecodeDone or Forget,
// or until nothing has been heard of it for Config.RequestTTL.
func (s *Scheduler) Schedule(now time.Duration, r *Request) Decision {
	now = s.pass(now)
	d := Decision{Prefill: NoInstance, Decode: NoInstance, TransferFrom: NoInstance, Replicate: noReplication, Stage: AtPrefill}
	if slot := s.book.find(r.ID); slot >= 0 {
		s.drop(now, slot)
	}
	class := s.byClass[r.Class]
	d.Limits = s.limits[class]
	if r.Priority > 0 {
		d.Limits.Priority = min(r.Priority, priorities-1)
	}
	share := s.share(now, d.Limits.Priority)
	d.Limits = lessen(d.Limits, share)
	if d.Reason = s.refuse(r); d.Reason != Accepted {
		return d
	}
	q := s.demand(class, r.Input, r.Output, d.Limits.TBTSLO, share)
	p := s.choosePrefill(now, r)
	s.advanceDecoding(now)
	c, why := s.chooseDecode(now, now+p.ttft(), &q)
	d.fill(&p, c.instance)
	d.Reason = why
	if c.instance != NoInstance {
		v := s.decodeLoad(now, now+p.ttft(), &q, &c)
		d.Load, d.Reason, d.TBTs = v.over, v.why, s.model.tbt(v.step)
		d.TBT = d.TBTs.Of(s.cfg.TBTLimit)
		if d.Limits.TTFTSLO > 0 && d.TTFT > d.Limits.TTFTSLO {
			d.Reason = ReasonTTFT
		}
	}
	if d.Accepted = d.Reason == Accepted; !d.Accepted {
		d.Replicate = noReplication
		return d
	}
	d.Stage = Admitted
	s.accept(now, r, class, &d, &p)
	return d
}

var noReplication = Replication{From: NoInstance, To: NoInstance}

// refuse is why a request cannot be scheduled at all.
func (s *Scheduler) refuse(r *Request) Reason {
	switch {
	case r.Input < 1 || r.Input > maxInput || r.Output < 0 || r.BytesPerToken < 0:
		return ReasonInvalid
	case s.count(Prefill) == 0:
		return ReasonNoPrefill
	case s.count(Decode) == 0:
		return ReasonNoDecode
	case len(s.book.by) >= s.cfg.MaxRequests:
		return ReasonBusy
	}
	return Accepted
}

// fill writes what has been chosen into a decision.
func (d *Decision) fill(p *plan, decode InstanceID) {
	d.Prefill, d.Decode, d.PrefixLen, d.TransferFrom, d.TransferLen = p.instance, decode, p.prefix, p.from, p.length
	d.TTFT, d.Queue, d.Transfer, d.Execution = p.ttft(), p.queue, p.transfer, p.execute
	if p.migrate > 0 {
		d.Replicate = Replication{From: p.holder, To: p.instance, Tokens: p.migrate}
	}
}

// accept remembers a request, and what it has instances and networks do.
func (s *Scheduler) accept(now time.Duration, r *Request, class int32, d *Decision, p *plan) {
	x := remembered{
		id: r.ID, phase: prefilling, class: class, priority: d.Limits.Priority,
		input: r.Input, prefix: p.prefix, output: min(r.Output, mostLength),
		prefill: d.Prefill, decode: d.Decode, kv: s.bytes(r, r.Input), deadline: now + s.cfg.RequestTTL,
	}
	if s.cfg.Presume {
		x.deadline = now + p.ttft()
	}
	if p.from != NoInstance {
		x.bytes, x.bandwidth = s.bytes(r, p.length), s.slower(p.from, p.instance)
		x.sharing = s.source(p.from).waiting(now)+s.instances[p.instance].in.waiting(now) > 0
		s.send(now, p.from, p.instance, x.bytes)
	}
	if p.migrate > 0 && p.from != p.holder {
		s.send(now, p.holder, p.instance, s.bytes(r, p.migrate))
	}
	s.arrivals.add(now, s.cfg.DecodeTime, r.Input, p.ttft())
	slot := s.book.add(x)
	s.instances[d.Prefill].queue.push(slot, now, s.busy(p, r.Input), r.Input, s.pipeline)
	s.instances[d.Decode].decoding.expect(&s.book, slot, now+p.ttft())
}
