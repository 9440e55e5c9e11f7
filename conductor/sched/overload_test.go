package sched

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// modes schedules the same request in all three modes after prepare, and wants it accepted or not.
func modes(t *testing.T, cfg Config, r Request, now time.Duration, prepare func(*Scheduler), want map[Overload]Reason) {
	t.Helper()
	for _, mode := range []Overload{None, Early, Predictive} {
		cfg.Overload = mode
		s := newScheduler(t, cfg)
		prepare(s)
		d := s.Schedule(now, &r)
		assert.Equal(t, want[mode], d.Reason, "%s: %s", mode, d.Explain())
	}
}

// Stage 1 of the arXiv report's figure 10: nothing is decoded yet, much is being prefilled. Early rejection sees no load and
// accepts; the prediction sees what will be there.
func TestPredictionSeesWhatIsBeingPrefilled(t *testing.T) {
	cfg := Config{Classes: map[string]Limits{"": {TBTSLO: ms(20)}}, DecodeTime: 100 * time.Second} // 10 sequences, less their KV
	prepare := func(s *Scheduler) {
		cluster(t, s, 1, 1)
		for i := range 10 {
			require.True(t, s.Schedule(0, &Request{ID: uint64(i), Input: 10}).Accepted || s.cfg.Overload == Predictive)
		}
	}
	modes(t, cfg, Request{ID: 100, Input: 10}, 0, prepare, map[Overload]Reason{Predictive: ReasonLoad})
}

// Stage 2: much is decoded, but will be done by the time that this request's prefill is. Early rejection rejects it, though
// it would find the decode instance idle.
func TestPredictionSeesWhatWillBeDecoded(t *testing.T) {
	cfg := Config{Classes: map[string]Limits{"": {TBTSLO: ms(20)}}, DecodeTime: 5 * time.Second}
	prepare := func(s *Scheduler) {
		cluster(t, s, 1, 1)
		for i := range 9 {
			serve(t, s, 0, Request{ID: uint64(i), Input: 10})
		}
	}
	r := Request{ID: 100, Input: 2000} // prefilled after 2 s
	modes(t, cfg, r, 2*time.Second, prepare, map[Overload]Reason{Early: ReasonTBT, Predictive: ReasonLoad})
	modes(t, cfg, r, 4*time.Second, prepare, map[Overload]Reason{Early: ReasonTBT})
}

// A hint of the answer's length stands in for t_d: with answers of 10 tokens the batch is soon done, with ones of 10,000 it is
// not, whatever t_d is.
func TestPredictionTakesHints(t *testing.T) {
	for _, x := range []struct {
		output     int
		decodeTime time.Duration
		want       Reason
	}{
		{10, 20 * time.Second, Accepted}, {1000, time.Second, ReasonLoad},
	} {
		s := newScheduler(t, Config{Classes: map[string]Limits{"": {TBTSLO: ms(20)}}, DecodeTime: x.decodeTime})
		cluster(t, s, 1, 1)
		for i := range 9 {
			serve(t, s, 0, Request{ID: uint64(i), Input: 10, Output: x.output})
		}
		d := s.Schedule(time.Second, &Request{ID: 100, Input: 2000})
		assert.Equal(t, x.want, d.Reason, "%d tokens: %s", x.output, d.Explain())
	}
}

// So does the distribution of a class's lengths, once it is known.
func TestPredictionLearnsLengths(t *testing.T) {
	for output, want := range map[int]Reason{10: Accepted, 1000: ReasonLoad} {
		s := newScheduler(t, Config{Classes: map[string]Limits{"": {TBTSLO: ms(20)}}, DecodeTime: 4 * time.Second})
		cluster(t, s, 1, 1)
		for i := range learned {
			serve(t, s, 0, Request{ID: uint64(1000 + i), Input: 10})
			s.DecodeDone(0, uint64(1000+i), output)
		}
		const later = time.Hour
		for i := range 9 {
			serve(t, s, later, Request{ID: uint64(i), Input: 10})
		}
		d := s.Schedule(later+3*time.Second, &Request{ID: 100, Input: 2000}) // t_d would have them done
		assert.Equal(t, want, d.Reason, "%d tokens: %s", output, d.Explain())
	}
}

