package sched

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// empty checks that nothing is left of any request.
func empty(tb testing.TB, s *Scheduler) {
	tb.Helper()
	assert.Empty(tb, s.book.by)
	assert.Empty(tb, s.book.heap)
	assert.Zero(tb, s.prefilled)
	assert.Zero(tb, s.prefilledInputs)
	assert.Zero(tb, s.hinted.total)
	assert.Zero(tb, s.hinted.totalInputs)
	for i := range s.classes {
		a := &s.classes[i].ages
		assert.Zero(tb, a.total)
		assert.Zero(tb, a.totalInputs)
		assert.Equal(tb, [ageBuckets]int32{}, a.n)
		assert.Equal(tb, [ageBuckets]int64{}, a.inputs)
	}
	for i := range s.instances {
		x := &s.instances[i]
		d := x.decoding
		assert.Zero(tb, x.queue.len())
		assert.Zero(tb, x.queue.base)
		assert.Equal(tb, []any{0, int64(0), int64(0), int64(0), 0, int64(0), time.Duration(0)},
			[]any{d.batch, d.inputs, d.steps, d.starts, len(d.coming) + len(d.running), d.pendingTokens, d.strictest})
	}
}

// A request can end at any phase, and by silence; nothing is left of it.
func TestNothingIsLeft(t *testing.T) {
	cfg := Config{RequestTTL: time.Minute, Classes: map[string]Limits{"": {TBTSLO: time.Second}}}
	for name, end := range map[string]func(s *Scheduler, phase int){
		"done":      func(s *Scheduler, _ int) { s.DecodeDone(time.Second, 1, 10) },
		"forgotten": func(s *Scheduler, _ int) { s.Forget(time.Second, 1) },
		"silence":   func(s *Scheduler, _ int) { s.Load(time.Second + time.Minute) },
		"again":     func(s *Scheduler, _ int) { s.Schedule(time.Second, &Request{ID: 1, Input: -1}) },
		"removed":   func(s *Scheduler, phase int) { s.Remove(time.Second, InstanceID(min(phase, 1))) },
	} {
		for phase := range 3 {
			for _, output := range []int{0, 100} {
				s := newScheduler(t, cfg)
				cluster(t, s, 1, 1)
				require.True(t, s.Schedule(0, &Request{ID: 1, Input: 100, Output: output}).Accepted)
				if phase > 0 {
					s.PrefillDone(time.Second, 1, ms(100), -1)
				}
				if phase > 1 {
					ok, why := s.AdmitDecode(time.Second, 1)
					require.True(t, ok, why)
				}
				require.Len(t, s.book.by, 1)
				end(s, phase)
				t.Run(name, func(t *testing.T) { empty(t, s) })
			}
		}
	}
}

// What is heard of a request lets it live on.
func TestSilence(t *testing.T) {
	s := newScheduler(t, Config{RequestTTL: time.Minute})
	cluster(t, s, 1, 1)
	s.Schedule(0, &Request{ID: 1, Input: 100})
	s.PrefillDone(50*time.Second, 1, 0, -1)
	ok, _ := s.AdmitDecode(100*time.Second, 1)
	assert.True(t, ok)
	assert.Equal(t, 1, s.Load(159*time.Second).Decoding)
	assert.Equal(t, 0, s.Load(160*time.Second).Decoding)
}

// With instances that report nothing, prefills and decodes end when they are predicted to.
func TestPresume(t *testing.T) {
	s := newScheduler(t, Config{Presume: true})
	cluster(t, s, 1, 1)
	s.Schedule(0, &Request{ID: 1, Input: 1000, Output: 100})
	s.Schedule(0, &Request{ID: 2, Input: 1000, Output: 100})
	for _, x := range []struct{ at, prefilling, decoding int }{{900, 2, 0}, {1100, 1, 1}, {2100, 0, 2}, {2500, 0, 1}, {5000, 0, 0}} {
		l := s.Load(ms(x.at))
		assert.Equal(t, []int{x.prefilling, x.decoding}, []int{l.Prefilling, l.Decoding}, "at %d ms", x.at)
	}
	empty(t, s)
}

