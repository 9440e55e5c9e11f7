package sched

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// serve schedules a request and has it decoded at once.
func serve(tb testing.TB, s *Scheduler, now time.Duration, r Request) Decision {
	tb.Helper()
	d := s.Schedule(now, &r)
	require.True(tb, d.Accepted, d.Explain())
	s.PrefillDone(now, r.ID, 0, -1)
	ok, why := s.AdmitDecode(now, r.ID)
	require.True(tb, ok, why)
	return d
}

// A step takes 10 ms, 1 ms a sequence and 1 us a token of KV: the instance with the least of it is chosen, not that with the
// fewest sequences, and what is still being prefilled for it counts.
func TestDecodeChoice(t *testing.T) {
	s := newScheduler(t, Config{Overload: Early})
	cluster(t, s, 1, 2)
	assert.Equal(t, InstanceID(1), serve(t, s, 0, Request{ID: 1, Input: 5000}).Decode)
	d := serve(t, s, 0, Request{ID: 2, Input: 100})
	assert.Equal(t, InstanceID(2), d.Decode)
	assert.Equal(t, 11*time.Millisecond+100*time.Microsecond, d.TBT)
	assert.Equal(t, InstanceID(2), serve(t, s, 0, Request{ID: 3, Input: 100}).Decode, "2 sequences of 100 tokens are less than 1 of 5000")
	first := s.Schedule(0, &Request{ID: 4, Input: 4900})
	second := s.Schedule(0, &Request{ID: 5, Input: 10})
	assert.Equal(t, InstanceID(2), first.Decode)
	assert.Equal(t, InstanceID(1), second.Decode, "though nothing of it is decoded there yet")
}

// KV grows by a token a sequence and step: 1 sequence of 0 tokens takes 11 ms a step.
func TestKVGrowsWithTheClock(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	serve(t, s, 0, Request{ID: 1, Input: 1})
	assert.Equal(t, 1, s.Load(0).KVTokens)
	assert.InDelta(t, 1+90, s.Load(time.Second).KVTokens, 2)
	for now := time.Second; now < 2*time.Second; now += time.Millisecond { // looking often loses no steps
		s.Load(now)
	}
	assert.InDelta(t, 1+181, s.Load(2*time.Second).KVTokens, 3)
	s.DecodeDone(2*time.Second, 1, 180)
	assert.Equal(t, 0, s.Load(2*time.Second).KVTokens)
}

func TestRoom(t *testing.T) {
	for _, x := range []struct {
		name     string
		instance Instance
		input    int
		want     Reason
	}{
		{"there is", Instance{KVCapacity: 1000, MaxBatch: 2}, 400, Accepted},
		{"not in the batch", Instance{KVCapacity: 1000, MaxBatch: 1}, 400, ReasonFull},
		{"not in the memory, with its answer", Instance{KVCapacity: 1000}, 550, ReasonFull},
		{"never", Instance{KVCapacity: 1000}, 1001, ReasonTooLong},
	} {
		for _, mode := range []Overload{None, Early, Predictive} {
			s := newScheduler(t, Config{Overload: mode})
			cluster(t, s, 1, 0)
			x.instance.Role = Decode
			add(t, s, x.instance)
			serve(t, s, 0, Request{ID: 1, Input: 400, Output: 100})
			d := s.Schedule(0, &Request{ID: 2, Input: x.input, Output: 100})
			if mode == None && x.want == ReasonFull { // only after prefill
				require.True(t, d.Accepted)
				ok, why := s.AdmitDecode(0, 2)
				assert.False(t, ok)
				assert.Equal(t, x.want, why)
				continue
			}
			assert.Equal(t, x.want, d.Reason, "%s, %s", x.name, mode)
			assert.NotEqual(t, d.Accepted, d.Reason != Accepted)
		}
	}
}