// While a long prompt is computed, short ones come that are done before it: as many as lately did.
func TestPredictionSeesWhoOvertakes(t *testing.T) {
	load := func(each time.Duration) float64 {
		s := newScheduler(t, Config{Classes: map[string]Limits{"": {TBTSLO: ms(20)}}, DecodeTime: 10 * time.Second})
		cluster(t, s, 2, 1)
		now := time.Duration(0)
		for i := range 1000 {
			now += each
			serve(t, s, now, Request{ID: uint64(i), Input: 1, Output: 1})
			s.DecodeDone(now, uint64(i), 0)
		}
		return s.Schedule(now, &Request{ID: 5000, Input: 6000}).Load
	}
	alone := (10 + 1 + 6) / 20.0 // ms, of a step with it, over the limit
	assert.InDelta(t, alone+0.1*6/20, load(time.Hour), 0.002, "just now one in 10 s, of 1 ms a step, and that for 6 s")
	assert.InDelta(t, alone+0.5*6/20, load(2*time.Second), 0.02, "one every other second")
}

// Where a request is decoded is chosen by what it will find there: the instance with more of it now, if that will be done.
func TestDecodeChoiceForesees(t *testing.T) {
	for mode, want := range map[Overload]InstanceID{Early: 2, Predictive: 1} {
		s := newScheduler(t, Config{Overload: mode})
		cluster(t, s, 1, 2)
		for i := range 9 { // answers of 10 tokens at instance 1, of 1000 at instance 2, which has fewer
			d := serve(t, s, 0, Request{ID: uint64(i), Input: 10, Output: []int{10, 1000}[i%2]})
			require.Equal(t, InstanceID(1+i%2), d.Decode)
		}
		d := s.Schedule(0, &Request{ID: 100, Input: 2000}) // prefilled after 2 s
		assert.Equal(t, want, d.Decode, mode)
	}
}

// The baseline accepts by prefill alone, and rejects at the decode instance, with its load of then.
func TestRejectedAfterPrefill(t *testing.T) {
	for _, mode := range []Overload{None, Early} { // neither sees what is being prefilled
		s := newScheduler(t, Config{Overload: mode, Classes: map[string]Limits{"": {TBTSLO: ms(15)}}})
		cluster(t, s, 1, 1)
		for i := range 6 {
			require.True(t, s.Schedule(0, &Request{ID: uint64(i), Input: 10}).Accepted)
		}
		admitted := 0
		for i := range 6 {
			s.PrefillDone(ms(100), uint64(i), 0, -1)
			ok, why := s.AdmitDecode(ms(100), uint64(i))
			if ok {
				admitted++
				continue
			}
			assert.Equal(t, ReasonTBT, why)
			_, why = s.AdmitDecode(ms(100), uint64(i))
			assert.Equal(t, ReasonUnknown, why, "it is forgotten")
		}
		assert.Equal(t, 4, admitted, "a step of 5 would take 15 ms and their KV's time")
	}
}

func TestTTFTLimit(t *testing.T) {
	s := newScheduler(t, Config{Classes: map[string]Limits{"": {TTFTSLO: 2 * time.Second}, "batch": {}}})
	cluster(t, s, 1, 1)
	require.True(t, s.Schedule(0, &Request{ID: 1, Input: 1500}).Accepted)
	d := s.Schedule(0, &Request{ID: 2, Input: 600})
	assert.Equal(t, ReasonTTFT, d.Reason)
	assert.Equal(t, AtPrefill, d.Stage)
	assert.Equal(t, ms(2100), d.TTFT)
	assert.Contains(t, d.Explain(), "after 2.1s (queue 1.5s, transfer 0s, prefill 600ms), the limit is 2s")
	assert.Equal(t, time.Second, d.Wait())
	assert.True(t, s.Schedule(0, &Request{ID: 3, Input: 500}).Accepted, "the rejected one does not wait")
	assert.True(t, s.Schedule(0, &Request{ID: 4, Input: 9000, Class: "batch"}).Accepted, "its class has no limit")
	assert.False(t, s.Schedule(0, &Request{ID: 5, Input: 500, Class: "unheard of"}).Accepted, "it has the default class's")
}

