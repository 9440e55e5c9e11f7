package sim

import (
	"cmp"
	"slices"
	"time"
)

// sample adds a point to the series.
func (m *sim) sample() {
	s := Sample{At: m.now.Seconds(), Rejected: m.rejected}
	m.rejected = 0
	if m.coupled != nil {
		m.sampleCoupled(&s)
	} else {
		m.sampleNodes(&s)
	}
	m.series = append(m.series, s)
}

func (m *sim) sampleCoupled(s *Sample) {
	n := float64(len(m.coupled))
	s.Prefills, s.Decodes = len(m.coupled), len(m.coupled)
	for i := range m.coupled {
		c := &m.coupled[i]
		s.Queued += len(c.waiting)
		s.Batch += float64(len(c.batch.active)) / n
		s.KV += float64(c.reserved) / float64(max(1, m.cost.capacity)) / n
		if c.prompt >= 0 {
			s.PrefillBusy += 1 / n
		}
	}
}

func (m *sim) sampleNodes(s *Sample) {
	for i := range m.prefills {
		p, d := &m.prefills[i], &m.decodes[i]
		s.Queued += len(p.queue)
		if !d.owner {
			s.Prefills++
			if p.taken {
				s.PrefillBusy++
			}
			continue
		}
		s.Decodes++
		s.Batch += float64(len(d.batch.active))
		s.KV += float64(d.reserved) / float64(max(1, m.cost.capacity))
	}
	s.PrefillBusy /= float64(max(1, s.Prefills))
	s.Batch /= float64(max(1, s.Decodes))
	s.KV /= float64(max(1, s.Decodes))
	load := m.sched.Load(m.now)
	s.PrefillLoad, s.DecodeLoad = load.Prefill, load.Decode
}

// result sums a run up.
func (m *sim) result() *Result {
	r := &Result{
		Scenario: *m.s, Requests: len(m.reqs), Reasons: m.reasons, Series: m.series,
		TransferredBytes: m.net.bytes, Replications: m.replicated, RoleChanges: m.roleChanges, WastedSeconds: m.wasted.Seconds(),
		Outcomes: make([]Outcome, len(m.reqs)),
	}
	var ttft, tbt, p90 []time.Duration
	var prefills, hitTokens, tokens, hitBlocks, blocks int
	var took, last time.Duration
	for i := range m.reqs {
		q := &m.reqs[i]
		o := m.outcome(q)
		r.Outcomes[i] = o
		last = max(last, q.endedAt)
		r.count(&o, m.s)
		if q.firstToken >= 0 {
			prefills++
			took += q.prefillTook
			tokens += q.input
			hitTokens += int(q.prefix)
			blocks += len(m.s.Trace[i].Blocks)
			hitBlocks += (int(q.prefix) + m.s.BlockSize - 1) / m.s.BlockSize
		}
		if q.end == Completed {
			ttft = append(ttft, o.TTFT)
			if q.output > 1 {
				tbt = append(tbt, o.TBT)
				p90 = append(p90, o.TBTP90)
			}
		}
	}
	r.Seconds = last.Seconds()
	r.TTFT, r.TBT, r.TBTP90 = distribution(ttft), distribution(tbt), distribution(p90)
	n := float64(len(m.reqs))
	span := max(m.lastArrival.Seconds(), 1e-3)
	r.Throughput, r.Goodput = float64(r.Completed)/span, r.Attainment/span
	r.Attainment, r.TTFTMet, r.TBTMet = r.Attainment/n, r.TTFTMet/n, r.TBTMet/n
	r.HitRatio, r.PrefixRatio = float64(hitBlocks)/float64(max(1, blocks)), float64(hitTokens)/float64(max(1, tokens))
	r.PrefillSeconds = took.Seconds() / float64(max(1, prefills))
	r.PrefillBusy, r.DecodeBusy = m.utilisation()
	r.HotKeys = m.hotKeys()
	return r
}

