package model

import (
	"fmt"
	"slices"

	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
)

// policyChange is how far entries have gone over from a policy that was replaced. Which ones a sweep moves is that
// policy's choice, so only bounds of their number are known between sweeps.
type policyChange struct {
	state changeState
	lo    int  // at least so many entries are still ordered by the old policy
	hi    int  // at most so many are
	holds bool // the old policy may hold entries back when asked for them all
}

type changeState uint8

const (
	notChanging changeState = iota
	perhapsChanging
	changing
)

// offersAll are the policies that offer all their entries for eviction, whatever else is true of these.
var offersAll = []string{"fifo", "larder", "length-aware", "lfu", "lru", "none", "s3fifo", "sieve", "ttl"}

// leavesOld notes that an entry is no longer ordered by the policy that is being replaced, if it was.
func (w *world) leavesOld(e *entry) {
	if !e.old {
		return
	}
	e.old = false
	left := 0
	for _, x := range w.entries {
		if x != nil && x.old {
			left++
		}
	}
	w.change.lo, w.change.hi = max(w.change.lo-1, 0), min(w.change.hi, left)
}

// changeMayEnd ends the change of policies if no entry is left to go over.
func (w *world) changeMayEnd() {
	switch {
	case w.change.state == notChanging || w.change.lo > 0:
	case w.change.hi == 0:
		w.changeEnds()
	default:
		w.change.state = perhapsChanging
	}
}

func (w *world) changeEnds() {
	w.change = policyChange{}
	for _, e := range w.held() {
		e.old = false
	}
}

func (w *world) setSettings(c *meta.SetSettings, raw []byte) (result, error) {
	n, old := c.Settings, w.settings
	differ := n.Policy != old.Policy || n.TTLMS != old.TTLMS
	switch {
	case n.Version < old.Version, n.PageSize == 0, n.PageSize%meta.MinPageSize != 0, n.RegionSize < n.PageSize, !n.HasWatermarks():
		return refused(protocol.CodeBadRequest), nil
	case n.Version > meta.ClusterVersion, !policy.Known(n.Policy):
		return result{}, fmt.Errorf("model: settings %+v need a newer binary", n)
	}
	if differ && w.change.state == perhapsChanging {
		code, _, err := meta.DecodeCode(raw)
		if err != nil {
			return result{}, w.violation("results decode", "a code", raw)
		}
		if w.change.state = changing; code == 0 {
			w.changeEnds()
		}
	}
	if differ && w.change.state == changing {
		return refused(protocol.CodeBusy), nil
	}
	w.settings = n
	if differ {
		w.change = policyChange{state: changing, holds: !slices.Contains(offersAll, old.Policy)}
		for _, e := range w.held() {
			if e.old = !e.hard(); e.old {
				w.change.lo++
				w.change.hi++
			}
			w.ordered = false
		}
		w.changeMayEnd()
	}
	return result{}, nil
}

// clear kills what a CLEAR names: sweeps remove it.
func (w *world) clear(s *session, c *meta.Clear) result {
	kills := func(*entry) bool { return true }
	var code protocol.Code
	switch {
	case c.All:
		if s != nil {
			kills = func(e *entry) bool { return e.ctx.Tenant == s.tenant }
			code = w.clearing(meta.Context{Tenant: s.tenant}, nil)
		}
	case len(c.Prefix) > protocol.MaxKeyBytes, len(c.Prefix) > 0 && !tenantAlone(c.Context):
		return refused(protocol.CodeBadRequest)
	case len(c.Prefix) > 0:
		want := meta.Context{}
		if c.Context != nil {
			want.Tenant = c.Context.Tenant
		}
		code = w.clearing(ofTenant(want, s), c.Prefix)
		kills = func(e *entry) bool { return e.hasPrefix(c.Prefix) && reaches(s, c.Context, e.ctx.Tenant) }
	case c.Context != nil:
		code = w.clearing(ofTenant(*c.Context, s), nil)
		kills = func(e *entry) bool {
			return (s == nil || e.ctx.Tenant == s.tenant) && e.ctx.matches(c.Context, s != nil)
		}
	default:
		return refused(protocol.CodeBadRequest)
	}
	if code != 0 {
		return refused(code)
	}
	for _, e := range w.held() {
		e.cleared = e.cleared || kills(e)
	}
	w.startSweep()
	return result{}
}

// clearing is a CLEAR of a tenant ("" = of all) for which so many slots have yet to be looked at.
type clearing struct {
	tenant string
	left   uint64
}

// clearing notes a CLEAR that a sweep has to carry out. There are so many at a time, of which none says the same as another.
func (w *world) clearing(want meta.Context, prefix []byte) protocol.Code {
	key, ofTenant := fmt.Sprintf("%+v %x", want, prefix), 0
	for _, x := range w.marks {
		if x.tenant == want.Tenant {
			ofTenant++
		}
	}
	switch {
	case len(w.held()) == 0:
		return 0
	case w.marks[key] == nil && (len(w.marks) >= meta.MaxClearMarks || want.Tenant != "" && ofTenant >= meta.MaxTenantMarks):
		return protocol.CodeBusy
	}
	w.marks[key] = &clearing{want.Tenant, uint64(len(w.entries))}
	return 0
}

