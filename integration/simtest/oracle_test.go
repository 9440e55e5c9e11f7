package simtest

import (
	"errors"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// TestOraclesFail feeds each oracle what it must not accept, and what it must.
func TestOraclesFail(t *testing.T) {
	checkOracles(t, map[string]lie{
		"another entry at an index": {
			"log",
			func(s *sim) { s.committed(&member{id: 1}, 2, 2, nil); s.committed(&member{id: 2}, 2, 3, nil) },
			func(s *sim) { s.committed(&member{id: 1}, 2, 2, nil); s.committed(&member{id: 2}, 2, 2, nil) },
		},
		"an entry is left out": {
			"log",
			func(s *sim) { s.committed(&member{id: 1}, 2, 2, nil); s.committed(&member{id: 1}, 4, 2, nil) },
			func(s *sim) { s.committed(&member{id: 1}, 2, 2, nil); s.committed(&member{id: 1}, 3, 2, nil) },
		},
		"another state at an index": {
			"hash",
			func(s *sim) { s.committed(&member{}, 2, 2, nil); s.compareState(&member{}, 2, 77) },
			func(s *sim) { s.committed(&member{}, 2, 2, nil); s.compareState(&member{}, 2, s.log.entries[0].state) },
		},
		"a state ahead of the log": {
			"hash",
			func(s *sim) { s.compareState(&member{}, 9, 1) },
			func(*sim) {},
		},
		"the model disagrees": {
			"model",
			func(s *sim) { s.log.model = contrary{}; s.committed(&member{}, 2, 2, nil) },
			func(s *sim) { s.committed(&member{}, 2, 2, nil) },
		},
		"two leaders in a term": {
			"leader",
			func(s *sim) { s.leads(&member{id: 1}, 5); s.leads(&member{id: 2}, 5) },
			func(s *sim) { s.leads(&member{id: 1}, 5); s.leads(&member{id: 2}, 6) },
		},
		"an acknowledgement without an entry": {
			"once",
			func(s *sim) { answerRegister(s, false, true) },
			func(s *sim) { answerRegister(s, true, true) },
		},
		"an answer that is not the result": {
			"once",
			func(s *sim) { answerRegister(s, true, false) },
			func(s *sim) { answerRegister(s, true, true) },
		},
		"two answers": {
			"once",
			func(s *sim) { answerRegister(s, true, true); answerRegister(s, true, false) },
			func(s *sim) { answerRegister(s, true, true); answerRegister(s, true, true) },
		},
		"a canceled request was carried out": {
			"once",
			func(s *sim) { answerRegister(s, true, true); s.canceled(1, 1) },
			func(s *sim) { answerRegister(s, true, true); s.canceled(1, 2) },
		},
		"an entry that nobody registered": {
			"durable",
			func(s *sim) { s.log.keys[s.keys[0]] = keyRecord{}; s.log.tally(nil) },
			func(s *sim) { s.log.keys[s.keys[0]] = keyRecord{}; s.log.tally(map[string]int64{s.keys[0]: 0}) },
		},
		"a page is written under a lease": {
			"lease",
			func(s *sim) { lendAndWrite(s, 100*ms, 0) },
			func(s *sim) { lendAndWrite(s, 100*ms, 200*ms) },
		},
		"a page is written under a lease that was renewed": {
			"lease",
			func(s *sim) { lendAndRenew(s, 250*ms) },
			func(s *sim) { lendAndRenew(s, 350*ms) },
		},
		"two owners": {
			"owner",
			func(s *sim) { a, _ := own(s, 1, 0, 4); own(s, 2, 3, 4); _ = a },
			func(s *sim) { own(s, 1, 0, 4); own(s, 2, 4, 4) },
		},
		"a write into what another owns": {
			"owner",
			func(s *sim) {
				c, r := own(s, 1, 0, 4)
				r.hold.end()
				own(s, 2, 0, 4)
				s.write(c, r, 1, stamp{key: "a"})
			},
			func(s *sim) { c, r := own(s, 1, 0, 4); s.write(c, r, 1, stamp{key: "a"}) },
		},
		"wrong bytes": {
			"bytes",
			func(s *sim) { s.accepted(&client{}, "a", []stamp{{key: "a", version: 1}, {key: "a", version: 2}}) },
			func(s *sim) { s.accepted(&client{}, "a", []stamp{{key: "a", version: 1}, {key: "a", version: 1}}) },
		},
		"bytes of another key": {
			"bytes",
			func(s *sim) { s.accepted(&client{}, "a", []stamp{{key: "b", version: 1}}) },
			func(s *sim) { s.accepted(&client{}, "a", []stamp{{key: "a", version: 1}}) },
		},
		"pushes out of order": {
			"push",
			func(s *sim) { x := &clientConn{}; s.pushes.freed(x, freed(2)); s.pushes.freed(x, freed(1)) },
			func(s *sim) { x := &clientConn{}; s.pushes.freed(x, freed(1)); s.pushes.freed(x, freed(2)) },
		},
		"a push that comes twice": {
			"push",
			func(s *sim) { x := &clientConn{}; s.pushes.freed(x, freed(2)); s.pushes.freed(x, freed(2)) },
			func(s *sim) { s.pushes.freed(&clientConn{}, freed(2)); s.pushes.freed(&clientConn{}, freed(2)) },
		},
		"a page that is freed twice": {
			"push",
			func(s *sim) { s.pushes.freed(&clientConn{}, freed(2, 7, 7)) },
			func(s *sim) { s.pushes.freed(&clientConn{}, freed(2, 7, 8)) },
		},
		"a REVOKE after its answer": {
			"push",
			func(s *sim) {
				x := &clientConn{}
				s.pushes.revoked(x, 1, 1)
				s.pushes.revoke(x, &protocol.RevokePush{RegionID: 1, Epoch: 1})
			},
			func(s *sim) {
				x := &clientConn{}
				s.pushes.revoked(x, 1, 1)
				s.pushes.revoke(x, &protocol.RevokePush{RegionID: 1, Epoch: 2})
			},
		},
		"what never happens": {
			"liveness",
			func(s *sim) { s.await("it happens", sec, func() bool { return false }) },
			func(s *sim) { s.await("it happens", sec, func() bool { return s.now > sec/2 }) },
		},
	})
}

// lie is what an oracle must not accept, and something like it that it must.
type lie struct {
	oracle    string
	bad, good func(s *sim)
}

func checkOracles(t *testing.T, lies map[string]lie) {
	t.Helper()
	for name, c := range lies {
		t.Run(name, func(t *testing.T) {
			bubble(t, func() {
				s := newSim(options{seed: 1})
				c.bad(s)
				require.NotNil(t, s.violation)
				require.Equal(t, c.oracle, s.violation.oracle, s.violation.text)
				s.end()
				s = newSim(options{seed: 1})
				c.good(s)
				require.Nil(t, s.violation)
				s.end()
			})
		})
	}
}

// contrary is a model that agrees with nothing.
type contrary struct{}

// Apply implements reference.
func (contrary) Apply(uint64, []byte, *meta.Results) error { return errors.New("no") }

// answerRegister answers request 1 of session 1, which registered a key, after it was committed or not.
func answerRegister(s *sim, committed, isNew bool) {
	m := &mutation{typ: protocol.TypeBatchRegister}
	if s.questions[seqKey{1, 1}] == nil {
		s.asked(1, 1, m)
	}
	if committed {
		s.log.answers[seqKey{1, 1}] = answer{kind: meta.KindRegister, result: []byte{0, 1, 0}} // OK, one entry, new
	}
	r := protocol.RegisterReply{Success: true, Results: []protocol.RegisterResult{{IsNew: isNew}}}
	s.answered(1, 1, m, &protocol.Error{}, r.AppendAs(nil, protocol.TypeBatchRegister))
}

// own gives pages to a client.
func own(s *sim, n int, from, pages uint64) (*client, *cregion) {
	c := &client{s: s, n: n, clock: clock{s: s}}
	r := &cregion{id: uint64(n), offset: from * pageSize, length: pages * pageSize, mem: s.devices[0].mem, state: make([]byte, pages)}
	r.hold = s.hold(c, r)
	return c, r
}

// lendAndWrite has a page read under a lease, and written after a while.
func lendAndWrite(s *sim, lease, after int64) {
	owner, r := own(s, 1, 0, 4)
	reader := &client{s: s, n: 2, clock: clock{s: s}}
	s.leaseBegins(reader, r.mem, 1, 1, reader.clock.Boottime()+lease, "a")
	s.now += after
	s.write(owner, r, 1, stamp{key: "b"})
}

// lendAndRenew has a page read under a lease of 200 ms that is renewed after half of it, and written some time after it
// began.
func lendAndRenew(s *sim, after int64) {
	owner, r := own(s, 1, 0, 4)
	reader := &client{s: s, n: 2, clock: clock{s: s}}
	l := s.leaseBegins(reader, r.mem, 1, 1, reader.clock.Boottime()+200*ms, "a")
	s.now += 100 * ms
	s.leaseRenewed(l, reader.clock.Boottime()+200*ms)
	s.now += after - 100*ms
	s.write(owner, r, 1, stamp{key: "b"})
}

func freed(id uint64, offsets ...uint64) *protocol.FreedPush {
	p := &protocol.FreedPush{ID: id}
	for _, o := range offsets {
		p.Pages = append(p.Pages, protocol.Page{RegionID: 1, KVOffset: o})
	}
	return p
}

// TestHistoriesThatNoOrderExplains feeds the oracle of order.
func TestHistoriesThatNoOrderExplains(t *testing.T) {
	type step struct {
		from, to int64
		in       input
		out      output
	}
	put := func(from, to int64, v uint64, done bool) step {
		return step{from, to, input{opPut, "k", v}, output{done: done, version: v}}
	}
	get := func(from, to int64, v uint64) step {
		return step{from, to, input{opGet, "k", 0}, output{done: v != 0, version: v}}
	}
	system := func(at int64, kind opKind) step { return step{at, at, input{kind, "k", 0}, output{done: true}} }
	for name, c := range map[string]struct {
		want  porcupine.CheckResult
		steps []step
	}{
		"a value is read":                    {porcupine.Ok, []step{put(1, 2, 7, true), get(3, 4, 7)}},
		"an acknowledged value is gone":      {porcupine.Illegal, []step{put(1, 2, 7, true), get(3, 4, 0)}},
		"it was dropped by the system":       {porcupine.Ok, []step{put(1, 2, 7, true), {2, 3, input{opDrop, "k", 0}, output{done: true}}, get(3, 4, 0)}},
		"a drop of nothing":                  {porcupine.Illegal, []step{{2, 3, input{opDrop, "k", 0}, output{done: true}}}},
		"an old value after a new one":       {porcupine.Illegal, []step{put(1, 2, 7, true), {3, 4, input{opDelete, "k", 0}, output{done: true}}, put(5, 6, 8, true), get(7, 8, 7)}},
		"two stores of one key":              {porcupine.Illegal, []step{put(1, 2, 7, true), put(3, 4, 8, true)}},
		"an unknown store may have happened": {porcupine.Ok, []step{{1, 1 << 60, input{opPut, "k", 7}, output{unknown: true}}, get(3, 4, 7)}},
		"or not":                             {porcupine.Ok, []step{{1, 1 << 60, input{opPut, "k", 7}, output{unknown: true}}, get(3, 4, 0)}},
		"but not both in turn":               {porcupine.Illegal, []step{{1, 1 << 60, input{opPut, "k", 7}, output{unknown: true}}, get(3, 4, 7), get(5, 6, 0)}},
		"a value is hidden, and back":        {porcupine.Ok, []step{put(1, 2, 7, true), system(3, opHide), get(4, 5, 0), system(6, opBack), get(7, 8, 7)}},
		"it is hidden, and read":             {porcupine.Illegal, []step{put(1, 2, 7, true), system(3, opHide), get(4, 5, 7)}},
		"it is back, and was not hidden":     {porcupine.Illegal, []step{put(1, 2, 7, true), system(3, opDrop), system(4, opBack)}},
		"it is replaced while it is hidden":  {porcupine.Ok, []step{put(1, 2, 7, true), system(3, opHide), put(4, 5, 8, true), get(6, 7, 8)}},
		"EXISTS of what is not":              {porcupine.Illegal, []step{{3, 4, input{opExists, "k", 0}, output{done: true}}}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLinear(&sim{sched: newSched(), cover: newCoverage()})
			for i, x := range c.steps {
				op := &operation{over: true}
				op.ClientId, op.Call, op.Return, op.Input, op.Output = i, x.from, x.to, x.in, x.out
				l.ops = append(l.ops, op)
			}
			require.Equal(t, c.want, l.check())
		})
	}
}