func TestBounds(t *testing.T) {
	s := newScheduler(t, Config{MaxRequests: 2, MaxInstances: 2})
	cluster(t, s, 1, 1)
	_, err := s.Add(Instance{Name: "n3"})
	require.ErrorIs(t, err, ErrInstance)
	require.ErrorContains(t, err, "n3")
	assert.True(t, s.Schedule(0, &Request{ID: 1, Input: 1}).Accepted)
	assert.True(t, s.Schedule(0, &Request{ID: 2, Input: 1}).Accepted)
	assert.Equal(t, ReasonBusy, s.Schedule(0, &Request{ID: 3, Input: 1}).Reason)
	assert.True(t, s.Schedule(0, &Request{ID: 2, Input: 1}).Accepted, "again: it takes its own place")
	s.DecodeDone(0, 1, 1)
	assert.True(t, s.Schedule(0, &Request{ID: 3, Input: 1}).Accepted)
	for _, bad := range []Instance{{Bandwidth: -1}, {KVCapacity: -1}, {MaxBatch: -1}, {Role: 4}} {
		_, err = s.Add(bad)
		require.ErrorIs(t, err, ErrInstance)
	}
}

// A removed instance's id is used again; reports of unknown ones are ignored.
func TestInstancesComeAndGo(t *testing.T) {
	s := newScheduler(t, Config{MaxInstances: 3})
	cluster(t, s, 2, 1)
	s.Schedule(0, &Request{ID: 1, Input: 100})
	s.Remove(0, 0)
	s.Remove(0, 0)
	s.SetRole(0, 0, Both)
	s.Report(0, 0, Report{Queue: time.Hour})
	s.Report(0, -1, Report{Queue: time.Hour})
	assert.Equal(t, InstanceID(1), s.Schedule(0, &Request{ID: 2, Input: 100}).Prefill)
	assert.Equal(t, InstanceID(0), add(t, s, Instance{Role: Prefill}))
	d := s.Schedule(0, &Request{ID: 3, Input: 100})
	assert.Equal(t, InstanceID(0), d.Prefill)
	assert.Zero(t, d.Queue)
}

// What an instance was given before it changed its role it still does.
func TestSetRole(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 2, 1)
	require.Equal(t, InstanceID(0), s.Schedule(0, &Request{ID: 1, Input: 1000}).Prefill)
	s.SetRole(0, 0, Decode)
	d := s.Schedule(0, &Request{ID: 2, Input: 10, Matches: []Match{{Instance: 0, Tokens: 10}}})
	assert.Equal(t, InstanceID(1), d.Prefill)
	assert.Equal(t, InstanceID(0), d.Decode, "its sibling has one to come")
	assert.Equal(t, 2, s.Load(0).Prefilling)
	s.SetRole(0, 1, Decode)
	assert.Equal(t, ReasonNoPrefill, s.Schedule(0, &Request{ID: 3, Input: 10}).Reason)
	s.PrefillDone(ms(1000), 1, 0, -1)
	ok, _ := s.AdmitDecode(ms(1000), 1)
	assert.True(t, ok)
}

func TestReportsOfUnknownRequests(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	s.PrefillDone(0, 9, ms(1), 0)
	s.TransferDone(0, 9, ms(1))
	s.DecodeDone(0, 9, 5)
	s.Forget(0, 9)
	ok, why := s.AdmitDecode(0, 9)
	assert.False(t, ok)
	assert.Equal(t, ReasonUnknown, why)
	serve(t, s, 0, Request{ID: 1, Input: 10})
	_, why = s.AdmitDecode(0, 1)
	assert.Equal(t, ReasonUnknown, why, "it is decoded already")
	s.PrefillDone(0, 1, ms(1), 0)
	assert.Equal(t, 1, s.Load(0).Decoding)
	s.DecodeDone(0, 1, 5)
	empty(t, s)
}

