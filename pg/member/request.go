package member

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

type callKind uint8

const (
	callStart callKind = iota
	callActivate
	callDeactivate
	callJoin
	callSync
)

// request is a call that waits for the group.
type request struct {
	id       int
	kind     callKind
	ranks    []int
	deadline time.Duration
	// admitted are those of ranks with whom the call has made a proposal: who fails from then on is dropped, not waited for.
	admitted map[int]uint64
	dropped  []int
	after    time.Duration // no proposal before
	lack     string        // what it waits for
	done     bool
}

// begin takes a call; the answer is an outDone of its id.
func (c *core) begin(kind callKind, ranks []int) int {
	r := &request{id: c.newID(), kind: kind, ranks: slices.Compact(slices.Sorted(slices.Values(ranks))), admitted: map[int]uint64{}}
	c.requests = append(c.requests, r)
	for _, rank := range ranks {
		if rank < 0 || rank >= c.spec.Cap {
			c.finish(r, Response{}, &RankError{rank, fmt.Sprintf("is not of the group, which has %d slots: extend it first", c.spec.Cap)})
			return r.id
		}
	}
	switch kind {
	case callActivate, callDeactivate:
		r.deadline = c.now + AdmitTimeout
	case callSync:
		r.deadline = c.now + SyncTimeout
	case callJoin:
		switch {
		case c.lost:
			c.finish(r, Response{}, ErrLeaseLost)
		case c.member:
			c.finish(r, Response{}, ErrActive)
		default:
			c.joining = true
		}
	case callStart:
	}
	return r.id
}

// cancel ends a call whose caller has gone.
func (c *core) cancel(id int) {
	for _, r := range c.requests {
		if r.id == id && !r.done {
			r.done = true
			if r.kind == callJoin {
				c.joining = false
			}
		}
	}
}

func (c *core) finish(r *request, resp Response, err error) {
	if r.done {
		return
	}
	r.done = true
	resp.Epoch = c.view.Epoch
	c.put(output{kind: outDone, id: r.id, resp: resp, err: err})
}

// answer ends the calls that have what they wait for, and those that have waited too long.
func (c *core) answer(v verdict) {
	wantSync := false
	for _, r := range c.requests {
		if r.done {
			continue
		}
		c.answerCall(r, v)
		if !r.done && r.deadline != 0 {
			c.expire(r)
		}
		wantSync = wantSync || !r.done && (r.kind == callSync || r.kind == callActivate || r.kind == callDeactivate)
	}
	c.requests = slices.DeleteFunc(c.requests, func(r *request) bool { return r.done })
	c.sync = 0
	if wantSync && v.trouble {
		c.sync = c.rec.Committed.Epoch
	}
}

// answerCall ends a call that has what it waits for.
func (c *core) answerCall(r *request, v verdict) {
	switch r.kind {
	case callStart:
		if c.member || c.view.Epoch > 0 && !c.joining {
			c.finish(r, Response{Status: Applied}, nil)
		}
	case callJoin:
		if c.member {
			c.finish(r, Response{Status: Applied}, nil)
		}
	case callActivate:
		c.answerActivate(r)
	case callDeactivate:
		if !slices.ContainsFunc(r.ranks, func(x int) bool { return c.view.Active.Has(x) || c.view.Index(x) >= 0 }) {
			c.finish(r, Response{Status: Applied}, nil)
		}
	case callSync:
		c.answerSync(r, v)
	}
}

// expire rejects a call whose time is over, unless a proposal is under way: that ends by itself.
func (c *core) expire(r *request) {
	if c.now < r.deadline {
		c.wakeAt(r.deadline)
		return
	}
	if c.rec.Proposed != nil && c.now < r.deadline+ConnectLimit+HoldLimit {
		c.wakeAt(r.deadline + ConnectLimit + HoldLimit)
		return
	}
	reason := r.lack
	if c.rec.Note != "" {
		reason += fmt.Sprintf(" (the last attempt was given up: %s)", c.rec.Note)
	}
	c.finish(r, Response{Status: Rejected, Reason: "timed out: " + cmp.Or(reason, "the group is busy with other changes")}, nil)
}

// answerActivate ends an activation whose ranks are members, or have failed since it was admitted.
func (c *core) answerActivate(r *request) {
	for rank, inc := range r.admitted {
		if row := c.rows[rank]; !c.view.Has(rank, inc) &&
			(row == nil || row.Incarnation != inc || row.State == stateInactive || c.apartFromMembers(rank)) {
			c.drop(r, rank)
		}
	}
	for _, rank := range r.ranks {
		row := c.rows[rank]
		switch {
		case rank >= len(c.spec.Ranks):
			c.finish(r, Response{Status: Rejected, Reason: fmt.Sprintf("slot %d has no process: none has attached to it yet", rank)}, nil)
			return
		case slices.Contains(r.dropped, rank):
		case row == nil || !c.view.Has(rank, row.Incarnation) || row.Out >= c.view.Epoch:
			return
		}
	}
	slices.Sort(r.dropped)
	switch len(r.dropped) {
	case 0:
		c.finish(r, Response{Status: Applied}, nil)
	case len(r.ranks):
		c.finish(r, Response{Status: Rejected, Reason: fmt.Sprintf("ranks %s failed while they were activated", rankList(r.dropped))}, nil)
	default:
		c.finish(r, Response{Status: AppliedWithDropped, Dropped: r.dropped}, nil)
	}
}

