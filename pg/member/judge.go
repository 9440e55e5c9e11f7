package member

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// verdict is what the records say about the view in force.
type verdict struct {
	trouble bool   // it cannot stay
	closed  bool   // all who matter have been heard, or it has taken too long: keep may be acted on
	keep    []int  // who of the members are to stay, if there is trouble
	retry   bool   // operations may be run again
	detail  string // for people
}

// suspicion is that somebody says a member is lost; since tells for how long that has been known here.
type suspicion struct {
	epoch uint64
	peer
}

// alive reports whether a member's row is there and does not say that the process is out of the view of that epoch.
func (c *core) alive(m Member, epoch uint64) bool {
	r := c.rows[m.Rank]
	return r != nil && r.Incarnation == m.Incarnation && r.Out < epoch
}

// doubtOf is what a says against b, about the view in force or later: what it said before that has been dealt with.
func (c *core) doubtOf(a, b int) *doubt {
	ra, rb := c.rows[a], c.rows[b]
	if ra == nil || rb == nil || ra.Seen < c.rec.Committed.Epoch {
		return nil
	}
	return ra.doubts(b, rb.Incarnation)
}

// apart reports whether one of two processes says that it has lost the other.
func (c *core) apart(a, b int) bool { return c.doubtOf(a, b) != nil || c.doubtOf(b, a) != nil }

// judge finds out whether the view in force can stay, and who of its members if it cannot.
func (c *core) judge() (v verdict) {
	var there []int
	var detail []string
	for _, m := range c.rec.Committed.Members {
		if c.alive(m, c.rec.Committed.Epoch) {
			there = append(there, m.Rank)
			continue
		}
		detail = append(detail, fmt.Sprintf("rank %d is gone", m.Rank))
	}
	v.retry = len(detail) > 0
	suspects := c.suspects(there, &detail)
	for _, m := range there {
		if r := c.rows[m].Resync; r != nil && r.Epoch == c.rec.Committed.Epoch {
			v.trouble = true
			v.retry = v.retry || r.Retry
			detail = append(detail, fmt.Sprintf("rank %d: %s", m, r.Why))
		}
	}
	v.trouble = v.trouble || len(detail) > 0
	if !v.trouble {
		return verdict{}
	}
	v.detail = clip(strings.Join(detail, "; "))
	v.keep, v.closed = c.survivors(there, suspects)
	if p := c.rec.Proposed; p != nil {
		v.keep = c.without(v.keep, c.refusers(p))
	}
	v.keep = clique(v.keep, c.apart)
	return v
}

// suspects are those of there of whom others of there say that they are lost.
func (c *core) suspects(there []int, detail *[]string) []int {
	var list []int
	for _, a := range there {
		for _, d := range c.rows[a].Down {
			if _, in := slices.BinarySearch(there, d.Rank); !in || c.doubtOf(a, d.Rank) == nil {
				continue
			}
			if len(*detail) < 8 { // more are not read
				*detail = append(*detail, fmt.Sprintf("rank %d has lost rank %d: %s", a, d.Rank, d.Why))
			}
			if !slices.Contains(list, d.Rank) {
				list = append(list, d.Rank)
			}
		}
	}
	known := make(map[suspicion]time.Duration, len(list))
	for _, s := range list {
		key := suspicion{c.rec.Committed.Epoch, peer{s, c.rows[s].Incarnation}}
		at, ok := c.suspectedAt[key]
		if !ok {
			at = c.now
		}
		known[key] = at
	}
	c.suspectedAt = known
	slices.Sort(list)
	return list
}

// answered reports whether a process has said what it thinks of a suspect in the knowledge that it is one. Who is still making the
// channels of a proposal may yet find that there is none to the suspect.
func (c *core) answered(a, suspect int) bool {
	r, inc := c.rows[a], c.rows[suspect].Incarnation
	return c.doubtOf(a, suspect) != nil || r.Heard.has(suspect, inc) && !c.connecting(a)
}

// connecting reports whether a process is making the channels of the proposal: it has not said that they are there, nor why they
// are not.
func (c *core) connecting(a int) bool {
	p := c.rec.Proposed
	if p == nil || !p.Has(a, c.rows[a].Incarnation) {
		return false
	}
	ack := c.ackOf(a, p)
	return !ack.Connected && ack.Failed == "" &&
		!slices.ContainsFunc(p.Members, func(m Member) bool { return c.doubtOf(a, m.Rank) != nil })
}

// survivors are those of there who are not beyond doubt lost, and whether all of them have been heard on all suspects. A suspect
// is lost if all say so whom nobody suspects. One who has not answered in ReportWindow is lost, too, if anybody suspects him.
func (c *core) survivors(there, suspects []int) (left []int, closed bool) {
	if len(suspects) == 0 {
		return there, true
	}
	jury := c.without(there, suspects)
	lost := func(s int) bool {
		return len(jury) > 0 && !slices.ContainsFunc(jury, func(a int) bool { return c.doubtOf(a, s) == nil })
	}
	for _, r := range there {
		if _, suspected := slices.BinarySearch(suspects, r); !suspected || !lost(r) {
			left = append(left, r)
		}
	}
	var silent []int
	closed = true
	over := c.windowEnd()
	for _, a := range left {
		if slices.ContainsFunc(suspects, func(s int) bool { return !c.answered(a, s) }) {
			closed = false
			if _, suspected := slices.BinarySearch(suspects, a); suspected {
				silent = append(silent, a)
			}
		}
	}
	if closed {
		return left, true
	}
	if c.now < over {
		c.wakeAt(over)
		return left, false
	}
	if len(silent) == len(left) {
		return left, true // nobody has said a word: who is connected to whom decides
	}
	return c.without(left, silent), true
}

// windowEnd is when the latest suspect has had his time.
func (c *core) windowEnd() time.Duration {
	last := time.Duration(0)
	for at := range maps.Values(c.suspectedAt) {
		last = max(last, at)
	}
	return last + ReportWindow
}

// refusers are those who have said that they will not take part in a proposal, unless that is everybody.
func (c *core) refusers(p *View) []int {
	var list []int
	for _, m := range p.Members {
		if r := c.rows[m.Rank]; r != nil && r.Ack != nil && r.Ack.Epoch == p.Epoch && r.Ack.Failed != "" {
			list = append(list, m.Rank)
		}
	}
	if len(list) == len(p.Members) {
		return nil
	}
	return list
}

// without is a sorted list without the members of another.
func (c *core) without(list, out []int) []int {
	return slices.DeleteFunc(slices.Clone(list), func(r int) bool { return slices.Contains(out, r) })
}
