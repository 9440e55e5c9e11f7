package sched

import "time"

// phase is how far a request has come.
type phase uint8

const (
	free       phase = iota // the slot is of no request
	prefilling              // in the queue of its prefill instance, or computed
	prefilled               // between that and decoding
	decoded                 // in the batch of its decode instance
)

// remembered is an accepted request.
type remembered struct {
	id              uint64
	phase           phase
	class           int32
	priority        int
	input, prefix   int // tokens of the prompt, and those of them that are not computed
	output          int // hint
	prefill, decode InstanceID
	kv              float64       // bytes of the prompt's
	deadline        time.Duration // when it is forgotten or presumed to go on
	heap            int           // its place in the heap of deadlines
	at              int           // its place among the sequences of its decode instance, or those to come there
	ages            *ages         // what counts it while it is decoded
	bucket          int64

	// Of the transfer that the prefill waits for, 0 without one; sharing says that it had to wait for others.
	bytes, bandwidth float64
	sharing          bool
}

// book is the requests that are remembered, and a heap of their deadlines.
type book struct {
	slots []remembered
	spare []int32 // free slots
	by    map[uint64]int32
	heap  []int32 // slots, the next deadline first; the lesser slot of two
}

func (b *book) find(id uint64) int32 {
	if slot, ok := b.by[id]; ok {
		return slot
	}
	return -1
}

// add remembers a request.
func (b *book) add(r remembered) int32 {
	var slot int32
	if n := len(b.spare); n > 0 {
		slot, b.spare = b.spare[n-1], b.spare[:n-1]
	} else {
		slot = int32(len(b.slots)) //nolint:gosec // bounded by MaxRequests
		b.slots = append(b.slots, remembered{})
	}
	r.heap = len(b.heap)
	b.slots[slot] = r
	b.by[r.id] = slot
	b.heap = append(b.heap, slot)
	b.fix(r.heap)
	return slot
}

// remove forgets one.
func (b *book) remove(slot int32) {
	at, last := b.slots[slot].heap, len(b.heap)-1
	b.swap(at, last)
	b.heap = b.heap[:last]
	if at < last {
		b.fix(at)
	}
	delete(b.by, b.slots[slot].id)
	b.slots[slot] = remembered{}
	b.spare = append(b.spare, slot)
}

// postpone moves a deadline.
func (b *book) postpone(slot int32, deadline time.Duration) {
	b.slots[slot].deadline = deadline
	b.fix(b.slots[slot].heap)
}

// due is a request whose deadline has come; -1 if there is none.
func (b *book) due(now time.Duration) int32 {
	if len(b.heap) == 0 || b.slots[b.heap[0]].deadline > now {
		return -1
	}
	return b.heap[0]
}

func (b *book) before(i, j int) bool {
	x, y := b.heap[i], b.heap[j]
	if d, e := b.slots[x].deadline, b.slots[y].deadline; d != e {
		return d < e
	}
	return x < y
}

func (b *book) swap(i, j int) {
	b.heap[i], b.heap[j] = b.heap[j], b.heap[i]
	b.slots[b.heap[i]].heap, b.slots[b.heap[j]].heap = i, j
}

// fix puts the entry at i where it belongs.
func (b *book) fix(i int) {
	for i > 0 && b.before(i, (i-1)/2) {
		b.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(b.heap); child++ {
			if b.before(child, least) {
				least = child
			}
		}
		if least == i {
			return
		}
		b.swap(i, least)
		i = least
	}
}

// sequence is what predictions look at of a request, side by side with those of the same instance.
type sequence struct {
	slot          int32
	class         int32
	input, output int32         // tokens: of the prompt, and the hint
	at            time.Duration // when it is predicted to be prefilled; once it is decoded, when that began
	steps         int64         // of its instance when that began
}

// list and unlist add a request to the sequences of an instance, and take it out.
func (b *book) list(list []sequence, slot int32, at time.Duration, steps int64) []sequence {
	r := &b.slots[slot]
	r.at = len(list)
	return append(list, sequence{slot, r.class, int32(r.input), int32(r.output), at, steps}) //nolint:gosec // bounded by maxInput
}

func (b *book) unlist(list []sequence, slot int32) ([]sequence, sequence) {
	at, last := b.slots[slot].at, len(list)-1
	x := list[at]
	list[at] = list[last]
	b.slots[list[at].slot].at = at
	return list[:last], x
}
