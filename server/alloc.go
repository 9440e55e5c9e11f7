package server

import (
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// parkRetry is how often a request that waits for a victim is planned again, if nothing wakes it before: the state may
// have changed in ways that nobody is told of, and a plan costs microseconds.
const parkRetry = 10 * time.Millisecond

// lastChance is how long before its deadline a request may take a live client's region however young.
const lastChance = 500 * time.Millisecond

// requestAlloc queues a REQUEST_ALLOC. A client without a session gets one that never expires, under its instance id.
func (m *Master) requestAlloc(c *Client, h protocol.Header, payload, out []byte, now int64) []byte {
	r := &request{client: c, h: h, arrived: now, bytes: len(payload), alloc: &protocol.AllocRequest{}}
	r.keys = slices.Clone(payload)
	if err := r.alloc.Decode(r.keys); err != nil {
		return m.refuseErr(out, h, err)
	}
	timeout := m.cfg.AllocTimeout
	if ms := r.alloc.TimeoutMS; ms != 0 {
		timeout = min(time.Duration(min(ms, 1<<30))*time.Millisecond, maxAllocTimeout)
	}
	r.deadline = now + int64(timeout)
	if s := c.sess.Load(); s != nil {
		r.key, r.acked = seqKey{s.id, r.alloc.Seq}, r.alloc.Acked
		return m.submit(r, out)
	}
	if r.alloc.InstanceID == "" {
		return m.refuse(out, h, &protocol.Error{
			Code: protocol.CodeBadRequest, Message: "instance_id must not be empty without a session",
		})
	}
	r.alloc.Evict = false // a client without a session cannot be told what was evicted
	return m.allocImplicit(r, out)
}

// allocImplicit queues a REQUEST_ALLOC of a client that never made a HANDSHAKE, as Maru's do not, under the session of
// its instance id. That is opened first if need be.
func (m *Master) allocImplicit(r *request, out []byte) []byte {
	m.state.RLock()
	id, open := m.machine.SessionOf(r.alloc.InstanceID)
	info, _ := m.machine.Session(id)
	m.state.RUnlock()
	switch {
	case open && info.TTLMS != 0:
		return m.refuse(out, r.h, &protocol.Error{
			Code: protocol.CodeForbidden, Message: "the instance id is in use by a client with a session: choose another",
		})
	case open:
		r.key.session = id
		return m.submit(r, out)
	}
	cmd := &meta.OpenSession{Instance: r.alloc.InstanceID, Tenant: meta.DefaultTenant, Secret: m.cfg.Random()}
	m.mu.Lock()
	defer m.mu.Unlock()
	r.client.took(0) // stays counted until the answer
	err := m.do(cmd, func(code protocol.Code, result []byte) { m.allocOpened(r, code, result) })
	if err != nil {
		r.client.answered(0)
		return m.refuseErr(out, r.h, err)
	}
	return out
}

// allocOpened goes on with allocImplicit once its session is open. Two that raced for it both go on with the winner's.
func (m *Master) allocOpened(r *request, code protocol.Code, result []byte) {
	r.client.answered(0)
	fault := &protocol.Error{Code: code, Message: "the session of this instance could not be opened"}
	switch code {
	case protocol.CodeOK:
		if _, rest, err := meta.DecodeCode(result); err == nil {
			if s, err := meta.DecodeSession(rest); err == nil {
				r.key.session, fault = s.ID, nil
			}
		}
	case protocol.CodeDuplicate:
		if r.key.session = m.sessionOf(r.alloc.InstanceID); r.key.session != 0 {
			fault = nil
		}
	default:
	}
	if fault == nil {
		m.mu.Lock()
		fault = m.enqueue(r)
		m.mu.Unlock()
	}
	if fault != nil {
		r.client.frameError(r.h, fault)
		r.client.peer.Flush()
	}
}

// planAlloc plans a REQUEST_ALLOC, or parks it. The caller holds state for reading, mu and the leases.
func (m *Master) planAlloc(r *request, now int64) meta.PlanKind {
	left := r.deadline - now
	req := r.alloc
	grace := now < m.leases.grace
	if grace && req.Evict {
		// A new leader does not know what was leased: only free space may be given.
		free := *req
		free.Evict, req = false, &free
	}
	g := guard{l: &m.leases, now: now, grace: grace, ready: m.deviceReady, lasting: m.lasting}
	at := m.machine.At(m.logTime(now)) // which the group is stamped with, so that the plan may go by it
	r.plan = at.PlanAlloc(r.key.session, req, &g, left <= int64(lastChance))
	if grace && r.plan.Kind == meta.PlanRefuse && r.plan.Code == protocol.CodeNoSpace && !r.plan.Never && r.alloc.Evict {
		r.plan.Kind, g.soonest = meta.PlanWait, m.leases.grace
	}
	if id := m.yields(r, now); id != 0 && left > 0 && len(m.parked) < maxParked {
		r.plan = meta.AllocPlan{Kind: planOwner, For: id}
	}
	switch r.plan.Kind {
	case meta.PlanRefuse:
		if r.plan.Kept {
			m.n.AllocsKept.Add(1)
		}
	case meta.PlanNothing:
		for _, s := range r.plan.Touched {
			if !m.leases.used(s, now) {
				m.n.TouchesDropped.Add(1)
			}
		}
	case meta.PlanWait, meta.PlanMark, meta.PlanEmpty:
		if left <= 0 || len(m.parked) >= maxParked {
			m.n.AllocTimeouts.Add(1)
			r.plan.Kind = meta.PlanRefuse
			r.plan.Code, r.plan.Message = protocol.CodePending, "nothing could be evicted in time: retry with the same seq"
			break
		}
		if r.plan.Kind == meta.PlanWait {
			m.park(r, now, g.soonest)
		}
	default:
	}
	return r.plan.Kind
}

// planOwner is a plan beside those of meta: end the session For, whose client is gone, and plan again.
const planOwner = meta.PlanRefuse + 1

// yields names the session of a client of Maru's that is gone, if a request finds no room as long as it is there: its
// regions go before those of clients that live. The caller holds what planAlloc's does.
func (m *Master) yields(r *request, now int64) meta.SessionID {
	switch p := &r.plan; {
	case p.Kind == meta.PlanMark, p.Kind == meta.PlanRefuse && p.Code == protocol.CodeNoSpace && !p.Never && !r.alloc.Promote:
		return m.goneOwner(now)
	default:
		return 0
	}
}

// lasting reports whether clients of Maru's may be reading in a region, by what an earlier leader has told them. The caller
// holds state.
func (m *Master) lasting(id meta.RegionID) bool {
	if m.machine.MaruIn(id) {
		return true
	}
	r, ok := m.machine.Region(id)
	return ok && r.State == meta.RegionDraining && m.cfg.MaruLease > 0
}

// park sets a request aside until wakeAt, or until something happens that may help it. The caller holds mu.
func (m *Master) park(r *request, now, wakeAt int64) {
	if !r.waits {
		r.waits = true
		m.n.AllocWaits.Add(1)
	}
	latest := now + int64(parkRetry)
	if wakeAt == 0 || wakeAt > latest {
		wakeAt = latest
	}
	r.wakeAt = min(wakeAt, r.deadline)
	m.parked = append(m.parked, r)
	m.parkedN.Store(int64(len(m.parked)))
}

// requeueParked moves parked requests that are due into the queue, before what came later: at most maxReplans, the
// longest waiting first. The caller holds mu.
func (m *Master) requeueParked(now int64) {
	if len(m.parked) == 0 {
		return
	}
	all := m.retry
	m.retry = false
	var due []*request
	rest := m.parked[:0]
	for _, r := range m.parked {
		if len(due) < maxReplans && (all || r.wakeAt <= now) {
			due = append(due, r)
			m.queued += r.bytes
		} else {
			rest = append(rest, r)
		}
	}
	clear(m.parked[len(rest):])
	m.parked = rest
	m.parkedN.Store(int64(len(m.parked)))
	if len(due) > 0 {
		m.queue = append(due, m.queue...)
	}
}
