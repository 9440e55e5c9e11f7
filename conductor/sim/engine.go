package sim

import "time"

// kind is what happens at an event.
type kind uint8

const (
	prefillFree kind = iota // a prefill instance's first stage can take the next prompt
	prefillDone             // a prompt has left the last stage
	flowDone                // a transfer has arrived
	loadDone                // a KV cache has been loaded to the GPUs of a decode instance
	stepDone                // a run of steps of a batch ends
	sampleDue
	reportDue
)

// event is something that will happen. It is out of date, and ignored, if the generation of what it is of has changed.
type event struct {
	at   time.Duration
	seq  uint64 // events of the same time happen in the order in which they were planned
	who  int32  // instance, flow or request
	gen  uint32
	kind kind
}

// events is a heap of events, the next one first. A container/heap would allocate for each.
type events struct {
	heap []event
	seq  uint64
}

func (a *event) before(b *event) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

// add plans an event.
func (q *events) add(at time.Duration, k kind, who int32, gen uint32) {
	q.seq++
	q.heap = append(q.heap, event{at, q.seq, who, gen, k})
	h := q.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

// next takes out the next event; there has to be one.
func (q *events) next() event {
	h := q.heap
	first, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	q.heap = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			return first
		}
		if down+1 < last && h[down+1].before(&h[down]) {
			down++
		}
		if !h[down].before(&h[i]) {
			return first
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
}
