package sched

import "time"

// plan is a way to prefill a prompt.
type plan struct {
	instance InstanceID
	queue    time.Duration
	transfer time.Duration // what the prefill waits for, beyond its execution
	execute  time.Duration
	prefix   int // tokens that are not computed
	from     InstanceID
	length   int // tokens that are fetched
	holder   InstanceID
	migrate  int // tokens that the last step of Algorithm 1 has copied from the holder
}

// ttft is T_queue + T_transfer + T_prefill.
func (p *plan) ttft() time.Duration { return p.queue + p.transfer + p.execute }

// holding is what an instance holds of the prompt that is being scheduled.
type holding struct {
	tokens  int
	lasting time.Duration
}

// after is how many tokens will still be there: engines evict a prefix from its end, here at an even pace.
func (h holding) after(wait time.Duration, blockSize int) int {
	if h.lasting <= 0 || h.tokens == 0 {
		return h.tokens
	}
	left := 1 - wait.Seconds()/h.lasting.Seconds()
	if left <= 0 {
		return 0
	}
	n := int(float64(h.tokens) * left)
	if n < h.tokens {
		n -= n % blockSize
	}
	return n
}

// match sets out who holds what of a prompt. A match that names no prefill instance counts for nothing.
func (s *Scheduler) match(r *Request) {
	for i := range s.holdings {
		s.holdings[i] = holding{}
	}
	for _, m := range r.Matches {
		if s.is(m.Instance, Prefill) && m.Tokens > 0 {
			s.holdings[m.Instance] = holding{min(m.Tokens, r.Input), m.Lasting}
		}
	}
}

// bestMatch is FindBestPrefixMatch: the longest prefix that will still be there once a transfer of it is through.
func (s *Scheduler) bestMatch(now time.Duration, r *Request) (best InstanceID, tokens int) {
	best = NoInstance
	for _, m := range r.Matches {
		if !s.is(m.Instance, Prefill) {
			continue
		}
		h := s.holdings[m.Instance]
		if h.tokens <= tokens {
			continue
		}
		if h.lasting > 0 {
			h.tokens = h.after(s.instances[m.Instance].out.time(now, s.model, s.bytes(r, h.tokens)), s.cfg.BlockSize)
		}
		if h.tokens > tokens {
			best, tokens = m.Instance, h.tokens
		}
	}
	return best, tokens
}

// bytes is the KV of so many tokens.
func (s *Scheduler) bytes(r *Request, tokens int) float64 {
	if r.BytesPerToken > 0 {
		return float64(r.BytesPerToken) * float64(tokens)
	}
	return float64(s.model.costs.BytesPerToken) * float64(tokens)
}

// execution is EstimatePrefillExecutionTime. With pipeline parallelism a prompt's chunks flow through the stages of a group
// of X nodes, each of which computes 1/X of a chunk's layers: k chunks are through after k + X - 1 such parts, not k X.
func (s *Scheduler) execution(n, prefix int) time.Duration {
	whole := s.model.Prefill(n, prefix)
	if s.cfg.PipelineGroupSize == 1 {
		return whole
	}
	return time.Duration(float64(whole) * s.pipelined(n-prefix))
}

// pipelined is the time of a prefill in a group of nodes over that on one.
func (s *Scheduler) pipelined(tokens int) float64 {
	x, k := float64(s.cfg.PipelineGroupSize), float64(max(1, (tokens+s.cfg.PrefillChunk-1)/s.cfg.PrefillChunk))
	return (k + x - 1) / (k * x)
}

// busy is how long a prefill keeps others from beginning. Its transfer begins at once, so that the instance stands still only
// for what of it is left when the queue is through.
func (s *Scheduler) busy(p *plan, n int) time.Duration {
	execute := p.execute
	if s.cfg.PipelineGroupSize > 1 {
		execute = s.model.Prefill(n, p.prefix) / time.Duration(s.cfg.PipelineGroupSize)
	}
	return execute + max(0, p.transfer-p.queue)
}

// queueTime is EstimatePrefillQueueTime.
func (s *Scheduler) queueTime(now time.Duration, id InstanceID) time.Duration {
	return min(longest, s.instances[id].queue.waiting(now, s.pipeline))
}

// local is the plan in which an instance uses what it holds itself.
func (s *Scheduler) local(r *Request, id InstanceID, queue time.Duration) plan {
	p := plan{instance: id, from: NoInstance, holder: NoInstance, queue: queue}
	p.prefix = s.holdings[id].after(p.queue, s.cfg.BlockSize)
	p.execute = s.execution(r.Input, p.prefix)
	return p
}

// offer is a prefix that instances may fetch, and the execution with it, which is the same on all.
type offer struct {
	from    InstanceID
	tokens  int
	execute time.Duration
}

func (s *Scheduler) offer(r *Request, from InstanceID, tokens int) offer {
	return offer{from, tokens, s.execution(r.Input, tokens)}
}

// fetch is the plan in which an instance extends its prefix by one that is offered.
func (s *Scheduler) fetch(now time.Duration, r *Request, local *plan, o *offer) plan {
	p := *local
	p.from, p.length, p.prefix, p.execute = o.from, o.tokens-local.prefix, o.tokens, o.execute
	p.transfer = s.transferTime(now, o.from, p.instance, s.bytes(r, p.length))
	if s.cfg.LayerWise {
		p.transfer = max(0, p.transfer-p.execute) // what of loading is hidden behind computing is not waited for
	}
	return p
}