// drop leaves a rank out of an activation.
func (c *core) drop(r *request, rank int) {
	delete(r.admitted, rank)
	if !slices.Contains(r.dropped, rank) {
		r.dropped = append(r.dropped, rank)
	}
}

// dropJoiners has our activations do without those who have not answered.
func (c *core) dropJoiners(silent []int) {
	for _, r := range c.requests {
		r.after = c.now + RetryPause
		for _, rank := range silent {
			if _, ok := r.admitted[rank]; ok && c.rec.Committed.Index(rank) < 0 {
				c.drop(r, rank)
			}
		}
	}
}

func (c *core) apartFromMembers(rank int) bool {
	return slices.ContainsFunc(c.rec.Committed.Members, func(m Member) bool { return m.Rank != rank && c.apart(m.Rank, rank) })
}

// answerSync ends a Sync when no failure is open: what this process itself has seen and not said yet is.
func (c *core) answerSync(r *request, v verdict) {
	r.lack = v.detail
	p := c.rec.Proposed
	switch {
	case c.view.Epoch == 0:
		c.finish(r, Response{Status: Rejected, Reason: "the group has not started"}, nil)
	case v.trouble || c.resync != nil && c.member || p != nil && !p.orderly():
	case !c.member:
		c.finish(r, Response{Status: Rejected, Reason: "this process is outside of the view: it may join again"}, nil)
	case c.failures > c.synced:
		c.synced = c.failures
		c.finish(r, Response{Status: Reconciled}, nil)
	default:
		c.finish(r, Response{Status: NoPending}, nil)
	}
}

// actForCalls proposes what a call of this process asks for, once it may be.
func (c *core) actForCalls() {
	for _, r := range c.requests {
		var v View
		switch r.kind {
		case callActivate:
			v, r.lack = c.activation(r)
		case callDeactivate:
			v = c.deactivation(r)
		default:
			continue
		}
		if r.lack != "" {
			continue
		}
		if c.now < r.after {
			c.wakeAt(r.after)
			continue
		}
		for _, rank := range r.ranks {
			if i := v.Index(rank); i >= 0 {
				r.admitted[rank] = v.Members[i].Incarnation
			}
		}
		c.proposeView(v)
		return
	}
}

// activation is the view that an activation asks for, or what is in its way.
func (c *core) activation(r *request) (v View, lack string) {
	old := &c.rec.Committed
	v = View{Phase: PhaseConnect, Reason: ReasonActivate, Active: old.Active.Clone(), Absent: old.Absent.Clone()}
	members := make(map[int]Member, len(old.Members)+len(r.ranks))
	for _, m := range old.Members {
		members[m.Rank] = m
	}
	for _, rank := range r.ranks {
		row := c.rows[rank]
		switch {
		case slices.Contains(r.dropped, rank):
			continue
		case row != nil && old.Has(rank, row.Incarnation):
			continue
		case row == nil:
			return v, fmt.Sprintf("rank %d is not there", rank)
		case row.State != stateAwaiting:
			return v, fmt.Sprintf("rank %d does not wait to be activated: it has to join", rank)
		}
		for other := range members {
			if !c.together(rank, other) {
				return v, fmt.Sprintf("ranks %d and %d are not connected", min(rank, other), max(rank, other))
			}
		}
		members[rank] = c.memberOf(rank)
		v.Active.Set(rank)
		v.Absent.Clear(rank)
	}
	for _, m := range members {
		v.Members = append(v.Members, m)
	}
	slices.SortFunc(v.Members, func(a, b Member) int { return a.Rank - b.Rank })
	v.Detail = "ranks " + rankList(r.ranks)
	return v, ""
}

// deactivation is the view that a deactivation asks for.
func (c *core) deactivation(r *request) View {
	old := &c.rec.Committed
	v := View{
		Phase: PhaseConnect, Reason: ReasonDeactivate, Detail: "ranks " + rankList(r.ranks),
		Active: old.Active.Clone(), Absent: old.Absent.Clone(),
	}
	for _, m := range old.Members {
		if !slices.Contains(r.ranks, m.Rank) {
			v.Members = append(v.Members, m)
		}
	}
	for _, rank := range r.ranks {
		v.Active.Clear(rank)
		v.Absent.Clear(rank)
	}
	return v
}

// healthy is PeerState of a rank. Members that are known to be lost, but have not left the view yet, are nobody's fault but theirs.
func (c *core) healthy(rank int) bool {
	row, v := c.rows[rank], &c.rec.Committed
	if row == nil || row.State != stateAwaiting && (!v.Has(rank, row.Incarnation) || row.Out >= v.Epoch) {
		return false
	}
	lost := func(r int) bool { return c.keep != nil && v.Index(r) >= 0 && !slices.Contains(c.keep, r) }
	return !lost(rank) && !slices.ContainsFunc(v.Members, func(m Member) bool {
		return m.Rank != rank && !lost(m.Rank) && c.alive(m, v.Epoch) && (!c.together(rank, m.Rank) || c.apart(rank, m.Rank))
	})
}
