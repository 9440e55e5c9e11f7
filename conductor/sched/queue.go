package sched

import (
	"slices"
	"time"
)

// queue is the prefills that an instance has before it, in their order, and how long they are predicted to keep it busy.
type queue struct {
	entries []queued
	head    int           // of those that are not done
	base    queued        // what came before the head
	began   time.Duration // when the head did
	// other is what a report said beyond what is known here. What others have sent passes with time; too much that was
	// thought to wait is corrected until nothing does.
	other   time.Duration
	otherAt time.Duration
}

// queued is a prefill. Times and tokens are sums over all from the queue's beginning up to it, so that what lies between any
// two is known at once.
type queued struct {
	slot   int32
	end    time.Duration
	tokens int64
}

func (q *queue) len() int { return len(q.entries) - q.head }

// ran is how much of the queue is through at a time. A single node begins a prefill when the one before is done, however
// long that takes; the first stage of a pipeline begins it when it has passed the one before on.
func (q *queue) ran(now time.Duration, pipeline bool) time.Duration {
	if q.len() == 0 {
		return 0
	}
	last := q.head
	if pipeline {
		last = len(q.entries) - 1
	}
	return min(now-q.began, q.entries[last].end-q.base.end)
}

// waiting is T_queue, how long a prefill would wait that is added now.
func (q *queue) waiting(now time.Duration, pipeline bool) time.Duration {
	other := q.other
	if other > 0 {
		other = max(0, other-(now-q.otherAt))
	}
	if q.len() == 0 {
		return max(0, other)
	}
	return max(0, q.entries[len(q.entries)-1].end-q.base.end-q.ran(now, pipeline)+other)
}

// push adds a prefill.
func (q *queue) push(slot int32, now, busy time.Duration, tokens int, pipeline bool) {
	last := q.base
	if q.len() > 0 {
		last = q.entries[len(q.entries)-1]
		if pipeline {
			q.began = max(q.began, now-(last.end-q.base.end)) // it may have stood still
		}
	} else {
		q.began = now
		q.other = max(0, q.other)
	}
	q.entries = append(q.entries, queued{slot, last.end + busy, last.tokens + int64(tokens)})
}

// remove takes out a prefill that is done, or will not be.
func (q *queue) remove(slot int32, now time.Duration, pipeline bool) {
	at := q.head + slices.IndexFunc(q.entries[q.head:], func(e queued) bool { return e.slot == slot })
	if at < q.head {
		return
	}
	if at == q.head {
		took := q.entries[at].end - q.base.end
		q.base = q.entries[at]
		q.head++
		if q.began += took; !pipeline || q.began > now {
			q.began = now
		}
	} else {
		before := q.entries[at-1]
		busy, tokens := q.entries[at].end-before.end, q.entries[at].tokens-before.tokens
		q.entries = slices.Delete(q.entries, at, at+1)
		for i := at; i < len(q.entries); i++ {
			q.entries[i].end -= busy
			q.entries[i].tokens -= tokens
		}
	}
	switch {
	case q.len() == 0:
		q.entries, q.head, q.base, q.other = q.entries[:0], 0, queued{}, max(0, q.other)
	case q.head > len(q.entries)/2:
		q.entries, q.head = q.entries[:copy(q.entries, q.entries[q.head:])], 0
	}
}

// finishing is how many of the prefills will be through by a time, and the tokens of their prompts.
func (q *queue) finishing(now, by time.Duration, pipeline bool) (n int, tokens int64) {
	if q.len() == 0 || by < now {
		return 0, 0
	}
	end := q.base.end + q.ran(now, pipeline) + by - now
	live := q.entries[q.head:]
	for lo, hi := 0, len(live); lo < hi; {
		if mid := (lo + hi) / 2; live[mid].end <= end {
			lo = mid + 1
			n = lo
		} else {
			hi = mid
		}
	}
	if n > 0 {
		tokens = live[n-1].tokens - q.base.tokens
	}
	return n, tokens
}

// report takes note of how long an instance itself says that its queue is.
func (q *queue) report(now, waiting time.Duration, pipeline bool) {
	q.other = 0
	q.other, q.otherAt = waiting-q.waiting(now, pipeline), now
}