// choosePrefill chooses a prefill instance, which there is.
func (s *Scheduler) choosePrefill(now time.Duration, r *Request) plan {
	s.match(r)
	switch s.cfg.Policy {
	case Random:
		return s.randomPrefill(now, r)
	case LoadBalance:
		return s.leastQueue(now, r)
	case CacheAware:
		return s.least(now, func(id InstanceID, queue time.Duration) plan { return s.local(r, id, queue) })
	default:
	}
	best, tokens := s.bestMatch(now, r)
	if s.cfg.Variant == ArXiv {
		return s.arXiv(now, r, best, tokens)
	}
	return s.fast25(now, r, best, tokens)
}

// least is the plan of the instance with the least TTFT; the first of several. One whose queue alone takes that long need not
// be looked at.
func (s *Scheduler) least(now time.Duration, of func(id InstanceID, queue time.Duration) plan) plan {
	var least plan
	found := false
	for i := range s.instances {
		id := InstanceID(i)
		if !s.is(id, Prefill) {
			continue
		}
		queue := s.queueTime(now, id)
		if found && queue >= least.ttft() {
			continue
		}
		if p := of(id, queue); !found || p.ttft() < least.ttft() {
			least, found = p, true
		}
	}
	return least
}

func (s *Scheduler) randomPrefill(now time.Duration, r *Request) plan {
	k := s.rng.IntN(s.count(Prefill))
	for i := range s.instances {
		id := InstanceID(i)
		if !s.is(id, Prefill) {
			continue
		}
		if k == 0 {
			return s.local(r, id, s.queueTime(now, id))
		}
		k--
	}
	panic("sched: there are fewer prefill instances than were counted")
}

// leastQueue is the instance whose queue is the shortest; of several, as when all are idle, one by chance.
func (s *Scheduler) leastQueue(now time.Duration, r *Request) plan {
	least, shortest, ties := NoInstance, time.Duration(0), 0
	for i := range s.instances {
		id := InstanceID(i)
		if !s.is(id, Prefill) {
			continue
		}
		switch q := s.queueTime(now, id); {
		case least == NoInstance || q < shortest:
			least, shortest, ties = id, q, 1
		case q == shortest:
			if ties++; s.rng.IntN(ties) == 0 {
				least = id
			}
		}
	}
	return s.local(r, least, shortest)
}

// exceeds reports whether a prefix is so much longer than an instance's own that the instance may fetch it. Any is, of one
// that has none.
func (s *Scheduler) exceeds(tokens, own int) bool {
	return tokens > own && float64(tokens) > s.cfg.KVCacheBalancingThreshold*float64(own)
}

// fast25 is Algorithm 1 of FAST'25. An instance whose own prefix is shorter than the longest by more than the threshold
// fetches that, from its holder or from the pool; here it computes it instead if that is quicker, as when the holder's NIC
// has much to send.
//
// The last step migrates the prefix to the instance that was chosen if it lacks it by more than the threshold. If that
// fetches it, this is the same copy; if it computes it, it holds it afterwards, and there is nothing to copy.
func (s *Scheduler) fast25(now time.Duration, r *Request, best InstanceID, tokens int) plan {
	peer, pool := s.offer(r, best, tokens), s.offer(r, FromPool, min(r.Pool, r.Input))
	return s.least(now, func(id InstanceID, queue time.Duration) plan {
		own := s.local(r, id, queue)
		p := own
		if best != id && s.exceeds(tokens, own.prefix) {
			if f := s.fetch(now, r, &own, &peer); f.ttft() < p.ttft() {
				p = f
				p.holder, p.migrate = best, f.length
			}
		}
		if s.exceeds(pool.tokens, own.prefix) {
			if f := s.fetch(now, r, &own, &pool); f.ttft() < p.ttft() {
				p = f
			}
		}
		return p
	})
}

// arXiv is Algorithm 1 of the arXiv report to the letter, its lines in the margin. The pool, of which it says nothing, counts
// as another holder, if what lies there is longer than what any instance has.
func (s *Scheduler) arXiv(now time.Duration, r *Request, best InstanceID, tokens int) plan {
	o := s.offer(r, best, tokens)
	if pooled := min(r.Pool, r.Input); pooled > tokens {
		o = s.offer(r, FromPool, pooled)
	}
	p := s.least(now, func(id InstanceID, queue time.Duration) plan {
		own := s.local(r, id, queue)
		remote := own.prefix == 0 || float64(o.tokens)/float64(own.prefix) >= s.cfg.KVCacheBalancingThreshold // 8
		if !remote || o.tokens <= own.prefix || o.from == id {
			return own // 9-13; with nothing to transfer, lines 15-21 come to the same
		}
		return s.fetch(now, r, &own, &o) // 15-21
	})
	return s.arXivMigrate(r, p, best, tokens)
}

// arXivMigrate is lines 28-30 and section 4.2.5.2. The prefix is copied to the instance that was chosen if it is longer than
// the threshold. That instance does not wait for the copy if it computes the rest sooner than it would come.
func (s *Scheduler) arXivMigrate(r *Request, p plan, best InstanceID, tokens int) plan {
	own := s.local(r, p.instance, p.queue)
	if p.from != NoInstance && own.execute-p.execute < p.transfer {
		p = own
	}
	more := float64(tokens) > s.cfg.KVCacheBalancingThreshold
	if s.cfg.MigrateTokens > 0 {
		more = tokens > s.cfg.MigrateTokens
	}
	if best != NoInstance && best != p.instance && p.from != FromPool && more {
		p.holder, p.migrate = best, max(0, tokens-own.prefix)
	}
	return p
}