// TestFailuresAreMadeSmaller has a failure that needs one class and two of its faults.
func TestFailuresAreMadeSmaller(t *testing.T) {
	o := options{seed: 1, ticks: 1000, faults: allClasses}
	fails := func(o options) (result, bool) {
		r := result{violation: &violation{oracle: "x", at: 50 * tick}, fired: 20, faults: o.faults, ticks: o.ticks}
		return r, o.faults.has(powerLoss) && !o.skip[3] && !o.skip[17] && o.ticks > 40
	}
	first, ok := fails(o)
	require.True(t, ok)
	small, _ := shrink(o, first, fails, func() bool { return true })
	require.Equal(t, classSet(0).with(powerLoss), small.faults)
	require.Equal(t, 51, small.ticks)
	require.Len(t, small.skip, 18)
	require.Contains(t, small.line("abc"), "-seed=1 -ticks=51 -faults=power-loss -skip=1,2,4,")
}

// TestWhatIsOverDoesNotComeBack has an entry end by time: before the log says so, but for good.
func TestWhatIsOverDoesNotComeBack(t *testing.T) {
	for want, seen := range map[porcupine.CheckResult][]bool{
		porcupine.Ok:      {true, false, false},
		porcupine.Illegal: {true, false, true},
	} {
		l := newLinear(&sim{sched: newSched(), cover: newCoverage(), mix: mix{policy: "ttl"}})
		do := func(kind opKind, out output) {
			op := l.begin(&client{}, kind, "k", 7)
			l.s.now++
			l.end(op, out)
			l.s.now++
		}
		do(opPut, output{done: true, version: 7})
		for _, found := range seen {
			do(opExists, output{done: found})
		}
		l.drop("k", l.s.now, 0)
		require.Equal(t, want, l.check(), "%v", seen)
	}
}
