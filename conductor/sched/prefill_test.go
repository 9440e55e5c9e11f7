package sched

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPolicies: A holds the prefix and has a queue of 2 s, B has one of 1 s, C of 1.5 s and a short prefix.
func TestPolicies(t *testing.T) {
	r := Request{ID: 1, Input: 4000, Matches: []Match{{Instance: 0, Tokens: 3000}, {Instance: 2, Tokens: 1000}}}
	for _, x := range []struct {
		policy Policy
		want   InstanceID
		ttft   time.Duration
	}{
		{LoadBalance, 1, ms(1000 + 4000)},
		{CacheAware, 0, ms(2000 + 1000)},
		{KVCacheCentric, 1, ms(1000 + 600 + 1000)},
	} {
		s := newScheduler(t, Config{Policy: x.policy})
		cluster(t, s, 3, 1)
		for i, q := range []int{2000, 1000, 1500} {
			s.Report(0, InstanceID(i), Report{Queue: ms(q), Batch: -1})
		}
		d := s.Schedule(0, &r)
		assert.Equal(t, x.want, d.Prefill, x.policy)
		assert.Equal(t, x.ttft, d.TTFT, x.policy)
		assert.Equal(t, d.TTFT, d.Queue+d.Transfer+d.Execution)
	}
}

func TestRandomTakesAllAlike(t *testing.T) {
	s := newScheduler(t, Config{Policy: Random, Seed: 5})
	cluster(t, s, 4, 1)
	var counts [4]int
	for i := range 4000 {
		d := s.Schedule(0, &Request{ID: uint64(i), Input: 1, Matches: []Match{{Instance: 2, Tokens: 1}}})
		counts[d.Prefill]++
	}
	for _, n := range counts {
		assert.InDelta(t, 1000, n, 120, "four standard deviations")
	}
}

// The queue grows by what is accepted, shrinks with the clock by what the first one has run, and loses what is done, however
// long it was predicted to take.
func TestQueue(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	queue := func(now int) int {
		return int(s.instances[0].queue.waiting(ms(now), s.pipeline).Milliseconds())
	}
	for i := range 3 {
		d := s.Schedule(0, &Request{ID: uint64(i), Input: 1000})
		assert.Equal(t, ms(1000*i), d.Queue)
	}
	assert.Equal(t, 3000, queue(0))
	assert.Equal(t, 2400, queue(600))
	assert.Equal(t, 2000, queue(1700), "the first takes longer than predicted: the others still wait")
	s.PrefillDone(ms(1800), 0, ms(1000), -1)
	assert.Equal(t, 2000, queue(1800))
	assert.Equal(t, 1500, queue(2300))
	s.Forget(ms(2300), 2)
	assert.Equal(t, 500, queue(2300), "one that waited is gone")
	s.PrefillDone(ms(2400), 1, ms(1000), -1)
	assert.Equal(t, 0, queue(2400), "done sooner than predicted")
}

// An instance's own figure stands in for what was guessed. What others have sent there passes with time.
func TestReportedQueue(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	queue := func(now int) int {
		return int(s.instances[0].queue.waiting(ms(now), s.pipeline).Milliseconds())
	}
	s.Schedule(0, &Request{ID: 1, Input: 1000})
	s.Report(ms(100), 0, Report{Queue: ms(3000), Batch: -1})
	assert.Equal(t, 3000, queue(100))
	s.Report(ms(200), 0, Report{Queue: ms(100), Batch: -1})
	assert.Equal(t, 100, queue(200))
	s.PrefillDone(ms(300), 1, 0, -1)
	assert.Equal(t, 0, queue(300))
	s.Report(ms(400), 0, Report{Queue: ms(1000), Batch: -1})
	assert.Equal(t, 400, queue(1000))
	assert.Equal(t, 0, queue(2000))
	s.Schedule(ms(2000), &Request{ID: 2, Input: 1000})
	assert.Equal(t, 1000, queue(2000))
}

// In a pipeline of 4 nodes a prompt of 8000 tokens goes through in chunks of 1000: after 8 + 3 parts of 250 ms each; the next one
// can begin when the first node has done its 8.
func TestPipeline(t *testing.T) {
	s := newScheduler(t, Config{PipelineGroupSize: 4, PrefillChunk: 1000})
	cluster(t, s, 1, 1)
	d := s.Schedule(0, &Request{ID: 1, Input: 8000})
	assert.Equal(t, ms(11*250), d.Execution)
	d = s.Schedule(0, &Request{ID: 2, Input: 8000})
	assert.Equal(t, ms(8*250), d.Queue)
	d = s.Schedule(ms(2500), &Request{ID: 3, Input: 1000})
	assert.Equal(t, ms(1500), d.Queue, "the second began at 2000 ms")
	assert.Equal(t, ms(4*250), d.Execution, "one chunk gains nothing")
	s.PrefillDone(ms(2750), 1, 0, -1)
	d = s.Schedule(ms(3000), &Request{ID: 4, Input: 1000})
	assert.Equal(t, ms(1000+250), d.Queue)
}