// The model learns from what is reported of requests.
func TestSchedulerLearns(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 2, 1)
	before := s.model.Transfer(1e6, roundBandwidth)
	for i := range 100 { // all twice as slow
		now := time.Duration(i) * time.Minute
		s.Report(now, 0, Report{Queue: time.Minute, Batch: -1})
		d := s.Schedule(now, &Request{ID: 1, Input: 2000, Matches: []Match{{Instance: 0, Tokens: 1000}}})
		require.Equal(t, InstanceID(0), d.TransferFrom)
		s.TransferDone(now, 1, 2*ms(200))
		s.PrefillDone(now, 1, 2*ms(1000), 1000)
		s.Report(now, 2, Report{Queue: -1, Batch: 10, KVTokens: 10_000, Step: ms(60)})
		s.DecodeDone(now, 1, 100)
	}
	assert.InEpsilon(t, 2, s.model.Prefill(2000, 1000).Seconds(), 0.02)
	assert.InEpsilon(t, 2*before.Seconds(), s.model.Transfer(1e6, roundBandwidth).Seconds(), 0.02)
	assert.InEpsilon(t, 0.060, s.model.Step(10, 10_000).Seconds(), 0.02)
	assert.InDelta(t, 100, s.classes[0].lengths.mean, 10)
}

func TestLoad(t *testing.T) {
	s := newScheduler(t, Config{Classes: map[string]Limits{"": {TTFTSLO: 10 * time.Second, TBTSLO: ms(100)}}})
	cluster(t, s, 2, 2)
	assert.Zero(t, s.Load(0))
	s.Report(0, 0, Report{Queue: 4 * time.Second, Batch: -1})
	s.Report(0, 2, Report{Queue: -1, Batch: 20, KVTokens: 20_000}) // a step of 50 ms
	l := s.Load(0)
	assert.InDelta(t, 0.2, l.Prefill, 1e-6)
	assert.InDelta(t, 0.4, l.PrefillMax, 1e-6)
	assert.InDelta(t, 0.25, l.Decode, 1e-6)
	assert.InDelta(t, 0.5, l.DecodeMax, 1e-6)
	assert.Equal(t, 2*time.Second, l.Queue)
	assert.Equal(t, ms(25), l.TBT.P90)
	assert.Equal(t, 20, l.Batch)
}

// An idle decode instance is to prefill when that side alone has been loaded for a while, and no second one at once.
func TestRebalance(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 2, 3)
	busy := func(now time.Duration) (InstanceID, Role, bool) {
		for i := range 2 {
			s.Report(now, InstanceID(i), Report{Queue: time.Minute, Batch: -1})
		}
		return s.Rebalance(now)
	}
	serve(t, s, 0, Request{ID: 1, Input: 10})
	_, _, ok := busy(0)
	assert.False(t, ok, "it may pass")
	_, _, ok = busy(flipAfter - 1)
	assert.False(t, ok)
	id, role, ok := busy(flipAfter)
	assert.True(t, ok)
	assert.Equal(t, InstanceID(3), id, "the first decodes something")
	assert.Equal(t, Prefill, role)
	s.SetRole(flipAfter, id, role)
	_, _, ok = busy(flipAfter + 1)
	assert.False(t, ok, "the effect is waited for")
	id, _, ok = busy(2 * flipAfter)
	assert.True(t, ok)
	assert.Equal(t, InstanceID(4), id)
	s.SetRole(2*flipAfter, id, Prefill)
	_, _, ok = busy(4 * flipAfter)
	assert.False(t, ok, "the last one stays")

	now := 4*flipAfter + 2*time.Minute // nobody waits any more
	_, _, ok = s.Rebalance(now)
	assert.False(t, ok)
	for ; now < 6*flipAfter+2*time.Minute; now += time.Second {
		s.Report(now, 2, Report{Queue: -1, Batch: 100, KVTokens: 100_000})
		id, role, ok = s.Rebalance(now)
	}
	assert.True(t, ok)
	assert.Equal(t, Decode, role)
	assert.Equal(t, InstanceID(0), id)
}