// ofTenant is what a command of a session names: its own tenant, whatever it says.
func ofTenant(want meta.Context, s *session) meta.Context {
	if s != nil {
		want.Tenant = s.tenant
	}
	return want
}

// tenantAlone reports whether a context names nothing but perhaps a tenant, which is all that goes with a prefix.
func tenantAlone(c *meta.Context) bool {
	return c == nil || len(c.Tenant) <= protocol.MaxNameBytes &&
		c.Model == "" && c.LoRA == "" && c.Salt == "" && c.BlockSize == 0 && c.Seed == 0
}

// reaches reports whether a CLEAR by prefix concerns a tenant: a session's concerns its own, an operator's all, or the
// one that it names.
func reaches(s *session, named *meta.Context, tenant string) bool {
	switch {
	case s != nil:
		return tenant == s.tenant
	case named == nil:
		return true
	default:
		return named.Tenant == "" || named.Tenant == tenant
	}
}

// matches reports whether a context has what is given of another. A session's commands reach its own tenant only,
// whatever they name.
func (c *context) matches(want *meta.Context, ownTenant bool) bool {
	return (ownTenant || want.Tenant == "" || want.Tenant == c.Tenant) && (want.Model == "" || want.Model == c.Model) &&
		(want.LoRA == "" || want.LoRA == c.LoRA) && (want.Salt == "" || want.Salt == c.Salt) &&
		(want.BlockSize == 0 || want.BlockSize == c.BlockSize) && (want.Seed == 0 || want.Seed == c.Seed)
}

// startSweep has every slot looked at once from here on.
func (w *world) startSweep() { w.sweepLeft = uint64(len(w.entries)) }

// maxGuessed bounds the sweeps of one log entry that are guessed about, since every one doubles the possibilities. The
// leader logs one at a time.
const maxGuessed = 4

// guesses returns the highest guess about the sweeps of a group: a bit for each says that the policy that is being
// replaced holds back all that it has, so that a sweep over all slots starts.
func (w *world) guesses(g *meta.Group) uint64 {
	holds := w.change.state != notChanging && w.change.holds
	n := 0
	for i := range g.Commands {
		switch g.Commands[i].Command.(type) {
		case *meta.SetSettings:
			holds = holds || !slices.Contains(offersAll, w.settings.Policy)
		case *meta.Sweep:
			n++
		}
	}
	if !holds {
		return 0
	}
	return 1<<min(n, maxGuessed) - 1
}

// sweep looks at the next slots and removes the entries that are dead.
func (w *world) sweep(c *meta.Sweep, raw []byte) result {
	w.sweepPolicies(int(min(c.Limit, meta.MaxChorePerCommand)))
	w.sweeps++
	dropped, looked := uint64(0), uint64(0)
	for range c.Limit {
		if w.sweepLeft == 0 || dropped >= meta.MaxChorePerCommand {
			break
		}
		w.sweepLeft--
		looked++
		if w.sweepAt >= uint64(len(w.entries)) {
			w.sweepAt = 0
		}
		e := w.entries[w.sweepAt]
		w.sweepAt++
		switch {
		case e == nil:
		case w.over(e):
			w.drop(e, w.death(e), true)
			dropped++
			for _, l := range e.at {
				w.emptied(l.region)
			}
		default:
			dropped += w.prune(e)
		}
	}
	for key, x := range w.marks {
		if x.left -= min(x.left, looked); x.left == 0 {
			delete(w.marks, key)
		}
	}
	return result{value: meta.CountResult{Count: dropped, Left: w.sweepLeft + w.seenMoving(raw)}}
}

// sweepPolicies works out how many entries are left to go over to the pool's policy, before slots are looked at.
func (w *world) sweepPolicies(limit int) {
	ch := &w.change
	if ch.state == notChanging {
		return
	}
	ch.lo = max(ch.lo-limit, 0)
	switch {
	case !ch.holds:
		ch.hi = max(ch.hi-limit, 0)
	case limit == 0 || ch.hi == 0:
	case w.sweepLeft == 0 && !w.guessed():
		ch.hi-- // each partition that holds entries has moved one
	default:
		w.changeMayEnd()
		if w.sweepLeft == 0 {
			w.startSweep()
		}
		ch.lo = 0 // those that are looked at go over as well
		return
	}
	w.changeMayEnd()
}

// guessed returns the guess about the present sweep.
func (w *world) guessed() bool {
	bit := uint64(1) << w.sweeps
	w.asked |= bit
	return w.guess&bit != 0
}

// seenMoving returns how many entries must be left to go over: what the result says, if that is possible.
func (w *world) seenMoving(raw []byte) uint64 {
	ch := &w.change
	if ch.state == notChanging {
		return 0
	}
	seen := -1
	if _, body, err := meta.DecodeCode(raw); err == nil {
		if r, err := meta.DecodeCount(body); err == nil {
			seen = int(r.Left - w.sweepLeft)
		}
	}
	switch lo, hi := max(ch.lo, 1), max(ch.hi, 1); { // until a sweep has found that it is over, one is left
	case seen == 0 && ch.state == perhapsChanging:
		w.changeEnds()
	case seen < lo || seen > hi:
		return uint64(lo)
	default:
		ch.state = changing
		ch.hi = min(seen, ch.hi)
		if seen > 1 { // 1 is also said of none
			ch.lo = seen
		}
	}
	return uint64(max(seen, 0))
}