func (m *sim) outcome(q *request) Outcome {
	o := Outcome{
		Arrival: q.arrival, TTFT: -1, TBT: q.tbt, TBTP90: q.tbtP90, Ended: q.endedAt, Queue: q.queued, Prefilled: q.prefillTook,
		Input: int32(q.input), Output: int32(q.output), Prefix: q.prefix, //nolint:gosec // below maxLength
		Prefill: int16(q.prefill), Decode: int16(q.decode), End: q.end, //nolint:gosec // below maxNodes
	}
	if q.firstToken >= 0 {
		o.TTFT = q.firstToken - q.arrival
	}
	o.Good = q.end == Completed && m.s.meetsTTFT(&o) && m.s.meetsTBT(&o)
	return o
}

// meetsTTFT reports whether a request whose first token came did so within the limit.
func (s *Scenario) meetsTTFT(o *Outcome) bool { return s.TTFTSLO == 0 || o.TTFT <= s.TTFTSLO }

func (s *Scenario) meetsTBT(o *Outcome) bool {
	tbt := o.TBT
	if s.TBTLimit == P90 {
		tbt = o.TBTP90
	}
	return s.TBTSLO == 0 || tbt <= s.TBTSLO
}

// count adds an outcome to the counts; attainments are counts until all are added.
func (r *Result) count(o *Outcome, s *Scenario) {
	switch o.End {
	case Completed:
		r.Completed++
		if o.Good {
			r.Attainment++
		}
		if s.meetsTBT(o) {
			r.TBTMet++
		}
		if s.meetsTTFT(o) {
			r.TTFTMet++
		}
	case RejectedBefore:
		r.RejectedBefore++
	case RejectedAtDecode:
		r.RejectedAtDecode++
	case Pending:
		panic("sim: a request has not ended")
	}
}

// distribution sorts its times.
func distribution(all []time.Duration) Distribution {
	if len(all) == 0 {
		return Distribution{}
	}
	slices.Sort(all)
	sum := 0.0
	for _, t := range all {
		sum += t.Seconds()
	}
	rank := func(p int) float64 { return all[(len(all)*p+99)/100-1].Seconds() }
	return Distribution{Mean: sum / float64(len(all)), P50: rank(50), P90: rank(90), P99: rank(99), Max: all[len(all)-1].Seconds()}
}

// utilisation is the share of the time up to the last arrival in which instances computed prompts, and decoded; of nodes
// whose role changes, of the time in which they had it.
func (m *sim) utilisation() (prefill, decode float64) {
	var p, d, forPrefill, forDecode time.Duration
	for i := range m.prefills {
		x := &m.decodes[i]
		x.turn(x.owner, m.lastArrival, m.lastArrival)
		p += m.prefills[i].busy
		d += x.batch.busy
		forDecode += x.owned
		forPrefill += m.lastArrival - x.owned
	}
	for i := range m.coupled {
		p += m.coupled[i].busy
		d += m.coupled[i].batch.busy
		forPrefill += m.lastArrival
		forDecode += m.lastArrival
	}
	return p.Seconds() / max(1e-9, forPrefill.Seconds()), d.Seconds() / max(1e-9, forDecode.Seconds())
}

// hotKeys are the blocks used most, and how many instances hold each.
func (m *sim) hotKeys() []HotKey {
	const most = 100
	var all []HotKey
	for b, n := range m.uses {
		if n > 1 {
			all = append(all, HotKey{Block: uint32(b), Uses: int(n)})
		}
	}
	slices.SortFunc(all, func(a, b HotKey) int { return cmp.Or(cmp.Compare(b.Uses, a.Uses), cmp.Compare(a.Block, b.Block)) })
	all = slices.Clip(all[:min(most, len(all))])
	for i := range all {
		for k := range m.prefills {
			if c := m.prefills[k].cache; c != nil && c.holds(all[i].Block) {
				all[i].Replicas++
			}
		}
		for k := range m.coupled {
			if c := m.coupled[k].cache; c != nil && c.Prefix([]uint32{all[i].Block}) == 1 {
				all[i].Replicas++
			}
		}
	}
	return all
}
