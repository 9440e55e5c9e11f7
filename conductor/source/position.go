package source

import "math"

// position is up to where a source is known. Only the source's goroutine changes it, while the manager is not frozen.
type position struct {
	known bool   // what follows holds; else whatever comes first is taken
	next  uint64 // the number of the batch that is due
	sum   uint64 // XXH3-64 of the payload of the one before

	// Of the present connection: batches below heard have come by it, those from replayed on by a replay since it was made.
	heard    uint64
	replayed uint64
}

// verdict is what a batch's number says.
type verdict uint8

const (
	due      verdict = iota
	repeated         // a replay has had it before
	gap              // others are missing before it
	restart          // the engine has begun anew
)

// judge says what to do with a batch that comes by the subscription.
func (p *position) judge(seq, sum uint64) verdict {
	switch {
	case !p.known || seq == p.next:
		return due
	case seq > p.next:
		return gap
	case seq < p.heard || seq < p.replayed || seq == p.next-1 && sum != p.sum:
		return restart
	}
	return repeated
}

// begin begins a connection, or what another process says by the same one.
func (p *position) begin() { p.heard, p.replayed = 0, math.MaxUint64 }

// passed takes note that a batch has been applied.
func (p *position) passed(seq, sum uint64) { p.known, p.next, p.sum = true, seq+1, sum }

// forget forgets where the source was.
func (p *position) forget() { p.known, p.next, p.sum = false, 0, 0 }

// sequence is the number of the last batch; -1 if there is none.
func (p *position) sequence() int64 {
	if !p.known {
		return -1
	}
	return int64(p.next) - 1 //nolint:gosec // as many batches never are
}
