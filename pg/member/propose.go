package member

import (
	"fmt"
	"slices"
	"time"
)

// act does what there is to be done for the group, if it is this process's turn.
func (c *core) act(v verdict) {
	if c.isolated || !c.attached || c.viewWrite.busy || c.viewWrite.unknown {
		return
	}
	c.turned = false
	switch {
	case c.rec.Proposed != nil:
		c.actOnProposal(v)
	case c.rec.Committed.Epoch == 0:
		c.actToStart()
	case v.trouble && c.permitted():
		c.actOnTrouble(v)
	default:
		c.actForCalls()
	}
	if !c.turned {
		c.pending = due{}
	}
}

// turn reports whether it is our turn to do what key names: at once for the first of the ranks that order names, and so on, by
// Standby each, for the others, in case those before do not.
func (c *core) turn(key string, order []int) bool {
	key = fmt.Sprintf("%s at %d", key, c.viewWrite.rev)
	if c.pending.key != key {
		c.pending = due{key, c.now}
	}
	c.turned = true
	place := slices.Index(order, c.cfg.rank)
	if place < 0 {
		place = len(order)
	}
	at := c.pending.at + time.Duration(place)*Standby
	if c.now < at {
		c.wakeAt(at)
		return false
	}
	return true
}

// actOnProposal leads a proposal on, replaces it or gives it up.
func (c *core) actOnProposal(v verdict) {
	p := c.rec.Proposed
	why := c.doomed(p)
	stall := c.recSince + stallLimit(p)
	if why == "" && c.ready(p, c.now >= stall) {
		if c.turn("advance", c.order(p)) {
			c.advance(p)
		}
		return
	}
	if why == "" && c.now < stall {
		c.wakeAt(stall)
		return
	}
	var silent []int
	if why == "" {
		silent = c.silent(p)
		why = fmt.Sprintf("ranks %s have not answered for %v", rankList(silent), stallLimit(p))
		if len(silent) < len(p.Members) {
			v.keep = c.without(v.keep, silent)
		}
	}
	switch {
	case !v.trouble || !c.permitted():
		if c.turn("give up", c.order(p)) {
			c.dropJoiners(silent)
			c.propose(record{Committed: c.rec.Committed, Last: c.rec.Last, Note: clip(why)})
		}
	case v.closed:
		c.actOnTrouble(v)
	}
}

// stallLimit is how long a proposal may stay as it is.
func stallLimit(p *View) time.Duration {
	if p.Phase == PhaseHold && p.Reason != ReasonStart {
		return HoldLimit
	}
	return ConnectLimit
}

// order is who leads a proposal: who made it, then its members.
func (c *core) order(p *View) []int {
	order := []int{p.Proposer}
	for _, m := range p.Members {
		if m.Rank != p.Proposer {
			order = append(order, m.Rank)
		}
	}
	if r := c.rows[p.Proposer]; r == nil {
		order = order[1:]
	}
	return order
}

// doomed says why a proposal cannot be committed any more, "" if it can.
func (c *core) doomed(p *View) string {
	for _, m := range p.Members {
		if !c.alive(m, p.Epoch) {
			return fmt.Sprintf("rank %d is gone", m.Rank)
		}
		if a := c.rows[m.Rank].Ack; a != nil && a.Epoch == p.Epoch && a.Failed != "" {
			return fmt.Sprintf("rank %d: %s", m.Rank, a.Failed)
		}
	}
	for _, m := range p.Members {
		for _, d := range c.rows[m.Rank].Down {
			if p.Has(d.Rank, d.Incarnation) && c.doubtOf(m.Rank, d.Rank) != nil {
				return fmt.Sprintf("rank %d has lost rank %d: %s", m.Rank, d.Rank, d.Why)
			}
		}
	}
	return ""
}

// ackOf is what a rank says of a proposal.
func (c *core) ackOf(rank int, p *View) ack {
	if r := c.rows[rank]; r != nil && r.Ack != nil && r.Ack.Epoch == p.Epoch {
		return *r.Ack
	}
	return ack{}
}

// holders are those who have to hold before a view may be committed: all whose operations count. Those whom a failure leaves out
// are not asked, for their operations fail; nor are those who have failed while they were to be left out.
func (c *core) holders(p *View) (list []int) {
	for _, m := range c.rec.Committed.Members {
		if p.Has(m.Rank, m.Incarnation) || p.orderly() && c.alive(m, c.rec.Committed.Epoch) && !c.lostTo(p, m.Rank) {
			list = append(list, m.Rank)
		}
	}
	return list
}

// lostTo reports whether a member of a proposal says that it has lost a rank.
func (c *core) lostTo(p *View, rank int) bool {
	return slices.ContainsFunc(p.Members, func(m Member) bool { return c.doubtOf(m.Rank, rank) != nil })
}

// orderly reports whether a view leaves members out who are alive.
func (v *View) orderly() bool { return v.Reason == ReasonActivate || v.Reason == ReasonDeactivate }

// ready reports whether a proposal may go on to its next phase. One that is late does not wait for those whom it leaves out.
func (c *core) ready(p *View, late bool) bool {
	for _, m := range p.Members {
		if !c.ackOf(m.Rank, p).Connected {
			return false
		}
	}
	return p.Phase == PhaseConnect || c.allHeld(p, late)
}

func (c *core) allHeld(p *View, late bool) bool {
	for _, rank := range c.holders(p) {
		if !c.ackOf(rank, p).Held && (p.Index(rank) >= 0 || !late) {
			return false
		}
	}
	return true
}