// With twice the requests that can be served, half of each priority, the lower one is rejected.
func TestLowestPriorityIsRejectedFirst(t *testing.T) {
	rejected := func(headroom float64) (low, high int) {
		s := newScheduler(t, Config{
			Headroom: headroom, Classes: map[string]Limits{"low": {TTFTSLO: 10 * time.Second}, "high": {TTFTSLO: 10 * time.Second, Priority: 5}},
		})
		cluster(t, s, 1, 1)
		var running []uint64
		done := time.Duration(0)
		for i := range 1000 { // each of 1 s, one every 500 ms
			now := time.Duration(i) * ms(500)
			for ; len(running) > 0 && done <= now; running = running[1:] {
				s.PrefillDone(done, running[0], 0, -1)
				s.DecodeDone(done, running[0], 0)
				done += time.Second
			}
			class := []string{"low", "high"}[i/2%2]
			d := s.Schedule(now, &Request{ID: uint64(i), Class: class, Input: 1000})
			switch {
			case d.Accepted:
				if len(running) == 0 {
					done = now + time.Second
				}
				running = append(running, uint64(i))
			case class == "low":
				low++
			default:
				high++
			}
		}
		return low, high
	}
	low, high := rejected(0.2)
	assert.Less(t, high, 10)
	assert.Greater(t, low, 450)
	low, high = rejected(-1)
	assert.InDelta(t, low, high, 100, "without headroom they are rejected alike")
}

// Room is kept for those that ask, not for those that might.
func TestHeadroomIsForThoseWhoAsk(t *testing.T) {
	s := newScheduler(t, Config{Headroom: 0.1, Classes: map[string]Limits{"": {TTFTSLO: 10 * time.Second}}})
	cluster(t, s, 1, 1)
	limit := func(now time.Duration, priority int) time.Duration {
		d := s.Schedule(now, &Request{ID: 1, Input: 1, Priority: priority})
		return d.Limits.TTFTSLO.Round(time.Millisecond)
	}
	assert.Equal(t, 10*time.Second, limit(0, 0))
	assert.Equal(t, 10*time.Second, limit(0, 3))
	assert.Equal(t, 9*time.Second, limit(0, 0))
	assert.Equal(t, 10*time.Second, limit(0, 7))
	assert.Equal(t, 8100*time.Millisecond, limit(0, 1))
	assert.Equal(t, 10*time.Second, limit(headroomWindow+1, 0))
}

func TestNobodyToServe(t *testing.T) {
	s := newScheduler(t, Config{})
	assert.Equal(t, ReasonNoPrefill, s.Schedule(0, &Request{ID: 1, Input: 10}).Reason)
	cluster(t, s, 1, 0)
	assert.Equal(t, ReasonNoDecode, s.Schedule(0, &Request{ID: 1, Input: 10}).Reason)
	cluster(t, s, 0, 1)
	for _, r := range []Request{{}, {Input: -1}, {Input: maxInput + 1}, {Input: 1, Output: -1}, {Input: 1, BytesPerToken: -1}} {
		d := s.Schedule(0, &r)
		assert.Equal(t, ReasonInvalid, d.Reason)
		assert.NotEmpty(t, d.Explain())
	}
	assert.True(t, s.Schedule(0, &Request{ID: 1, Input: 10}).Accepted)
}

func TestEveryReasonIsExplained(t *testing.T) {
	for _, why := range []Reason{
		ReasonTTFT, ReasonTBT, ReasonLoad, ReasonFull, ReasonNoPrefill, ReasonNoDecode, ReasonBusy, ReasonUnknown, ReasonTooLong, ReasonInvalid,
	} {
		d := Decision{Reason: why}
		assert.Contains(t, d.Explain(), ": ", why)
		assert.Contains(t, why.Explain(), ": ", why)
	}
	assert.Empty(t, (&Decision{}).Explain())
	assert.Empty(t, Accepted.Explain())
}