// A request without a limit does not make those that have one miss it.
func TestLimitsOfOthersAreKept(t *testing.T) {
	s := newScheduler(t, Config{Overload: Early, Headroom: -1, Classes: map[string]Limits{"chat": {TBTSLO: ms(12)}}})
	cluster(t, s, 1, 1)
	serve(t, s, 0, Request{ID: 1, Class: "chat", Input: 100})
	d := s.Schedule(0, &Request{ID: 2, Class: "batch", Input: 5000})
	assert.Equal(t, ReasonTBT, d.Reason)
	s.DecodeDone(0, 1, 10)
	serve(t, s, 0, Request{ID: 3, Class: "batch", Input: 5000})
	assert.Equal(t, ReasonTBT, s.Schedule(0, &Request{ID: 4, Class: "chat", Input: 100}).Reason)
}

// What an instance reports of its batch stands in for what was guessed, for a while.
func TestReportedBatch(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	serve(t, s, 0, Request{ID: 1, Input: 100})
	s.Report(0, 1, Report{Queue: -1, Batch: 5, KVTokens: 5000})
	l := s.Load(0)
	assert.Equal(t, 5, l.Batch)
	assert.Equal(t, 5000, l.KVTokens)
	assert.Equal(t, 1, l.Decoding)
	s.Report(0, 1, Report{Queue: -1, Batch: 0, KVTokens: 0})
	assert.Equal(t, 0, s.Load(0).Batch)
	assert.Equal(t, 1, s.Load(reportLife+1).Batch, "the report is old")
}

func TestMeasureTBT(t *testing.T) {
	upTo := func(n int) []time.Duration { // n, n-1, ... 1 ms
		gaps := make([]time.Duration, n)
		for i := range gaps {
			gaps[i] = ms(n - i)
		}
		return gaps
	}
	for _, x := range []struct {
		gaps []time.Duration
		want TBT
	}{
		{nil, TBT{}},
		{upTo(1), TBT{ms(1), ms(1)}},
		{upTo(9), TBT{ms(9), ms(9)}},
		{upTo(10), TBT{ms(10), ms(9)}},
		{upTo(11), TBT{10500 * time.Microsecond, ms(10)}}, // the longest 10% of 11 are 2, and of them 90% are 10
		{upTo(100), TBT{95500 * time.Microsecond, ms(90)}},
		{[]time.Duration{ms(1000), ms(10), ms(10), ms(10), ms(10), ms(10), ms(10), ms(10), ms(10), ms(10)}, TBT{ms(1000), ms(10)}},
	} {
		got := MeasureTBT(x.gaps)
		assert.Equal(t, x.want, got, "%d gaps", len(x.gaps))
		assert.Equal(t, got.MeanLongest10, got.Of(MeanLongest10))
		assert.Equal(t, got.P90, got.Of(P90))
	}
}

// The ratio of each measure to the mean step is learned, and the one that is configured is held against the limit.
func TestTBTLimit(t *testing.T) {
	for measure, accepted := range map[Measure]bool{MeanLongest10: false, P90: true} {
		s := newScheduler(t, Config{TBTLimit: measure, Overload: Early, Classes: map[string]Limits{"": {TBTSLO: ms(15)}}})
		cluster(t, s, 1, 1)
		for range 200 {
			s.Report(0, 1, Report{Queue: -1, Batch: 1, KVTokens: 1000, TBT: TBT{MeanLongest10: ms(24), P90: ms(12)}})
		}
		s.Report(0, 1, Report{Queue: -1, Batch: 0, KVTokens: 0})
		d := s.Schedule(0, &Request{ID: 1, Input: 1000})
		assert.Equal(t, accepted, d.Accepted, measure)
		assert.Equal(t, d.TBTs.Of(measure), d.TBT)
		assert.InDelta(t, 24e6, d.TBTs.MeanLongest10, 1e5)
		assert.InDelta(t, 12e6, d.TBTs.P90, 1e5)
	}
}