// silent are the members of a proposal who have not answered.
func (c *core) silent(p *View) (list []int) {
	holders := c.holders(p)
	for _, m := range p.Members {
		a := c.ackOf(m.Rank, p)
		if !a.Connected || p.Phase == PhaseHold && !a.Held && slices.Contains(holders, m.Rank) {
			list = append(list, m.Rank)
		}
	}
	return list
}

// advance takes a proposal to its next phase.
func (c *core) advance(p *View) {
	v := *p
	if p.Phase == PhaseConnect && len(c.holders(p)) > 0 {
		v.Phase = PhaseHold
		c.propose(record{Committed: c.rec.Committed, Last: c.rec.Last, Proposed: &v})
		return
	}
	v.Phase = PhaseCommit
	v.StartSeq = c.startSeq(p)
	if c.cfg.table != nil {
		reports := make([][]byte, len(p.Members))
		for i, m := range p.Members {
			reports[i] = c.ackOf(m.Rank, p).Report
		}
		if t := c.cfg.table(v, reports); len(t) <= MaxReport {
			v.Table = t
		}
	}
	c.propose(record{Committed: v, Last: c.rec.Last})
}

// startSeq is the first operation of a view: after all that anybody has begun; or, where they are run again, after all that anybody
// has completed. A view that has begun elsewhere keeps its operations, for those who joined in it have no earlier ones.
func (c *core) startSeq(p *View) uint64 {
	start := c.rec.Committed.StartSeq
	for _, rank := range c.holders(p) {
		if a := c.ackOf(rank, p); a.Held && p.Retry {
			start = max(start, a.Done)
		} else if a.Held {
			start = max(start, a.Entered)
		}
	}
	return start
}

// propose replaces the view record, if it is still the one that we know.
func (c *core) propose(r record) {
	r.Generation = c.cfg.generation
	w := &c.viewWrite
	w.busy, w.get, w.id = true, false, c.newID()
	c.put(output{kind: outPut, id: w.id, key: keyView, value: encode(r), rev: w.rev})
}

// proposeView proposes a view that follows the one in force.
func (c *core) proposeView(v View) {
	v.Epoch, v.Proposer, v.Detail = c.rec.Last+1, c.cfg.rank, clip(v.Detail)
	c.propose(record{Committed: c.rec.Committed, Last: v.Epoch, Proposed: &v})
}

// actOnTrouble proposes a view of those who are to stay.
func (c *core) actOnTrouble(v verdict) {
	if !v.closed {
		return
	}
	if p := c.rec.Proposed; p != nil && c.sameMembers(p, v.keep) && c.now < c.recSince+RetryPause {
		c.wakeAt(c.recSince + RetryPause) // they have all refused, or nobody has answered
		return
	}
	if !c.turn(fmt.Sprint("failure ", v.keep), v.keep) {
		return
	}
	old := &c.rec.Committed
	next := View{Phase: PhaseHold, Active: old.Active.Clone(), Absent: old.Absent.Clone(), Reason: ReasonResync, Detail: v.detail}
	if v.retry {
		next.Reason, next.Retry = ReasonFailure, c.spec.Retry
	}
	for _, m := range old.Members {
		if slices.Contains(v.keep, m.Rank) {
			next.Members = append(next.Members, m)
			continue
		}
		next.Reason, next.Retry = ReasonFailure, c.spec.Retry
		if c.spec.AutoDeactivate {
			next.Active.Clear(m.Rank)
		} else {
			next.Absent.Set(m.Rank)
		}
	}
	c.proposeView(next)
}

func (c *core) sameMembers(p *View, ranks []int) bool {
	return slices.EqualFunc(p.Members, ranks, func(m Member, r int) bool { return m.Rank == r })
}

// permitted reports whether failures may change the view: they always may where that leaves the active set alone.
func (c *core) permitted() bool {
	if !c.spec.AutoDeactivate || c.spec.AutoSync {
		return true
	}
	for _, r := range c.rows {
		if r.Sync != 0 && r.Sync >= c.rec.Committed.Epoch {
			return true
		}
	}
	return false
}

// actToStart proposes the first view once all founders are there and connected.
func (c *core) actToStart() {
	missing, apart := c.lacking(1)
	if len(missing)+len(apart) > 0 {
		return
	}
	v := View{Phase: PhaseHold, Reason: ReasonStart}
	order := make([]int, c.spec.Founders)
	for rank := range order {
		order[rank] = rank
		v.Members = append(v.Members, c.memberOf(rank))
		v.Active.Set(rank)
	}
	if c.turn("start", order) {
		c.proposeView(v)
	}
}

// memberOf is the process that has a slot.
func (c *core) memberOf(rank int) Member {
	return Member{rank, c.spec.Ranks[rank], c.rows[rank].Incarnation}
}

// lacking says which founders are not there, and which pairs of them are not connected: at most limit of each.
func (c *core) lacking(limit int) (missing []int, apart []string) {
	for rank := range c.spec.Founders {
		if r := c.rows[rank]; (r == nil || r.State == stateInactive) && len(missing) < limit {
			missing = append(missing, rank)
		}
	}
	if len(missing) >= limit {
		return missing, nil
	}
	for a := range c.spec.Founders {
		for b := range a {
			if c.rows[a] == nil || c.rows[b] == nil || c.together(a, b) {
				continue
			}
			if apart = append(apart, fmt.Sprintf("%d-%d", b, a)); len(apart) >= limit {
				return missing, apart
			}
		}
	}
	return missing, apart
}

// together reports whether two processes both say that they are connected.
func (c *core) together(a, b int) bool {
	ra, rb := c.rows[a], c.rows[b]
	return ra != nil && rb != nil && ra.Up.has(b, rb.Incarnation) && rb.Up.has(a, ra.Incarnation)
}
