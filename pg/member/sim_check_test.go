package member

import (
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	simSeeds = flag.Int("sim.seeds", 150, "seeds of TestSimulation")
	simFirst = flag.Uint64("sim.first", 1, "the first of them")
	simTrace = flag.Bool("sim.trace", false, "tell what happens, of one seed best")
)

// checkRecord: epochs of committed views grow, and none is committed twice with another content.
func (s *sim) checkRecord(value []byte) {
	r, err := decodeRecord(value)
	if err != nil {
		s.failf("the view record: %v", err)
		return
	}
	v := r.Committed
	if v.Epoch == 0 {
		return
	}
	if old, ok := s.views[v.Epoch]; ok {
		if !reflect.DeepEqual(old, v) {
			s.failf("epoch %d was committed twice: %+v and %+v", v.Epoch, old, v)
		}
		return
	}
	if v.Epoch <= s.latest {
		s.failf("epoch %d was committed after %d", v.Epoch, s.latest)
	}
	if old := s.views[s.latest]; v.StartSeq < old.StartSeq {
		s.failf("view %d begins at %d, the one before at %d", v.Epoch, v.StartSeq, old.StartSeq)
	}
	s.latest = v.Epoch
	s.views[v.Epoch] = v
}

// checkView: who adopts a view adopts one that was committed, with the content that it has, and in the order of epochs.
func (p *proc) checkView(v View) {
	was, ok := p.s.views[v.Epoch]
	if n := len(p.adopted); !ok || n > 0 && p.adopted[n-1] >= v.Epoch {
		p.s.failf("%v adopts view %d after %v", p, v.Epoch, p.adopted)
	}
	if was.StartSeq != v.StartSeq || !was.Active.Equal(v.Active) || v.Phase != PhaseCommit {
		p.s.failf("%v adopts another view %d: %+v, not %+v", p, v.Epoch, v, was)
	}
	for _, m := range v.Members {
		if !was.Has(m.Rank, m.Incarnation) {
			p.s.failf("%v adopts view %d with %+v", p, v.Epoch, m)
		}
	}
}

// checkWins: nobody has completed an operation in one view that somebody else has in a later one; apart from those whom a view has
// left out between: of what they did alone nobody knows.
func (s *sim) checkWins() {
	for seq, wins := range s.wins {
		for _, a := range wins {
			for _, b := range wins {
				if a.epoch < b.epoch && !s.leftOut(a.p, a.epoch, b.epoch) {
					s.failf("operation %d was completed by %v in view %d and by %v in view %d", seq, a.p, a.epoch, b.p, b.epoch)
				}
			}
		}
	}
}

// leftOut reports whether a view after one epoch, up to another one, was without a process.
func (s *sim) leftOut(p *proc, after, to uint64) bool {
	for epoch := after + 1; epoch <= to; epoch++ {
		if v, ok := s.views[epoch]; ok && !v.Has(p.slot, p.inc) {
			return true
		}
	}
	return false
}

// checkCalls: every call is answered in its time.
func (s *sim) checkCalls() {
	for _, p := range s.alive() {
		for id, c := range p.calls {
			if !c.over && c.kind != callJoin && s.now-c.at > SyncTimeout+ConnectLimit+HoldLimit {
				s.failf("%v: call %d of kind %d has no answer after %v", p, id, c.kind, s.now-c.at)
			}
		}
	}
}

// checkSettled: all who live are in one view, which is in force everywhere, and its operations go on.
func (s *sim) checkSettled() {
	r, _ := decodeRecord(s.store[keyView].value)
	if r.Proposed != nil {
		s.failf("a proposal is left: %+v", r.Proposed)
	}
	v := r.Committed
	before := map[*proc]uint64{}
	for _, p := range s.alive() {
		if !v.Has(p.slot, p.inc) || !p.core.member || p.core.view.Epoch != v.Epoch {
			s.failf("%v is not in view %d %v: it is in %d (member %v, isolated %v, lost %v), row %s", p, v.Epoch, v.Members,
				p.core.view.Epoch, p.core.member, p.core.isolated, p.core.lost, encode(p.core.saying()))
		}
		before[p] = p.done
	}
	if live := len(s.alive()); len(v.Members) != live {
		s.failf("view %d has %v, but %d live", v.Epoch, v.Members, live)
	}
	s.pace = 1
	works := func(p *proc) bool { return p.done > before[p] && p.viewOf(p.done-1).Epoch == v.Epoch }
	for range 20 { // those who are behind have operations of the views before to complete
		if s.run(time.Second); !slices.ContainsFunc(s.alive(), func(p *proc) bool { return !works(p) }) {
			return
		}
	}
	for _, p := range s.alive() {
		if !works(p) {
			s.failf("%v does nothing in view %d: done %d, then %d, next %d, op %+v", p, v.Epoch, before[p], p.done, p.seq, p.op)
		}
	}
}

// settled reports whether all who live are members, and nobody waits for anything.
func (s *sim) settled() bool {
	r, _ := decodeRecord(s.store[keyView].value)
	for _, p := range s.alive() {
		if !p.core.member || !r.Committed.Has(p.slot, p.inc) || p.core.view.Epoch != r.Committed.Epoch || len(p.core.requests) > 0 {
			return false
		}
	}
	return r.Proposed == nil && len(r.Committed.Members) == len(s.alive())
}

// simulate is one seed: chaos, then peace.
func simulate(seed uint64, trace bool) (log string, err error) {
	s := newSim(seed, spec{})
	founders := 2 + s.rng.IntN(5)
	s.spec = spec{Founders: founders, Cap: founders + s.rng.IntN(3), AutoDeactivate: true, AutoSync: true, Retry: s.rng.IntN(2) == 0}
	switch s.rng.IntN(4) {
	case 0:
		s.spec.AutoDeactivate, s.spec.AutoSync = false, false
	case 1:
		s.spec.AutoSync = false
	}
	for i := range s.spec.Cap {
		s.spec.Ranks = append(s.spec.Ranks, i+10)
	}
	if trace {
		s.trace = &strings.Builder{}
		s.logf("%+v", s.spec)
	}
	s.faults = s.rng.IntN(3) > 0
	for slot := range founders {
		s.after(s.between(0, 200*time.Millisecond), func() { s.spawn(slot) })
	}
	s.run(2 * time.Second)
	for range 5 + s.rng.IntN(25) {
		s.mischief()
		s.run(s.between(0, 2*time.Second))
	}
	s.recover()
	s.run(9 * time.Second) // stopped ones go on
	if len(s.views) == 0 || len(s.alive()) == 0 {
		return fmt.Sprint(s.trace), s.fault
	}
	for range 60 { // some leases end only now, and calls may take their time
		for range 3 {
			s.run(2 * time.Second)
			if s.settled() {
				break
			}
			for _, p := range s.alive() {
				p.start(callSync)
			}
		}
		if s.settled() {
			break
		}
		s.rejoin()
	}
	if s.fault == nil {
		s.checkSettled()
	}
	s.checkWins()
	s.checkCalls()
	return fmt.Sprint(s.trace), s.fault
}

// TestSimulation runs many short lives of groups in which anything may happen; see sim.mischief.
func TestSimulation(t *testing.T) {
	t.Parallel()
	for seed := *simFirst; seed < *simFirst+uint64(*simSeeds); seed++ {
		log, err := simulate(seed, *simTrace)
		if *simTrace {
			t.Log(log)
		}
		require.NoErrorf(t, err, "seed %d: see it with -sim.first=%d -sim.seeds=1 -sim.trace -v", seed, seed)
	}
}