func TestTransfersShareNICs(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 3, 1)
	s.Report(0, 0, Report{Queue: time.Minute, Batch: -1})
	r := Request{ID: 1, Input: 10_000, Matches: []Match{{Instance: 0, Tokens: 9000}}}
	first := s.Schedule(0, &r)
	assert.Equal(t, ms(1800), first.Transfer)
	r.ID = 2
	second := s.Schedule(0, &r)
	assert.NotEqual(t, first.Prefill, second.Prefill)
	assert.Equal(t, ms(3600), second.Transfer, "instance 0 is still sending the first")
	r.ID = 3
	third := s.Schedule(ms(3000), &r)
	assert.Equal(t, ms(600+1800), third.Transfer, "of 3600 ms 600 are left")
}

func TestLayerWiseHidesTheLesser(t *testing.T) {
	for _, x := range []struct {
		held, transfer, ttft int // tokens, ms
	}{
		{5000, 0, 5000},         // loading 1000 ms, computing 5000 ms
		{9000, 800, 1000 + 800}, // loading 1800 ms, computing 1000 ms
	} {
		s := newScheduler(t, Config{LayerWise: true})
		cluster(t, s, 2, 1)
		s.Report(0, 0, Report{Queue: time.Minute, Batch: -1})
		d := s.Schedule(0, &Request{ID: 1, Input: 10_000, Matches: []Match{{Instance: 0, Tokens: x.held}}})
		assert.Equal(t, ms(x.transfer), d.Transfer)
		assert.Equal(t, ms(x.ttft), d.TTFT)
		assert.Equal(t, d.TTFT, d.Queue+d.Transfer+d.Execution)
	}
}

// The pool competes with the peer that holds the longest prefix and with computing.
func TestPool(t *testing.T) {
	for _, x := range []struct {
		name          string
		pool, peer    int
		poolBandwidth float64
		from          InstanceID
		prefix        int
	}{
		{"only the pool has it", 3000, 0, 0, FromPool, 3000},
		{"the pool has more", 3000, 1000, 0, FromPool, 3000},
		{"the peer has more", 1000, 3000, 0, 1, 3000},
		{"as much, and the pool is slow", 3000, 3000, 1e6, 1, 3000},
		{"computing is quicker", 3000, 0, 0.5e6, NoInstance, 0},
	} {
		for _, v := range []Variant{FAST25, ArXiv} {
			s := newScheduler(t, Config{Variant: v, PoolBandwidth: x.poolBandwidth})
			cluster(t, s, 2, 1)
			s.Report(0, 1, Report{Queue: time.Minute, Batch: -1})
			d := s.Schedule(0, &Request{ID: 1, Input: 4000, Pool: x.pool, Matches: []Match{{Instance: 1, Tokens: x.peer}}})
			assert.Equal(t, x.from, d.TransferFrom, "%s, %s", x.name, v)
			assert.Equal(t, x.prefix, d.PrefixLen, "%s, %s", x.name, v)
		}
	}
}

// A prefix that will be evicted while the request waits is not counted on: it goes from its end, evenly, by blocks.
func TestPrefixesThatDoNotLast(t *testing.T) {
	for _, x := range []struct {
		lasting, queue time.Duration
		prefix         int
	}{
		{0, 10 * time.Second, 4096},
		{10 * time.Second, 0, 4096},
		{10 * time.Second, 5 * time.Second, 2048},
		{10 * time.Second, 6 * time.Second, 1536}, // 1638, down to a block
		{10 * time.Second, 11 * time.Second, 0},
	} {
		s := newScheduler(t, Config{Policy: CacheAware})
		cluster(t, s, 1, 1)
		s.Report(0, 0, Report{Queue: x.queue, Batch: -1})
		d := s.Schedule(0, &Request{ID: 1, Input: 8000, Matches: []Match{{Instance: 0, Tokens: 4096, Lasting: x.lasting}}})
		assert.Equal(t, x.prefix, d.PrefixLen, "%v after %v", x.lasting, x.queue)
	}
}

// Of two peers the one is asked whose prefix outlasts the transfer.
func TestBestMatchOutlastsItsTransfer(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 3, 1)
	for i := range 2 {
		s.Report(0, InstanceID(i), Report{Queue: time.Minute, Batch: -1})
	}
	d := s.Schedule(0, &Request{ID: 1, Input: 10_000, Matches: []Match{
		{Instance: 0, Tokens: 8000, Lasting: time.Second}, // its transfer takes 1.6 s
		{Instance: 1, Tokens: 6000},
	}})
	assert.Equal(t, InstanceID(2), d.Prefill)
	assert.Equal(t, InstanceID(1), d.TransferFrom)
	assert.Equal(t, 6000, d.PrefixLen)
}

func TestMatchesThatCannotBe(t *testing.T) {
	s := newScheduler(t, Config{})
	cluster(t, s, 1, 1)
	d := s.Schedule(0, &Request{ID: 1, Input: 100, Pool: -5, Matches: []Match{
		{Instance: -7, Tokens: 50}, {Instance: 99, Tokens: 50}, {Instance: 1, Tokens: 50}, {Instance: 0, Tokens: 1 << 40, Lasting: -1},
	}})
	require.True(t, d.Accepted)
	assert.Equal(t, 100, d.PrefixLen, "no more than the prompt, and nothing of decode instances or unknown ones")
}
