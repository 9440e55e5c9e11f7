// Package workload measures eviction policies by their hit ratios: it reads
// traces, changes them, generates others from a seed, plays them against a
// policy without a machine at millions of accesses a second, and works out what
// the best possible policy would hit.
//
// It is for judging policies and not a part of the server.
package workload

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
)

// Request is one request of an engine: the blocks of its prompt in order, each
// the continuation of the one before. The lengths, in tokens, are 0 where only
// blocks matter.
type Request struct {
	TimeMS uint64   `json:"timestamp"`
	Input  int      `json:"input_length,omitempty"`
	Output int      `json:"output_length,omitempty"`
	Blocks []uint32 `json:"hash_ids"`
}

// Trace is a sequence of requests. Blocks are small numbers.
type Trace []Request

// maxLine bounds a line of a trace file.
const maxLine = 1 << 24

// Read reads a trace in the published format: a JSON object a line.
func Read(r io.Reader) (Trace, error) {
	var t Trace
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var q Request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return nil, fmt.Errorf("workload: line %d: %w", len(t)+1, err)
		}
		t = append(t, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("workload: after line %d: %w", len(t), err)
	}
	return t, nil
}

// Accesses counts the blocks of all requests.
func (t Trace) Accesses() (n int) {
	for _, q := range t {
		n += len(q.Blocks)
	}
	return n
}

// Distinct counts the blocks that occur.
func (t Trace) Distinct() (n int) {
	seen := make([]bool, t.end())
	for _, q := range t {
		for _, b := range q.Blocks {
			if !seen[b] {
				seen[b] = true
				n++
			}
		}
	}
	return n
}

// end is above every block.
func (t Trace) end() int {
	end := 0
	for _, q := range t {
		for _, b := range q.Blocks {
			end = max(end, int(b)+1)
		}
	}
	return end
}

// Halves splits a trace in the middle of its requests.
func (t Trace) Halves() (first, second Trace) { return t[:len(t)/2], t[len(t)/2:] }

// Drop leaves out each request with a chance of share.
func (t Trace) Drop(share float64, seed uint64) Trace {
	rng := newRand(seed, 1)
	return slices.DeleteFunc(slices.Clone(t), func(Request) bool { return rng.Float64() < share })
}

// Keep keeps a share of the conversations: the requests whose second block (the
// first is often the same for all) falls into it.
func (t Trace) Keep(share float64, seed uint64) Trace {
	return slices.DeleteFunc(slices.Clone(t), func(q Request) bool {
		rng := newRand(seed, uint64(q.Blocks[min(1, len(q.Blocks)-1)]))
		return rng.Float64() >= share
	})
}

// Cut leaves out each block with a chance of share, wherever it occurs.
func (t Trace) Cut(share float64, seed uint64) Trace {
	gone := func(b uint32) bool { return newRand(seed, uint64(b)).Float64() < share }
	out := make(Trace, 0, len(t))
	for _, q := range t {
		q.Blocks = slices.DeleteFunc(slices.Clone(q.Blocks), gone)
		if len(q.Blocks) > 0 {
			out = append(out, q)
		}
	}
	return out
}

// Jitter moves each request by up to ms milliseconds either way, and so changes
// which come between two others.
func (t Trace) Jitter(ms, seed uint64) Trace {
	rng := newRand(seed, 2)
	out := slices.Clone(t)
	for i := range out {
		out[i].TimeMS += rng.Uint64N(2*ms + 1)
	}
	slices.SortStableFunc(out, func(a, b Request) int { return int(int64(a.TimeMS) - int64(b.TimeMS)) }) //nolint:gosec // small
	return out
}

// Merge is the requests of several traces by time, their blocks kept apart.
func Merge(traces ...Trace) Trace {
	var out Trace
	base := uint32(0)
	for _, t := range traces {
		for _, q := range t {
			q.Blocks = shifted(q.Blocks, base)
			out = append(out, q)
		}
		base += uint32(t.end()) //nolint:gosec // blocks are small numbers
	}
	slices.SortStableFunc(out, func(a, b Request) int { return int(int64(a.TimeMS) - int64(b.TimeMS)) }) //nolint:gosec // small
	return out
}

// Chain is traces one after the other, their blocks kept apart.
func Chain(traces ...Trace) Trace {
	var out Trace
	base, start := uint32(0), uint64(0)
	for _, t := range traces {
		last := uint64(0)
		for _, q := range t {
			last = max(last, q.TimeMS)
			q.TimeMS, q.Blocks = start+q.TimeMS, shifted(q.Blocks, base)
			out = append(out, q)
		}
		base += uint32(t.end()) //nolint:gosec // blocks are small numbers
		start += last
	}
	return out
}

func shifted(blocks []uint32, by uint32) []uint32 {
	out := make([]uint32, len(blocks))
	for i, b := range blocks {
		out[i] = b + by
	}
	return out
}

// newRand makes the same numbers for the same seed.
func newRand(seed, stream uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, stream)) //nolint:gosec // repeatable, and nobody's secret
}
